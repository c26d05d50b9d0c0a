"""Claims about attention over pages, beside naive arithmetic in float64, whatever a header says."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.layout import PageLayout
from kernels.tables import Fault, PageTables
from tests.paged_world import TOLERANCES, World, make_world
from tests.triton_claims import BACKEND, FIELDS, SMALL, assert_decoded, decode, prefill

# --- Decode attention -----------------------------------------------------------------------------

SHAPES = {
    "awkward lengths": (2, 3, 48, 8, [1, 63, 0, 100]),
    "page borders": (2, 1, 16, 8, [7, 8, 9, 64, 0, 16]),
    "many query heads": (1, 9, 64, 32, [2000]),
    "two splits and one": (2, 4, 16, 32, [1000, 5]),
    "one token a page": (2, 2, 16, 1, [70, 3]),
    "five tokens a page": (2, 2, 16, 5, [63, 5]),
    "pages longer than a tile": (2, 2, 16, 100, [63, 100, 230]),
    "head of 80": (2, 5, 80, 16, [33]),
}


NARROW = ("awkward lengths", "head of 80")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype)
        for dtype in TOLERANCES
        for shape in (SHAPES if dtype.itemsize == 4 else NARROW)
    ],
)
def test_decode_equals_softmax_in_float64(shape: str, dtype: torch.dtype) -> None:
    """Every dtype, awkward lengths, pages and heads; what nobody wrote is NaN and never shows."""
    kv_heads, group, head_dim, page_tokens, lengths = SHAPES[shape]
    layout = PageLayout(
        layers=2,
        kv_heads=max(kv_heads, 64 // head_dim) if dtype != torch.float32 else kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=dtype,
    )
    world = make_world(layout, lengths)
    queries = world.draw(len(lengths), layout.kv_heads * group)
    output, flags = decode(world, queries)
    assert flags == [0] * len(lengths)
    assert_decoded(world, queries, output, range(len(lengths)))


@pytest.mark.parametrize("group", range(1, 10))
def test_every_query_head_reads_its_own_kv_head(group: int) -> None:
    """One to nine query heads for each KV head."""
    world = make_world(SMALL, [17], seed=group)
    queries = world.draw(1, 2 * group)
    output, flags = decode(world, queries)
    assert flags == [0]
    assert_decoded(world, queries, output, [0])


def test_a_neighbour_changes_no_bit() -> None:
    """Alone, or beside a sequence so long that the context is split: equal to the last bit."""
    world = make_world(SMALL, [100, 1, 1100])
    queries = world.draw(3, 4)
    together, _ = decode(world, queries)
    for sequence in (0, 1):
        one = [world.pages[sequence]], [[world.tags[sequence]] * len(world.pages[sequence])]
        alone = PageTables.of(*one, tokens=[world.stored[sequence]], rows=[1])
        output, _ = decode(world, queries[sequence : sequence + 1], alone)
        assert torch.equal(output[0], together[sequence])


@pytest.mark.parametrize("fault", FIELDS)
@pytest.mark.parametrize("logical", [0, 2])
def test_one_foreign_page_flags_its_sequence_alone(fault: Fault, logical: int) -> None:
    """Each header field, first page or later: zeros and a flag; all others to the bit as before."""
    world = make_world(SMALL, [20, 24, 9])
    queries = world.draw(3, 4)
    before, _ = decode(world, queries)
    world.corrupt(1, world.pages[1][logical], *FIELDS[fault])
    output, flags = decode(world, queries)
    assert flags == [0, int(fault), 0]
    assert output[1].eq(0).all()
    assert torch.equal(output[[0, 2]], before[[0, 2]])


def test_another_layers_headers_do_not_matter() -> None:
    """A step reads the headers of the layer that it reads."""
    world = make_world(SMALL, [20])
    world.corrupt(0, world.pages[0][1], 0, 5)
    _, flags = decode(world, world.draw(1, 4), layer=1)
    assert flags == [0]


def test_a_tag_of_zero_is_nobodys() -> None:
    """Cleared memory bears tag 0 in layer 0, position 0: it matches no request."""
    world = make_world(SMALL, [8])
    world.memory.octets.zero_()
    world.tags[0] = 0
    world.memory.words[0, world.pages[0][0], 2] = 8
    output, flags = decode(world, world.draw(1, 4), layer=0)
    assert flags == [int(Fault.HEAD_TAG)]
    assert output.eq(0).all()


@pytest.mark.parametrize("page", [-1, -(1 << 31), 1 << 30, 9])
def test_a_page_outside_the_pool_is_never_followed(page: int) -> None:
    """Negative, huge, and one past the end: a flag and zeros."""
    world = make_world(SMALL, [20, 20])
    assert world.memory.pages == 9
    queries = world.draw(2, 4)
    world.pages[0] = [world.pages[0][0], page, world.pages[0][2]]
    output, flags = decode(world, queries)
    assert flags == [int(Fault.PAGE), 0]
    assert output[0].eq(0).all()
    assert_decoded(world, queries, output, [1])


def test_a_repeated_page_has_a_wrong_position() -> None:
    """A page stands for one logical number, so a table that names it twice is flagged."""
    world = make_world(SMALL, [20])
    world.pages[0][1] = world.pages[0][0]
    output, flags = decode(world, world.draw(1, 4))
    assert flags == [int(Fault.POSITION)]
    assert output.eq(0).all()


@pytest.mark.parametrize("tokens", [25, 1 << 30, -1])
def test_lengths_beyond_the_table_are_flagged(tokens: int) -> None:
    """Nothing behind the table is taken for a page number."""
    world = make_world(SMALL, [20, 20])
    output, flags = decode(world, world.draw(2, 4), world.tables([1, 1], tokens=[tokens, 20]))
    assert flags == [int(Fault.LENGTH), 0]
    assert output[0].eq(0).all()


def test_a_flag_that_is_up_stays_up() -> None:
    """What an earlier layer found silences the later ones, and bits are only added."""
    world = make_world(SMALL, [20, 9])
    queries = world.draw(2, 4)
    flags = torch.tensor([int(Fault.DIGEST), 0], dtype=torch.int32)
    output = torch.full_like(queries, math.nan)
    tables = world.tables([1, 1])
    dispatch.decode_attention(world.memory, 1, queries, tables, flags, output, backend=BACKEND)
    assert flags.tolist() == [int(Fault.DIGEST), 0]
    assert output[0].eq(0).all()
    assert_decoded(world, queries, output, [1])


# --- Prefill attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_prefill_equals_causal_softmax(dtype: torch.dtype) -> None:
    """Chunks at the start and after other pages, of 1 to 41 rows, with rows between them."""
    layout = PageLayout(layers=2, kv_heads=4, head_dim=16, page_tokens=8, dtype=dtype)
    world = make_world(layout, [70, 5, 0, 33])
    rows = [41, 5, 0, 1]
    tables = world.tables(rows)
    tables.first_row.copy_(torch.tensor([2, 43, 0, 49]))
    # Queries are a part of a larger tensor, as the model's are.
    queries = world.draw(51, 16)[:, 4:12]
    output, flags = prefill(world, queries, tables)
    assert flags == [0] * 4
    for sequence, first in ((0, 2), (1, 43), (3, 49)):
        mine = slice(first, first + rows[sequence])
        expected = world.expected(sequence, 1, queries[mine], tokens=world.stored[sequence])
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(output[mine].double(), expected, rtol=0, atol=tolerance)
    nobodys = [0, 1, 48, 50]
    assert output[nobodys].isnan().all()


def test_prefill_and_decode_agree() -> None:
    """A chunk of one token is a decode step."""
    world = make_world(SMALL, [20, 9])
    queries = world.draw(2, 4)
    output, _ = prefill(world, queries, world.tables([1, 1]))
    assert_decoded(world, queries, output, [0, 1])


@pytest.mark.parametrize("logical", [0, 4])
def test_a_foreign_page_silences_every_row_of_a_chunk(logical: int) -> None:
    """Rows that do not see the page are zeros too; the other sequence goes on."""
    world = make_world(SMALL, [40, 11])
    queries = world.draw(46, 4)
    world.corrupt(1, world.pages[0][logical], 0, 1)
    output, flags = prefill(world, queries, world.tables([40, 6]))
    assert flags == [int(Fault.HEAD_TAG), 0]
    assert output[:40].eq(0).all()
    expected = world.expected(1, 1, queries[40:], tokens=11)
    torch.testing.assert_close(output[40:].double(), expected, rtol=0, atol=2e-5)


WRONG_ROWS = {
    "more rows than tokens": ([20, 4], [21, 4], [0, 21]),
    "rows behind the queries": ([20, 4], [3, 4], [0, 23]),
    "a negative first row": ([20, 4], [3, 4], [-1, 3]),
    "a negative count": ([20, 4], [-1, 4], [0, 0]),
}


@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_wrong_rows_are_flagged_and_left_alone(wrong: str) -> None:
    """Neither queries nor outputs outside the tensors are touched; the other sequence goes on."""
    tokens, rows, first = WRONG_ROWS[wrong]
    world = make_world(SMALL, tokens)
    tables = world.tables(rows)
    tables.first_row.copy_(torch.tensor(first))
    bad = 1 if wrong == "rows behind the queries" else 0
    output, flags = prefill(world, world.draw(25, 4), tables)
    assert flags[bad] == int(Fault.LENGTH)
    assert flags[1 - bad] == 0
    good = slice(first[1 - bad], first[1 - bad] + rows[1 - bad])
    assert output[good].isfinite().all()
    left_alone = torch.ones(25, dtype=torch.bool)
    left_alone[good] = False
    assert output[left_alone].isnan().all()


# --- Any fault ------------------------------------------------------------------------------------

PAGE_TOKENS = SMALL.page_tokens


def is_foreign(world: World, tables: PageTables, sequence: int, *, layer: int) -> bool:
    """Whether any live page of a sequence does not bear what its table says, by the words."""
    tokens = world.stored[sequence]
    for logical in range(-(-tokens // PAGE_TOKENS)):
        page, tag = int(tables.pages[sequence, logical]), int(tables.tags[sequence, logical])
        if not 0 <= page < world.memory.pages:
            return True
        words = world.memory.words[layer, page].tolist()
        needed = min(PAGE_TOKENS, tokens - logical * PAGE_TOKENS)
        sound = (
            words[0] == words[-1] == tag
            and words[1] == layer | logical << 32
            and needed <= words[2] & 0xFFFFFFFF <= PAGE_TOKENS
        )
        if not sound:
            return True
    return False


@settings(max_examples=15 if BACKEND == "triton" else 60)
@given(st.data())
def test_whatever_could_reach_an_output_is_flagged(data: st.DataObject) -> None:
    """Any header bit, any word, any table entry: flagged exactly where a live page is not its own.

    A sound sequence keeps its bits; a flagged one is zeros; what a header says that nobody reads
    (padding, spare pages, other layers) flags nobody. A chunk of rows sees what a single one sees.
    """
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    world = make_world(SMALL, lengths, seed=data.draw(st.integers(0, 3)))
    queries = world.draw(len(lengths), 2)
    before, flags = decode(world, queries)
    assert flags == [0] * len(lengths)
    tables = world.tables([1] * len(lengths))
    rows = [min(2, tokens) for tokens in lengths]
    as_chunks = world.tables(rows)
    chunk = {name: getattr(as_chunks, name) for name in ("rows", "first_row", "rows_max")}
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.booleans()) and tables.width:
            sequence = data.draw(st.integers(0, len(lengths) - 1))
            logical = data.draw(st.integers(0, tables.width - 1))
            tables.pages[sequence, logical] = data.draw(st.integers(-2, world.memory.pages + 1))
        else:
            page = data.draw(st.integers(0, world.memory.pages - 1))
            word = data.draw(st.sampled_from([0, 1, 2, 3, 4, -2, -1]))
            world.corrupt(
                data.draw(st.integers(0, 1)), page, word, 1 << data.draw(st.integers(0, 63))
            )
    output, flags = decode(world, queries, tables)
    for sequence in range(len(lengths)):
        foreign = is_foreign(world, tables, sequence, layer=1)
        assert bool(flags[sequence]) == foreign
        wanted = torch.zeros_like(before[sequence]) if foreign else before[sequence]
        assert torch.equal(output[sequence], wanted)
    _, chunk_flags = prefill(world, world.draw(sum(rows), 2), dataclasses.replace(tables, **chunk))
    assert chunk_flags == flags


def test_every_pair_of_faults_is_told() -> None:
    """Two wrong fields raise two bits: a flag says everything that is wrong."""
    for one, two in itertools.combinations(FIELDS, 2):
        world = make_world(SMALL, [24])
        for fault, logical in ((one, 0), (two, 2)):
            world.corrupt(1, world.pages[0][logical], *FIELDS[fault])
        _, flags = decode(world, world.draw(1, 2))
        assert flags == [int(one | two)]
