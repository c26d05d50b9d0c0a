"""The scheduler while its log cannot be written, is slow, or has little room left."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import anyio.to_thread
import grpc
import pytest

from lifecycle.events import Aborted, Cause
from lifecycle.ids import RequestId
from lifecycle.replay import replay
from tests.log_files import read_log
from tests.serving import Deployment, ask, deployment, details
from tests.test_services import begin, last, rest, status_of
from tests.tiny import tiny_llama
from transport.pb import admin_pb2, generation_pb2
from transport.stores.disk import Disk
from transport.stores.segments import SegmentStore

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


class FailingDisk(Disk):
    """A disk that fails, stands still or fills up on demand."""

    def __init__(self) -> None:
        self.sync_error = 0
        self.write_error = 0
        self.room = 1 << 40
        self.failed = threading.Event()
        self.moving = threading.Event()
        self.moving.set()

    def sync(self, handle: int) -> None:
        assert self.moving.wait(20)
        if self.sync_error:
            self.failed.set()
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        super().sync(handle)

    def write_at(self, handle: int, data: bytes | memoryview, *, offset: int) -> int:
        if self.write_error:
            self.failed.set()
            raise OSError(self.write_error, os.strerror(self.write_error))
        return super().write_at(handle, data, offset=offset)

    def room_bytes(self, folder: Path) -> int:
        return self.room


async def settled(here: Deployment, *, failing: bool) -> admin_pb2.GetStatusResponse:
    """The status once the scheduler says that its log fails, or no more."""
    while True:
        status = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        if bool(status.log_failure) is failing:
            return status


async def tokens_of(call: Any, most: int) -> None:
    """Read so many tokens; an end before them fails."""
    read = 0
    while read < most:
        step = await call.read()
        assert isinstance(step, generation_pb2.GenerateResponse)
        assert step.HasField("chunk"), step
        read += len(step.chunk.token_ids)


async def reason_now(here: Deployment) -> str:
    """The reason for which a small request is refused just now, if it is."""
    try:
        await rest(here.generation.Generate(ask(new=1)))
    except grpc.aio.AioRpcError as error:
        return str(details(error)[0].reason)
    return ""


def conforms(folder: Path) -> int:
    """The files are whole and break no rule; how many entries they hold."""
    log = read_log(folder)
    assert log.complete
    report = replay([(s.position, s.entry) for s in log.entries])
    assert list(report.findings) == []
    return report.entries


@pytest.mark.parametrize("fault", ["flush fails", "no room", "flush hangs"])
async def test_decoding_streams_on_and_its_end_waits_for_the_store(
    model: Path, tmp_path: Path, fault: str
) -> None:
    """Past growth that nobody could log, to the last token; the end is told when it is durable.

    Newcomers are refused meanwhile, and served again afterwards.
    """
    disk = FailingDisk()
    store = SegmentStore(tmp_path / "log", disk=disk)
    async with deployment(model, store=store, pause_at=2, log_wait_seconds=0.1) as here:
        call, request = await begin(here, ask(new=100))
        await here.decode.paused.wait()
        if fault == "flush fails":
            disk.sync_error = errno.EIO
        elif fault == "no room":
            disk.write_error = errno.ENOSPC
        else:
            disk.moving.clear()
        here.decode.go_on()
        await tokens_of(call, 100)
        await settled(here, failing=True)
        assert await reason_now(here) == "LOG_UNAVAILABLE"
        known = [type(s.entry.event).__name__ for s in store.read(RequestId(request))]
        if fault == "no room":
            assert "Finished" not in known
        disk.sync_error = disk.write_error = 0
        disk.moving.set()
        assert await last(call) == "outcome"
        await here.tail_until("finished", request=request)
        await settled(here, failing=False)
        assert await reason_now(here) == ""
    assert here.codes == [0]
    assert conforms(tmp_path / "log") == store.last_position


async def test_what_was_appended_and_not_flushed_is_appended_again(
    model: Path, tmp_path: Path
) -> None:
    """After a failed flush the log holds every entry once, at the place that was told before."""
    disk = FailingDisk()
    store = SegmentStore(tmp_path / "log", disk=disk)
    async with deployment(model, store=store) as here:
        for _ in range(3):
            # A flush that is still due would fail before the request is asked for.
            while store.durable_position < store.last_position:
                await here.admin.GetStatus(admin_pb2.GetStatusRequest())
            disk.failed.clear()
            disk.sync_error = errno.EIO
            call = here.generation.Generate(ask(new=3))
            await anyio.to_thread.run_sync(disk.failed.wait)
            before = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
            disk.sync_error = 0
            steps = await rest(call)
            assert steps[-1].HasField("outcome")
            request = steps[0].admission.request_id
            await here.tail_until("released", "released", request=request)
            after = await settled(here, failing=False)
            assert after.log_position > before.log_position
    entries = conforms(tmp_path / "log")
    assert entries == store.last_position == store.durable_position


async def test_an_admission_that_is_not_stored_ends_for_that_cause(
    model: Path, tmp_path: Path
) -> None:
    """Its client is told LOG_UNAVAILABLE, and with room again the log says the same of its end."""
    disk = FailingDisk()
    store = SegmentStore(tmp_path / "log", disk=disk)
    async with deployment(model, store=store) as here:
        disk.write_error = errno.ENOSPC
        error = await status_of(here.generation.Generate(ask()))
        info = details(error)[0]
        assert info.reason == "LOG_UNAVAILABLE"
        disk.write_error = 0
        request = info.metadata["request_id"]
        await here.tail_until("aborted", request=request)
        events = [stored.entry.event for stored in store.read(RequestId(request))]
        causes = [event.cause for event in events if isinstance(event, Aborted)]
        assert causes == [Cause.LOG_UNAVAILABLE]
    conforms(tmp_path / "log")


async def test_an_end_that_a_slow_store_does_not_take_is_never_a_success(
    model: Path, tmp_path: Path
) -> None:
    """At the deadline the client is told LOG_UNAVAILABLE, although every token came."""
    disk = FailingDisk()
    store = SegmentStore(tmp_path / "log", disk=disk)
    async with deployment(
        model, store=store, pause_at=2, log_wait_seconds=0.1, request_seconds_max=1.0
    ) as here:
        call = here.generation.Generate(ask(new=4))
        await here.decode.paused.wait()
        disk.moving.clear()
        here.decode.go_on()
        error = await status_of(call)
        assert details(error)[0].reason == "LOG_UNAVAILABLE"
        disk.moving.set()


async def test_little_room_refuses_newcomers_before_the_disk_is_full(
    model: Path, tmp_path: Path
) -> None:
    """Both numbers are named, what runs goes on and ends well, and room lets newcomers in again."""
    disk = FailingDisk()
    store = SegmentStore(tmp_path / "log", disk=disk)
    async with deployment(model, store=store, pause_at=2, log_room_bytes_min=1000) as here:
        call, _ = await begin(here, ask(new=60))
        await here.decode.paused.wait()
        disk.room = 999
        status = await settled(here, failing=True)
        assert (status.log_free_bytes, status.log_free_bytes_min) == (999, 1000)
        error = await status_of(here.generation.Generate(ask(new=1)))
        assert details(error)[0].reason == "LOG_UNAVAILABLE"
        assert "999" in str(error.details())
        assert "1000" in str(error.details())
        here.decode.go_on()
        assert await last(call) == "outcome"
        disk.room = 1000
        await settled(here, failing=False)
        assert await reason_now(here) == ""


async def test_an_engine_that_was_shown_growth_ahead_lacks_nothing_after_a_broken_stream(
    model: Path, tmp_path: Path
) -> None:
    """Its cursor is beyond entries that it was not shown; they come again, each once."""
    disk = FailingDisk()
    store = SegmentStore(tmp_path / "log", disk=disk)
    async with deployment(model, store=store, pause_at=2) as here:
        call, _ = await begin(here, ask(new=100))
        short, other = await begin(here, ask(new=3))
        await here.decode.paused.wait()
        disk.write_error = errno.ENOSPC
        here.decode.go_on()
        await tokens_of(call, 30)
        here.decode.break_stream()
        # What was decoded before the break alone would be fewer.
        await tokens_of(call, 60)
        disk.write_error = 0
        assert await last(short) == "outcome"
        assert await last(call) == "outcome"
        await here.tail_until("released", "released", request=other)
        status = await settled(here, failing=False)
        while any(e.ranks[0].pages.free != e.ranks[0].pages.capacity for e in status.engines):
            status = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert here.codes == [0]
    conforms(tmp_path / "log")
