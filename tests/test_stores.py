"""The contract on each store, and what only segment files can suffer."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.store import (
    EventStore,
    StoreDamaged,
    StoreLocked,
    StoreTooNew,
    StoreUnavailable,
    UnstorableEntry,
)
from lifecycle.events import ByScheduler, Entry, Resumed
from lifecycle.ids import FLEET
from tests.store_contract import A, B, C, StoreContract, entries, numbered
from tests.store_crash_child import Hasty
from transport import codec
from transport.pb import lifecycle_pb2 as pb
from transport.stores import frames, segment_files
from transport.stores.disk import Disk
from transport.stores.frame_reader import KEPT_ENTRIES, FrameReader
from transport.stores.memory import MemoryStore
from transport.stores.segments import SegmentStore


class TestMemory(StoreContract):
    def open(self, folder: Path) -> EventStore:
        return MemoryStore()

    def after_crash(self, store: EventStore) -> EventStore:
        assert isinstance(store, MemoryStore)
        return store.survivor()

    def test_a_crash_leaves_no_more_than_was_durable(self) -> None:
        """The memory store models the worst crash: everything unflushed is gone."""
        store = MemoryStore()
        store.append(A, 0, entries(A, 0, 2))
        store.flush()
        store.append(A, 2, entries(A, 2, 2))
        assert store.survivor().last_position == 2


class TestSegments(StoreContract):
    def open(self, folder: Path) -> EventStore:
        return SegmentStore(folder)

    def after_crash(self, store: EventStore) -> EventStore:
        assert isinstance(store, SegmentStore)
        copy = store.folder.with_name("copy")
        shutil.copytree(store.folder, copy)
        return SegmentStore(copy)


class TestManySegments(TestSegments):
    """The same claims with a new segment after nearly every batch."""

    def open(self, folder: Path) -> EventStore:
        return SegmentStore(folder, segment_bytes=1)


def test_only_so_many_entries_are_kept_at_hand(folder: Path) -> None:
    """Whether batches are large or small, and whether they were written or read."""
    reader = FrameReader()
    reader.segments = [folder]
    batch = entries(A, 0, KEPT_ENTRIES // 4)
    for number in range(9):
        reader.note(1 + number * len(batch), offset=0, size=1)
        reader.keep_latest(batch)
        assert reader.in_memory == min(number + 1, 4) * len(batch)
    assert reader.stored(1 + 8 * len(batch)).entry == batch[0]
    reader.forget_after(7 * len(batch))
    assert reader.in_memory == 2 * len(batch)
    reader.forget_until(1, 0)
    assert reader.in_memory == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of three batches in one segment, orderly closed."""
    path = tmp_path / "log"
    store = SegmentStore(path)
    store.append(A, 0, entries(A, 0, 2))
    store.append(B, 0, entries(B, 0, 1))
    store.append(A, 2, entries(A, 2, 1))
    store.close()
    return path


def the_segment(folder: Path) -> Path:
    (path,) = segment_files.segment_paths(folder)
    return path


def frame_offsets(data: bytes) -> list[int]:
    found = [item.offset for item in frames.walk(data, last=True)]
    assert len(found) == 3
    return found


def test_a_log_reopens_as_it_was(folder: Path) -> None:
    """Positions, entries and the next sequence come back from the files alone."""
    store = SegmentStore(folder)
    assert store.torn is None
    assert [s.position for s in store.read(A)] == [1, 2, 4]
    assert list(store.tail(1)) == (
        numbered(1, entries(A, 0, 2))
        + numbered(3, entries(B, 0, 1))
        + numbered(4, entries(A, 2, 1))
    )
    assert store.durable_position == 4
    assert store.append(A, 3, entries(A, 3, 1)) == 5
    store.close()


def test_a_tail_torn_at_any_byte_is_repaired_and_kept(folder: Path) -> None:
    """Cut anywhere in the last batch, the log loses that batch only, and keeps the cut piece."""
    path = the_segment(folder)
    data = path.read_bytes()
    last = frame_offsets(data)[-1]
    for size in range(last, len(data)):
        path.write_bytes(data[:size])
        store = SegmentStore(folder)
        assert store.last_position == 3
        assert store.read(B) == tuple(numbered(3, entries(B, 0, 1)))
        store.close()
        assert path.read_bytes() == data[:last]
        if size == last:
            assert store.torn is None
        else:
            assert store.torn is not None
            assert store.torn.read_bytes() == data[last:size]


def test_a_log_cut_at_any_byte_of_its_batches_keeps_those_before(folder: Path) -> None:
    """Wherever the file ends, whole batches stay, the broken one is kept, and the log goes on."""
    path = the_segment(folder)
    data = path.read_bytes()
    stops = [*frame_offsets(data), len(data)]
    lasts = [0, 2, 3, 4]
    for size in range(stops[0], len(data) + 1):
        path.write_bytes(data[:size])
        whole = max(n for n, stop in enumerate(stops) if stop <= size)
        store = SegmentStore(folder, disk=Hasty())
        assert store.last_position == len(list(store.tail(1))) == lasts[whole]
        kept = b"" if store.torn is None else store.torn.read_bytes()
        assert kept == data[stops[whole] : size]
        assert store.append(C, 0, entries(C, 0, 1)) == lasts[whole] + 1
        store.close()
        again = SegmentStore(folder, disk=Hasty())
        assert (again.last_position, again.torn) == (lasts[whole] + 1, None)
        again.close()


def test_a_tail_torn_right_after_a_rotation_is_repaired(tmp_path: Path) -> None:
    """The first batch of a new segment is torn at any byte; the segments before stay whole."""
    path = many_segments(tmp_path)[-1]
    data = path.read_bytes()
    for size in range(frames.FILE_HEADER_BYTES, len(data)):
        path.write_bytes(data[:size])
        store = SegmentStore(tmp_path, segment_bytes=1, disk=Hasty())
        assert store.last_position == 3
        assert (store.torn is None) == (size == frames.FILE_HEADER_BYTES)
        assert store.append(A, 3, entries(A, 3, 1)) == 4
        store.close()
        assert path.read_bytes() == data
    for size in range(frames.FILE_HEADER_BYTES):
        # A file header is durable before the file has its name: nothing tears it.
        path.write_bytes(data[:size])
        with pytest.raises(StoreDamaged, match=f"{path.name}, byte 0: {size} bytes are no"):
            SegmentStore(tmp_path)


def test_several_unwritten_batches_are_one_torn_end(tmp_path: Path) -> None:
    """Zeros from a sector on, where two batches should end, are one interrupted writing."""
    store = SegmentStore(tmp_path)
    store.append(A, 0, entries(A, 0, 1))
    store.append(A, 1, entries(A, 1, 40))
    store.append(A, 41, entries(A, 41, 40))
    store.close()
    path = the_segment(tmp_path)
    data = path.read_bytes()
    first, second, third = frame_offsets(data)
    cut = (third - 1) // frames.SECTOR_BYTES * frames.SECTOR_BYTES
    assert second + frames.FRAME_HEADER_BYTES < cut
    path.write_bytes(data[:cut] + bytes(len(data) - cut))
    store = SegmentStore(tmp_path)
    assert (store.last_position, store.torn is not None) == (1, True)
    store.close()
    # One byte behind them was written: this is no interrupted writing.
    path.write_bytes(data[:cut] + bytes(len(data) - cut - 1) + b"x")
    with pytest.raises(StoreDamaged) as caught:
        SegmentStore(tmp_path)
    assert (first, caught.value.offset) == (frames.FILE_HEADER_BYTES, second)


def test_a_tail_that_was_lengthened_but_not_written_is_repaired(folder: Path) -> None:
    """Zeros where the last batch's end should be are a write that never reached the disk."""
    path = the_segment(folder)
    data = path.read_bytes()
    last = frame_offsets(data)[-1]
    for written in (0, 3, frames.FRAME_HEADER_BYTES - 1, frames.FRAME_HEADER_BYTES + 5):
        path.write_bytes(data[: last + written] + bytes(2 * frames.SECTOR_BYTES))
        if written > frames.FRAME_HEADER_BYTES:
            # Here the header is genuine, so it says where the batch would have ended.
            path.write_bytes(path.read_bytes()[: len(data) - 1])
        store = SegmentStore(folder)
        assert (store.last_position, store.torn is not None) == (3, True)
        store.close()


def test_an_unwritten_last_sector_is_torn(tmp_path: Path) -> None:
    """A batch of full length whose last sectors were never written is a torn one."""
    path = tmp_path / "log"
    store = SegmentStore(path)
    store.append(A, 0, entries(A, 0, 1))
    store.append(A, 1, entries(A, 1, 100))
    store.close()
    segment = the_segment(path)
    data = segment.read_bytes()
    cut = (len(data) - 1) // frames.SECTOR_BYTES * frames.SECTOR_BYTES
    segment.write_bytes(data[:cut] + bytes(len(data) - cut))
    store = SegmentStore(path)
    assert (store.last_position, store.torn is not None) == (1, True)
    store.close()


def test_two_torn_ends_are_both_kept(folder: Path) -> None:
    """A second repair at the same place does not overwrite what the first one kept."""
    path = the_segment(folder)
    data = path.read_bytes()
    last = frame_offsets(data)[-1]
    kept = set()
    for size in (last + 10, last + 20):
        path.write_bytes(data[:size])
        store = SegmentStore(folder)
        kept.add(store.torn)
        store.close()
    assert len(kept) == 2


def test_a_flipped_bit_in_an_earlier_batch_is_reported(folder: Path) -> None:
    """Any changed byte before the last batch is named by segment and batch; nothing changes."""
    path = the_segment(folder)
    data = path.read_bytes()
    offsets = frame_offsets(data)
    for at in range(offsets[-1]):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        with pytest.raises(StoreDamaged) as caught:
            SegmentStore(folder)
        assert caught.value.segment == path.name
        assert caught.value.offset == max(o for o in [0, *offsets] if o <= at)
        assert path.read_bytes() == flipped


def test_a_flipped_bit_in_the_last_batch_is_never_taken_for_history(folder: Path) -> None:
    """A changed byte in the last batch is reported too: an interrupted write changes no byte."""
    path = the_segment(folder)
    data = path.read_bytes()
    last = frame_offsets(data)[-1]
    for at in range(last, len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(StoreDamaged) as caught:
            SegmentStore(folder)
        assert caught.value.offset == last


def rebuilt(folder: Path, order: list[int]) -> None:
    """Put the segment's frames in another order, each untouched."""
    path = the_segment(folder)
    data = path.read_bytes()
    stops = [*frame_offsets(data), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(stops)]
    path.write_bytes(data[: stops[0]] + b"".join(pieces[i] for i in order))


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 2], [0, 0, 1, 2]])
def test_whole_batches_cannot_move_vanish_or_repeat(folder: Path, order: list[int]) -> None:
    """A batch that does not follow its predecessor is damage, though its check sums match."""
    rebuilt(folder, order)
    with pytest.raises(StoreDamaged):
        SegmentStore(folder)


def test_a_rewritten_batch_breaks_the_chain(folder: Path) -> None:
    """Another batch of the same place with good check sums is found by its successor's hash."""
    path = the_segment(folder)
    data = path.read_bytes()
    first, second, _ = frame_offsets(data)
    other = [attrs.evolve(entry, time_ns=7) for entry in entries(A, 0, 2)]
    forged = frames.pack_frame(
        first_position=1,
        count=2,
        previous=frames.CHAIN_START,
        payload=codec.batch_to_bytes(other),
    )
    path.write_bytes(data[:first] + forged + data[second:])
    with pytest.raises(StoreDamaged, match="predecessor"):
        SegmentStore(folder)


@pytest.mark.parametrize("position", [4, 6])
def test_a_batch_that_skips_or_repeats_positions_is_damage(folder: Path, position: int) -> None:
    """Positions have no gap and no overlap, even where hashes and check sums match."""
    path = the_segment(folder)
    data = path.read_bytes()
    frame = frames.pack_frame(
        first_position=position,
        count=1,
        previous=frames.chain(data[frame_offsets(data)[-1] :]),
        payload=codec.batch_to_bytes(entries(A, 3, 1)),
    )
    path.write_bytes(data + frame)
    with pytest.raises(StoreDamaged, match="instead of 5") as caught:
        SegmentStore(folder)
    assert caught.value.offset == len(data)


@pytest.mark.parametrize("sequence", [2, 4])
def test_a_batch_that_skips_or_repeats_sequences_is_damage(folder: Path, sequence: int) -> None:
    """A request's numbers have no gap either, whatever the check sums say."""
    path = the_segment(folder)
    data = path.read_bytes()
    frame = frames.pack_frame(
        first_position=5,
        count=1,
        previous=frames.chain(data[frame_offsets(data)[-1] :]),
        payload=codec.batch_to_bytes(entries(A, sequence, 1)),
    )
    path.write_bytes(data + frame)
    with pytest.raises(StoreDamaged, match="does not follow"):
        SegmentStore(folder)


def many_segments(folder: Path) -> list[Path]:
    store = SegmentStore(folder, segment_bytes=1)
    for n in range(4):
        store.append(A, n, entries(A, n, 1))
    store.close()
    return segment_files.segment_paths(folder)


def test_segments_are_named_after_their_first_positions(tmp_path: Path) -> None:
    """Each full segment is followed by one that is named after the next position."""
    paths = many_segments(tmp_path)
    assert [path.name for path in paths] == [segment_files.segment_name(n) for n in (1, 2, 3, 4)]


def test_only_the_last_segment_may_be_torn(tmp_path: Path) -> None:
    """A cut in an earlier segment is damage, named by segment and offset."""
    paths = many_segments(tmp_path)
    data = paths[1].read_bytes()
    for size in range(len(data)):
        paths[1].write_bytes(data[:size])
        with pytest.raises(StoreDamaged) as caught:
            SegmentStore(tmp_path)
        # Cut to the bare header, the segment is well formed, and its successor misses it.
        named = paths[2] if size == frames.FILE_HEADER_BYTES else paths[1]
        assert caught.value.segment == named.name


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_segment_is_reported(tmp_path: Path, number: int) -> None:
    """Without one of its earlier segments, the log does not open."""
    many_segments(tmp_path)[number].unlink()
    with pytest.raises(StoreDamaged):
        SegmentStore(tmp_path)


def test_a_renamed_segment_is_reported(tmp_path: Path) -> None:
    """A segment whose name and header differ is damage."""
    paths = many_segments(tmp_path)
    paths[3].rename(tmp_path / segment_files.segment_name(9))
    with pytest.raises(StoreDamaged, match="called"):
        SegmentStore(tmp_path)


def test_a_second_opener_is_locked_out(tmp_path: Path) -> None:
    """While one store is open, another is refused; afterwards it is let in."""
    first = SegmentStore(tmp_path)
    with pytest.raises(StoreLocked) as caught:
        SegmentStore(tmp_path)
    assert caught.value.path == str(tmp_path)
    first.close()
    SegmentStore(tmp_path).close()


def test_a_refused_opener_leaves_the_lock(folder: Path) -> None:
    """A store that found damage holds nothing, so that it can be opened after the repair."""
    path = the_segment(folder)
    good = path.read_bytes()
    path.write_bytes(b"X" + good[1:])
    with pytest.raises(StoreDamaged):
        SegmentStore(folder)
    path.write_bytes(good)
    SegmentStore(folder).close()


def test_a_lost_epoch_file_gives_no_epoch_twice(tmp_path: Path) -> None:
    """The log's own entries show which epochs were used, should the file be gone."""
    store = SegmentStore(tmp_path)
    epoch = [store.take_epoch() for _ in range(3)][-1]
    store.append(FLEET, 0, [Entry(FLEET, 0, 0, ByScheduler(epoch), 1, Resumed(epoch, 0))])
    store.close()
    (tmp_path / segment_files.EPOCH_FILE).unlink()
    store = SegmentStore(tmp_path)
    assert store.take_epoch() == epoch + 1
    store.close()


@pytest.mark.parametrize("content", [b"", b"x\n", b"12", b"-1\n"])
def test_an_unreadable_epoch_is_damage(folder: Path, content: bytes) -> None:
    """An epoch that cannot be read is not guessed, for ids could be minted twice."""
    (folder / segment_files.EPOCH_FILE).write_bytes(content)
    with pytest.raises(StoreDamaged) as caught:
        SegmentStore(folder)
    assert caught.value.segment == "epoch"


def test_events_of_a_later_version_are_not_written_behind(folder: Path) -> None:
    """A store with an event that this version does not know is not opened for writing."""
    path = the_segment(folder)
    data = path.read_bytes()
    message = codec.encode_entry(entries(A, 3, 1)[0])
    message.event.Clear()
    message.event.MergeFromString(b"\x9a\x06\x00")
    payload = pb.EntryBatch(entries=[message]).SerializeToString()
    last = frame_offsets(data)[-1]
    frame = frames.pack_frame(
        first_position=5, count=1, previous=frames.chain(data[last:]), payload=payload
    )
    path.write_bytes(data + frame)
    with pytest.raises(StoreTooNew):
        SegmentStore(folder)


@contextmanager
def file_size_limit() -> Iterator[None]:
    """No file of this process may grow beyond 4 KiB: a full disk, as far as writes can tell.

    It ends before the test does, because the runner's own output may be such a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_flush_needs_no_free_descriptor(tmp_path: Path) -> None:
    """A process that may open no more files still makes its log durable."""
    store = SegmentStore(tmp_path)
    store.append(A, 0, entries(A, 0, 2))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert store.flush() == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    store.close()


def test_a_failed_write_is_taken_back(tmp_path: Path) -> None:
    """On a full disk an append is refused whole, and a smaller one may still succeed."""
    store = SegmentStore(tmp_path)
    store.append(A, 0, entries(A, 0, 2))
    with file_size_limit(), pytest.raises(StoreUnavailable):
        store.append(A, 2, entries(A, 2, 200))
    assert store.last_position == 2
    assert store.append(A, 2, entries(A, 2, 1)) == 3
    store.close()
    store = SegmentStore(tmp_path)
    assert (store.last_position, store.torn) == (3, None)
    store.close()


class FailingSync(Disk):
    """The operating system's promise, broken on demand."""

    broken = False

    def sync(self, handle: int) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(handle)


def test_a_failed_flush_ends_all_writing(tmp_path: Path) -> None:
    """After a failed flush nothing more counts as durable until the store is opened anew."""
    disk = FailingSync()
    store = SegmentStore(tmp_path, disk=disk)
    store.append(A, 0, entries(A, 0, 1))
    store.flush()
    store.append(A, 1, entries(A, 1, 1))
    disk.broken = True
    with pytest.raises(StoreUnavailable):
        store.flush()
    disk.broken = False
    with pytest.raises(StoreUnavailable):
        store.flush()
    with pytest.raises(StoreUnavailable):
        store.append(A, 2, entries(A, 2, 1))
    assert store.durable_position == 1
    assert len(store.read(A)) == 2
    store.close()
    assert store.durable_position == 1
    with pytest.raises(StoreUnavailable):
        store.reopen()


@pytest.mark.parametrize("durable", [0, 1, 3])
@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_a_reopened_log_goes_on_behind_what_was_durable(
    tmp_path: Path, durable: int, segment_bytes: int
) -> None:
    """What was not durable is gone, in memory as on disk, and may be appended again."""
    disk = FailingSync()
    store = SegmentStore(tmp_path, disk=disk, segment_bytes=segment_bytes)
    for number in range(durable):
        store.append(A, number, entries(A, number, 1))
    store.flush()
    store.append(A, durable, entries(A, durable, 1))
    store.append(B, 0, entries(B, 0, 2))
    disk.broken = True
    with pytest.raises(StoreUnavailable):
        store.flush()
    with pytest.raises(StoreUnavailable):
        store.reopen()
    disk.broken = False
    # A rotation makes durable what was before it.
    kept = store.durable_position
    store.reopen()
    assert store.last_position == store.durable_position == kept
    assert [s.position for s in store.tail(1)] == list(range(1, kept + 1))
    held = len(store.read(A))
    store.append(A, held, entries(A, held, 2))
    assert store.flush() == kept + 2
    store.close()
    store = SegmentStore(tmp_path)
    assert (store.last_position, store.torn) == (kept + 2, None)
    assert len(store.read(A)) == held + 2
    store.close()


def test_reopening_a_log_that_takes_appends_changes_nothing(tmp_path: Path) -> None:
    """Nothing is lost that nobody doubts."""
    store = SegmentStore(tmp_path)
    store.append(A, 0, entries(A, 0, 2))
    store.reopen()
    assert store.last_position == 2
    store.close()


def test_a_rotation_is_durable_before_the_next_segment_exists(tmp_path: Path) -> None:
    """If the old segment cannot be made durable, no new one begins."""
    disk = FailingSync()
    store = SegmentStore(tmp_path, segment_bytes=1, disk=disk)
    store.append(A, 0, entries(A, 0, 1))
    disk.broken = True
    with pytest.raises(StoreUnavailable):
        store.append(A, 1, entries(A, 1, 1))
    store.close()
    assert len(segment_files.segment_paths(tmp_path)) == 1


def test_a_value_that_does_not_fit_is_refused_before_writing(tmp_path: Path) -> None:
    """An entry of more than 64 bits is a typed error and leaves the log as it was."""
    store = SegmentStore(tmp_path)
    with pytest.raises(UnstorableEntry):
        store.append(FLEET, 0, [Entry(FLEET, 0, 0, ByScheduler(1), 1, Resumed(1 << 64, 0))])
    assert store.last_position == 0
    store.close()


def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    """Opening below a file is refused by a typed error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable):
        SegmentStore(tmp_path / "file" / "log")


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_frames_torn_or_damaged(data: bytes, last: bool) -> None:
    """Whatever stands behind a file header, walking it ends with a value or one typed error."""
    header = frames.pack_file_header(first_position=1, previous=frames.CHAIN_START)
    try:
        list(frames.walk(header + data, last=last))
    except frames.Damage:
        return
