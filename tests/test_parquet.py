"""Logs as Parquet: nothing is lost on the way, and what is no such log is named."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.store import Stored
from lifecycle.events import Entry
from property_tests import strategies
from tests.captures import FOLDER, judged
from tests.log_files import read_log
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import first_answered
from tests.test_forensics_bad_input import TABLE, Maker
from tests.test_replay import MUTATED
from tests.test_retention import eventful
from transport import cli, codec
from transport import parquet_schema as schema
from transport.convert import import_entries
from transport.forensics_read import Capture, open_capture
from transport.json_values import EVENTS_BY_NAME
from transport.jsonlines import UnreadableLog, entry_object
from transport.parquet import write_parquet
from transport.stores.segments import SegmentStore

KEPT = [
    pytest.param(folder / name, id=f"{folder.name}-{name}")
    for folder in sorted(FOLDER.iterdir())
    for name in ("segments", "log.jsonl")
]


def converted(log: Path, output: Path) -> Path:
    """The log as Parquet."""
    with ExitStack() as stack:
        write_parquet(open_capture(log, stack), output)
    return output


def said(capture: Capture) -> dict[str, Any]:
    """Everything that a capture says, before and after it is read."""
    before = (capture.foreign, capture.source, capture.claims_whole, list(capture.missing))
    opening = tuple(capture.opening())
    joined = list(capture.joined())
    # A record is named by its line or its bytes; where both forms have it, it is the same.
    return {
        "before": before,
        "opening": opening,
        "snapshot": capture.snapshot,
        "entries": joined,
        "whole": capture.whole,
        "missing": capture.missing,
        "gaps": capture.gaps(),
        "missing_ns": capture.missing_ns,
        "unknown": capture.unknown,
        "unplaced": capture.unplaced,
        "notes": capture.notes,
        "problems": capture.problems,
        "head": capture.head,
    }


def same(log: Path, output: Path) -> bool:
    """Whether both forms say the same of everything."""
    with ExitStack() as stack:
        plain = said(open_capture(log, stack))
        table = said(open_capture(converted(log, output), stack))
    assert table == plain
    return True


# --- There and back ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", KEPT)
def test_a_kept_log_comes_back_equal(path: Path, tmp_path: Path) -> None:
    """The same entries, and the same states that they reduce to."""
    assert same(path, tmp_path / "log.parquet")
    assert judged(tmp_path / "log.parquet") == judged(path)
    table, plain = read_log(tmp_path / "log.parquet"), read_log(path)
    assert (table.entries, table.complete) == (plain.entries, plain.complete)


@given(found=st.lists(strategies.entries(), max_size=12))
@settings(max_examples=25, deadline=None)
def test_every_entry_comes_back_equal(found: list[Entry]) -> None:
    """Whatever an entry holds: numbers of 64 bits, bytes, names of any script."""
    with tempfile.TemporaryDirectory() as scratch:
        lines = write_log(Path(scratch) / "x.jsonl", enumerate(found, start=1))
        assert same(lines, Path(scratch) / "x.parquet")


@pytest.mark.parametrize("name", MUTATED)
def test_an_illegal_log_comes_back_equal(name: str, tmp_path: Path) -> None:
    """The table is about form, not about rules."""
    assert same(write_log(tmp_path / "x.jsonl", MUTATED[name]()), tmp_path / "x.parquet")


BAD = [maker for maker, codes in TABLE.items() if set(codes) != {5}]


@pytest.mark.parametrize("maker", BAD, ids=lambda maker: str(maker.__name__))
def test_what_is_missing_stays_missing(maker: Maker, tmp_path: Path) -> None:
    """Gaps, damage, unknown events, disorder: the table says what the log said."""
    assert same(maker(tmp_path), tmp_path / "x.parquet")


def test_every_unknown_record_is_kept(tmp_path: Path) -> None:
    """However many there are, each is there with all that it said."""
    count = 1_200
    line = entry_object(Stored(1, first_answered().entries[0][1]))
    header = {"format": "custody.log", "version": 1, "source": "other", "complete": True}
    unknown = [{**line, "event": "Evaporated", "more": [n, None]} for n in range(count)]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [header, *unknown]))
    assert same(path, tmp_path / "x.parquet")
    query = f"SELECT document FROM '{tmp_path / 'x.parquet'}' WHERE record = 'unknown'"
    kept = [json.loads(document) for (document,) in duckdb.execute(query).fetchall()]
    assert [one["more"] for one in kept] == [one["more"] for one in unknown]


def test_an_event_of_a_later_version_goes_through(tmp_path: Path) -> None:
    """Segments to Parquet to segments: a record that this version cannot read is the same bytes."""
    first = [entry for _, entry in first_answered().entries[:3]]
    later = codec.encode_entry(attrs.evolve(first[0], sequence=first[-1].sequence + 1))
    later.event.Clear()
    later.event.MergeFromString(b"\x9a\x06\x00")
    batch: list[Any] = [*enumerate(first, start=1), (4, later), (5, first[1])]
    import_entries(batch, tmp_path / "log")
    assert same(tmp_path / "log", tmp_path / "x.parquet")
    flags = [str(tmp_path / "x.parquet"), "--output", str(tmp_path / "again")]
    assert cli.run(["log", "import", *flags]) == 5
    for path in (tmp_path / "log").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_a_snapshot_comes_along(tmp_path: Path) -> None:
    """A log whose beginning was dropped has in its table what stands for it."""
    from tests.test_exposures import snapshot_of

    assert same(snapshot_of(tmp_path / "log"), tmp_path / "x.parquet")


def test_a_field_of_a_later_version_may_be_absent(tmp_path: Path) -> None:
    """A table without the column of an optional field is read with the field's default."""
    path = converted(write_log(tmp_path / "x.jsonl", first_answered().entries), tmp_path / "x")
    fields = schema.columns()["admitted"]
    assert '"kinds"' in fields
    older = tmp_path / "older.parquet"
    kept = ", ".join(
        f"{name} := admitted.{name}"
        for name in (f.name for f in attrs.fields(EVENTS_BY_NAME["Admitted"]))
        if name != "kinds"
    )
    duckdb.sql(
        f"COPY (SELECT * REPLACE (CASE WHEN admitted IS NOT NULL THEN struct_pack({kept}) END "
        f"AS admitted) FROM read_parquet('{path}')) TO '{older}' (FORMAT parquet, KV_METADATA "
        "{format: 'custody.log', version: '1', source: 'custody', \"foreign\": 'false'})"
    )
    assert read_log(older).entries == read_log(path).entries


# --- The verbs --------------------------------------------------------------------------------


def test_the_verbs_convert_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines to Parquet to segments to Parquet to lines: the lines are those of the beginning."""
    source = write_log(tmp_path / "x.jsonl", eventful().log)
    table, folder, again = (tmp_path / name for name in ("x.parquet", "log", "y.parquet"))

    def export(log: Path, output: Path) -> dict[str, Any]:
        flags = ["--log", str(log), "--format", "parquet", "--output", str(output), "--json"]
        assert cli.run(["log", "export", *flags]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return document

    written = export(source, table)
    assert written["entries"] == len(eventful().log)
    assert written["bytes"] == table.stat().st_size
    assert cli.run(["log", "import", str(table), "--output", str(folder)]) == 0
    store = SegmentStore(folder)
    assert store.last_position == written["entries"]
    store.close()
    export(folder, again)
    capsys.readouterr()
    assert cli.run(["log", "export", "--log", str(again)]) == 0
    assert capsys.readouterr().out == source.read_text()
    assert not list(tmp_path.glob("*.partial"))


def test_an_export_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log with a gap is exported all the same: exit code 5, and the gap is named."""
    entries = first_answered().entries
    source = write_log(tmp_path / "x.jsonl", [*entries[:3], *entries[4:]])
    flags = ["--log", str(source), "--format", "parquet", "--output", str(tmp_path / "x.parquet")]
    assert cli.run(["log", "export", *flags]) == 5
    assert "missing, which the file says too: positions 4 to 4" in capsys.readouterr().out


def test_half_a_character_spoils_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign name that is no text is kept as it was said, and everything else is there."""
    source = write_log(tmp_path / "x.jsonl", first_answered().entries)
    header, *body = source.read_text().splitlines()
    header = header.replace('"source":"custody"', '"source":"o\\ud800ther"')
    odd = '{"event":"La\\ud800ter","fields":{}}'
    source.write_text("\n".join([header, *body, odd]) + "\n")
    table = tmp_path / "x.parquet"
    flags = ["--log", str(source), "--format", "parquet", "--output", str(table)]
    assert cli.run(["log", "export", *flags]) == 5
    capsys.readouterr()
    assert cli.run(["log", "export", "--log", str(table)]) == 5
    again = capsys.readouterr().out.splitlines()
    assert again[1:-1] == body
    assert json.loads(again[-1]) == json.loads(odd)
    assert json.loads(again[0])["source"] == "o?ther"


def test_parquet_is_no_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file, or into a place that cannot be written, nothing is left: exit codes 2 and 1."""
    source = write_log(tmp_path / "x.jsonl", first_answered().entries)
    flags = ["log", "export", "--log", str(source), "--format", "parquet"]
    assert cli.run(flags) == 2
    assert cli.run([*flags, "--output", "-"]) == 2
    assert cli.run([*flags, "--output", str(tmp_path / "none" / "x.parquet")]) == 1
    assert "custody: " in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [source]


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading and writing end with exit code 2 and say which extra is missing."""
    source = write_log(tmp_path / "x.jsonl", first_answered().entries)
    table = converted(source, tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    export = ["log", "export", "--log", str(source), "--format", "parquet", "--output", "y"]
    for tokens in (["exposures", str(table)], ["replay", str(table)], export):
        assert cli.run(tokens) == 2
        assert "the extra `parquet`" in capsys.readouterr().err


def test_a_reader_that_gives_up_is_no_traceback(tmp_path: Path) -> None:
    """A file that was cut, another table, and a later version are each refused with a sentence."""
    table = converted(write_log(tmp_path / "x.jsonl", first_answered().entries), tmp_path / "x")
    cut = tmp_path / "cut"
    cut.write_bytes(table.read_bytes()[:-20])
    other, later = tmp_path / "other", tmp_path / "later"
    duckdb.sql(f"COPY (SELECT 1 AS position) TO '{other}' (FORMAT parquet)")
    later.write_bytes(rewritten(table, tmp_path / "z", version="2").read_bytes())
    for path, words in ((cut, "cannot be read"), (other, '"format"'), (later, "version '2'")):
        with ExitStack() as stack, pytest.raises(UnreadableLog, match=words):
            open_capture(path, stack)


def rewritten(table: Path, output: Path, *, version: str = "1", where: str = "true") -> Path:
    """Some of its rows in another file, whose metadata say another version."""
    duckdb.sql(
        f"COPY (SELECT * FROM read_parquet('{table}') WHERE {where}) TO '{output}' (FORMAT parquet, KV_METADATA "
        f"{{format: 'custody.log', version: '{version}', source: 'custody', \"foreign\": 'false'}})"
    )
    return output


@pytest.mark.parametrize("document", ["no JSON", "[]", "{}", '{"head": 1}'])
def test_an_account_that_nobody_wrote_is_refused(document: str, tmp_path: Path) -> None:
    """What is missing cannot be told then, so nothing is."""
    table = converted(write_log(tmp_path / "x.jsonl", first_answered().entries), tmp_path / "x")
    duckdb.execute(
        f"COPY (SELECT * REPLACE (CASE record WHEN 'account' THEN '{document}' END AS document) "
        f"FROM read_parquet('{table}')) TO '{tmp_path / 'y'}' (FORMAT parquet, KV_METADATA "
        "{format: 'custody.log', version: '1', source: 'custody', \"foreign\": 'false'})"
    )
    with ExitStack() as stack, pytest.raises(UnreadableLog, match="malformed"):
        open_capture(tmp_path / "y", stack)


@pytest.mark.parametrize("where", ["record <> 'account'", "position IS NULL OR position < 9"])
def test_rows_that_were_taken_out_are_missed(where: str, tmp_path: Path) -> None:
    """Without its account, or without rows that it counts, a table is not whole."""
    table = converted(write_log(tmp_path / "x.jsonl", first_answered().entries), tmp_path / "x")
    with ExitStack() as stack:
        capture = open_capture(rewritten(table, tmp_path / "y", where=where), stack)
        assert len(list(capture)) > 1
        assert not capture.whole
        assert capture.notes


def test_a_check_says_that_parquet_has_no_chain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each form is called by its own name, and what cannot be checked in it is said."""
    lines = FOLDER / "schema-1" / "log.jsonl"
    table = converted(lines, tmp_path / "log.parquet")
    for log, form in ((lines, "JSON Lines, which have"), (table, "Parquet, which has")):
        assert cli.run(["log", "verify", str(log)]) == 0
        assert f" in {form} no check sums and no chain\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb",
    [
        *("replay", "exposures", "timeline", "diff", "slice", "bundle", "metrics"),
        *("log verify", "log import", "log export"),
    ],
)
def test_whoever_reads_parquet_says_so(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help of a verb that takes a log names every form that it takes."""
    assert cli.run([*verb.split(), "--help"]) == 0
    assert "Parquet" in capsys.readouterr().out
