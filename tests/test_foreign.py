"""Somebody else's engine: searched through an adapter, and judged by the log that it exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.explorer import explore, minimise
from engine.foreign import Ended, Fact, ForeignWorld, Freed, Held, Read, Refused, Wrote
from engine.trace import dumps, loads, record
from engine.world_values import Found, Scenario
from lifecycle.ids import FLEET
from tests import toy_engine
from transport import cli

TOY = Path(toy_engine.__file__)


def test_the_toy_is_small() -> None:
    """An engine and its adapter fit on a page."""
    assert len(TOY.read_text().splitlines()) <= 100


def test_the_search_finds_the_incident_in_a_foreign_engine() -> None:
    """A refused request that keeps walking is found, and reduced to the moves that matter."""
    outcome = explore(Scenario(), runs=50, worlds=lambda _: ForeignWorld(toy_engine.broken()))
    assert outcome.trace is not None
    assert (outcome.trace.found.name, outcome.trace.rule) == ("refused-walks", "one-decision")
    small = record(minimise(outcome.trace))
    first, second, third = small.actions
    assert first.startswith("ask ")
    assert third == second.replace("ask", "decode")
    assert loads(dumps(small)) == small


def test_the_repaired_twin_stays_clean_where_the_danger_was() -> None:
    """The twin is searched as long, meets refusals, and nothing is found."""
    outcome = explore(Scenario(), runs=200, worlds=lambda _: ForeignWorld(toy_engine.repaired()))
    assert outcome.trace is None
    assert outcome.sometimes["Refused"] > 0
    assert outcome.sometimes["fault:cancel"] > 0


class Script:
    """An engine that says these facts, one a move."""

    def __init__(self, *facts: Fact) -> None:
        self.facts = list(facts)
        self.said: list[Fact] = []

    def enabled(self) -> list[str]:
        return ["next"] if self.facts else []

    def apply(self, _name: str) -> None:
        self.said.append(self.facts.pop(0))

    def observe(self) -> list[Fact]:
        said, self.said = self.said, []
        return said


@pytest.mark.parametrize(
    ("facts", "oracle"),
    [
        ((Held("a", 1), Held("b", 1)), "two-owners"),
        ((Held("a", 1), Freed("b", 1)), "freed-twice"),
        ((Held("a", 1), Freed("a", 1), Wrote("a", 1)), "late-write"),
        ((Held("a", 1), Read("a", 1)), "observed-foreign"),
        ((Held("a", 1), Wrote("a", 1), Freed("a", 1), Held("b", 1), Read("b", 1)), "observed"),
        ((Refused("a"), Held("a", 1)), "refused-owns"),
        ((Held("a", 1), Refused("a")), "refused-owns"),
        ((Refused("a"), Read("a", 1)), "refused-walks"),
        ((Refused("a"), Ended("a", succeeded=True)), "answered-twice"),
        ((Ended("a", succeeded=True), Ended("a", succeeded=False)), "answered-twice"),
        ((Held("a", 1), Ended("a", succeeded=True)), "leak"),
    ],
)
def test_each_oracle_sees_its_fault(facts: tuple[Fact, ...], oracle: str) -> None:
    """Facts that must not be are found by the oracle that names them."""
    with pytest.raises(Found, match=oracle):
        ForeignWorld(Script(*facts)).calm()


class Restless:
    """An engine that always has something to do."""

    def enabled(self) -> list[str]:
        return ["spin"]

    def apply(self, _name: str) -> None:
        pass

    def observe(self) -> list[Fact]:
        return []


def test_an_engine_that_never_rests_is_found() -> None:
    """Coming to rest is bounded."""
    with pytest.raises(Found, match="never-quiet"):
        ForeignWorld(Restless()).calm()


# --- the verb ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_verb_drives_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    """`custody fuzz --adapter` finds it, keeps a trace, and `custody replay` shows it again."""
    assert cli.run(["fuzz", "--adapter=tests.toy_engine:broken", "--seed=1", "--runs=30"]) == 1
    said = capsys.readouterr().out
    assert "Found refused-walks (rule one-decision)" in said
    (path,) = Path("fuzz-findings").glob("found-*")
    assert f"custody replay {path}" in said
    assert cli.run(["replay", str(path)]) == 0
    assert "as expected of adapter tests.toy_engine:broken" in capsys.readouterr().out
    assert cli.run(["fuzz", "--adapter=tests.toy_engine:repaired", "--runs=30"]) == 0


@pytest.mark.parametrize("name", ["tests.toy_engine:missing", "no_such_module:x", "x", ":"])
def test_an_adapter_that_is_not_there_is_a_usage_error(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says how an adapter is written."""
    assert cli.run(["fuzz", f"--adapter={name}", "--runs=1"]) == 2
    assert "module:factory" in capsys.readouterr().err


# --- logs alone -------------------------------------------------------------------------------

HEADER = {"format": "custody.log", "version": 1, "source": "toy", "complete": True}
BEGIN = {
    "request": FLEET,
    "attempt": 0,
    "event": "Resumed",
    "fields": {"epoch": 1, "last_position": 0},
}
NUMBERS = {"prompt_tokens": 8, "new_tokens_max": 1, "context_tokens": 16, "capacity_tokens": 4}
REST: dict[str, dict[str, Any]] = {
    "Rejected": {**NUMBERS, "tenant": "", "fleet_position": 1},
    "Finished": {
        "first_token_ns": 1,
        "digest": "",
        "pages_read": 1,
        "reads_checked": 0,
        "reads_unchecked": 1,
    },
}


def export(toy: toy_engine.Toy, path: Path) -> None:
    """What a run of the toy leaves behind, in the exchange format."""
    while moves := [name for name in toy.enabled() if not name.startswith("fault:")]:
        toy.apply(min(moves, key=lambda name: not name.startswith("ask")))
    lines = [HEADER, BEGIN, *toy.lines]
    for line in toy.lines:
        line["fields"].update(REST[line["event"]])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_exported_log_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """The log alone shows that a refused request was served; the twin's log is clean."""
    path = Path("toy.jsonl")
    export(toy_engine.broken(), path)
    assert cli.run(["replay", str(path)]) == 1
    said = capsys.readouterr().out
    assert "foreign log of toy" in said
    assert "rule: one-decision" in said
    export(toy_engine.repaired(), path)
    assert cli.run(["replay", str(path)]) == 0
