"""Claims about what the command line says when it cannot go on, and where it says it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import PROGRAM
from transport import cli
from transport.commands_shared import CRASHED, FAILED
from transport.settings import DEFAULT_MODEL

CRASHING = """
import sys
from transport import cli, scheduler_shell

async def crash(*_args, **_more):
    raise RuntimeError("nobody foresaw this")

scheduler_shell.run_scheduler = crash
sys.argv = ["custody", "scheduler", "--port", "0"]
cli.main()
"""


def ended(command: list[str], folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of a process and the lines of its standard error."""
    environment = {name: value for name, value in os.environ.items() if "CUSTODY_" not in name}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


def is_whole(line: dict[str, Any]) -> bool:
    """Whether a line of a part's log has what every one has."""
    event = line.get("event", "")
    return event.replace("_", "").isalpha() and {"part", "level", "timestamp"} <= line.keys()


@pytest.mark.process
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_part_without_its_model_says_what_to_do(tmp_path: Path, flags: list[str]) -> None:
    """The last line of its log names the place looked in, what fetches the default, the flag."""
    code, lines = ended([*PROGRAM, "scheduler", "--port", "0", *flags], tmp_path)
    assert code == 2
    assert all(is_whole(line) for line in lines)
    (last,) = (line for line in lines if line["event"] == FAILED)
    assert str(DEFAULT_MODEL) in last["error"]["message"]
    for what in (str(tmp_path), "make model", "--model", "CUSTODY_MODEL"):
        assert what in last["error"]["hint"]


@pytest.mark.process
def test_a_crash_is_a_line_of_the_log_too(tmp_path: Path) -> None:
    """What nobody foresaw keeps its traceback, inside a line that is JSON as all are."""
    code, lines = ended([sys.executable, "-c", CRASHING], tmp_path)
    assert code == 1
    assert all(is_whole(line) for line in lines)
    assert lines[-1]["event"] == CRASHED
    assert "nobody foresaw this" in lines[-1]["exception"]


def test_a_model_that_somebody_named_is_not_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the default is fetched by the checkout; another absolute path is just named."""
    from engine.model_config import ModelNotFound

    hint = cli._hint(ModelNotFound(path=tmp_path / "mine.gguf"))
    assert "--model" in hint
    assert "make model" not in hint
    assert "looked for" not in hint
    assert cli._hint(OSError("no")) == ""
    assert capsys.readouterr().err == ""


def test_a_complaint_in_json_has_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard error of every verb with `--json` is lines with a stable name."""
    assert cli.run(["status", "--scheduler", "127.0.0.1:1", "--json"]) == 3
    said = json.loads(capsys.readouterr().err)
    assert (said["event"], said["level"], said["error"]["exit_code"]) == (FAILED, "error", 3)


def usages(app: Any, chain: tuple[str, ...] = ()) -> dict[str, str]:
    """The usage line of every verb."""
    found: dict[str, str] = {}
    for name in app:
        if name.startswith("-"):
            continue
        verb = (*chain, name)
        found |= usages(app[name], verb)
        if app[name].default_command is not None:
            cli.run([*verb, "--help"])
            found[" ".join(verb)] = ""
    return found


def test_usage_lines_name_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """An argument that may be left out has its name in the usage line, and is there if it exists."""
    verbs = usages(cli.app)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Usage: ")]
    assert len(lines) == len(verbs) > 25
    assert not [line for line in lines if "ARGS" in line]
    for verb, line in zip(verbs, lines, strict=True):
        assert line.startswith(f"Usage: custody {verb} "), line
    assert "Usage: custody generate [OPTIONS] [PROMPT]" in lines
    assert "Usage: custody status [OPTIONS]" in lines


def test_the_version_is_asked_for_by_a_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    """`custody --version` prints what `custody version` prints."""
    assert cli.run(["version"]) == 0
    line = capsys.readouterr().out
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == line
