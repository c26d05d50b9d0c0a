"""Claims about the scheduler's sealing of its log: at start, again and again, whatever happens."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
import structlog

from engine.store import StoreUnavailable
from tests.serving import deployment
from tests.tiny import tiny_llama
from transport.scheduler_shell import keep_sealing
from transport.stores.memory import MemoryStore

pytestmark = pytest.mark.anyio


class SealingStore(MemoryStore):
    """A store whose sealing fails the first time and finds two parts the second."""

    def __init__(self, ended: anyio.Event) -> None:
        super().__init__()
        self.calls = 0
        self._ended = ended

    def seal(self) -> int:
        self.calls += 1
        if self.calls == 1:
            raise StoreUnavailable("no space left")
        if self.calls == 3:
            anyio.from_thread.run_sync(self._ended.set)
        return 2


async def test_the_log_is_sealed_again_and_again_whatever_happens() -> None:
    """A failure to seal is a line and no end; the next time comes."""
    ended = anyio.Event()
    store = SealingStore(ended)
    with structlog.testing.capture_logs() as lines:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: keep_sealing(store, pause_seconds=0.0))
            await ended.wait()
            tasks.cancel_scope.cancel()
    assert [line["event"] for line in lines][:2] == ["log_not_sealed", "log_sealed"]
    assert lines[1]["parts"] == 2


async def test_a_scheduler_seals_its_log_at_start(tmp_path: Path) -> None:
    """A full part of an earlier life need not wait for the first pause, and serving goes on."""
    store = SealingStore(anyio.Event())
    async with deployment(tiny_llama(tmp_path / "tiny"), store=store, engines=False) as here:
        await here.tail_until("resumed")
        while not store.calls:
            await anyio.lowlevel.checkpoint()
    assert here.codes == [0]
