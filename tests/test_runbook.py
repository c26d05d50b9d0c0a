"""The runbook's commands are run as they stand, over a log that was kept."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.captures import FOLDER
from tests.test_bundle import keys
from tests.test_cli import bare  # noqa: F401 - a fixture for every test here
from transport import cli

RUNBOOK = Path(__file__).parent.parent / "docs" / "runbook.md"
OTHERS = {"cp", "openssl"}
"""What is not ours: the first step's copy, and the last one's key."""


def commands() -> list[list[str]]:
    """Every command line of the steps."""
    (steps,) = re.findall(r"```console\n(.*?)```", RUNBOOK.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line[2:]) for line in steps.splitlines() if line.startswith("$ ")]


def test_the_steps_lead_from_a_copy_to_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    """Over a sound log each step ends with 0, the request is one of those that were listed."""
    lines = commands()
    assert {words[0] for words in lines} == {"custody", *OTHERS}
    shutil.copytree(FOLDER / "schema-1" / "segments", "capture")
    assert [path.name for path in keys(Path())] == ["key.pem", "key.pub"]
    listed = ""
    for program, *words in lines:
        if program in OTHERS:
            continue
        assert cli.run([listed if word == "REQUEST" else word for word in words]) == 0
        shown = capsys.readouterr().out
        if words[:2] == ["log", "ls"]:
            listed = shown.split()[0]
    assert {"timeline.html", "bundle.zip"} <= {path.name for path in Path().iterdir()}
