"""The surroundings of measures: settings, shared processes, prompts, and the machine's state.

Owns: what lives longer than one measure, and its end.
Must not know: any measure.
"""

from __future__ import annotations

import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import torch

from engine.model_config import ModelConfig
from engine.weights import load_config
from transport.bench_parts import Deployment, Peer
from transport.settings import (
    DEFAULT_MODEL,
    WEIGHTS,
    InvalidSetting,
    PoolSettings,
    SchedulerSettings,
)

PEERS = ("transformers", "none")
WATCH_SECONDS = 0.5
PAGE_TOKENS = 32
"""Tokens that a KV page holds, in deployments and in what is measured without one."""

LOWEST_TOKEN = 64
"""Below it vocabularies keep their special tokens."""


class UnknownMeasure(ValueError):
    """There is no measure of this name."""

    def __init__(self, *, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no measure is called {name!r}; there are {', '.join(known)}")
        self.name = name
        self.known = known


def _above_zero(_instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise InvalidSetting(name=attribute.name, value=value, reason="must be above 0")


def _several(_instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 2:
        reason = "must be above 1: a rate is measured between two tokens"
        raise InvalidSetting(name=attribute.name, value=value, reason=reason)


def _weights(_instance: object, _attribute: attrs.Attribute[str], value: str) -> None:
    PoolSettings(weights=value)


def _peer(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in PEERS:
        reason = f"no such peer; there are {', '.join(PEERS)}"
        raise InvalidSetting(name=attribute.name, value=value, reason=reason)


@attrs.frozen(kw_only=True)
class BenchSettings:
    """What is measured and against what."""

    model: str = str(DEFAULT_MODEL)
    """Model: a GGUF file, a local directory in Hugging Face's format, or a hub id."""
    prompt_tokens: int = attrs.field(default=512, validator=_several)
    """Length of a prompt."""
    new_tokens: int = attrs.field(default=64, validator=_several)
    """Length of an answer."""
    batch: int = attrs.field(default=8, validator=_above_zero)
    """Streams at once where throughput of a batch is measured."""
    runs: int = attrs.field(default=3, validator=_above_zero)
    """Rounds, each of ours and the other side."""
    peer: str = attrs.field(default=PEERS[0], validator=_peer)
    """What to compare with: transformers or none."""
    threads: int = attrs.field(default=2, validator=_above_zero)
    """Threads of the peer, and of each engine."""
    kv_memory: str = "1GiB"
    """KV pool of each engine."""
    weights: str = attrs.field(default=WEIGHTS[0], validator=_weights)
    """Weights of our engines, float or int8; the peer always computes in float32."""
    seed: int = 0
    """Prompts are a function of it."""
    only: tuple[str, ...] = ()
    """Measures to run; all without it."""


class Context:
    """Starts what measures ask for, once, and ends it all."""

    def __init__(self, settings: BenchSettings, *, progress: Callable[[str], None]) -> None:
        self.settings = settings
        self.progress = progress
        self.config: ModelConfig = load_config(settings.model)
        self._random = random.Random(settings.seed)
        self._ends = ExitStack()
        self._deployment: Deployment | None = None
        self._peer: Peer | None = None
        self.folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="custody-")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.__exit__(kind, error, trace)

    def prompt(self, tokens: int | None = None) -> tuple[int, ...]:
        """Random token ids; no two prompts share a beginning that something could keep."""
        count = self.settings.prompt_tokens if tokens is None else tokens
        most = self.config.vocabulary - 1
        return tuple(self._random.randint(min(LOWEST_TOKEN, most), most) for _ in range(count))

    def make_deployment(
        self,
        name: str,
        *,
        log: Path | None = None,
        threads: int | None = None,
        cores: Iterable[int] = (),
        stays: ExitStack | None = None,
    ) -> Deployment:
        """A deployment with explicit settings, which lives as long as `stays`."""
        self.progress(f"starting {name}")
        settings = self.settings
        deployment = Deployment(
            scheduler=SchedulerSettings(model=settings.model, port=0, log=log),
            pool=PoolSettings(
                kv_memory=settings.kv_memory,
                page_tokens=PAGE_TOKENS,
                batch=max(16, settings.batch),
                threads=settings.threads if threads is None else threads,
                weights=settings.weights,
            ),
            folder=self.folder,
            name=name,
            cores=cores,
        )
        return (self._ends if stays is None else stays).enter_context(deployment)

    @property
    def deployment(self) -> Deployment:
        """One prefill and one decode engine over a log on disk, as an operator would run them."""
        if self._deployment is None:
            self._deployment = self.make_deployment("serve", log=self.folder / "log")
        return self._deployment

    @property
    def peer(self) -> Peer | None:
        """The peer, if one is wanted."""
        if self.settings.peer == "none":
            return None
        if self._peer is None:
            self.progress(f"starting {self.settings.peer}")
            peer = Peer(
                model=self.settings.model, threads=self.settings.threads, folder=self.folder
            )
            self._peer = self._ends.enter_context(peer)
        return self._peer

    def versions(self) -> dict[str, str]:
        """What was measured and compared."""
        found = {name: version(name) for name in ("kv-custody", "torch", "grpcio")}
        theirs = self._peer.versions if self._peer is not None else {}
        return found | {"python": platform.python_version()} | theirs


def machine() -> dict[str, Any]:
    """What the figures were made on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        **_memory(),
    }


class Bystanders:
    """How many cores' worth of work others did on this machine since this was made.

    Everything counts that neither this process nor a descendant of it did.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._others = _busy_ticks() - _own_ticks()

    def cores(self) -> float:
        """On average until now."""
        spent = max(time.perf_counter() - self._start, 1e-9)
        ticks = max(0, _busy_ticks() - _own_ticks() - self._others)
        return ticks / os.sysconf("SC_CLK_TCK") / spent


def busy_before(seconds: float = WATCH_SECONDS) -> float:
    """Cores busy with others' work while nothing of ours runs."""
    bystanders = Bystanders()
    time.sleep(seconds)
    return bystanders.cores()


def _busy_ticks() -> int:
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, *others = (int(field) for field in fields)
    return user + nice + system + sum(others[:3])


def _own_ticks() -> int:
    """Ticks of this process, its descendants, and those of them that have ended and been awaited."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        # The name may hold spaces and brackets, and ends with the last bracket.
        fields = text.rpartition(")")[2].split()
        process = int(entry.name)
        parents[process] = int(fields[1])
        ticks[process] = sum(int(field) for field in fields[11:15])
    own, grown = {os.getpid()}, True
    while grown:
        more = {process for process, parent in parents.items() if parent in own} - own
        own |= more
        grown = bool(more)
    return sum(ticks.get(process, 0) for process in own)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> dict[str, float]:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"memory_gib": round(size / (1 << 30), 1)}
