"""Kept logs of earlier versions, and of this one, replay to the states that were recorded."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lifecycle.replay import Replayer
from tests.captures import FOLDER, judged, state_hash
from tests.log_files import read_log
from transport import cli
from transport.forensics_read import open_capture
from transport.stores.segment_files import is_sealed, segment_paths

KEPT = [
    pytest.param(folder / name, id=f"{folder.name}-{name}")
    for folder in sorted(FOLDER.iterdir())
    for name in ("segments", "log.jsonl")
]


def expected(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path.parent / "expected.json").read_text())[path.name]
    return document


@pytest.mark.parametrize("path", KEPT)
def test_a_kept_log_reduces_to_the_recorded_states(path: Path) -> None:
    """Entries, kinds, phases, the chain's end and the hash of all states are what they were."""
    assert judged(path) == expected(path)


@pytest.mark.parametrize("path", KEPT)
def test_a_kept_log_is_whole_and_clean(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verbs find nothing wrong with it, and nothing missing."""
    assert cli.run(["replay", str(path)]) == 0
    assert cli.run(["log", "verify", str(path)]) == 0
    assert cli.run(["exposures", str(path)]) == 0
    assert "clean" in capsys.readouterr().out


def test_the_kept_logs_are_worth_keeping() -> None:
    """Sealed and open segments are among them, and every event of a request but few."""
    kinds: set[str] = set()
    for folder in FOLDER.iterdir():
        for document in json.loads((folder / "expected.json").read_text()).values():
            kinds |= set(document["events"])
        sealed = [is_sealed(path) for path in segment_paths(folder / "segments")]
        assert True in sealed
        assert False in sealed
    assert {"Requeued", "Quarantined", "Aborted", "Rejected", "Finished", "Lost"} <= kinds


def test_the_hash_sees_every_entry() -> None:
    """Without its last entry, or any other that is legal alone, a log has another hash."""
    path = next(FOLDER.iterdir()) / "log.jsonl"
    entries = read_log(path).entries
    hashes = set()
    replayer = Replayer()
    for one in entries:
        replayer.take(one.position, one.entry)
        hashes.add(state_hash(replayer.history))
    assert len(hashes) == len(entries)


@pytest.mark.parametrize("path", KEPT)
def test_both_forms_tell_the_same(path: Path) -> None:
    """Reading as a stream and reading as a whole give the same entries."""
    with ExitStack() as stack:
        streamed = list(open_capture(path, stack))
    assert streamed == [(one.position, one.entry) for one in read_log(path).entries]
