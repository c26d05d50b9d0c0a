"""Engine processes' shells beside a scheduler on loopback, with real pages and the tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import attrs
import grpc
import pytest
import torch
from structlog.testing import capture_logs

from engine.model import Model
from engine.sampler import SamplingParams
from engine.store import EventStore
from engine.tokenizer import Tokenizer
from lifecycle.events import Draining, Lost, LostCause, Role
from lifecycle.ids import FLEET, EngineId, Party
from lifecycle.replay import replay
from tests.test_inprocess import alone, prompt_of
from tests.tiny import tiny_llama
from transport.engine_lives import open_engine, run_engine
from transport.engine_parts import Loaded, ProgressLines, load
from transport.engine_shell import (
    EXIT_BROKEN,
    EXIT_DONE,
    EXIT_REFUSED,
    EngineShell,
)
from transport.fleet_client import BACKOFF_SECONDS_FIRST, decode_sampling
from transport.pb import (
    admin_pb2,
    admin_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from transport.scheduler_shell import run_scheduler
from transport.settings import EngineSettings, SchedulerSettings
from transport.stores.memory import MemoryStore

pytestmark = pytest.mark.anyio
SAFETY_SECONDS = 30
LENGTHS = (1, 8, 9, 40)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", tied=False)


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return _loaded(directory).model


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return _loaded(directory).tokenizer


def _settings(role: Role, directory: Path, address: str, **others: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "role": role,
            "engine": f"{role.value}-0",
            "scheduler": address,
            "model": str(directory),
            "kv_memory": "512KiB",
            "page_tokens": 8,
            "staging_pages": 4,
            "chunk_tokens": 24,
            **others,
        }
    )


def _loaded(directory: Path, **others: Any) -> Loaded:
    settings = _settings(Role.DECODE, directory, "127.0.0.1:1", **others)
    return load(settings, lambda _stage, _share: None)


@attrs.define
class Running:
    """An engine's shell, and what becomes of it."""

    shell: EngineShell
    stop: anyio.Event = attrs.Factory(anyio.Event)
    ready: anyio.Event = attrs.Factory(anyio.Event)
    ended: anyio.Event = attrs.Factory(anyio.Event)
    code: int | None = None

    async def run(self) -> None:
        self.code = await self.shell.run(ready=self.ready.set, stop=self.stop)
        self.ended.set()


@attrs.define
class Fleet:
    """A scheduler and one engine of each role."""

    address: str
    store: EventStore
    prefill: Running
    decode: Running
    stub: generation_pb2_grpc.GenerationServiceAsyncStub

    async def generate(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
        """Tokens and text of one answer."""
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=generation_pb2.Sampling(
                new_tokens_max=params.max_new_tokens,
                temperature=params.temperature,
                seed=params.seed,
                ignore_eos=params.ignore_eos,
            ),
        )
        tokens: list[int] = []
        text = ""
        async for message in self.stub.Generate(request):
            if message.WhichOneof("step") == "chunk":
                tokens += message.chunk.token_ids
                text += message.chunk.text
        return tokens, text


@asynccontextmanager
async def scheduler(directory: Path, *, store: EventStore, port: int = 0) -> AsyncIterator[str]:
    """A scheduler's address; it is stopped in order at the end."""
    stop, up = anyio.Event(), anyio.Event()
    found: list[str] = []

    def ready(address: str) -> None:
        found.append(address)
        up.set()

    settings = SchedulerSettings(model=str(directory), port=port, growth_tokens=16)

    async def serve() -> None:
        await run_scheduler(settings, ready=ready, stop=stop, store=store)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await up.wait()
        yield found[0]
        stop.set()


@asynccontextmanager
async def fleet(
    directory: Path, *, plane: str = "shared-memory", store: EventStore | None = None
) -> AsyncIterator[Fleet]:
    """A scheduler with engines that are ready; everything ends in order when it is left."""
    torch.set_num_threads(1)
    store = MemoryStore() if store is None else store
    with anyio.fail_after(SAFETY_SECONDS):
        async with AsyncExitStack() as stack:
            address = await stack.enter_async_context(scheduler(directory, store=store))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            loaded = _loaded(directory)
            engines = []
            for role in (Role.PREFILL, Role.DECODE):
                settings = _settings(role, directory, address, plane=plane)
                party = Party(EngineId(settings.engine), 7, 0)
                shell = await stack.enter_async_context(open_engine(settings, loaded, party=party))
                engines.append(Running(shell))
                tasks.start_soon(engines[-1].run)
                await engines[-1].ready.wait()
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            yield Fleet(address, store, engines[0], engines[1], stub)
            for engine in engines:
                engine.stop.set()
            for engine in engines:
                await engine.ended.wait()
            # `replay` finds whatever the log may not hold.
            report = replay((s.position, s.entry) for s in store.tail(1))
            assert not report.findings, report.findings


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else run until a condition holds."""
    while not condition():
        await anyio.lowlevel.checkpoint()


def params(count: int = 20, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **others)


@pytest.mark.parametrize("plane", ["shared-memory", "grpc"])
async def test_answers_are_those_of_the_model_alone(
    directory: Path, model: Model, tokenizer: Tokenizer, plane: str
) -> None:
    """Over either plane, concurrent requests get the tokens of one plain forward."""
    answers: dict[int, tuple[list[int], str]] = {}
    async with fleet(directory, plane=plane) as here:

        async def ask(length: int) -> None:
            answers[length] = await here.generate(prompt_of(length, model), params())

        async with anyio.create_task_group() as clients:
            for length in LENGTHS:
                clients.start_soon(ask, length)
        counted = here.decode.shell.owner.counters()
        posted = here.prefill.shell.owner.counters()
    for length in LENGTHS:
        tokens, _ = alone(model, prompt_of(length, model), params())
        assert answers[length] == (tokens, tokenizer.decode(tokens))
    assert counted.prompt_tokens_computed == len(LENGTHS)
    assert counted.tokens_sampled == 20 * len(LENGTHS)
    assert counted.header_reads_unchecked == 0
    layout = here.decode.shell.memory.pool.layout
    pages = sum(layout.pages_for_tokens(length - 1) for length in LENGTHS)
    assert posted.bytes_posted == pages * layout.page_bytes
    assert posted.prompt_tokens_computed == sum(LENGTHS) - len(LENGTHS)


async def test_what_was_counted_is_there_when_the_answer_is(directory: Path, model: Model) -> None:
    """Whoever asks for the status after an answer finds what was checked and moved for it.

    Signs of life come later: without the counts that go ahead of the end, this would show none.
    """
    async with fleet(directory) as here:
        await here.generate(prompt_of(40, model), params(1))
        async with grpc.aio.insecure_channel(here.address) as channel:
            admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
        seen = {one.engine: one.ranks[0].counters for one in status.engines}
        decode, prefill = seen["decode-0"], seen["prefill-0"]
        counted = here.decode.shell.owner.counters()
        assert decode.header_reads_checked == counted.header_reads_checked > 0
        assert (decode.tokens_sampled, decode.prompt_tokens_computed) == (1, 1)
        assert prefill.bytes_posted == here.prefill.shell.owner.counters().bytes_posted > 0
        assert prefill.prompt_tokens_computed == 39


@pytest.mark.parametrize("broken", [False, True])
async def test_engines_leave_in_order(directory: Path, model: Model, broken: bool) -> None:
    """An engine that is asked to stop, on a stream or between two, finishes what it has first."""
    async with fleet(directory) as here:
        async with anyio.create_task_group() as clients:
            clients.start_soon(here.generate, prompt_of(9, model), params(40))
            await until(lambda: here.decode.shell.owner.counters().tokens_sampled > 0)
            if broken:
                here.decode.shell.break_stream()
            here.decode.stop.set()
        await here.decode.ended.wait()
    assert (here.prefill.code, here.decode.code) == (EXIT_DONE, EXIT_DONE)
    events = [stored.entry.event for stored in here.store.tail(1)]
    assert sum(isinstance(event, Draining) for event in events) == 2
    lost = [event for event in events if isinstance(event, Lost)]
    assert [event.cause for event in lost] == [LostCause.LEFT] * 2


async def test_a_broken_stream_loses_nothing(directory: Path, model: Model) -> None:
    """Cut again and again while it answers, an engine resumes, and each token arrives once."""
    answers: list[tuple[list[int], str]] = []
    async with fleet(directory) as here:

        async def ask() -> None:
            answers.append(await here.generate(prompt_of(40, model), params(60)))

        async with anyio.create_task_group() as clients:
            clients.start_soon(ask)
            for cut_at in (5, 20, 35):
                while here.decode.shell.owner.counters().tokens_sampled < cut_at:
                    await anyio.lowlevel.checkpoint()
                here.decode.shell.break_stream()
                here.prefill.shell.break_stream()
    assert answers[0][0] == alone(model, prompt_of(40, model), params(60))[0]


async def test_engines_join_the_next_scheduler(directory: Path, model: Model) -> None:
    """A new scheduler life finds the engines with their memory, and they serve it."""
    torch.set_num_threads(1)
    first_store = MemoryStore()
    loaded = _loaded(directory)
    with anyio.fail_after(SAFETY_SECONDS):
        async with AsyncExitStack() as stack:
            engines = []
            tasks = await stack.enter_async_context(anyio.create_task_group())
            async with scheduler(directory, store=first_store) as address:
                for role in (Role.PREFILL, Role.DECODE):
                    settings = _settings(role, directory, address)
                    party = Party(EngineId(settings.engine), 7, 0)
                    shell = await stack.enter_async_context(
                        open_engine(settings, loaded, party=party)
                    )
                    engines.append(Running(shell))
                    tasks.start_soon(engines[-1].run)
                    await engines[-1].ready.wait()
            survivor = first_store.survivor()
            port = int(address.rpartition(":")[2])
            async with scheduler(directory, store=survivor, port=port) as address:
                cores = [engine.shell.owner.core for engine in engines]
                await until(lambda: all(core.epoch == 2 and not core.syncing for core in cores))
                async with grpc.aio.insecure_channel(address) as channel:
                    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                    here = Fleet(address, survivor, engines[0], engines[1], stub)
                    tokens, _ = await here.generate(prompt_of(17, model), params())
                assert tokens == alone(model, prompt_of(17, model), params())[0]
                for engine in engines:
                    engine.stop.set()
                for engine in engines:
                    await engine.ended.wait()
            report = replay((s.position, s.entry) for s in survivor.tail(1))
            assert not report.findings


async def test_an_engine_that_does_not_fit_is_refused(directory: Path) -> None:
    """Another page size is another layout: the process ends with 4 and is never ready."""
    ready: list[bool] = []
    async with fleet(directory) as here:
        settings = _settings(Role.DECODE, directory, here.address, engine="decode-1", page_tokens=4)
        code = await run_engine(
            settings,
            ready=lambda: ready.append(True),
            stop=anyio.Event(),
            progress=lambda _stage, _share: None,
        )
    assert code == EXIT_REFUSED
    assert ready == []


# --- a scheduler that misbehaves ------------------------------------------------------------------


S = TypeVar("S", bound=fleet_pb2_grpc.FleetServiceServicer)


class Scripted(fleet_pb2_grpc.FleetServiceServicer):
    """Answers each stream's hello with the next prepared items, and keeps what it hears."""

    def __init__(self, *answers: list[fleet_pb2.SchedulerItem]) -> None:
        self.answers = list(answers)
        self.heard: list[fleet_pb2.EngineItem] = []
        self.streams = 0
        self.status: grpc.StatusCode | None = None

    async def Connect(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        self.streams += 1
        if self.status is not None and self.streams == 1:
            self.answers.pop(0)
            await context.abort(self.status, "on purpose")
        items = self.answers.pop(0) if self.answers else []
        yield fleet_pb2.ConnectResponse(items=items)
        if items and items[-1].WhichOneof("item") == "refused":
            return
        async for request in request_iterator:
            self.heard += request.items


@asynccontextmanager
async def serving(servicer: S) -> AsyncIterator[tuple[S, str]]:
    """Such a scheduler and its address."""
    server = grpc.aio.server()
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop(0)


def welcome(epoch: int, **others: Any) -> fleet_pb2.SchedulerItem:
    return fleet_pb2.SchedulerItem(
        welcome=fleet_pb2.Welcome(epoch=epoch, incarnation=7, heartbeat_ns=10**9, **others)
    )


def refused(reason: fleet_pb2.AttachRefusal.ValueType) -> fleet_pb2.SchedulerItem:
    return fleet_pb2.SchedulerItem(refused=fleet_pb2.AttachRefused(reason=reason))


async def run_against(directory: Path, address: str) -> Running:
    """Run a decode engine to its end."""
    settings = _settings(Role.DECODE, directory, address)
    party = Party(EngineId("decode-0"), 7, 0)
    with anyio.fail_after(SAFETY_SECONDS):
        async with open_engine(settings, _loaded(directory), party=party) as shell:
            engine = Running(shell)
            await engine.run()
            return engine


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (fleet_pb2.ATTACH_REFUSAL_LOST, EXIT_REFUSED),
        (fleet_pb2.ATTACH_REFUSAL_SUPERSEDED, EXIT_REFUSED),
        (fleet_pb2.ATTACH_REFUSAL_INCOMPATIBLE, EXIT_REFUSED),
        (fleet_pb2.ATTACH_REFUSAL_LEFT, EXIT_DONE),
        (fleet_pb2.ATTACH_REFUSAL_PROTOCOL, EXIT_BROKEN),
    ],
)
async def test_a_refusal_ends_the_process(
    directory: Path, reason: fleet_pb2.AttachRefusal.ValueType, code: int
) -> None:
    """Each refusal has its exit code."""
    async with serving(Scripted([refused(reason)])) as (_, address):
        assert (await run_against(directory, address)).code == code


async def test_a_shutting_down_scheduler_is_waited_for(directory: Path) -> None:
    """After a refusal for shutdown the engine comes again."""
    later = [refused(fleet_pb2.ATTACH_REFUSAL_LOST)]
    async with serving(Scripted([refused(fleet_pb2.ATTACH_REFUSAL_SHUTDOWN)], later)) as (
        served,
        address,
    ):
        engine = await run_against(directory, address)
        assert (engine.code, served.streams) == (EXIT_REFUSED, 2)


async def test_a_stream_that_is_cancelled_by_the_other_side_is_opened_again(
    directory: Path,
) -> None:
    """A status of CANCELLED looks like a cancelled task to the library, and is none."""
    later = [refused(fleet_pb2.ATTACH_REFUSAL_LOST)]
    async with serving(Scripted([], later)) as (served, address):
        served.status = grpc.StatusCode.CANCELLED
        engine = await run_against(directory, address)
        assert (engine.code, served.streams) == (EXIT_REFUSED, 2)


async def test_an_older_scheduler_is_not_obeyed(directory: Path) -> None:
    """After epoch 5 a welcome of epoch 4 ends its stream, and nothing is sent on it."""
    async with serving(
        Scripted(
            [
                welcome(5, inventory_wanted=True),
                fleet_pb2.SchedulerItem(synced=fleet_pb2.Synced()),
                welcome(4, inventory_wanted=True),
            ],
            [refused(fleet_pb2.ATTACH_REFUSAL_LOST)],
        )
    ) as (served, address):
        engine = await run_against(directory, address)
        inventories = [i.inventory for i in served.heard if i.WhichOneof("item") == "inventory"]
    assert engine.code == EXIT_REFUSED
    assert engine.ready.is_set()
    assert engine.shell.owner.core.epoch == 5
    assert [inventory.epoch for inventory in inventories] in ([5], [])
    assert served.streams == 2


async def test_who_is_not_obeyed_is_asked_less_and_less_often(directory: Path) -> None:
    """An older scheduler speaks at once and every time, which is no reason for haste."""
    older = [[welcome(4, inventory_wanted=True)] for _ in range(3)]
    last = [refused(fleet_pb2.ATTACH_REFUSAL_LOST)]
    async with serving(Scripted([welcome(5, inventory_wanted=True), welcome(4)], *older, last)) as (
        served,
        address,
    ):
        engine = await run_against(directory, address)
    assert served.streams == 5
    # Three doublings at the least: whether the first stream counts as taken hangs on its speed.
    assert engine.shell._client.backoff_seconds >= 8 * BACKOFF_SECONDS_FIRST


async def test_a_short_lease_shortens_the_wait_between_streams(directory: Path) -> None:
    """Who tries again once a heartbeat reaches a new scheduler within any lease."""
    short = welcome(5, inventory_wanted=True)
    short.welcome.heartbeat_ns = 200_000_000
    async with serving(Scripted([short, refused(fleet_pb2.ATTACH_REFUSAL_LOST)])) as (_, address):
        engine = await run_against(directory, address)
    assert engine.shell._client.backoff_seconds_max == 0.2


async def test_a_log_that_breaks_a_rule_ends_the_process(directory: Path) -> None:
    """An entry that this engine's copy refuses is not survived."""
    entry = fleet_pb2.Publication(position=1)
    entry.entry.request = FLEET
    entry.entry.sequence = 3
    entry.entry.proposer.by_scheduler.epoch = 5
    entry.entry.event.resumed.epoch = 5
    illegal = fleet_pb2.SchedulerItem(publication=entry)
    async with serving(Scripted([welcome(5, inventory_wanted=True), illegal])) as (_, address):
        assert (await run_against(directory, address)).code == EXIT_BROKEN


async def test_a_record_that_is_no_record_ends_the_process(directory: Path) -> None:
    """What cannot be decoded cannot be skipped either."""
    empty = fleet_pb2.SchedulerItem(publication=fleet_pb2.Publication(position=1))
    async with serving(Scripted([welcome(5, inventory_wanted=True), empty])) as (_, address):
        assert (await run_against(directory, address)).code == EXIT_BROKEN


def test_progress_is_a_few_lines() -> None:
    """A hundred calls of one stage are five lines."""
    progress = ProgressLines()
    with capture_logs() as lines:
        for done in range(101):
            progress("load", done / 100)
    said = [(line["event"], line["stage"], line["percent"]) for line in lines]
    assert said == [("model_loading", "load", percent) for percent in (0, 25, 50, 75, 100)]


def test_what_is_not_set_takes_the_samplers_defaults() -> None:
    """Presence decides, so that a zero that was set stays a zero."""
    assert decode_sampling(generation_pb2.Sampling()) == SamplingParams()
    given = generation_pb2.Sampling(
        temperature=0.0, top_p=0.5, top_k=3, seed=4, new_tokens_max=5, stop_strings=["x"]
    )
    given.stop_token_ids.extend([7])
    given.logprobs = given.ignore_eos = True
    expected = SamplingParams(5, 0.0, 0.5, 3, 4, ("x",), (7,), logprobs=True, ignore_eos=True)
    assert decode_sampling(given) == expected
