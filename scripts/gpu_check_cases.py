"""The cases of `gpu_check`: correctness in float64, then times.

Owns: worlds of pages on the device, and one function for each part of the table.
Must not know: the command line, how rows are printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import median
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from engine.allocator import runs_of
from engine.device_steps import DeviceBatch
from engine.model import LayerWeights, Model, ModelWeights
from engine.model_config import ModelConfig
from engine.pool import KVPool, filled_counts
from engine.step_plan import SequenceSlice
from kernels import digest, dispatch, headers, pack, triton_ops
from kernels.layout import PageLayout, PageMemory
from kernels.tables import LayerStep, PageLabels, PageTables, new_flags
from scripts.gpu_check import Row, Sizes, Turns, lower_bound_of_ratio, rows_of, times

TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TAG = 0x7FF8_0000_0000_0001
SHAPES = ((1, 1, 64, 32), (3, 3, 64, 32), (8, 4, 128, 32), (2, 9, 80, 16), (2, 2, 32, 100))
"""KV heads, query heads of each, head size, tokens a page."""
LENGTHS = [1, 63, 100, 2000, 0, 64]
TINY_LENGTHS = [1, 63, 0, 100]


def device_named(name: str) -> torch.device | None:
    """The device, or None where torch has none of that name."""
    if name == "cuda" and not torch.cuda.is_available():
        return None
    return torch.device(name)


def turns_of(device: torch.device, sizes: Sizes) -> Turns:
    """On a GPU a turn is ten launches, so that the wait at its end weighs little."""
    if device.type == "cuda":
        return Turns(sizes.repeats, 10, torch.cuda.synchronize)
    return Turns(sizes.repeats, 1, lambda: None)


@attrs.frozen(eq=False)
class Filled:
    """Sequences of noise in scattered pages; keys and values in one dense tensor each."""

    memory: PageMemory
    tables: PageTables
    labels: PageLabels
    keys: Tensor
    values: Tensor


def filled(layout: PageLayout, lengths: list[int], device: torch.device) -> Filled:
    """One layer's worth of pages for sequences of these lengths; dense tensors are padded."""
    size = layout.page_tokens
    counts = [layout.pages_for_tokens(tokens) for tokens in lengths]
    total = sum(counts) + 1
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).tolist()
    pages = [[order.pop() for _ in range(count)] for count in counts]
    memory = PageMemory.allocate(layout, total, device)
    memory.octets.fill_(0xFF)
    tables = PageTables.of(
        pages,
        [[TAG] * count for count in counts],
        tokens=lengths,
        rows=[min(1, tokens) for tokens in lengths],
        device=device,
    )
    flat = [page for each in pages for page in each]
    positions = [n for count in counts for n in range(count)]
    fills = [
        min(size, tokens - n * size)
        for tokens, count in zip(lengths, counts, strict=True)
        for n in range(count)
    ]
    labels = PageLabels.of(
        flat, [TAG] * len(flat), positions=positions, filled=fills, device=device
    )
    shape = (len(lengths), max(lengths), layout.kv_heads, layout.head_dim)
    generator = torch.Generator(device).manual_seed(2)
    keys, values = (
        torch.randn(shape, generator=generator, device=device).to(layout.dtype) for _ in "kv"
    )
    longs = labels.pages.long(), labels.positions.long(), labels.filled.long()
    headers.stamp(memory, longs[0], tags=labels.tags, positions=longs[1], filled=longs[2])
    for number, (tokens, table) in enumerate(zip(lengths, pages, strict=True)):
        if tokens:
            places = torch.arange(tokens, device=device)
            table_on = torch.tensor(table, device=device)
            index = table_on[places // size] * layout.block_rows + places % size
            rows = torch.stack((keys[number, :tokens], values[number, :tokens]), 1)
            for layer in range(layout.layers):
                memory.rows[layer].index_copy_(0, index, rows)
    return Filled(memory, tables, labels, keys, values)


def all_rows(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Every part of the table, in order."""
    yield from correctness(device)
    yield from decode_times(device, sizes)
    yield from page_times(device, sizes)
    yield from step_times(device, sizes)


# --- Correctness ----------------------------------------------------------------------------------


def correctness(device: torch.device) -> Iterator[Row]:
    """Largest difference of each attention from float64, and equality of all that is exact."""
    tiny = device.type == "cpu"
    lengths = TINY_LENGTHS if tiny else LENGTHS
    for dtype, tolerance in TOLERANCES.items():
        for kv_heads, group, head_dim, page_tokens in SHAPES[1:2] if tiny else SHAPES:
            layout = PageLayout(
                layers=1, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, dtype=dtype
            )
            if layout.half_row_bytes < 128:
                continue
            case = f"{str(dtype)[6:]} kv {kv_heads} x {group} x {head_dim}, page {page_tokens}"
            world = filled(layout, lengths, device)
            for name, found in attention_errors(world, lengths, group).items():
                passed = found <= tolerance
                yield Row(name, case, found, "max error", f"<= {tolerance:g}", passed)
            for name, equal in exact(world).items():
                yield Row(name, case, float(equal), "", "equal", equal)


def naive(world: Filled, number: int, queries: Tensor, tokens: int) -> Tensor:
    """Causal softmax attention of the last rows in float64."""
    count, heads, head_dim = queries.shape
    group = heads // world.memory.layout.kv_heads
    keys = world.keys[number, :tokens].double().repeat_interleave(group, 1)
    values = world.values[number, :tokens].double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,thd->hqt", queries.double(), keys) / head_dim**0.5
    places = torch.arange(tokens, device=queries.device)
    seen = places[tokens - count :]
    scores = scores.masked_fill(places[None, :] > seen[:, None], float("-inf"))
    return torch.einsum("hqt,thd->qhd", torch.softmax(scores, -1), values)


def attention_errors(world: Filled, lengths: list[int], group: int) -> dict[str, float]:
    """The largest error of decode and prefill; a raised flag, or a NaN, is infinite."""
    layout, device = world.memory.layout, world.keys.device
    heads = layout.kv_heads * group
    rows = [min(tokens, 40) for tokens in lengths]
    first = [sum(rows[:number]) for number in range(len(rows))]
    total = sum(rows)
    queries = torch.randn((total, heads, layout.head_dim), device=device).to(layout.dtype)
    errors = {"decode": 0.0, "prefill": 0.0}
    flags = new_flags(len(lengths), device)
    one = torch.full((len(lengths), *queries.shape[1:]), float("nan"), device=device)
    decoded = dispatch.decode_attention(
        world.memory, 0, queries[: len(lengths)], world.tables, flags, one.to(layout.dtype),
        backend="triton",
    )  # fmt: skip
    rows_on, first_on = torch.tensor([rows, first], dtype=torch.int32, device=device)
    chunk = dataclasses.replace(world.tables, rows=rows_on, first_row=first_on, rows_max=max(rows))
    out = torch.full_like(queries, float("nan"))
    filled_out = dispatch.prefill_attention(
        world.memory, 0, queries, chunk, flags, out, backend="triton"
    )
    for number, tokens in enumerate(lengths):
        if tokens == 0:
            continue
        mine = slice(first[number], first[number] + rows[number])
        pairs = {
            "decode": (decoded[number][None], queries[number][None]),
            "prefill": (filled_out[mine], queries[mine]),
        }
        for name, (found, asked) in pairs.items():
            wanted = naive(world, number, asked, tokens)
            error = float((found.double() - wanted).abs().nan_to_num(float("inf")).max())
            errors[name] = max(errors[name], error)
    if bool(flags.any()):
        return dict.fromkeys(errors, float("inf"))
    return errors


def exact(world: Filled) -> dict[str, bool]:
    """Writing, digests, packing and flags, each beside plain torch."""
    memory, labels, layout = world.memory, world.labels, world.memory.layout
    device = memory.octets.device
    flags = new_flags(labels.count, device)
    found = dispatch.digest_pages(memory, labels, flags, backend="triton")
    longs = labels.pages.long(), labels.positions.long(), labels.filled.long()
    sums = digest.data_sums(memory, longs[0], longs[2])
    wanted = digest.seal(sums, tags=labels.tags, positions=longs[1], filled=longs[2])
    slots = torch.arange(labels.count, device=device)
    ours, theirs = (PageMemory.allocate(layout, labels.count, device) for _ in "ab")
    ours.octets.fill_(1)
    theirs.octets.fill_(2)
    dispatch.copy_pages(
        memory, ours, labels, flags, target_pages=slots.int(),
        target_tags=torch.full_like(labels.tags, 77), sealed=False, backend="triton",
    )  # fmt: skip
    places = {"positions": longs[1], "filled": longs[2]}
    pack.pack_plainly(memory, longs[0], theirs, slots, tag=77, **places)
    keys = torch.randn((world.tables.sequences, *world.keys.shape[2:]), device=device)
    keys = keys.to(layout.dtype)
    written = []
    for backend in ("triton", "reference"):
        copy = PageMemory.over(memory.octets.clone(), layout, memory.pages)
        up = new_flags(world.tables.sequences, device)
        dispatch.write_tokens(copy, 0, keys, keys, world.tables, up, backend=backend)
        written.append(copy.octets)
    memory.words[0, int(labels.pages[-1]), 0] ^= 1
    dispatch.check_headers(memory, labels, flags, backend="triton")
    memory.words[0, int(labels.pages[-1]), 0] ^= 1
    return {
        "digest": torch.equal(found, wanted),
        "pack": torch.equal(ours.octets, theirs.octets),
        "write": torch.equal(*written),
        "check": flags.tolist() == [0] * (labels.count - 1) + [1],
    }


# --- Times ----------------------------------------------------------------------------------------


def layout_of(sizes: Sizes, layers: int, dtype: torch.dtype) -> PageLayout:
    """The pages of the measured model."""
    return PageLayout(
        layers=layers,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        page_tokens=sizes.page_tokens,
        dtype=dtype,
    )


def memory_limit(device: torch.device, sizes: Sizes) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (seconds,) = times([lambda: target.copy_(source)], turns=turns_of(device, sizes))
    return 2 * sizes.copy_bytes / median(seconds)


def decode_times(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Decode attention beside SDPA on contiguous memory, and with the compare of headers off."""
    layout = layout_of(sizes, 1, torch.bfloat16)
    world = filled(layout, [sizes.context] * sizes.batch, device)
    shape = (sizes.batch, sizes.heads, sizes.head_dim)
    queries = torch.randn(shape, device=device).to(layout.dtype)
    output, flags = torch.empty_like(queries), new_flags(sizes.batch, device)
    launches = triton_ops.plan_decode(
        LayerStep(world.memory, 0, world.tables, flags), queries, output
    )
    # The first launch alone compares headers; its copy without is for this measure alone.
    attend, *join = launches
    constants: Any = attend.shape
    unchecked = [dataclasses.replace(attend, shape=constants._replace(checked=False)), *join]
    keys, values = (part.transpose(1, 2).contiguous() for part in (world.keys, world.values))

    def ours() -> None:
        for launch in launches:
            launch()

    def without() -> None:
        for launch in unchecked:
            launch()

    def sdpa() -> Tensor:
        return functional.scaled_dot_product_attention(
            queries[:, :, None], keys, values, enable_gqa=True
        )

    seconds = times([ours, without, sdpa], turns=turns_of(device, sizes))
    middle = [median(each) for each in seconds]
    limit = memory_limit(device, sizes)
    read = 2 * sizes.batch * sizes.context * layout.half_row_bytes
    ratio, least = lower_bound_of_ratio(seconds[0], seconds[1])
    case = f"{sizes.batch} x {sizes.context}, bfloat16"
    measured = device.type != "cpu"
    figures = [
        ("time", middle[0] * 1e6, "us", None),
        ("time of SDPA, contiguous", middle[2] * 1e6, "us", None),
        ("bandwidth", read / middle[0] / 1e9, "GB/s", None),
        ("memory limit (copy)", limit / 1e9, "GB/s", None),
        ("share of the limit", read / middle[0] / limit, "", 0.8 if measured else None),
        ("checked against unchecked", ratio, "", None),
        ("its lower bound", least, "", 0.99 if measured else None),
    ]
    yield from rows_of(f"decode {case}", figures)
    if bool(flags.any()):
        yield Row(f"decode {case}", "flags raised", float(flags.count_nonzero()), "", "0", False)


def page_times(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Digests and packing of all pages."""
    layout = layout_of(sizes, 4, torch.bfloat16)
    world = filled(layout, [sizes.context] * max(1, sizes.batch // 8), device)
    labels = world.labels
    flags = new_flags(labels.count, device)
    target = PageMemory.allocate(layout, labels.count, device)
    slots = torch.arange(labels.count, dtype=torch.int32, device=device)
    tags = torch.full_like(labels.tags, 77)

    def digests() -> Tensor:
        return dispatch.digest_pages(world.memory, labels, flags, backend="triton")

    def packing() -> Tensor:
        return dispatch.copy_pages(
            world.memory, target, labels, flags, target_pages=slots, target_tags=tags,
            sealed=False, backend="triton",
        )  # fmt: skip

    seconds = times([digests, packing], turns=turns_of(device, sizes))
    limit = memory_limit(device, sizes)
    size = labels.count * layout.page_bytes
    rates = [factor * size / median(s) for factor, s in zip((1, 2), seconds, strict=True)]
    least = None if device.type == "cpu" else 0.7
    figures = [
        ("digest", rates[0] / 1e9, "GB/s", None),
        ("digest, share of the limit", rates[0] / limit, "", least),
        ("pack (read and written)", rates[1] / 1e9, "GB/s", None),
    ]
    yield from rows_of("pages", figures)


def step_times(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """A whole decode step of a model of random weights, launches and the wait at its end included."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = random_model(sizes, device, dtype)
    layout = layout_of(sizes, sizes.layers, dtype)
    batch = max(1, sizes.batch // 4)
    tokens = sizes.context // 4
    count = layout.pages_for_tokens(tokens + 1)
    pool = KVPool.allocate(layout, batch * count, device)
    slices = []
    for number in range(batch):
        runs = runs_of(list(range(number * count, (number + 1) * count)))
        slices.append(SequenceSlice(tuple(runs), TAG + number, tokens, 1))
    pool.memory.rows.zero_()
    for number in range(batch):
        pages = torch.arange(number * count, (number + 1) * count, device=device)
        headers.stamp(
            pool.memory,
            pages,
            tags=headers.tag_tensor(TAG + number, count, device),
            positions=torch.arange(count, device=device),
            filled=filled_counts(layout, count, tokens, device),
        )
    ids = torch.zeros(batch, dtype=torch.int64, device=device)
    places = torch.full((batch,), tokens, dtype=torch.int64, device=device)
    failed: list[int] = []

    def step() -> None:
        work = DeviceBatch(pool, slices)
        work.begin_step()
        model.logits(model.forward(ids, places, work))
        failed.extend(work.end_step())

    (seconds,) = times([step], turns=attrs.evolve(turns_of(device, sizes), launches=1))
    middle = median(seconds)
    figures = [
        ("time", middle * 1e3, "ms", None),
        ("tokens a second", batch / middle, "", None),
    ]
    yield from rows_of(f"step, {sizes.layers} layers, {batch} x {tokens}", figures)
    yield Row("step", "sequences failed", float(len(failed)), "", "0", not failed)


def random_model(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Model:
    """A Llama of random weights."""
    hidden, mlp, vocabulary = sizes.hidden, 4 * sizes.hidden, 1024
    query, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        drawn = torch.randn((rows, columns), device=device, dtype=dtype)
        return drawn.mul_(columns**-0.5)

    ones = torch.ones(hidden, device=device, dtype=dtype)
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            qkv=matrix(query + 2 * kv, hidden),
            output=matrix(hidden, query),
            mlp_norm=ones,
            gate_up=matrix(2 * mlp, hidden),
            down=matrix(hidden, mlp),
        )
        for _ in range(sizes.layers)
    )
    embedding = matrix(vocabulary, hidden)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        layers=sizes.layers,
        hidden=hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        mlp=mlp,
        vocabulary=vocabulary,
        context=sizes.context,
        rope_base=1e4,
        rope_scaling=None,
        norm_epsilon=1e-5,
        tied_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        eos_tokens=(),
    )
    return Model(config, ModelWeights(embedding, layers, ones, embedding))
