"""Claims about real processes: a real model, both data planes, faults, and orderly ends.

Every deployment's log is replayed when the deployment has ended, and must be whole and clean.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    Cause,
    Drained,
    Event,
    Finished,
    Lost,
    Proof,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Verified,
)
from tests.log_files import read_log
from tests.process_harness import (
    READY_SECONDS,
    STOP_SECONDS,
    Deployment,
    chat_request,
    collect,
    ids_request,
    judged,
    text_request,
    tiny_model,
)
from transport import cli
from transport.child import PROGRAM, Child
from transport.client import Client, Refused
from transport.pb.generation_pb2 import GenerateRequest

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

GRPCURL = Path(sys.executable).with_name("grpcurl")
GRPCURL_INVALID_ARGUMENT = 64 + 3
FLIPPING = (sys.executable, "-m", "tests.flipping_decode")
ENGINES = ("prefill-0", "decode-0")
TINY_FLAGS = ("--kv-memory=4MiB", "--page-tokens=16")

# Greedy answers of the real model whose two best logits are at least 0.05 apart at every token
# (0.07 to 0.97), which is hundreds of times what the order of sums can change.
WIDE = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the capital of Japan?",
    "What is the capital of Germany?",
    "How many days are in a week?",
    "Name the first month of the year.",
    "What is the opposite of hot?",
    "Who wrote Romeo and Juliet?",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    return tiny_model(folder)


@pytest.fixture(scope="module")
def real(folder: Path, model_path: Path) -> Iterator[Deployment]:
    with Deployment(folder / "real", model_path, engine=("--kv-memory=128MiB",)) as deployment:
        deployment.start_engines(*ENGINES)
        yield deployment


@pytest.fixture(scope="module")
def small(folder: Path, tiny: Path) -> Iterator[Deployment]:
    with Deployment(folder / "small", tiny, engine=TINY_FLAGS) as deployment:
        deployment.start_engines(*ENGINES)
        yield deployment


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a shared deployment holds after each test is settled, and its log so far is clean."""
    yield
    for name in ("real", "small"):
        if name in request.fixturenames:
            deployment = request.getfixturevalue(name)
            deployment.wait_whole()
            deployment.replayed_live()


def sampled(prompt: str, seed: int, new_tokens: int = 40) -> GenerateRequest:
    """An answer that differs from seed to seed and is the same for the same seed."""
    return text_request(prompt, new_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def read_out(stream: Iterator[object]) -> None:
    """Read a stream to its end, whatever it holds."""
    for _ in stream:
        pass


# --- A real model -----------------------------------------------------------------------------


@pytest.mark.model
def test_every_part_is_a_process_of_its_own(real: Deployment) -> None:
    """Scheduler, prefill and decode have different process ids, and the status names them."""
    status = real.client.status()
    ids = {engine.engine: engine.ranks[0].process_id for engine in status.engines}
    started = {name: child.process_id for name, child in real.children.items()}
    assert {**ids, "scheduler": status.process_id} == started
    assert len(set(started.values())) == 3


@pytest.mark.model
def test_a_factual_question_is_answered_as_a_stream(real: Deployment) -> None:
    """The answer is right, comes in at least five messages, and its log says why it is trusted."""
    answer = real.ask(chat_request("What is the capital of France?"))
    assert answer.text == "The capital of France is Paris."
    assert answer.messages >= 5
    real.wait_closed()
    events = real.events(answer.request)
    order = [type(event) for event in events]
    assert isinstance(events[0], Admitted)
    assert isinstance(events[-1], Released)
    assert order.index(Drained) < order.index(Verified) < order.index(Finished)
    finished = next(event for event in events if isinstance(event, Finished))
    assert finished.reads_unchecked == 0
    assert finished.reads_checked > 0


@pytest.mark.model
def test_decode_computes_one_prompt_token_a_request(real: Deployment) -> None:
    """Prefill computes tokens 0 to n-2, decode the last alone, and every read is a checked one.

    The engines' counters equal what the log says, over everything that this deployment did.
    """
    for prompt in ("A b c d.", "One two " * 30):
        real.ask(text_request(prompt, 3))
    real.wait_closed()
    events = [one.entry.event for one in real.client.tail()]
    prompts = [event.prompt_tokens for event in events if isinstance(event, Admitted)]
    assert max(prompts) > 32
    reads = sum(event.reads_checked for event in events if isinstance(event, Finished))

    def agree() -> bool:
        status = real.client.status()
        counters = {engine.engine: engine.ranks[0].counters for engine in status.engines}
        return (
            counters["prefill-0"].prompt_tokens_computed == sum(prompts) - len(prompts)
            and counters["decode-0"].prompt_tokens_computed == len(prompts)
            and counters["decode-0"].header_reads_checked == reads
        )

    real.wait_until("counters and log agree", agree)


@pytest.mark.model
def test_concurrent_requests_answer_as_if_alone(real: Deployment) -> None:
    """Eight requests at once give the greedy text that each gives alone."""
    requests = [chat_request(prompt, 24) for prompt in WIDE]
    assert len(requests) == 8
    alone = [real.ask(request) for request in requests]
    together = real.ask_all(requests)
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert len({answer.text for answer in alone}) == 8


# --- Refusals ---------------------------------------------------------------------------------


def test_a_prompt_that_cannot_fit_is_one_event(small: Deployment) -> None:
    """An over-long prompt is refused by status with the numbers compared, and owns nothing."""
    status = small.client.status()
    tokens = status.context_tokens + 1
    with pytest.raises(Refused) as caught:
        small.ask(ids_request([5] * tokens))
    refused = caught.value
    assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED")
    assert refused.numbers["prompt_tokens"] == str(tokens)
    assert refused.numbers["context_tokens"] == str(status.context_tokens)
    assert [type(event) for event in small.events(refused.numbers["request_id"])] == [Rejected]


def test_grpcurl_lists_calls_and_sees_details(small: Deployment) -> None:
    """A client that is not ours finds the service by reflection, calls it, and sees why not."""

    def grpcurl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(GRPCURL), "-plaintext", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    listed = grpcurl(small.address, "list")
    assert listed.returncode == 0, listed.stderr
    assert {"custody.v1.GenerationService", "grpc.health.v1.Health"} <= set(listed.stdout.split())
    method = "custody.v1.GenerationService/Generate"
    body = {"text": "hello", "sampling": {"newTokensMax": 3, "temperature": 0}}
    called = grpcurl("-d", json.dumps(body), small.address, method)
    assert called.returncode == 0, called.stderr
    assert called.stdout.index('"admission"') < called.stdout.index('"outcome"')
    body = {"tokenIds": {"ids": [5] * 3000}}
    refused = grpcurl("-d", json.dumps(body), small.address, method)
    assert refused.returncode == GRPCURL_INVALID_ARGUMENT
    assert "google.rpc.ErrorInfo" in refused.stderr
    assert "CONTEXT_LENGTH_EXCEEDED" in refused.stderr


def test_the_command_line_on_a_running_deployment(
    small: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """generate, status, log show, log export and replay agree with what the client sees."""
    at = ["--scheduler", small.address]
    wanted = small.ask(text_request("abc", 5)).text
    greedy = ["--max-new-tokens", "5", "--temperature", "0"]
    assert cli.run(["generate", "abc", *greedy, *at]) == 0
    assert capsys.readouterr().out == wanted + "\n"
    assert cli.run(["generate", "abc", *greedy, *at, "--json"]) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(step["chunk"]["text"] for step in steps if "chunk" in step) == wanted
    assert list(steps[-1]) == ["outcome"]
    assert cli.run(["generate", "5 " * 3000, "--token-ids", *at]) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert "CONTEXT_LENGTH_EXCEEDED" in said.err
    assert "prompt_tokens = 3000" in said.err
    assert cli.run(["status", *at]) == 0
    assert "decode-0: decode, attached" in capsys.readouterr().out
    small.wait_closed()
    assert cli.run(["log", "show", steps[0]["admission"]["requestId"], *at, "--json"]) == 0
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert (events[0], events[-1]) == ("Admitted", "Released")
    exported = tmp_path / "log.jsonl"
    assert cli.run(["log", "export", *at, "--output", str(exported)]) == 0
    assert cli.run(["replay", str(exported)]) == 0
    assert capsys.readouterr().out.endswith("clean\n")


# --- Endings while every part is alive --------------------------------------------------------


def test_a_client_that_goes_away_owns_nothing(small: Deployment) -> None:
    """A stream left early ends its request, and every page comes home."""
    stream = small.client.generate(sampled("to be continued", 1, 1500))
    request = next(stream).admission.request_id
    next(stream)
    stream.close()
    small.wait_closed()
    aborted = next(e for e in small.events(request) if isinstance(e, Aborted))
    assert aborted.cause in (Cause.CLIENT_CANCEL, Cause.CLIENT_GONE)


def test_a_request_can_be_cancelled_by_its_id(small: Deployment) -> None:
    """Cancellation from outside ends the stream with CANCELLED, once."""
    stream = small.client.generate(sampled("to be cancelled", 1, 1500))
    request = next(stream).admission.request_id
    next(stream)
    assert small.client.cancel(request)
    with pytest.raises(Refused, match="CANCELLED"):
        read_out(stream)
    assert not small.client.cancel(request)


def test_a_deadline_ends_a_request(small: Deployment) -> None:
    """A deadline that passes while tokens flow is DEADLINE_EXCEEDED, and everything is settled."""
    stream = small.client.generate(sampled("too slow", 1, 1900), timeout=0.5)
    request = next(stream).admission.request_id
    with pytest.raises(Refused, match="DEADLINE_EXCEEDED"):
        read_out(stream)
    small.wait_closed()
    aborted = next(e for e in small.events(request) if isinstance(e, Aborted))
    assert aborted.cause in (Cause.DEADLINE, Cause.CLIENT_CANCEL, Cause.CLIENT_GONE)


def test_stop_strings_and_lengths(small: Deployment) -> None:
    """A stop string ends the answer before it, and the outcome names what stopped it."""
    whole = small.ask(sampled("x", 3, 30))
    middle = whole.text[10:13]
    request = sampled("x", 3, 30)
    request.sampling.stop_strings.append(middle)
    stopped = small.ask(request)
    assert stopped.outcome.stop_string == middle
    assert stopped.text == whole.text[: whole.text.index(middle)]


# --- Data planes ------------------------------------------------------------------------------


def test_the_grpc_plane_gives_the_same_answers(folder: Path, tiny: Path, small: Deployment) -> None:
    """Pages that travel as gRPC streams give what pages in shared memory give."""
    requests = [sampled("word " * count, seed) for seed, count in enumerate((1, 40, 90))]
    wanted = [small.ask(request).tokens for request in requests]
    assert len(set(wanted)) == 3
    flags = (*TINY_FLAGS, "--plane=grpc")
    with Deployment(folder / "grpc", tiny, engine=flags) as deployment:
        deployment.start_engines(*ENGINES)
        assert deployment.engine_status("decode-0").plane == "grpc-stream"
        assert [deployment.ask(request).tokens for request in requests] == wanted
        assert [one.tokens for one in deployment.ask_all(requests)] == wanted
        deployment.wait_whole()


def test_several_engines_share_the_work(folder: Path, tiny: Path, small: Deployment) -> None:
    """Two prefill and two decode engines give the same answers, and all four take part."""
    requests = [sampled("several " * 20, seed) for seed in range(8)]
    wanted = [small.ask(request).tokens for request in requests]
    with Deployment(folder / "several", tiny, engine=TINY_FLAGS) as deployment:
        deployment.start_engines("prefill-0", "prefill-1", "decode-0", "decode-1")
        answers = deployment.ask_all(requests)
        assert [answer.tokens for answer in answers] == wanted
        legs = {(a.admission.prefill_engine, a.admission.decode_engine) for a in answers}
        assert {prefill for prefill, _ in legs} == {"prefill-0", "prefill-1"}
        assert {decode for _, decode in legs} == {"decode-0", "decode-1"}
        deployment.wait_whole()


# --- Faults -----------------------------------------------------------------------------------


def test_a_flipped_byte_reaches_nobody(folder: Path, tiny: Path) -> None:
    """One byte changed in a destination page before Verified ends the request without a token.

    The byte is one of K, one of a header, and the last of a trailer.
    """
    with Deployment(folder / "flip", tiny, engine=TINY_FLAGS) as deployment:
        deployment.start_engines("prefill-0")
        deployment.start_engines("decode-0", program=FLIPPING)
        for _ in range(3):
            seen: list[str | None] = []
            with pytest.raises(Refused) as caught:
                seen.extend(
                    response.WhichOneof("step")
                    for response in deployment.client.generate(text_request("secret " * 20))
                )
            refused = caught.value
            assert "chunk" not in seen
            assert (refused.code, refused.reason) == ("INTERNAL", "KV_ISOLATION_VIOLATION")
            deployment.wait_closed()
            events = deployment.events(refused.numbers["request_id"])
            assert not [event for event in events if isinstance(event, Verified | Finished)]
            aborted = next(event for event in events if isinstance(event, Aborted))
            assert aborted.cause is Cause.ISOLATION_VIOLATION
            assert aborted.page is not None
        # The next request is not hit.
        assert len(deployment.ask(text_request("plain", 5)).tokens) == 5


def test_an_answer_survives_its_prefill(folder: Path, tiny: Path) -> None:
    """Prefill killed (SIGKILL) after Verified and its drain does not stop the answer."""
    request = sampled("a long answer " * 8, 7, 600)
    flags = {"lease_seconds": 1.0}
    with Deployment(folder / "killed", tiny, engine=TINY_FLAGS, **flags) as deployment:
        deployment.start_engines(*ENGINES)
        wanted = deployment.ask(request)
        stream = deployment.client.generate(request)
        first = [next(stream), next(stream)]
        deployment.kill_engine("prefill-0")
        answer = collect(iter([*first, *stream]))
        assert answer.tokens == wanted.tokens
        kinds = [type(event) for event in deployment.events(answer.request)]
        assert kinds.index(Drained) < kinds.index(Verified)
        deployment.wait_until(
            "prefill is lost",
            lambda: any(
                isinstance(one.entry.event, Lost) and one.entry.event.engine == "prefill-0"
                for one in deployment.client.tail()
            ),
        )
        with pytest.raises(Refused, match="NO_ENGINE"):
            deployment.ask(request)
        deployment.wait_whole()
        # A new life of the same name is taken in and used.
        deployment.start_engines("prefill-0")
        deployment.lost.clear()
        assert deployment.ask(request).tokens == wanted.tokens
        lives = [
            one.entry.event.incarnation
            for one in deployment.client.tail()
            if isinstance(one.entry.event, Attached) and one.entry.event.engine == "prefill-0"
        ]
        assert len(lives) == 2
        assert lives[0] < lives[1]


def test_pages_of_a_lost_writer_come_home_when_its_process_has_ended(
    folder: Path, tiny: Path
) -> None:
    """In shared memory a lease that is over frees nothing; the end of the process does."""
    flags = {"lease_seconds": 1.0, "settle_seconds": 1.0}
    with Deployment(folder / "exits", tiny, engine=TINY_FLAGS, **flags) as deployment:
        deployment.start_engines(*ENGINES)
        prefill = deployment.children["prefill-0"]
        prefill.signal(signal.SIGSTOP)
        stream = deployment.client.generate(sampled("never written", 1))
        request = next(stream).admission.request_id

        def has(kind: type[Event]) -> bool:
            return any(isinstance(event, kind) for event in deployment.events(request))

        deployment.wait_until("decode has let the writer in", lambda: has(Reserved))
        deployment.wait_until("its grant is given up", lambda: has(Quarantined))
        assert not has(Drained)
        decode = deployment.engine_status("decode-0").ranks[0].pages
        assert decode.free < decode.capacity
        deployment.kill_engine("prefill-0")
        deployment.wait_until("the writer is shut out", lambda: has(Drained))
        drained = [e for e in deployment.events(request) if isinstance(e, Drained)]
        assert [event.proof for event in drained] == [Proof.FENCED]
        deployment.wait_until("the grant is given back", lambda: has(Released))
        assert decode.capacity == deployment.engine_status("decode-0").ranks[0].pages.free
        # The next life of the writer serves what waits.
        deployment.start_engines("prefill-0")
        deployment.lost.clear()
        read_out(stream)
        deployment.wait_whole()


def test_a_request_that_lost_its_pages_answers_the_same(
    folder: Path, tiny: Path, small: Deployment
) -> None:
    """Out of pages the youngest is requeued, and what it answers is what a large pool answers."""
    requests = [sampled("crowded " * 8, seed, 220) for seed in range(3)]
    wanted = [small.ask(request) for request in requests]
    flags = ("--kv-memory=200KiB", "--page-tokens=16")
    with Deployment(folder / "crowded", tiny, engine=flags, attempts_max=20) as deployment:
        deployment.start_engines(*ENGINES)
        answers = deployment.ask_all(requests)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
        assert [answer.text for answer in answers] == [answer.text for answer in wanted]
        deployment.wait_whole()
        requeued = [
            one.entry.event
            for one in deployment.client.tail()
            if isinstance(one.entry.event, Requeued)
        ]
        assert requeued, "the small pool was too large to show anything"
        assert {event.cause for event in requeued} == {Cause.OUT_OF_PAGES}
        assert max(answer.outcome.attempts for answer in answers) > 1


# --- The demo ---------------------------------------------------------------------------------


def demo(folder: Path, model: Path) -> subprocess.CompletedProcess[str]:
    """The demo as a user runs it, keeping what it leaves."""
    command = [*PROGRAM, "demo", "--model", str(model), "--keep", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)


@pytest.mark.model
def test_the_demo_holds(tmp_path: Path, model_path: Path) -> None:
    """The demo tells its whole story, ends with a clean replay and exits with 0."""
    done = demo(tmp_path / "demo", model_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "The capital of France is Paris." in lines
    assert any("CONTEXT_LENGTH_EXCEEDED" in line for line in lines)
    assert lines[-1] == "clean"
    assert "\x1b" not in done.stdout
    log = read_log(tmp_path / "demo" / "log")
    assert log.complete
    judged(log.entries, "demo")


def test_the_demo_can_fail(tmp_path: Path, tiny: Path) -> None:
    """A model that does not know the answer fails the demo, which says what differs."""
    done = demo(tmp_path / "demo", tiny)
    assert done.returncode == 1
    assert "the answer holds 'Paris'" in done.stderr


# --- Orderly shutdown -------------------------------------------------------------------------


def test_sigterm_drains(tmp_path: Path, tiny: Path) -> None:
    """On SIGTERM `serve` refuses new work with a reason on the open port, finishes, exits with 0."""
    log = tmp_path / "log"
    arguments = ["serve", "--json", "--port=0", f"--log={log}", "--model", str(tiny), *TINY_FLAGS]
    serve = Child("serve", arguments, errors=tmp_path / "errors")
    try:
        started = [serve.wait_event("started", timeout=READY_SECONDS) for _ in range(3)]
        address = serve.wait_event("ready", timeout=READY_SECONDS)["address"]
        with Client(address) as client:
            stream = client.generate(sampled("a long farewell", 1, 1000))
            first = [next(stream), next(stream)]
            serve.signal(signal.SIGTERM)

            def ask_until_refused() -> None:
                while True:
                    collect(client.generate(text_request("too late", 1)))

            with pytest.raises(Refused) as caught:
                ask_until_refused()
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "DRAINING")
            answer = collect(iter([*first, *stream]))
            assert len(answer.tokens) == 1000
        assert serve.wait(timeout=STOP_SECONDS) == 0, serve.said_errors()
    finally:
        serve.kill()
    for said in started:
        assert not Path(f"/proc/{said['process_id']}").exists(), said
    file = read_log(log)
    assert file.complete
    judged(file.entries, "serve")


def test_a_context_that_no_pool_holds_refuses_to_start(tmp_path: Path, tiny: Path) -> None:
    """An explicit context larger than a pool ends `serve` with 4, and names both numbers."""
    arguments = ["serve", "--port=0", "--model", str(tiny), "--kv-memory=1MiB", "--context=2048"]
    done = subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=READY_SECONDS
    )
    assert done.returncode == 4, done.stderr
    assert "holds 1984 tokens, less than the context of 2048" in done.stderr
    assert "ready at" not in done.stdout


def test_a_killed_supervisor_leaves_no_parts(tmp_path: Path, tiny: Path) -> None:
    """When `serve` itself is killed its parts end, without anybody to tell them."""
    arguments = ["serve", "--json", "--port=0", "--model", str(tiny), *TINY_FLAGS]
    serve = Child("serve", arguments, errors=tmp_path / "errors")
    try:
        started = [serve.wait_event("started", timeout=READY_SECONDS) for _ in range(3)]
        handles = [os.pidfd_open(said["process_id"]) for said in started]
        serve.wait_event("ready", timeout=READY_SECONDS)
    finally:
        serve.kill()
    for said, handle in zip(started, handles, strict=True):
        # The kernel makes the handle readable when the process has ended.
        gone, _, _ = select.select([handle], [], [], STOP_SECONDS)
        os.close(handle)
        assert gone, said
