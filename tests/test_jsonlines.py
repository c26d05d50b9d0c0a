"""Claims about logs as JSON Lines: nothing is lost, nothing unknown is dropped, bad is named."""

from __future__ import annotations

import io
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.store import Stored
from lifecycle.events import (
    Aborted,
    ByEngine,
    ByScheduler,
    Cause,
    Entry,
    Event,
    Purpose,
    Rejected,
    Released,
    Reserved,
)
from lifecycle.ids import EngineId, GrantId, PageRange, Party, TokenRange
from property_tests import strategies
from tests.log_files import LogFile, read_capture, read_log
from tests.store_contract import A, B, entries
from transport.forensics_read import open_capture, open_lines
from transport.json_values import EVENTS_BY_NAME
from transport.jsonlines import (
    UnreadableLog,
    entry_object,
    jsonlines,
    write_jsonlines,
)
from transport.pb import lifecycle_pb2 as pb
from transport.stores import frames, segment_files
from transport.stores.segments import SegmentStore

LATER = tuple(attrs.evolve(entry, time_ns=200) for entry in entries(B, 0, 1))
GRANT = GrantId(Party(EngineId("d0"), 1, 0), 7)
RESERVED = Reserved(
    grant=GRANT,
    purpose=Purpose.DESTINATION,
    pages=(PageRange(0, 2),),
    tokens=TokenRange(0, 30),
    kind="kv",
    tag=0xDEADBEEF,
    parties=(Party(EngineId("p0"), 1, 0),),
)


def stored(*events: Event) -> list[Stored]:
    by = ByEngine(Party(EngineId("d0"), 1, 0), 3)
    return [
        Stored(n, Entry(A, n - 1, 1, by, 100 + n, event)) for n, event in enumerate(events, start=1)
    ]


def read_text(text: str) -> LogFile:
    return read_capture(open_lines(io.BytesIO(text.encode())))


def header(**fields: Any) -> str:
    return json.dumps({"format": "custody.log", "version": 1, "complete": True, **fields}) + "\n"


def test_every_event_has_a_name() -> None:
    """The names that a reader knows are those of the union."""
    assert set(EVENTS_BY_NAME.values()) == set(strategies.EVENTS)


@pytest.mark.parametrize("event_type", strategies.EVENTS, ids=lambda t: t.__name__)
@given(data=st.data())
def test_each_event_comes_back_equal(event_type: type[Event], data: st.DataObject) -> None:
    """Writing and reading an entry around any event gives an equal entry."""
    entry = data.draw(strategies.entries(strategies.EVENTS[event_type]))
    log = read_text("".join(jsonlines([Stored(1, entry)], complete=True)))
    assert log == LogFile((Stored(1, entry),), False, True, (), "custody")


def test_a_line_explains_itself() -> None:
    """Tags are hexadecimal, choices are words, and every number has its name."""
    assert entry_object(stored(RESERVED)[0]) == {
        "position": 1,
        "request": A,
        "sequence": 0,
        "attempt": 1,
        "proposer": {"engine": "d0", "incarnation": 1, "rank": 0, "number": 3},
        "time_ns": 101,
        "event": "Reserved",
        "fields": {
            "grant": {"owner": {"engine": "d0", "incarnation": 1, "rank": 0}, "serial": 7},
            "purpose": "destination",
            "pages": [{"first": 0, "count": 2}],
            "tokens": {"start": 0, "stop": 30},
            "kind": "kv",
            "tag": "00000000deadbeef",
            "parties": [{"engine": "p0", "incarnation": 1, "rank": 0}],
        },
    }


def test_a_file_round_trips(tmp_path: Path) -> None:
    """A written file is read back as it was."""
    path = tmp_path / "log.jsonl"
    with path.open("w") as stream:
        write_jsonlines(stream, stored(RESERVED, Released(GRANT)), complete=True)
    expected = LogFile(tuple(stored(RESERVED, Released(GRANT))), False, True, (), "custody")
    assert read_log(path) == expected


@pytest.mark.parametrize(
    ("complete", "drop", "expected"), [(True, None, True), (False, None, False), (True, 1, False)]
)
def test_a_log_with_a_gap_is_not_complete(complete: bool, drop: int | None, expected: bool) -> None:
    """The header's word counts only if positions run from 1 without a gap."""
    lines = list(jsonlines(stored(RESERVED, Released(GRANT)), complete=complete))
    if drop is not None:
        del lines[drop]
    assert read_text("".join(lines)).complete is expected


def test_positions_with_a_gap_are_not_complete() -> None:
    """Entries of some requests only, with a header that claims otherwise, are no whole log."""
    first, _, third = stored(RESERVED, Released(GRANT), Released(GRANT))
    assert not read_text("".join(jsonlines([first, third], complete=True))).complete
    assert not read_text("".join(jsonlines([third], complete=True))).complete


def test_a_log_cut_after_a_line_is_not_complete() -> None:
    """The header counts the entries, so that a file without its end does not pass for whole."""
    lines = list(jsonlines(stored(RESERVED, Released(GRANT)), complete=True))
    assert not read_text("".join(lines[:-1])).complete


def test_an_unknown_event_is_kept() -> None:
    """An event of a later version is not dropped and not an error, and the log stays complete."""
    lines = list(jsonlines(stored(RESERVED, Released(GRANT)), complete=True))
    lines[1] = lines[1].replace('"Reserved"', '"Borrowed"')
    log = read_text("".join(lines))
    assert [one.position for one in log.entries] == [2]
    (kept,) = log.unknown
    assert (kept.line, kept.position, kept.name) == (2, 1, "Borrowed")
    assert kept.record["fields"]["kind"] == "kv"
    assert log.complete


@pytest.mark.parametrize("mark", [{"source": "other-engine"}, {"foreign": True}])
def test_foreign_logs_are_marked_and_taken_as_they_are(mark: dict[str, Any]) -> None:
    """Another system's log may leave out what only our sequencer knows, and may hold anything."""
    abort = {"cause": "deadline", "reported_by": "them", "note": "a field of theirs"}
    lines = [
        {"request": "x", "event": "Aborted", "fields": abort},
        {"request": "x", "event": "Rejected", "fields": {"code": "queue_full"}},
        {"request": "x", "event": "kv_evicted", "blocks": [1, 2]},
        {"request": "x", "event": "Aborted", "fields": abort},
        {"request": "x", "event": "Aborted", "fields": abort, "sequence": 0, "position": 1},
    ]
    log = read_text(header(**mark) + "".join(json.dumps(line) + "\n" for line in lines))
    assert log.foreign
    assert [one.position for one in log.entries] == [1, 4, 1]
    assert [one.entry.sequence for one in log.entries] == [0, 1, 0]
    assert log.entries[0].entry.event == Aborted(Cause.DEADLINE, "them")
    assert log.entries[0].entry.proposer == ByScheduler(1)
    assert [(kept.line, kept.name) for kept in log.unknown] == [(3, "Rejected"), (4, "kv_evicted")]
    assert log.unknown[0].reason == "fields.reason: is missing"
    assert log.unknown[1].record == lines[2]
    assert log.complete


def test_a_native_rejection_has_attempt_zero_when_foreign_leaves_it_out() -> None:
    """A foreign rejection without an attempt belongs to none."""
    fields = {
        "code": "queue_full",
        "reason": "",
        "prompt_tokens": 1,
        "new_tokens_max": 1,
        "context_tokens": 1,
        "capacity_tokens": 0,
        "tenant": "",
        "fleet_position": 0,
    }
    line = json.dumps({"request": "x", "event": "Rejected", "fields": fields}) + "\n"
    (one,) = read_text(header(foreign=True) + line).entries
    assert isinstance(one.entry.event, Rejected)
    assert one.entry.attempt == 0


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "empty"),
        ("\n\n", 1, "empty"),
        ("{", 1, "JSON"),
        ("[]\n", 1, "object"),
        ('{"format":"something"}\n', 1, "header"),
        (header(version=2), 1, "version 2"),
        (header(complete="yes"), 1, "complete"),
        (header(foreign=1), 1, "foreign"),
        (header(source=1), 1, "source"),
        (header(entries="2"), 1, "entries"),
        ("\N{ROMAN NUMERAL ONE}\n", 1, "JSON"),
    ],
)
def test_what_is_no_log_is_refused_with_its_line(text: str, line: int, reason: str) -> None:
    """Whoever has to mend a file is told where and why."""
    with pytest.raises(UnreadableLog, match=reason) as caught:
        read_text(text)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [("nonsense\n", 2, "JSON"), ("\n7\n", 3, "object"), ("[" * 200_000 + "\n", 2, "JSON")],
    ids=["nonsense", "number", "deep"],
)
def test_what_is_no_record_is_named_with_its_line(text: str, line: int, reason: str) -> None:
    """Behind a header everything is read, and what says nothing is told."""
    log = read_text(header() + text)
    (one,) = log.unknown
    assert (log.entries, one.line) == ((), line)
    assert reason in one.reason


def mutated(path: str, value: Any) -> str:
    """A good native line with one value replaced, or removed by `...`."""
    record: dict[str, Any] = entry_object(stored(RESERVED)[0])
    place: Any = record
    *steps, last = path.split("/")
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return header() + json.dumps(record) + "\n"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("position", ..., "position: is missing"),
        ("position", 0, "position"),
        ("position", True, "position"),
        ("sequence", -1, "sequence"),
        ("sequence", 1 << 64, "sequence"),
        ("time_ns", 1.5, "time_ns"),
        ("request", None, "request: is null"),
        ("event", [], "event: is a list"),
        ("proposer", ..., "proposer"),
        ("proposer", {"epoch": 0}, "epoch"),
        ("proposer/rank", "0", "rank"),
        ("fields", [], "fields: is a list"),
        ("fields/extra", 1, "has no field 'extra'"),
        ("fields/kind", ..., "fields.kind: is missing"),
        ("fields/kind", "\ud800", "surrogate"),
        ("fields/tag", 5, "fields.tag"),
        ("fields/tag", "0x5", "fields.tag"),
        ("fields/tag", "0", "not 0"),
        ("fields/purpose", "lease", "fields.purpose: 'lease'"),
        ("fields/pages", {}, "fields.pages: is an object"),
        ("fields/pages/0/count", 0, "count"),
        ("fields/tokens/stop", "30", "fields.tokens.stop"),
        ("fields/parties", [], "parties"),
    ],
)
def test_a_malformed_native_line_is_refused_by_field(path: str, value: Any, reason: str) -> None:
    """A native line is taken as our store would have written it, or not at all."""
    log = read_text(mutated(path, value))
    (one,) = log.unknown
    assert (log.entries, one.line) == ((), 2)
    assert reason in one.reason


@given(st.binary(max_size=200))
@example(b"\xff\n")
def test_any_line_has_a_typed_answer(data: bytes) -> None:
    """Whatever follows a good header is an entry, or a record that says why it is none."""
    for mark in (False, True):
        log = read_capture(open_lines(io.BytesIO(header(foreign=mark).encode() + data)))
        lines = [line for line in data.split(b"\n") if line.strip()]
        assert len(log.entries) + len(log.unknown) == len(lines)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(["position", "request", "event", "proposer", "fields", "sequence"]),
    json_values,
)
def test_any_value_in_any_place_has_a_typed_answer(name: str, value: Any) -> None:
    """A native line with any JSON value in any place is an entry, or says why it is none."""
    log = read_text(mutated(name, value))
    assert len(log.entries) + len(log.unknown) == 1


# --- Segments ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    store = SegmentStore(path, segment_bytes=1)
    store.append(A, 0, entries(A, 0, 2))
    store.append(B, 0, LATER)
    store.close()
    return path


def test_a_folder_of_segments_is_a_log(folder: Path) -> None:
    """All entries are read in order, natively and completely, also while a store holds it."""
    store = SegmentStore(folder)
    log = read_log(folder)
    store.close()
    assert [one.entry for one in log.entries] == [*entries(A, 0, 2), *LATER]
    assert (log.foreign, log.complete, log.unknown) == (False, True, ())


def test_a_part_of_a_log_is_not_complete(folder: Path) -> None:
    """One segment of several, a later segment alone, and a torn end all say so."""
    first, second = segment_files.segment_paths(folder)
    assert [one.position for one in read_log(first).entries] == [1, 2]
    assert [one.position for one in read_log(second).entries] == [3]
    assert not read_log(first).complete
    assert not read_log(second).complete
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    torn = read_log(folder)
    assert ([one.position for one in torn.entries], torn.complete) == ([1, 2], False)
    assert second.read_bytes() == data[:-1]
    first.unlink()
    second.write_bytes(data)
    assert not read_log(folder).complete


def test_a_damaged_segment_is_named(folder: Path) -> None:
    """What is behind the damage is read, and the log is no longer complete."""
    path = segment_files.segment_paths(folder)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with ExitStack() as stack:
        capture = open_capture(folder, stack)
        log = read_capture(capture)
    assert ([one.entry for one in log.entries], log.complete) == ([*LATER], False)
    assert (path.name, frames.FILE_HEADER_BYTES) in [
        (one.segment, one.offset) for one in capture.problems
    ]


def test_unknown_events_of_segments_are_kept(folder: Path) -> None:
    """An event of a later version in a segment is kept with its bytes."""
    path = segment_files.segment_paths(folder)[1]
    data = path.read_bytes()
    message = pb.Entry(request=B, sequence=1)
    message.proposer.by_scheduler.epoch = 1
    message.event.MergeFromString(b"\x9a\x06\x00")
    frame = frames.pack_frame(
        first_position=4,
        count=1,
        previous=frames.chain(data[frames.FILE_HEADER_BYTES :]),
        payload=pb.EntryBatch(entries=[message]).SerializeToString(),
    )
    path.write_bytes(data + frame)
    log = read_log(folder)
    (kept,) = log.unknown
    assert (kept.position, kept.record["request"]) == (4, B)
    assert bytes.fromhex(kept.record["bytes"]) == message.SerializeToString()


@pytest.mark.parametrize("name", ["missing", "."])
def test_nothing_there_is_unreadable(tmp_path: Path, name: str) -> None:
    """A missing file and a folder without segments are refused by the same typed error."""
    with pytest.raises(UnreadableLog):
        read_log(tmp_path / name)


# --- The description --------------------------------------------------------------------------


def test_the_description_names_every_event_and_field() -> None:
    """`docs/log-format.md` has a table for each event, with exactly the event's fields."""
    text = (Path(__file__).parent.parent / "docs" / "log-format.md").read_text()
    for name, event_type in EVENTS_BY_NAME.items():
        (section,) = re.findall(rf"^### {name}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
        described = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        assert described == [field.name for field in attrs.fields(event_type)]
