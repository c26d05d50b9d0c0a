"""`custody replay` beyond the verdict: narrowed, at a position, of parts, and of other systems."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from engine.store import Stored
from lifecycle.events import Aborted, Cause, Released
from lifecycle.ids import FLEET
from lifecycle.replay import Replayer
from tests import handmade
from tests.handmade import DECODE, DESTINATION, ONE, SOURCE, TWO
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import Careless, first_answered, short_handoff
from transport import cli
from transport.commands_forensics import opened
from transport.jsonlines import entry_object

Run = Any


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; exit code, output, errors."""

    def run(*tokens: object) -> tuple[int, str, str]:
        code = cli.run([str(token) for token in tokens])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def two_wrong(tmp_path: Path) -> Path:
    """Two requests that each break a rule: pages released early, and a short hand-off."""
    log = first_answered()
    early = Careless()
    early.entries, early.history, early.now_ns = log.entries, log.history, log.now_ns
    early.say(handmade.admitted(), request=TWO)
    early.say(handmade.finished(), request=TWO)
    entry = early.entry(Released(SOURCE))
    early.entries.append((len(early.entries) + 1, entry))
    return write_log(tmp_path / "two.jsonl", early.entries)


def test_the_state_before_a_violation_is_shown(two_wrong: Path, run: Run) -> None:
    """Each violation comes with its request as it was without the entry."""
    code, text, _ = run("replay", two_wrong)
    assert code == 1
    assert "  before: admitted, attempt 1, next entry 1, 0 of 0 grants unsettled" in text
    assert "source grant p0/1/0/1, released: 2 pages from 0 on for tokens 0 to 5" in text
    assert "broken first: " in text
    document = json.loads(run("replay", two_wrong, "--json")[1])
    assert [v["before"]["phase"] for v in document["violations"]] == ["admitted", "closed"]
    assert sum(document["by_rule"].values()) == 2


def test_one_request_is_looked_at_alone(two_wrong: Path, run: Run) -> None:
    """`--request` shows that request's violation and state, and exits by that."""
    code, text, _ = run("replay", two_wrong, "--request", TWO)
    assert (code, text.count("violation at position")) == (1, 1)
    assert f"{TWO}: admitted" in text
    code, _, said = run("replay", two_wrong, "--request", "00000001-000000000009")
    assert code == 1
    assert "near it are" in said


def test_a_window_of_positions(two_wrong: Path, run: Run) -> None:
    """`--from` and `--to` show what was broken there, judged by everything before."""
    last = len(two_wrong.read_text().splitlines()) - 1
    code, text, _ = run("replay", two_wrong, "--from", last)
    assert (code, text.count("violation at position")) == (1, 1)
    assert run("replay", two_wrong, "--to", 5)[0] == 0


def test_the_world_at_a_position(two_wrong: Path, run: Run) -> None:
    """`--at` shows engines, pages and open requests as they were behind that position."""
    code, text, _ = run("replay", two_wrong, "--at", 8)
    assert code == 0
    assert text.startswith("behind position 8, ")
    assert f"pages of {DECODE}: 13 free + 3 held + 0 booked + 0 quarantined = 16" in text
    document = json.loads(run("replay", two_wrong, "--at", 8, "--json")[1])
    assert [r["request"] for r in document["requests"]] == [ONE]
    assert document["position"] == 8


@pytest.mark.parametrize("flag", ["--at", "--from", "--to"])
def test_positions_begin_at_one(two_wrong: Path, flag: str, run: Run) -> None:
    """A position that cannot be is a usage error."""
    code, out, said = run("replay", two_wrong, flag, 0)
    assert (code, out) == (2, "")
    assert "positions begin at 1" in said


def test_a_trace_is_not_narrowed(run: Run) -> None:
    """What belongs to logs is refused for a trace of a search."""
    trace = Path(__file__).parent / "traces" / "aba.trace.toml"
    code, _, said = run("replay", trace, "--at", 3)
    assert code == 2
    assert "this is a trace" in said


def test_the_rest_of_a_broken_log_is_replayed(tmp_path: Path, run: Run) -> None:
    """A bad line costs itself: it is named, the rest is judged, and the exit code is 5."""
    path = write_log(tmp_path / "x.jsonl", first_answered().entries)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:5], lines[5][:30] + "\n", *lines[6:]]))
    code, text, _ = run("replay", path)
    assert code == 5
    assert "not evaluated: line 6" in text
    assert text.splitlines()[-1].startswith("incomplete")
    assert f"{len(lines) - 2} entries" in text


def test_another_system_is_heard_to_the_end() -> None:
    """What an illegal entry of a foreign log did to its pages counts for everybody else."""
    log = Careless()
    handmade.written(log)
    log.say(Aborted(Cause.CLIENT_CANCEL, "client"), Released(SOURCE), Released(DESTINATION))
    replayer = Replayer(foreign=True)
    for position, entry in log.entries:
        replayer.take(position, entry)
    assert replayer.report().by_rule == (("drained-before-released", 1),)
    assert replayer.history.ledger[DECODE].held == 0
    native = Replayer()
    for position, entry in log.entries:
        native.take(position, entry)
    assert native.history.ledger[DECODE].held_pages == 3


def foreign(path: Path, entries: list[Any], **header: Any) -> Path:
    """The entries as another system's log."""
    first = {"format": "custody.log", "version": 1, "source": "other", "complete": True, **header}
    lines = [first, *(entry_object(Stored(n, entry)) for n, entry in entries)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_an_engine_that_compares_nothing_is_counted_apart(tmp_path: Path, run: Run) -> None:
    """Reads without any comparison are one number, beside the rules that single requests broke."""
    log = Careless()
    handmade.handed_over(log)
    log.say(handmade.verified(headers_checked=0), handmade.finished(reads_unchecked=3))
    log.say(Released(SOURCE), Released(DESTINATION))
    path = foreign(tmp_path / "x.jsonl", log.entries)
    code, text, _ = run("replay", path)
    assert code == 0
    assert "requests that read without comparing any page: 1" in text
    assert run("replay", write_log(tmp_path / "y.jsonl", log.entries))[0] == 1


def test_an_illegal_entry_of_the_fleet_changes_nothing() -> None:
    """Of another system's fleet only what makes sense is taken in."""
    log = short_handoff(first_answered())
    fleet = [(n, e) for n, e in log.entries if e.request == FLEET]
    replayer = Replayer(foreign=True)
    for position, entry in [*log.entries, *fleet]:
        replayer.take(position, entry)
    assert replayer.report().findings


def test_the_collector_rests_while_a_log_is_read(two_wrong: Path) -> None:
    """It is off inside, and afterwards as it was before, also when reading ends in an error."""
    assert gc.isenabled()
    with opened(two_wrong):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), opened(two_wrong):
        raise KeyError
    assert gc.isenabled()
