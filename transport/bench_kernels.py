"""Figures of the kernels on this machine, each beside its reference or beside the memory's limit.

Owns: what is compared, and the shapes.
Must not know: deployments; nothing here serves a request.
"""

from __future__ import annotations

import datetime as dt
import platform
import time
from collections.abc import Callable
from importlib.metadata import version

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from engine.decode_step import DecodeSteps, PlainSteps, make_steps
from engine.model import Model
from engine.pool import KVPool, filled_counts
from engine.weights import load_model
from kernels import pack
from kernels.int8 import tensors_of
from kernels.layout import PageMemory
from transport.bench_context import Bystanders, machine
from transport.bench_inside import Room, unchecked
from transport.bench_stats import Figure, Report, Target, interleave

SHAPES = ((1, 512), (8, 512), (8, 2048))
"""Streams, and tokens that each has behind it."""

STEPS = 6
Rounds = tuple[tuple[float, float], ...]
READ_BYTES = 1 << 28
GIGA = 1e9


@attrs.frozen(kw_only=True)
class KernelSettings:
    """What is measured; `threads` compute on both sides."""

    model: str
    threads: int = 2
    runs: int = 3
    shapes: tuple[tuple[int, int], ...] = SHAPES


def run_kernels(settings: KernelSettings, *, progress: Callable[[str], None]) -> Report:
    """Measure every shape. Raises ModelError."""
    date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    bystanders = Bystanders()
    try:
        model = load_model(settings.model)
        figures: list[Figure] = []
        for batch, tokens in settings.shapes:
            progress(f"{batch} streams over {tokens} tokens")
            figures += _shape(model, settings, batch=batch, tokens=tokens)
        progress("pages")
        figures += _pages(model, settings)
    finally:
        torch.set_num_threads(before)
    load = {"cores_busy_with_others_meanwhile": round(bystanders.cores(), 2)}
    return Report(
        date=date,
        machine=machine(),
        settings=attrs.asdict(settings),
        versions={name: version(name) for name in ("kv-custody", "torch")}
        | {"python": platform.python_version()},
        figures=tuple(attrs.evolve(f, notes=f.notes | load) for f in figures),
    )


def _timed(work: Callable[[], object]) -> Callable[[int], float]:
    """Seconds of one call."""

    def once(_: int) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return once


def _quickest(
    settings: KernelSettings, ours: Callable[[int], float], theirs: Callable[[int], float]
) -> Rounds:
    """For each round the quickest of several calls of both, which alternate.

    Who else runs can only slow one down, and meets both sides.
    """
    rounds = [interleave(STEPS, ours, theirs) for _ in range(settings.runs)]
    return tuple((min(a for a, _ in calls), min(b for _, b in calls)) for calls in rounds)


def _shape(
    model: Model, settings: KernelSettings, *, batch: int, tokens: int
) -> tuple[Figure, ...]:
    room = Room(model, batch=batch, tokens=tokens)
    short = Room(model, batch=batch, tokens=1)
    threads = settings.threads
    steps = make_steps(model, room.pool, threads=threads)
    bare = unchecked(model, room.pool, threads=threads)
    plain = PlainSteps(model, room.pool)
    brief = make_steps(model, short.pool, threads=threads)
    size = _step_bytes(model, room.pool)
    gathered = _gathered(model, room.pool, batch=batch, tokens=tokens)
    pages = room.pool.memory.octets.numel()
    says = f"{batch} streams over {tokens} tokens"

    def seconds(way: DecodeSteps) -> Callable[[int], float]:
        return lambda _: room.seconds(way)

    def figure(name: str, text: str, rounds: Rounds, peer: str, unit: str, target: float) -> Figure:
        return Figure(
            name=f"{name}-{batch}x{tokens}",
            says=f"{says}: {text}",
            unit=unit,
            ours=tuple(ours for ours, _ in rounds),
            theirs=tuple(theirs for _, theirs in rounds),
            peer=peer,
            target=Target(value=target, better="higher"),
            notes={"path": steps.path},
        )

    def rates(ours: Callable[[int], float], theirs: Callable[[int], float]) -> Rounds:
        return tuple((1 / a, 1 / b) for a, b in _quickest(settings, ours, theirs))

    step = rates(seconds(steps), seconds(plain))
    check = rates(seconds(steps), seconds(bare))
    limit = tuple(
        (size / a / GIGA, READ_BYTES / b / GIGA)
        for a, b in _quickest(settings, seconds(steps), _timed(_reader()))
    )
    # What the context adds: its pages, their headers, the joining of parts.
    whole = _quickest(settings, seconds(steps), lambda _: short.seconds(brief))
    beside = _quickest(settings, seconds(steps), _timed(gathered))
    part = tuple(
        (_added(long=long, short=brief_one), 1 / other)
        for (long, brief_one), (_, other) in zip(whole, beside, strict=True)
    )
    found = (
        figure("step", "decode steps a second", step, "the same in plain torch", "steps/s", 1.0),
        figure("check", "with header checks", check, "without header checks", "steps/s", 0.99),
        figure("bandwidth", "weights and pages read in a step", limit, "a plain read", "GB/s", 0.6),
        figure(
            "attention", "what the context adds to a step", part,
            "gather into a kept buffer, then SDPA", "passes/s", 2.0,
        ),
    )  # fmt: skip
    bytes_read = {"step_bytes": size, "context_bytes": pages}
    return tuple(attrs.evolve(f, notes=f.notes | bytes_read) for f in found)


def _added(*, long: float, short: float) -> float:
    """Passes a second of what the longer one adds; 0, the worst, where noise is more than that."""
    return 1 / (long - short) if long > short else 0.0


def _step_bytes(model: Model, pool: KVPool) -> int:
    """Bytes that a step must read: every matrix once, and every page."""
    parts = [tensor for matrix in model.weights.matrices for tensor in tensors_of(matrix)]
    return sum(part.nbytes for part in parts) + pool.memory.octets.numel()


def _reader() -> Callable[[], Tensor]:
    """A plain read of memory that no cache holds."""
    words = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return words.sum


def _gathered(model: Model, pool: KVPool, *, batch: int, tokens: int) -> Callable[[], None]:
    """Attention of all layers as it is without a kernel: gather each context, then SDPA."""
    config, layout = model.config, pool.layout
    each = layout.pages_for_tokens(tokens + 1)
    places = torch.arange(tokens + 1)
    rows = places // layout.page_tokens * layout.block_rows + places % layout.page_tokens
    index = [number * each * layout.block_rows + rows for number in range(batch)]
    buffer = torch.empty(batch, tokens + 1, 2, layout.kv_heads, layout.head_dim)
    query = torch.randn(batch, config.heads, 1, config.head_dim)

    def attend() -> None:
        for layer in range(layout.layers):
            for number in range(batch):
                torch.index_select(pool.memory.rows[layer], 0, index[number], out=buffer[number])
            keys, values = (buffer[:, :, half].transpose(1, 2) for half in range(2))
            functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return attend


def _pages(model: Model, settings: KernelSettings) -> tuple[Figure, ...]:
    """Packing and verifying the pages of a prompt of 512 tokens, beside a copy of their bytes."""
    source = Room(model, batch=1, tokens=511).pool.memory
    staging = PageMemory.allocate(source.layout, source.pages)
    numbers = torch.arange(source.pages)
    filled = filled_counts(source.layout, source.pages, 511)
    size, copy = source.octets.numel(), torch.ones_like(source.octets)

    def packed() -> object:
        return pack.pack(source, numbers, staging, numbers, tag=7, positions=numbers, filled=filled)

    def verified() -> object:
        return pack.verify(staging, numbers, tag=7, positions=numbers, filled=filled)

    packed()
    return tuple(
        Figure(
            name=name,
            says=text,
            unit="GB/s",
            ours=tuple(ours for ours, _ in rounds),
            theirs=tuple(theirs for _, theirs in rounds),
            peer="a plain copy",
        )
        for name, text, rounds in (
            (name, text, _rates(settings, size, work, lambda: copy.copy_(source.octets)))
            for name, text, work in (
                ("pack", "pages of 511 tokens sealed into staging, by one thread", packed),
                ("verify", "pages of 511 tokens checked on arrival, by one thread", verified),
            )
        )
    )


def _rates(
    settings: KernelSettings, size: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> Rounds:
    rounds = _quickest(settings, _timed(ours), _timed(theirs))
    return tuple((size / a / GIGA, size / b / GIGA) for a, b in rounds)
