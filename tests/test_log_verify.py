"""`custody log verify`: whatever was done to a log's files is seen, and located to a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from lifecycle.events import ByScheduler, Draining, Entry
from lifecycle.ids import FLEET, EngineId
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from transport import cli, codec
from transport.forensics_chain import Survey, Wrong
from transport.stores import frames, segment_files
from transport.stores.segments import SegmentStore

BATCHES, EACH = 9, 3
Frames = list[bytes]


def entry(sequence: int, *, node: int = 0) -> Entry:
    """The fleet's entry of that number; nodes differ in a name."""
    event = Draining(EngineId(f"d{node}"), 1)
    return Entry(FLEET, sequence, 0, ByScheduler(1), 1_000 + sequence, event)


def batch(n: int, *, node: int = 0) -> list[Entry]:
    return [entry(n * EACH + i, node=node) for i in range(EACH)]


def made(folder: Path, *, node: int = 0, segment_bytes: int = 1 << 20) -> Path:
    """A log of nine batches."""
    store = SegmentStore(folder, segment_bytes=segment_bytes)
    for n in range(BATCHES):
        store.append(FLEET, n * EACH, batch(n, node=node))
    store.close()
    return folder


def only_segment(folder: Path) -> Path:
    (path,) = segment_files.segment_paths(folder)
    return path


def frames_of(folder: Path) -> Frames:
    """The bytes of each frame of a log in one segment."""
    data = only_segment(folder).read_bytes()
    found = [f for f in frames.walk(data, last=True) if isinstance(f, frames.Frame)]
    return [data[f.offset : f.stop] for f in found]


def put(folder: Path, parts: Frames) -> None:
    path = only_segment(folder)
    header = path.read_bytes()[: frames.FILE_HEADER_BYTES]
    path.write_bytes(header + b"".join(parts))


def reframed(frame: bytes, change: Callable[[Entry], Entry]) -> bytes:
    """The frame with its entries changed and every check sum right again."""
    read = frames.read_frame(frame, offset=0)
    changed = [change(codec.decode_entry(m)) for m in codec.batch_from_bytes(read.payload)]
    return frames.pack_frame(
        first_position=read.first_position,
        count=read.count,
        previous=read.previous,
        payload=codec.batch_to_bytes(changed),
    )


def rechained(parts: Frames) -> Frames:
    """All frames with the hashes made anew, as somebody would who rewrites a whole log."""
    out: Frames = []
    previous = frames.CHAIN_START
    for part in parts:
        read = frames.read_frame(part, offset=0)
        packed = frames.pack_frame(
            first_position=read.first_position,
            count=read.count,
            previous=previous,
            payload=read.payload,
        )
        previous = frames.chain(packed)
        out.append(packed)
    return out


def earlier(one: Entry) -> Entry:
    return attrs.evolve(one, time_ns=one.time_ns - 500)


def flipped(frame: bytes, offset: int) -> bytes:
    return frame[:offset] + bytes([frame[offset] ^ 4]) + frame[offset + 1 :]


def checked(folder: Path, *, head: bytes | None = None) -> list[Any]:
    survey = Survey(segment_files.segment_paths(folder))
    for _ in survey.batches():
        pass
    survey.judge_chain(whole=True, head=head)
    return survey.problems


def covers(problem: Any, n: int) -> bool:
    """Whether a problem names batch n by its positions."""
    return bool(problem.first_position <= n * EACH + EACH and problem.last_position > n * EACH)


def test_an_untouched_log_is_intact(tmp_path: Path) -> None:
    """Nothing is wrong with what the store writes, sealed or not."""
    assert checked(made(tmp_path / "one")) == []
    folder = made(tmp_path / "many", segment_bytes=1)
    assert checked(folder) == []
    store = SegmentStore(folder, segment_bytes=1)
    store.seal()
    store.close()
    assert checked(folder) == []


@pytest.mark.parametrize("n", range(BATCHES - 1))
@pytest.mark.parametrize("offset", [0, 5, 20, 40, frames.FRAME_HEADER_BYTES + 3])
def test_a_flipped_bit_is_located(tmp_path: Path, n: int, offset: int) -> None:
    """In a header or a payload: segment and offset are the batch's, and its positions are gone."""
    folder = made(tmp_path)
    parts = frames_of(folder)
    start = frames.FILE_HEADER_BYTES + sum(map(len, parts[:n]))
    put(folder, [*parts[:n], flipped(parts[n], offset), *parts[n + 1 :]])
    damaged, missing = checked(folder)
    assert (damaged.wrong, damaged.offset) == (Wrong.DAMAGED, start)
    assert (missing.wrong, missing.first_position) == (Wrong.MISSING, n * EACH + 1)
    assert missing.last_position == n * EACH + EACH


@pytest.mark.parametrize("n", range(BATCHES - 1))
def test_a_deleted_batch_is_located(tmp_path: Path, n: int) -> None:
    """Exactly its positions are missing."""
    folder = made(tmp_path)
    parts = frames_of(folder)
    put(folder, [*parts[:n], *parts[n + 1 :]])
    (problem,) = checked(folder)
    assert problem.wrong is Wrong.MISSING
    assert (problem.first_position, problem.last_position) == (n * EACH + 1, n * EACH + EACH)


@pytest.mark.parametrize("n", range(BATCHES - 1))
def test_swapped_batches_are_located(tmp_path: Path, n: int) -> None:
    """A batch that stands before the one that it continues is named."""
    folder = made(tmp_path)
    parts = frames_of(folder)
    parts[n], parts[n + 1] = parts[n + 1], parts[n]
    put(folder, parts)
    found = checked(folder)
    assert any(covers(p, n) or covers(p, n + 1) for p in found)
    assert {p.wrong for p in found} <= {
        *(Wrong.OUT_OF_ORDER, Wrong.CLOCK, Wrong.MISSING, Wrong.FOREIGN)
    }
    assert all(p.first_position <= (n + 2) * EACH + 1 for p in found)


@pytest.mark.parametrize("n", range(BATCHES))
@pytest.mark.parametrize("where", [0, 4, BATCHES])
def test_a_repeated_batch_is_located(tmp_path: Path, n: int, where: int) -> None:
    """A batch that stands in the log twice is named, wherever its copy was put."""
    folder = made(tmp_path)
    parts = frames_of(folder)
    put(folder, [*parts[:where], parts[n], *parts[where:]])
    found = checked(folder)
    assert any(p.wrong is Wrong.REPEATED and covers(p, n) for p in found)


@pytest.mark.parametrize("n", range(BATCHES))
def test_a_cut_in_a_batch_is_located(tmp_path: Path, n: int) -> None:
    """What follows the last whole batch is told, with its offset."""
    folder = made(tmp_path)
    parts = frames_of(folder)
    put(folder, [*parts[:n], parts[n][:-1]])
    (problem,) = checked(folder)
    assert problem.wrong is Wrong.TORN
    assert problem.offset == frames.FILE_HEADER_BYTES + sum(map(len, parts[:n]))


@pytest.mark.parametrize("n", range(BATCHES - 1))
def test_a_cut_between_batches_needs_the_head(tmp_path: Path, n: int) -> None:
    """A log that was cut at a batch's end is whole by itself; the expected head tells it."""
    folder = made(tmp_path)
    parts = frames_of(folder)
    head = frames.chain(parts[-1])
    assert checked(folder, head=head) == []
    put(folder, parts[: n + 1])
    assert checked(folder) == []
    (problem,) = checked(folder, head=head)
    assert problem.wrong is Wrong.OTHER_HEAD
    assert covers(problem, n)


@pytest.mark.parametrize("n", range(BATCHES))
def test_a_batch_from_another_node_is_located(tmp_path: Path, n: int) -> None:
    """A batch that fits by its positions and belongs to another log is named."""
    folder, other = made(tmp_path / "one"), made(tmp_path / "two", node=1)
    parts = frames_of(folder)
    parts[n] = frames_of(other)[n]
    put(folder, parts)
    found = checked(folder)
    assert any(covers(p, n) for p in found)
    assert len(found) == 1


@pytest.mark.parametrize("n", range(BATCHES))
def test_a_rewritten_batch_is_located(tmp_path: Path, n: int) -> None:
    """A batch whose times were shifted, with its check sums made anew, is known by its successor."""
    folder = made(tmp_path)
    parts = frames_of(folder)
    parts[n] = reframed(parts[n], earlier)
    put(folder, parts)
    found = checked(folder)
    wrongs = {p.wrong for p in found if covers(p, n)}
    if n:
        assert Wrong.CLOCK in wrongs
    if n < BATCHES - 1:
        assert Wrong.CHANGED in wrongs


@pytest.mark.parametrize("n", range(1, BATCHES))
def test_a_clock_that_steps_back_is_located(tmp_path: Path, n: int) -> None:
    """Also in a log whose whole chain was made anew; without the step only the head tells it."""
    folder = made(tmp_path)
    parts = frames_of(folder)
    head = frames.chain(parts[-1])
    put(folder, rechained([*parts[:n], *(reframed(part, earlier) for part in parts[n:])]))
    (clock,) = checked(folder)
    assert clock.wrong is Wrong.CLOCK
    assert covers(clock, n)
    assert Wrong.OTHER_HEAD in {p.wrong for p in checked(folder, head=head)}


@pytest.mark.parametrize("n", range(BATCHES))
@pytest.mark.parametrize("sealed", [False, True])
def test_a_missing_segment_is_located(tmp_path: Path, n: int, sealed: bool) -> None:
    """A file that is gone is a gap of exactly its positions; of the last, the head tells."""
    folder = made(tmp_path, segment_bytes=1)
    head = frames.chain(frames_of(made(tmp_path / "same"))[-1])
    if sealed:
        store = SegmentStore(folder, segment_bytes=1)
        store.seal()
        store.close()
    segment_files.segment_paths(folder)[n].unlink()
    found = checked(folder, head=head)
    if n == BATCHES - 1:
        assert Wrong.OTHER_HEAD in {p.wrong for p in found}
        assert not sealed or Wrong.ENDS_SEALED in {p.wrong for p in found}
    else:
        (problem,) = found
        assert problem.wrong is Wrong.MISSING
        assert (problem.first_position, problem.last_position) == (n * EACH + 1, n * EACH + EACH)


def test_damage_in_a_sealed_segment_costs_its_block_only(tmp_path: Path) -> None:
    """The other segments are read, and the damaged one is named."""
    folder = made(tmp_path, segment_bytes=1)
    store = SegmentStore(folder, segment_bytes=1)
    store.seal()
    store.close()
    path = segment_files.segment_paths(folder)[3]
    data = path.read_bytes()
    path.write_bytes(flipped(data, len(data) - 9))
    found = checked(folder)
    assert {(p.wrong, p.segment) for p in found} >= {(Wrong.DAMAGED, path.name)}
    assert any(p.wrong is Wrong.MISSING and covers(p, 3) for p in found)


def test_a_renamed_segment_is_named(tmp_path: Path) -> None:
    """A file that does not bear its first position as its name is told."""
    folder = made(tmp_path, segment_bytes=1)
    path = segment_files.segment_paths(folder)[2]
    path.rename(folder / segment_files.segment_name(8))
    assert Wrong.MISNAMED in {p.wrong for p in checked(folder)}


# --- The verb ---------------------------------------------------------------------------------


def verified(
    path: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, str, dict[str, Any]]:
    code = cli.run(["log", "verify", str(path), *flags])
    text = capsys.readouterr().out
    assert cli.run(["log", "verify", str(path), *flags, "--json"]) == code
    return code, text, json.loads(capsys.readouterr().out)


def test_the_verb_says_intact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An intact log is exit code 0, with the hash with which it ends."""
    code, text, document = verified(made(tmp_path), capsys)
    assert (code, text.splitlines()[-1]) == (0, "intact")
    assert f"chain ends with {document['head']}" in text
    assert verified(tmp_path, capsys, "--head", document["head"])[0] == 0
    code, text, _ = verified(tmp_path, capsys, "--head", "00" * 32)
    assert code == 1
    assert "other_head" in text


def test_the_verb_locates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed log is exit code 1, and each problem has segment, offset and positions."""
    parts = frames_of(made(tmp_path))
    put(tmp_path, [*parts[:2], *parts[3:]])
    code, text, document = verified(tmp_path, capsys)
    assert code == 1
    assert "positions 7 to 9: missing: 3 entries missing before it" in text
    assert document["problems"][0]["wrong"] == "missing"


def test_lines_are_checked_for_order_and_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON Lines have no chain: order and times are 1, a gap is 5, and that is said."""
    entries = [(n + 1, entry(n)) for n in range(6)]
    path = write_log(tmp_path / "x.jsonl", entries)
    code, text, document = verified(path, capsys)
    assert (code, document["chained"]) == (0, False)
    assert "no check sums and no chain" in text
    swapped = write_log(tmp_path / "y.jsonl", [*entries[:2], entries[3], entries[2], *entries[4:]])
    code, text, _ = verified(swapped, capsys)
    assert code == 1
    assert "line 5" in text
    gone = write_log(tmp_path / "z.jsonl", [*entries[:2], *entries[3:]])
    assert verified(gone, capsys)[0] == 5


@pytest.mark.parametrize("head", ["xyz", "00"])
def test_a_head_that_is_no_hash_is_a_usage_error(
    tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused with 2 before anything is read."""
    assert cli.run(["log", "verify", str(tmp_path), "--head", head]) == 2
    assert "--head" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"nonsense\n"])
def test_what_is_no_log_is_refused(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is exit code 5 and a sentence."""
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert cli.run(["log", "verify", str(path)]) == 5
    assert capsys.readouterr().err.startswith("custody: ")
