"""A disk without room: what is refused, what stays, and how the log goes on."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.store import StoreUnavailable
from tests.store_contract import A, entries, numbered
from transport.stores import frames, segment_files
from transport.stores.disk import Disk
from transport.stores.segments import SegmentStore


class SmallDisk(Disk):
    """Has room for so many bytes; a write takes what fits and then fails, as real ones do."""

    room: int | None = None
    syncs = True

    def write_at(self, handle: int, data: bytes | memoryview, *, offset: int) -> int:
        if self.room is not None:
            if self.room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: self.room]
        written = super().write_at(handle, data, offset=offset)
        if self.room is not None:
            self.room -= written
        return written

    def sync(self, handle: int) -> None:
        if not self.syncs:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().sync(handle)


class LosesOnce(Disk):
    """Waits inside a flush, and tells a lost write only once, as the system does."""

    def __init__(self) -> None:
        self.lost = False
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def sync(self, handle: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.inside.set()
            self.go_on.wait()
        if self.lost:
            self.lost = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(handle)


def test_a_full_segment_beside_a_failing_flush_makes_nothing_durable(tmp_path: Path) -> None:
    """Whoever syncs first hears of the loss, so a segment is not ended while a flush goes on."""
    disk = LosesOnce()
    store = SegmentStore(tmp_path, segment_bytes=1000, disk=disk)
    store.append(A, 0, entries(A, 0, 2))
    assert store.flush() == 2
    number = 2
    while (tmp_path / segment_files.segment_name(1)).stat().st_size < 1000:
        store.append(A, number, entries(A, number, 1))
        number += 1
    disk.go_on.clear()
    disk.inside.clear()
    disk.lost = True
    with ThreadPoolExecutor(1) as pool:
        flush = pool.submit(store.flush)
        disk.inside.wait()
        try:
            store.append(A, number, entries(A, number, 1))
        finally:
            disk.go_on.set()
        with pytest.raises(StoreUnavailable):
            flush.result()
    assert store.durable_position == 2
    store.reopen()
    assert store.last_position == 2
    store.close()


def test_an_append_that_fits_in_part_is_taken_back(tmp_path: Path) -> None:
    """With room for any part of a batch nothing of it stays, and with room again it is taken."""
    disk = SmallDisk()
    store = SegmentStore(tmp_path, disk=disk)
    store.append(A, 0, entries(A, 0, 2))
    path = tmp_path / segment_files.segment_name(1)
    before = path.read_bytes()
    for room in range(0, 200, 7):
        disk.room = room
        with pytest.raises(StoreUnavailable, match="No space left"):
            store.append(A, 2, entries(A, 2, 4))
        assert (store.last_position, path.read_bytes()) == (2, before)
        disk.room = None
    assert store.append(A, 2, entries(A, 2, 4)) == 3
    assert store.flush() == 6
    store.close()
    again = SegmentStore(tmp_path)
    assert (list(again.tail(1)), again.torn) == (numbered(1, entries(A, 0, 6)), None)
    again.close()


@pytest.mark.parametrize("room", [0, 1, frames.FILE_HEADER_BYTES - 1])
def test_a_rotation_without_room_is_tried_again(tmp_path: Path, room: int) -> None:
    """No part of a segment gets a segment's name, and the append that needs one succeeds later."""
    disk = SmallDisk()
    store = SegmentStore(tmp_path, segment_bytes=1, disk=disk)
    store.append(A, 0, entries(A, 0, 1))
    disk.room = room
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="No space left"):
            store.append(A, 1, entries(A, 1, 1))
        assert [p.name for p in tmp_path.glob("0*")] == [segment_files.segment_name(1)]
    assert store.read(A) == tuple(numbered(1, entries(A, 0, 1)))
    disk.room = None
    assert store.append(A, 1, entries(A, 1, 1)) == 2
    store.close()
    again = SegmentStore(tmp_path)
    assert list(again.tail(1)) == numbered(1, entries(A, 0, 2))
    again.close()


def test_a_new_segment_may_stay_empty(tmp_path: Path) -> None:
    """With room for a segment's header and not for a batch, the log is whole all the same."""
    disk = SmallDisk()
    store = SegmentStore(tmp_path, segment_bytes=1, disk=disk)
    store.append(A, 0, entries(A, 0, 1))
    disk.room = frames.FILE_HEADER_BYTES + 10
    with pytest.raises(StoreUnavailable):
        store.append(A, 1, entries(A, 1, 1))
    store.close()
    disk.room = None
    again = SegmentStore(tmp_path, segment_bytes=1, disk=disk)
    assert (again.last_position, again.torn) == (1, None)
    assert again.append(A, 1, entries(A, 1, 1)) == 2
    again.close()
    assert len(segment_files.segment_paths(tmp_path)) == 2


def test_an_epoch_without_room_is_not_taken(tmp_path: Path) -> None:
    """Nobody learns it, the old one is still readable, and the next life goes on from there."""
    disk = SmallDisk()
    store = SegmentStore(tmp_path, disk=disk)
    assert store.take_epoch() == 1
    disk.room = 0
    with pytest.raises(StoreUnavailable):
        store.take_epoch()
    assert (store.epoch, segment_files.read_epoch(tmp_path)) == (1, 1)
    disk.room = None
    assert store.take_epoch() == 2
    store.close()


def test_a_flush_without_room_keeps_what_was_durable(tmp_path: Path) -> None:
    """Nothing more counts as durable; opened anew, with room again, the log goes on."""
    disk = SmallDisk()
    store = SegmentStore(tmp_path, disk=disk)
    store.append(A, 0, entries(A, 0, 1))
    assert store.flush() == 1
    store.append(A, 1, entries(A, 1, 1))
    disk.syncs = False
    with pytest.raises(StoreUnavailable, match="No space left"):
        store.flush()
    with pytest.raises(StoreUnavailable, match="a flush failed"):
        store.append(A, 2, entries(A, 2, 1))
    assert (store.durable_position, len(store.read(A))) == (1, 2)
    store.close()
    assert store.durable_position == 1
    with pytest.raises(StoreUnavailable, match="No space left"):
        SegmentStore(tmp_path, disk=disk)
    disk.syncs = True
    again = SegmentStore(tmp_path, disk=disk)
    assert again.durable_position == again.last_position == 2
    assert again.append(A, 2, entries(A, 2, 1)) == 3
    again.close()


def test_a_torn_end_that_cannot_be_kept_is_not_cut(tmp_path: Path) -> None:
    """The repair needs room for its copy first; without it the log stays as it was found."""
    store = SegmentStore(tmp_path)
    store.append(A, 0, entries(A, 0, 1))
    store.append(A, 1, entries(A, 1, 1))
    store.close()
    path = tmp_path / segment_files.segment_name(1)
    torn = path.read_bytes()[:-3]
    path.write_bytes(torn)
    disk = SmallDisk()
    disk.room = 5
    with pytest.raises(StoreUnavailable, match="No space left"):
        SegmentStore(tmp_path, disk=disk)
    assert (path.read_bytes(), list(tmp_path.glob("*.torn*"))) == (torn, [])
    disk.room = None
    again = SegmentStore(tmp_path, disk=disk)
    assert (again.last_position, again.torn is not None) == (1, True)
    again.close()
