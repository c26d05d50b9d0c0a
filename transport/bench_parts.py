"""The real processes that a benchmark runs: a deployment of ours, and a peer.

Owns: how they are started with explicit settings, awaited, called, and ended.
Must not know: which figure is made of what.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs

from transport.bench_stats import Arrivals, UnusableSample
from transport.child import PYTHON, Child, ChildFailed, clean_environment
from transport.client import Client
from transport.pb import admin_pb2, generation_pb2
from transport.settings import PoolSettings, SchedulerSettings, to_flags

SETTLE_SECONDS = 60.0
SETTLE_PAUSE_SECONDS = 0.02


@attrs.frozen(kw_only=True)
class PeerRun:
    """What the peer did: seconds from the call to each step's logits, and its tokens."""

    steps: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def prefill_seconds(self) -> float:
        """Until the first token could be chosen."""
        return self.steps[0]

    @property
    def decode_rate(self) -> float:
        """Tokens a second of the whole batch after the first token."""
        spent = self.steps[-1] - self.steps[0]
        if not spent > 0:
            raise UnusableSample(figure="decode", reason="the peer made a single step")
        return len(self.tokens) * (len(self.steps) - 1) / spent


class Peer:
    """transformers in a long-lived process of its own."""

    name = "transformers"

    def __init__(self, *, model: str, threads: int, folder: Path) -> None:
        flags = ("--model", model, "--threads", str(threads))
        self._child = Child(
            "peer",
            flags,
            errors=folder / "peer.stderr",
            program=(*PYTHON, "-m", "transport.bench_transformers"),
            environment=clean_environment(),
        )
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            self.versions = self._child.read()["versions"]
        except BaseException:
            self._child.end(terminate=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.end(terminate=False)

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> PeerRun:
        """Greedy tokens after prompts of equal length."""
        found = self._child.ask({"prompts": [list(p) for p in prompts], "new_tokens": new_tokens})
        tokens = tuple(tuple(row) for row in found["tokens"])
        return PeerRun(steps=tuple(found["steps"]), tokens=tokens)


@attrs.define
class Stream:
    """One answer as a client saw it; seconds count from the call."""

    arrivals: list[tuple[float, int]] = attrs.Factory(list)
    tokens: list[int] = attrs.Factory(list)
    seconds: float = 0.0

    @property
    def times(self) -> Arrivals:
        """When tokens came."""
        return Arrivals(tuple(self.arrivals))


class Deployment:
    """A scheduler and its engines as `custody serve` runs them, and a client of it.

    cores: the cores that its processes may use; all without it.
    """

    def __init__(
        self,
        *,
        scheduler: SchedulerSettings,
        pool: PoolSettings,
        folder: Path,
        name: str = "serve",
        cores: Iterable[int] = (),
    ) -> None:
        self.scheduler = scheduler
        # An empty file keeps a configuration file of the working folder out.
        command = ("--config", os.devnull, "serve", "--json")
        flags = (*to_flags(scheduler), *to_flags(pool))
        before = os.sched_getaffinity(0)
        # Children inherit the cores of the thread that starts them.
        os.sched_setaffinity(0, set(cores) or before)
        try:
            self._child = Child(
                name,
                (*command, *flags),
                errors=folder / f"{name}.stderr",
                environment=clean_environment(),
            )
        finally:
            os.sched_setaffinity(0, before)
        self.address = ""
        self._client: Client | None = None

    def __enter__(self) -> Self:
        try:
            while not self.address:
                line = self._child.read()
                if line.get("event") == "ready":
                    self.address = line["address"]
        except BaseException:
            self._child.end(terminate=True)
            raise
        self._client = Client(self.address)
        self._client.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.__exit__(kind, error, trace)
        self._child.end(terminate=True)

    @property
    def client(self) -> Client:
        """The client; only inside the `with` block."""
        assert self._client is not None, "used outside its with block"
        return self._client

    def stream(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int,
        enough: Callable[[], bool] = lambda: False,
        start: float | None = None,
        seen: Stream | None = None,
    ) -> Stream:
        """One greedy answer, until it ends or is `enough`.

        Seconds count from `start`, else from the call; `seen` is filled while the answer comes.
        """
        seen = Stream() if seen is None else seen
        began = time.perf_counter() if start is None else start
        for step in self.client.generate(greedy(prompt, new_tokens=new_tokens)):
            if step.WhichOneof("step") == "chunk" and step.chunk.token_ids:
                seen.tokens += step.chunk.token_ids
                at = time.perf_counter() - began
                seen.arrivals.append((at, len(step.chunk.token_ids)))
            if enough():
                break
        seen.seconds = time.perf_counter() - began
        return seen

    def settle(self) -> admin_pb2.GetStatusResponse:
        """Wait until nothing is open and every page is free again; the status then."""
        limit = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < limit:
            status = self.client.status()
            if not _busy(status):
                return status
            time.sleep(SETTLE_PAUSE_SECONDS)
        raise ChildFailed("serve", f"it did not come to rest in {SETTLE_SECONDS:.0f} s")

    def engine_steps(self) -> int:
        """Forward passes of all engines so far, at rest.

        Engines count in their signs of life, of which several come in each lease.
        """
        time.sleep(self.scheduler.lease_seconds / 2)
        status = self.settle()
        return sum(rank.counters.steps for engine in status.engines for rank in engine.ranks)


def _busy(status: admin_pb2.GetStatusResponse) -> bool:
    ranks = [rank for engine in status.engines for rank in engine.ranks]
    return (
        status.queued > 0
        or bool(status.phases)
        or any(rank.pages.held or rank.pages.booked for rank in ranks)
    )


def greedy(prompt: Sequence[int], *, new_tokens: int) -> generation_pb2.GenerateRequest:
    """A request for exactly so many most likely tokens."""
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.Sampling(
            temperature=0.0, new_tokens_max=new_tokens, ignore_eos=True
        ),
    )


def together(
    streams: Sequence[tuple[Deployment, Sequence[int]]], *, new_tokens: int, asked: int
) -> tuple[Stream, ...]:
    """Answers of as many clients at once.

    asked: the most that each may give.  Beyond `new_tokens` they go on only until all have that.
    """
    seen = [Stream() for _ in streams]
    failures: list[BaseException] = []
    start = time.perf_counter()

    def enough() -> bool:
        return bool(failures) or (
            asked > new_tokens and all(len(stream.tokens) >= new_tokens for stream in seen)
        )

    def run(number: int) -> None:
        deployment, prompt = streams[number]
        try:
            deployment.stream(
                prompt, new_tokens=asked, enough=enough, start=start, seen=seen[number]
            )
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return tuple(seen)
