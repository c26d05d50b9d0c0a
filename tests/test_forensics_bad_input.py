"""Bad logs: what each verb says of each, its exit code, and that none of them ends in a traceback."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import duckdb
import pytest

from engine.store import Stored
from lifecycle.events import Draining
from lifecycle.ids import FLEET, EngineId, RequestId
from tests import handmade
from tests.handmade import ONE
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import first_answered
from transport import aside, cli, spool
from transport.bench_forensics import Traffic
from transport.bench_forensics import write_log as write_segment
from transport.forensics_read import open_capture
from transport.jsonlines import entry_object
from transport.parquet import write_parquet
from transport.stores import segment_files
from transport.stores.segments import SegmentStore

Entries = list[tuple[int, Any]]
Maker = Callable[[Path], Path]


def whole() -> Entries:
    return list(first_answered().entries)


def renumbered(entries: list[Any]) -> Entries:
    return list(enumerate(entries, start=1))


def store(folder: Path, entries: Entries) -> Path:
    """The entries as segment files."""
    log = SegmentStore(folder)
    counts: dict[str, int] = {}
    for _, entry in entries:
        at = counts.get(entry.request, 0)
        log.append(entry.request, at, [entry])
        counts[entry.request] = at + 1
    log.close()
    return folder


def empty(folder: Path) -> Path:
    path = folder / "x"
    path.write_bytes(b"")
    return path


def empty_folder(folder: Path) -> Path:
    path = folder / "x"
    path.mkdir()
    return path


def no_log(folder: Path) -> Path:
    path = folder / "x"
    path.write_bytes(b"\x00\x01\x02 nothing of the kind\n" * 9)
    return path


def absent(folder: Path) -> Path:
    return folder / "none"


def cut_line(folder: Path) -> Path:
    path = write_log(folder / "x", whole())
    path.write_bytes(path.read_bytes()[:-40])
    return path


def cut_segment(folder: Path) -> Path:
    path = store(folder / "x", whole())
    (segment,) = segment_files.segment_paths(path)
    segment.write_bytes(segment.read_bytes()[:-7])
    return path


def flipped_segment(folder: Path) -> Path:
    path = store(folder / "x", whole())
    (segment,) = segment_files.segment_paths(path)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    return path


def out_of_order(folder: Path) -> Path:
    entries = whole()
    entries[5], entries[6] = entries[6], entries[5]
    return write_log(folder / "x", entries)


def repeated(folder: Path) -> Path:
    entries = whole()
    return write_log(folder / "x", [*entries[:6], entries[5], *entries[6:]])


def two_clusters(folder: Path) -> Path:
    """Two clusters' lines mixed: their requests have the same ids."""
    other = [(n, attrs.evolve(e, time_ns=e.time_ns + 1)) for n, e in whole()]
    mixed = [one for pair in zip(whole(), other, strict=True) for one in pair]
    return write_log(folder / "x", mixed)


def clock_back(folder: Path) -> Path:
    entries = [
        (n, attrs.evolve(e, time_ns=0) if n == 7 else e)  # in the middle of a request
        for n, e in whole()
    ]
    return write_log(folder / "x", entries)


def newer_event(folder: Path) -> Path:
    path = write_log(folder / "x", whole())
    path.write_text(path.read_text().replace('"event":"Drained"', '"event":"Evaporated"'))
    return path


def wrong_field(folder: Path) -> Path:
    path = write_log(folder / "x", whole())
    path.write_text(path.read_text().replace('"tokens":3', '"tokens":-3'))
    return path


def huge_numbers(folder: Path) -> Path:
    """A foreign log whose page numbers no machine has."""
    first = {"format": "custody.log", "version": 1, "source": "other", "complete": True}
    lines = [first, *(entry_object(Stored(n, e)) for n, e in whole())]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = folder / "x"
    path.write_text(text.replace('"first": 0', '"first": 18446744073709551000'))
    return path


def fleets_of_a_request(folder: Path) -> Path:
    """A foreign log with an event of the fleet under a request's id, in the middle of it."""
    first = {"format": "custody.log", "version": 1, "source": "other", "complete": True}
    entries = whole()
    at = next(n for n, e in entries if e.request == ONE) + 1
    stray = attrs.evolve(entries[at - 1][1], event=Draining(EngineId("p0"), 1))
    mixed = renumbered([e for _, e in entries[: at - 1]] + [stray] + [e for _, e in entries[at:]])
    lines = [first, *(entry_object(Stored(n, e)) for n, e in mixed)]
    path = folder / "x"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def deep(folder: Path) -> Path:
    path = write_log(folder / "x", whole())
    path.write_text(path.read_text() + "[" * 100_000 + "\n")
    return path


def longest_names(folder: Path) -> Path:
    name = RequestId("r" * 100_000)
    entries = [(n, attrs.evolve(e, request=name) if e.request == ONE else e) for n, e in whole()]
    return write_log(folder / "x", entries)


def only_fleet(folder: Path) -> Path:
    log = handmade.Log()
    log.add(Draining(EngineId("p0"), 1), request=FLEET)
    return write_log(folder / "x", log.entries)


def as_table(folder: Path, entries: Entries) -> Path:
    """The entries as Parquet."""
    with ExitStack() as stack:
        write_parquet(open_capture(write_log(folder / "lines", entries), stack), folder / "x")
    return folder / "x"


def empty_table(folder: Path) -> Path:
    """A Parquet file that begins, and nothing more."""
    path = folder / "x"
    path.write_bytes(b"PAR1")
    return path


def cut_table(folder: Path) -> Path:
    path = as_table(folder, whole())
    path.write_bytes(path.read_bytes()[:-40])
    return path


def flipped_table(folder: Path) -> Path:
    """A bit of the footer's length, behind which everything is said to be."""
    path = as_table(folder, whole())
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)
    return path


def other_table(folder: Path) -> Path:
    """Somebody else's Parquet."""
    duckdb.execute(f"COPY (SELECT 1 AS position) TO '{folder / 'x'}' (FORMAT parquet)")
    return folder / "x"


def without_columns(folder: Path) -> Path:
    """Our metadata over another table."""
    duckdb.execute(f"COPY (SELECT 1 AS position) TO '{folder / 'x'}' {METADATA.format(version=1)}")
    return folder / "x"


def newer_table(folder: Path) -> Path:
    """A version of which this one knows nothing."""
    source = as_table(folder, whole()).rename(folder / "source")
    rows = f"SELECT * FROM read_parquet('{source}')"
    duckdb.execute(f"COPY ({rows}) TO '{folder / 'x'}' {METADATA.format(version=2)}")
    return folder / "x"


def without_account(folder: Path) -> Path:
    """Nobody says what is missing."""
    source = as_table(folder, whole()).rename(folder / "source")
    rows = f"SELECT * FROM read_parquet('{source}') WHERE record <> 'account'"
    duckdb.execute(f"COPY ({rows}) TO '{folder / 'x'}' {METADATA.format(version=1)}")
    return folder / "x"


def table_with_a_gap(folder: Path) -> Path:
    return as_table(folder, [*whole()[:6], *whole()[7:]])


def newer_event_in_a_table(folder: Path) -> Path:
    path = newer_event(folder).rename(folder / "lines")
    with ExitStack() as stack:
        write_parquet(open_capture(path, stack), folder / "x")
    return folder / "x"


METADATA = (
    "(FORMAT parquet, KV_METADATA {{format: 'custody.log', version: '{version}', "
    "source: 'custody', \"foreign\": 'false'}})"
)

FIRST_OF_LONG = "00000001-000000000001"

# What is done to a log, and the exit code of each verb in this order.
VERBS = (
    *("replay", "exposures", "explain", "verify", "timeline", "slice", "bundle", "diff"),
    *("export", "show", "import", "index", "metrics"),
)
TABLE: dict[Maker, tuple[int, ...]] = {
    empty: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    empty_folder: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    no_log: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    absent: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    cut_line: (5, 5, 5, 5, 5, 5, 5, 1, 5, 5, 5, 2, 5),
    cut_segment: (5, 5, 5, 1, 5, 5, 5, 1, 5, 5, 5, 5, 5),
    flipped_segment: (5, 1, 5, 1, 5, 5, 5, 1, 5, 5, 5, 5, 5),
    out_of_order: (5, 1, 5, 1, 5, 5, 5, 1, 5, 5, 5, 2, 5),
    repeated: (1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 5, 2, 1),
    two_clusters: (1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 5, 2, 1),
    clock_back: (1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 1),
    newer_event: (5, 1, 5, 5, 5, 5, 5, 1, 5, 5, 5, 2, 5),
    wrong_field: (5, 5, 5, 5, 5, 5, 5, 1, 5, 5, 5, 2, 5),
    huge_numbers: (5, 1, 5, 5, 5, 5, 5, 1, 5, 5, 2, 2, 5),
    fleets_of_a_request: (1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 2, 1),
    deep: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 2, 5),
    longest_names: (0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 2, 0),
    only_fleet: (0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 2, 0),
    empty_table: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    cut_table: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    flipped_table: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    other_table: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    without_columns: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    newer_table: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
    without_account: (5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 2, 5),
    table_with_a_gap: (5, 1, 5, 5, 5, 5, 5, 1, 5, 5, 5, 2, 5),
    newer_event_in_a_table: (5, 1, 5, 5, 5, 5, 5, 1, 5, 5, 5, 2, 5),
}
"""Each bad log, and the exit code of each verb."""
SILENT = {
    *(empty, empty_folder, no_log, absent),
    *(empty_table, cut_table, flipped_table, other_table, without_columns, newer_table),
}
"""Nothing can be said of these."""


def tokens(verb: str, log: Path, folder: Path) -> list[str]:
    good = folder / "good.jsonl"
    return {
        "replay": ["replay", str(log)],
        "exposures": ["exposures", str(log)],
        "explain": ["explain", ONE, "--log", str(log)],
        "verify": ["log", "verify", str(log)],
        "timeline": ["timeline", str(log), "--output", str(folder / "t.html")],
        "slice": ["slice", str(log), "--output", str(folder / "slices")],
        "bundle": ["bundle", str(log), "--output", str(folder / "b.zip")],
        "diff": ["diff", str(log), str(good)],
        "export": ["log", "export", "--log", str(log), "--output", str(folder / "e.jsonl")],
        "show": ["log", "show", ONE, "--log", str(log)],
        "import": ["log", "import", str(log), "--output", str(folder / "imported")],
        "index": ["log", "index", str(log), "--output", str(folder / "i.index")],
        "metrics": ["metrics", str(log)],
    }[verb]


@pytest.mark.parametrize("maker", TABLE, ids=lambda maker: str(maker.__name__))
def test_a_list_of_a_bad_log_agrees_with_its_replay(
    maker: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many requests in each phase; 5 where something is missing, which is named, and else 0."""
    log = maker(tmp_path)
    cli.run(["replay", str(log), "--json"])
    replayed = json.loads(capsys.readouterr().out or "{}")
    code = cli.run(["log", "ls", "--log", str(log), "--json"])
    said = capsys.readouterr()
    assert code == (0 if replayed.get("complete") else 5)
    assert "Traceback" not in said.err
    assert bool(said.err) == (code == 5)
    phases = replayed.get("phases", {})
    listed = Counter(json.loads(line)["phase"] for line in said.out.splitlines())
    named = {phase.removeprefix("PHASE_").lower(): count for phase, count in listed.items()}
    assert named == {phase: count for phase, count in phases.items() if count}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log of a thousand requests, which is clean and whole."""
    folder = tmp_path_factory.mktemp("long")
    write_segment(folder / "log", Traffic(), 10_000)
    write_log(folder / "good.jsonl", whole())
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_on_a_log_that_is_longer_than_what_it_may_hold(
    verb: str,
    long: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With room for a hundred entries and ten requests every verb says what it says with plenty."""
    outputs = []
    for held, latest in ((spool.HELD_MAX, aside.LATEST), (100, 10)):
        monkeypatch.setattr(spool, "HELD_MAX", held)
        monkeypatch.setattr(aside, "LATEST", latest)
        said = tokens(verb, long / "log", long)
        shutil.rmtree(long / "imported", ignore_errors=True)
        if verb == "explain":
            said[1] = FIRST_OF_LONG
        if verb == "bundle":
            # Commitments are salted anew each time.
            said.append("--clear")
        code = cli.run(said)
        outputs.append((code, capsys.readouterr()))
    plenty, little = outputs
    assert little == plenty
    assert plenty[0] == (1 if verb == "diff" else 0)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("maker", TABLE, ids=lambda maker: str(maker.__name__))
def test_every_verb_on_every_bad_log(
    maker: Maker, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code of the table; a log that is none is one sentence on standard error."""
    log = maker(tmp_path)
    write_log(tmp_path / "good.jsonl", whole())
    code = cli.run(tokens(verb, log, tmp_path))
    said = capsys.readouterr()
    assert code == TABLE[maker][VERBS.index(verb)], (said.out[-600:], said.err[-300:])
    assert "Traceback" not in said.err
    if maker in SILENT:
        assert said.err.startswith("custody: ")
        assert said.out == ""
    elif code == 5 and verb in ("replay", "exposures"):
        assert "incomplete" in said.out
