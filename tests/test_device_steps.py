"""Claims about steps on a device, beside the steps on a CPU; the operations are the reference's here."""

from __future__ import annotations

import pytest
import torch

from engine.device_steps import DeviceBatch, make_batch
from engine.paged import PagedBatch, RowCountError, SliceOutOfBoundsError, StepOrderError
from engine.pool import KVPool
from kernels.headers import TagZeroError
from tests.test_paged import (
    CONTIGUOUS,
    LENGTHS,
    SCATTERED,
    TAGS,
    Sequence,
    forward,
    opened,
    poisoned_pool,
)


def work(pool: KVPool, *counts: int) -> list[tuple[Sequence, int]]:
    """New sequences in a pool of ten pages, each with what it is to append."""
    runs = (((0, 1), (7, 1), (3, 1)), ((9, 1), (4, 2)), ((1, 2),))
    made = [
        (Sequence(runs[number], TAGS[number], seed=number), count)
        for number, count in enumerate(counts)
    ]
    opened(pool, *(sequence for sequence, _ in made))
    return made


@pytest.mark.parametrize("runs", [CONTIGUOUS, SCATTERED])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_device_gives_what_a_cpu_gives(length: int, runs: tuple[tuple[int, int], ...]) -> None:
    """A chunk and four decode steps: outputs within rounding, pool and counters equal."""
    pools, outputs = [], []
    for kind in (PagedBatch, DeviceBatch):
        sequence = Sequence(runs, TAGS[0], seed=length)
        pool = opened(poisoned_pool(10), sequence)
        steps = []
        for count in (length, 1, 1, 1):
            batch = kind(pool, [sequence.slice(count)])
            batch.begin_step()
            steps += forward(batch, [(sequence, count)])
            assert batch.end_step() == {}
            sequence.tokens += count
        pools.append(pool)
        outputs.append(torch.cat(steps))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(pools[0].memory.octets, pools[1].memory.octets)
    assert pools[0].counters == pools[1].counters


def test_sequences_of_a_batch_keep_to_themselves() -> None:
    """Chunks of different lengths and a decode step in one pass."""
    pool = poisoned_pool(10)
    parts = work(pool, 13, 1, 9)
    batch = DeviceBatch(pool, [sequence.slice(count) for sequence, count in parts])
    batch.begin_step()
    outputs = forward(batch, parts)
    assert batch.end_step() == {}
    first = 0
    for sequence, count in parts:
        expected = sequence.expected(1, count)
        torch.testing.assert_close(outputs[1][first : first + count], expected)
        first += count


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_foreign_page_fails_its_sequence_alone(layer: int, when: str) -> None:
    """Whenever a header turns wrong during a step, no token of that sequence leaves."""
    pool = poisoned_pool(10)
    parts = work(pool, 13, 9)
    batch = DeviceBatch(pool, [sequence.slice(count) for sequence, count in parts])
    if when == "before":
        pool.memory.words[layer, 4, 0] = 77
    batch.begin_step()
    if when == "between":
        pool.memory.words[layer, 4, 0] = 77
    outputs = forward(batch, parts)
    if when == "after":
        pool.memory.words[layer, 4, 0] = 77
    failed = batch.end_step()
    assert list(failed) == [1]
    found = failed[1]
    assert (found.page, found.layer, found.field) == (4, layer, "head_tag")
    assert (found.expected, found.found) == (TAGS[1], 77)
    torch.testing.assert_close(outputs[1][:13], parts[0][0].expected(1, 13))
    if when != "after":
        assert outputs[1][13:].eq(0).all()
    assert pool.counters.mismatches == 1


def test_a_header_that_was_wrong_for_a_while_is_told() -> None:
    """A flag stays up when the page looks right again by the end of the step."""
    pool = poisoned_pool(10)
    parts = work(pool, 13)
    batch = DeviceBatch(pool, [sequence.slice(count) for sequence, count in parts])
    pool.memory.words[1, 7, 0] ^= 1
    batch.begin_step()
    pool.memory.words[1, 7, 0] ^= 1
    forward(batch, parts)
    failed = batch.end_step()
    assert failed[0].field == "head_tag"
    assert failed[0].page in (0, 7, 3)


def test_nothing_happens_out_of_order() -> None:
    """The same typed errors as on a CPU."""
    pool = poisoned_pool(10)
    parts = work(pool, 3)
    batch = DeviceBatch(pool, [parts[0][0].slice(3)])
    with pytest.raises(StepOrderError):
        batch.append(0, torch.zeros(3, 2, 32), torch.zeros(3, 2, 32))
    with pytest.raises(StepOrderError):
        batch.end_step()
    batch.begin_step()
    with pytest.raises(StepOrderError):
        batch.begin_step()
    with pytest.raises(RowCountError):
        batch.attend(0, torch.zeros(4, 6, 32))


def test_bounds_are_those_of_a_cpus_steps() -> None:
    """Pages outside the pool and tags of 0 are a caller's mistake, told before anything is read."""
    pool = poisoned_pool(10)
    with pytest.raises(SliceOutOfBoundsError):
        DeviceBatch(pool, [Sequence(((9, 2),), TAGS[0], seed=0).slice(3)])
    with pytest.raises(TagZeroError):
        DeviceBatch(pool, [Sequence(((8, 2),), 0, seed=0).slice(3)])


def test_the_pools_device_chooses() -> None:
    """Memory of a CPU is served by the CPU's steps."""
    pool = poisoned_pool(10)
    assert isinstance(make_batch(pool, [work(pool, 3)[0][0].slice(3)]), PagedBatch)
