"""Claims about writing, checking, digesting and copying pages, beside the host's own packing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import digest, dispatch, pack
from kernels.digest import to_signed, to_unsigned
from kernels.layout import PageLayout, PageMemory
from kernels.tables import Fault, PageLabels, PageTables, new_flags
from tests.paged_world import TOLERANCES, World, make_world
from tests.triton_claims import (
    BACKEND,
    CPU,
    FIELDS,
    SMALL,
    assert_decoded,
    decode,
    labels_of,
)

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
