"""A scheduler that dies at any moment, and the next life on what the store holds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import anyio
import grpc
import pytest

from engine.effects import Append, TellClosed
from engine.scheduler import Scheduler
from lifecycle.decide import Limits
from lifecycle.events import Aborted, Admitted, Cause, Entry, Finished, LostCause, Resumed
from lifecycle.ids import FLEET, RequestId
from lifecycle.replay import replay
from lifecycle.state import OPEN, Phase
from tests.driver import DIGEST, Driver, Sizes
from tests.serving import Deployment, ask, deployment
from tests.test_retention import eventful
from tests.test_services import begin, last
from tests.tiny import tiny_llama
from transport.pb import generation_pb2
from transport.stores.segments import SegmentStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


# --- at every event ---------------------------------------------------------------------------


def test_a_log_cut_behind_any_event_begins_another_life(tmp_path: Path) -> None:
    """What was open is aborted, the epoch is new, and when every engine is gone nothing is open.

    Half of the next batch stands behind each cut, as a machine that lost its power leaves it.
    """
    log = eventful().log
    whole = tmp_path / "whole"
    store = SegmentStore(whole)
    store.take_epoch()
    ends = []
    (segment,) = whole.glob("*.segment")
    for _, entry in log:
        store.append(entry.request, entry.sequence, [entry])
        ends.append(segment.stat().st_size)
    store.close()
    aborted = 0
    for count, end in enumerate(ends[:-1], start=1):
        folder = tmp_path / "cut"
        shutil.copytree(whole, folder)
        with (folder / segment.name).open("r+b") as file:
            file.truncate(end + (ends[count] - end) // 2)
        store = SegmentStore(folder)
        assert store.last_position == count
        epoch = store.take_epoch()
        core = Scheduler(limits=Limits(context_tokens=64), epoch=epoch, digest=DIGEST)
        stored = ((s.position, s.entry) for s in store.tail(1))
        effects = core.resume(stored, log[-1][1].time_ns, last_of=store.last_of)
        assert not [s for s in core.log.requests.values() if s.phase in OPEN]
        for life in core.log.fleet.alive():
            attached = life.attached
            life_name = (attached.engine, attached.incarnation)
            effects += core.lose(*life_name, LostCause.LEASE, core.now_ns)
        assert core.idle
        for effect in effects:
            if isinstance(effect, Append):
                entry = effect.entry
                assert store.append(entry.request, entry.sequence, [entry]) == effect.position
        history = [(s.position, s.entry) for s in store.tail(1)]
        assert replay(history).clean
        resumed = [e.event for _, e in history if isinstance(e.event, Resumed)]
        assert [one.epoch for one in resumed] == sorted({one.epoch for one in resumed})
        ended = [e.event for _, e in history if isinstance(e.event, Aborted)]
        aborted += sum(one.cause is Cause.SCHEDULER_RESTARTED for one in ended)
        store.close()
        shutil.rmtree(folder)
    assert aborted > 50


def test_a_start_holds_what_is_not_over_and_nothing_else() -> None:
    """However long the log is; what the new life decides does not hang on what it has forgotten."""
    driver = eventful()
    for _ in range(40):
        driver.submit(7, 3)
        driver.run()
    driver.submit(7, 30)
    log = tuple(driver.log)
    lasts = {entry.request: position for position, entry in log}
    held: list[int] = []

    def read(core: Scheduler) -> Iterator[tuple[int, Entry]]:
        for position, entry in log:
            yield position, entry
            held.append(len(core.entries))

    thrifty, lavish = [
        Scheduler(limits=Limits(context_tokens=64), epoch=9, digest=DIGEST) for _ in range(2)
    ]
    decided = thrifty.resume(read(thrifty), log[-1][1].time_ns, last_of=lasts.get)
    assert max(held) < 12
    assert len(lasts) > 50
    same = lavish.resume(log, log[-1][1].time_ns)
    assert decided == [e for e in same if not isinstance(e, TellClosed) or e in decided]
    assert thrifty.log.requests == lavish.log.requests
    assert thrifty.entries == lavish.entries


@pytest.mark.parametrize("pages", [8, 24])
def test_a_life_that_ends_at_any_step_leaves_every_page_to_come_home(pages: int) -> None:
    """Engines bring their inventories; each request has one outcome, and the next ones are served."""
    steps = 0
    while True:
        driver = Driver(Sizes(pages=pages)).pair().run()
        asked = [driver.submit(7, 10), driver.submit(5, 6)]
        if not all(driver.advance() for _ in range(steps)):
            break
        before = dict(driver.outcomes)
        driver.restart()
        driver.run()
        for request in asked:
            # Who waited was never in the log: its client lost its stream, and nothing is owned.
            outcome = driver.outcomes.get(request)
            assert outcome is not None or driver.events(request) == []
            if outcome is not None and request not in before:
                assert isinstance(outcome, Aborted)
                assert outcome.cause is Cause.SCHEDULER_RESTARTED
        after = driver.submit(7, 5)
        assert after not in asked
        driver.run()
        assert isinstance(driver.outcomes[after], Finished)
        for core in driver.cores.values():
            assert core.allocator.free == pages, steps
        assert replay(driver.log).clean
        steps += 3
    assert steps > 60


def test_the_fleet_is_as_it_was() -> None:
    """A new life knows every engine, and no engine has to come again to be known."""
    driver = eventful()
    alive = {life.attached.engine for life in driver.scheduler.log.fleet.alive()}
    driver.restart()
    assert {life.attached.engine for life in driver.scheduler.log.fleet.alive()} == alive
    assert driver.scheduler.log.state(RequestId(FLEET)).phase is Phase.NEW


# --- clients ----------------------------------------------------------------------------------


async def _asked_until_refused(here: Deployment, asked: generation_pb2.GenerateRequest) -> None:
    """Ask again and again; the answer's tokens are forgotten at some moment."""
    while True:
        await here.generation.Complete(generation_pb2.CompleteRequest(generation=asked))


async def joined(here: Deployment, before: Deployment) -> None:
    """The engines of an earlier scheduler come to this one."""
    before.decode.pause_at = None
    for engine in (before.prefill, before.decode):
        engine.refused, engine.synced, engine.address = None, anyio.Event(), here.address
        here.tasks.start_soon(engine.run)
        await engine.synced.wait()


@pytest.mark.anyio
async def test_a_retry_with_its_key_runs_once_in_the_next_life(model: Path, tmp_path: Path) -> None:
    """The request that was open is aborted; all who come with its key share one new request."""
    asked = ask(new=6, key="once")
    store = SegmentStore(tmp_path)
    async with deployment(model, store=store, pause_at=2, drain_seconds=0.1) as first:
        _, open_request = await begin(first, asked)
        await first.decode.paused.wait()
        lost = store.last_position
    async with deployment(model, store=SegmentStore(tmp_path), engines=False) as here:
        await joined(here, first)
        first.decode.pause_at = 2
        call, request = await begin(here, asked)
        again, same = await begin(here, asked)
        assert same == request != open_request
        first.decode.go_on()
        assert await last(call) == await last(again) == "outcome"
        await here.tail_until(*["released"] * 2, request=request)
        # Whoever comes when nobody holds its tokens any more is told so, and nothing runs again.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _asked_until_refused(here, asked)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert request in str(caught.value.details())
        admitted = [
            s.entry.request
            for s in here.store.tail(lost)
            if isinstance(s.entry.event, Admitted) and s.entry.attempt == 1
        ]
        assert admitted == [request]
        assert replay([(s.position, s.entry) for s in here.store.tail(1)]).clean
