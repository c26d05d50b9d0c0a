"""A replay that begins behind a snapshot comes to what a replay of everything comes to."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.explorer import walk
from engine.scenarios import SCENARIOS
from lifecycle.ends import Ends
from lifecycle.events import ByScheduler, Dropped, Entry
from lifecycle.forensics_exposures import Inquiry
from lifecycle.forensics_story import Story
from lifecycle.forensics_sums import summed
from lifecycle.ids import EngineId, party_of
from lifecycle.replay import Replayer
from lifecycle.state import TERMINAL, RequestState
from lifecycle.tally import Tally
from lifecycle.tally_metrics import REQUESTS
from tests.captures import FOLDER, state_hash
from tests.test_cli import bare  # noqa: F401 - a fixture for every test here
from transport import cli, codec, replay_text
from transport.aside import DiskAside
from transport.bench_forensics import OPEN, Traffic
from transport.forensics_read import SegmentCapture, open_capture
from transport.replaying import taken, wanted
from transport.seek_build import Built, NotIndexed, build
from transport.seek_index import NAME, UnusableIndex
from transport.seeking import Begun, begun, of_request
from transport.seeking import indexed as indexed_log
from transport.stores import frames, sealed, segment_files

CAPTURED = FOLDER / "schema-1" / "segments"
Entries = Sequence[Entry]


def written(folder: Path, entries: Entries, draw: random.Random) -> Path:
    """A log of these entries in batches and segments of all sizes, some of them sealed."""
    folder.mkdir()
    position, previous, left = 1, frames.CHAIN_START, list(entries)
    while left:
        first, before = position, previous
        content = frames.pack_file_header(first_position=first, previous=before)
        for _ in range(draw.randrange(1, 9)):
            batch, left = left[: (size := draw.randrange(1, 5))], left[size:]
            if batch:
                frame = frames.pack_frame(
                    first_position=position,
                    count=len(batch),
                    previous=previous,
                    payload=codec.batch_to_bytes(batch),
                )
                content += frame
                previous, position = frames.chain(frame), position + len(batch)
        if left and draw.random() < 0.5:
            content = sealed.pack(
                content,
                first_position=first,
                last_position=position - 1,
                last_frame_digest=previous,
                block_bytes=draw.choice([512, 1 << 20]),
            )
            (folder / segment_files.sealed_name(first)).write_bytes(content)
        else:
            (folder / segment_files.segment_name(first)).write_bytes(content)
    return folder


def indexed(log: Path, *, every: int = 0, path: Path | None = None) -> Built:
    with ExitStack() as stack:
        capture = open_capture(log, stack)
        assert isinstance(capture, SegmentCapture)
        return build(capture, path or log / NAME, tool="test", every=every)


def spoilt(entries: Entries, draw: random.Random) -> list[Entry]:
    """The same with faults: an entry is left out, or said again later, when a request is over."""
    out = list(entries)
    for _ in range(draw.randrange(2)):
        del out[draw.randrange(3, len(out))]
    for _ in range(draw.randrange(4)):
        place = draw.randrange(len(out) // 2, len(out))
        again = attrs.evolve(draw.choice(out[3:place]), time_ns=out[place - 1].time_ns)
        out.insert(place, again)
    return late(out, draw)


def late(entries: Entries, draw: random.Random) -> list[Entry]:
    """The same, and requests that are over hear of proposals that were too late, as they may."""
    out: list[Entry] = []
    replayer = Replayer()
    for entry in entries:
        for added in (*_dropped(replayer, draw), entry):
            out.append(added)
            replayer.take(len(out), added)
    return out


def _dropped(replayer: Replayer, draw: random.Random) -> Iterator[Entry]:
    history = replayer.history
    over = [state for state in history.requests.values() if state.phase in TERMINAL]
    if over and draw.random() < 0.3:
        state = draw.choice(over)
        event = Dropped(party_of(EngineId("p0"), 1, 0), 1, "Drained", "settled-once")
        by = ByScheduler(history.fleet.epoch)
        yield Entry(state.request, state.sequence, state.attempt, by, history.time_ns, event)


WALKS = {
    "two of each, placing": 0,
    "slow growth": 1,
    "lost engines": 1,
    "fences": 0,
    "waits": 1,
    "strangers": 1,
    "roomy": 2,
}
"""Scenarios, and seeds with which they lose engines, quarantine pages and end many requests."""


def walked(name: str, seed: int) -> list[Entry]:
    return [entry for _, entry in walk(SCENARIOS[name], seed, steps=400)[0].stored]


LOGS = [pytest.param(walked(name, seed), id=name) for name, seed in WALKS.items()]


def world(here: Begun, at: int) -> list[Any]:
    for _ in taken(here.capture, here.replayer, at=at):
        pass
    replayer = here.replayer
    states = {name: replayer.state(name) for name in replayer.names()}
    return [
        replay_text.world_object(replayer),
        replayer.phases(),
        replayer.history.evaluated,
        {name: state for name, state in states.items() if state is not None},
        replayer.history.ledger,
        replayer.history.fleet,
    ]


def findings(here: Begun, first: int) -> list[Any]:
    for _ in taken(here.capture, here.replayer):
        pass
    report = here.replayer.report(whole=here.capture.whole)
    return [report.phases, [f for f in report.findings if wanted(f, None, first, None)]]


@pytest.mark.parametrize("entries", LOGS)
@pytest.mark.parametrize("faults", range(3))
def test_every_position_has_the_world_and_the_findings_of_a_whole_replay(
    tmp_path: Path, entries: list[Entry], faults: int
) -> None:
    """Requests, pages, lives, phases, guards asked, and each violation behind the position."""
    draw = random.Random(faults)
    log = written(tmp_path / "log", spoilt(entries, draw) if faults else entries, draw)
    built = indexed(log)
    assert built.snapshots
    used = 0
    for at in range(1, built.entries + 1, 2):
        with begun(log, behind=at) as here, begun(log, behind=at, whole=True) as all_of_it:
            used += here.skipped is not None
            assert not here.refused
            assert world(here, at) == world(all_of_it, at)
        with begun(log, behind=at) as here, begun(log, behind=at, whole=True) as all_of_it:
            assert findings(here, at + 1) == findings(all_of_it, at + 1)
    assert used > 5


@pytest.mark.parametrize("entries", LOGS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_put_aside_changes_nothing(entries: list[Entry], seed: int) -> None:
    """With a request in memory and all others on disk, a spoilt log has the same report."""
    draw = random.Random(seed)
    plain, thrifty = Replayer(), Replayer(aside=DiskAside(latest=1))
    for position, entry in enumerate(spoilt(entries, draw), start=1):
        plain.take(position, entry)
        thrifty.take(position, entry)
    assert thrifty.report() == plain.report()
    for name in thrifty.names():
        known = thrifty.state(name)
        if known is not None:
            thrifty.history.requests[name] = known
    assert state_hash(thrifty.history) == state_hash(plain.history)


def test_a_long_replay_holds_what_is_open_and_the_latest_that_is_over() -> None:
    """However many requests there were, no more are in memory than run, and a few behind them."""
    aside: DiskAside[RequestState] = DiskAside(latest=20)
    replayer = Replayer(aside=aside)
    most = 0
    for position, entry in enumerate(Traffic().entries(6_000), start=1):
        assert replayer.take(position, entry) is None
        most = max(most, len(replayer.history.requests) + aside.in_memory)
    assert replayer.report().requests > 500
    assert most <= OPEN + 40


def test_a_long_inquiry_holds_what_is_open_and_the_latest_that_is_over() -> None:
    """However many requests there were, and each is counted once at the end."""
    shelf: DiskAside[Story] = DiskAside(latest=20)
    inquiry = Inquiry(shelf=shelf)
    most = 0
    for position, entry in enumerate(Traffic().entries(6_000), start=1):
        inquiry.take(position, entry)
        most = max(most, len(inquiry.stories) + shelf.in_memory)
    assert summed(inquiry).requests == len(set(inquiry.names())) > 500
    assert most <= OPEN + 40


@pytest.mark.parametrize("entries", LOGS)
def test_ends_are_what_the_tally_counts(entries: list[Entry]) -> None:
    """Outcomes, and pages in quarantine by cause, while the log goes on and at its end."""
    replayer = Replayer(aside=DiskAside(latest=1))
    ends, tally = Ends(replayer), Tally()
    for position, entry in enumerate(entries, start=1):
        assert replayer.take(position, entry) is None
        ends.note(entry)
        tally.note(entry)
        assert ends.quarantine == tally.quarantine
    counted = next(f.values for f in tally.families() if f.metric == REQUESTS)
    assert ends.outcomes == counted
    assert sum(ends.outcomes.values()) > 0


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """A kept log of real engines with its index."""
    log = tmp_path / "log"
    shutil.copytree(CAPTURED, log)
    indexed(log)
    return log


def refusal(log: Path, at: int = 60) -> str:
    with begun(log, behind=at) as here:
        assert (here.skipped is None) == bool(here.refused)
        return here.refused


def test_an_index_of_another_log_is_refused(captured: Path, tmp_path: Path) -> None:
    """It is never believed: with a reason everything is read, or, if it was named, nothing."""
    assert refusal(captured) == ""
    entries = [entry for _, entry in open_capture(captured, ExitStack())]
    other = written(tmp_path / "other", entries, random.Random(1))
    shutil.copy(captured / NAME, other / NAME)
    assert refusal(other)
    with pytest.raises(UnusableIndex), begun(other, behind=60, index=other / NAME):
        pass


def test_an_index_of_a_log_that_was_cut_is_refused(captured: Path) -> None:
    """The index's last batch is not there any more."""
    last = segment_files.segment_paths(captured)[-1]
    data = last.read_bytes()
    last.write_bytes(data[:-200])
    assert "changed or cut" in refusal(captured)
    last.unlink()
    assert "no segment" in refusal(captured)


def test_a_log_that_grew_keeps_its_index(captured: Path, tmp_path: Path) -> None:
    """What came since is read; it must continue what the index knows."""
    entries = [entry for _, entry in open_capture(captured, ExitStack())]
    half = written(tmp_path / "half", entries[:40], random.Random(2))
    whole = written(tmp_path / "whole", entries, random.Random(2))
    paths = segment_files.segment_paths(whole)
    kept = [p for p in segment_files.segment_paths(half) if p.name in {x.name for x in paths}][:-1]
    for path in segment_files.segment_paths(half):
        if path not in kept:
            path.unlink()
    indexed(half)
    for path in paths:
        shutil.copy(path, half / path.name)
    with begun(half, behind=62) as here, begun(half, behind=62, whole=True) as all_of_it:
        assert here.skipped is not None
        assert world(here, 62) == world(all_of_it, 62)


@pytest.mark.parametrize("table", ["snapshot", "about"])
def test_a_changed_index_is_refused(captured: Path, table: str) -> None:
    """A snapshot whose sum does not match, and a file that says less than it must."""
    with sqlite3.connect(captured / NAME) as file:
        if table == "snapshot":
            file.execute("UPDATE snapshot SET body = zeroblob(40)")
        else:
            file.execute("DELETE FROM about")
    assert refusal(captured)
    (captured / NAME).write_bytes(b"nonsense")
    assert "is no index" in refusal(captured)


def test_damage_behind_the_snapshot_is_found(captured: Path) -> None:
    """What is read is checked as ever: a flipped bit is named, and the exit code is 5."""
    path = segment_files.segment_paths(captured)[-1]
    data = bytearray(path.read_bytes())
    # Not in the last batch, whose change would be an index that does not fit.
    data[-400] ^= 1
    path.write_bytes(data)
    with begun(captured, behind=50) as here:
        assert here.skipped is not None
        for _ in taken(here.capture, here.replayer):
            pass
        assert here.capture.problems
    assert cli.run(["replay", str(captured), "--from", "51"]) == 5


def test_the_batch_with_which_the_snapshot_ends_must_be_there(captured: Path) -> None:
    """Where its bytes were changed the snapshot stands for nothing, and everything is read."""
    with ExitStack() as stack:
        place = indexed_log(captured, captured / NAME, stack).index.place_before(61)
    assert place is not None
    path = captured / f"{place.segment}.segment"
    data = bytearray(path.read_bytes())
    data[place.stop - 2] ^= 1
    path.write_bytes(data)
    assert "check sum" in refusal(captured)
    assert cli.run(["replay", str(captured), "--at", "60"]) == 5


def test_a_damaged_log_gets_no_index(captured: Path) -> None:
    """And the one that is there stays as it was."""
    before = (captured / NAME).read_bytes()
    segment_files.segment_paths(captured)[1].unlink()
    with pytest.raises(NotIndexed):
        indexed(captured)
    assert (captured / NAME).read_bytes() == before
    assert cli.run(["log", "index", str(captured)]) == 5
    assert not list(captured.glob("*.new"))


# --- The verbs --------------------------------------------------------------------------------


def test_the_verb_says_what_it_did_not_read(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Positions, hash and violations of the part that the index stands for."""
    assert cli.run(["log", "index", str(captured), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["entries"], made["last_position"]) == (64, 64)
    indexed(captured)
    assert cli.run(["replay", str(captured), "--at", "62"]) == 0
    text = capsys.readouterr().out
    assert "not read: positions 1 to " in text
    assert "not read: everything behind position 62" in text
    assert cli.run(["replay", str(captured), "--from", "62", "--json"]) == 0
    skipped = json.loads(capsys.readouterr().out)["skipped"]
    assert 0 < skipped["last"] < 62
    assert skipped["violations"] == 0
    assert len(skipped["head"]) == 64
    assert cli.run(["replay", str(captured), "--at", "62", "--whole"]) == 0
    assert "not read" not in capsys.readouterr().out


def test_the_verb_says_that_an_index_does_not_fit(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the log it is passed over and told; named, it is exit code 5."""
    (captured / NAME).write_bytes(b"nonsense")
    assert cli.run(["replay", str(captured), "--at", "62"]) == 0
    said = capsys.readouterr()
    assert "the index is not used" in said.err
    assert "not read" not in said.out
    assert cli.run(["replay", str(captured), "--at", "62", "--index", str(captured / NAME)]) == 5
    assert cli.run(["replay", str(captured), "--at", "62", "--index", "/nowhere"]) == 5


def test_the_verb_refuses_what_cannot_be_entered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON Lines have no chain, so no index of them could be confirmed."""
    assert cli.run(["log", "index", str(FOLDER / "schema-1" / "log.jsonl")]) == 2
    assert "only a folder of segments" in capsys.readouterr().err
    assert cli.run(["log", "index", str(tmp_path / "none")]) == 5
    assert cli.run(["replay", str(tmp_path), "--whole", "--index", "x"]) == 2


def test_a_world_in_a_damaged_log_is_incomplete(tmp_path: Path) -> None:
    """`--at` behind a gap says so with 5, and before it with 0."""
    log = tmp_path / "log"
    shutil.copytree(CAPTURED, log)
    segment_files.segment_paths(log)[1].unlink()
    assert cli.run(["replay", str(log), "--at", "20"]) == 0
    assert cli.run(["replay", str(log), "--at", "60"]) == 5


def test_a_request_is_shown_by_the_index(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entries are those of the whole log, and what was not read is told."""
    request = "00000001-000000000002"
    told = ["log", "show", request, "--log", str(captured), "--json"]
    assert cli.run(told) == 0
    said = capsys.readouterr()
    assert "of positions 1 to 64 only this request's were read" in said.err
    assert cli.run([*told, "--whole"]) == 0
    whole = capsys.readouterr()
    assert (whole.out, whole.err) == (said.out, "")
    assert said.out.count("\n") > 5
    assert cli.run(["log", "show", "no-such", "--log", str(captured)]) == 1
    (captured / NAME).write_bytes(b"nonsense")
    assert cli.run(told) == 0
    said = capsys.readouterr()
    assert said.out == whole.out
    assert "the index is not used" in said.err


@pytest.mark.parametrize("entries", LOGS[:3])
def test_every_request_is_found_by_the_index(tmp_path: Path, entries: list[Entry]) -> None:
    """Its entries are those of the whole log, refused and late ones among them."""
    log = written(tmp_path / "log", spoilt(entries, random.Random(4)), random.Random(4))
    indexed(log)
    with ExitStack() as stack:
        stored = list(open_capture(log, stack))
    for name in {entry.request for _, entry in stored}:
        found, _ = of_request(log, name)
        assert found == [one for one in stored if one[1].request == name]
