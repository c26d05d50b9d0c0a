"""The store as the scheduler's owner task uses it: append at once, group commit behind.

Owns: what is appended, what is durable, what the store has not taken yet, and when to flush.
Must not know: what an entry means, or who waits for it.

When the store refuses, entries wait here in their order and are appended by `retry`.
Whatever depends on an entry asks `appended` and `durable` and waits as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import anyio
import anyio.to_thread
import structlog

from engine.effects import Append
from engine.store import Append as StoreAppend
from engine.store import EventStore, StoreUnavailable
from transport.log_index import LogIndex

COMMIT_SECONDS = 0.005
COMMIT_EVENTS = 512
BACKLOG_MAX = 65_536
"""Entries that may wait for the store; beyond it engines' proposals wait unanswered."""

Tell = Callable[[Callable[[], None]], Awaitable[None]]
_log = structlog.get_logger("custody.journal")


class JournalBroken(RuntimeError):
    """The store put an entry elsewhere than the sequencer: somebody else writes, or a bug."""

    def __init__(self, *, expected: int, found: int) -> None:
        super().__init__(f"the entry of position {expected} was appended at {found}")
        self.expected = expected
        self.found = found


class Journal:
    """One store, one owner. Every method but `run` is called by the owner task."""

    def __init__(self, store: EventStore, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called by the owner task whenever more is appended or durable."""
        self.store = store
        self.index = LogIndex()
        self.appended = store.last_position
        self.durable = store.durable_position
        self.failure: str | None = None
        self.grown = anyio.Event()
        self._backlog: deque[Append] = deque()
        self._on_progress = on_progress
        self._dirty = anyio.Event()
        self._urgent = anyio.Event()

    @property
    def full(self) -> bool:
        """Whether no more entries should be made before the store takes some."""
        return len(self._backlog) >= BACKLOG_MAX

    def append(self, effects: Iterable[Append]) -> None:
        """Append in this order, or keep for later what the store does not take now."""
        self._backlog.extend(effects)
        self._write()

    def want(self, position: int) -> None:
        """Somebody waits until this position is durable."""
        if position > self.durable:
            self._dirty.set()
            self._urgent.set()

    def retry(self) -> None:
        """Try again what failed; called from time to time."""
        if self._backlog:
            self._write()
            self._on_progress()
        if self.failure is not None:
            self.want(self.appended)

    async def run(self, tell: Tell) -> None:
        """Flush when somebody waits, or a few milliseconds or many events behind."""
        while True:
            await self._dirty.wait()
            with anyio.move_on_after(COMMIT_SECONDS):
                await self._urgent.wait()
            self._dirty, self._urgent = anyio.Event(), anyio.Event()
            result = await anyio.to_thread.run_sync(self._flush)
            await tell(partial(self._flushed, result))

    def _write(self) -> None:
        if not self._backlog:
            return
        batch = [StoreAppend(e.entry.request, e.entry.sequence, (e.entry,)) for e in self._backlog]
        try:
            first = self.store.append_batch(batch)
        except StoreUnavailable as error:
            self._failed(str(error))
            return
        for position, effect in enumerate(self._backlog, start=first):
            if position != effect.position:
                raise JournalBroken(expected=effect.position, found=position)
            self.index.note(position, effect.entry)
        self.appended = first + len(batch) - 1
        self._backlog.clear()
        self._dirty.set()
        if self.appended - self.durable >= COMMIT_EVENTS:
            self._urgent.set()
        self.grown.set()
        self.grown = anyio.Event()

    def _flush(self) -> int | StoreUnavailable:
        try:
            return self.store.flush()
        except StoreUnavailable as error:
            return error

    def _flushed(self, result: int | StoreUnavailable) -> None:
        if isinstance(result, StoreUnavailable):
            self._failed(str(result))
            return
        if self.failure is not None and not self._backlog:
            self.failure = None
            _log.info("log_available_again", durable_position=result)
        self.durable = max(self.durable, result)
        self._on_progress()

    def _failed(self, reason: str) -> None:
        if self.failure is None:
            _log.error("log_unavailable", reason=reason, waiting=len(self._backlog))
        self.failure = reason
