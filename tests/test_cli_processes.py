"""Claims about the command line as processes: signals, a terminal, logs, and an orderly end."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import pytest

from lifecycle.events import Aborted, Cause, Draining, Lost, LostCause
from tests.log_files import read_log
from tests.process_harness import judged, tiny_model
from transport.child import PROGRAM, Child
from transport.client import Client
from transport.pb.generation_pb2 import GenerateRequest, Sampling

pytestmark = pytest.mark.process

READY_SECONDS = 90.0
STOP_SECONDS = 60.0
WORDS = "a prompt that no log may ever hold"
LONG = ("--max-new-tokens", "1500", "--ignore-eos")


@attrs.frozen
class Served:
    """A running `serve` and where its log and its standard error go."""

    child: Child
    address: str
    folder: Path

    def run(self, *tokens: str, **options: Any) -> subprocess.Popen[str]:
        """Start a verb that calls it."""
        return subprocess.Popen(
            [*PROGRAM, *tokens, "--scheduler", self.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def lines(self) -> list[dict[str, Any]]:
        """What every process wrote to standard error; all of it is JSON Lines."""
        text = (self.folder / "errors").read_text()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model, served; every test here leaves it as it was."""
    folder = tmp_path_factory.mktemp("served")
    model = tiny_model(folder)
    arguments = ("serve", "--json", "--port=0", "--kv-memory=64MiB", f"--log={folder / 'log'}")
    child = Child("serve", (*arguments, "--model", str(model)), errors=folder / "errors")
    try:
        address = child.wait_event("ready", timeout=READY_SECONDS)["address"]
        yield Served(child, address, folder)
    finally:
        child.kill()


def last_cause(served: Served, request: str) -> Cause:
    """Why a request was aborted, once it was."""
    with Client(served.address) as client, closing(client.tail(follow=True)) as entries:
        for one in entries:
            if one.entry.request == request and isinstance(one.entry.event, Aborted):
                return one.entry.event.cause
    raise AssertionError


def test_the_demo_tells_its_story_as_json(served: Served, tmp_path: Path) -> None:
    """Each piece of the demo is a JSON object, and so is the complaint of one that fails."""
    model = str(served.folder / "tiny")
    command = [*PROGRAM, "demo", "--json", "--model", model, "--keep", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "the tiny model does not know the answer"
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"heading", "said", "checked", "answered"} == {line["event"] for line in lines}
    assert all(json.loads(line) for line in done.stderr.splitlines())
    assert "the answer holds 'Paris'" in json.loads(done.stderr.splitlines()[0])["error"]["message"]


# --- Signals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [
        ("generate", signal.SIGINT, 130),
        ("generate", signal.SIGTERM, 143),
        ("chat", signal.SIGINT, 130),
        ("chat", signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_verb_and_request(
    served: Served, verb: str, number: signal.Signals, code: int
) -> None:
    """A verb that is told to end cancels its request, says nothing more and has the signal's code."""
    with served.run(verb, *LONG, "--json", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("on and on")
        process.stdin.close()
        admission = json.loads(process.stdout.readline())["admission"]
        process.stdout.readline()
        process.send_signal(number)
        process.stdout.read()
        assert process.stderr is not None
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (code, "")
    assert last_cause(served, admission["requestId"]) is Cause.CLIENT_CANCEL


def test_following_the_log_ends_by_ctrl_c(served: Served) -> None:
    """A followed log goes on until it is interrupted, and shows what comes."""
    with served.run("log", "tail", "--follow", "--json") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        process.wait()
    assert (first["position"], process.returncode) == (1, 130)


def test_a_reader_that_leaves_ends_a_followed_log(served: Served) -> None:
    """`log tail --follow | head -1` ends with the next entry, and complains about nothing."""
    for verb in (("log", "tail", "--follow"), ("log", "tail", "--follow", "--json")):
        with served.run(*verb) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            with Client(served.address) as client:
                sampling = Sampling(new_tokens_max=2)
                list(client.generate(GenerateRequest(text="x", sampling=sampling)))
            assert process.stderr is not None
            complaint = process.stderr.read()
        assert (process.returncode, complaint) == (141, "")


# --- A terminal -------------------------------------------------------------------------------


class Terminal:
    """A verb whose standard streams are a terminal."""

    def __init__(self, command: Sequence[str], *, kind: str = "dumb") -> None:
        self._side, other = pty.openpty()
        environment = {**os.environ, "TERM": kind, "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env=environment,
        )
        os.close(other)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until this was shown, and forget what was shown up to it."""
        while text not in self.seen:
            ready, _, _ = select.select([self._side], [], [], READY_SECONDS)
            assert ready, f"{text!r} was never shown; shown was {self.seen!r}"
            self.seen += os.read(self._side, 4096).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._side)


def test_a_conversation_on_a_terminal(served: Served) -> None:
    """Turns build on each other, Ctrl-C stops an answer only, a refusal too, Ctrl-D ends it all."""
    flags = ("--scheduler", served.address, *LONG[:1], "4", "--ignore-eos")
    terminal = Terminal([*PROGRAM, "chat", *flags])
    try:
        terminal.wait_for("/reset")
        prompts = []
        for _ in range(2):
            terminal.wait_for("> ")
            terminal.type("hello\n")
            terminal.wait_for(" prompt tokens, 4 new")
        with Client(served.address) as client:
            for one in client.requests():
                (admitted, *_) = client.request_log(one.request_id)
                prompts.append(getattr(admitted.entry.event, "prompt_tokens", 0))
        first, second = prompts[-2:]
        assert second > first, "the second turn holds the first and its answer"
        terminal.wait_for("> ")
        terminal.type("/reset\n")
        terminal.wait_for("> ")
        terminal.type("x" * 3000 + "\n")
        terminal.wait_for("CONTEXT_LENGTH_EXCEEDED")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(STOP_SECONDS) == 0
    finally:
        terminal.close()


def test_ctrl_c_stops_an_answer_and_then_the_conversation(served: Served) -> None:
    """During an answer Ctrl-C cancels the request; at the prompt it ends the verb with 130."""
    terminal = Terminal([*PROGRAM, "chat", "--scheduler", served.address, *LONG])
    try:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        with Client(served.address) as client, closing(client.tail(follow=True)) as entries:
            known = {one.request_id for one in client.requests()}
            admitted = next(
                one.entry.request
                for one in entries
                if type(one.entry.event).__name__ == "Admitted"
                and not any(
                    isinstance(each.entry.event, Aborted)
                    or type(each.entry.event).__name__ == "Finished"
                    for each in client.request_log(one.entry.request)
                )
            )
            assert known
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.wait_for("stopped; this turn is forgotten")
        assert last_cause(served, admitted) is Cause.CLIENT_CANCEL
        terminal.wait_for("> ")
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.process.wait(STOP_SECONDS) == 130
    finally:
        terminal.close()


def test_waiting_and_loading_are_drawn_on_a_terminal(served: Served) -> None:
    """A spinner says what an answer waits for, and a bar how far a model is loaded."""
    flags = ("--scheduler", served.address)
    terminal = Terminal([*PROGRAM, "generate", "hello", *flags, *LONG[:1], "3"], kind="xterm")
    try:
        terminal.wait_for("waiting for admission")
        terminal.wait_for("prompt tokens, ")
        assert terminal.process.wait(STOP_SECONDS) == 0
    finally:
        terminal.close()
    command = ("prefill", "prefill-9", "--kv-memory=64MiB", "--model", str(served.folder / "tiny"))
    terminal = Terminal([*PROGRAM, *command, *flags], kind="xterm")
    try:
        terminal.wait_for("load")
        terminal.wait_for("prefill-9 ready")
        terminal.process.terminate()
        assert terminal.process.wait(STOP_SECONDS) == 0
    finally:
        terminal.close()


# --- Logs -------------------------------------------------------------------------------------


def test_logs_are_json_and_name_the_call(served: Served) -> None:
    """Off a terminal each line is JSON with a stable event; a call's lines bear its trace and id."""
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    done = served.run("generate", WORDS, "--max-new-tokens", "2", "--json")
    out, _ = done.communicate()
    request = json.loads(out.splitlines()[0])["admission"]["requestId"]
    with Client(served.address) as client:
        metadata = (("traceparent", f"00-{trace}-{span}-01"),)
        call = client._generation.Generate(GenerateRequest(text=WORDS), metadata=metadata)
        traced = next(call).admission.request_id
        for _ in call:
            pass
    lines = served.lines()
    for line in lines:
        assert line["event"].replace("_", "").isalpha(), line
        assert line["event"] == line["event"].lower()
        assert {"level", "timestamp", "part"} <= line.keys()
    of_call = [line for line in lines if line.get("request_id") == request]
    assert [line["event"] for line in of_call] == ["request_admitted", "request_answered"]
    assert "trace_id" not in of_call[0]
    assert {line["trace_id"] for line in lines if line.get("request_id") == traced} == {trace}
    assert {line["span_id"] for line in lines if line.get("request_id") == traced} == {span}
    (tenant,) = {line["tenant"] for line in lines if "tenant" in line}
    assert tenant != "default"
    assert WORDS not in (served.folder / "errors").read_text()
    engines = [line for line in lines if line["part"] == "decode-0" and "incarnation" in line]
    assert all(line["engine"] == "decode-0" for line in engines)


# --- The end; the last test, for nothing is served after it -----------------------------------


def test_engines_leave_while_the_scheduler_still_keeps_the_log(served: Served) -> None:
    """The log of an orderly end says of each engine that it left, and everybody ends with 0."""
    served.child.signal(signal.SIGTERM)
    assert served.child.wait(timeout=STOP_SECONDS) == 0
    log = read_log(served.folder / "log")
    assert log.complete
    judged(log.entries, "the command line")
    events = [one.entry.event for one in log.entries]
    left = {event.engine for event in events if isinstance(event, Lost)}
    assert left >= {"prefill-0", "decode-0"}
    assert {event.cause for event in events if isinstance(event, Lost)} == {LostCause.LEFT}
    assert {event.engine for event in events if isinstance(event, Draining)} == left
    said = [line["event"] for line in served.lines()]
    # An engine that was let go may be the last to speak: each process writes in its own time.
    behind = said[said.index("scheduler_stopped") + 1 :]
    assert set(behind) <= {"refused_by_scheduler"}
    reasons = [line["reason"] for line in served.lines() if line["event"] == "refused_by_scheduler"]
    assert reasons == ["ATTACH_REFUSAL_LEFT"] * 2
