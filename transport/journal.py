"""The store as the scheduler's owner task uses it: append at once, group commit behind.

Owns: what is appended, what is durable, what the store has not taken yet, and when to flush.
Must not know: what an entry means, or who waits for it.

When the store refuses, entries wait here in their order and are appended by `retry`; a store
that has to be reopened gets those again that were appended and not durable.
Whatever depends on an entry asks `appended` and `durable` and waits as well.
A flush that takes too long counts as a refusal until it ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial

import anyio
import anyio.to_thread
import structlog

from engine.effects import Append
from engine.store import Append as StoreAppend
from engine.store import EventStore, StoreUnavailable
from lifecycle.events import Entry
from lifecycle.snapshot import restore
from lifecycle.tally import Tally
from transport.log_index import LogIndex

COMMIT_SECONDS = 0.005
COMMIT_EVENTS = 512
BACKLOG_MAX = 65_536
"""Entries that may wait for the store; beyond it engines' proposals wait unanswered."""

SLOW_NS = 5_000_000_000
ROOM_SECONDS = 1.0
"""How often the room on the disk is looked at while nothing is written."""

Worked = tuple[int | StoreUnavailable | None, int | None]
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

    def __init__(
        self,
        store: EventStore,
        on_progress: Callable[[], None],
        *,
        slow_ns: int = SLOW_NS,
        room_bytes_min: int = 0,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`on_progress` is called by the owner task whenever more is appended or durable.

        slow_ns: a flush that takes longer is a failure; room_bytes_min: less room is `low`.
        """
        self.store = store
        self.room_bytes_min = room_bytes_min
        self.room_bytes: int | None = None
        self.index = LogIndex()
        self.tally = Tally()
        self.appended = store.last_position
        self.durable = store.durable_position
        self.failure: str | None = None
        self._grown: anyio.Event | None = None
        self._backlog: deque[Append] = deque()
        self._unflushed: deque[Append] = deque()
        self._noted = self.appended
        self._reopening = False
        self._slow_ns = slow_ns
        self._monotonic = monotonic
        self._flushing_since_ns = 0
        self._on_progress = on_progress
        self._dirty = anyio.Event()
        self._urgent = anyio.Event()

    def take_in(self) -> Iterator[tuple[int, Entry]]:
        """The store's entries in order, each counted and listed when it is asked for.

        What was before the log's first entry is not counted; what is left of it is listed.
        """
        snapshot = self.store.snapshot
        if snapshot is not None:
            self.tally = Tally(restore(snapshot, judging=False))
            for position, entry in snapshot.entries:
                self.index.note(position, entry)
        for one in self.store.tail(self.store.first_position):
            self.index.note(one.position, one.entry)
            self.tally.note(one.entry)
            yield one.position, one.entry

    @property
    def full(self) -> bool:
        """Whether no more entries should be made before the store takes some."""
        return len(self._backlog) >= BACKLOG_MAX

    @property
    def waiting(self) -> int:
        """Entries that the store has not taken yet."""
        return len(self._backlog)

    @property
    def low(self) -> bool:
        """Whether so little room is left that nothing should be begun."""
        return self.room_bytes is not None and self.room_bytes < self.room_bytes_min

    @property
    def grown(self) -> anyio.Event:
        """An event that is set when more is appended, made for who waits for it."""
        self._grown = self._grown or anyio.Event()
        return self._grown

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
        since_ns = self._flushing_since_ns
        waited_ns = self._monotonic() - since_ns if since_ns else 0
        if waited_ns > self._slow_ns:
            self._failed(f"a flush has not ended after {self._slow_ns / 1e9:g} s")
        if self._backlog:
            self._write()
            self._on_progress()
        if self.failure is not None:
            self.want(self.durable + 1)

    async def run(self, tell: Tell) -> None:
        """Flush when somebody waits, or a few milliseconds or many events behind."""
        while True:
            flush = False
            with anyio.move_on_after(ROOM_SECONDS):
                await self._dirty.wait()
                flush = True
            if flush:
                with anyio.move_on_after(COMMIT_SECONDS):
                    await self._urgent.wait()
            result, room_bytes = await anyio.to_thread.run_sync(self.begin(flush=flush))
            await tell(partial(self.end, result, room_bytes))

    @property
    def dirty(self) -> bool:
        """Whether something is to be flushed."""
        return self._dirty.is_set()

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for that."""
        return self._urgent.is_set()

    def begin(self, *, flush: bool) -> Callable[[], Worked]:
        """What is to be done away from the owner task now; `end` is then told the result."""
        if flush:
            self._dirty, self._urgent = anyio.Event(), anyio.Event()
        self._flushing_since_ns = self._monotonic() if flush else 0
        return partial(self._work, flush)

    def _write(self) -> None:
        if not self._backlog or self._reopening:
            return
        batch = [StoreAppend(e.entry.request, e.entry.sequence, (e.entry,)) for e in self._backlog]
        try:
            first = self.store.append_batch(batch)
        except StoreUnavailable as error:
            self._refused(error)
            return
        for position, effect in enumerate(self._backlog, start=first):
            if position != effect.position:
                raise JournalBroken(expected=effect.position, found=position)
            if position > self._noted:
                # What is appended again after a reopening was noted the first time.
                self._noted = position
                self.index.note(position, effect.entry)
                self.tally.note(effect.entry)
        self.appended = max(self.appended, first + len(batch) - 1)
        self._unflushed += self._backlog
        self._backlog.clear()
        self._dirty.set()
        if self.appended - self.durable >= COMMIT_EVENTS:
            self._urgent.set()
        if self._grown is not None:
            self._grown.set()
            self._grown = None

    def _work(self, flush: bool) -> Worked:
        """In a worker thread: the durable position or what went wrong, and the room."""
        result: int | StoreUnavailable | None = None
        try:
            if flush and self._reopening:
                self.store.reopen()
            if flush:
                result = self.store.flush()
        except StoreUnavailable as error:
            result = error
        try:
            return result, self.store.room_bytes()
        except StoreUnavailable:
            return result, self.room_bytes

    def end(self, result: int | StoreUnavailable | None, room_bytes: int | None) -> None:
        """Take in what became of it."""
        self._flushing_since_ns = 0
        was_low, self.room_bytes = self.low, room_bytes
        if self.low is not was_low:
            _log.warning(
                "log_room_changed",
                low=self.low,
                room_bytes=room_bytes,
                room_bytes_min=self.room_bytes_min,
            )
            self._on_progress()
        if result is None:
            return
        if isinstance(result, StoreUnavailable):
            self._refused(result)
            self._on_progress()
            return
        self.durable = max(self.durable, result)
        while self._unflushed and self._unflushed[0].position <= self.durable:
            self._unflushed.popleft()
        if self._reopening:
            # The store has cut off what was not durable.
            self._reopening = False
            self._backlog.extendleft(reversed(self._unflushed))
            self._unflushed.clear()
            self._write()
        elif self.failure is not None and not self._backlog:
            self.failure = None
            _log.info("log_available_again", durable_position=result)
        self._on_progress()

    def _refused(self, error: StoreUnavailable) -> None:
        self._reopening = self._reopening or error.lasting
        self._failed(str(error))

    def _failed(self, reason: str) -> None:
        if self.failure is None:
            _log.error("log_unavailable", reason=reason, waiting=len(self._backlog))
        self.failure = reason
