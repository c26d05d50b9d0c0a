"""Claims about the verbs that call a scheduler: what each prints, and every exit code."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import attrs
import pytest
import structlog

from lifecycle.events import Rejected
from tests import handmade
from tests.serving import Deployment, ask, deployment
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.tiny import tiny_llama
from transport import cli
from transport.commands_config import settings_of
from transport.commands_shared import FAILED
from transport.pb.generation_pb2 import GenerateResponse

pytestmark = pytest.mark.anyio
NOBODY = "127.0.0.1:1"
UNKNOWN = "00000001-00000000ffff"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny", context=512)


@attrs.frozen
class Said:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Standard output as JSON Lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in a thread, as a process of its own would beside the scheduler."""

    async def run(*tokens: str, stdin: str = "") -> Said:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = await anyio.to_thread.run_sync(cli.run, tokens)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


async def answered(here: Deployment) -> str:
    """The id of a request that was answered."""
    steps = [step async for step in here.generation.Generate(ask())]
    return str(steps[0].admission.request_id)


# --- Exit codes -------------------------------------------------------------------------------

# Verb and arguments; {there} is a scheduler, {known} an answered request.
SERVED: list[tuple[int, str]] = [
    (0, "generate x --max-new-tokens 3 --scheduler {there}"),
    (0, "chat --max-new-tokens 3 --scheduler {there}"),
    (0, "cancel {known} --scheduler {there}"),
    (0, "status --scheduler {there}"),
    (4, "drain nobody --scheduler {there}"),
    (0, "health --scheduler {there}"),
    (0, "log ls --scheduler {there}"),
    (0, "log ls --phase closed --limit 0 --scheduler {there}"),
    (0, "log show {known} --scheduler {there}"),
    (0, "log tail --scheduler {there}"),
    (0, "log export --scheduler {there}"),
    (0, "metrics --scheduler {there}"),
    (4, "generate x --temperature -1 --scheduler {there}"),
    (4, "chat --max-new-tokens 9999 --scheduler {there}"),
    (4, f"cancel {UNKNOWN} --scheduler {{there}}"),
    (4, f"log show {UNKNOWN} --scheduler {{there}}"),
    (4, "log tail --from 999999 --scheduler {there}"),
    # The last, for nothing is served after it.
    (0, "drain decode --wait --scheduler {there}"),
]
ALONE: list[tuple[int, str]] = [
    (0, ""),
    (0, "--help"),
    (0, "log"),
    (0, "version"),
    (0, "config show"),
    (0, "config show prefill --threads 3"),
    (0, "completion bash"),
    (0, "completion zsh"),
    (0, "completion fish"),
    (0, "credentials new --role operator"),
    *((0, f"{verb} --help") for verb in ("serve", "scheduler", "prefill", "decode", "demo")),
    (0, "bench serve --help"),
    (0, "bench kernels --help"),
    (0, "bench weights --help"),
    (0, "bench forensics --entries 300"),
    (2, "bench forensics --entries 300 --parquet --memory-limit much"),
    (0, "fuzz --runs 1 --seed 1"),
    (2, "fuzz --runs 0"),
    (5, "fuzz --replay {good}.none"),
    (5, "fuzz --replay {good}"),
    (0, "replay {good}"),
    (0, "exposures {good}"),
    (0, f"explain {handmade.TWO} --log {{good}}"),
    (0, "timeline {good} --output {good}.html"),
    (0, "log verify {good}"),
    (0, "log schema"),
    (0, "log import {good} --output {good}.log"),
    (0, "diff {good} {good}"),
    (0, "slice {good} --output {good}.slices"),
    (0, "bundle {good} --output {good}.zip"),
    (5, "bundle verify {good}"),
    (5, "bundle verify {good}.none"),
    (2, "bundle verify {good} --key {good}.none"),
    (2, "bundle {good} --sign {good}.none"),
    (0, "log ls --log {good} --phase closed"),
    (0, "log export --log {good}"),
    (0, "metrics {good}"),
    (0, "metrics --json {good}"),
    (1, "log show nobody --log {good}"),
    (1, "scheduler --port 0 --model {model} --log {good}/log"),
    (2, "config show --nonsense"),
    (2, "config show serve --nonsense"),
    (2, "config show prefill --threads 0"),
    (2, "completion tcsh"),
    (2, "log tail --from 0"),
    (2, "log ls --limit -1"),
    (2, "log ls --phase asleep"),
    (2, "cancel"),
    (2, "drain"),
    (2, "drain decode --timeout 3"),
    (2, "drain decode --wait --timeout 0"),
    (5, "log ls --log {good}.none"),
    (2, "chat hello"),
    (2, "scheduler --model /nowhere --port 0"),
    (2, "serve --prefill 0"),
    (2, "credentials new --role visitor"),
    (5, "replay {good}.none"),
    (5, "exposures {good}.none"),
    (5, "explain x --log {good}.none"),
    (5, "timeline {good}.none"),
    (5, "log verify {good}.none"),
    (5, "log import {good}.none --output {good}.log"),
    (5, "log index {good}.none"),
    (2, "log index {good}"),
    (5, "log sign {good}.none --key {good}"),
    (2, "log sign {good} --key {good}"),
    (5, "diff {good} {good}.none"),
    (5, "slice {good}.none"),
    (5, "bundle {good}.none"),
    (1, "explain nobody --log {good}"),
    (5, "log export --log {good}.none"),
    (5, "metrics {good}.none"),
    (5, "simulate --trace {good}.none --preset incident-8k"),
    (5, "simulate --trace {good} --preset incident-8k"),
    (0, "fuzz --simulate --seed 3 --runs 1"),
]
CALLING = (
    *("generate x", "chat", f"cancel {UNKNOWN}", "drain decode --wait", "status", "health"),
    *("log ls", f"log show {UNKNOWN}", "log tail", "log export", "metrics"),
    f"explain {UNKNOWN}",
)


def verbs() -> list[str]:
    """Every verb, those of a group behind the group's name."""
    names = []
    for name in cli.app:
        if name.startswith("-"):
            continue
        inner = [one for one in cli.app[name] if not one.startswith("-")]
        names += [f"{name} {one}" for one in inner] or [name]
    return names


def test_every_verb_is_in_a_table_of_exit_codes() -> None:
    """No verb can be added whose exit codes nobody looks at."""
    told = [text for _, text in (*SERVED, *ALONE)]
    for verb in verbs():
        assert any(f"{text} ".startswith(f"{verb} ") for text in told), verb


@pytest.mark.parametrize("verb", verbs())
async def test_an_unknown_flag_is_a_usage_error(verb: str, run: Run) -> None:
    """Every verb refuses a flag that it does not have, with 2 and nothing on standard output."""
    said = await run(*verb.split(), "--no-such-flag")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("custody: ")


@pytest.mark.parametrize("verb", CALLING)
async def test_a_verb_that_finds_nobody_exits_with_3(verb: str, run: Run) -> None:
    """Every verb that calls a scheduler says when there is none."""
    said = await run(*verb.split(), "--scheduler", NOBODY, stdin="hello")
    assert (said.code, said.out) == (3, "")
    assert f"cannot reach {NOBODY}" in said.err


@pytest.fixture
def own_logging() -> Iterator[None]:
    """What a part sets up for a process of its own is taken back."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(("code", "text"), ALONE, ids=[text for _, text in ALONE])
def test_exit_codes_without_a_scheduler(
    code: int, text: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way in which a verb may end has its exit code."""
    log = handmade.Log().add(handmade.rejected(), request=handmade.TWO)
    good = write_log(tmp_path / "good.jsonl", log.entries)
    found = cli.run(text.format(good=good, model=model).split())
    said = capsys.readouterr()
    assert found == code, said.err
    if code > 1:
        assert said.out == ""
        # A part says it as the last line of its log.
        assert "\ncustody: " in f"\n{said.err}" or f'{{"event": "{FAILED}"' in said.err


async def test_exit_codes_with_a_scheduler(model: Path, run: Run) -> None:
    """Each verb that calls a scheduler succeeds with 0, and is refused with 4."""
    async with deployment(model) as here:
        known = await answered(here)
        for code, text in SERVED:
            words = text.format(there=here.address, known=known).split()
            said = await run(*words, stdin="hello")
            assert said.code == code, (text, said)
            if code == 4:
                assert said.out == ""
                # The scheduler's own lines stand there as well, for it runs in this process.
                assert "\ncustody: " in f"\n{said.err}"


async def test_json_is_json_for_every_verb_that_prints_data(model: Path, run: Run) -> None:
    """With --json every line of standard output is a JSON object, whatever the verb."""
    async with deployment(model) as here:
        known = await answered(here)
        texts = [text for code, text in SERVED if code == 0]
        texts += ["version", "config show", "credentials new --role operator"]
        for text in texts:
            words = text.format(there=here.address, known=known).split()
            said = await run(*words, "--json", stdin="hello")
            assert said.code == 0, (text, said)
            assert all(isinstance(line, dict) for line in said.lines), text
            assert said.lines or "--limit 0" in text, text


async def test_health_tells_by_its_exit_code(model: Path, run: Run) -> None:
    """Without engines a request has no chance, and `health` exits with 1."""
    async with deployment(model, engines=False) as here:
        said = await run("health", "--scheduler", here.address)
        assert (said.code, said.out) == (1, "not serving\n")


# --- Using ------------------------------------------------------------------------------------


async def test_cancel_ends_a_request(model: Path, run: Run) -> None:
    """The request's client is told, and a second cancel says that it was too late."""
    async with deployment(model, pause_at=1) as here:
        call = here.generation.Generate(ask(new=9))
        first = await call.read()
        assert isinstance(first, GenerateResponse)
        request = first.admission.request_id
        said = await run("cancel", request, "--scheduler", here.address)
        assert (said.code, said.out) == (0, f"{request} is cancelled\n")
        again = await run("cancel", request, "--scheduler", here.address, "--json")
        assert again.lines == [{"request": request, "cancelled": False}]


async def test_chat_sends_the_message_through_the_template(model: Path, run: Run) -> None:
    """A turn from standard input is one conversation, with the system message before it."""
    async with deployment(model) as here:
        common = ("--max-new-tokens", "3", "--scheduler", here.address, "--json")
        bare_turn = await run("chat", *common, stdin="hello")
        longer = await run("chat", "--system", "be brief", *common, stdin="hello")
        plain = await run("generate", "hello", *common)
        counts = [
            int(said.lines[0]["admission"]["promptTokens"]) for said in (plain, bare_turn, longer)
        ]
        assert counts == sorted(set(counts)), counts
        assert [list(line) for line in longer.lines][-1] == ["outcome"]


async def test_chat_without_a_message_is_a_usage_error(model: Path, run: Run) -> None:
    """Nothing on standard input is no conversation."""
    async with deployment(model) as here:
        said = await run("chat", "--scheduler", here.address, stdin=" \n")
        assert said.code == 2


# --- The log ----------------------------------------------------------------------------------


async def test_ls_lists_by_phase_and_limit(model: Path, run: Run) -> None:
    """Requests are listed in the order of their first entries, filtered and cut as asked."""
    async with deployment(model) as here:
        where = ("--scheduler", here.address)
        first, second = await answered(here), await answered(here)
        await run("generate", "x", "--temperature", "-1", *where)
        await here.tail_until("released", request=second)
        every = await run("log", "ls", *where, "--json")
        assert [line["requestId"] for line in every.lines][:2] == [first, second]
        rejected = await run("log", "ls", "--phase", "rejected", *where, "--json")
        assert [line["outcome"] for line in rejected.lines] == [Rejected.__name__]
        one = await run("log", "ls", "--limit", "1", *where)
        assert one.out.startswith(first)
        assert [line[:1] for line in one.out.splitlines()] == [first[:1], " "]


async def test_tail_begins_where_it_is_told(model: Path, run: Run) -> None:
    """Every entry from a position on is a line, in order, in both forms."""
    async with deployment(model) as here:
        await answered(here)
        where = ("--scheduler", here.address)
        every = (await run("log", "tail", *where, "--json")).lines
        assert [line["position"] for line in every] == list(range(1, len(every) + 1))
        later = await run("log", "tail", "--from", "4", *where)
        assert len(later.out.splitlines()) >= len(every) - 3
        assert later.out.startswith("4 ")
        assert every[3]["event"] in later.out.splitlines()[0]


# --- Settings, completion ---------------------------------------------------------------------


async def test_config_show_names_each_origin(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value comes from a flag, a variable, a file's key or the default, and is told so."""
    file = tmp_path / "given.toml"
    file.write_text("port = 1\nkv-memory = '1GiB'\n")
    monkeypatch.setenv("CUSTODY_THREADS", "3")
    monkeypatch.setenv("CUSTODY_PORT", "2")
    said = await run("--config", str(file), "config", "show", "serve", "--batch", "5", "--json")
    (document,) = said.lines
    found = {one["name"]: one for one in document["settings"]}

    def origin(name: str) -> tuple[Any, str, str]:
        one = found[name]
        return one["value"], one["origin"], one["source"]

    assert origin("batch") == (5, "flag", "--batch")
    assert origin("threads") == (3, "environment", "CUSTODY_THREADS")
    assert origin("port") == (2, "environment", "CUSTODY_PORT")
    assert origin("kv-memory") == ("1GiB", "file", f"{file}: kv-memory")
    assert origin("slots") == (256, "default", "")
    text = await run("--config", str(file), "config", "show", "serve")
    assert f"kv-memory           = 1GiB  (file {file}: kv-memory)\n" in text.out


def test_the_file_may_be_named_by_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUSTODY_CONFIG is the variable of --config."""
    file = tmp_path / "given.toml"
    file.write_text("port = 7")
    monkeypatch.setenv("CUSTODY_CONFIG", str(file))
    assert cli.run(["config", "show"]) == 0
    assert "port                = 7" in capsys.readouterr().out


def test_every_setting_is_shown() -> None:
    """No flag of a verb that runs parts is left out."""
    for verb in ("serve", "scheduler", "prefill", "decode"):
        with cli.app.app_stack([verb]):
            arguments = cli.app[verb].assemble_argument_collection(parse_docstring=True)
        flags = {a.name.removeprefix("--") for a in arguments if a.show and a.name[:2] == "--"}
        assert {one.name for one in settings_of(verb)} == flags - {"json", "config"}, verb


def test_the_bash_completion_completes(tmp_path: Path) -> None:
    """A shell that reads the script offers verbs that begin as typed, and a verb's flags."""
    script = tmp_path / "completion"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "transport.cli", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
    )
    script.write_text(done.stdout)

    def offered(*words: str) -> set[str]:
        typed = " ".join(f"'{word}'" for word in words)
        code = (
            f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; "
            "_custody; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        shell = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return set(shell.stdout.split())

    assert offered("custody", "ch") == {"chat"}
    assert {"ls", "show", "tail", "export"} <= offered("custody", "log", "")
    assert "--follow" in offered("custody", "log", "tail", "--f")
