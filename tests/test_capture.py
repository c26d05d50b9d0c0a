"""A log is read by the batch, and told entry by entry."""

from __future__ import annotations

import io
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from engine.store import Stored
from lifecycle.events import Entry
from transport import codec
from transport.bench_forensics import BATCH_ENTRIES, Traffic
from transport.forensics_read import open_capture, open_lines
from transport.jsonlines import jsonlines
from transport.pb import lifecycle_pb2 as pb
from transport.stores import frames, segment_files

BATCHES = 4


def _entries() -> list[Entry]:
    return list(islice(Traffic().entries(2 * BATCHES * BATCH_ENTRIES), BATCHES * BATCH_ENTRIES))


def _written(
    folder: Path, *, without: int | None = None, unreadable: int | None = None, empty: bool = False
) -> Path:
    """A segment of some batches: one left out, an entry that says nothing, or an empty one."""
    folder.mkdir()
    entries = _entries()
    with (folder / segment_files.segment_name(1)).open("wb") as out:
        previous = frames.CHAIN_START
        out.write(frames.pack_file_header(first_position=1, previous=previous))
        for number in range(BATCHES):
            start = number * BATCH_ENTRIES
            batch = [codec.encode_entry(e) for e in entries[start : start + BATCH_ENTRIES]]
            if unreadable is not None and start < unreadable <= start + BATCH_ENTRIES:
                batch[unreadable - 1 - start].ClearField("event")
            if number == without:
                batch = [] if empty else batch
            frame = frames.pack_frame(
                first_position=start + 1,
                count=len(batch) or 1,
                previous=previous,
                payload=pb.EntryBatch(entries=batch).SerializeToString(),
            )
            if number != without or empty:
                out.write(frame)
            previous = frames.chain(frame)
    return folder


@pytest.mark.parametrize("empty", [False, True])
def test_a_missing_batch_is_told_before_the_entry_behind_it(tmp_path: Path, *, empty: bool) -> None:
    """Where a batch is missing or holds nothing, the next entry says so, and no other."""
    with ExitStack() as stack:
        capture = open_capture(_written(tmp_path / "log", without=1, empty=empty), stack)
        told = list(capture.joined())
    behind = 2 * BATCH_ENTRIES + 1
    assert [position for position, _, gap in told if gap] == [behind]
    assert [(gap.first, gap.last) for gap in capture.missing] == [(BATCH_ENTRIES + 1, behind - 1)]
    assert [entry for _, entry, _ in told] == [
        e for n, e in enumerate(_entries()) if not BATCH_ENTRIES <= n < behind - 1
    ]
    before = told[BATCH_ENTRIES - 1][1].time_ns
    assert capture.missing_ns == told[BATCH_ENTRIES][1].time_ns - before
    assert capture.next_position == BATCHES * BATCH_ENTRIES + 1


def test_an_entry_that_says_nothing_is_heard_of_when_it_is_its_turn(tmp_path: Path) -> None:
    """All others of its batch are read, and the one behind it says that something is missing."""
    with ExitStack() as stack:
        capture = open_capture(_written(tmp_path / "log", unreadable=300), stack)
        heard: list[int] = []
        read: list[int] = []
        capture.passing_over = lambda record: heard.append(
            read[-1] if record.position == 300 else 0
        )
        gaps = []
        for position, _, gap in capture.joined():
            read.append(position)
            if gap:
                gaps.append(position)
    assert heard == [299]
    assert gaps == [301]
    assert len(read) == BATCHES * BATCH_ENTRIES - 1


def test_what_was_read_is_counted_entry_by_entry(tmp_path: Path) -> None:
    """Whoever stops in the middle of a batch has read up to there."""
    with ExitStack() as stack:
        capture = open_capture(_written(tmp_path / "log"), stack)
        for position, _ in capture:
            assert capture.entries_read == position
            if position == 300:
                break
    assert capture.entries_read == 300


@pytest.mark.parametrize("cut", range(4))
@pytest.mark.parametrize("begins", [1, 7])
def test_what_the_header_counts_is_missed_once(begins: int, cut: int) -> None:
    """A line that is gone in the middle is its position's, those at the end are the header's."""
    entries = [Stored(n, e) for n, e in enumerate(Traffic().entries(20), start=1) if n >= begins]
    header, *body = jsonlines(entries, complete=True)
    for middle in (0, 3, 5):
        lines = body[: len(body) - cut]
        if middle:
            del lines[middle]
        capture = open_lines(io.BytesIO("".join([header, *lines]).encode()))
        list(capture)
        gaps = [(gap.first, gap.last) for gap in capture.missing]
        expected = [(1, begins - 1)] if begins > 1 else []
        expected += [(begins + middle, begins + middle)] if middle else []
        last = entries[-1].position
        expected += [(last - cut + 1, last)] if cut else []
        assert gaps == expected
