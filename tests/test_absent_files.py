"""Claims about files that are not there: every verb says so in the same words, with the same code."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.captures import FOLDER
from tests.test_cli import bare  # noqa: F401 - a fixture for every test here
from transport import cli

READERS = (
    "replay none",
    "replay none --at 3",
    "exposures none",
    "timeline none",
    "diff none none",
    "slice none",
    "bundle none",
    "bundle verify none",
    "metrics none",
    "explain x --log none",
    "log ls --log none",
    "log show x --log none",
    "log export --log none",
    "log export --log none --format parquet --output new",
    "log import none --output new",
    "log index none",
    "log verify none",
    "log sign none --key none",
    "fuzz --replay none",
    "simulate --trace none --preset sound-8k",
)
KEYS = ("bundle log --sign none", "log verify log --key none", "log sign log --key none")


@pytest.mark.parametrize("verb", READERS)
def test_what_is_to_be_read_is_not_there(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 5, one line that begins with the name, and nothing is written."""
    assert cli.run(shlex.split(verb)) == 5
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("custody: none: no such file")
    assert shown.out == ""
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("verb", KEYS)
def test_a_key_that_is_not_there_cannot_be_used(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is there, so it is the argument that is wrong: exit code 2, with the flag's name."""
    shutil.copytree(FOLDER / "schema-1" / "segments", "log")
    assert cli.run(shlex.split(verb)) == 2
    flag = "--sign" if "--sign" in verb else "--key"
    assert capsys.readouterr().err == f"custody: {flag} none: no such file or directory\n"


@pytest.mark.parametrize("output", ["folder", "absent/index"])
def test_an_index_that_cannot_be_written(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and one line that begins with the file's name."""
    shutil.copytree(FOLDER / "schema-1" / "segments", "log")
    Path("folder").mkdir()
    assert cli.run(["log", "index", "log", "--output", output]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"custody: {output}")
    assert line.count(output) == 1
    assert sorted(path.name for path in Path().iterdir()) == ["folder", "log"]


def test_a_corpus_that_is_not_there_is_begun(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what a search writes into, and nothing that has to be read."""
    assert cli.run(["fuzz", "--seed=1", "--runs=1", "--corpus=none"]) == 0
    assert "corpus none: 0 replayed" in capsys.readouterr().out
