"""Claims about the command line: one definition of settings, exit codes, data apart from talk."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest
from cyclopts.argument import Argument
from hypothesis import given
from hypothesis import strategies as st

from engine.store import Stored
from lifecycle.events import Event, Finished, Rejected, Released
from lifecycle.ids import RequestId
from lifecycle.rules import RULES
from property_tests import strategies
from tests import handmade
from transport import cli, commands_shared, render
from transport.client import Unreachable
from transport.jsonlines import jsonlines
from transport.settings import (
    EngineSettings,
    InvalidSetting,
    JoinSettings,
    PoolSettings,
    SchedulerSettings,
    is_loopback,
    to_flags,
)

PROGRAM = (sys.executable, "-P", "-m", "transport.cli")


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings come from this machine's environment or folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("CUSTODY_MODEL", "CUSTODY_PORT", "CUSTODY_SCHEDULER"):
        monkeypatch.delenv(name, raising=False)


def write_log(path: Path, entries: Iterable[tuple[int, Any]], *, complete: bool = True) -> Path:
    stored = [Stored(position, entry) for position, entry in entries]
    path.write_text("".join(jsonlines(stored, complete=complete)))
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A log in which one request went the whole way and another was refused."""
    log = handmade.decoding(handmade.Log()).add(handmade.finished())
    log.add(Released(handmade.SOURCE), Released(handmade.DESTINATION))
    log.add(handmade.rejected(), request=handmade.TWO)
    return write_log(tmp_path / "good.jsonl", log.entries)


# --- Settings ---------------------------------------------------------------------------------


def parsed(*tokens: str) -> Any:
    """What a verb would be called with."""
    _, bound, _ = cli.app.parse_args(list(tokens), exit_on_error=False, print_error=False)
    return bound.arguments


def test_flags_carry_every_setting() -> None:
    """What is turned into flags is read back equal, for every kind of settings."""
    scheduler = SchedulerSettings(
        model="m", host="::1", port=0, log=Path("log"), context_tokens=9, queue_seconds=0.5
    )
    assert parsed("scheduler", *to_flags(scheduler))["options"] == scheduler
    join = JoinSettings(kv_memory="1GiB", plane="grpc", scheduler="localhost:1", threads=2)
    assert parsed("prefill", "p9", *to_flags(join))["options"] == join
    pool = PoolSettings(page_tokens=16, batch=3)
    assert parsed("serve", *to_flags(pool))["pool"] == pool


def test_the_context_has_a_short_flag() -> None:
    """`--context` is the flag of `context_tokens`."""
    assert parsed("serve", "--context", "77")["options"].context_tokens == 77


def test_flag_before_environment_before_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of flag, environment, file and default the first that is there counts."""

    def refused_port(*flags: str) -> str:
        assert cli.run(["scheduler", *flags]) == 2
        return capsys.readouterr().err.split("port = ")[1].split(":")[0]

    Path("custody.toml").write_text("port = 70001\nkv-memory = '1GiB'\n")
    assert refused_port() == "70001"
    other = tmp_path / "other.toml"
    other.write_text("port = 70002")
    assert refused_port("--config", str(other)) == "70002"
    monkeypatch.setenv("CUSTODY_PORT", "70003")
    assert refused_port() == "70003"
    assert refused_port("--port", "70004") == "70004"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "no setting is called 'prot'"),
        ("port = [1]", "'port' must be a single value"),
        ("port =", "Invalid value"),
    ],
)
def test_a_bad_file_is_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A settings file with a fault or an unknown name is refused, never half used."""
    Path("custody.toml").write_text(text)
    assert cli.run(["version"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_hosts(host: str) -> None:
    """These hosts are this machine alone."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "a.localhost"])  # noqa: S104 - refused
def test_other_hosts_are_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing binds or joins beyond loopback, and the message says why."""
    assert not is_loopback(host)
    for arguments in (
        ["scheduler", f"--host={host}"],
        ["serve", f"--host={host}"],
        ["prefill", f"--host={host}"],
        ["decode", f"--scheduler={host}:1"],
    ):
        assert cli.run(arguments) == 2
        said = capsys.readouterr().err
        assert "beyond loopback" in said or (not host and "is no address" in said)


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch", 0), ("threads", -1), ("plane", "carrier-pigeon"), ("scheduler", "127.0.0.1")],
)
def test_unusable_settings_are_refused_by_name(field: str, value: Any) -> None:
    """A setting that cannot be used raises with its name and value."""
    with pytest.raises(InvalidSetting) as caught:
        JoinSettings(**{field: value})
    assert (caught.value.name, caught.value.value) == (field, value)


def arguments_of(verb: str) -> list[Argument]:
    """The arguments that a verb's help shows."""
    with cli.app.app_stack([verb]):
        arguments = cli.app[verb].assemble_argument_collection(parse_docstring=True)
    return [argument for argument in arguments if argument.show]


def test_every_setting_says_what_it_is_for() -> None:
    """Each flag of the verbs that run parts has a help text of its own."""
    for verb in ("scheduler", "prefill", "serve"):
        for argument in arguments_of(verb):
            assert argument.parameter.help, (verb, argument.name)


def test_engine_settings_extend_what_joins() -> None:
    """A named engine has every setting of an engine process, once."""
    names = [field.name for field in attrs.fields(EngineSettings)]
    assert len(names) == len(set(names))
    assert {field.name for field in attrs.fields(JoinSettings)} < set(names)


# --- Verbs ------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is a line, or a document."""
    assert cli.run(["version"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("custody ")
    assert cli.run(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == line.split()[1]


def test_light_verbs_import_nothing_heavy() -> None:
    """The command line answers without torch and without gRPC until a verb needs them."""
    code = "import sys, transport.cli; print({'torch', 'grpc', 'jinja2', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["serve", "--nonsense"],
        ["log", "show"],
        ["generate", "hello", "--system", "x"],
        ["generate", "1", "--chat", "--token-ids"],
        ["generate", "one", "--token-ids"],
        ["generate", "x", "--top-k", "-1"],
        ["generate", "x", "--timeout", "-1"],
        ["chat", "--timeout", "0"],
        ["serve", "--prefill", "0"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What makes no sense exits with 2 and a sentence on standard error, nothing on output."""
    assert cli.run(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("custody: ")


@pytest.mark.parametrize("verb", [["status"], ["generate", "x"], ["log", "show", "r"]])
def test_nobody_there(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduler that cannot be reached is exit code 3, and names the address."""
    assert cli.run([*verb, "--scheduler", "127.0.0.1:1"]) == 3
    assert "cannot reach 127.0.0.1:1" in capsys.readouterr().err
    assert cli.run([*verb, "--scheduler", "127.0.0.1:1", "--json"]) == 3
    assert json.loads(capsys.readouterr().err)["error"]["exit_code"] == 3


def test_unforeseen_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that no verb may end with is a traceback, not an exit code."""
    assert cli._exit_code(Unreachable("a", "b")) == 3
    assert cli._exit_code(RuntimeError("a bug")) is None


# --- Logs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("event_type", strategies.EVENTS, ids=lambda t: t.__name__)
@given(data=st.data())
def test_every_event_has_a_sentence(event_type: type[Event], data: st.DataObject) -> None:
    """Whatever an event holds, one sentence on one line says it."""
    entry = data.draw(strategies.entries(strategies.EVENTS[event_type]))
    said = render.sentence(entry)
    assert said.endswith(".")
    assert type(entry.event).__name__ not in said.split()[:1] or isinstance(entry.event, Finished)


def test_log_show(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request's entries are shown in order, from a file as from a scheduler."""
    assert cli.run(["log", "show", handmade.ONE, "--log", str(good)]) == 0
    text = capsys.readouterr().out
    assert text.index("Admitted") < text.index("Verified") < text.index("Released")
    assert "from here" in text
    assert cli.run(["log", "show", handmade.TWO, "--log", str(good), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["event"] for line in lines] == [Rejected.__name__]


def test_log_show_of_nobody(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An id that the log does not hold is exit code 1."""
    assert cli.run(["log", "show", "nobody", "--log", str(good)]) == 1
    assert "no entry of request nobody" in capsys.readouterr().err
    assert cli.run(["log", "show", f"{handmade.ONE}9", "--log", str(good)]) == 1
    assert f"near it are {handmade.ONE}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "listed"),
    [
        ([], [1, 2]),
        (["--since", "2026-09-14"], [2]),
        (["--until", "2026-09-14"], [1]),
        (["--since", "2026-09-14T01:30:00"], [2]),
        (["--since", "2026-09-14T02:00:00.000001"], []),
        (["--since", "2026-09-14T03:59:00+0200", "--until", "2026-09-14T04:01:00+0200"], [2]),
        (["--until", "2026-09-13T22:00:00"], []),
        (["--since", "2026-09-13T22:30:00", "--until", "2026-09-14T02:00:00"], [1]),
    ],
    ids=str,
)
def test_ls_between_two_moments(
    flags: list[str], listed: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever ran between them, in UTC where nothing else is said: its last entry is not before
    the first moment, its first is before the second.
    """
    log = handmade.Log()
    names = [handmade.TWO, handmade.ONE]
    for name in names:
        log.add(handmade.rejected(), request=name)
    hours = {
        handmade.TWO: datetime(2026, 9, 13, 23, tzinfo=UTC),
        handmade.ONE: datetime(2026, 9, 14, 2, tzinfo=UTC),
    }
    entries = [
        (
            n,
            attrs.evolve(e, time_ns=int(hours[e.request].timestamp()) * 10**9)
            if e.request in hours
            else e,
        )
        for n, e in log.entries
    ]
    path = write_log(tmp_path / "x.jsonl", entries)
    assert cli.run(["log", "ls", "--log", str(path), "--json", *flags]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [names.index(line["requestId"]) + 1 for line in lines] == listed


def test_ls_between_no_moments(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An end before the beginning, and what is no time, are usage errors with both."""
    flags = ["--since", "2026-09-14", "--until", "2026-09-13"]
    assert cli.run(["log", "ls", "--log", str(good), *flags]) == 2
    assert "2026-09-13" in capsys.readouterr().err
    assert cli.run(["log", "ls", "--log", str(good), "--since", "yesterday"]) == 2
    assert "yesterday" in capsys.readouterr().err


def test_log_export(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An export of a log is equal to it, on standard output and in a file."""
    assert cli.run(["log", "export", "--log", str(good)]) == 0
    assert capsys.readouterr().out == good.read_text()
    output = tmp_path / "out.jsonl"
    assert cli.run(["log", "export", "--log", str(good), "--output", str(output)]) == 0
    said = capsys.readouterr()
    assert (output.read_text(), said.out) == (good.read_text(), "")


def test_an_export_never_makes_a_foreign_log_our_own(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another system logged stays marked as foreign, under its own name."""
    foreign = tmp_path / "foreign.jsonl"
    text = good.read_text().replace('"custody","foreign":false', '"other","foreign":true', 1)
    foreign.write_text(text)
    assert cli.run(["log", "export", "--log", str(foreign)]) == 0
    assert capsys.readouterr().out == text


# --- Replay -----------------------------------------------------------------------------------


def replayed(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, Any]]:
    code = cli.run(["replay", str(path)])
    text = capsys.readouterr().out
    assert cli.run(["replay", str(path), "--json"]) == code
    return code, text, json.loads(capsys.readouterr().out)


def test_replay_of_a_good_log(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good log is clean, exit code 0, and the totals say what was looked at."""
    code, text, document = replayed(good, capsys)
    entries = len(good.read_text().splitlines()) - 1
    assert (code, text.splitlines()[-1]) == (0, "clean")
    assert document["clean"] is True
    assert document["entries"] == entries
    assert document["requests"] == 2
    assert document["rules"] == len(RULES)
    assert document["evaluations"] > entries
    assert document["violations"] == []
    assert f"{entries} entries of 2 requests" in text


def bad_log(path: Path, **header: Any) -> Path:
    """A log in which decode gives its pages back before prefill has drained."""
    log = handmade.written(handmade.Log())
    entry = log.entry(Released(handmade.DESTINATION))
    write_log(path, [*log.entries, (len(log.entries) + 1, entry)])
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), **header}) + "\n" + rest)
    return path


def test_replay_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A violation is exit code 1, with position, request, rule, event, claim and reports."""
    path = bad_log(tmp_path / "bad.jsonl")
    code, text, document = replayed(path, capsys)
    assert (code, document["clean"]) == (1, False)
    (violation,) = document["violations"]
    rule = RULES[violation["rule"]]
    assert violation["position"] == document["entries"]
    assert violation["request"] == handmade.ONE
    assert violation["event"] == "Released"
    assert violation["claim"] == rule.sentence
    for part in (
        f"position {violation['position']}",
        handmade.ONE,
        rule.name,
        "Released by d0",
        violation["sentence"],
        rule.sentence,
        *rule.reports,
    ):
        assert part in text


def test_replay_judges_foreign_logs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another system's log is marked as foreign and judged by the same rules."""
    code, text, document = replayed(bad_log(tmp_path / "x", source="other"), capsys)
    assert (code, document["foreign"], len(document["violations"])) == (1, True, 1)
    assert text.startswith("foreign log of other")


def test_replay_of_a_part_gives_no_verdict(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log with something missing is exit code 5, whatever was found in the rest."""
    short = tmp_path / "short.jsonl"
    short.write_text("".join(good.read_text().splitlines(keepends=True)[:-1]))
    code, text, document = replayed(short, capsys)
    assert (code, document["complete"], document["clean"]) == (5, False, False)
    assert text.splitlines()[-1].startswith("incomplete")
    code, _, document = replayed(bad_log(tmp_path / "x", complete=False), capsys)
    assert (code, len(document["violations"])) == (5, 1)


def test_replay_says_what_it_did_not_evaluate(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown event is named and keeps the verdict from being clean."""
    path = tmp_path / "newer.jsonl"
    path.write_text(good.read_text().replace('"event":"Rejected"', '"event":"Evicted"'))
    code, text, document = replayed(path, capsys)
    assert (code, document["clean"]) == (5, False)
    assert [one["event"] for one in document["unknown"]] == ["Evicted"]
    assert "not evaluated" in text


@pytest.mark.parametrize("content", [None, b"", b"nonsense\n", b'{"format":"other"}\n'])
def test_replay_of_what_is_no_log(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read is exit code 5 and a sentence."""
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert cli.run(["replay", str(path)]) == 5
    said = capsys.readouterr()
    assert (said.out, said.err[:9]) == ("", "custody: ")


def test_replay_reads_standard_input(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-` is standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(good.read_bytes())))
    assert cli.run(["replay", "-"]) == 0
    assert capsys.readouterr().out.endswith("clean\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(good: Path, closed: str) -> None:
    """Who wants the exit code alone may close what it does not read: the verdict is the same."""
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *PROGRAM, "replay", str(good)]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("clean\n") != (" >&-" in f" {closed}")


@pytest.mark.parametrize("verb", [("export",), ("show", handmade.TWO)], ids=["lines", "table"])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, verb: tuple[str, ...]) -> None:
    """When the reader of a pipe goes away, nothing is complained about."""
    log = handmade.Log()
    log.add(handmade.rejected(), request=handmade.TWO)
    path = write_log(tmp_path / "log.jsonl", log.entries)
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [*PROGRAM, "log", *verb, "--log", str(path)]
    done = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_no_colour_off_a_terminal(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not printed on a terminal holds no control characters."""
    assert cli.run(["log", "show", handmade.ONE, "--log", str(good)]) == 0
    assert "\x1b" not in capsys.readouterr().out


FORGED = "[/x] :smile:\x1b[2J\u2028\u202e\ncustody: all is well"


def test_no_foreign_name_passes_for_a_line_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a name holds is neither a line of its own, nor a command to a terminal, nor markup."""
    log = handmade.Log().add(handmade.rejected(reason=FORGED), request=handmade.TWO)
    renamed = [
        (n, attrs.evolve(e, request=RequestId(FORGED)) if e.request == handmade.TWO else e)
        for n, e in log.entries
    ]
    path = write_log(tmp_path / "log.jsonl", renamed)
    for verb in (["log", "ls"], ["log", "show", FORGED], ["explain", FORGED]):
        assert cli.run([*verb, "--log", str(path)]) == 0
        said = capsys.readouterr().out
        assert not set(said) & set("\x1b\u2028\u202e")
        assert not [line for line in said.split("\n") if line.strip().startswith("custody:")]
        # A table breaks its lines at spaces.
        joined = " ".join(said.split())
        assert "[/x] :smile:\\u001b[2J\\u2028\\u202e\\u000acustody: all is well" in joined
    commands_shared.say_json({"reason": FORGED})
    assert json.loads(capsys.readouterr().out) == {"reason": FORGED}


def test_the_pages_name_every_verb_flag_and_exit_code() -> None:
    """`docs/cli.md` has every verb and exit code, and the reference beside it every flag."""
    docs = Path(__file__).parent.parent / "docs"
    text, reference = ((docs / name).read_text() for name in ("cli.md", "cli-reference.md"))
    for verb in cli.app:
        if verb.startswith("-"):
            continue
        inner = [one for one in cli.app[verb] if not one.startswith("-")]
        for name in [f"{verb} {one}" for one in inner] or [verb]:
            assert f"custody {name}" in text, name
            assert f"# custody {name}\n" in reference, name
    for verb in ("serve", "scheduler", "prefill", "decode", "generate", "chat", "status"):
        for argument in arguments_of(verb):
            for name in argument.names:
                assert not name.startswith("--") or name in reference, (verb, name)
    for code in (0, 1, 2, 3, 4, 5, 141):
        assert f"\n| {code} |" in text
