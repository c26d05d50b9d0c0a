"""Figures of the kernels on this machine, each beside its reference or beside the memory's limit.

Owns: what is compared, and the shapes.
Must not know: deployments; nothing here serves a request.
"""

from __future__ import annotations

import datetime as dt
import platform
import time
from collections.abc import Callable, Iterator, Sequence
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
from transport.bench_stats import Figure, Report, Spread, Target

SHAPES = ((1, 512), (8, 512), (8, 2048))
"""Streams, and tokens that each has behind it."""

STEPS = 6
"""Most calls of either side in a round."""

FIGURE_SECONDS = 20.0
Side = Callable[[], float]
READ_BYTES = 1 << 28
GIGA = 1e9


@attrs.frozen(kw_only=True)
class KernelSettings:
    """What is measured; `threads` compute on both sides.

    figure_seconds: after so long a figure's rounds end with the pair of calls that they are in;
    each round has one pair at least, so a busy machine makes figures coarse and not endless.
    """

    model: str
    threads: int = 2
    runs: int = 3
    figure_seconds: float = FIGURE_SECONDS
    shapes: tuple[tuple[int, int], ...] = SHAPES


@attrs.frozen
class Turns:
    """For each round the quickest call of each side, or what became of those.

    calls: how often each side ran in the round that had fewest.
    """

    rounds: tuple[tuple[float, ...], ...]
    calls: int

    def map(self, make: Callable[..., tuple[float, float]]) -> Turns:
        """What `make` makes of the sides of each round: ours and theirs in another unit."""
        return Turns(tuple(make(*round_) for round_ in self.rounds), self.calls)


def run_kernels(settings: KernelSettings, *, progress: Callable[[str], None]) -> Report:
    """Measure every shape. Raises ModelError."""
    date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    bystanders = Bystanders()
    try:
        models = Models(load_model(settings.model), load_model(settings.model, precision="int8"))
        figures: list[Figure] = []
        for batch, tokens in settings.shapes:
            progress(f"{batch} streams over {tokens} tokens")
            for figure in _shape(models, settings, batch=batch, tokens=tokens):
                progress(
                    f"{figure.name}: {Spread.of(figure.ratios).median:.3g} times {figure.peer}"
                )
                figures.append(figure)
        progress("pages")
        figures += _pages(models.plain, settings)
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


@attrs.frozen(eq=False)
class Models:
    """The same model with its own weights and with rounded ones."""

    plain: Model
    rounded: Model


def _timed(work: Callable[[], object]) -> Side:
    """Seconds of one call."""

    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return once


def _quickest(settings: KernelSettings, *sides: Side) -> Turns:
    """For each round the quickest of several calls of each side; the sides take turns.

    Who else runs can only slow one down, and meets all sides.
    """
    share = settings.figure_seconds / settings.runs
    rounds = [_turns(share, sides) for _ in range(settings.runs)]
    quickest = tuple(tuple(map(min, zip(*calls, strict=True))) for calls in rounds)
    return Turns(quickest, min(map(len, rounds)))


def _turns(seconds: float, sides: Sequence[Side]) -> list[tuple[float, ...]]:
    """Up to STEPS turns of all sides, none of which begins after so many seconds; one at least."""
    end = time.perf_counter() + seconds
    calls = [tuple(side() for side in sides)]
    while len(calls) < STEPS and time.perf_counter() < end:
        calls.append(tuple(side() for side in sides))
    return calls


def _shape(
    models: Models, settings: KernelSettings, *, batch: int, tokens: int
) -> Iterator[Figure]:
    model = models.plain
    room = Room(model, batch=batch, tokens=tokens)
    short = Room(model, batch=batch, tokens=1)
    threads = settings.threads
    steps = make_steps(model, room.pool, threads=threads)
    bare = unchecked(model, room.pool, threads=threads)
    plain = PlainSteps(model, room.pool)
    brief = make_steps(model, short.pool, threads=threads)
    rounded = make_steps(models.rounded, room.pool, threads=threads)
    size = _step_bytes(model, room.pool)
    gathered = _gathered(model, room.pool, batch=batch, tokens=tokens)
    pages = room.pool.memory.octets.numel()
    read = _timed(_reader())
    says = f"{batch} streams over {tokens} tokens"

    def seconds(way: DecodeSteps) -> Side:
        return lambda: room.seconds(way)

    def figure(name: str, text: str, turns: Turns, peer: str, unit: str, target: float) -> Figure:
        return Figure(
            name=f"{name}-{batch}x{tokens}",
            says=f"{says}: {text}",
            unit=unit,
            ours=tuple(ours for ours, _ in turns.rounds),
            theirs=tuple(theirs for _, theirs in turns.rounds),
            peer=peer,
            target=Target(value=target, better="higher"),
            notes={
                "path": steps.path,
                "calls_in_a_round": turns.calls,
                "step_bytes": size,
                "context_bytes": pages,
            },
        )

    def rates(ours: Side, theirs: Side) -> Turns:
        return _quickest(settings, ours, theirs).map(lambda a, b: (1 / a, 1 / b))

    for way in (steps, bare, rounded):
        room.seconds(way)
    turns = rates(seconds(steps), seconds(plain))
    yield figure("step", "decode steps a second", turns, "the same in plain torch", "steps/s", 1.0)
    turns = rates(seconds(rounded), seconds(steps))
    yield figure("int8", "steps with int8 weights", turns, "float32 weights", "steps/s", 1.0)
    turns = rates(seconds(steps), seconds(bare))
    yield figure("check", "with header checks", turns, "without header checks", "steps/s", 0.99)
    turns = _quickest(settings, seconds(steps), read).map(
        lambda a, b: (size / a / GIGA, READ_BYTES / b / GIGA)
    )
    text = "weights and pages read in a step"
    yield figure("bandwidth", text, turns, "a plain read", "GB/s", 0.6)
    # What the context adds: its pages, their headers, the joining of parts.
    sides = (seconds(steps), lambda: short.seconds(brief), _timed(gathered), read)
    turns = _quickest(settings, *sides)
    yield figure(
        "attention", "what the context adds to a step",
        turns.map(lambda long, short, other, _: (_added(long=long, short=short), 1 / other)),
        "gather into a kept buffer, then SDPA", "passes/s", 2.0,
    )  # fmt: skip
    yield figure(
        "context-read", "pages read by what the context adds to a step",
        turns.map(
            lambda long, short, _, other: (
                pages * _added(long=long, short=short) / GIGA, READ_BYTES / other / GIGA,
            )
        ),
        "a plain read", "GB/s", 0.6,
    )  # fmt: skip


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
            ours=tuple(ours for ours, _ in turns.rounds),
            theirs=tuple(theirs for _, theirs in turns.rounds),
            peer="a plain copy",
        )
        for name, text, turns in (
            (name, text, _rates(settings, size, work, lambda: copy.copy_(source.octets)))
            for name, text, work in (
                ("pack", "pages of 511 tokens sealed into staging, by one thread", packed),
                ("verify", "pages of 511 tokens checked on arrival, by one thread", verified),
            )
        )
    )


def _rates(
    settings: KernelSettings, size: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> Turns:
    turns = _quickest(settings, _timed(ours), _timed(theirs))
    return turns.map(lambda a, b: (size / a / GIGA, size / b / GIGA))
