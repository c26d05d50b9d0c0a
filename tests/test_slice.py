"""Slices: each violation as a few entries that show the same when they are replayed alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.incident.simulation import Setup, simulate
from lifecycle.forensics_slice import _circles, smallest
from lifecycle.ids import FLEET, GrantId, PageRange, RequestId
from lifecycle.replay import Replayer
from tests.handmade import ONE, PREFILL, TWO, source
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import Careless, first_answered
from tests.test_replay import MUTATED
from transport import cli

ENTRIES_MAX = 20
THREE = RequestId("00000001-000000000003")


@pytest.mark.parametrize("rule", MUTATED)
def test_every_rule_is_shown_by_few_entries(rule: str) -> None:
    """For each rule's changed log: at most 20 entries, and the same guard broken, alone."""
    log = MUTATED[rule]()
    replayer = Replayer()
    for position, entry in log:
        replayer.take(position, entry)
    findings = replayer.report().findings
    assert findings
    for finding in findings:
        found = smallest(log, finding, foreign=False)
        assert found is not None
        assert len(found.entries) <= ENTRIES_MAX
        again = Replayer()
        for position, entry in found.entries:
            again.take(position, entry)
        (only,) = again.report().findings
        assert only.violation.guard == finding.violation.guard
        assert only.violation.request == finding.violation.request


def test_no_entry_of_a_slice_can_be_left_out() -> None:
    """A slice is minimal: without any one entry it shows something else or nothing."""
    log = MUTATED["drained-before-released"]()
    replayer = Replayer()
    for position, entry in log:
        replayer.take(position, entry)
    (finding,) = replayer.report().findings
    found = smallest(log, finding, foreign=False)
    assert found is not None
    whole = [entry for _, entry in found.entries]
    from lifecycle.forensics_slice import _Search

    for index in range(len(whole)):
        search = _Search(finding, foreign=False)
        assert search.shows(whole[:index] + whole[index + 1 :]) is None


def test_the_incident_is_a_refusal_that_walks() -> None:
    """Of the published incident a rejection and a reservation are left, and what they need."""
    engine = simulate(Setup(seed=1, affected=5, sound=40, refused=2))
    replayer = Replayer(foreign=True)
    for position, entry in engine.log.entries:
        replayer.take(position, entry)
    findings = replayer.report().findings
    assert findings
    for finding in findings:
        found = smallest(engine.log.entries, finding, foreign=True)
        assert found is not None
        names = [type(entry.event).__name__ for _, entry in found.entries]
        assert names == ["Resumed", "Rejected", "Reserved"]


def test_of_a_grant_that_two_reserved_the_later_one_counts() -> None:
    """Whoever's pages it had before may break something else first, and comes with all others."""
    log = Careless()
    log.say(source(), request=ONE)
    log.say(source(pages=(PageRange(4, 2),)), request=TWO)
    log.say(source(grant=GrantId(PREFILL, 2)), request=THREE)
    replayer = Replayer()
    for position, entry in log.entries:
        replayer.take(position, entry)
    finding = replayer.findings[THREE]
    circles = [{entry.request for entry in tried} for tried in _circles(log.entries, finding)]
    assert circles == [
        {THREE, FLEET},
        {THREE, FLEET},
        {ONE, TWO, THREE, FLEET},
    ]


def test_the_verb_writes_logs_that_replay_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is a log for `custody replay`, which names the same rule; exit code 0."""
    path = write_log(tmp_path / "x", MUTATED["whole-before-read"]())
    output = tmp_path / "slices"
    assert cli.run(["slice", str(path), "--output", str(output), "--json"]) == 0
    (said,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said["rule"] == "whole-before-read"
    assert said["entries"] <= ENTRIES_MAX
    assert cli.run(["replay", said["file"], "--json"]) == 1
    (violation,) = json.loads(capsys.readouterr().out)["violations"]
    assert violation["guard"] == said["guard"]


def test_a_clean_log_has_no_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written, and that is said."""
    path = write_log(tmp_path / "x", first_answered().entries)
    output = tmp_path / "slices"
    assert cli.run(["slice", str(path), "--output", str(output)]) == 0
    assert capsys.readouterr().out.startswith("0 of 0 violations")
    assert not output.exists()


def test_an_unknown_request_and_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Near ids and 1; 5 for what is no log."""
    path = write_log(tmp_path / "x", first_answered().entries)
    assert cli.run(["slice", str(path), "--request", ONE[:-1] + "7"]) == 1
    assert ONE in capsys.readouterr().err
    path.write_bytes(b"")
    assert cli.run(["slice", str(path)]) == 5
