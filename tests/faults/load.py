"""Many clients at once, each asking one request after the other, and what became of every one.

Owns: the clients' threads and their records.
Must not know: faults.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

import attrs

from tests.faults.asking import Asking
from tests.faults.bench import Bench
from tests.process_harness import ids_request
from transport.client import Refused, Unreachable
from transport.pb.generation_pb2 import GenerateRequest

NS = 1e9
WORDS = 250
REFUSED_SECONDS = 0.2


class Reached(Protocol):
    """What is asked, at an address that may change."""

    address: str


@attrs.define
class Done:
    """One request: what was asked, what was told, and when (ns of the monotonic clock)."""

    wanted: GenerateRequest
    asking: Asking
    asked_ns: int
    cancelled_wall_ns: int = 0

    @property
    def seconds(self) -> float:
        """How long the call took."""
        return (self.asking.answered_ns - self.asked_ns) / NS

    @property
    def status(self) -> str:
        """What the client was told; what it did not want to hear any more."""
        return "cancelled" if self.cancelled_wall_ns else self.asking.status


@attrs.define
class Shape:
    """What clients ask, and how many of them change their minds."""

    prompt_tokens: int = 120
    new_tokens: int = 32
    cancelled_share: float = 0.0
    cancel_seconds_max: float = 0.5


class Load:
    """So many clients; used as a context manager, at whose end each has its last answer.

    Leaving it raises what a client has raised.
    """

    def __init__(self, bench: Reached, clients: int, shape: Shape, *, seed: int = 0) -> None:
        self.done: list[Done] = []
        self._bench = bench
        self._shape = shape
        self._stop = threading.Event()
        self._ended = threading.Condition()
        self._chances = [random.Random(seed * 1000 + number) for number in range(clients)]
        self._pool = ThreadPoolExecutor(clients)
        self._clients: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._clients = [self._pool.submit(self._ask_on, chance) for chance in self._chances]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def wait(self, count: int, *, seconds: float = 120.0) -> None:
        """So many more requests have ended."""
        with self._ended:
            goal = len(self.done) + count
            enough = self._ended.wait_for(lambda: len(self.done) >= goal, seconds)
        assert enough, f"{len(self.done)} of {goal} requests have ended"

    def _ask_on(self, chance: random.Random) -> None:
        """At least once, and until it is enough."""
        while True:
            done = self._ask(chance)
            with self._ended:
                self.done.append(done)
                self._ended.notify_all()
            if done.asking.error is not None:
                # As any client does that is refused, or that nobody answers.
                self._stop.wait(REFUSED_SECONDS)
            if self._stop.is_set():
                return

    def _ask(self, chance: random.Random) -> Done:
        shape = self._shape
        prompt = [3 + chance.randrange(WORDS) for _ in range(shape.prompt_tokens)]
        wanted = ids_request(prompt, shape.new_tokens, ignore_eos=True)
        wanted.sampling.temperature, wanted.sampling.seed = 1.0, chance.randrange(1 << 30)
        cancels = chance.random() < shape.cancelled_share
        done = Done(wanted, Asking(self._bench.address, wanted), time.monotonic_ns())
        if cancels and not done.asking.waited(chance.random() * shape.cancel_seconds_max):
            done.cancelled_wall_ns = time.time_ns()
            done.asking.cancel()
        done.asking.wait()
        done.asking.close()
        return done


def answers_doubted(bench: Bench, done: list[Done], *, references: int) -> list[str]:
    """Answers that are not what the log says; so many of them are also compared with alone."""
    found: list[str] = []
    rounds = max(1, len(done) // max(1, references))
    for number, one in enumerate(done):
        asking = one.asking
        wanted = asking.tokens
        if number % rounds == 0 and asking.tokens:
            alone = Asking(bench.address, one.wanted)
            alone.wait()
            alone.close()
            assert alone.status == "OK", alone.status
            wanted = alone.tokens if asking.status == "OK" else alone.tokens[: len(wanted)]
        request = asking.request or _named(asking.error)
        events = bench.events(request) if request else []
        found += [f"{request}: {doubt}" for doubt in asking.told.doubts(events, wanted)]
    return found


def _named(error: Refused | Unreachable | None) -> str:
    return error.numbers.get("request_id", "") if isinstance(error, Refused) else ""


def rate(done: list[Done], since_ns: int, until_ns: int, counts: Callable[[Done], int]) -> float:
    """So much of what ended in between, a second."""
    inside = [d for d in done if since_ns <= d.asking.answered_ns < until_ns]
    return sum(counts(d) for d in inside) * NS / max(1, until_ns - since_ns)
