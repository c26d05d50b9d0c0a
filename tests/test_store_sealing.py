"""Sealed segments: what they hold, how sealing may be interrupted, and what is wrong with bad ones."""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.store import StoreDamaged, StoreUnavailable
from tests.log_files import read_capture, read_log
from tests.store_contract import A, entries, numbered
from transport.forensics_read import open_capture
from transport.stores import frames, sealed, segment_files
from transport.stores.disk import Disk
from transport.stores.segments import SegmentStore

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BATCHES = 5


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    """Five segments of one batch; four of them are full."""
    found = SegmentStore(tmp_path / "log", segment_bytes=1)
    for n in range(BATCHES):
        found.append(A, n, entries(A, n, 1))
    return found


WHOLE = numbered(1, entries(A, 0, BATCHES))


def names(folder: Path) -> list[str]:
    return [path.name for path in segment_files.segment_paths(folder)]


def test_full_segments_are_sealed_and_the_last_is_not(store: SegmentStore) -> None:
    """The plain files are gone, the log reads the same, also when it is opened anew."""
    assert store.seal() == BATCHES - 1
    assert list(store.tail(1)) == WHOLE
    store.close()
    sealed_names = [segment_files.sealed_name(n) for n in range(1, BATCHES)]
    assert names(store.folder) == [*sealed_names, segment_files.segment_name(BATCHES)]
    assert not (store.folder / segment_files.segment_name(1)).exists()
    again = SegmentStore(store.folder, segment_bytes=1)
    assert list(again.tail(1)) == WHOLE
    assert again.append(A, BATCHES, entries(A, BATCHES, 1)) == BATCHES + 1
    assert again.seal() == 1
    again.close()
    log = read_log(store.folder)
    assert ([one.position for one in log.entries], log.complete) == ([1, 2, 3, 4, 5, 6], True)


def test_a_sealed_segment_gives_back_the_plain_one(store: SegmentStore) -> None:
    """Unpacked it is the same bytes, for us and for zstd alone, which skips our header."""
    plain = (store.folder / segment_files.segment_name(1)).read_bytes()
    store.seal()
    store.close()
    path = store.folder / segment_files.sealed_name(1)
    header, content = sealed.unpack(path.read_bytes())
    assert content == plain
    assert (header.first_position, header.last_position) == (1, 1)
    assert header.last_frame_digest == frames.chain(plain[frames.FILE_HEADER_BYTES :])
    assert zstd.decompress(path.read_bytes()) == plain


def test_one_sealed_segment_is_readable_alone(store: SegmentStore) -> None:
    """It says where it stands, and that it is not the whole log."""
    store.seal()
    store.close()
    log = read_log(store.folder / segment_files.sealed_name(2))
    assert ([one.position for one in log.entries], log.complete) == ([2], False)


def test_a_reader_finds_a_segment_that_was_sealed_meanwhile(store: SegmentStore) -> None:
    """A name that was listed before sealing still leads to the entries."""
    listed = segment_files.segment_paths(store.folder)
    store.seal()
    found = [f.item for f in segment_files.walk_segments(listed, whole=True)]
    assert len(found) == BATCHES
    store.close()


def test_an_inquiry_finds_a_segment_that_was_sealed_meanwhile(store: SegmentStore) -> None:
    """Sealing what a folder's reader has listed takes nothing away and puts nothing wrong."""
    with ExitStack() as stack:
        capture = open_capture(store.folder, stack)
        last = segment_files.segment_paths(store.folder)[-1]
        # The last one that was listed may have got a successor by the time it is read.
        store.append(A, store.last_position, entries(A, store.last_position, 1))
        assert store.seal() == BATCHES
        assert not last.exists()
        log = read_capture(capture)
    assert [one.position for one in log.entries] == [*range(1, BATCHES + 1)]
    assert log.complete
    store.close()


def test_the_first_segment_may_be_sealed_before_it_is_opened(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is listed at the wrong moment is a whole log all the same."""
    listed = segment_files.segment_paths(store.folder)
    store.seal()
    monkeypatch.setattr(segment_files, "segment_paths", lambda _folder: listed)
    assert read_log(store.folder).complete
    store.close()


def test_reads_go_on_while_segments_are_sealed(tmp_path: Path) -> None:
    """A thread that seals never makes an entry unreadable for one that reads and appends."""
    store = SegmentStore(tmp_path, segment_bytes=1)
    done = threading.Event()
    sealed_segments: list[int] = []

    def seal() -> None:
        while not done.is_set():
            sealed_segments.append(store.seal())

    thread = threading.Thread(target=seal)
    thread.start()
    for n in range(100):
        store.append(A, n, entries(A, n, 1))
        # Every read goes to the files, as after opening anew.
        store._frames._kept.clear()
        assert list(store.tail(1)) == numbered(1, entries(A, 0, n + 1))
    done.set()
    thread.join()
    assert sum(sealed_segments) + store.seal() == 99
    store.close()


class BrokenDisk(Disk):
    """Fails one kind of call."""

    broken = ""

    def _fail(self, call: str) -> None:
        if call == self.broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_at(self, handle: int, data: bytes | memoryview, *, offset: int) -> int:
        self._fail("write")
        return super().write_at(handle, data, offset=offset)

    def sync(self, handle: int) -> None:
        self._fail("sync")
        super().sync(handle)

    def rename(self, old: Path, new: Path) -> None:
        self._fail("rename")
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._fail("remove")
        super().remove(path)


@pytest.mark.parametrize("call", ["write", "sync", "rename", "remove"])
def test_sealing_that_fails_costs_nothing(tmp_path: Path, call: str) -> None:
    """The log stays readable and writable, and what was not sealed is sealed later."""
    disk = BrokenDisk()
    store = SegmentStore(tmp_path, segment_bytes=1, disk=disk)
    for n in range(3):
        store.append(A, n, entries(A, n, 1))
    disk.broken = call
    with pytest.raises(StoreUnavailable):
        store.seal()
    disk.broken = ""
    assert list(store.tail(1)) == numbered(1, entries(A, 0, 3))
    assert store.append(A, 3, entries(A, 3, 1)) == 4
    store.seal()
    store.close()
    again = SegmentStore(tmp_path)
    assert list(again.tail(1)) == numbered(1, entries(A, 0, 4))
    again.seal()
    again.close()
    assert not list(tmp_path.glob("*.new"))
    assert [path.suffix for path in segment_files.segment_paths(tmp_path)] == [
        *[segment_files.SEALED_SUFFIX] * 3,
        segment_files.SUFFIX,
    ]


def test_where_both_forms_are_there_the_plain_one_counts(store: SegmentStore) -> None:
    """Sealing that died before it removed the original is done again."""
    plain = store.folder / segment_files.segment_name(1)
    data = plain.read_bytes()
    store.seal()
    store.close()
    plain.write_bytes(data)
    half = store.folder / segment_files.sealed_name(1)
    half.write_bytes(b"not looked at")
    again = SegmentStore(store.folder)
    assert list(again.tail(1)) == WHOLE
    assert again.seal() == 1
    again.close()
    assert sealed.unpack(half.read_bytes())[1] == data


def test_a_damaged_segment_is_not_sealed(store: SegmentStore) -> None:
    """Sealing checks what it replaces, and keeps a damaged original."""
    path = store.folder / segment_files.segment_name(2)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreDamaged) as caught:
        store.seal()
    assert (caught.value.segment, caught.value.offset) == (path.name, frames.FILE_HEADER_BYTES)
    assert path.read_bytes() == data
    store.close()


def test_a_log_that_ends_sealed_lacks_its_end(store: SegmentStore) -> None:
    """Only full segments with a successor are sealed, so the missing one is reported."""
    store.seal()
    store.close()
    (store.folder / segment_files.segment_name(BATCHES)).unlink()
    with pytest.raises(StoreDamaged, match=f"goes on at position {BATCHES} is missing"):
        SegmentStore(store.folder)
    assert not read_log(store.folder).complete


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_sealed_segment_is_reported(store: SegmentStore, number: int) -> None:
    """Its successor does not follow what came before."""
    store.seal()
    store.close()
    (store.folder / segment_files.sealed_name(number)).unlink()
    with pytest.raises(StoreDamaged, match=f"instead of {number}"):
        SegmentStore(store.folder)


def test_a_sealed_segment_cut_anywhere_is_damage(store: SegmentStore) -> None:
    """It was durable before it got its name, so it is never repaired."""
    store.seal()
    store.close()
    path = store.folder / segment_files.sealed_name(4)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(StoreDamaged) as caught:
            SegmentStore(store.folder)
        assert (caught.value.segment, caught.value.offset <= size) == (path.name, True)
    path.write_bytes(data + b"x")
    with pytest.raises(StoreDamaged, match=f"byte {len(data)}: 1 bytes follow"):
        SegmentStore(store.folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"last_position": 3}, "its seal says"),
        ({"first_position": 2}, "its seal says"),
        ({"last_frame_digest": bytes(32)}, "another batch"),
    ],
)
def test_a_seal_that_says_other_things_is_damage(
    store: SegmentStore, changes: dict[str, int], reason: str
) -> None:
    """Header and content vouch for each other, whatever the check sums say."""
    store.seal()
    store.close()
    path = store.folder / segment_files.sealed_name(1)
    header, content = sealed.unpack(path.read_bytes())
    fields = {
        "first_position": header.first_position,
        "last_position": header.last_position,
        "last_frame_digest": header.last_frame_digest,
    }
    path.write_bytes(sealed.pack(content, **(fields | changes)))  # type: ignore[arg-type]
    with pytest.raises(StoreDamaged, match=reason):
        SegmentStore(store.folder)


@pytest.mark.parametrize("name", [segment_files.sealed_name(1), segment_files.segment_name(1)])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes are no"),
        (b'{"format":"custody.log","version":1}' + bytes(64), "instead of"),
        (b"\x28\xb5\x2f\xfd" + bytes(100), "instead of"),
    ],
)
def test_foreign_files_are_named_with_what_they_begin_with(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    """A file that is no segment is refused by name, offset 0 and what was found there."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StoreDamaged, match=reason) as caught:
        SegmentStore(tmp_path)
    assert (caught.value.segment, caught.value.offset) == (name, 0)


def test_any_name_that_ends_like_a_segment_is_looked_at(tmp_path: Path) -> None:
    """A segment under a foreign name is not passed over."""
    SegmentStore(tmp_path).close()
    (tmp_path / segment_files.segment_name(1)).rename(tmp_path / "backup.segment")
    with pytest.raises(StoreDamaged, match=r"backup\.segment, byte 0: should be called"):
        SegmentStore(tmp_path)


@given(st.binary(min_size=1, max_size=500), st.integers(1, 64))
def test_packing_is_undone_by_unpacking(content: bytes, block_bytes: int) -> None:
    """Any bytes in blocks of any size come back, and so does each block by itself."""
    data = sealed.pack(
        content,
        first_position=1,
        last_position=2,
        last_frame_digest=bytes(32),
        block_bytes=block_bytes,
    )
    header, again = sealed.unpack(data)
    assert again == content
    for start in range(0, len(content), 7):
        size = min(50, len(content) - start)
        numbers = sealed.blocks_of(header, offset=start, size=size)
        blocks = [header.blocks[n] for n in numbers]
        found = b"".join(
            sealed.unpack_block(header, n, data[b.offset : b.offset + b.size])
            for n, b in zip(numbers, blocks, strict=True)
        )
        begin = start - numbers[0] * block_bytes
        assert found[begin : begin + size] == content[start : start + size]


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_sealed_segment_or_damage(data: bytes, genuine: bool) -> None:
    """Unpacking ends with a value or one typed error."""
    beginning = b"\x50\x2a\x4d\x18\x80\x00\x00\x00" + sealed.SEALED_MAGIC if genuine else b""
    with pytest.raises(frames.Damage):
        sealed.unpack(beginning + data)
