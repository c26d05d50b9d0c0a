"""The wires of a simulated run: what is in flight, when each piece lands, and what is told of it.

Owns: every flight, the weather, and the oracle that compares a landing with the owner's own books.
Must not know: requests, the log, and what a plane promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import attrs

from engine.dataplane import Answer, GrantKey, Span, Ticket, Write
from engine.simulator_clock import Clock
from engine.world_values import Found
from transport.planes.placement import Fate, TicketName

if TYPE_CHECKING:
    from transport.simulated_plane import SimulatedPlane

MICROSECOND = 1_000
ECHO_NS = 1_000_000 * MICROSECOND

Holder = Callable[[int], GrantKey | None]
"""Which grant the owner's own books give a page to."""


@attrs.frozen
class Weather:
    """How the plane treats writes: each is the chance of one write, times are upper bounds.

    doubt: the writer is told `IN_DOUBT` and the bytes go on; fail: some bytes never arrive;
    tear: both, and only an inquiry says so;
    corrupt: a bit is flipped on the way; lie: `DONE` is reported before the last piece lands;
    echo: what was reported `DONE`, and was so, lands once more within `ECHO_NS`.
    """

    delay_ns: int = 200 * MICROSECOND
    slow_ns: int = 0
    doubt: float = 0.0
    fail: float = 0.0
    tear: float = 0.0
    corrupt: float = 0.0
    lie: float = 0.0
    echo: float = 0.0


@attrs.define(eq=False)
class Flight:
    """A posted write: its pieces that have not landed, and what is to be said of it."""

    writer: SimulatedPlane
    owner: SimulatedPlane
    ticket: Ticket
    name: TicketName
    writes: tuple[Write, ...]
    pieces: list[Write]
    lost: int = 0
    corrupt: bool = False
    lie: bool = False
    captured: bytes | None = None
    over: bool = False


class Wires:
    """What all planes of a run share: the owners by name, the weather, every flight."""

    def __init__(self, clock: Clock, chance: Random, *, placing: bool) -> None:
        self.clock = clock
        self.chance = chance
        self.placing = placing
        self.weather = Weather()
        self.owners: dict[str, SimulatedPlane] = {}
        self.flights: list[Flight] = []
        self.reached: Counter[str] = Counter()

    def begin(self, flight: Flight) -> None:
        """Let the pieces of a write go, in any order, each at its own time."""
        chance, weather = self.chance, self.weather
        draw = chance.random()
        self.flights.append(flight)
        if draw >= weather.lie:
            # What has been called done and lands later lands in the order of its addresses: the
            # header comes first, and no other word of a page could show that it is foreign.
            chance.shuffle(flight.pieces)
        span = weather.delay_ns + (chance.randrange(weather.slow_ns) if weather.slow_ns else 0)
        times = sorted(chance.randrange(1, span + 1) for _ in flight.pieces)
        told = times[-1] + chance.randrange(1, weather.delay_ns + 1)
        for piece, time in zip(tuple(flight.pieces), times, strict=True):
            self.clock.after(time, partial(self._land, flight, piece))
        if draw < weather.lie:
            flight.lie = True
            told = chance.randrange(1, times[-1] + 1)
        elif draw < weather.lie + weather.corrupt:
            flight.corrupt = True
        elif draw < weather.lie + weather.corrupt + weather.fail:
            flight.lost = chance.randrange(1, len(flight.pieces) + 1)
        elif draw < weather.lie + weather.corrupt + weather.fail + weather.doubt:
            self.reached["doubted"] += 1
            doubt = chance.randrange(1, told + 1)
            self.clock.after(doubt, partial(self._doubt, flight))
            if chance.random() < 0.5:
                # The wire is silent about it until somebody asks.
                return
        elif draw < weather.lie + weather.corrupt + weather.fail + weather.doubt + weather.tear:
            self.reached["torn"] += 1
            flight.lost = chance.randrange(1, len(flight.pieces) + 1)
            self.clock.after(chance.randrange(1, told + 1), partial(self._doubt, flight))
            return
        self.clock.after(told, partial(self._tell, flight))

    def _doubt(self, flight: Flight) -> None:
        if not flight.writer.dead:
            flight.writer.book.settle(flight.ticket, Answer.IN_DOUBT, "the stream broke")

    def _land(self, flight: Flight, piece: Write) -> None:
        """One piece arrives, unless it was lost, fenced, or has nobody to arrive at."""
        if piece not in flight.pieces or flight.over:
            return
        flight.pieces.remove(piece)
        owner = flight.owner
        if owner.dead or len(flight.pieces) < flight.lost:
            return
        if self.placing:
            if owner.table.begin(flight.name, _extent(piece)) is not None:
                self.reached["refused-by-the-receiver"] += 1
                return
            owner.table.end(flight.name)
        source = flight.captured or flight.writer.region.bytes
        data = bytearray(source[piece.source_offset : piece.source_offset + piece.length])
        if flight.corrupt and not flight.pieces:
            self.reached["corrupted"] += 1
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        if flight.writer.dead:
            self.reached["landed-after-death"] += 1
        elif flight.writer.book.answer(flight.ticket) is Answer.IN_DOUBT:
            self.reached["landed-in-doubt"] += 1
        if not flight.lie and owner.holder is not None:
            self._judge(flight, piece, owner.holder)
        owner.region.bytes[piece.target_offset : piece.target_offset + piece.length] = data
        if not flight.pieces and flight.captured is not None:
            # Nobody is left to be told, or has been told already.
            flight.over = True
            self.flights.remove(flight)

    def _judge(self, flight: Flight, piece: Write, holder: Holder) -> None:
        size = flight.owner.region.layout.block_bytes
        page = piece.target_offset // size
        held = holder(page)
        if held != flight.ticket.grant:
            whose = "a free page" if held is None else f"a page of {held}"
            raise Found("late-write", f"a write for {flight.ticket.grant} lands on {whose}")

    def _tell(self, flight: Flight) -> None:
        """The writer hears what became of its write."""
        if flight.over or flight.writer.dead:
            return
        if flight.lie and flight.pieces:
            # It says DONE, and pieces are still on their way: only the headers are left to tell.
            self.reached["lied"] += 1
            flight.captured = bytes(flight.writer.region.bytes)
            flight.writer.book.settle(flight.ticket, Answer.DONE)
            return
        self._finish(flight)

    def _finish(self, flight: Flight) -> None:
        """Nothing of this write lands any more, and the writer is told whether all of it did."""
        if flight.over:
            return
        owner, whole = flight.owner, not flight.pieces and not flight.lost and not flight.owner.dead
        if self.placing and whole:
            whole = owner.table.complete(flight.name)
        flight.over = True
        self.flights.remove(flight)
        if whole:
            if self.weather.echo and self.chance.random() < self.weather.echo:
                self._echo(flight)
            flight.writer.book.settle(flight.ticket, Answer.DONE)
            return
        if self.placing:
            owner.table.give_up(flight.name)
        flight.writer.book.settle(flight.ticket, Answer.FAILED_QUIESCED, "it did not all arrive")

    def _echo(self, flight: Flight) -> None:
        """Have the write land once more, whole and at once: its pages' tags are left to tell."""
        source = flight.captured or flight.writer.region.bytes
        copies = tuple(
            (w, bytes(source[w.source_offset : w.source_offset + w.length])) for w in flight.writes
        )
        delay = self.chance.randrange(1, ECHO_NS)
        self.clock.after(delay, partial(self._land_again, flight, copies))

    def _land_again(self, flight: Flight, copies: tuple[tuple[Write, bytes], ...]) -> None:
        owner = flight.owner
        if owner.dead or (flight.writer.dead and not self.placing):
            return
        for write, data in copies:
            if self.placing and owner.table.begin(flight.name, _extent(write)) is not None:
                self.reached["refused-by-the-receiver"] += 1
                return
            self.reached["landed-again"] += 1
            owner.region.bytes[write.target_offset : write.target_offset + write.length] = data

    def inquire(self, flight: Flight) -> None:
        """Ask what became of a write: where the receiver places, that gives it up."""
        if flight.over:
            return
        if flight.owner.dead and not self.placing:
            return
        if self.placing and not flight.owner.dead:
            fate = flight.owner.table.settle(flight.name)
            if fate is Fate.PENDING:
                return
        elif flight.pieces:
            return
        self._finish(flight)

    def died(self, plane: SimulatedPlane) -> None:
        """A process is gone: what it had put on the wire may still arrive where bytes are sent.

        A write into shared memory is the writer's own copying, and ends with it.
        """
        plane.dead = True
        for flight in tuple(self.flights):
            if flight.writer is plane:
                flight.captured = bytes(plane.region.bytes)
                if not self.placing:
                    flight.over = True
                    self.flights.remove(flight)
                    flight.pieces.clear()
            elif flight.owner is plane:
                flight.pieces.clear()


def _extent(piece: Write) -> Span:
    return Span(offset=piece.target_offset, length=piece.length)
