"""The scheduler's owner task between engines, clients and the store."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import attrs
import grpc
import pytest

from engine.digests import keyed_digest
from engine.scheduler import Scheduler
from engine.store import Append, StoreUnavailable
from lifecycle.decide import Limits
from lifecycle.events import Role
from lifecycle.ids import RequestId
from lifecycle.replay import replay
from tests.fake_engine import FIRST_TOKEN, FakeEngine
from tests.serving import Deployment, ask, deployment, details
from tests.test_services import begin, last, rest, status_of
from tests.tiny import tiny_llama
from transport.fleet_streams import Link
from transport.mailbox import Mailbox
from transport.pb import admin_pb2, generation_pb2, lifecycle_pb2
from transport.pb import fleet_pb2 as pb
from transport.scheduler_owner import OwnerSettings, SchedulerOwner
from transport.settings import InvalidSetting
from transport.stores.memory import MemoryStore
from transport.stores.segments import SegmentStore

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


class SlowFlush(MemoryStore):
    """A store whose flush waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()
        self.asked = threading.Event()

    def flush(self) -> int:
        self.asked.set()
        assert self.free.wait(20)
        return super().flush()


class FailingStore(MemoryStore):
    """A store that takes nothing while the test says so."""

    failing = False

    def append_batch(self, batch: Sequence[Append]) -> int:
        if self.failing:
            raise StoreUnavailable("no space left")
        return super().append_batch(batch)

    def flush(self) -> int:
        if self.failing:
            raise StoreUnavailable("no space left")
        return super().flush()


async def conforms(here: Deployment) -> None:
    """The log breaks no rule."""
    report = replay([(s.position, s.entry) for s in here.store.tail(1)])
    assert list(report.findings) == []


def reserved_seen(engine: FakeEngine, owner: str) -> list[pb.Publication]:
    """Grants of that engine which this one was told of."""
    return [
        p
        for p in engine.published
        if p.entry.event.HasField("reserved") and p.entry.event.reserved.grant.owner.engine == owner
    ]


# --- group commit ---------------------------------------------------------------------------------


async def test_a_remote_write_permission_is_published_only_when_durable(model: Path) -> None:
    """While the flush is withheld prefill is not told of decode's pages; afterwards it is."""
    store = SlowFlush()
    async with deployment(model, store=store) as here:
        store.asked.clear()
        store.free.clear()
        call, request = await begin(here, ask())
        await here.tail_until("reserved", "reserved", request=request)
        await anyio.to_thread.run_sync(store.asked.wait)
        # A question behind everything that has happened so far.
        await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert reserved_seen(here.prefill, "decode") == []
        store.free.set()
        assert await last(call) == "outcome"
        assert len(reserved_seen(here.prefill, "decode")) == 1
        await conforms(here)


async def test_an_outcome_is_told_only_when_durable(model: Path) -> None:
    """Tokens flow while the flush is withheld, the outcome does not."""
    store = SlowFlush()
    async with deployment(model, store=store, pause_at=2) as here:
        call, request = await begin(here, ask(new=4))
        await here.decode.paused.wait()
        store.free.clear()
        here.decode.go_on()
        await here.tail_until("finished", request=request)
        steps = [await call.read() for _ in range(4)]
        assert all(
            isinstance(s, generation_pb2.GenerateResponse) and s.HasField("chunk") for s in steps
        )
        told: list[str | None] = []
        end = anyio.Event()

        async def read_end() -> None:
            told.append(await last(call))
            end.set()

        here.tasks.start_soon(read_end)
        # A question behind everything that has happened so far.
        await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert told == []
        durable = store.durable_position
        finished = [
            s.position
            for s in store.read(RequestId(request))
            if type(s.entry.event).__name__ == "Finished"
        ]
        assert finished[0] > durable
        store.free.set()
        await end.wait()
        assert told == ["outcome"]
        assert store.durable_position >= finished[0]


async def test_nothing_is_admitted_while_the_log_cannot_be_written(model: Path) -> None:
    """LOG_UNAVAILABLE for newcomers; what decodes streams on and is told its end afterwards."""
    store = FailingStore()
    async with deployment(model, store=store, pause_at=2) as here:
        call, request = await begin(here, ask(new=4))
        await here.decode.paused.wait()
        store.failing = True
        here.decode.go_on()
        steps = [await call.read() for _ in range(4)]
        assert len(steps) == 4
        while (error := await refused(here)) != "LOG_UNAVAILABLE":
            assert error == "", error
        store.failing = False
        assert await last(call) == "outcome"
        await here.tail_until("finished", request=request)
        assert await refused(here) in {"", "LOG_UNAVAILABLE"}
        await conforms(here)


async def test_an_end_that_cannot_be_stored_is_never_a_success(model: Path) -> None:
    """At the deadline the client is told LOG_UNAVAILABLE, although every token came."""
    store = FailingStore()
    async with deployment(model, store=store, pause_at=2, request_seconds_max=0.6) as here:
        call = here.generation.Generate(ask(new=4))
        await here.decode.paused.wait()
        store.failing = True
        here.decode.go_on()
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details(error)[0].reason == "LOG_UNAVAILABLE"
        store.failing = False


async def refused(here: Deployment) -> str:
    """The reason for which a small request is refused just now, if it is."""
    call = here.generation.Generate(ask(new=1))
    try:
        await rest(call)
    except grpc.aio.AioRpcError as error:
        return str(details(error)[0].reason)
    return ""


# --- streams --------------------------------------------------------------------------------------


async def test_an_engine_that_reconnects_goes_on_where_it_stood(model: Path) -> None:
    """A stream cut in mid-request costs nothing: no token is lost or given twice."""
    async with deployment(model, pause_at=3) as here:
        call, request = await begin(here, ask(new=8))
        await here.decode.paused.wait()
        for engine in (here.decode, here.prefill):
            engine.break_stream()
            await engine.synced.wait()
        here.decode.go_on()
        steps = await rest(call)
        tokens = [t for s in steps for t in s.chunk.token_ids]
        assert tokens == [FIRST_TOKEN + i for i in range(8)]
        assert steps[-1].outcome.attempts == 1
        assert [w.inventory_wanted for w in here.decode.welcomes] == [True, False]
        await here.tail_until("finished", request=request)
        await conforms(here)


async def test_an_engine_that_stays_away_is_lost(model: Path) -> None:
    """After the lease its request gets another attempt elsewhere, or ends with a reason."""
    async with deployment(model, pause_at=3, lease_seconds=0.3) as here:
        call, _ = await begin(here, ask(new=8))
        await here.decode.paused.wait()
        spare = FakeEngine(Role.DECODE, here.address, name="spare")
        here.tasks.start_soon(spare.run)
        await spare.synced.wait()
        here.decode.hush = True
        steps = await rest(call)
        tokens = [t for s in steps for t in s.chunk.token_ids]
        assert len(tokens) == 8
        assert tokens[:3] == [FIRST_TOKEN + i for i in range(3)]
        assert steps[-1].outcome.attempts == 2
        assert here.decode.refused is not None
        assert here.decode.refused.reason == pb.ATTACH_REFUSAL_LOST
        await here.tail_until("lost", "requeued", "quarantined")
        await conforms(here)


async def test_a_leaving_engine_goes_when_nothing_of_it_is_unsettled(model: Path) -> None:
    """It finishes what it has, is given nothing new, and its stream ends with LEFT."""
    async with deployment(model, pause_at=3, lease_seconds=2.0) as here:
        call, _ = await begin(here, ask(new=6))
        await here.decode.paused.wait()
        here.decode.leave()
        await here.tail_until("draining")
        # Two signs of life lie farther apart than two looks at who may go.
        for _ in range(2):
            await here.decode.beat.wait()
        assert not here.decode.gone.is_set()
        here.decode.go_on()
        assert await last(call) == "outcome"
        entries = await here.tail_until("lost")
        lost = [e.entry.event.lost for e in entries if e.entry.event.HasField("lost")]
        assert [(e.engine, e.cause) for e in lost] == [("decode", 1)]
        await here.decode.gone.wait()
        assert here.decode.refused is not None
        assert here.decode.refused.reason == pb.ATTACH_REFUSAL_LEFT
        await conforms(here)


async def test_a_newer_incarnation_replaces_the_older(model: Path) -> None:
    """The old stream ends with SUPERSEDED, and an older life cannot come back."""
    async with deployment(model) as here:
        newer = FakeEngine(Role.DECODE, here.address, name="decode", incarnation=2)
        here.tasks.start_soon(newer.run)
        await newer.synced.wait()
        await here.decode.gone.wait()
        assert here.decode.refused is not None
        assert here.decode.refused.reason == pb.ATTACH_REFUSAL_SUPERSEDED
        older = FakeEngine(Role.DECODE, here.address, name="decode", incarnation=1)
        await older.run()
        assert older.refused is not None
        assert older.refused.reason == pb.ATTACH_REFUSAL_SUPERSEDED
        answer = await here.generation.Complete(generation_pb2.CompleteRequest(generation=ask()))
        assert answer.outcome.usage.new_tokens == 4


async def test_an_engine_smaller_than_an_explicit_context_is_refused(model: Path) -> None:
    """The refusal names the pool's tokens and the context."""
    async with deployment(model, engines=False, context_tokens=300) as here:
        await here.decode.run()
        assert here.decode.refused is not None
        assert here.decode.refused.reason == pb.ATTACH_REFUSAL_INCOMPATIBLE
        assert "256" in here.decode.refused.message
        assert "300" in here.decode.refused.message


async def test_an_engine_with_another_tokenizer_is_refused(model: Path) -> None:
    """Text made by one vocabulary and tokens by another would be fluent and wrong."""
    async with deployment(model, engines=False) as here:
        other = FakeEngine(Role.DECODE, here.address, tokenizer="other-fingerprint")
        await other.run()
        assert other.refused is not None
        assert "other-fingerprint" in other.refused.message


async def test_addresses_come_before_the_entry_that_names_them(model: Path) -> None:
    """Each leg is told the other's endpoint before the first admission, and the key is not logged.

    Neither the status nor the log bears it.
    """
    secret = "ab" * 16
    descriptor = json.dumps(
        {
            "plane": "naive",
            "endpoint": "here",
            "pool_bytes": 10,
            "incarnation": "1",
            "key": secret,
        }
    )
    async with deployment(model, engines=False) as here:
        here.decode.endpoint = descriptor
        for engine in (here.prefill, here.decode):
            here.tasks.start_soon(engine.run)
            await engine.synced.wait()
        await here.generation.Complete(generation_pb2.CompleteRequest(generation=ask()))
        assert [p.endpoint for p in here.prefill.peers] == [descriptor]
        assert here.prefill.order.index("peer") < here.prefill.order.index("payload")
        status = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert secret not in str(status)
        assert secret not in str([s.entry for s in here.store.tail(1)])


@pytest.mark.parametrize(
    "items",
    [
        [pb.EngineItem(hello=pb.Hello())],
        [pb.EngineItem()],
        [pb.EngineItem(inventory=pb.Inventory(epoch=99))],
        [pb.EngineItem(proposal=lifecycle_pb2.Proposal())],
    ],
    ids=["second-hello", "empty", "wrong-epoch", "malformed"],
)
async def test_a_broken_order_ends_the_stream_with_a_reason(
    model: Path, items: list[pb.EngineItem]
) -> None:
    """The scheduler refuses the stream and stays well."""
    async with deployment(model, engines=False) as here:
        call = here.fleet.Connect()
        await call.write(pb.ConnectRequest(items=[pb.EngineItem(hello=here.decode.hello())]))
        await call.write(pb.ConnectRequest(items=items))
        seen: list[pb.SchedulerItem] = []
        while isinstance(message := await call.read(), pb.ConnectResponse):
            seen += message.items
        assert seen[-1].refused.reason == pb.ATTACH_REFUSAL_PROTOCOL
        assert await refused(here) == "NO_ENGINE"


async def test_a_stream_begins_with_a_hello(model: Path) -> None:
    """Anything else ends the call with INVALID_ARGUMENT."""
    async with deployment(model, engines=False) as here:
        call = here.fleet.Connect()
        await call.write(pb.ConnectRequest(items=[pb.EngineItem(leaving=pb.Leaving())]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# --- lives ----------------------------------------------------------------------------------------


async def test_a_new_life_aborts_what_was_open_and_takes_engines_back(
    model: Path, tmp_path: Path
) -> None:
    """The log goes on in a higher epoch; the engines' pools come home and serve again."""
    async with deployment(model, store=SegmentStore(tmp_path), pause_at=2, drain_seconds=0.1) as a:
        call, _ = await begin(a, ask(new=8))
        a.stop.set()
        error = await status_of(call)
        assert details(error)[0].reason == "SHUTDOWN"
    async with deployment(model, store=SegmentStore(tmp_path), engines=False) as b:
        a.decode.pause_at = None
        for engine in (a.prefill, a.decode):
            engine.refused, engine.synced, engine.address = None, anyio.Event(), b.address
            b.tasks.start_soon(engine.run)
            await engine.synced.wait()
        answer = await b.generation.Complete(generation_pb2.CompleteRequest(generation=ask()))
        assert answer.outcome.usage.new_tokens == 4
        assert answer.admission.request_id.startswith("00000002-")
        await conforms(b)


async def test_a_port_that_is_taken_is_a_setting_that_cannot_be_used(model: Path) -> None:
    """Two schedulers never share a port."""
    async with deployment(model, engines=False) as here:
        from transport.scheduler_shell import run_scheduler
        from transport.settings import SchedulerSettings

        port = int(here.address.rsplit(":", 1)[1])
        with pytest.raises(InvalidSetting):
            await run_scheduler(
                SchedulerSettings(model=str(model), port=port),
                ready=lambda _: None,
                stop=anyio.Event(),
            )


# --- leases ---------------------------------------------------------------------------------------


@attrs.define
class Clock:
    """A clock that only the test moves."""

    now_ns: int = 1

    def __call__(self) -> int:
        return self.now_ns


def quiet_owner(clock: Clock, *, lease_ns: int) -> SchedulerOwner:
    """An owner whose task does not run; the test makes its calls."""
    core = Scheduler(limits=Limits(context_tokens=64), epoch=1, digest=keyed_digest(b"k"))
    settings = OwnerSettings(
        model="m",
        model_context=64,
        context_wanted=None,
        tokenizer="t",
        digest_key=b"k",
        tenant_salt=b"s",
        lease_ns=lease_ns,
        reader_tokens_max=8,
    )
    owner = SchedulerOwner(core, MemoryStore(), settings, now=clock, monotonic=clock)
    owner.resume()
    return owner


async def test_only_silence_that_was_listened_to_loses_an_engine() -> None:
    """A scheduler that stood still forgives the silence; one that listened does not."""
    clock, lease_ns = Clock(), 1_000
    owner = quiet_owner(clock, lease_ns=lease_ns)
    core = owner.core
    link = Link()
    owner.fleet.hello(link, FakeEngine(Role.DECODE, "nowhere").hello())
    owner.fleet.streams.gone(link)
    clock.now_ns += 10 * lease_ns
    owner.tick()
    assert [life.lost for life in core.log.fleet.alive()] == [None]
    for _ in range(12):
        clock.now_ns += lease_ns // 10
        owner.tick()
    assert core.log.fleet.alive() == ()
    owner.close()


async def test_a_stream_that_falls_too_far_behind_is_cut() -> None:
    """The owner never waits for an engine: its outbox overflows, and the stream ends."""
    owner = quiet_owner(Clock(), lease_ns=1_000)
    link = Link(outbox=Mailbox(2))
    owner.fleet.hello(link, FakeEngine(Role.DECODE, "nowhere").hello())
    assert len(owner.fleet.streams.links) == 1
    owner.fleet.streams.heartbeat()
    owner.fleet.streams.heartbeat()
    assert owner.fleet.streams.links == {}
    assert await link.outbox.take() == []
    owner.close()


# --- mailboxes ------------------------------------------------------------------------------------


async def test_a_full_mailbox_says_so() -> None:
    """What does not fit is not added; the last item of a close always fits."""
    box: Mailbox[str] = Mailbox(2)
    assert box.put("a")
    assert box.put("b")
    assert not box.put("c")
    box.close("end")
    assert not box.put("d")
    assert await box.take() == ["a", "b", "end"]
    assert await box.take() == []


async def test_a_cut_mailbox_keeps_only_the_reason() -> None:
    """Cutting drops what waits."""
    box: Mailbox[str] = Mailbox(2)
    box.put("a")
    box.cut("why")
    box.cut("again")
    assert await box.take() == ["why"]
    assert await box.take() == []
