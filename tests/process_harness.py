"""Real schedulers and engines as processes on loopback, for tests.

Owns: starting, waiting by what processes say, collecting logs, and ending what is left by its id.
Must not know: what any single test claims.

A deployment that is left is asked to end in order, and its log files are then replayed: whatever
a test does, the log must be whole and clean.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from engine.store import Stored
from lifecycle.events import Event
from lifecycle.history import History
from lifecycle.ids import Party, RequestId
from lifecycle.replay import Report, replay
from lifecycle.state import TERMINAL
from tests.log_files import read_log
from tests.tiny import tiny_llama
from transport import render
from transport.child import PROGRAM, Child
from transport.client import Client
from transport.pb.admin_pb2 import EngineStatus, GetStatusResponse
from transport.pb.generation_pb2 import (
    Admission,
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    Outcome,
    Sampling,
    TokenIds,
)

READY_SECONDS = 90.0
ANSWER_SECONDS = 60.0
SETTLE_SECONDS = 20.0
STOP_SECONDS = 60.0
PACE_SECONDS = 0.05


@attrs.frozen
class Answer:
    """A whole answer; `messages` counts the stream's messages."""

    admission: Admission
    text: str
    tokens: tuple[int, ...]
    messages: int
    outcome: Outcome

    @property
    def request(self) -> RequestId:
        return RequestId(self.admission.request_id)


class Deployment:
    """Processes around one scheduler; used as a context manager."""

    def __init__(
        self, folder: Path, model: Path | str, *, engine: Sequence[str] = (), **scheduler: object
    ) -> None:
        """engine: further flags of every engine; scheduler: further settings of the scheduler."""
        self.folder = folder
        folder.mkdir(parents=True)
        self.model = str(model)
        self.log = folder / "log"
        self.children: dict[str, Child] = {}
        self.lost: set[str] = set()
        self._engine = tuple(engine)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in scheduler.items()]
        self._scheduler = ("--model", self.model, "--port=0", f"--log={self.log}", *flags)
        self.address = ""
        self.client: Client

    def __enter__(self) -> Self:
        try:
            scheduler = self._start("scheduler", ("scheduler", *self._scheduler))
            self.address = scheduler.wait_event("ready", timeout=READY_SECONDS)["address"]
        except BaseException:
            self._kill()
            raise
        self.client = Client(self.address)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.__exit__(kind, error, trace)
        try:
            if error is None:
                self.end()
        finally:
            self._kill()
        if error is None:
            self.replayed()
        else:
            for child in self.children.values():
                sys.stderr.write(f"--- {child.name}\n{child.said_errors()}\n")

    # --- processes ----------------------------------------------------------------------------

    def _start(
        self, name: str, arguments: Sequence[str], *, program: Sequence[str] = PROGRAM
    ) -> Child:
        errors = self.folder / f"{name}.errors"
        child = Child(name, [*arguments, "--json"], errors=errors, program=program)
        self.children[name] = child
        return child

    def start_engines(self, *names: str, program: Sequence[str] = PROGRAM) -> None:
        """Start engines (their role is the first word of their name) and wait until they joined."""
        started = [
            self._start(
                name,
                (
                    *(name.split("-")[0], name),
                    *("--scheduler", self.address, "--model", self.model),
                    *self._engine,
                ),
                program=program,
            )
            for name in names
        ]
        for child in started:
            child.wait_event("ready", timeout=READY_SECONDS)

    def kill_engine(self, name: str) -> None:
        """End an engine as a crash would."""
        self.lost.add(name)
        self.children[name].kill()

    def end(self) -> None:
        """SIGTERM the engines, then the scheduler; everybody still alive ends with code 0."""
        scheduler = self.children["scheduler"]
        engines = [child for name, child in self.children.items() if name not in self.lost]
        for group in ([child for child in engines if child is not scheduler], [scheduler]):
            for child in group:
                child.signal(signal.SIGTERM)
            for child in group:
                code = child.wait(timeout=STOP_SECONDS)
                assert code == 0, f"{child.name} ended with {code}: {child.said_errors()}"

    def _kill(self) -> None:
        for child in self.children.values():
            child.kill()

    # --- calls --------------------------------------------------------------------------------

    def ask(self, request: GenerateRequest) -> Answer:
        """Generate to the end.  Raises `Refused`."""
        return collect(self.client.generate(request, timeout=ANSWER_SECONDS))

    def ask_all(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        """Generate concurrently."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.ask, requests))

    def events(self, request: str) -> list[Event]:
        """The events of a request's log, in order."""
        return [one.entry.event for one in self.client.request_log(request)]

    # --- waiting ------------------------------------------------------------------------------

    def wait_until(self, claim: str, holds: Callable[[], bool]) -> None:
        """See `wait_until`."""
        wait_until(claim, holds)

    def history(self) -> History:
        """The present log, reduced."""
        history = History()
        for one in self.client.tail():
            history.apply(one.entry)
        return history

    def wait_closed(self) -> None:
        """Every request has closed."""
        self.wait_until(
            "every request is closed",
            lambda: {state.phase for state in self.history().requests.values()} <= TERMINAL,
        )

    def engine_status(self, name: str) -> EngineStatus:
        """What the status says of an engine."""
        return next(one for one in self.client.status().engines if one.engine == name)

    def wait_whole(self) -> None:
        """Free lists, the scheduler's ledger, the log's fold and capacities agree."""
        self.wait_closed()
        self.wait_until("the pools are whole", lambda: pages_agree(self.client.status()))
        for party, account in self.history().ledger.items():
            # Engines count once a heartbeat: an older count may agree, and the next one not yet.
            self.wait_until(f"{party}'s free list is whole", partial(self._counts_all, party))
            rank = self.engine_status(party.engine).ranks[party.rank]
            assert account.free_pages == account.capacity == rank.pages.capacity, party
            assert rank.counters.header_mismatches == 0, party
            assert rank.counters.header_reads_unchecked == 0, party

    def _counts_all(self, party: Party) -> bool:
        rank = self.engine_status(party.engine).ranks[party.rank]
        return bool(rank.counters.pages_free == rank.pages.capacity)

    # --- logs ---------------------------------------------------------------------------------

    def replayed_live(self) -> Report:
        """The running scheduler's log, judged: it must be clean."""
        return judged(list(self.client.tail()), self.folder.name)

    def replayed(self) -> Report:
        """The log's files, judged: they must be whole and clean."""
        log = read_log(self.log)
        assert log.complete, "the log's files are whole"
        assert not log.unknown
        return judged(list(log.entries), self.folder.name)


def wait_until(
    claim: str,
    holds: Callable[[], bool],
    *,
    seconds: float = SETTLE_SECONDS,
    pace_seconds: float = PACE_SECONDS,
) -> None:
    """Ask again and again: processes have no way to announce what is asked here.

    Raises AssertionError when it does not hold in so many seconds at least.
    """
    pace = threading.Event()
    for _ in range(int(seconds / pace_seconds)):
        if holds():
            return
        pace.wait(pace_seconds)
    raise AssertionError(f"not in {seconds:.0f} s: {claim}")


def judged(entries: Sequence[Stored], name: str) -> Report:
    """Replay and insist on a clean verdict; the totals are printed."""
    report = replay((one.position, one.entry) for one in entries)
    print(
        f"{name}: {report.entries} entries of {report.requests} requests, "
        f"{report.rules} rules, {report.evaluations} guard evaluations"
    )
    assert report.entries > 0
    findings = [line for f in report.findings for line in render.finding_lines(f)]
    assert report.clean, "\n".join(findings)
    return report


def collect(stream: Iterator[Any]) -> Answer:
    """Read a stream to its end and check its order: admission, chunks without gaps, outcome."""
    admission: Admission | None = None
    outcome: Outcome | None = None
    text, messages = "", 0
    tokens: list[int] = []
    for response in stream:
        messages += 1
        assert outcome is None, "nothing follows the outcome"
        match response.WhichOneof("step"):
            case "admission":
                assert messages == 1, "the admission comes first"
                admission = response.admission
            case "chunk":
                assert response.chunk.first_index == len(tokens), "no gap"
                tokens += response.chunk.token_ids
                text += response.chunk.text
            case "outcome":
                outcome = response.outcome
    assert admission is not None
    assert outcome is not None
    assert outcome.usage.new_tokens == len(tokens)
    return Answer(admission, text, tuple(tokens), messages, outcome)


def pages_agree(status: GetStatusResponse) -> bool:
    """Whether every page of every attached engine is free, by the engine's word and the ledger's."""
    return all(
        rank.counters.pages_free == rank.pages.free == rank.pages.capacity
        for engine in status.engines
        for rank in engine.ranks
        if rank.connected
    )


def sampling(new_tokens: int, **options: Any) -> Sampling:
    """Greedy unless said otherwise."""
    return Sampling(**{"temperature": 0.0, "new_tokens_max": new_tokens, **options})


def text_request(prompt: str, new_tokens: int = 16, **options: Any) -> GenerateRequest:
    """Plain text."""
    return GenerateRequest(text=prompt, sampling=sampling(new_tokens, **options))


def chat_request(prompt: str, new_tokens: int = 32, **options: Any) -> GenerateRequest:
    """One user's message."""
    chat = ChatMessages(messages=[ChatMessage(role="user", content=prompt)])
    return GenerateRequest(chat=chat, sampling=sampling(new_tokens, **options))


def ids_request(ids: Sequence[int], new_tokens: int = 16, **options: Any) -> GenerateRequest:
    """Token ids."""
    return GenerateRequest(token_ids=TokenIds(ids=ids), sampling=sampling(new_tokens, **options))


def tiny_model(folder: Path) -> Path:
    """A tiny random Llama with a context that is worth paging.

    Its embeddings are not tied: a tied random model only repeats its last token.
    """
    return tiny_llama(folder / "tiny", context=2048, tied=False)
