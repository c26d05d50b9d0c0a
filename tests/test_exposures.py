"""Exposures: who was exposed to whom is read off the log, and what is missing becomes a bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.store import Stored
from lifecycle.events import (
    Aborted,
    Cause,
    Entry,
    Lost,
    LostCause,
    Released,
    Reserved,
)
from lifecycle.forensics_slots import SlotMap, slots_of
from lifecycle.forensics_sums import exposures
from lifecycle.forensics_values import Bounds, Doubt, Missing, Source, Told
from lifecycle.ids import FLEET, GrantId, PageRange, RequestId, TokenRange
from lifecycle.snapshot import Snapshot
from tests import handmade
from tests.driver import Driver
from tests.handmade import DECODE, DESTINATION, ONE, PREFILL, SOURCE, TWO
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from transport import cli
from transport.jsonlines import entry_object
from transport.stores import frames, segment_files
from transport.stores.disk import Disk
from transport.stores.segments import SegmentStore
from transport.stores.snapshot_file import Kept, write_snapshot

Entries = list[tuple[int, Entry]]
SECOND_SOURCE = GrantId(PREFILL, 2)
SECOND = GrantId(DECODE, 3)


class Careless(handmade.Log):
    """A log that takes anything in, as another system's would."""

    def say(self, *events: Any, **how: Any) -> Careless:
        """Append entries without asking whether they are legal."""
        for event in events:
            entry = self.entry(event, **how)
            self.history.take(entry)
            self.entries.append((len(self.entries) + 1, entry))
            self.now_ns += 1
        return self


def first_answered() -> Careless:
    """Request one came and went: its bytes lie on pages 0 to 2 of both pools."""
    log = Careless()
    handmade.decoding(log).add(handmade.finished())
    log.add(Released(SOURCE), Released(DESTINATION))
    return log


def second(**changes: Any) -> Reserved:
    """Request two gets the pages that request one had."""
    return handmade.destination(grant=SECOND, **changes)


def of_two(log: Careless, *events: Any) -> Careless:
    """Request two says these things."""
    return log.say(*events, request=TWO)


def short_handoff(log: Careless) -> Careless:
    """Only one page of two is written, and request two reads all."""
    return of_two(short_before_reading(log), handmade.finished())


def short_before_reading(log: Careless) -> Careless:
    """Request two begins to read, with one page of two written."""
    return of_two(
        log,
        handmade.admitted(),
        handmade.source(grant=SECOND_SOURCE),
        second(),
        handmade.transferred(0, 4, grant=SECOND),
        handmade.drained(grant=SECOND),
        handmade.verified(grants=(SECOND,)),
    )


def test_a_clean_log_exposes_nobody() -> None:
    """What the real cores do is cleared, and every answer is counted."""
    driver = Driver().pair()
    requests = [driver.submit(prompt=n, new=4) for n in (5, 9, 3)]
    driver.run()
    found = exposures(driver.log)
    assert found.answers == len(requests)
    assert (found.affected, found.exposed) == (Bounds(0, 0), Bounds(0, 0))
    assert (found.responses, found.symptoms, found.whole) == ((), (), True)


def test_a_short_hand_off_names_the_earlier_owner() -> None:
    """Tokens that were not handed over are read out of what the page's last owner left."""
    found = exposures(short_handoff(first_answered()).entries)
    assert found.affected == Bounds(1, 1)
    assert found.exposed == Bounds(1, 1)
    (response,) = found.certain
    (read,) = response.reads
    assert (read.reader, read.writer, read.source) == (TWO, ONE, Source.REQUEST)
    assert (read.start, read.stop, read.first_page, read.pages) == (4, 6, 1, 1)
    assert read.owner == DECODE
    assert read.stale_ns == read.read_ns - read.written_ns
    assert [(p.reader, p.writer, p.responses) for p in found.pairs] == [("tenant", "tenant", 1)]


def test_lengths_that_disagree_are_a_symptom() -> None:
    """The legs' lengths are compared without looking at any page."""
    found = exposures(short_handoff(first_answered()).entries)
    (symptom,) = found.symptoms
    assert (symptom.request, symptom.kind) == (TWO, "lengths_disagree")
    assert (symptom.found, symptom.expected) == (4, 7)


def test_new_memory_is_told_from_a_log_that_begins_later() -> None:
    """Pages that nobody wrote are nobody's in a whole log, and somebody's in one that is not."""
    log = short_handoff(Careless())
    (response,) = exposures(log.entries).certain
    assert [read.source for read in response.reads] == [Source.NOBODY]
    (response,) = exposures(log.entries, whole=False).certain
    assert [read.source for read in response.reads] == [Source.BEFORE]


def late_write(log: Careless, *, told: bool) -> Careless:
    """Request one is aborted with its last write on the way, and request two gets its pages."""
    log.say(handmade.admitted(), handmade.source(), handmade.destination())
    log.say(handmade.transferred(0, 4), handmade.ABORTED)
    log.say(Released(SOURCE), Released(DESTINATION))
    of_two(
        log,
        handmade.admitted(),
        handmade.source(grant=SECOND_SOURCE),
        second(),
        handmade.transferred(0, 6, grant=SECOND),
        handmade.drained(grant=SECOND),
        handmade.verified(grants=(SECOND,), headers_checked=0),
    )
    if told:
        log.say(handmade.transferred(4, 6))
        log.say(handmade.drained())
    return of_two(log, handmade.finished(reads_unchecked=3))


def test_a_late_write_is_traced_to_its_writer() -> None:
    """A write that lands after its pages went to another request is read by that request."""
    found = exposures(late_write(Careless(), told=True).entries)
    (response,) = found.certain
    assert (response.request, response.reads[0].writer) == (TWO, ONE)
    assert (response.reads[0].start, response.reads[0].stop) == (4, 6)


def test_a_write_of_which_nothing_is_heard_is_a_bound() -> None:
    """A door that was left open when pages were given back is a doubt about their next reader."""
    found = exposures(late_write(Careless(), told=False).entries)
    assert found.affected == Bounds(0, 1)
    (response,) = found.responses
    assert response.doubts == (Doubt.OPEN_DOOR,)


def test_what_was_compared_on_every_read_is_cleared() -> None:
    """A reader that compared every header is not in doubt, whatever was left open."""
    log = late_write(Careless(), told=False)
    checked = [
        (n, attrs.evolve(e, event=handmade.finished()) if n == len(log.entries) else e)
        for n, e in log.entries
    ]
    verified = [
        (n, attrs.evolve(e, event=handmade.verified(grants=(SECOND,))))
        if type(e.event).__name__ == "Verified"
        else (n, e)
        for n, e in checked
    ]
    assert exposures(verified).affected == Bounds(0, 0)


def without(entries: Entries, *events: str) -> Entries:
    """The log with these events of request two torn out; positions stay."""
    return [
        (n, e) for n, e in entries if not (e.request == TWO and type(e.event).__name__ in events)
    ]


def test_missing_entries_widen_the_bounds() -> None:
    """A hand-off whose entries are missing is neither clear nor proved to be short."""
    log = first_answered()
    of_two(
        log,
        handmade.admitted(),
        handmade.source(grant=SECOND_SOURCE),
        second(),
        handmade.transferred(0, 6, grant=SECOND),
        handmade.drained(grant=SECOND),
        handmade.verified(grants=(SECOND,)),
        handmade.finished(),
    )
    assert exposures(log.entries).affected == Bounds(0, 0)
    torn = without(log.entries, "Transferred")
    position = next(n for (n, _), m in zip(torn, range(1, 99), strict=False) if n != m) - 1
    found = exposures(torn, missing=[Missing(position, position, "gone")], whole=False)
    assert found.affected == Bounds(0, 1)
    assert Doubt.OWN_ENTRIES_MISSING in found.responses[0].doubts
    assert found.missing_positions == 1


THIRD_SOURCE = GrantId(PREFILL, 3)


def test_an_earlier_attempts_source_is_not_what_was_copied() -> None:
    """Pages that attempt one gave back may go to attempt two, or to another request."""
    for another in (False, True):
        log = Careless()
        handmade.written(log).add(handmade.requeued(tokens_relayed=0))
        log.add(handmade.drained(), Released(SOURCE), Released(DESTINATION))
        if another:
            of_two(log, handmade.admitted(), handmade.source(grant=SECOND_SOURCE))
        pages = (PageRange(4 if another else 0, 2),)
        log.say(
            handmade.admitted(),
            handmade.source(grant=THIRD_SOURCE, pages=pages),
            handmade.destination(grant=SECOND),
            handmade.transferred(grant=SECOND),
            handmade.drained(grant=SECOND),
            handmade.verified(grants=(SECOND,)),
            handmade.finished(),
        )
        found = exposures(log.entries)
        assert (found.answers, found.responses) == (1, ()), another


@pytest.mark.parametrize(("holder", "doubts"), [(TWO, (Doubt.SOURCE_REUSED,)), (ONE, None)])
def test_a_source_that_went_to_another_before_it_was_copied_is_a_doubt(
    holder: RequestId, doubts: tuple[Doubt, ...] | None
) -> None:
    """What is copied out of pages that were given back may be the next owner's, if it is another."""
    log = Careless()
    log.say(handmade.admitted(), handmade.source(), handmade.destination(), Released(SOURCE))
    log.say(handmade.source(grant=SECOND_SOURCE), request=holder)
    log.say(handmade.transferred(), handmade.drained(), handmade.verified(), handmade.finished())
    found = {r.request: r.doubts for r in exposures(log.entries).responses}
    assert found.get(ONE) == doubts


LOST = Lost(DECODE.engine, DECODE.incarnation, LostCause.LEASE)


def test_what_was_read_before_its_engine_was_lost_is_known() -> None:
    """A loss takes no evidence away: a whole hand-off is cleared, a short one names its owner."""
    whole = Careless()
    handmade.decoding(whole).add(LOST, request=FLEET).add(handmade.requeued())
    found = exposures(whole.entries)
    assert (found.responses, found.affected) == ((), Bounds(0, 0))
    short = short_before_reading(first_answered())
    short.say(LOST, request=FLEET)
    of_two(short, handmade.requeued())
    (response,) = exposures(short.entries).responses
    assert (response.request, response.doubts) == (TWO, ())
    assert [read.writer for read in response.reads] == [ONE]


def test_a_gap_puts_those_in_doubt_who_lived_across_it() -> None:
    """An answer without comparisons is in doubt when entries of its time are missing, not else."""
    log = late_write(Careless(), told=True)
    clean = [one for one in log.entries if one[1].request != ONE]
    first = next(n for n, e in clean if e.request == TWO)
    last = clean[-1][0]
    for position, doubted in ((first - 1, False), (first + 2, True), (last + 1, False)):
        gap = Missing(position, position, "gone")
        found = exposures(clean, missing=[gap], whole=False)
        doubts = found.responses[0].doubts if found.responses else ()
        assert (Doubt.GAP_IN_LOG in doubts) is doubted, position
        assert found.affected == Bounds(0, int(doubted))


def test_an_answer_without_pages_is_not_cleared() -> None:
    """A log that does not say what was read clears nobody."""
    log = Careless()
    of_two(log, handmade.admitted(), handmade.finished())
    found = exposures(log.entries)
    assert found.affected == Bounds(0, 1)
    assert Doubt.NO_PAGES in found.responses[0].doubts


def test_an_isolation_abort_is_no_answer() -> None:
    """A read that was stopped before its token left is listed, and not counted as an answer."""
    log = first_answered()
    short_handoff(log)
    last = len(log.entries)
    stopped = Aborted(Cause.ISOLATION_VIOLATION, "d0", page=1, tag_expected=1, tag_found=2)
    entries = [(n, attrs.evolve(e, event=stopped) if n == last else e) for n, e in log.entries]
    found = exposures(entries)
    assert found.affected == Bounds(0, 0)
    assert [r.told for r in found.responses] == [Told.PART]


def test_a_copy_of_an_entry_says_nothing_new() -> None:
    """A line that stands twice changes no verdict."""
    log = short_handoff(first_answered())
    twice = [one for one in log.entries for _ in range(2)]
    once, again = exposures(log.entries), exposures(twice)
    assert again.certain == once.certain
    assert again.affected == once.affected


# --- Slots ------------------------------------------------------------------------------------


def test_slots_agree_with_a_plain_list() -> None:
    """The map of runs is the same as a list of slots, for every write and every read."""
    import random

    draw = random.Random(1)
    slots: SlotMap[int] = SlotMap()
    plain: list[int | None] = [None] * 64
    for value in range(500):
        start = draw.randrange(64)
        stop = draw.randrange(start, 64) + 1
        slots.assign(start, stop, value)
        plain[start:stop] = [value] * (stop - start)
        low = draw.randrange(64)
        high = draw.randrange(low, 64) + 1
        flat = [v for a, b, v in slots.runs(low, high) for _ in range(b - a)]
        assert flat == plain[low:high]


def test_tokens_lie_in_the_pages_of_their_grant() -> None:
    """Runs of pages are followed in the grant's order, and what does not fit is left out."""
    pages = (PageRange(10, 2), PageRange(3, 1))
    assert slots_of(pages, TokenRange(2, 10), 4, 0) == [(42, 48, 2), (12, 14, 8)]
    assert slots_of(pages, TokenRange(6, 9), 4) == [(42, 45, 6)]
    assert slots_of(pages, TokenRange(0, 99), 4, 0) == [(40, 48, 0), (12, 16, 8)]


# --- The verb ---------------------------------------------------------------------------------


def asked(
    path: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and document of the verb."""
    code = cli.run(["exposures", str(path), *flags])
    text = capsys.readouterr().out
    assert cli.run(["exposures", str(path), "--json"]) == code
    return code, text, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("bad", [True, False])
def test_the_verb_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bool
) -> None:
    """Where somebody is affected, standard error names the verbs that come next, and else none."""
    script = short_handoff(first_answered()) if bad else first_answered()
    path = write_log(tmp_path / "x.jsonl", script.entries)
    assert cli.run(["exposures", str(path)]) == int(bad)
    said = capsys.readouterr().err
    assert (f"custody explain REQUEST --log {path}" in said) is bad
    assert (f"custody bundle {path}" in said) is bad
    assert cli.run(["exposures", str(path), "--json"]) == int(bad)
    assert capsys.readouterr().err == ""


def test_the_verb_names_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reader, pages, tokens, earlier owner and age are printed; the exit code is 1."""
    path = write_log(tmp_path / "bad.jsonl", short_handoff(first_answered()).entries)
    code, text, document = asked(path, capsys, "--reads")
    assert (code, document["affected"]) == (1, {"least": 1, "most": 1})
    assert "affected answers: 1" in text
    assert f"tokens 4 to 5 on pages 1 to 1 of d0/1/0: bytes of {ONE}" in text
    (response,) = document["responses"]
    assert response["reads"][0]["writer"] == ONE
    assert document["not_covered"]["position_share"] == 0


def test_the_verb_clears_a_whole_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody exposed and nothing missing is exit code 0."""
    path = write_log(tmp_path / "good.jsonl", first_answered().entries)
    code, text, document = asked(path, capsys)
    assert (code, document["complete"]) == (0, True)
    assert "affected answers: 0" in text


def test_the_verb_gives_no_verdict_on_a_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody exposed in a log with a gap is exit code 5, with what is missing."""
    entries = first_answered().entries
    path = write_log(tmp_path / "part.jsonl", [*entries[:6], *entries[7:]], complete=False)
    code, text, document = asked(path, capsys)
    assert "missing: positions 7 to 7" in text
    assert document["not_covered"]["gaps"][0]["first"] == 7
    assert document["not_covered"]["position_share"] > 0
    assert code in (1, 5)
    assert "not covered" in text


@pytest.mark.parametrize("content", [None, b"", b"nonsense\n", b'{"format":"other"}\n'])
def test_what_is_no_log_is_refused(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read is exit code 5 and a sentence."""
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert cli.run(["exposures", str(path)]) == 5
    said = capsys.readouterr()
    assert (said.out, said.err[:9]) == ("", "custody: ")


def test_a_record_that_says_nothing_is_missing_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its position can be read or not, it is one of the positions that are not covered."""
    path = write_log(tmp_path / "log.jsonl", first_answered().entries)
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    share = 1 / (len(lines) - 1)
    path.write_text(text.replace('"event":"Drained"', '"event":"Evaporated"'))
    assert asked(path, capsys)[2]["not_covered"]["position_share"] == share
    path.write_text("".join([*lines[:5], "no JSON\n", *lines[6:]]))
    assert asked(path, capsys)[2]["not_covered"]["position_share"] == share
    path.write_text("".join([*lines[:-1], "no JSON\n"]))
    assert asked(path, capsys)[2]["not_covered"]["position_share"] == share


@pytest.mark.parametrize(("records", "foreign"), [(1, True), (1_001, False)])
def test_a_record_of_an_unknown_place_may_be_anywhere(
    records: int, foreign: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps an answer from being cleared, whatever else is missing at a known place."""
    log = Careless()
    handmade.decoding(log)
    log.say(handmade.finished(reads_unchecked=1))
    source = "other" if foreign else "custody"
    header = {"format": "custody.log", "version": 1, "source": source, "complete": True}
    stored = [entry_object(Stored(position, entry)) for position, entry in log.entries]
    last = {**stored[-1], "event": "Evaporated"}
    unknown = [{**last, "position": len(stored) + 1 + n} for n in range(records)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [header, *stored, *unknown]))
    assert asked(path, capsys)[2]["affected"] == {"least": 0, "most": int(records > 1)}
    with path.open("a") as stream:
        stream.write("no JSON\n")
    code, _, document = asked(path, capsys)
    assert (code, document["affected"]) == (1, {"least": 0, "most": 1})


def test_a_line_that_is_cut_costs_only_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log cut in the middle of a record is read up to there, and the rest is missing."""
    path = write_log(tmp_path / "cut.jsonl", short_handoff(first_answered()).entries)
    text = path.read_text()
    path.write_text(text + text.splitlines()[-1][:40])
    code, words, document = asked(path, capsys)
    assert (code, document["complete"]) == (1, False)
    assert document["affected"]["least"] == 1
    assert "not evaluated" in words


def snapshot_of(folder: Path) -> Path:
    """The log of a short hand-off whose beginning was dropped behind a snapshot."""
    log = first_answered()
    border = len(log.entries)
    short_handoff(log)
    store = SegmentStore(folder, segment_bytes=1)
    counts: dict[str, int] = {}
    for _, entry in log.entries:
        at = counts.get(entry.request, 0)
        store.append(entry.request, at, [entry])
        counts[entry.request] = at + 1
    store.close()
    paths = segment_files.segment_paths(folder)
    cut = border + 2
    previous = frames.unpack_file_header(paths[cut].read_bytes()).previous
    kept = tuple(one for one in log.entries[:cut] if one[1].request != ONE)
    snapshot = Snapshot(cut, log.entries[cut - 1][1].time_ns, kept)
    write_snapshot(folder, Kept(snapshot, previous, 1), Disk())
    for path in paths[:cut]:
        path.unlink()
    return folder


def test_behind_a_dropped_beginning_the_snapshot_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entries that a snapshot kept belong to their requests; what was dropped is a gap."""
    folder = snapshot_of(tmp_path / "log")
    cut = len(first_answered().entries) + 2
    code, text, document = asked(folder, capsys)
    assert code == 1
    (response,) = document["responses"]
    assert response["request"] == TWO
    assert [read["source"] for read in response["reads"]] == ["before_the_log"]
    assert f"missing: positions 1 to {cut}: dropped" in text
    assert cli.run(["explain", TWO, "--log", str(folder)]) == 5
    assert "7 prompt tokens" in capsys.readouterr().out
    assert cli.run(["log", "ls", "--log", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["requestId"] for line in said.out.splitlines()] == [TWO]
    assert f"missing: positions 1 to {cut}: dropped" in said.err
