"""The control network between one engine and the scheduler: streams that take time and break.

Owns: how items travel, what is lost when a stream breaks, and the engine's end of reconnecting.
Must not know: what an item means.

A stream keeps its order, as gRPC does; whatever was on it when it broke is lost, on each side up
to a point of its own, and each side learns of the break at a time of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol, TypeVar

import attrs

from engine.simulator_clock import Clock
from transport.fleet_client import BACKOFF_SECONDS_FIRST, BACKOFF_SECONDS_MAX
from transport.fleet_streams import OUTBOX_MAX, Link
from transport.mailbox import Mailbox
from transport.pb import fleet_pb2 as pb

T = TypeVar("T")
MILLISECOND = 1_000_000


class OpenMailbox(Mailbox[T]):
    """A mailbox that calls when something is put in, and is emptied without waiting."""

    def __init__(self, limit: int, on_change: Callable[[], None]) -> None:
        super().__init__(limit)
        self._on_change = on_change

    def put(self, item: T, weight: int = 1) -> bool:
        """As the base class says."""
        taken = super().put(item, weight)
        self._on_change()
        return taken

    def close(self, last: T | None = None) -> None:
        """As the base class says."""
        super().close(last)
        self._on_change()

    def drain(self) -> list[T]:
        """Everything that waits."""
        taken = [item for item, _ in self._items]
        self._items.clear()
        self.waiting = 0
        return taken


@attrs.define
class Network:
    """How long messages take: at most `delay_ns`; and the chance that one is heard twice."""

    clock: Clock
    chance: Random
    delay_ns: int = 3 * MILLISECOND
    repeat: float = 0.0

    def draw_ns(self) -> int:
        """How long one message takes."""
        return self.chance.randrange(1, self.delay_ns + 1)


class Door(Protocol):
    """The scheduler's end, which may be gone."""

    def open(self, link: Link, hello: pb.Hello) -> bool:
        """Let a stream in; False when nobody is there."""
        ...

    def items(self, link: Link, items: tuple[pb.EngineItem, ...]) -> None:
        """Hear an engine."""
        ...

    def gone(self, link: Link) -> None:
        """A stream has ended."""
        ...


class Stream:
    """One stream from its hello to its end."""

    def __init__(
        self,
        network: Network,
        door: Door,
        *,
        hear: Callable[[tuple[pb.SchedulerItem, ...]], None],
        ended: Callable[[str], None],
    ) -> None:
        self.network = network
        self.door = door
        self.broken = False
        self.link = Link(outbox=OpenMailbox(OUTBOX_MAX, self._pump))
        self._hear = hear
        self._ended = ended
        self._up_ns = 0
        self._down_ns = 0
        self._closing = False

    def open(self, hello: pb.Hello) -> None:
        """Send the first item."""
        self._send(partial(self._open, hello))

    def send(self, item: pb.EngineItem) -> None:
        """Send an item to the scheduler."""
        if not self.broken:
            self._send(partial(self._arrive, item))

    @property
    def empty(self) -> bool:
        """Whether nothing is on its way, in either direction."""
        return max(self._up_ns, self._down_ns) < self.network.clock.now_ns

    def cut(self, reason: str) -> None:
        """The stream breaks with all that is on it."""
        if self.broken:
            return
        self.broken = True
        clock, network = self.network.clock, self.network
        clock.after(network.draw_ns(), partial(self._ended, reason))
        clock.after(network.draw_ns(), partial(self.door.gone, self.link))

    def _send(self, call: Callable[[], None]) -> None:
        now = self.network.clock.now_ns
        self._up_ns = max(self._up_ns, now + self.network.draw_ns())
        self.network.clock.at(self._up_ns, call)

    def _open(self, hello: pb.Hello) -> None:
        if not self.broken and not self.door.open(self.link, hello):
            self.broken = True
            self.network.clock.after(self.network.draw_ns(), partial(self._ended, "nobody there"))

    def _arrive(self, item: pb.EngineItem) -> None:
        if self.broken:
            return
        self.door.items(self.link, (item,))
        twice = self.network.repeat and self.network.chance.random() < self.network.repeat
        if twice and item.WhichOneof("item") in {"proposal", "tokens"}:
            self.door.items(self.link, (item,))

    def _pump(self) -> None:
        """Take what the scheduler put into the outbox on its way."""
        outbox = self.link.outbox
        assert isinstance(outbox, OpenMailbox), "it was made above"
        items = tuple(outbox.drain())
        if self.broken or self._closing:
            return
        now = self.network.clock.now_ns
        self._down_ns = max(self._down_ns, now + self.network.draw_ns())
        if items:
            self.network.clock.at(self._down_ns, partial(self._deliver, items))
        if outbox.closed:
            self._closing = True
            self.network.clock.at(self._down_ns, self._close)

    def _deliver(self, items: tuple[pb.SchedulerItem, ...]) -> None:
        if not self.broken:
            self._hear(items)

    def _close(self) -> None:
        if not self.broken:
            self.broken = True
            self._ended("the scheduler ended the stream")
            self.door.gone(self.link)


class Control:
    """An engine's client: what `FleetClient` is to a shell, over simulated streams."""

    def __init__(
        self,
        network: Network,
        door: Door,
        *,
        hello: Callable[[], pb.Hello],
        hear: Callable[[tuple[pb.SchedulerItem, ...]], None],
        broken: Callable[[str], None],
    ) -> None:
        self.welcomed = False
        self.backoff_seconds_max = BACKOFF_SECONDS_MAX
        self.parted = False
        self.ended = False
        self._network = network
        self._door = door
        self._hello = hello
        self._hear = hear
        self._broken = broken
        self._stream: Stream | None = None
        self._heard = False
        self._backoff = BACKOFF_SECONDS_FIRST

    def connect(self) -> None:
        """Begin a stream, unless the life is over."""
        if self.ended:
            return
        stream = Stream(self._network, self._door, hear=self._take, ended=self._over)
        self._stream, self._heard = stream, False
        hello = self._hello()
        if self.parted:
            stream.cut("parted")
        else:
            stream.open(hello)

    @property
    def quiet(self) -> bool:
        """Whether it is connected, and nothing is on its way to or from the engine."""
        return self.welcomed and self._stream is not None and self._stream.empty

    def send(self, item: pb.EngineItem) -> None:
        """Put an item on the welcomed stream; without one it is dropped."""
        if self.welcomed and self._stream is not None:
            self._stream.send(item)

    def drop(self) -> None:
        """End the stream; the next one begins after the backoff."""
        self.welcomed = False
        if self._stream is not None:
            self._stream.cut("given up")

    def part(self, *, parted: bool) -> None:
        """Cut the engine off from the scheduler, or let it through again."""
        self.parted = parted
        if parted and self._stream is not None:
            self._stream.cut("parted")

    def end(self) -> None:
        """The life is over."""
        self.ended, self.welcomed = True, False
        if self._stream is not None:
            self._stream.cut("the engine is gone")

    def _take(self, items: tuple[pb.SchedulerItem, ...]) -> None:
        if not self.ended:
            self._heard = True
            self._hear(items)

    def _over(self, reason: str) -> None:
        if self.ended:
            return
        self.welcomed = False
        self._broken(reason)
        grown = BACKOFF_SECONDS_FIRST if self._heard else 2 * self._backoff
        self._backoff = min(grown, self.backoff_seconds_max)
        self._network.clock.after(int(self._backoff * 1e9), self.connect)
