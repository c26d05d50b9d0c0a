"""Claims about the operations on pages, beside naive arithmetic in float64.

The whole file runs twice: here over the plain-torch reference, and by `test_triton_interpreter`
with Triton's interpreter, where BACKEND is `triton`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import digest, dispatch, pack
from kernels.digest import to_signed, to_unsigned
from kernels.dispatch import Backend
from kernels.layout import PageLayout, PageMemory
from kernels.tables import Fault, OperandError, PageLabels, PageTables, new_flags
from tests.paged_world import TOLERANCES, World, make_world

BACKEND: Backend = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "reference"
CPU = torch.device("cpu")
SMALL = PageLayout(layers=2, kv_heads=2, head_dim=16, page_tokens=8)


def decode(
    world: World, queries: Tensor, tables: PageTables | None = None, *, layer: int = 1
) -> tuple[Tensor, list[int]]:
    """Attention into an output of NaN, and the flags."""
    tables = tables or world.tables([1] * len(world.pages))
    flags, output = new_flags(tables.sequences, CPU), torch.full_like(queries, math.nan)
    dispatch.decode_attention(world.memory, layer, queries, tables, flags, output, backend=BACKEND)
    return output, flags.tolist()


def prefill(
    world: World, queries: Tensor, tables: PageTables, *, layer: int = 1
) -> tuple[Tensor, list[int]]:
    flags = new_flags(tables.sequences, CPU)
    output = torch.full(queries.shape, math.nan, dtype=queries.dtype)
    dispatch.prefill_attention(world.memory, layer, queries, tables, flags, output, backend=BACKEND)
    return output, flags.tolist()


def assert_decoded(world: World, queries: Tensor, output: Tensor, sequences: Sequence[int]) -> None:
    tolerance = TOLERANCES[world.layout.dtype]
    for sequence in sequences:
        tokens = world.stored[sequence]
        if tokens == 0:
            assert output[sequence].eq(0).all()
            continue
        expected = world.expected(sequence, 1, queries[sequence][None], tokens=tokens)[0]
        torch.testing.assert_close(output[sequence].double(), expected, rtol=0, atol=tolerance)


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


FIELDS = {
    Fault.HEAD_TAG: (0, 1 << 63),
    Fault.TAIL_TAG: (-1, 1),
    Fault.LAYER: (1, 1),
    Fault.POSITION: (1, 1 << 32),
    Fault.FILLED: (2, 1 << 3),
}
"""Which word and bits make each fault in a full page of 8 tokens."""


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


# --- Writing --------------------------------------------------------------------------------------


def write(world: World, tables: PageTables, *, layer: int = 1) -> list[int]:
    """Write what each sequence is to hold next."""
    parts: list[list[Tensor]] = [[], []]
    for sequence in range(tables.sequences):
        tokens, rows = int(tables.tokens[sequence]), int(tables.rows[sequence])
        for part, all_rows in zip(parts, (world.keys, world.values), strict=True):
            part.append(all_rows[sequence][layer, max(0, tokens - rows) : tokens])
    both = torch.stack([torch.cat(part) for part in parts], 1)
    flags = new_flags(tables.sequences, CPU)
    # Keys and values are views of one tensor, as the model's are.
    dispatch.write_tokens(
        world.memory, layer, both[:, 0], both[:, 1], tables, flags, backend=BACKEND
    )
    return flags.tolist()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_written_is_read(dtype: torch.dtype) -> None:
    """Across page borders, into empty and part-filled pages; every other byte stays as it was."""
    layout = PageLayout(layers=2, kv_heads=4, head_dim=16, page_tokens=8, dtype=dtype)
    room = [40, 8, 16, 0, 24]
    world = make_world(layout, [13, 7, 8, 0, 0], room=room)
    rows = [20, 1, 1, 0, 17]
    world.stored = [33, 8, 9, 0, 17]
    expected = make_world(layout, world.stored, room=room)
    assert write(world, world.tables(rows)) == [0] * 5
    for name in ("words", "data"):
        found, wanted = getattr(world.memory, name), getattr(expected.memory, name)
        # Pages that were only filled bear no digest any more; nothing was sealed here.
        assert torch.equal(found[1], wanted[1]), name
    queries = world.draw(5, 4)
    output, flags = decode(world, queries)
    assert flags == [0] * 5
    assert_decoded(world, queries, output, range(5))


def test_an_appended_page_bears_no_digest() -> None:
    """Header words: filled without algorithm, digest 0; pages that were full keep theirs."""
    world = make_world(SMALL, [12], room=[24])
    world.memory.words[1, world.pages[0], 2] |= 1 << 32
    world.memory.words[1, world.pages[0], 3] = 77
    world.stored = [17]
    assert write(world, world.tables([5])) == [0]
    words = world.memory.words[1, world.pages[0]]
    assert words[:, 2].tolist() == [8 | 1 << 32, 8, 1]
    assert words[:, 3].tolist() == [77, 0, 0]


@pytest.mark.parametrize("fault", [*FIELDS, Fault.PAGE, Fault.LENGTH, Fault.DIGEST])
def test_a_flagged_sequence_is_not_written_at_all(fault: Fault) -> None:
    """One wrong page among those that a chunk touches: no byte of the pool changes for it."""
    world = make_world(SMALL, [4, 3], room=[24, 8])
    world.stored = [22, 4]
    middle = world.pages[0][1]
    tables = world.tables([18, 1])
    flags = [0, 0]
    if fault in FIELDS:
        # In an empty page only a count above the page's size is wrong.
        word, bits = (2, 1 << 4) if fault == Fault.FILLED else FIELDS[fault]
        world.corrupt(1, middle, word, bits)
    elif fault == Fault.PAGE:
        tables.pages[0, 1] = world.memory.pages
    elif fault == Fault.LENGTH:
        tables.first_row[0] = 2
    before = world.memory.octets.clone()
    if fault == Fault.DIGEST:
        keys = world.draw(19, 2)
        up = torch.tensor([int(fault), 0], dtype=torch.int32)
        dispatch.write_tokens(world.memory, 1, keys, keys, tables, up, backend=BACKEND)
        flags = up.tolist()
    else:
        flags = write(world, tables)
    assert flags == [int(fault), 0]
    changed = (world.memory.octets != before).view(2, world.memory.pages, -1).any(-1)
    mine = torch.zeros_like(changed)
    mine[1, world.pages[1][0]] = True
    assert torch.equal(changed, mine)


def test_a_page_is_not_appended_to_behind_a_gap() -> None:
    """A page that holds fewer tokens than stand before the step's is not the one that was meant."""
    world = make_world(SMALL, [4])
    world.stored = [7]
    assert write(world, world.tables([2])) == [int(Fault.FILLED)]


# --- Checks, digests, copies ----------------------------------------------------------------------


def labels_of(world: World, sequence: int = 0) -> PageLabels:
    pages, size = world.pages[sequence], world.layout.page_tokens
    filled = [min(size, world.stored[sequence] - n * size) for n in range(len(pages))]
    tags = [world.tags[sequence]] * len(pages)
    return PageLabels.of(pages, tags, positions=range(len(pages)), filled=filled)


@pytest.mark.parametrize("fault", FIELDS)
def test_a_check_sees_every_layer(fault: Fault) -> None:
    """Each field, in the first and the last layer, raises the flag of its page alone."""
    for layer in (0, 1):
        world = make_world(SMALL, [24])
        word, bits = FIELDS[fault]
        world.corrupt(layer, world.pages[0][1], word, bits)
        flags = new_flags(3, CPU)
        dispatch.check_headers(world.memory, labels_of(world), flags, backend=BACKEND)
        assert flags.tolist() == [0, int(fault), 0]


def test_labels_that_no_page_can_have_are_flagged() -> None:
    """Pages outside the pool and impossible counts, by checks and digests alike."""
    world = make_world(SMALL, [24])
    labels = PageLabels.of(
        [-1, world.memory.pages, world.pages[0][0], world.pages[0][0], world.pages[0][0]],
        [world.tags[0]] * 5,
        positions=[0] * 5,
        filled=[1, 1, -1, 9, 8],
    )
    wanted = [int(Fault.PAGE)] * 2 + [int(Fault.LENGTH)] * 2 + [0]
    flags = new_flags(5, CPU)
    dispatch.check_headers(world.memory, labels, flags, backend=BACKEND)
    assert flags.tolist() == wanted
    flags = new_flags(5, CPU)
    digests = dispatch.digest_pages(world.memory, labels, flags, backend=BACKEND)
    assert flags.tolist() == wanted
    assert digests[:, :4].eq(0).all()
    assert digests[:, 4].ne(0).all()


@pytest.mark.parametrize("page_tokens", [1, 5, 32])
def test_digests_equal_the_hosts_to_the_bit(page_tokens: int) -> None:
    """Poisoned words behind what is filled do not count; extreme words are summed as they are."""
    layout = PageLayout(layers=3, kv_heads=3, head_dim=16, page_tokens=page_tokens)
    world = make_world(layout, [page_tokens * 2 + (page_tokens + 1) // 2])
    world.memory.data[1, world.pages[0][0], :4] = torch.tensor(
        [-(1 << 31), (1 << 31) - 1, -1, 0x7F800000], dtype=torch.int32
    )
    labels = labels_of(world)
    flags = new_flags(labels.count, CPU)
    found = dispatch.digest_pages(world.memory, labels, flags, backend=BACKEND)
    filled = labels.filled.long()
    sums = digest.data_sums(world.memory, labels.pages.long(), filled)
    wanted = digest.seal(sums, tags=labels.tags, positions=labels.positions.long(), filled=filled)
    assert torch.equal(found, wanted)
    assert flags.eq(0).all()


@pytest.mark.parametrize(
    "change", ["element", "elements swapped", "pages swapped", "layers swapped"]
)
def test_digests_see_changes_and_swaps(change: str) -> None:
    """Any single changed element, two swapped ones, swapped pages and swapped layers."""
    world = make_world(SMALL, [16])
    labels, flags = labels_of(world), new_flags(2, CPU)
    before = dispatch.digest_pages(world.memory, labels, flags, backend=BACKEND)
    data, (one, two) = world.memory.data, world.pages[0]
    if change == "element":
        data[1, one, 5] ^= 1
    elif change == "elements swapped":
        data[1, one, [5, 6]] = data[1, one, [6, 5]]
    elif change == "pages swapped":
        data[:, [one, two]] = data[:, [two, one]]
    else:
        data[[0, 1]] = data[[1, 0]]
    after = dispatch.digest_pages(world.memory, labels, flags, backend=BACKEND)
    alone = change.startswith("element")
    expected = torch.tensor([[False, False], [True, False]] if alone else [[True] * 2] * 2)
    assert torch.equal(before != after, expected)


def copied(
    world: World, labels: PageLabels, slots: list[int], tag: int, *, sealed: bool = False
) -> tuple[PageMemory, list[int], Tensor]:
    target = PageMemory.allocate(world.layout, 8)
    target.octets.fill_(0xFF)
    flags = new_flags(labels.count, CPU)
    digests = dispatch.copy_pages(
        world.memory,
        target,
        labels,
        flags,
        target_pages=torch.tensor(slots, dtype=torch.int32),
        target_tags=torch.full((len(slots),), to_signed(tag)),
        sealed=sealed,
        backend=BACKEND,
    )
    return target, flags.tolist(), digests


def test_packed_pages_are_the_hosts_to_the_byte() -> None:
    """The same slots, bytes and range digest as the packing on a host, and they verify there."""
    world = make_world(SMALL, [21])
    labels, slots, tag = labels_of(world), [5, 0, 3], (1 << 63) + 9
    target, flags, digests = copied(world, labels, slots, tag)
    assert flags == [0] * 3
    host = PageMemory.allocate(SMALL, 8)
    host.octets.fill_(0xFF)
    places = {"positions": labels.positions.long(), "filled": labels.filled.long()}
    wanted = pack.pack(
        world.memory, labels.pages.long(), host, torch.tensor(slots), tag=tag, **places
    )
    assert torch.equal(target.octets, host.octets)
    assert to_unsigned(int(digests.sum())) == wanted
    report = pack.verify(target, torch.tensor(slots), tag=tag, **places)
    assert report.mismatch is None
    assert report.digest == wanted


def test_unpacked_pages_bear_the_next_grants_tag() -> None:
    """There and back: the same rows under a third tag, sealed again."""
    world = make_world(SMALL, [21])
    packed, _, _ = copied(world, labels_of(world), [5, 0, 3], 77)
    labels = PageLabels.of([5, 0, 3], [77] * 3, positions=range(3), filled=[8, 8, 5])
    buffer = World(SMALL, packed, [], [], [], [], [], world.generator)
    target, flags, digests = copied(buffer, labels, [1, 2, 4], 78, sealed=True)
    assert flags == [0] * 3
    report = pack.verify(
        target,
        torch.tensor([1, 2, 4]),
        tag=78,
        positions=torch.arange(3),
        filled=torch.tensor([8, 8, 5]),
    )
    assert report.mismatch is None
    assert report.digest == to_unsigned(int(digests.sum()))


@pytest.mark.parametrize("what", ["data", "digest", "algorithm", "filled", *FIELDS])
def test_a_page_that_arrived_altered_is_not_unpacked(what: str | Fault) -> None:
    """Any altered word of the source: a flag, and an empty page under no tag."""
    world = make_world(SMALL, [24])
    packed, _, _ = copied(world, labels_of(world), [0, 1, 2], 77)
    labels = PageLabels.of([0, 1, 2], [77] * 3, positions=range(3), filled=[8, 8, 8])
    buffer = World(SMALL, packed, [], [], [], [], [], world.generator)
    if what == "data":
        packed.data[0, 1, 9] ^= 4
    elif what == "filled":
        labels.filled[1] = 7
    else:
        places: dict[object, tuple[int, int]] = {"digest": (3, 1), "algorithm": (2, 1 << 33)}
        buffer.corrupt(0, 1, *(places | {**FIELDS})[what])
    target, flags, digests = copied(buffer, labels, [0, 1, 2], 78, sealed=True)
    assert flags[0] == flags[2] == 0
    assert flags[1] != 0
    assert digests[0, 1] == 0
    assert target.words[0, 1, [0, 1, 2, 3, -1]].eq(0).all()
    assert target.words[:, 0, 0].eq(78).all()


def test_targets_outside_or_named_twice_are_not_written() -> None:
    """Which of two copies would win is never a question."""
    world = make_world(SMALL, [32])
    target, flags, _ = copied(world, labels_of(world), [2, 8, 2, 1], 5)
    assert flags == [int(Fault.PAGE)] * 3 + [0]
    written = target.octets.view(2, 8, -1).ne(0xFF).any(-1)
    assert written.tolist() == [[False, True, *[False] * 6]] * 2


def test_a_foreign_source_page_is_never_shipped() -> None:
    """Its slot comes out empty, without a byte of the page, and its neighbours are sealed."""
    world = make_world(SMALL, [24])
    world.corrupt(1, world.pages[0][1], 0, 1)
    target, flags, digests = copied(world, labels_of(world), [0, 1, 2], 5)
    assert flags == [0, int(Fault.HEAD_TAG), 0]
    assert target.octets.view(2, 8, -1)[1, 1].eq(0).all()
    assert digests.ne(0).tolist() == [[True] * 3, [True, False, True]]


# --- Bad operands ---------------------------------------------------------------------------------


def test_operands_that_do_not_fit_are_named_with_both_sides() -> None:
    """Shapes, dtypes, strides, layers: a typed error before anything is read."""
    world = make_world(SMALL, [9])
    tables, flags = world.tables([1]), new_flags(1, CPU)
    queries = world.draw(1, 4)
    bad: list[tuple[str, Tensor, PageTables, Tensor, int]] = [
        (r"queries: shape is \(1, 4, 8\)", queries[:, :, :8], tables, flags, 1),
        (r"queries: shape is \(1, 3, 16\)", queries[:, :3], tables, flags, 1),
        (r"queries: shape is \(2, 4, 16\)", queries.repeat(2, 1, 1), tables, flags, 1),
        ("queries: dtype is torch.float16", queries.half(), tables, flags, 1),
        ("queries: strides is", queries.repeat(1, 1, 2)[:, :, ::2], tables, flags, 1),
        ("layer: value is 2, required is 0 to 1", queries, tables, flags, 2),
        ("flags: dtype is torch.int64", queries, tables, flags.long(), 1),
        (r"flags: shape is \(2,\), required is \(1,\)", queries, tables, flags.repeat(2), 1),
    ]
    for message, wrong, table, flag, layer in bad:
        with pytest.raises(OperandError, match=message):
            dispatch.decode_attention(world.memory, layer, wrong, table, flag, backend=BACKEND)
    wide = PageTables.of([[0, 1]], [[1, 1]], tokens=[9], rows=[1])
    narrow = PageTables(
        pages=wide.pages[:, ::2],
        tags=wide.tags,
        tokens=wide.tokens,
        rows=wide.rows,
        first_row=wide.first_row,
        rows_max=1,
    )
    with pytest.raises(OperandError, match="tags: shape"):
        dispatch.decode_attention(world.memory, 1, queries, narrow, flags, backend=BACKEND)
    keys = world.draw(1, 2)
    with pytest.raises(OperandError, match=r"values: shape is \(2, 2, 16\)"):
        dispatch.write_tokens(world.memory, 1, keys, keys.repeat(2, 1, 1), tables, flags)
    with pytest.raises(OperandError, match="destination: memory is the source's"):
        dispatch.copy_pages(
            world.memory,
            world.memory,
            labels_of(world),
            new_flags(2, CPU),
            target_pages=torch.zeros(2, dtype=torch.int32),
            target_tags=torch.ones(2, dtype=torch.int64),
            sealed=False,
        )


def test_nothing_to_do_is_done() -> None:
    """An empty batch, no rows, no pages: empty results and no error."""
    world = make_world(SMALL, [9])
    empty = PageTables.of([], [], tokens=[], rows=[])
    none = new_flags(0, CPU)
    args = (world.memory, 0, world.draw(0, 4), empty, none)
    assert dispatch.decode_attention(*args, backend=BACKEND).shape == (0, 4, 16)
    assert dispatch.prefill_attention(*args, backend=BACKEND).shape == (0, 4, 16)
    labels = PageLabels.of([], [], positions=[], filled=[])
    assert dispatch.digest_pages(world.memory, labels, none, backend=BACKEND).shape == (2, 0)


# --- Properties -----------------------------------------------------------------------------------

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


def test_the_back_ends_have_equal_signatures() -> None:
    """Whatever `dispatch` calls takes the same operands on every device."""
    import inspect

    from kernels import reference, triton_ops

    names = ("decode_attention", "prefill_attention", "write_tokens", "check_headers")
    for name in (*names, "digest_pages", "copy_pages"):
        one, two = (inspect.signature(getattr(m, name)) for m in (reference, triton_ops))
        assert one == two, name
    assert {reference.name, triton_ops.name} == {"reference", "triton"}


def test_the_device_chooses_the_back_end() -> None:
    """Memory of a CPU is never handed to a compiler for GPUs, and the other way round."""
    chosen = [dispatch.default_backend(torch.device(name)) for name in ("cpu", "cuda", "cuda:3")]
    assert chosen[1:] == ["triton", "triton"]
    assert chosen[0] != "triton"


def test_every_pair_of_faults_is_told() -> None:
    """Two wrong fields raise two bits: a flag says everything that is wrong."""
    for one, two in itertools.combinations(FIELDS, 2):
        world = make_world(SMALL, [24])
        for fault, logical in ((one, 0), (two, 2)):
            world.corrupt(1, world.pages[0][logical], *FIELDS[fault])
        _, flags = decode(world, world.draw(1, 2))
        assert flags == [int(one | two)]
