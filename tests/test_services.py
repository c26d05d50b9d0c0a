"""What clients and operators see of a scheduler, over loopback gRPC."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lifecycle.events import Aborted, Cause, Released, Role
from lifecycle.ids import RequestId
from lifecycle.replay import replay
from tests.fake_engine import FIRST_TOKEN, FakeEngine
from tests.serving import Deployment, ask, deployment, details
from tests.tiny import tiny_llama
from transport.pb import admin_pb2, log_pb2
from transport.pb import generation_pb2 as pb
from transport.stores.memory import MemoryStore

pytestmark = pytest.mark.anyio

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
GENERATION = "custody.v1.GenerationService"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


async def begin(here: Deployment, request: pb.GenerateRequest) -> tuple[Call, str]:
    """A call whose admission has arrived, and the request's id."""
    call = here.generation.Generate(request)
    first = await call.read()
    assert isinstance(first, pb.GenerateResponse)
    assert first.WhichOneof("step") == "admission"
    return call, first.admission.request_id


async def rest(call: Call) -> list[pb.GenerateResponse]:
    """Whatever a call still has to say."""
    steps = []
    while isinstance(step := await call.read(), pb.GenerateResponse):
        steps.append(step)
    return steps


async def last(call: Call) -> str | None:
    """What kind of message is the call's last."""
    return (await rest(call))[-1].WhichOneof("step")


async def status_of(call: Call) -> grpc.aio.AioRpcError:
    """Read a call to its end, which is an error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


def ends(entries: list[log_pb2.StoredEntry], request: str) -> list[str]:
    """The names of a request's logical ends."""
    kinds = [e.entry.event.WhichOneof("event") for e in entries if e.entry.request == request]
    return [kind for kind in kinds if kind in {"finished", "aborted", "rejected"}]


# --- answers --------------------------------------------------------------------------------------


async def test_a_stream_is_admission_chunks_outcome(model: Path) -> None:
    """The first message is the admission, then tokens in order without gaps, then the outcome."""
    async with deployment(model) as here:
        steps = [step async for step in here.generation.Generate(ask(new=9))]
        assert [s.WhichOneof("step") for s in (steps[0], steps[-1])] == ["admission", "outcome"]
        chunks = [s.chunk for s in steps[1:-1]]
        assert [t for c in chunks for t in c.token_ids] == [FIRST_TOKEN + i for i in range(9)]
        assert [c.first_index for c in chunks] == list(range(9))
        outcome = steps[-1].outcome
        assert outcome.finish_reason == 2, outcome
        assert (outcome.usage.prompt_tokens, outcome.usage.new_tokens) == (7, 9)
        assert outcome.attempts == 1
        assert outcome.time_to_first_token_ns > 0


async def test_the_unary_form_is_the_stream_in_one_message(model: Path) -> None:
    """Complete returns admission, all tokens with the whole text, and the outcome."""
    async with deployment(model, text="ab") as here:
        answer = await here.generation.Complete(pb.CompleteRequest(generation=ask(new=5)))
        assert list(answer.chunk.token_ids) == [FIRST_TOKEN + i for i in range(5)]
        assert answer.chunk.text == "ab" * 5
        assert answer.admission.prefill_engine == "prefill"
        assert answer.admission.decode_engine == "decode"
        assert answer.outcome.usage.new_tokens == 5


async def test_text_and_chat_are_tokenised_here(model: Path) -> None:
    """Plain text and a conversation become prompts, the latter by the model's template."""
    async with deployment(model) as here:
        sampling = pb.Sampling(new_tokens_max=2)
        plain = pb.GenerateRequest(text="the", sampling=sampling)
        chat = pb.GenerateRequest(
            chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="the")]),
            sampling=sampling,
        )
        lengths = []
        for request in (plain, chat):
            answer = await here.generation.Complete(pb.CompleteRequest(generation=request))
            lengths.append(answer.admission.prompt_tokens)
        assert 1 <= lengths[0] < lengths[1]


async def test_a_new_token_limit_that_is_not_set_fits_the_context(model: Path) -> None:
    """Without a limit of its own a request gets what the context leaves, 256 at the most."""
    async with deployment(model, pages=16) as here:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 50))
        answer = await here.generation.Complete(pb.CompleteRequest(generation=request))
        assert answer.admission.context_tokens == 64
        assert answer.admission.new_tokens_max == 14


# --- refusals -------------------------------------------------------------------------------------

UNUSABLE = {
    "n": (ask(n=2), "n"),
    "model": (ask(model="other"), "model"),
    "nothing": (pb.GenerateRequest(), "input"),
    "vocabulary": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[99_999])), "token_ids"),
    "sampling": (pb.GenerateRequest(text="a", sampling=pb.Sampling(top_p=7)), "top_p"),
    "chat": (
        pb.GenerateRequest(
            chat=pb.ChatMessages(messages=[pb.ChatMessage(role="nobody", content="a")])
        ),
        "chat",
    ),
    "bytes": (pb.GenerateRequest(text="a" * 600), "text"),
    "key": (ask(key="k" * 300), "idempotency_key"),
}


@pytest.mark.parametrize("name", UNUSABLE)
async def test_an_unusable_request_is_refused_by_status_and_logged(model: Path, name: str) -> None:
    """INVALID_ARGUMENT names the field, and the log holds the same request as `Rejected`."""
    request, field = UNUSABLE[name]
    async with deployment(model, engines=False, prompt_bytes_max=512) as here:
        error = await status_of(here.generation.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        info, found = details(error)
        assert (info.domain, info.reason) == ("custody", "INVALID_REQUEST")
        assert field in str(found["BadRequest"])
        entries = await here.log.GetRequestLog(
            log_pb2.GetRequestLogRequest(request_id=info.metadata["request_id"])
        )
        (stored,) = entries.entries
        # What a chat template complains about may quote the chat: that is for the client alone.
        assert str(error.details()).startswith(stored.entry.event.rejected.reason)


async def test_a_request_beyond_the_context_names_both_numbers(model: Path) -> None:
    """The context is what the smaller leg can hold, and the refusal carries the comparison."""
    async with deployment(model, pages=16) as here:
        error = await status_of(here.generation.Generate(ask(tokens=60, new=5)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        info, _ = details(error)
        assert info.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert (
            dict(info.metadata).items()
            >= {
                "prompt_tokens": "60",
                "new_tokens_max": "5",
                "context_tokens": "64",
            }.items()
        )
        assert "60" in str(error.details())
        assert "64" in str(error.details())


async def test_without_engines_there_is_no_engine(model: Path) -> None:
    """A deployment of no engines says so; it does not let the request wait."""
    async with deployment(model, engines=False) as here:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.generation.Complete(pb.CompleteRequest(generation=ask()))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details(caught.value)[0].reason == "NO_ENGINE"


async def test_a_full_queue_asks_to_come_again(model: Path) -> None:
    """RESOURCE_EXHAUSTED with RetryInfo when as many wait as may wait."""
    async with deployment(model, pages=16, pause_at=1, queue_limit=1) as here:
        first, _ = await begin(here, ask(tokens=40, new=8))
        second = here.generation.Generate(ask(tokens=40, new=8))
        waiting = admin_pb2.GetStatusResponse()
        while waiting.queued < 1:
            waiting = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        error = await status_of(here.generation.Generate(ask(tokens=40, new=8)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        info, found = details(error)
        assert info.reason == "QUEUE_FULL"
        assert "RetryInfo" in found
        here.decode.go_on()
        assert await last(first) == "outcome"
        assert await last(second) == "outcome"


# --- ends from outside ----------------------------------------------------------------------------


async def test_a_cancelled_call_ends_its_request(model: Path) -> None:
    """A client that cancels leaves an `Aborted` in the log, and every grant comes home."""
    async with deployment(model, pause_at=2) as here:
        call, request = await begin(here, ask(new=50))
        await here.decode.paused.wait()
        call.cancel()
        entries = await here.tail_until("aborted", "released", "released", request=request)
        aborted = [e.entry.event.aborted for e in entries if e.entry.event.HasField("aborted")]
        assert [(a.cause, a.reported_by) for a in aborted] == [(1, "client")]


async def test_a_vanished_client_ends_its_request(model: Path) -> None:
    """A connection that breaks ends what was asked for over it."""
    async with deployment(model, pause_at=2) as here:
        async with grpc.aio.insecure_channel(
            here.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            from transport.pb import generation_pb2_grpc

            stub: generation_pb2_grpc.GenerationServiceAsyncStub
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(ask(new=50))
            first = await call.read()
            assert isinstance(first, pb.GenerateResponse)
            await here.decode.paused.wait()
        entries = await here.tail_until("aborted", request=first.admission.request_id)
        assert ends(entries, first.admission.request_id) == ["aborted"]


async def test_a_deadline_of_the_call_ends_the_request(model: Path) -> None:
    """The call's deadline stands in the admission and aborts by it."""
    async with deployment(model, pause_at=2) as here:
        call = here.generation.Generate(ask(new=50), timeout=0.5)
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        entries = await here.tail_until("aborted", request=first.admission.request_id)
        aborted = [e.entry.event.aborted for e in entries if e.entry.event.HasField("aborted")]
        assert [a.cause for a in aborted] == [4]


async def test_the_servers_own_limit_is_a_deadline_too(model: Path) -> None:
    """Without a deadline of the call the server's maximum ends the request with a reason."""
    async with deployment(model, pause_at=2, request_seconds_max=0.3) as here:
        error = await status_of(here.generation.Generate(ask(new=50)))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details(error)[0].reason == "DEADLINE"


async def test_a_slow_reader_is_cut(model: Path) -> None:
    """Who falls too far behind gets RESOURCE_EXHAUSTED, and the request does not go on for it."""
    async with deployment(model, text="y" * 20_000, reader_tokens_max=8) as here:
        call, request = await begin(here, ask(new=200))
        entries = await here.tail_until("aborted", request=request)
        aborted = [e.entry.event.aborted for e in entries if e.entry.event.HasField("aborted")]
        assert [a.cause for a in aborted] == [3]
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)[0].reason == "SLOW_READER"


async def test_an_operator_cancels_a_request_once(model: Path) -> None:
    """The client gets CANCELLED; cancelling again changes nothing; an unknown id is not found."""
    async with deployment(model, pause_at=2) as here:
        call, request = await begin(here, ask(new=50))
        cancel = admin_pb2.CancelRequestRequest(request_id=request)
        assert (await here.admin.CancelRequest(cancel)).cancelled
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.CANCELLED
        assert details(error)[0].metadata["request_id"] == request
        assert not (await here.admin.CancelRequest(cancel)).cancelled
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


# --- idempotency ----------------------------------------------------------------------------------


async def test_a_repeated_key_attaches_to_the_same_request(model: Path) -> None:
    """Two calls with one key read one request, the second from its first token on."""
    async with deployment(model, pause_at=3) as here:
        first, request = await begin(here, ask(new=6, key="k"))
        await here.decode.paused.wait()
        second, same = await begin(here, ask(new=6, key="k"))
        assert same == request
        here.decode.go_on()
        for call in (first, second):
            steps = await rest(call)
            tokens = [t for s in steps for t in s.chunk.token_ids]
            assert tokens == [FIRST_TOKEN + i for i in range(6)]
            assert steps[-1].outcome.usage.new_tokens == 6
        listed = await here.log.ListRequests(log_pb2.ListRequestsRequest())
        assert [r.request_id for r in listed.requests] == [request]


async def test_a_key_with_another_body_is_refused(model: Path) -> None:
    """ALREADY_EXISTS, and the first request goes on."""
    async with deployment(model, pause_at=3) as here:
        first, request = await begin(here, ask(new=6, key="k"))
        error = await status_of(here.generation.Generate(ask(new=7, key="k")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        info, _ = details(error)
        assert (info.reason, info.metadata["request_id"]) == ("REQUEST_ID_REUSED", request)
        here.decode.go_on()
        assert await last(first) == "outcome"


async def test_a_request_goes_on_while_one_of_its_readers_stays(model: Path) -> None:
    """One of two readers may leave; the request ends when the last one does."""
    async with deployment(model, pause_at=3) as here:
        first, request = await begin(here, ask(new=6, key="k"))
        await here.decode.paused.wait()
        second, _ = await begin(here, ask(new=6, key="k"))
        first.cancel()
        here.decode.go_on()
        assert await last(second) == "outcome"
        entries = await here.tail_until("finished", request=request)
        assert ends(entries, request) == ["finished"]


class SlowDisk(MemoryStore):
    """A store whose flushes wait for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def flush(self) -> int:
        self.gate.wait()
        return super().flush()


async def test_a_repeat_after_its_reader_has_gone_is_a_new_request(model: Path) -> None:
    """Who repeats a key whose request was given up is not told an end that it did not ask for.

    The first end is decided and not durable yet, and the second request is not the first one's end.
    """
    disk = SlowDisk()
    async with deployment(model, store=disk) as here:
        disk.gate.clear()
        try:
            first, request = await begin(here, ask(key="k"))
            first.cancel()
            await here.tail_until("aborted", request=request)
            second, other = await begin(here, ask(key="k"))
        finally:
            disk.gate.set()
        assert other != request
        assert await last(second) == "outcome"
        # The key is the second request's from then on.
        third = here.generation.Generate(ask(new=5, key="k"))
        assert details(await status_of(third))[0].metadata["request_id"] == other


# --- drain ----------------------------------------------------------------------------------------


async def test_a_draining_scheduler_refuses_on_the_open_port_and_finishes(model: Path) -> None:
    """New requests get DRAINING, health says so, open ones end well, and the exit code is 0."""
    async with deployment(model, pause_at=2) as here:
        call, _ = await begin(here, ask(new=5))
        health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(here.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=GENERATION))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        here.stop.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await status_of(here.generation.Generate(ask()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details(error)[0].reason == "DRAINING"
        here.decode.go_on()
        assert await last(call) == "outcome"
        await here.ended.wait()
        assert here.codes == [0]
        watch.cancel()
    assert here.decode.refused is not None
    assert here.decode.refused.reason == 5


async def test_a_drain_that_takes_too_long_is_forced(model: Path) -> None:
    """What is still open at the end is aborted with a reason, and the exit code says so."""
    async with deployment(model, pause_at=2, drain_seconds=0.2) as here:
        call, _ = await begin(here, ask(new=5))
        here.stop.set()
        error = await status_of(call)
        assert details(error)[0].reason == "SHUTDOWN"
        await here.ended.wait()
        assert here.codes == [1]


async def test_a_second_request_to_stop_aborts_what_is_open(model: Path) -> None:
    """At once, with an event for each request, whose client is told; the exit code says so."""
    async with deployment(model, pause_at=2, pages=6) as here:
        call, running = await begin(here, ask(new=5))
        waiting = here.generation.Generate(ask(7, 12))
        while (await here.admin.GetStatus(admin_pb2.GetStatusRequest())).queued == 0:
            pass
        here.stop.set()
        error = await status_of(here.generation.Generate(ask()))
        assert details(error)[0].reason == "DRAINING"
        assert not here.ended.is_set()
        here.hurry.set()
        for open_call, reason in ((call, "SHUTDOWN"), (waiting, "DRAINING")):
            error = await status_of(open_call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert details(error)[0].reason == reason
        await here.ended.wait()
        assert here.codes == [1]
        events = [s.entry.event for s in here.store.read(RequestId(running))]
        assert [e.cause for e in events if isinstance(e, Aborted)] == [Cause.SHUTDOWN]
        assert isinstance(events[-1], Released)
        assert replay([(s.position, s.entry) for s in here.store.tail(1)]).clean


async def test_an_operator_may_drain_the_scheduler_and_an_engine(model: Path) -> None:
    """The status says what drains; an engine that is not attached is not found."""
    async with deployment(model) as here:
        drained = await here.admin.DrainEngine(admin_pb2.DrainEngineRequest(engine="decode"))
        assert drained.incarnation == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.admin.DrainEngine(admin_pb2.DrainEngineRequest(engine="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await here.admin.DrainScheduler(admin_pb2.DrainSchedulerRequest())
        status = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert status.draining
        assert [(e.engine, e.state) for e in status.engines] == [("decode", 2), ("prefill", 1)]


# --- health, reflection, status -------------------------------------------------------------------


async def test_health_follows_the_engines(model: Path) -> None:
    """Generation is served only while both kinds of engine are there; the process always lives."""
    async with deployment(model, engines=False) as here:
        health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(here.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=GENERATION))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        here.tasks.start_soon(here.prefill.run)
        here.tasks.start_soon(here.decode.run)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        alive = await health.Check(health_pb2.HealthCheckRequest())
        assert alive.status == health_pb2.HealthCheckResponse.SERVING
        here.decode.leave()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_reflection_names_every_service(model: Path) -> None:
    """A client that knows no schema finds the services."""
    async with deployment(model, engines=False) as here:
        stub: reflection_pb2_grpc.ServerReflectionStub
        stub = reflection_pb2_grpc.ServerReflectionStub(here.channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        wanted = {f"custody.v1.{n}Service" for n in ("Generation", "Fleet", "Log", "Admin")}
        assert wanted | {"grpc.health.v1.Health"} <= names
        call.cancel()


async def test_the_status_counts_pages(model: Path) -> None:
    """Free, held, booked and quarantined pages sum to the capacity of each rank."""
    async with deployment(model, pause_at=2) as here:
        call, _ = await begin(here, ask(new=40))
        await here.decode.paused.wait()
        status = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        for engine in status.engines:
            pages = engine.ranks[0].pages
            parts = pages.free + pages.held + pages.booked + pages.quarantined
            assert (pages.capacity, parts) == (64, 64)
            assert engine.ranks[0].connected
            assert engine.ranks[0].tokens.capacity == 256
        assert status.context_tokens == 256
        assert status.model == "tiny"
        call.cancel()


# --- the log --------------------------------------------------------------------------------------


async def test_requests_are_listed_by_pages(model: Path) -> None:
    """Pages follow one another without gaps, and the last has no token."""
    async with deployment(model) as here:
        for _ in range(5):
            await here.generation.Complete(pb.CompleteRequest(generation=ask()))
        seen: list[str] = []
        token, sizes = "", []
        while True:
            page = await here.log.ListRequests(
                log_pb2.ListRequestsRequest(page_size=2, page_token=token)
            )
            seen += [r.request_id for r in page.requests]
            sizes.append(len(page.requests))
            assert {r.outcome for r in page.requests} == {"Finished"}
            token = page.next_page_token
            if not token:
                break
        assert sizes == [2, 2, 1]
        assert seen == sorted(set(seen))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.log.ListRequests(log_pb2.ListRequestsRequest(page_token="x"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_tail_has_every_position_once(model: Path) -> None:
    """From the beginning, live, without gaps; without `follow` it ends at the end."""
    async with deployment(model) as here:
        live = here.log.Tail(log_pb2.TailRequest(follow=True))
        answer = await here.generation.Complete(pb.CompleteRequest(generation=ask()))
        request = answer.admission.request_id
        positions: list[int] = []
        kinds: list[str | None] = []
        async for message in live:
            positions += [e.position for e in message.entries]
            kinds += [e.entry.event.WhichOneof("event") for e in message.entries]
            if "finished" in kinds:
                break
        live.cancel()
        assert positions == list(range(1, len(positions) + 1))
        whole = [m async for m in here.log.Tail(log_pb2.TailRequest(from_position=3))]
        assert whole[0].entries[0].position == 3
        stored = await here.log.GetRequestLog(log_pb2.GetRequestLogRequest(request_id=request))
        assert [e.entry.sequence for e in stored.entries] == list(range(len(stored.entries)))


async def test_what_the_log_does_not_hold_is_said(model: Path) -> None:
    """A position beyond the end is OUT_OF_RANGE, an unknown request NOT_FOUND."""
    async with deployment(model, engines=False) as here:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in here.log.Tail(log_pb2.TailRequest(from_position=999)):
                pass
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.log.GetRequestLog(log_pb2.GetRequestLogRequest(request_id="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_no_prompt_and_no_key_is_in_the_log(model: Path) -> None:
    """Neither the tenant's name, nor an idempotency key, nor a prompt stands in any entry."""
    async with deployment(model) as here:
        request = ask(tokens=0, key="secret-key")
        request.text = "very secret words"
        await here.generation.Complete(pb.CompleteRequest(generation=request))
        entries = [e async for m in here.log.Tail(log_pb2.TailRequest()) for e in m.entries]
        text = str(entries)
        assert "secret" not in text
        assert "default" not in text


async def test_engines_of_another_layout_are_refused(model: Path) -> None:
    """The refusal names both fingerprints."""
    async with deployment(model) as here:
        other = FakeEngine(Role.DECODE, here.address, name="other", layout="layout-b")
        await other.run()
        assert other.refused is not None
        assert other.refused.reason == 3
        assert "layout-a" in other.refused.message
        assert "layout-b" in other.refused.message
