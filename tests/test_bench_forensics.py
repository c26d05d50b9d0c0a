"""The log that is judged for time is one that the rules accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lifecycle.replay import Replayer
from tests.test_cli import bare  # noqa: F401 - a fixture for every test here
from transport import cli
from transport.bench_forensics import Traffic


def test_the_synthetic_log_is_legal() -> None:
    """Every rule holds, every request closes, and four run at a time."""
    replayer = Replayer()
    for position, entry in enumerate(Traffic().entries(2_000), start=1):
        assert replayer.take(position, entry) is None
    report = replayer.report()
    assert report.clean
    assert dict(report.phases) == {"closed": report.requests}
    assert report.requests > 100


def test_the_verb_reports_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, and rates of entries and of page events: reading, replay, its verb, exposures."""
    assert cli.run(["bench", "forensics", "--entries", "300", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in said["measured"]]
    assert names == ["read", "replay", "replay_verb", "exposures"]
    assert all(one["entries_per_second"] > 0 for one in said["measured"])
    assert said["bytes_per_entry_sealed"] < said["bytes_per_entry_hot"]
    assert cli.run(["bench", "forensics", "--entries", "0"]) == 2


def test_a_longer_table_is_asked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log as Parquet, and a table made of it again and again, in which nobody is exposed."""
    flags = ["--entries", "300", "--rows", "15000", "--temporary", str(tmp_path), "--json"]
    assert cli.run(["bench", "forensics", *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in said["parquet"]]
    assert names == ["parquet_export", "parquet_read", "parquet_exposures", "parquet_exposures"]
    assert said["parquet"][-1]["entries"] >= 15_000
    assert said["parquet"][0]["entries"] == said["entries"]
    assert list(tmp_path.iterdir()) == []
    assert cli.run(["bench", "forensics", "--rows", "-1"]) == 2
