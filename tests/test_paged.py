"""Claims about a step over paged KV, beside a naive attention over plain tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.allocator import PageRun, runs_of
from engine.model import KVContext
from engine.paged import (
    PagedBatch,
    RowCountError,
    SequenceSlice,
    SliceOutOfBoundsError,
    StepOrderError,
)
from engine.pool import KVPool
from kernels.headers import TagZeroError
from kernels.layout import PageLayout

PAGE = 8
LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=PAGE)
HEADS = 6
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5]
TAGS = [0xFFF0000000000001, 0x7FF8000000000002, 0x3333]
"""Tags whose words are NaN when read as floats, so that a score that is used would show."""
pytestmark = pytest.mark.usefixtures("one_thread")


class Sequence:
    """One sequence: its pages in a pool, and all its tensors outside of it."""

    def __init__(
        self, runs: tuple[PageRun, ...], tag: int, *, seed: int, layout: PageLayout = LAYOUT
    ) -> None:
        self.runs, self.tag, self.tokens = runs, tag, 0
        generator = torch.Generator().manual_seed(seed)
        shape = (layout.layers, sum(count for _, count in runs) * layout.page_tokens)

        def draw(heads: int) -> Tensor:
            return torch.randn((*shape, heads, layout.head_dim), generator=generator)

        self.queries, self.keys = draw(HEADS), draw(layout.kv_heads)
        self.values = draw(layout.kv_heads)

    def slice(self, count: int) -> SequenceSlice:
        return SequenceSlice(pages=self.runs, tag=self.tag, start=self.tokens, count=count)

    def expected(self, layer: int, count: int) -> Tensor:
        """Softmax attention in float64, token by token, head by head."""
        rows = []
        for token in range(self.tokens, self.tokens + count):
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // self.keys.shape[2])
                query = self.queries[layer, token, head].double()
                keys = self.keys[layer, : token + 1, group].double()
                values = self.values[layer, : token + 1, group].double()
                scores = keys @ query / math.sqrt(query.numel())
                heads.append(torch.softmax(scores, 0) @ values)
            rows.append(torch.stack(heads))
        return torch.stack(rows).float()


def poisoned_pool(pages: int, layout: PageLayout = LAYOUT) -> KVPool:
    """A pool where every byte that nobody writes is part of a NaN."""
    pool = KVPool.allocate(layout, pages)
    pool.memory.octets.fill_(0xFF)
    return pool


def opened(pool: KVPool, *sequences: Sequence) -> KVPool:
    for sequence in sequences:
        pool.open_pages(sequence.runs, tag=sequence.tag, first_position=0)
    return pool


def forward(
    batch: KVContext, work: list[tuple[Sequence, int]], *, layers: int = 2, padding: int = 0
) -> list[Tensor]:
    """What a model does with its KV context, layer by layer."""

    def rows(layer: int, name: str) -> Tensor:
        parts = [
            getattr(sequence, name)[layer, sequence.tokens : sequence.tokens + count]
            for sequence, count in work
        ]
        parts.append(parts[0].new_full((padding, *parts[0].shape[1:]), math.nan))
        return torch.cat(parts)

    outputs = []
    for layer in range(layers):
        batch.append(layer, rows(layer, "keys"), rows(layer, "values"))
        outputs.append(batch.attend(layer, rows(layer, "queries")))
    return outputs


def step(pool: KVPool, work: list[tuple[Sequence, int]], *, padding: int = 0) -> list[Tensor]:
    """One sound step; the sequences move on."""
    batch = PagedBatch(
        pool, [sequence.slice(count) for sequence, count in work], padding_rows=padding
    )
    assert batch.begin_step() == {}
    outputs = forward(batch, work, padding=padding)
    assert batch.end_step() == {}
    for sequence, count in work:
        sequence.tokens += count
    return outputs


CONTIGUOUS: tuple[PageRun, ...] = ((2, 5),)
SCATTERED: tuple[PageRun, ...] = ((9, 1), (3, 2), (0, 1), (7, 1))


@pytest.mark.parametrize("runs", [CONTIGUOUS, SCATTERED])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_then_decode_equal_naive_attention(length: int, runs: tuple[PageRun, ...]) -> None:
    """Prefill in one chunk, then four decode steps, over poisoned memory, as plain softmax does."""
    sequence = Sequence(runs, TAGS[0], seed=length)
    pool = opened(poisoned_pool(10), sequence)
    for count in (length, 1, 1, 1, 1):
        expected = [sequence.expected(layer, count) for layer in range(2)]
        outputs = step(pool, [(sequence, count)])
        for layer in range(2):
            torch.testing.assert_close(outputs[layer], expected[layer], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunks", [[5, 3, 1, 13, 8, 2], [8, 8, 8, 5], [1] * 20, [31, 2]])
def test_the_way_of_chunking_does_not_matter(chunks: list[int]) -> None:
    """Chunks of any sizes, across page borders, give what naive attention gives."""
    sequence = Sequence(SCATTERED, TAGS[1], seed=1)
    pool = opened(poisoned_pool(10), sequence)
    for count in chunks:
        expected = [sequence.expected(layer, count) for layer in range(2)]
        outputs = step(pool, [(sequence, count)])
        torch.testing.assert_close(torch.stack(outputs), torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_scattered_pages_give_the_bits_of_contiguous_ones(length: int, dtype: torch.dtype) -> None:
    """A block table is a slow path and never another meaning: equal to the last bit."""
    layout = PageLayout(layers=2, kv_heads=2, head_dim=64, page_tokens=PAGE, dtype=dtype)
    results = []
    for runs in (CONTIGUOUS, SCATTERED):
        sequence = Sequence(runs, TAGS[0], seed=7, layout=layout)
        sequence.queries, sequence.keys, sequence.values = (
            tensor.to(dtype) for tensor in (sequence.queries, sequence.keys, sequence.values)
        )
        pool = opened(poisoned_pool(10, layout), sequence)
        results.append([step(pool, [(sequence, count)]) for count in (length, 1, 1, 2, 1)])
    for one, two in zip(*results, strict=True):
        assert torch.equal(torch.stack(one), torch.stack(two))


def test_an_overflown_value_spreads_no_further_in_scattered_pages() -> None:
    """Infinity in a sequence's own first row gives what it gives in contiguous pages, no NaN."""
    results = []
    for runs in (CONTIGUOUS, SCATTERED):
        sequence = Sequence(runs, TAGS[0], seed=7)
        sequence.values[:, 0, :, 3] = math.inf
        pool = opened(poisoned_pool(10), sequence)
        results.append(torch.stack([step(pool, [(sequence, n)])[1][-1] for n in (20, 1)]))
    assert torch.equal(results[0], results[1])
    assert results[1][:, :, 3].isinf().all()


def test_a_neighbour_changes_no_bit() -> None:
    """A sequence alone, and beside others with other values and NaNs, gives equal bits."""
    results = []
    for neighbours in (None, 1.0, math.nan):
        one = Sequence(((2, 2),), TAGS[0], seed=1)
        pool = opened(poisoned_pool(10), one)
        work = [(one, 9)]
        if neighbours is not None:
            two, three = Sequence(((4, 2),), TAGS[1], seed=2), Sequence(((0, 2),), TAGS[2], seed=3)
            two.keys *= neighbours
            three.values *= neighbours
            opened(pool, two, three)
            work = [(two, 3), (one, 9), (three, 10)]
        outputs = [step(pool, work)]
        outputs += [step(pool, [(sequence, 1) for sequence, _ in work]) for _ in range(3)]
        first = 0 if neighbours is None else 3
        mine = [torch.stack(outputs[0])[:, first : first + 9]]
        row = 0 if neighbours is None else 1
        mine += [torch.stack(output)[:, row : row + 1] for output in outputs[1:]]
        results.append(torch.cat(mine, 1))
    assert not results[0].isnan().any()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_keys_and_values_may_be_stored_narrower() -> None:
    """A half-precision pool under a float32 model gives the model's dtype, close to exact."""
    layout = PageLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=PAGE, dtype=torch.bfloat16)
    sequence = Sequence(CONTIGUOUS, TAGS[0], seed=1, layout=layout)
    pool = opened(poisoned_pool(10, layout), sequence)
    for count in (12, 1, 1):
        expected = sequence.expected(1, count)
        output = step(pool, [(sequence, count)])[1]
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)


def test_padding_rows_belong_to_nobody() -> None:
    """Padding is not stored, reads nothing and comes out as zeros."""
    sequence = Sequence(((1, 1),), TAGS[0], seed=1)
    pool = opened(poisoned_pool(3), sequence)
    before = pool.memory.octets.clone()
    expected = sequence.expected(1, 1)
    outputs = step(pool, [(sequence, 1)], padding=3)
    torch.testing.assert_close(outputs[1][:1], expected)
    assert outputs[1][1:].eq(0).all()
    block = LAYOUT.block_bytes
    for layer in range(2):
        for page in (0, 2):
            span = slice((layer * 3 + page) * block, (layer * 3 + page + 1) * block)
            assert torch.equal(pool.memory.octets[span], before[span])


def test_counters_equal_live_pages_times_layers_times_steps() -> None:
    """Every read is checked before and after, and none is unchecked; summed here by hand."""
    one, two = Sequence(SCATTERED, TAGS[0], seed=1), Sequence(((5, 2),), TAGS[1], seed=2)
    pool = opened(poisoned_pool(10), one, two)
    expected = 0
    for counts in ([7, 1], [1, 1], [1, 9], [20, 3], [1, 1], [1, 1]):
        for sequence, count in zip((one, two), counts, strict=True):
            live = {token // PAGE for token in range(sequence.tokens + count)}
            expected += len(live) * 2
        step(pool, [(one, counts[0]), (two, counts[1])])
        assert pool.counters.reads_checked == expected
        assert pool.counters.reads_rechecked == expected
    assert pool.counters.reads_unchecked == 0
    assert pool.counters.mismatches == 0


def test_headers_say_how_many_tokens_are_there() -> None:
    """After a step filled is up to date in all layers, and an appended page bears no digest."""
    sequence = Sequence(((0, 3),), TAGS[0], seed=1)
    pool = opened(poisoned_pool(3), sequence)
    pool.memory.words[:, 1:, 3] = 99
    step(pool, [(sequence, 5)])
    assert (pool.memory.words[:, :, 2]).tolist() == [[5, 0, 0]] * 2
    assert (pool.memory.words[:, :, 3]).tolist() == [[0, 99, 99]] * 2
    step(pool, [(sequence, 6)])
    assert (pool.memory.words[:, :, 2]).tolist() == [[8, 3, 0]] * 2
    assert (pool.memory.words[:, :, 3]).tolist() == [[0, 0, 99]] * 2


def test_a_prompt_from_elsewhere_is_continued() -> None:
    """Packed by one pool, verified by another, its last page appended to: the same attention."""
    source_pages, target_pages = ((9, 1), (3, 2), (0, 1)), ((1, 4),)
    near, far = (
        Sequence(source_pages, TAGS[0], seed=1),
        Sequence(target_pages, TAGS[1], seed=1),
    )
    prefill, decode = opened(poisoned_pool(10), near), poisoned_pool(6)
    step(prefill, [(near, 19)])
    # The slots are the target pages themselves, as if the write had landed.
    prefill.pack(
        runs_of([9, 3, 4]),
        decode.memory,
        ((1, 3),),
        tag=TAGS[1],
        first_position=0,
        tokens=19,
        source_tag=TAGS[0],
    )
    report = decode.verify(((1, 3),), tag=TAGS[1], first_position=0, tokens=19)
    assert report.mismatch is None
    decode.open_pages(((4, 1),), tag=TAGS[2], first_position=3)
    far.tokens = 19
    for _ in range(10):
        sequence_slice = SequenceSlice(
            pages=((1, 3), (4, 1)), tag=(TAGS[1], TAGS[2]), start=far.tokens, count=1
        )
        batch = PagedBatch(decode, [sequence_slice])
        assert batch.begin_step() == {}
        expected = [far.expected(layer, 1) for layer in range(2)]
        outputs = forward(batch, [(far, 1)])
        assert batch.end_step() == {}
        torch.testing.assert_close(torch.stack(outputs), torch.stack(expected))
        far.tokens += 1


def test_a_foreign_page_is_neither_read_nor_written() -> None:
    """A sequence that fails before the loads yields zeros and leaves memory; others go on."""
    good, bad = Sequence(((0, 2),), TAGS[0], seed=1), Sequence(((2, 2),), TAGS[1], seed=2)
    pool = opened(poisoned_pool(5), good, bad)
    step(pool, [(bad, 6), (good, 6)])
    pool.memory.words[1, 2, 0] = 77
    before = pool.memory.octets.view(2, 5, -1)[:, 2:4].clone()
    batch = PagedBatch(pool, [bad.slice(3), good.slice(3)])
    failed = batch.begin_step()
    assert list(failed) == [0]
    assert (failed[0].page, failed[0].layer, failed[0].field) == (2, 1, "head_tag")
    assert (failed[0].expected, failed[0].found) == (TAGS[1], 77)
    expected = good.expected(1, 3)
    outputs = forward(batch, [(bad, 3), (good, 3)])
    assert outputs[1][:3].eq(0).all()
    torch.testing.assert_close(outputs[1][3:], expected)
    assert batch.end_step() == failed
    assert torch.equal(pool.memory.octets.view(2, 5, -1)[:, 2:4], before)
    assert pool.memory.words[0, :2, 2].tolist() == [8, 1]
    assert pool.counters.mismatches == 1
    assert pool.counters.reads_unchecked == 0


def test_a_write_that_lands_during_the_step_is_seen_before_tokens_leave() -> None:
    """The second compare catches what the first could not, and the header stays as evidence."""
    one, two = Sequence(((0, 2),), TAGS[0], seed=1), Sequence(((2, 2),), TAGS[1], seed=2)
    pool = opened(poisoned_pool(5), one, two)
    batch = PagedBatch(pool, [one.slice(9), two.slice(9)])
    assert batch.begin_step() == {}
    forward(batch, [(one, 9), (two, 9)])
    pool.memory.words[0, 3, -1] = 5
    failed = batch.end_step()
    assert list(failed) == [1]
    assert (failed[1].page, failed[1].field, failed[1].found) == (3, "tail_tag", 5)
    assert pool.memory.words[0, :4, 2].tolist() == [8, 1, 0, 0]
    assert pool.counters.mismatches == 1


@pytest.mark.parametrize(("page", "word"), [(2, 0), (2, 1), (2, 2), (2, -1), (1, 0), (0, -1)])
def test_pages_that_are_only_written_are_checked_too(page: int, word: int) -> None:
    """Appending needs the sequence's own header as much as reading does."""
    sequence = Sequence(((0, 3),), TAGS[0], seed=1)
    pool = opened(poisoned_pool(3), sequence)
    pool.memory.words[1, page, word] = 1 << 40 | 9
    failed = PagedBatch(pool, [sequence.slice(20)]).begin_step()
    assert (failed[0].page, failed[0].layer) == (page, 1)
    assert pool.counters.reads_checked == 3 * 2


def test_nothing_is_read_before_the_check() -> None:
    """A step out of order is refused, and so is one with another number of rows."""
    sequence = Sequence(((0, 1),), TAGS[0], seed=1)
    pool = opened(poisoned_pool(1), sequence)
    batch = PagedBatch(pool, [sequence.slice(1)], padding_rows=1)
    queries = torch.zeros((2, HEADS, 32))
    keys = torch.zeros((2, 2, 32))
    with pytest.raises(StepOrderError, match="attend was called on a step that is new"):
        batch.attend(0, queries)
    with pytest.raises(StepOrderError):
        batch.append(0, keys, keys)
    with pytest.raises(StepOrderError):
        batch.end_step()
    batch.begin_step()
    with pytest.raises(StepOrderError):
        batch.begin_step()
    with pytest.raises(RowCountError, match="1 rows were passed, the step has 2"):
        batch.attend(0, queries[:1])
    batch.append(0, keys, keys)
    batch.end_step()
    with pytest.raises(StepOrderError):
        batch.attend(0, queries)


@pytest.mark.parametrize(
    ("fields", "quantity"),
    [
        ({"count": 0}, "count"),
        ({"start": -1}, "start"),
        ({"start": 16}, "token count"),
        ({"pages": ((3, 2),)}, "page"),
        ({"pages": ((-1, 2),)}, "page"),
        ({"tag": (1,), "pages": ((0, 1), (2, 1))}, "number of tags"),
    ],
)
def test_slices_stay_inside_their_pages(fields: dict[str, Any], quantity: str) -> None:
    """A slice whose pages or tokens are out of bounds never becomes a step."""
    sound: dict[str, Any] = {"pages": ((0, 2),), "tag": 1, "start": 0, "count": 1}
    with pytest.raises(SliceOutOfBoundsError) as caught:
        PagedBatch(poisoned_pool(4), [SequenceSlice(**(sound | fields))])
    assert caught.value.quantity == quantity


def test_tag_zero_is_refused() -> None:
    """Memory that nobody wrote bears tag 0, so no sequence may."""
    with pytest.raises(TagZeroError):
        PagedBatch(poisoned_pool(1), [SequenceSlice(pages=((0, 1),), tag=0, start=0, count=1)])
