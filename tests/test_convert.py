"""A log's forms: the schema says what a line is, and segments hold what the lines said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from jsonschema import Draft202012Validator

from engine.store import Stored
from lifecycle.events import Entry
from property_tests import strategies
from tests.driver import Driver
from tests.log_files import read_log
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import first_answered, short_handoff
from tests.test_replay import MUTATED
from tests.test_spool import files_of_at_most
from transport import cli, codec, lines_file
from transport.convert import Recorded, import_entries
from transport.json_schema import line_schema
from transport.jsonlines import jsonlines
from transport.pb import lifecycle_pb2 as pb
from transport.stores.segments import SegmentStore

VALIDATOR = Draft202012Validator(line_schema())


def lines(entries: Any) -> list[Any]:
    """Header and entries as JSON values."""
    stored = [Stored(position, entry) for position, entry in entries]
    return [json.loads(line) for line in jsonlines(stored, complete=True)]


def test_the_schema_is_one() -> None:
    """It is valid as a schema, and knows every event."""
    Draft202012Validator.check_schema(line_schema())
    assert len(line_schema()["$defs"]["entry"]["allOf"]) == len(strategies.EVENTS)


@pytest.mark.parametrize("name", ["one-owner", "bounded", "requeue-keeps-resources-honest"])
def test_every_line_that_is_written_is_valid(name: str) -> None:
    """Legal or not: the schema is about form."""
    for line in lines(MUTATED[name]()):
        VALIDATOR.validate(line)


def test_what_the_reader_refuses_is_invalid() -> None:
    """Missing and added fields, wrong types, and words that are no choice."""
    for line in lines(first_answered().entries):
        assert VALIDATOR.is_valid(line)
        if "event" not in line:
            continue
        for key in line:
            assert not VALIDATOR.is_valid({k: v for k, v in line.items() if k != key}), key
        assert not VALIDATOR.is_valid({**line, "position": 0})
        assert not VALIDATOR.is_valid({**line, "time_ns": -1})
        assert not VALIDATOR.is_valid({**line, "fields": {**line["fields"], "more": 1}})
        for key in line["fields"]:
            fewer = {k: v for k, v in line["fields"].items() if k != key}
            assert not VALIDATOR.is_valid({**line, "fields": fewer}), key
    header = lines([])[0]
    assert not VALIDATOR.is_valid({**header, "version": 2})


def test_an_event_of_a_later_version_is_valid() -> None:
    """Unknown events are kept, so the schema lets them pass."""
    line = lines(first_answered().entries)[-1]
    assert VALIDATOR.is_valid({**line, "event": "Evaporated", "fields": {"where": 1}})


def test_the_verb_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is the schema and nothing else."""
    assert cli.run(["log", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == line_schema()


# --- Import -----------------------------------------------------------------------------------


def test_an_imported_log_is_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Segments hold the same entries, verify, open as a store, and export to the same lines."""
    driver = Driver().pair()
    driver.submit(prompt=9, new=4)
    driver.run()
    source = write_log(tmp_path / "x.jsonl", driver.log)
    folder = tmp_path / "log"
    assert cli.run(["log", "import", str(source), "--output", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["entries"] == len(driver.log)
    assert cli.run(["log", "verify", str(folder), "--head", said["head"]]) == 0
    assert read_log(folder).entries == read_log(source).entries
    assert read_log(folder).complete
    store = SegmentStore(folder)
    assert store.last_position == len(driver.log)
    store.close()
    capsys.readouterr()
    assert cli.run(["log", "export", "--log", str(folder)]) == 0
    assert capsys.readouterr().out == source.read_text()


def test_many_entries_become_several_batches(tmp_path: Path) -> None:
    """Batches continue each other, whatever their number."""
    entries = short_handoff(first_answered()).entries
    many = [
        (n, attrs.evolve(entry, time_ns=n)) for n, (_, entry) in enumerate(entries * 60, start=1)
    ]
    count, _ = import_entries(many, tmp_path / "log")
    assert count == len(many)
    assert cli.run(["log", "verify", str(tmp_path / "log")]) == 0


def test_a_log_with_gaps_is_not_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Segments have no gaps, so a log with one stays as it is: exit code 5."""
    entries = first_answered().entries
    path = write_log(tmp_path / "x", [*entries[:3], *entries[4:]])
    assert cli.run(["log", "import", str(path), "--output", str(tmp_path / "log")]) == 5
    assert "position 5 where 4 is next" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_a_log_without_its_end_is_not_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Segments could not say that something followed: cut lines, a cut line, a torn batch, a header."""
    entries = first_answered().entries
    whole = write_log(tmp_path / "x", entries).read_text()
    folder = tmp_path / "segments"
    import_entries(entries, folder)
    (segment,) = folder.iterdir()
    segment.write_bytes(segment.read_bytes()[:-7])
    for text, reason in (
        ("\n".join(whole.splitlines()[:-1]), f"positions {len(entries)} to {len(entries)}"),
        (whole[:-20], f"line {len(entries) + 1}: is no JSON"),
        (whole.replace('"complete":true', '"complete":false'), "header says"),
        ("", "torn"),
    ):
        (tmp_path / "x").write_text(text)
        source = tmp_path / "x" if text else folder
        assert cli.run(["log", "import", str(source), "--output", str(tmp_path / "log")]) == 5
        assert reason in capsys.readouterr().err
        assert not (tmp_path / "log").exists()


def newer(folder: Path) -> tuple[Path, pb.Entry]:
    """A folder of segments in whose middle a later version wrote, and the entry that it wrote."""
    entries: list[tuple[int, Recorded]] = [*first_answered().entries]
    at, entry = entries[6]
    assert isinstance(entry, Entry)
    message = codec.encode_entry(entry)
    message.event.Clear()
    message.event.MergeFromString(b"\x9a\x06\x00")
    entries[6] = at, message
    import_entries(entries, folder)
    return folder, message


def test_an_event_of_a_later_version_goes_through_every_form(tmp_path: Path) -> None:
    """Segments, JSON Lines and segments again: nothing is dropped, byte for byte; exit code 5."""
    folder, _ = newer(tmp_path / "log")
    exported, again = tmp_path / "x.jsonl", tmp_path / "again"
    assert cli.run(["log", "export", "--log", str(folder), "--output", str(exported)]) == 5
    header, *body = [json.loads(line) for line in exported.read_text().splitlines()]
    assert (header["entries"], header["complete"]) == (len(first_answered().entries), True)
    assert [line["position"] for line in body] == [*range(1, len(body) + 1)]
    for line in body:
        VALIDATOR.validate(line)
    assert cli.run(["log", "import", str(exported), "--output", str(again)]) == 5
    (one,), (two,) = folder.iterdir(), again.iterdir()
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("lost", ["proposer", "event"])
def test_an_entry_that_says_too_little_goes_through_as_it_is(tmp_path: Path, lost: str) -> None:
    """Without its proposer, or without an event: its bytes are all there is, and are kept."""
    entries: list[tuple[int, Recorded]] = [*first_answered().entries]
    at, entry = entries[6]
    assert isinstance(entry, Entry)
    message = codec.encode_entry(entry)
    message.ClearField("proposer" if lost == "proposer" else "event")
    entries[6] = at, message
    import_entries(entries, tmp_path / "log")
    exported, again = tmp_path / "x.jsonl", tmp_path / "again"
    assert (
        cli.run(["log", "export", "--log", str(tmp_path / "log"), "--output", str(exported)]) == 5
    )
    assert cli.run(["log", "import", str(exported), "--output", str(again)]) == 5
    (one,), (two,) = (tmp_path / "log").iterdir(), again.iterdir()
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("claimed", [None, -7, 0, 1 << 64, 10**400, "3"], ids=str)
def test_the_header_counts_what_has_a_place(
    tmp_path: Path, claimed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that says nothing may claim any position; the ends are those of the entries."""
    source = write_log(tmp_path / "x", first_answered().entries)
    header, *body = source.read_text().splitlines()
    odd = json.dumps({"position": claimed, "event": "Evaporated", "fields": {}})
    source.write_text("\n".join([header, odd, *body, odd]) + "\n")
    assert cli.run(["log", "export", "--log", str(source)]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines[1:]] == [
        json.loads(line) for line in (odd, *body, odd)
    ]
    said = json.loads(lines[0])
    assert (said["first_position"], said["last_position"]) == (1, len(body))
    assert said["entries"] == len(body) + 2


def test_bytes_that_say_something_else_are_not_believed(tmp_path: Path) -> None:
    """What people read beside the bytes of an unknown event is what the bytes say, or they go."""
    folder, message = newer(tmp_path / "log")
    exported = tmp_path / "x.jsonl"
    cli.run(["log", "export", "--log", str(folder), "--output", str(exported)])
    message.attempt += 1
    forged = message.SerializeToString().hex()
    message.attempt -= 1
    text = exported.read_text()
    changed = text.replace(message.SerializeToString().hex(), forged)
    assert changed != text
    exported.write_text(changed)
    assert cli.run(["log", "import", str(exported), "--output", str(tmp_path / "again")]) == 5
    assert not (tmp_path / "again").exists()


def test_an_export_goes_as_far_as_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is missing is named, the header says so, and what is there is written: exit code 5."""
    entries = first_answered().entries
    path = write_log(tmp_path / "x", [*entries[:3], *entries[4:]])
    assert cli.run(["log", "export", "--log", str(path)]) == 5
    said = capsys.readouterr()
    assert said.err == "missing: positions 4 to 4: not in the log\n"
    header, *body = [json.loads(line) for line in said.out.splitlines()]
    assert (header["complete"], header["entries"]) == (False, len(entries) - 1)
    assert [line["position"] for line in body] == [n for n, _ in entries if n != 4]


def test_an_export_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full ends it with a sentence; the earlier export stays, and no part of a new."""
    source = write_log(tmp_path / "x", first_answered().entries)
    output = tmp_path / "out" / "y"
    output.parent.mkdir()
    output.write_text("the last one")
    monkeypatch.setattr(lines_file, "entry_line", lambda _one: "x" * 100_000)
    with files_of_at_most(1 << 16):
        assert cli.run(["log", "export", "--log", str(source), "--output", str(output)]) == 1
    assert "TMPDIR" in capsys.readouterr().err
    assert [one.read_text() for one in output.parent.iterdir()] == ["the last one"]


def test_a_foreign_log_is_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would pass for our own: exit code 2."""
    path = write_log(tmp_path / "x", first_answered().entries)
    path.write_text(path.read_text().replace('"source":"custody"', '"source":"other"'))
    assert cli.run(["log", "import", str(path), "--output", str(tmp_path / "log")]) == 2
    assert "foreign" in capsys.readouterr().err


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """A folder with anything in it is refused."""
    path = write_log(tmp_path / "x", first_answered().entries)
    assert cli.run(["log", "import", str(path), "--output", str(tmp_path)]) == 2
