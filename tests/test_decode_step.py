"""Compiled decode steps are the plain ones: same logits, same headers, same refusals, row by row."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.allocator import PageRun
from engine.compiled_step import CompiledSteps
from engine.decode_step import DecodeSteps, PlainSteps, make_steps
from engine.model import Model
from engine.paged import PagedBatch, RowCountError, SequenceSlice, SliceOutOfBoundsError
from engine.pool import KVPool, PoolCounters
from engine.team import Team
from engine.weights import load_model
from kernels import cpu
from kernels.headers import TagZeroError
from kernels.layout import PageLayout
from tests import greedy
from tests.test_model import SHAPES, some_tokens
from tests.tiny import tiny_llama

PAGES_EACH = 12
STEPS = 3
TOLERANCE = 2e-4
LENGTHS = (1, 7, 8, 9, 31, 40, 63, 64, 2, 17, 33, 5, 80, 12, 24, 55)
"""Tokens of each sequence before the first step: one, full last pages, and several parts."""
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(tiny_llama(tmp_path_factory.mktemp("model") / "tiny", heads=6))


class Room:
    """A pool of poisoned pages in which sequences of these lengths were computed."""

    def __init__(self, model: Model, lengths: tuple[int, ...], *, page_tokens: int = 8) -> None:
        config = model.config
        layout = PageLayout(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            page_tokens=page_tokens,
        )
        self.model = model
        self.lengths = lengths
        self.pool = KVPool.allocate(layout, PAGES_EACH * len(lengths))
        # What nobody wrote is not a number, so that an output that read it is none either.
        self.pool.memory.rows.fill_(float("nan"))
        self.tables = greedy.shuffled_pages(len(lengths), pages_each=PAGES_EACH, seed=1)
        self.prompts = [
            some_tokens(count + STEPS, vocabulary=config.vocabulary, seed=number)
            for number, count in enumerate(lengths)
        ]
        for number, count in enumerate(lengths):
            table = self.tables[number]
            self.pool.open_pages(table, tag=number + 1, first_position=0)
            batch = PagedBatch(self.pool, [SequenceSlice(table, number + 1, 0, count)])
            batch.begin_step()
            model.fill(torch.tensor(self.prompts[number][:count]), torch.arange(count), batch)
            batch.end_step()

    def slices(self, numbers: list[int], *, done: int = 0) -> list[SequenceSlice]:
        return [SequenceSlice(self.tables[n], n + 1, self.lengths[n] + done, 1) for n in numbers]

    def run(self, steps: DecodeSteps, numbers: list[int], *, done: int = 0) -> Tensor:
        """The logits of one step of these sequences; none may fail."""
        tokens = [self.prompts[n][self.lengths[n] + done] for n in numbers]
        outcome = steps.run(tokens, self.slices(numbers, done=done))
        assert outcome.mismatches == {}
        return outcome.logits.clone()


def compiled(room: Room, *, threads: int = 1) -> CompiledSteps:
    steps = make_steps(room.model, room.pool, threads=threads)
    assert isinstance(steps, CompiledSteps)
    return steps


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_compiled_steps_are_the_plain_ones(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Logits agree within 2e-4 and pages bear the same headers after each of several steps."""
    model = load_model(tiny_llama(tmp_path / "tiny", **shape))
    rooms = [Room(model, LENGTHS[:6]), Room(model, LENGTHS[:6])]
    steps: list[DecodeSteps] = [PlainSteps(model, rooms[0].pool), compiled(rooms[1], threads=2)]
    everyone = list(range(6))
    for done in range(STEPS):
        expected, found = (
            room.run(way, everyone, done=done) for room, way in zip(rooms, steps, strict=True)
        )
        assert expected.std() > 0.5
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        words = [room.pool.memory.words for room in rooms]
        assert torch.equal(words[0][:, :, :4], words[1][:, :, :4])
    counters = [room.pool.counters for room in rooms]
    assert counters[0] == counters[1]


@pytest.mark.parametrize("page_tokens", [1, 2, 3, 32, 100])
def test_a_page_may_have_any_number_of_tokens(model: Model, page_tokens: int) -> None:
    """Pages that are no multiple of a vector's lanes give the same logits."""
    lengths = (1, 9, 11)
    rooms = [Room(model, lengths, page_tokens=page_tokens) for _ in range(2)]
    if page_tokens == 1:
        rooms = [Room(model, (1, 5, 8), page_tokens=1) for _ in range(2)]
    expected = rooms[0].run(PlainSteps(model, rooms[0].pool), [0, 1, 2])
    found = rooms[1].run(compiled(rooms[1]), [0, 1, 2])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_the_tolerance_sees_a_wrong_weight(model: Model) -> None:
    """The comparison above can fail: one element of one matrix, off by a tenth, is seen."""
    rooms = [Room(model, LENGTHS[:6]), Room(model, LENGTHS[:6])]
    everyone = list(range(6))
    expected = rooms[0].run(PlainSteps(model, rooms[0].pool), everyone)
    weight = model.weights.layers[1].output
    assert isinstance(weight, Tensor)
    before = float(weight[3, 3])
    weight[3, 3] += 0.1
    found = rooms[1].run(compiled(rooms[1]), everyone)
    weight[3, 3] = before
    assert (found - expected).abs().max() > 2 * TOLERANCE


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_does_not_depend_on_its_company(model: Model, threads: int) -> None:
    """Alone, in any batch of up to 16, and on any number of threads: the same bits."""
    everyone = list(range(len(LENGTHS)))
    room = Room(model, LENGTHS)
    alone = compiled(room)
    expected = torch.cat([room.run(alone, [number]) for number in everyone])
    for count in everyone:
        room = Room(model, LENGTHS)
        numbers = [*everyone[count:], *everyone[:count]][: count + 1]
        found = room.run(compiled(room, threads=threads), numbers)
        assert torch.equal(found, expected[numbers])


@pytest.mark.parametrize("word", [0, 1, 2, -1])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("logical", [0, 4])
def test_a_wrong_header_fails_its_sequence_alone(
    model: Model, word: int, layer: int, logical: int
) -> None:
    """A changed tag at either end, layer, position or filled is named as the definition names it,
    its headers stay as they are, and the other rows have the bits that they have without it.
    """
    lengths = (40, 39, 7)
    sound = Room(model, lengths)
    expected = sound.run(compiled(sound), [0, 1, 2])
    rooms = [Room(model, lengths), Room(model, lengths)]
    page = rooms[0].tables[1][logical][0]
    for room in rooms:
        # Filled counts down from what is there, all other words to another value.
        room.pool.memory.words[layer, page, word] -= 1
    rooms[1].pool.counters = PoolCounters()
    before = rooms[1].pool.memory.words[:, page, :4].clone()
    tokens = [room.prompts[n][lengths[n]] for room in rooms[:1] for n in range(3)]
    ways: list[DecodeSteps] = [PlainSteps(model, rooms[0].pool), compiled(rooms[1], threads=2)]
    outcomes = [
        way.run(tokens, room.slices([0, 1, 2])) for room, way in zip(rooms, ways, strict=True)
    ]
    assert outcomes[0].mismatches == outcomes[1].mismatches
    assert list(outcomes[1].mismatches) == [1]
    assert torch.equal(outcomes[1].logits[[0, 2]], expected[[0, 2]])
    assert torch.equal(rooms[1].pool.memory.words[:, page, :4], before)
    # Of six, five and one live pages in two layers the failed row's are not looked at to the end.
    assert rooms[1].pool.counters == PoolCounters(
        reads_checked=24, reads_rechecked=14, mismatches=1, reads_unchecked=0
    )


def test_a_page_of_another_contributes_nothing(model: Model) -> None:
    """A table that names another sequence's page gives a mismatch, and that page's bytes do not
    move the failed row either: whatever stands there, its logits are the same.
    """
    found = []
    for seed in (1, 2):
        room = Room(model, (40, 40))
        stranger = room.tables[0][2][0]
        room.pool.memory.rows[:, stranger * 9 : stranger * 9 + 8].normal_(
            generator=torch.Generator().manual_seed(seed)
        )
        table = (*room.tables[1][:2], (stranger, 1), *room.tables[1][3:])
        steps = compiled(room)
        outcome = steps.run([5], [SequenceSlice(table, 2, 40, 1)])
        mismatch = outcome.mismatches[0]
        assert (mismatch.page, mismatch.field, mismatch.found) == (stranger, "head_tag", 1)
        found.append(outcome.logits.clone())
    assert torch.equal(*found)


def test_a_fault_that_goes_away_again_is_named_as_found(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step saw is reported although the memory is sound when it is looked at again."""
    room = Room(model, (40,))
    page = room.tables[0][1][0]
    steps = compiled(room)
    head = int(room.pool.memory.words[1, page, 0])
    room.pool.memory.words[1, page, 0] = 77
    run = steps._team.run

    def repaired(work: Any) -> None:
        run(work)
        room.pool.memory.words[1, page, 0] = head

    monkeypatch.setattr(steps._team, "run", repaired)
    mismatch = steps.run([5], room.slices([0])).mismatches[0]
    assert (mismatch.page, mismatch.layer, mismatch.field, mismatch.found) == (
        page,
        1,
        "head_tag",
        77,
    )


@pytest.mark.parametrize(
    ("pages", "start", "count", "quantity"),
    [
        (((0, 1),), 8, 1, "token count"),
        (((-1, 2),), 8, 1, "page"),
        (((23, 2),), 8, 1, "page"),
        (((0, 2),), -1, 1, "start"),
        (((0, 2),), 3, 0, "count"),
        (((0, 2),), 3, 2, "count"),
    ],
)
def test_a_bad_table_is_refused(
    model: Model, pages: tuple[PageRun, ...], start: int, count: int, quantity: str
) -> None:
    """Pages outside the pool, too few of them, and odd counts are errors that name the quantity."""
    room = Room(model, (40, 40))
    with pytest.raises(SliceOutOfBoundsError, match=quantity):
        compiled(room).run([1], [SequenceSlice(pages, 5, start, count)])
    with pytest.raises(TagZeroError):
        compiled(room).run([1], [SequenceSlice(room.tables[0], 0, 40, 1)])


@pytest.mark.parametrize("count", [1, 3])
def test_each_sequence_has_one_token(model: Model, count: int) -> None:
    """Too few would leave rows of an earlier step, too many would move memory under an address."""
    room = Room(model, (3, 4))
    with pytest.raises(RowCountError):
        compiled(room).run([5] * count, room.slices([0, 1]))


def test_no_sequences_give_no_rows(model: Model) -> None:
    """An empty step computes nothing."""
    room = Room(model, (3,))
    assert compiled(room).run([], []).logits.shape == (0, model.config.vocabulary)


def test_what_cannot_be_compiled_runs_plainly(tmp_path: Path) -> None:
    """Other types and odd sizes take the plain path and say why."""
    half = load_model(tiny_llama(tmp_path / "half"), dtype=torch.bfloat16)
    layout = PageLayout(layers=2, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    steps = make_steps(half, KVPool.allocate(layout, 2), threads=1)
    assert (steps.path, steps.reason) == ("plain", "not float32")
    odd = load_model(tiny_llama(tmp_path / "odd", mlp=100))
    layout = PageLayout(layers=2, kv_heads=2, head_dim=16)
    steps = make_steps(odd, KVPool.allocate(layout, 2), threads=1)
    assert steps.reason == "MLP size 100 is no multiple of 32"


def test_without_the_compiler_steps_are_plain(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation without numba decodes all the same, and says what is missing."""
    cpu.load_compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "kernels.cpu_entry", None)
    room = Room(model, (3,))
    steps = make_steps(model, room.pool, threads=1)
    assert (steps.path, steps.reason) == (
        "plain",
        "kernels.cpu_entry cannot be imported",
    )
    cpu.load_compiled.cache_clear()


@pytest.mark.model
@pytest.mark.parametrize("threads", [1, 2])
def test_greedy_answers_are_those_kept(model_path: Path, threads: int) -> None:
    """Fifty prompts over shuffled pages give the tokens that plain torch gave when recorded."""
    kept = greedy.kept()
    asked = [list(answer.prompt) for answer in kept]
    model = load_model(model_path)
    found = greedy.answers(model, asked, lambda m, pool: make_steps(m, pool, threads=threads))
    assert len(kept) == 50
    assert found == kept


# --- the team -------------------------------------------------------------------------------------


def test_a_team_works_with_numbers_of_their_own() -> None:
    """Each thread that takes part has its own number, and the caller is number 0."""
    seen: list[int] = []
    met = threading.Barrier(3, timeout=20)

    def work(number: int) -> None:
        met.wait()
        seen.append(number)

    Team(3).run(work)
    assert sorted(seen) == [0, 1, 2]


def test_nobody_is_in_the_work_when_it_is_over() -> None:
    """Whoever has begun is waited for; whoever comes late is left out."""
    team, inside, free = Team(4), [], threading.Event()

    def work(number: int) -> None:
        if number:
            inside.append(number)
            free.wait(20)
            inside.remove(number)
        else:
            free.set()

    for _ in range(50):
        free.clear()
        team.run(work)
        assert inside == []


def test_a_fault_in_a_helper_is_raised_to_the_caller() -> None:
    """What goes wrong in another thread is not lost."""
    begun = threading.Event()

    def work(number: int) -> None:
        if number:
            begun.set()
            raise ArithmeticError("in a helper")
        begun.wait(20)

    with pytest.raises(ArithmeticError, match="in a helper"):
        Team(2).run(work)


def test_a_team_starts_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thread cannot be had, those before it end and nothing is done; the next work has all."""
    helpers: list[threading.Thread] = []
    seen: list[int] = []
    team, start = Team(3), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "step-2":
            raise RuntimeError("can't start new thread")
        helpers.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            team.run(seen.append)
    assert seen == []
    (helper,) = helpers
    helper.join(20)
    assert not helper.is_alive()
    met = threading.Barrier(3, timeout=20)
    team.run(lambda _: seen.append(met.wait()))
    assert sorted(seen) == [0, 1, 2]
