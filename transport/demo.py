"""The demo: one answer, one refusal, and the log that shows why either may be trusted.

Owns: the story, and every claim in it that is checked while it is told.
Must not know: anything that an operator could not know; it only starts `serve` and calls it.
"""

from __future__ import annotations

import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import attrs

from engine.store import Stored
from lifecycle.ends import Ends
from lifecycle.events import Admitted, Rejected, Released
from lifecycle.history import History
from lifecycle.replay import Replayer
from lifecycle.wording import counted
from transport.child import Child, ChildFailed
from transport.client import Client, Refused, Unreachable
from transport.commands_shared import EXIT_FAILED, EXIT_OK, UsageError, complain, note
from transport.demo_story import Differs, Story
from transport.forensics_read import open_capture
from transport.pb.admin_pb2 import GetStatusResponse
from transport.pb.generation_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    Outcome,
    Sampling,
    TokenIds,
)
from transport.replay_text import replay_lines
from transport.replaying import replayed
from transport.status_text import status_lines

KV_MEMORY = "64MiB"
QUESTION = "What is the capital of France?"
ANSWER_HOLDS = "Paris"
MESSAGES_MIN = 5
NEW_TOKENS = 32
START_SECONDS = 300.0
ANSWER_SECONDS = 120.0
SETTLE_SECONDS = 20.0
STOP_SECONDS = 90.0
POLL_SECONDS = 0.1


@attrs.frozen
class Served:
    """The running parts: their common supervisor, the address, and process ids by name."""

    supervisor: Child
    address: str
    processes: dict[str, int]


def run_demo(*, model: str | None, keep: Path | None, json: bool = False) -> int:
    """Tell the story; 0 when every claim in it held."""
    story = Story(json=json)
    with ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="custody-demo-")))
        else:
            folder = keep
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise UsageError(f"{folder} is not empty; the demo wants a log of its own")
        try:
            _tell(story, stack, folder, model)
        except (Differs, ChildFailed, Refused, Unreachable) as error:
            complain(DemoFailed(error), code=EXIT_FAILED, json=json)
            if not json:
                _print_errors(folder)
            return EXIT_FAILED
    return EXIT_OK


class DemoFailed(Exception):
    """What keeps the demo from its end."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the demo failed: {error}")


def _print_errors(folder: Path) -> None:
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]:
            note(f"  {path.name}: {line}")


def _tell(story: Story, stack: ExitStack, folder: Path, model: str | None) -> None:
    log = folder / "log"
    served = _start(story, stack, folder, log, model)
    with Client(served.address) as client:
        context = _show_status(story, client, served)
        answered = _answer(story, client)
        _show_log(story, client, answered)
        _refusal(story, client, context)
        _whole_again(story, client)
    _stop(story, served)
    _replay(story, log)


def _start(story: Story, stack: ExitStack, folder: Path, log: Path, model: str | None) -> Served:
    story.heading(
        f"Starting a scheduler, a prefill and a decode engine, {KV_MEMORY} of KV memory each"
    )
    arguments = ["serve", "--json", "--port", "0", "--kv-memory", KV_MEMORY, "--log", str(log)]
    if model is not None:
        arguments += ["--model", model]
    supervisor = Child("serve", arguments, errors=folder / "serve.log")
    stack.callback(supervisor.kill)
    processes: dict[str, int] = {}
    for _ in range(3):
        said = supervisor.wait_event("started", timeout=START_SECONDS)
        processes[said["part"]] = said["process_id"]
        story.say(f"{said['part']}: process {said['process_id']}")
    story.say("loading the model (the first time also converts it) ...")
    ready = supervisor.wait_event("ready", timeout=START_SECONDS)
    story.say(f"ready at {ready['address']}")
    return Served(supervisor, ready["address"], processes)


def _show_status(story: Story, client: Client, served: Served) -> int:
    status = client.status()
    story.say_all(status_lines(status))
    ids = {status.process_id, *(r.process_id for e in status.engines for r in e.ranks)}
    story.check(
        f"the three parts are three processes: {', '.join(str(one) for one in sorted(ids))}",
        len(ids) == 3 and ids == set(served.processes.values()),
    )
    return status.context_tokens


def _answer(story: Story, client: Client) -> str:
    story.heading(f'Asking "{QUESTION}"')
    request = GenerateRequest(
        chat=ChatMessages(messages=[ChatMessage(role="user", content=QUESTION)]),
        sampling=Sampling(temperature=0.0, new_tokens_max=NEW_TOKENS),
    )
    text, messages, name = "", 0, ""
    outcome: Outcome | None = None
    story.piece("  ")
    for response in client.generate(request, timeout=ANSWER_SECONDS):
        messages += 1
        if response.HasField("admission"):
            name = response.admission.request_id
        elif response.HasField("chunk"):
            text += response.chunk.text
            story.piece(response.chunk.text)
        else:
            outcome = response.outcome
    story.answered(text)
    if outcome is None:
        raise Differs("the answer ends with its outcome")
    story.say(
        f"request {name}: {counted(outcome.usage.prompt_tokens, 'prompt token')}, "
        f"{outcome.usage.new_tokens} new, the first after "
        f"{outcome.time_to_first_token_ns / 1e9:.2f} s"
    )
    story.check(
        f"the answer came in {counted(messages, 'message')}, at least {MESSAGES_MIN}",
        messages >= MESSAGES_MIN,
    )
    story.check(f"the answer holds {ANSWER_HOLDS!r}", ANSWER_HOLDS in text)
    return name


def _settled_log(client: Client, request: str) -> tuple[Stored, ...]:
    """The request's log once every grant in it is settled; a request may close after its answer."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        entries = client.request_log(request)
        history = History(crossguards=False)
        for one in entries:
            history.apply(one.entry)
        if entries and history.state(entries[0].entry.request).phase.value in (
            "closed",
            "rejected",
        ):
            return entries
        if time.monotonic() > until:
            raise Differs(f"request {request} closes within {SETTLE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def _show_log(story: Story, client: Client, request: str) -> None:
    story.heading(
        "The log of that request: who owned which pages, and why the answer may be trusted"
    )
    entries = _settled_log(client, request)
    story.log(entries)
    story.check(
        "the log runs from Admitted to Released",
        isinstance(entries[0].entry.event, Admitted)
        and isinstance(entries[-1].entry.event, Released),
    )


def _refusal(story: Story, client: Client, context: int) -> None:
    tokens = context + 1
    story.heading(f"Asking with a prompt of {counted(tokens, 'token')}, which can never fit")
    before = _free_pages(client.status())
    request = GenerateRequest(token_ids=TokenIds(ids=[1] * tokens))
    started = time.monotonic()
    try:
        for _ in client.generate(request, timeout=ANSWER_SECONDS):
            raise Differs("an over-long prompt is refused")
    except Refused as error:
        refused = error
    milliseconds = (time.monotonic() - started) * 1e3
    story.say(f"refused in {milliseconds:.1f} ms: {refused.code} {refused.reason}")
    story.say(refused.message)
    for name, value in refused.numbers.items():
        story.say(f"{name} = {value}")
    story.check(
        "the status is the one for a prompt over the context",
        (refused.code, refused.reason) == ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
    )
    entries = client.request_log(refused.numbers["request_id"])
    story.log(entries)
    story.check(
        "its whole log is one Rejected event, so it owns nothing",
        [type(one.entry.event) for one in entries] == [Rejected],
    )
    story.check("no engine's free pages changed", before == _free_pages(client.status()))


def _free_pages(status: GetStatusResponse) -> dict[str, int]:
    return {engine.engine: rank.pages.free for engine in status.engines for rank in engine.ranks}


def _whole_again(story: Story, client: Client) -> None:
    story.heading("The pools are whole again")
    until = time.monotonic() + SETTLE_SECONDS
    # An engine reports its free list with its next sign of life.
    while not _whole(status := client.status()) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    folded = History()
    for one in client.tail():
        folded.apply(one.entry)
    free: dict[str, int] = {
        party.engine: account.free_pages for party, account in folded.ledger.items()
    }
    for engine in status.engines:
        for rank in engine.ranks:
            story.check(
                f"{engine.engine}: free list {rank.counters.pages_free}, "
                f"ledger {rank.pages.free}, fold of the log {free.get(engine.engine)}, "
                f"capacity {rank.pages.capacity}",
                len(
                    {
                        rank.counters.pages_free,
                        rank.pages.free,
                        free.get(engine.engine),
                        rank.pages.capacity,
                    }
                )
                == 1,
            )
            story.check(
                f"{engine.engine}: no header mismatch and no unchecked read",
                rank.counters.header_mismatches == rank.counters.header_reads_unchecked == 0,
            )


def _whole(status: GetStatusResponse) -> bool:
    return all(
        rank.counters.pages_free == rank.pages.free == rank.pages.capacity
        for engine in status.engines
        for rank in engine.ranks
    )


def _stop(story: Story, served: Served) -> None:
    story.heading("Shutting down by SIGTERM")
    served.supervisor.signal(signal.SIGTERM)
    code = served.supervisor.wait(timeout=STOP_SECONDS)
    story.check(f"everything ended in order, exit code {code}", code == 0)


def _replay(story: Story, log: Path) -> None:
    story.heading("Replaying the log's files against every rule")
    with ExitStack() as stack:
        capture = open_capture(log, stack)
        replayer = Replayer(foreign=capture.foreign, snapshot=capture.snapshot)
        ends = Ends(replayer)
        replayed(capture, replayer, ends)
        report = replayer.report(whole=capture.whole)
        lines = tuple(replay_lines(capture, report, report.findings, ends))
    story.say_all(lines)
    if lines[-1] != "clean":
        raise Differs("the log replays clean")
