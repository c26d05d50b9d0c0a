"""Claims about what the command line says when it cannot go on, and where it says it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.store import Stored
from tests import handmade
from tests.test_cli import PROGRAM
from transport import cli
from transport.client import Refused
from transport.commands_shared import CRASHED, FAILED, complain, say_table
from transport.render import log_table
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


@pytest.mark.parametrize(
    ("tokens", "code", "said"),
    [
        (["replay", "nosuch"], 5, "nosuch: no such file or directory"),
        (["bundle", "verify", "nosuch"], 5, "nosuch: no such file or directory"),
        (["timeline", "nosuch"], 5, "nosuch: no such file or directory"),
        (["status", "extra", "more"], 2, "there is no argument for 'extra' 'more'"),
    ],
)
def test_a_complaint_is_prose(
    tokens: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the system or a library says is told in the words of the rest, the name first."""
    assert cli.run(tokens) == code
    assert capsys.readouterr().err == f"custody: {said}\n"


def test_whoever_reaches_nobody_is_told_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a scheduler the complaint names the verb that starts one, and the flag."""
    assert cli.run(["status", "--scheduler", "127.0.0.1:1"]) == 3
    said = capsys.readouterr().err
    assert "custody serve" in said
    assert "--scheduler" in said


def test_numbers_of_a_refusal_stand_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """They come without an order over the wire, and are told in the order of their names."""
    numbers = {"waiting": "3", "limit": "2", "age": "1"}
    error = Refused(code="C", reason="R", message="m", numbers=numbers)
    assert complain(error, code=4, json=False) == 4
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3:] == ["  age = 1", "  limit = 2", "  waiting = 3"]


def test_a_table_in_a_pipe_has_no_spaces_at_the_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever reads it line by line finds text, not the width of a terminal."""
    log = handmade.decoding(handmade.Log())
    say_table(log_table([Stored(position, entry) for position, entry in log.entries]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > len(log.entries)
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.process
@pytest.mark.parametrize("tokens", [["--help"], ["status", "--help"], ["completion", "bash"]])
def test_a_reader_that_leaves_is_no_complaint(tokens: list[str]) -> None:
    """`custody --help | head -1` ends as every verb does whose reader has gone: 141, in silence."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(
            [*PROGRAM, *tokens], stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")
