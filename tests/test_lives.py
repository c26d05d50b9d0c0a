"""An engine that was given up begins another life: what is over before, and what is not proved."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import attrs
import grpc
import pytest
import torch

from engine.dataplane import DataPlane, Descriptor, Write
from engine.dataplane_errors import PeerMismatch, PlaneMisused
from engine.model import Model
from engine.store import EventStore
from lifecycle.events import (
    Aborted,
    ByEngine,
    Drained,
    Entry,
    FenceScope,
    Lost,
    LostCause,
    Proof,
    Released,
    Reserved,
    Role,
)
from lifecycle.ids import EngineId, Party, RequestId
from lifecycle.replay import replay
from lifecycle.state import Phase
from tests.driver import DECODE, PREFILL, Driver, Sizes
from tests.fake_engine import FakeEngine
from tests.inprocess import Deployment as Inprocess
from tests.serving import deployment, details
from tests.test_engine_shell import (
    SAFETY_SECONDS,
    Running,
    Scripted,
    _loaded,
    _settings,
    fleet,
    params,
    refused,
    serving,
    until,
    welcome,
)
from tests.test_inprocess import prompt_of
from tests.tiny import tiny_llama
from transport import engine_lives
from transport.engine_hooks import EngineHooks
from transport.engine_lives import end_life, open_engine, run_engine
from transport.engine_shell import EXIT_DONE, EXIT_REFUSED
from transport.fleet_client import PreviousLife
from transport.pb import fleet_pb2
from transport.planes.segment import Bytes, Mapping, copy_bytes
from transport.planes.shared_memory import PLANE_NAME, SharedMemoryPlane, create_segment
from transport.process_ends import this_process

pytestmark = pytest.mark.anyio
LOST = refused(fleet_pb2.ATTACH_REFUSAL_LOST)
SYNCED = fleet_pb2.SchedulerItem(synced=fleet_pb2.Synced())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", tied=False)


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return _loaded(directory).model


# --- one life after another -----------------------------------------------------------------------


class Reaching(Scripted):
    """A scheduler that also maps the pool of every life when it joins, as a writer does."""

    def __init__(self, *answers: list[fleet_pb2.SchedulerItem]) -> None:
        super().__init__(*answers)
        self.hellos: list[fleet_pb2.Hello] = []
        self.mappings: list[Mapping] = []
        self.old_refused: list[bool] = []

    async def Connect(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        first = await anext(aiter(request_iterator))
        hello = first.items[0].hello
        if hello.plane == PLANE_NAME and hello.endpoint:
            self._reach(hello)
        self.hellos.append(hello)
        async for response in super().Connect(request_iterator, context):
            yield response

    def _reach(self, hello: fleet_pb2.Hello) -> None:
        for before in self.hellos:
            try:
                Mapping(Descriptor.decode(before.endpoint, plane=PLANE_NAME)).close()
            except PeerMismatch:
                self.old_refused.append(True)
            else:
                self.old_refused.append(False)
        for mapping in self.mappings:
            assert mapping.pool is not None
            mapping.pool[:] = 0xEE
        self.mappings.append(Mapping(Descriptor.decode(hello.endpoint, plane=PLANE_NAME)))


class Remembering(EngineHooks):
    """Sees whether the planes of earlier lives, and so all that they hold, are gone."""

    def __init__(self) -> None:
        self._planes: list[weakref.ref[DataPlane]] = []
        self.gone: list[bool] = []

    def plane(self, plane: DataPlane) -> DataPlane:
        gc.collect()
        self.gone = [known() is None for known in self._planes]
        self._planes.append(weakref.ref(plane))
        return plane


async def lived(directory: Path, address: str, role: Role, **others: Any) -> tuple[int, int]:
    """The exit code of an engine's process, and how often it said that it was ready."""
    torch.set_num_threads(1)
    ready: list[bool] = []
    hooks = Remembering()
    with anyio.fail_after(SAFETY_SECONDS):
        code = await run_engine(
            _settings(role, directory, address, **others),
            ready=lambda: ready.append(True),
            stop=anyio.Event(),
            progress=lambda _stage, _share: None,
            hooks=hooks,
        )
    assert all(hooks.gone), "nothing of an earlier life is kept"
    return code, len(ready)


@pytest.mark.parametrize("plane", ["shared-memory", "grpc"])
@pytest.mark.parametrize("role", list(Role))
async def test_another_life_has_its_own_name_and_addresses(
    directory: Path, role: Role, plane: str
) -> None:
    """It says which life it was and that this one is quiet; nothing of the old one is published."""
    joined = [welcome(5, inventory_wanted=True), SYNCED]
    left = refused(fleet_pb2.ATTACH_REFUSAL_LEFT)
    async with serving(Reaching([*joined, LOST], [*joined, left])) as (served, address):
        assert await lived(directory, address, role, plane=plane) == (EXIT_DONE, 1)
    first, second = served.hellos
    assert not first.HasField("previous")
    assert second.party.incarnation > first.party.incarnation
    assert second.previous == fleet_pb2.PreviousLife(
        incarnation=first.party.incarnation, highest_proposal=first.highest_proposal, quiet=True
    )
    assert (second.pages, second.layout) == (first.pages, first.layout)
    assert (second.endpoint != first.endpoint) is (role is Role.DECODE)


async def test_what_lands_in_the_old_pool_is_read_by_nobody(directory: Path) -> None:
    """A writer that has the old pool mapped writes into memory of its own; nobody maps it anew."""
    joined = [welcome(5, inventory_wanted=True), SYNCED]
    left = refused(fleet_pb2.ATTACH_REFUSAL_LEFT)
    async with serving(Reaching([*joined, LOST], [*joined, LOST], [*joined, left])) as (
        served,
        address,
    ):
        assert await lived(directory, address, Role.DECODE) == (EXIT_DONE, 1)
    assert len(served.mappings) == 3
    assert served.old_refused == [True] * 3
    last = served.mappings[-1].pool
    assert last is not None
    assert not last.any()
    del last
    for mapping in served.mappings:
        assert mapping.close()


async def test_a_process_that_is_given_up_again_and_again_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many lives within a minute show that something is wrong with its place."""
    monkeypatch.setattr(engine_lives, "LIVES_MAX", 2)
    async with serving(Reaching(*[[LOST]] * 4)) as (served, address):
        assert await lived(directory, address, Role.PREFILL) == (EXIT_REFUSED, 0)
    assert served.streams == 3


@pytest.mark.parametrize(
    "reason", [fleet_pb2.ATTACH_REFUSAL_SUPERSEDED, fleet_pb2.ATTACH_REFUSAL_RULE_BROKEN]
)
async def test_who_has_lost_its_name_or_its_word_ends(
    directory: Path, reason: fleet_pb2.AttachRefusal.ValueType
) -> None:
    """Another process has the place, or only the process's end is a proof: it exits with 4."""
    async with serving(Reaching([refused(reason)], [LOST])) as (served, address):
        assert await lived(directory, address, Role.PREFILL) == (EXIT_REFUSED, 0)
    assert served.streams == 1


# --- the end of a life ----------------------------------------------------------------------------


@attrs.define
class Held:
    """Copies that wait until they are let go."""

    entered: threading.Event = attrs.Factory(threading.Event)
    going: threading.Event = attrs.Factory(threading.Event)

    def copy(self, target: Bytes, source: Bytes) -> None:
        self.entered.set()
        assert self.going.wait(SAFETY_SECONDS)
        copy_bytes(target, source)


def mapped() -> int:
    """How often this process has a pool's shared memory mapped, by the kernel's word."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:custody-pool")


async def test_a_life_whose_copies_have_not_ended_has_no_successor(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the end of the process could prove that they never land; once they ended, it is quiet.

    Then no peer's memory is mapped any more, so nothing more can be written.
    """
    torch.set_num_threads(1)
    monkeypatch.setattr(engine_lives, "WIND_UP_SECONDS_MAX", 0.0)
    segment = create_segment(1 << 16, incarnation="decode-0/1")
    owner, held = SharedMemoryPlane(segment=segment), Held()
    owner.register(segment.buffer)
    party, settings = (
        Party(EngineId("prefill-0"), 7, 0),
        _settings(Role.PREFILL, directory, "127.0.0.1:1"),
    )
    with anyio.fail_after(SAFETY_SECONDS):
        async with open_engine(settings, _loaded(directory), party=party) as shell:
            plane, posts = shell.memory.plane, shell.owner.posts  # type: ignore[attr-defined]
            plane._copy = held.copy  # type: ignore[attr-defined]
            posts.peer(DECODE, owner.descriptor())
            peer = posts._open(DECODE)
            write = Write(source_offset=0, target_offset=0, length=64)
            ticket = plane.post(peer, [write], "decode-0/1/0/1")
            assert await anyio.to_thread.run_sync(held.entered.wait, SAFETY_SECONDS)
            assert await end_life(shell) is None
            assert shell.memory.plane is plane
            before = mapped()
            held.going.set()
            monkeypatch.setattr(engine_lives, "WIND_UP_SECONDS_MAX", float(SAFETY_SECONDS))
            assert await end_life(shell) == PreviousLife(7, 0, quiet=True)
            with pytest.raises(PlaneMisused):
                plane.post(peer, [write], ticket.grant)
            assert mapped() == before - 1
    owner.shutdown()
    segment.close()


async def test_a_pool_that_somebody_still_looks_at_has_no_successor(directory: Path) -> None:
    """Memory that could not be unmapped might still be read, so the process ends."""
    settings = _settings(Role.DECODE, directory, "127.0.0.1:1")
    party = Party(EngineId("decode-0"), 7, 0)
    with anyio.fail_after(SAFETY_SECONDS):
        async with open_engine(settings, _loaded(directory), party=party) as shell:
            octets = shell.memory.pool.memory.octets
            assert await end_life(shell) is None
            assert octets.numel()


def test_a_process_of_many_lives_is_watched_once(directory: Path) -> None:
    """Whoever waits for its end holds one handle of it, and none for lives that owe nothing."""

    def handles() -> int:
        found = 0
        for link in Path("/proc/self/fd").iterdir():
            # The one by which the folder is read is gone by now.
            with suppress(FileNotFoundError):
                found += "pidfd" in str(link.readlink())
        return found

    loaded = _loaded(directory)
    decode, before = Inprocess(loaded.model, loaded.tokenizer).decode, handles()
    for incarnation in range(2, 12):
        decode.process(Party(EngineId("p0"), incarnation, 0), this_process())
    decode.process(Party(EngineId("p1"), 1, 0), this_process())
    assert handles() == before + 2
    # An earlier life that is told of late takes nobody's place.
    decode.process(Party(EngineId("p0"), 1, 0), this_process())
    assert Party(EngineId("p0"), 11, 0) in decode._writers


# --- what the scheduler makes of it ---------------------------------------------------------------


def _given_up(cause: LostCause) -> tuple[Driver, RequestId]:
    """A request whose writer is lost before it has drained: its pages are in quarantine."""
    driver = Driver(Sizes(fence_scope=FenceScope.NONE, attempts_max=1)).pair().run()
    request = driver.submit(7, 10)
    driver.run_until(lambda: driver.events(request).count("Reserved") == 2)
    driver.kill(PREFILL, cause)
    driver.run()
    driver.tick(driver.now_ns + 2 * driver.sizes.settle_ns)
    driver.run()
    assert driver.events(request).count("Quarantined") == 2
    assert driver.cores[DECODE].allocator.free < driver.sizes.pages
    return driver, request


def _hear_quiet(driver: Driver, party: Party) -> list[Entry]:
    """What the log gains by that."""
    before = len(driver.log)
    driver.perform(driver.scheduler.hear_quiet(party, highest=40, now_ns=driver.now_ns))
    driver.run()
    assert replay(driver.log).clean
    return [entry for _, entry in driver.log[before:]]


def test_a_quiet_life_has_drained_whatever_it_could_write() -> None:
    """Its own word brings pages home that nobody else could prove quiet; again is nothing."""
    driver, request = _given_up(LostCause.LEASE)
    gained = _hear_quiet(driver, PREFILL)
    assert [type(entry.event) for entry in gained] == [Drained, Released]
    drained = gained[0].event
    assert isinstance(drained, Drained)
    assert (drained.party, drained.proof) == (PREFILL, Proof.ACKNOWLEDGED)
    assert gained[0].proposer == ByEngine(PREFILL, 41)
    assert driver.phase(request) in {Phase.CLOSED, Phase.NEW}
    assert driver.cores[DECODE].allocator.free == driver.sizes.pages
    assert _hear_quiet(driver, PREFILL) == []


def test_who_broke_a_rule_is_not_believed() -> None:
    """None of that life's proofs counts, so its pages stay out of circulation."""
    driver, _ = _given_up(LostCause.RULE_BROKEN)
    assert _hear_quiet(driver, PREFILL) == []
    assert driver.cores[DECODE].allocator.free < driver.sizes.pages


def test_who_lives_or_was_never_there_has_no_last_word() -> None:
    """Only a life that is over can be quiet as a whole."""
    driver = Driver().pair().run()
    request = driver.submit(7, 10)
    driver.run_until(lambda: driver.events(request).count("Reserved") == 2)
    for party in (PREFILL, attrs.evolve(PREFILL, incarnation=9)):
        before = len(driver.log)
        driver.perform(driver.scheduler.hear_quiet(party, highest=40, now_ns=driver.now_ns))
        assert len(driver.log) == before


class Following(FakeEngine):
    """An engine that says which life it was."""

    def __init__(self, address: str, incarnation: int, before: int) -> None:
        super().__init__(Role.PREFILL, address, incarnation=incarnation)
        self.before = before

    def hello(self) -> fleet_pb2.Hello:
        hello = super().hello()
        hello.previous.incarnation, hello.previous.quiet = self.before, True
        return hello


async def test_a_process_comes_back_in_its_own_place_only(directory: Path) -> None:
    """It follows the life that it was, and never takes the place of another process."""
    async with deployment(directory) as here:
        for incarnation, before in ((1, 1), (2, 3)):
            engine = Following(here.address, incarnation, before)
            await engine.run()
            assert engine.refused is not None
            assert engine.refused.reason == fleet_pb2.ATTACH_REFUSAL_PROTOCOL
        other = Following(here.address, 9, 8)
        await other.run()
        assert other.refused is not None
        assert other.refused.reason == fleet_pb2.ATTACH_REFUSAL_SUPERSEDED
        assert "incarnation 1 has taken the place of 8" in other.refused.message
        own = Following(here.address, 2, 1)
        here.tasks.start_soon(own.run)
        await own.synced.wait()
        lost = [s.entry.event for s in here.store.tail(1) if isinstance(s.entry.event, Lost)]
        assert [event.cause for event in lost] == [LostCause.REPLACED]


# --- a write after its Drained --------------------------------------------------------------------


async def test_a_writer_caught_after_its_drained_is_lost_and_ends(
    directory: Path, model: Model
) -> None:
    """What its mapping still reaches shows by its tag as soon as somebody decodes from there.

    The request that met it gets no token of that step, and the writer's word counts no more: its
    process ends instead of beginning another life.
    """
    async with fleet(directory) as here:
        await here.generate(prompt_of(17, model), params(4))
        first = reserved(here.store)[0]
        pool, layout = here.decode.shell.memory.pool, here.decode.shell.memory.pool.layout
        page = first.pages[0].first
        spans = [
            slice(offset, offset + layout.block_bytes)
            for offset, _ in layout.run_spans(pages=pool.pages, start=page, count=1)
        ]
        reach = writers_view(here.prefill, here.decode.shell.party)
        kept = [reach[span].copy() for span in spans]
        sampled = here.decode.shell.owner.counters().tokens_sampled
        errors: list[grpc.aio.AioRpcError] = []

        async def ask() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await here.generate(prompt_of(18, model), params(150))
            errors.append(caught.value)

        async with anyio.create_task_group() as clients:
            clients.start_soon(ask)
            counters = here.decode.shell.owner.counters
            await until(lambda: counters().tokens_sampled > sampled + 2)
            for span, block in zip(spans, kept, strict=True):
                reach[span] = block
        await here.prefill.ended.wait()
        del reach
    assert page in [run.first for run in reserved(here.store)[1].pages]
    assert details(errors[0])[0].reason == "KV_ISOLATION_VIOLATION"
    events = [stored.entry.event for stored in here.store.tail(1)]
    aborted = next(event for event in events if isinstance(event, Aborted))
    assert (aborted.page, aborted.tag_found) == (page, first.tag)
    lost = [event for event in events if isinstance(event, Lost)]
    assert lost[0] == Lost(EngineId("prefill-0"), 7, LostCause.RULE_BROKEN)
    assert (here.prefill.code, here.prefill.shell.lost) == (EXIT_REFUSED, False)


def reserved(store: EventStore) -> list[Reserved]:
    """The grants that let a writer in, in order."""
    events = [stored.entry.event for stored in store.tail(1)]
    return [event for event in events if isinstance(event, Reserved) and event.parties]


def writers_view(writer: Running, owner: Party) -> Bytes:
    """The owner's pool as the writer's process has it mapped."""
    posts, plane = writer.shell.owner.posts, writer.shell.memory.plane  # type: ignore[attr-defined]
    pool: Bytes = plane._links[posts._peers[owner].serial].mapping.pool  # type: ignore[attr-defined]
    return pool
