"""The demo: one answer, one refusal, and the log that shows why either may be trusted.

Owns: the story, and every claim in it that is checked while it is told.
Must not know: anything that an operator could not know; it only starts `serve` and calls it.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from engine.store import Stored
from lifecycle.events import Admitted, Rejected, Released
from lifecycle.history import History
from lifecycle.replay import replay
from transport import render
from transport.child import Child, ChildFailed
from transport.client import Client, Refused, Unreachable
from transport.commands_shared import EXIT_FAILED, EXIT_OK, console, note, say
from transport.jsonlines import read_log
from transport.pb.admin_pb2 import GetStatusResponse
from transport.pb.generation_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    Outcome,
    Sampling,
    TokenIds,
)

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


class Differs(Exception):
    """Something that the demo claims is not so."""


def check(claim: str, holds: bool) -> None:
    """Say a claim that holds; raise for one that does not."""
    if not holds:
        raise Differs(claim)
    say(f"  checked: {claim}")


def heading(text: str) -> None:
    say()
    say(f"--- {text}")


@attrs.frozen
class Served:
    """The running parts: their common supervisor, the address, and process ids by name."""

    supervisor: Child
    address: str
    processes: dict[str, int]


def run_demo(*, model: str | None, keep: Path | None) -> int:
    """Tell the story; 0 when every claim in it held."""
    with ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="custody-demo-")))
        else:
            folder = keep
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                note(f"custody: {folder} is not empty; the demo wants a log of its own")
                return EXIT_FAILED
        try:
            _tell(stack, folder, model)
        except (Differs, ChildFailed, Refused, Unreachable) as error:
            note(f"custody: the demo failed: {error}")
            _print_errors(folder)
            return EXIT_FAILED
    return EXIT_OK


def _print_errors(folder: Path) -> None:
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]:
            note(f"  {path.name}: {line}")


def _tell(stack: ExitStack, folder: Path, model: str | None) -> None:
    log = folder / "log"
    served = _start(stack, folder, log, model)
    with Client(served.address) as client:
        context = _show_status(client, served)
        answered = _answer(client)
        _show_log(client, answered)
        _refusal(client, context)
        _whole_again(client)
    _stop(served)
    _replay(log)


def _start(stack: ExitStack, folder: Path, log: Path, model: str | None) -> Served:
    heading(f"Starting a scheduler, a prefill and a decode engine, {KV_MEMORY} of KV memory each")
    arguments = ["serve", "--json", "--port", "0", "--kv-memory", KV_MEMORY, "--log", str(log)]
    if model is not None:
        arguments += ["--model", model]
    supervisor = Child("serve", arguments, errors=folder / "serve.log")
    stack.callback(supervisor.kill)
    processes: dict[str, int] = {}
    for _ in range(3):
        said = supervisor.wait_event("started", timeout=START_SECONDS)
        processes[said["part"]] = said["process_id"]
        say(f"  {said['part']}: process {said['process_id']}")
    say("  loading the model (the first time also converts it) ...")
    ready = supervisor.wait_event("ready", timeout=START_SECONDS)
    say(f"  ready at {ready['address']}")
    return Served(supervisor, ready["address"], processes)


def _show_status(client: Client, served: Served) -> int:
    status = client.status()
    for line in render.status_lines(status):
        say(f"  {line}")
    ids = {status.process_id, *(r.process_id for e in status.engines for r in e.ranks)}
    check(
        f"the three parts are three processes: {', '.join(str(one) for one in sorted(ids))}",
        len(ids) == 3 and ids == set(served.processes.values()),
    )
    return status.context_tokens


def _answer(client: Client) -> str:
    heading(f'Asking "{QUESTION}"')
    request = GenerateRequest(
        chat=ChatMessages(messages=[ChatMessage(role="user", content=QUESTION)]),
        sampling=Sampling(temperature=0.0, new_tokens_max=NEW_TOKENS),
    )
    text, messages, name = "", 0, ""
    outcome: Outcome | None = None
    sys.stdout.write("  ")
    for response in client.generate(request, timeout=ANSWER_SECONDS):
        messages += 1
        if response.HasField("admission"):
            name = response.admission.request_id
        elif response.HasField("chunk"):
            text += response.chunk.text
            sys.stdout.write(response.chunk.text)
            sys.stdout.flush()
        else:
            outcome = response.outcome
    say()
    if outcome is None:
        raise Differs("the answer ends with its outcome")
    say(
        f"  request {name}: {outcome.usage.prompt_tokens} prompt tokens, "
        f"{outcome.usage.new_tokens} new, the first after "
        f"{outcome.time_to_first_token_ns / 1e9:.2f} s"
    )
    check(
        f"the answer came in {messages} messages, at least {MESSAGES_MIN}", messages >= MESSAGES_MIN
    )
    check(f"the answer holds {ANSWER_HOLDS!r}", ANSWER_HOLDS in text)
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


def _show_log(client: Client, request: str) -> None:
    heading("The log of that request: who owned which pages, and why the answer may be trusted")
    entries = _settled_log(client, request)
    console().print(render.log_table(entries))
    check(
        "the log runs from Admitted to Released",
        isinstance(entries[0].entry.event, Admitted)
        and isinstance(entries[-1].entry.event, Released),
    )


def _refusal(client: Client, context: int) -> None:
    tokens = context + 1
    heading(f"Asking with a prompt of {tokens} tokens, which can never fit")
    before = _free_pages(client.status())
    request = GenerateRequest(token_ids=TokenIds(ids=[1] * tokens))
    started = time.monotonic()
    try:
        for _ in client.generate(request, timeout=ANSWER_SECONDS):
            raise Differs("an over-long prompt is refused")
    except Refused as error:
        refused = error
    milliseconds = (time.monotonic() - started) * 1e3
    say(f"  refused in {milliseconds:.1f} ms: {refused.code} {refused.reason}")
    say(f"  {refused.message}")
    for name, value in refused.numbers.items():
        say(f"    {name} = {value}")
    check(
        "the status is the one for a prompt over the context",
        (refused.code, refused.reason) == ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
    )
    entries = client.request_log(refused.numbers["request_id"])
    console().print(render.log_table(entries))
    check(
        "its whole log is one Rejected event, so it owns nothing",
        [type(one.entry.event) for one in entries] == [Rejected],
    )
    check("no engine's free pages changed", before == _free_pages(client.status()))


def _free_pages(status: GetStatusResponse) -> dict[str, int]:
    return {engine.engine: rank.pages.free for engine in status.engines for rank in engine.ranks}


def _whole_again(client: Client) -> None:
    heading("The pools are whole again")
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
            check(
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
            check(
                f"{engine.engine}: no header mismatch and no unchecked read",
                rank.counters.header_mismatches == rank.counters.header_reads_unchecked == 0,
            )


def _whole(status: GetStatusResponse) -> bool:
    return all(
        rank.counters.pages_free == rank.pages.free == rank.pages.capacity
        for engine in status.engines
        for rank in engine.ranks
    )


def _stop(served: Served) -> None:
    heading("Shutting down by SIGTERM")
    served.supervisor.signal(signal.SIGTERM)
    code = served.supervisor.wait(timeout=STOP_SECONDS)
    check(f"everything ended in order, exit code {code}", code == 0)


def _replay(log: Path) -> None:
    heading("Replaying the log's files against every rule")
    file = read_log(log)
    report = replay((one.position, one.entry) for one in file.entries)
    lines: Sequence[str] = tuple(render.replay_lines(file, report))
    for line in lines:
        say(f"  {line}")
    if lines[-1] != "clean":
        raise Differs("the log replays clean")
