"""A deployment whose parts have gates and whose networks have relays.

Owns: starting and replacing parts, waiting for what the log and the status say.
Must not know: faults and moments.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.store import Stored
from lifecycle.events import Attached, Event, Lost
from lifecycle.history import History
from lifecycle.replay import unbounded
from lifecycle.state import TERMINAL
from tests.faults.reddened import unnoticed
from tests.faults.relay import Relay
from tests.faults.wire import Remote, Switchboard
from tests.log_files import read_log
from tests.process_harness import (
    READY_SECONDS,
    STOP_SECONDS,
    collect,
    judged,
    pages_agree,
    text_request,
    wait_until,
)
from transport.child import Child
from transport.client import Client, Refused, Unreachable

ENGINES = ("prefill-0", "decode-0", "prefill-1", "decode-1")
PACE_SECONDS = 0.02
WAIT_SECONDS = 40.0
LEASE_SECONDS = 3.0
SETTLE_SECONDS = 2.0
PAGE_TOKENS = 16
PROGRAM = (sys.executable, "-P", "-m", "tests.faults.part")
SCHEDULER_FLAGS = (
    *("--port=0", f"--lease-seconds={LEASE_SECONDS}", f"--settle-seconds={SETTLE_SECONDS}"),
    # A log that cannot be written keeps a client waiting until its deadline.
    *("--request-seconds-max=12",),
)
ENGINE_FLAGS = (
    *("--kv-memory=1MiB", f"--page-tokens={PAGE_TOKENS}", "--threads=1"),
    # Few staging pages make a prompt several writes, whatever is computed meanwhile.
    *("--chunk-tokens=32", "--staging-pages=2"),
)


class Bench:
    """Used as a context manager; leaving it in order ends every part and replays the log.

    `rules_without_place` are then the rules for which the log had nothing to change; every other
    rule has turned a changed log red.
    """

    def __init__(
        self, folder: Path, model: Path, *, plane: str, engines: Sequence[str] = ENGINES
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.model = str(model)
        self.plane = plane
        self.names = tuple(engines)
        self.log = folder / "log"
        self.children: dict[str, Child] = {}
        self.relays = {name: Relay() for name in engines}
        self.doors: list[Relay] = []
        self._client: Client | None = None
        self.address = ""
        self.rules_without_place: list[str] = []
        self._history, self._read = History(), 0
        # A socket's path is short.
        self._short = tempfile.TemporaryDirectory(prefix="custody-faults-")
        self.board = Switchboard(Path(self._short.name) / "board")
        self._flags = (*ENGINE_FLAGS, f"--plane={plane}")

    def __enter__(self) -> Self:
        try:
            self.start_scheduler()
            self.start_engines(*self.names)
            self.wait_until("a first request is answered", self._serves, READY_SECONDS)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._end()
        finally:
            self.client.__exit__(kind, error, trace)
            self._kill()
            for relay in (*self.relays.values(), *self.doors):
                relay.close()
            self.board.close()
            self._short.cleanup()
            if error is not None:
                for child in self.children.values():
                    sys.stderr.write(f"--- {child.name}\n{child.said_errors()}\n")
        log = read_log(self.log)
        assert log.complete
        judged(list(log.entries), self.folder.name)
        blind, self.rules_without_place = unnoticed(log.entries)
        assert not blind, blind

    @property
    def client(self) -> Client:
        """A client of the scheduler's present life."""
        assert self._client is not None, "no scheduler was started"
        return self._client

    # --- parts --------------------------------------------------------------------------------

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        self.board.expect(name)
        program = (*PROGRAM, str(self.board.path))
        errors = self.folder / f"{name}.errors"
        self.children[name] = Child(name, [*arguments, "--json"], errors=errors, program=program)

    def start_scheduler(self) -> None:
        """A life of the scheduler, wherever it binds; engines reach it through their relays."""
        flags = (*SCHEDULER_FLAGS, "--model", self.model, "--log", str(self.log))
        self._start("scheduler", ("scheduler", *flags))
        scheduler = self.children["scheduler"]
        self.address = scheduler.wait_event("ready", timeout=READY_SECONDS)["address"]
        if self._client is not None:
            self._client.__exit__(None, None, None)
        self._client = Client(self.address)
        for relay in (*self.relays.values(), *self.doors):
            relay.target = self.address

    def _serves(self) -> bool:
        """Whether a request is answered: the first passes of an engine may take their time."""
        try:
            collect(self.client.generate(text_request("first", 2)))
        except Refused:
            return False
        return True

    def start_engines(self, *names: str) -> None:
        """New lives of these engines, up to date."""
        for name in names:
            role, address = name.split("-")[0], self.relays[name].address
            joined = (role, name, "--scheduler", address, "--model", self.model)
            self._start(name, (*joined, *self._flags))
        for name in names:
            self.children[name].wait_event("ready", timeout=READY_SECONDS)

    def gate(self, name: str) -> Remote:
        """The gate of a part."""
        return self.board.remote(name)

    def door(self) -> Relay:
        """A network of its own for one client."""
        relay = Relay(self.address)
        self.doors.append(relay)
        return relay

    def _end(self) -> None:
        for names in (self.names, ("scheduler",)):
            for name in names:
                self.children[name].signal(signal.SIGTERM)
            for name in names:
                code = self.children[name].wait(timeout=STOP_SECONDS)
                assert code == 0, f"{name} ended with {code}: {self.children[name].said_errors()}"

    def _kill(self) -> None:
        for child in self.children.values():
            child.signal(signal.SIGCONT)
            child.kill()

    # --- what is so ---------------------------------------------------------------------------

    def wait_until(
        self, claim: str, holds: Callable[[], bool], seconds: float = WAIT_SECONDS
    ) -> None:
        """Ask again and again; a scheduler that is away is asked again too."""

        def answered() -> bool:
            try:
                return holds()
            except Unreachable:
                return False

        wait_until(claim, answered, seconds=seconds, pace_seconds=PACE_SECONDS)

    def entries(self) -> list[Stored]:
        """The log, from the beginning to the present end."""
        return list(self.client.tail())

    def events(self, request: str) -> list[Event]:
        """One request's events, in order."""
        return [one.entry.event for one in self.client.request_log(request)]

    def since(self, position: int) -> list[Stored]:
        """What was appended after that."""
        return list(self.client.tail(position + 1))

    def position(self) -> int:
        """The last position."""
        return int(self.client.status().log_position)

    def is_lost(self, name: str, position: int) -> bool:
        """Whether the log says, after that position, that the engine is lost."""
        return any(
            isinstance(one.entry.event, Lost) and one.entry.event.engine == name
            for one in self.since(position)
        )

    def joined_again(self, name: str, position: int) -> bool:
        """Whether the log says, after that position, that the engine joined after it was lost."""
        own = [
            type(one.entry.event)
            for one in self.since(position)
            if isinstance(one.entry.event, Lost | Attached) and one.entry.event.engine == name
        ]
        return own[-2:] == [Lost, Attached]

    def history(self) -> History:
        """The present log, reduced; what was read before is not read again."""
        for one in self.since(self._read):
            violation = self._history.apply(one.entry)
            assert violation is None, violation
            self._read = one.position
        return self._history

    def settled(self) -> bool:
        """Whether every request is closed, and nothing of any engine's pool is missing."""
        history = self.history()
        if not {state.phase for state in history.requests.values()} <= TERMINAL:
            return False
        status = self.client.status()
        ranks = {e.engine: e.ranks[0] for e in status.engines if e.ranks}
        for party, account in history.ledger.items():
            rank = ranks.get(party.engine)
            if rank is None or not rank.connected:
                return False
            if not account.free_pages == account.capacity == rank.pages.capacity:
                return False
        return set(self.names) <= {p.engine for p in history.ledger} and pages_agree(status)

    def wait_settled(self) -> None:
        """Engine lists, ledger and capacity agree, and nothing is held."""
        self.wait_until("every pool is whole and every request closed", self.settled)

    def judged(self) -> tuple[int, int]:
        """The log up to now is clean; how many entries it has, and how many guards were asked."""
        history = self.history()
        open_for_ever = list(unbounded(history, self._read))
        assert not open_for_ever, open_for_ever
        return self._read, history.evaluated
