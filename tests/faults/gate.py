"""What a harness puts into a part: stops on its way out, a plane that errs, a disk that refuses.

Owns: what is held, how a transfer goes wrong, what the disk says.
Must not know: moments, cells, or why it is asked.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from engine.dataplane import Answer, DataPlane, GrantKey, Peer, Ticket, Write
from lifecycle.events import Reserved
from tests.faults.relay import Relay
from tests.faults.wire import Message, Wire
from transport.engine_hooks import EngineHooks
from transport.engine_owner import NewTokens, Outgoing, Send
from transport.planes.segment import Bytes, copy_bytes
from transport.stores.disk import Disk

DISK_SECONDS_MAX = 60.0


def name_of(item: Outgoing) -> str:
    """What an item is called in a stop."""
    if isinstance(item, NewTokens):
        return "Tokens"
    kind = type(item.body).__name__
    if isinstance(item.body, Reserved):
        return f"{kind}:{item.body.purpose.value}"
    return kind


@attrs.define
class Stop:
    """Where to hold: the first item of these names of a request that is not to be ignored."""

    names: tuple[str, ...]
    beyond: int
    ignore: frozenset[str]

    def matches(self, item: Outgoing) -> bool:
        """Tokens are held from the one behind `beyond` of them."""
        if name_of(item) not in self.names or item.request in self.ignore:
            return False
        return not isinstance(item, NewTokens) or item.first + len(item.tokens) > self.beyond


class Gate(EngineHooks):
    """Holds everything that an engine says from a stop on, in order."""

    def __init__(self) -> None:
        self.wire: Wire
        self._stop: Stop | None = None
        self._holding = False
        self._held: deque[tuple[Outgoing, Send]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._plane: ErringPlane | None = None

    def obey(self, message: Message) -> None:
        """A command, in the wire's thread."""
        match message["command"]:
            case "stop":
                names, ignore = tuple(message["names"]), frozenset(message["ignore"])
                self._on_loop(self._arm, Stop(names, message["beyond"], ignore))
            case "release":
                self._on_loop(self._release)
            case command:
                assert self._plane is not None
                self._plane.obey(command, message)

    def saying(self, item: Outgoing, say: Send) -> None:
        """Hold from the stop on."""
        if not self._holding and self._stop is not None and self._stop.matches(item):
            self._holding = True
            self.wire.say({"reached": name_of(item), "request": item.request})
        if self._holding:
            self._held.append((item, say))
        else:
            say(item)

    def plane(self, plane: DataPlane) -> DataPlane:
        """Called when a life of the engine begins, and the loop runs."""
        self._loop = asyncio.get_running_loop()
        self._plane = ErringPlane(plane, self.wire.say)
        return self._plane

    def _on_loop(self, act: Callable[..., None], *arguments: Any) -> None:
        loop = self._loop
        if loop is None:
            # Nothing was said yet.
            act(*arguments)
            return
        done = threading.Event()

        def then() -> None:
            act(*arguments)
            done.set()

        loop.call_soon_threadsafe(then)
        done.wait()

    def _arm(self, stop: Stop) -> None:
        self._stop = stop

    def _release(self) -> None:
        self._stop, self._holding = None, False
        held, self._held = self._held, deque()
        for item, say in held:
            say(item)


@attrs.define
class _Spoiled:
    """A post that has not gone to the plane, or that went late."""

    peer: Peer
    writes: tuple[Write, ...]
    grant: GrantKey
    answer: Answer = Answer.IN_FLIGHT
    inner: Ticket | None = None


class ErringPlane:
    """A plane whose posts can be held half-way, fail, arrive late, or arrive changed.

    What it does not spoil is the real plane's; nothing here ever says DONE before the real one.
    """

    def __init__(self, plane: DataPlane, tell: Callable[[Message], None]) -> None:
        self._real = plane
        self._tell = tell
        self._posts = 0
        self._last: Ticket | None = None
        self._at = 0
        self._how = ""
        self._spoiled: dict[Ticket, _Spoiled] = {}
        self._behind: list[_Spoiled] | None = None
        self._lock = threading.Lock()
        self._go = threading.Event()
        self._go.set()
        self._half = self._cut = False
        self._relays: dict[str, Relay] = {}
        # Both planes take the copying as an argument; this one is put in afterwards.
        if hasattr(plane, "_segment"):
            plane._copy = self._copy  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def obey(self, command: str, message: Message) -> None:
        """A command, in the wire's thread."""
        match command:
            case "spoil":
                # hold: half of the bytes; fail, late, corrupt: as they say, when let go on.
                self._posts, self._at, self._how = 0, message["at"], message["how"]
                self._go.clear()
            case "go":
                self._how = ""
                self._go.set()
                for relay in self._relays.values():
                    relay.heal()
                self._wake()
            case "land":
                for spoiled in self._spoiled.values():
                    if spoiled.inner is None:
                        self._land(spoiled)
                self._wake()
            case "cut":
                self._cut = True
                for relay in self._relays.values():
                    relay.stall()
            case "mend":
                self._cut = False
                for relay in self._relays.values():
                    relay.heal(broken=True)
            case _:
                raise AssertionError(command)

    def _wake(self) -> None:
        self._real._book.wake()  # type: ignore[attr-defined]

    # --- the adapter's verbs ------------------------------------------------------------------

    def open_peer(self, descriptor: str) -> Peer:
        """Reach a peer over a network that can be cut, where there is one."""
        import json

        fields = json.loads(descriptor)
        if fields["plane"] == "grpc-stream":
            relay = self._relays.get(fields["endpoint"])
            if relay is None:
                relay = self._relays[fields["endpoint"]] = Relay(fields["endpoint"])
                if self._cut:
                    relay.stall()
            fields["endpoint"] = relay.address
            descriptor = json.dumps(fields)
        return self._real.open_peer(descriptor)

    def post(self, peer: Peer, writes: Sequence[Write], grant: GrantKey) -> Ticket:
        """Post, or hold and spoil the one that was asked for."""
        self._posts += 1
        with self._lock:
            due = bool(self._how) and self._posts == self._at
            if not due and self._behind is None:
                self._last = self._real.post(peer, writes, grant)
                return self._last
            how = self._how if due else "hold"
            self._how = "" if due else self._how
            if how == "hold" and not self._relays:
                self._half = True
                return self._real.post(peer, writes, grant)
            ticket = Ticket(serial=-self._posts, peer=peer, grant=grant, length=0)
            spoiled = self._spoiled[ticket] = _Spoiled(peer, tuple(writes), grant)
            if how != "hold":
                threading.Thread(target=self._spoil, args=(spoiled, how), daemon=True).start()
            elif self._behind is None:
                self._behind = [spoiled]
                threading.Thread(target=self._stall, args=(self._last,), daemon=True).start()
            else:
                self._behind.append(spoiled)
            return ticket

    def _stall(self, before: Ticket | None) -> None:
        """Send into a network that stands still, once what was sent before has been answered.

        What was posted meanwhile goes the same way: nothing overtakes.
        """
        pace = threading.Event()
        while before is not None and self._real.poll(before) is Answer.IN_FLIGHT:
            pace.wait(0.005)
        for relay in self._relays.values():
            relay.stall()
        with self._lock:
            behind, self._behind = self._behind or [], None
            for spoiled in behind:
                self._land(spoiled)
        self._tell({"reached": "post:hold"})

    def _spoil(self, spoiled: _Spoiled, how: str) -> None:
        self._tell({"reached": f"post:{how}", "grant": spoiled.grant})
        self._go.wait()
        if how == "fail":
            spoiled.answer = Answer.FAILED_QUIESCED
        elif how == "late":
            spoiled.answer = Answer.IN_DOUBT
        else:
            self._corrupt(spoiled.writes[0])
            self._land(spoiled)
        self._wake()

    def _corrupt(self, write: Write) -> None:
        staging = self._real._region  # type: ignore[attr-defined]
        staging[write.source_offset + write.length // 2] ^= 1

    def _land(self, spoiled: _Spoiled) -> None:
        spoiled.inner = self._real.post(spoiled.peer, spoiled.writes, spoiled.grant)

    def poll(self, ticket: Ticket) -> Answer:
        """A spoiled post's own answer, or the real one's once it has gone out."""
        spoiled = self._spoiled.get(ticket)
        if spoiled is None:
            return self._real.poll(ticket)
        if spoiled.inner is not None:
            return self._real.poll(spoiled.inner)
        return spoiled.answer

    def explain(self, ticket: Ticket) -> str:
        """Why."""
        spoiled = self._spoiled.get(ticket)
        if spoiled is None:
            return self._real.explain(ticket)
        return "spoiled" if spoiled.inner is None else self._real.explain(spoiled.inner)

    def inquire(self, ticket: Ticket) -> None:
        """A post that has not gone out cannot be asked about."""
        spoiled = self._spoiled.get(ticket)
        if spoiled is None:
            self._real.inquire(ticket)
        elif spoiled.inner is not None:
            self._real.inquire(spoiled.inner)

    def _copy(self, target: Bytes, source: Bytes) -> None:
        """In the writer's copying thread: the first half, and the rest when let go on."""
        if not self._half:
            copy_bytes(target, source)
            return
        self._half = False
        middle = target.size // 2
        copy_bytes(target[:middle], source[:middle])
        self._tell({"reached": "post:hold"})
        self._go.wait()
        copy_bytes(target[middle:], source[middle:])


class RefusingDisk(Disk):
    """A disk that is full, cannot be written, or takes its time, for as long as it is told to."""

    def __init__(self) -> None:
        self.wire: Wire
        self._error = 0
        self._slow = False
        self._told = False
        self._go = threading.Event()
        self._go.set()

    def obey(self, message: Message) -> None:
        """A command, in the wire's thread."""
        match message["command"]:
            case "full":
                self._error = errno.ENOSPC
            case "unwritable":
                self._error = errno.EIO
            case "slow":
                self._slow = True
                self._go.clear()
            case "mend":
                self._error, self._slow, self._told = 0, False, False
                self._go.set()
            case command:
                raise AssertionError(command)

    def write_at(self, handle: int, data: bytes | memoryview, *, offset: int) -> int:
        """Refuse whole."""
        self._refuse()
        return super().write_at(handle, data, offset=offset)

    def sync(self, handle: int) -> None:
        """Refuse, or take long."""
        if self._slow:
            self._say("slow")
            self._go.wait(DISK_SECONDS_MAX)
        elif self._error == errno.EIO:
            self._refuse()
        super().sync(handle)

    def _refuse(self) -> None:
        if self._error:
            self._say(errno.errorcode[self._error])
            raise OSError(self._error, os.strerror(self._error))

    def _say(self, what: str) -> None:
        if not self._told:
            self._told = True
            self.wire.say({"reached": what})
