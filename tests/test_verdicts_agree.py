"""Every verb that judges a log says the same of it, also where something is missing."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import attrs
import pytest

from lifecycle.events import Released
from tests.handmade import TWO
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import first_answered, short_handoff
from tests.test_retention import drop, eventful, filled
from transport import cli

WHOLE = short_handoff(first_answered()).entries


def said(capsys: pytest.CaptureFixture[str], *tokens: str) -> list[Any]:
    """What a verb prints as JSON, a value a line."""
    capsys.readouterr()
    cli.run([*tokens, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("gone", range(len(WHOLE)))
def test_an_archive_says_what_the_verbs_say(
    gone: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever entry is missing: the verdicts in a bundle, and the rule in a story, are theirs."""
    log = write_log(tmp_path / "log.jsonl", [*WHOLE[:gone], *WHOLE[gone + 1 :]], complete=False)
    (exposures,) = said(capsys, "exposures", str(log))
    (replay,) = said(capsys, "replay", str(log))
    (story,) = said(capsys, "explain", TWO, "--log", str(log))
    output = tmp_path / "bundle.zip"
    said(capsys, "bundle", str(log), "--output", str(output), "--clear")
    with zipfile.ZipFile(output) as archive:
        verdicts = json.loads(archive.read("verdicts.json"))
    assert verdicts["exposures"] == exposures
    assert verdicts["replay"].items() <= replay.items()
    broken = {one["request"]: one["rule"] for one in replay["violations"] if one["event"]}
    assert story["rule"] == broken.get(TWO)
    response = [one for one in exposures["responses"] if one["request"] == TWO]
    assert story["exposure"] == (response[0] if response else None)


def test_behind_a_dropped_beginning_only_what_replay_finds_is_sliced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the snapshot kept counts as said, so the legal rest has no slices."""
    log = eventful().log
    store = filled(tmp_path / "log", log)
    assert drop(store, log) > 0
    again = next(e for _, e in reversed(log) if isinstance(e.event, Released))
    sequence = max(e.sequence for _, e in log if e.request == again.request) + 1
    twice = attrs.evolve(again, sequence=sequence, time_ns=log[-1][1].time_ns)
    store.append(twice.request, sequence, [twice])
    store.close()
    (replay,) = said(capsys, "replay", str(tmp_path / "log"))
    (violation,) = replay["violations"]
    (found,) = said(capsys, "slice", str(tmp_path / "log"), "--output", str(tmp_path / "slices"))
    assert found["guard"] == violation["guard"]
    assert found["entries"] <= 20
