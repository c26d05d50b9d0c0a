"""What killed processes, lost power and flipped bits leave of a log; the counts are printed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.store import Stored, StoreDamaged
from lifecycle.ids import request_id
from tests.store_contract import A, B, entries
from tests.store_crash_child import Hasty, entry_of
from transport.stores import frames, segment_files
from transport.stores.disk import Disk
from transport.stores.segments import SegmentStore

KILLS_FROM_OUTSIDE = 1_000
KILLS_AT_A_CALL = 400
FLIPS = 10_000
POWER_CUTS = 400
LIVES_PER_FOLDER = 20


# --- Kills ------------------------------------------------------------------------------------


class Writers:
    """The process that forks writers, and what the current writer has reported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.store_crash_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._pending = b""

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(10) == 0

    def live(self, folder: Path, *, death: int, chance: random.Random) -> Counter[str]:
        """One life of a writer; returns the highest number of each kind that it reported."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {chance.randrange(1 << 30)} {death}\n".encode())
        highest: Counter[str] = Counter()
        process = 0
        report_wanted = chance.choice((2, chance.randrange(3, 20), chance.randrange(3, 40)))
        for number, (kind, text) in enumerate(self._reports(chance), start=1):
            assert kind != "X", text
            if kind == "Z":
                assert int(text) == signal.SIGKILL
                return highest
            highest[kind] = max(highest[kind], int(text))
            if kind == "P":
                process = int(text)
            if not death and number == report_wanted:
                # The writer goes on meanwhile: it dies anywhere in what follows the report.
                for _ in range(chance.randrange(20_000)):
                    pass
                os.kill(process, signal.SIGKILL)
        raise AssertionError("the writers' process ended")

    def _reports(self, chance: random.Random) -> Iterator[tuple[str, str]]:
        """Reports as they come, read in pieces of random size."""
        assert self._process.stdout is not None
        while piece := os.read(self._process.stdout.fileno(), chance.randrange(1, 200)):
            *lines, self._pending = (self._pending + piece).split(b"\n")
            for line in lines:
                kind, _, text = line.decode().partition(" ")
                yield kind, text


@pytest.fixture
def writers() -> Iterator[Writers]:
    found = Writers()
    yield found
    found.close()


def whole_log(store: SegmentStore) -> list[Stored]:
    """Every entry, each the very one that writers write in its place, without a gap."""
    found = list(store.tail(1))
    lengths: Counter[str] = Counter()
    for position, stored in enumerate(found, start=1):
        request = stored.entry.request
        assert stored == Stored(position, entry_of(request, lengths[request]))
        lengths[request] += 1
    return found


def check_after(folder: Path, reported: Counter[str], before: int) -> tuple[int, bool]:
    """Open what a killed writer left; returns the last position and whether an end was torn."""
    store = SegmentStore(folder, disk=Hasty())
    try:
        assert store.last_position >= max(before, reported["D"], reported["A"])
        assert store.epoch >= reported["E"]
        last = len(whole_log(store))
        assert store.durable_position == store.last_position == last
        request = request_id(epoch=store.take_epoch(), serial=1)
        assert store.append(request, 0, [entry_of(request, 0)]) == last + 1
        return store.flush(), store.torn is not None
    finally:
        store.close()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [KILLS_FROM_OUTSIDE, KILLS_AT_A_CALL])
def test_a_killed_writer_loses_nothing_that_it_reported(
    tmp_path: Path, writers: Writers, record_property: Callable[[str, object], None], kills: int
) -> None:
    """Wherever a writer dies, the log opens, holds what was told, and goes on.

    A first run kills from outside after a random part of the reports, a second at every kind of
    call that changes a file, in mid-write too.
    """
    chance = random.Random(kills)
    seen: Counter[str] = Counter()
    last = 0
    for number in range(kills):
        folder = tmp_path / f"log{number // LIVES_PER_FOLDER}"
        if number % LIVES_PER_FOLDER == 0:
            last = 0
        death = 0 if kills == KILLS_FROM_OUTSIDE else chance.randrange(1, 60)
        reported = writers.live(folder, death=death, chance=chance)
        last, torn = check_after(folder, reported, last)
        seen["torn ends repaired"] += torn
        for kind in "EADS":
            seen[kind] += reported[kind] > 0
    sealed = len(list(tmp_path.glob(f"*/*{segment_files.SEALED_SUFFIX}")))
    # Each kind of death has happened, or the claim was not tested.
    assert min(seen["E"], seen["A"], seen["D"], seen["S"], sealed) > 0
    assert kills == KILLS_FROM_OUTSIDE or seen["torn ends repaired"] > 0
    where = "at random instants" if kills == KILLS_FROM_OUTSIDE else "within a file call"
    record_property(
        "summary",
        f"{kills:,} writers killed {where}: nothing reported was lost; "
        f"{seen['D']:,} had reported durable positions, "
        f"{seen['torn ends repaired']:,} left a torn end, {sealed:,} segments are sealed",
    )


# --- Power ------------------------------------------------------------------------------------


class RememberingDisk(Disk):
    """Remembers what each file holds for certain: what it held when it was last synced."""

    def __init__(self) -> None:
        self.certain: dict[int, int] = {}

    def sync(self, handle: int) -> None:
        state = os.fstat(handle)
        self.certain[state.st_ino] = state.st_size


def after_power_cut(folder: Path, disk: RememberingDisk, copy: Path, chance: random.Random) -> Path:
    """The folder as it may be found: unsynced bytes are there, cut, or zeros."""
    copy.mkdir()
    for path in folder.iterdir():
        data = path.read_bytes()
        certain = disk.certain.get(path.stat().st_ino, 0)
        kept = chance.randint(certain, len(data))
        if chance.random() < 0.5:
            (copy / path.name).write_bytes(data[:kept])
        else:
            # The file was made longer first.  A sector is written whole or not at all.
            kept = max(certain, kept // frames.SECTOR_BYTES * frames.SECTOR_BYTES)
            (copy / path.name).write_bytes(data[:kept] + bytes(len(data) - kept))
    return copy


@pytest.mark.slow
def test_a_power_cut_loses_nothing_durable(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Whatever of the unsynced bytes reached the disk, durable entries and epochs are there."""
    chance = random.Random(1)
    torn = unwritten = 0
    for number in range(POWER_CUTS):
        disk = RememberingDisk()
        folder = tmp_path / f"log{number}"
        store = SegmentStore(folder, segment_bytes=chance.choice((500, 5_000)), disk=disk)
        length = 0
        for _ in range(chance.randrange(1, 30)):
            what = chance.random()
            if what < 0.7:
                count = chance.choice((1, 2, 10))
                fresh = [entry_of(A, length + n) for n in range(count)]
                store.append(A, length, fresh)
                length += count
            elif what < 0.8:
                store.flush()
            elif what < 0.9:
                store.seal()
            else:
                store.take_epoch()
        durable, epoch = store.durable_position, store.epoch
        copy = after_power_cut(folder, disk, tmp_path / f"copy{number}", chance)
        store.close()
        after = SegmentStore(copy, disk=Hasty())
        assert length >= len(whole_log(after)) >= durable
        assert after.epoch in (epoch, max(epoch, 1))  # entries name epoch 1
        if after.torn is not None:
            torn += 1
            unwritten += after.torn.read_bytes().endswith(bytes(16))
        after.close()
    assert torn > unwritten > 0
    record_property(
        "summary",
        f"{POWER_CUTS:,} power cuts: nothing durable was lost; "
        f"{torn:,} left a torn end, {unwritten:,} of them with zeros for data",
    )


# --- Bits -------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A log of three sealed segments, a plain one that is full, and one that is being filled."""
    folder = tmp_path / "log"
    store = SegmentStore(folder, segment_bytes=600)
    for n in range(3):
        fill(store, segments=n + 2)
    store.seal()
    fill(store, segments=5)
    store.append(A, len(store.read(A)), entries(A, len(store.read(A)), 1))
    store.append(B, 0, entries(B, 0, 2))
    store.close()
    assert [segment_files.is_sealed(path) for path in segment_files.segment_paths(folder)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    return folder


def fill(store: SegmentStore, *, segments: int) -> None:
    """Append until there are so many segments."""
    while len(segment_files.segment_paths(store.folder)) < segments:
        length = len(store.read(A))
        store.append(A, length, entries(A, length, 2))


def change(path: Path, at: int, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))


def read_all(store: SegmentStore) -> list[Stored]:
    return [*store.tail(1), *store.read(A), *store.read(B)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_flipped_bit_is_ever_read_as_history(
    mixed: Path, record_property: Callable[[str, object], None]
) -> None:
    """Opening names segment and offset; a store that is open reads the truth or reports too."""
    store = SegmentStore(mixed)
    truth = read_all(store)
    store.close()
    files = {path: path.read_bytes() for path in segment_files.segment_paths(mixed)}
    weights = [len(data) for data in files.values()]
    chance = random.Random(2)
    seen: Counter[str] = Counter()
    for _ in range(FLIPS):
        (path,) = chance.choices(list(files), weights)
        at = chance.randrange(len(files[path]))
        flipped = files[path][at] ^ 1 << chance.randrange(8)
        kind = "sealed" if segment_files.is_sealed(path) else "plain"
        opened = SegmentStore(mixed, disk=Hasty()) if chance.random() < 0.2 else None
        change(path, at, flipped)
        try:
            with pytest.raises(StoreDamaged) as caught:
                SegmentStore(mixed) if opened is None else _read_or_raise(opened, truth, seen)
        finally:
            change(path, at, files[path][at])
            if opened is not None:
                opened.close()
        if caught.value.segment != "":
            assert caught.value.segment == path.name
            assert 0 <= caught.value.offset <= at
            assert caught.value.reason
            seen[f"{kind}, reported"] += 1
    store = SegmentStore(mixed)
    assert (read_all(store), store.torn) == (truth, None)
    store.close()
    assert sum(seen.values()) == FLIPS
    record_property(
        "summary",
        f"{FLIPS:,} bits flipped: {seen['sealed, reported']:,} reported in sealed segments, "
        f"{seen['plain, reported']:,} in plain ones, each with its offset; "
        f"{seen['read unchanged']:,} struck what an open store had no need to read",
    )


def _read_or_raise(store: SegmentStore, truth: list[Stored], seen: Counter[str]) -> None:
    """Raises `StoreDamaged` always; without a segment when all that was read was true."""
    assert read_all(store) == truth
    seen["read unchanged"] += 1
    raise StoreDamaged("", 0, "")


def test_damage_in_a_sealed_segment_is_told_by_its_block(mixed: Path) -> None:
    """In the header the offset is 0; in a block it is where the block begins."""
    path = segment_files.segment_paths(mixed)[1]
    good = path.read_bytes()
    for at, pattern in ((3, "byte 0: "), (50, "byte 0: the header"), (-1, r"byte 132: the block")):
        flipped = bytearray(good)
        flipped[at] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(StoreDamaged, match=f"{re.escape(path.name)}, {pattern}"):
            SegmentStore(mixed)
