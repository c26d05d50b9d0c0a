"""A data plane whose writes land late and piecemeal, and whose reports may lie.

Owns: what is in flight, when each piece of it lands, and what the writer is told.
Must not know: requests, the log; it compares landings with the owner's own books, as an oracle.

Two kinds are simulated, which differ in what the receiver can do.
Where the receiver places bytes, the real placement table decides over each piece, and a grant or
a party can be fenced. One-sided writes land wherever they were addressed, and only the observed
exit of the writer proves that none is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import attrs

from engine.dataplane import (
    Answer,
    Capabilities,
    CloseProof,
    Descriptor,
    FenceProof,
    FenceScope,
    GrantKey,
    ObservedExit,
    PartyKey,
    Peer,
    Span,
    Ticket,
    Write,
    check_writes,
)
from engine.dataplane import Region as Registered
from engine.dataplane_errors import PeerClosed, PeerMismatch
from engine.simulator_clock import Clock
from engine.world_values import Found
from transport.planes.placement import Fate, PlacementTable, TicketName
from transport.planes.tickets import TicketBook
from transport.simulated_memory import WORD, Region

PLANE_NAME = "simulated"
PIECES_MAX = 4
MICROSECOND = 1_000

Holder = Callable[[int], GrantKey | None]
"""Which grant the owner's own books give a page to."""


@attrs.frozen
class Weather:
    """How the plane treats writes: each is the chance of one write, times are upper bounds.

    doubt: the writer is told `IN_DOUBT` and the bytes go on; fail: some bytes never arrive;
    corrupt: a bit is flipped on the way; lie: `DONE` is reported before the last piece lands.
    """

    delay_ns: int = 200 * MICROSECOND
    slow_ns: int = 0
    doubt: float = 0.0
    fail: float = 0.0
    corrupt: float = 0.0
    lie: float = 0.0


@attrs.define(eq=False)
class Flight:
    """A posted write: its pieces that have not landed, and what is to be said of it."""

    writer: SimulatedPlane
    owner: SimulatedPlane
    ticket: Ticket
    name: TicketName
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
            flight.writer.book.settle(flight.ticket, Answer.DONE)
            return
        if self.placing:
            owner.table.give_up(flight.name)
        flight.writer.book.settle(flight.ticket, Answer.FAILED_QUIESCED, "it did not all arrive")

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


class SimulatedPlane:
    """The plane of one party; `region` is a pool that others write, or the writer's staging."""

    def __init__(
        self, wires: Wires, region: Region, *, party: PartyKey, wake: Callable[[], None]
    ) -> None:
        self.wires = wires
        self.region = region
        self.party = party
        self.dead = False
        self.holder: Holder | None = None
        self.book = TicketBook(wake)
        self.table = PlacementTable()
        self._links: dict[int, SimulatedPlane] = {}
        self._of: dict[Ticket, Flight] = {}
        self._closed: set[int] = set()
        self._gone: set[PartyKey] = set()
        self._posted = 0
        wires.owners[party] = self

    @property
    def capabilities(self) -> Capabilities:
        """What this kind promises."""
        scope = FenceScope.GRANT if self.wires.placing else FenceScope.PROCESS
        return Capabilities(
            name=PLANE_NAME, fence_scope=scope, receiver_places_bytes=self.wires.placing
        )

    def register(self, buffer: memoryview) -> Registered:
        """The region was given when the plane was made."""
        return Registered(length=len(buffer))

    def descriptor(self) -> str:
        """How others find this region; its key is none."""
        return Descriptor(
            plane=PLANE_NAME,
            endpoint="here",
            pool_bytes=len(self.region.bytes),
            incarnation=self.party,
            key="00",
        ).encode()

    def open_peer(self, descriptor: str) -> Peer:
        """Find the owner; one that is gone leads nowhere."""
        published = Descriptor.decode(descriptor, plane=PLANE_NAME)
        owner = self.wires.owners[published.incarnation]
        if owner.dead:
            raise PeerMismatch(endpoint="here", why="nobody is there")
        serial = len(self._links) + 1
        self._links[serial] = owner
        return Peer(
            serial=serial, incarnation=published.incarnation, pool_bytes=published.pool_bytes
        )

    def post(self, peer: Peer, writes: Sequence[Write], grant: GrantKey) -> Ticket:
        """Put a write on the wire, cut into pieces."""
        size = len(self.region.bytes)
        length = check_writes(writes, staging_bytes=size, pool_bytes=peer.pool_bytes)
        if peer.serial in self._closed:
            raise PeerClosed(f"peer {peer.incarnation} is closed")
        owner = self._links[peer.serial]
        ticket = self.book.open(peer=peer, grant=grant, length=length)
        self._posted += 1
        identity = f"{self.party}#{self._posted}".encode()
        name = TicketName(grant=grant, party=self.party, ticket=identity)
        if self.wires.placing:
            refusal = owner.table.admit(
                name, [Span(offset=w.target_offset, length=w.length) for w in writes]
            )
            if refusal is not None:
                self.book.settle(ticket, Answer.FAILED_QUIESCED, refusal.name)
                return ticket
        flight = Flight(self, owner, ticket, name, self._cut(writes))
        self._of[ticket] = flight
        self.wires.begin(flight)
        return ticket

    def _cut(self, writes: Sequence[Write]) -> list[Write]:
        """Pieces of whole words, at random borders, none over two pages."""
        pieces: list[Write] = []
        size, chance = self.region.layout.block_bytes, self.wires.chance
        for write in writes:
            for page in range(write.length // size):
                words = size // WORD
                cuts = sorted(chance.sample(range(1, words), chance.randrange(PIECES_MAX)))
                for first, stop in zip((0, *cuts), (*cuts, words), strict=True):
                    at = page * size + first * WORD
                    pieces.append(
                        Write(
                            source_offset=write.source_offset + at,
                            target_offset=write.target_offset + at,
                            length=(stop - first) * WORD,
                        )
                    )
        return pieces

    def poll(self, ticket: Ticket) -> Answer:
        """Where the ticket stands."""
        return self.book.answer(ticket)

    def explain(self, ticket: Ticket) -> str:
        """Why it failed or is in doubt."""
        return self.book.reason(ticket)

    def inquire(self, ticket: Ticket) -> None:
        """Ask again about a ticket in doubt."""
        flight = self._of.get(ticket)
        if flight is not None and self.book.answer(ticket) is Answer.IN_DOUBT:
            self.wires.inquire(flight)

    def expose(
        self, grant: GrantKey, *, spans: Sequence[Span], parties: Sequence[PartyKey]
    ) -> None:
        """Let these parties in."""
        size = len(self.region.bytes)
        self.table.expose(grant, spans=spans, parties=parties, pool_bytes=size)

    def fence(self, grant: GrantKey) -> FenceProof | None:
        """Refuse the grant for ever, where the receiver places the bytes."""
        if not self.wires.placing or not self.table.fence(grant):
            return None
        return FenceProof(scope=FenceScope.GRANT, grant=grant, parties=None, evidence="refused")

    def fence_party(
        self, party: PartyKey, observed: ObservedExit | None = None
    ) -> FenceProof | None:
        """Refuse the party for ever, or know that it is gone."""
        if observed is not None:
            self._gone.add(party)
        refused = self.wires.placing and self.table.fence_party(party)
        if not refused and party not in self._gone:
            return None
        scope = FenceScope.GRANT if refused else FenceScope.PROCESS
        return FenceProof(scope=scope, grant=None, parties=(party,), evidence="it cannot write")

    def retire(self, grant: GrantKey) -> None:
        """The exposure ends for ever."""
        self.table.fence(grant)

    def close(self, peer: Peer) -> CloseProof | None:
        """Post no more; proved once no ticket is in flight."""
        self._closed.add(peer.serial)
        reading = any(
            flight.writer is self and flight.ticket.peer is peer and flight.pieces
            for flight in self.wires.flights
        )
        return None if reading or self.book.in_flight(peer) else CloseProof(peer=peer)

    def shutdown(self) -> None:
        """The process ends."""
        self.wires.died(self)
