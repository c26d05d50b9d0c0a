"""The scheduler's owner task: the one place where the core is called and its effects are done.

Owns: the order of effects (append, then publish, answer and tell), time, ticks.
Must not know: gRPC; services send messages here and relay what comes back.

A message is a call that the owner task makes; calls never wait, so nobody sees half of one.
What depends on durability waits beside its stream (`fleet_desk`) or its client (`client_desk`)
until the journal says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar, assert_never

import anyio
import attrs
import structlog

from engine.effects import (
    Answer,
    Append,
    Publish,
    SchedulerEffect,
    Synced,
    TellAdmitted,
    TellClosed,
    TellOutcome,
    TellTokens,
)
from engine.scheduler import Scheduler
from engine.store import EventStore
from lifecycle.events import Attached, Draining, Lost, LostCause, Role
from lifecycle.ids import FLEET
from lifecycle.state import OPEN
from transport.client_desk import ClientDesk
from transport.fleet_desk import FleetDesk
from transport.journal import SLOW_NS, Journal
from transport.uncollected import uncollected

INBOX_MAX = 1024
TICK_SECONDS = 0.05

T = TypeVar("T")
_log = structlog.get_logger("custody.scheduler")


class OwnerEnded(RuntimeError):
    """The owner task has ended; there is nobody to ask."""

    def __init__(self) -> None:
        super().__init__("the scheduler has ended")


@attrs.frozen(kw_only=True)
class OwnerSettings:
    """What the owner task needs to know beyond the core's own limits.

    context_wanted: an explicit context, or None for what model and pools allow.
    """

    model: str
    model_context: int
    context_wanted: int | None
    tokenizer: str
    digest_key: bytes
    tenant_salt: bytes
    lease_ns: int
    reader_tokens_max: int
    log_slow_ns: int = SLOW_NS
    log_room_bytes_min: int = 0


class SchedulerOwner:
    """One scheduler life's owner task, and the desks that it owns."""

    def __init__(
        self,
        core: Scheduler,
        store: EventStore,
        settings: OwnerSettings,
        *,
        now: Callable[[], int],
        monotonic: Callable[[], int],
    ) -> None:
        """`now` is the wall clock and `monotonic` a clock that never jumps, both in ns."""
        self.core = core
        self.settings = settings
        self.now = now
        self.monotonic = monotonic
        self.journal = Journal(
            store,
            self._progress,
            slow_ns=settings.log_slow_ns,
            room_bytes_min=settings.log_room_bytes_min,
            monotonic=monotonic,
        )
        self.fleet = FleetDesk(
            self,
            lease_ns=settings.lease_ns,
            monotonic=monotonic,
            tokenizer=settings.tokenizer,
        )
        self.clients = ClientDesk(
            self,
            digest_key=settings.digest_key,
            tenant_salt=settings.tenant_salt,
            reader_tokens_max=settings.reader_tokens_max,
        )
        self.on_lost: Callable[[str, int, str], None] | None = None
        self._changed: anyio.Event | None = None
        self._send, self._receive = anyio.create_memory_object_stream[Callable[[], None]](INBOX_MAX)
        self._asking: set[anyio.Event] = set()
        self._todo: deque[SchedulerEffect] = deque()
        self._performing = False

    @property
    def changed(self) -> anyio.Event:
        """An event that is set at the next change, made for who waits for it."""
        self._changed = self._changed or anyio.Event()
        return self._changed

    @property
    def context_wanted(self) -> int | None:
        """The context that was asked for, if one was."""
        return self.settings.context_wanted

    # --- messages -----------------------------------------------------------------------------

    async def tell(self, message: Callable[[], None]) -> None:
        """Have the owner task make this call; nothing when it has ended."""
        try:
            await self._send.send(message)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # What a stream's end has to say concerns nobody any more.
            return

    async def ask(self, question: Callable[[], T]) -> T:
        """Have the owner task make this call, and return its answer. Raises OwnerEnded."""
        answers: list[T] = []
        answered = anyio.Event()

        def put() -> None:
            answers.append(question())
            answered.set()

        self._asking.add(answered)
        try:
            await self._send.send(put)
            await answered.wait()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise OwnerEnded from None
        finally:
            self._asking.discard(answered)
        if not answers:
            raise OwnerEnded
        return answers[0]

    async def run(self) -> None:
        """Own the core until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.journal.run, self.tell)
                tasks.start_soon(self._ticking)
                async for message in self._receive:
                    message()
        finally:
            self.close()

    def close(self) -> None:
        """Take no more messages; whoever waits for an answer is told."""
        self._receive.close()
        self._send.close()
        for answered in self._asking:
            answered.set()

    async def _ticking(self) -> None:
        beat_ns = self.monotonic()
        while True:
            await anyio.sleep(TICK_SECONDS)
            await self.tell(self.tick)
            if self.monotonic() - beat_ns >= self.fleet.heartbeat_ns:
                beat_ns = self.monotonic()
                await self.tell(self.fleet.streams.heartbeat)

    def tick(self) -> None:
        """End what is overdue, try again what failed."""
        self.journal.retry()
        self.core.admitting = self.log_refusal is None
        self.perform(self.core.tick(self.now()))
        self.fleet.tick()
        self.clients.tick(self.now())

    # --- lives --------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take in the store's log and begin this life; called once, before `run`.

        What the last life left unflushed is made durable before anybody is shown it: engines give
        pages back on a `Released`, and a crash of the machine could otherwise forget that one.
        """
        store = self.journal.store
        store.flush()
        with uncollected():
            noted = self.journal.take_in()
            done = self.core.resume(noted, self.now(), store.snapshot, last_of=store.last_of)
        self.perform(done)

    def stop_accepting(self) -> None:
        """Refuse new requests from now on."""
        self.core.stop_accepting()
        self._note_change()
        _log.info("scheduler_draining", requests_open=self.requests_open)

    @property
    def requests_open(self) -> int:
        """Requests whose clients wait for an answer."""
        waiting = {p.wanted.request for p in self.core.queue.waiting()}
        opened = {r for r, s in self.core.log.requests.items() if s.phase in OPEN}
        return len(waiting | opened)

    @property
    def settled(self) -> bool:
        """Whether nothing is open or unsettled, and every client has been told."""
        return self.core.idle and not self.clients.waiting

    @property
    def log_refusal(self) -> str | None:
        """Why nothing may be begun that the log would have to hold, or None."""
        journal = self.journal
        if journal.failure is not None:
            return journal.failure
        if journal.low:
            return (
                f"the log has {journal.room_bytes} bytes of room left, "
                f"and nothing is admitted below {journal.room_bytes_min}"
            )
        return None

    @property
    def serving(self) -> bool:
        """Whether a request that comes now has a chance."""
        roles = {life.attached.role for life in self.core.log.fleet.alive() if life.usable}
        ready = roles == {Role.PREFILL, Role.DECODE}
        return ready and self.core.accepting and self.log_refusal is None

    # --- effects ------------------------------------------------------------------------------

    def perform(self, effects: Iterable[SchedulerEffect]) -> None:
        """Append everything first, then do the rest in order.

        A call from within an effect only adds to the work, because entries reach a rank in the
        order of their positions.
        """
        batch = list(effects)
        self.journal.append(e for e in batch if isinstance(e, Append))
        self._todo.extend(batch)
        if self._performing:
            return
        self._performing = True
        try:
            while self._todo:
                self._do(self._todo.popleft())
        finally:
            self._performing = False

    def _do(self, effect: SchedulerEffect) -> None:
        match effect:
            case Append():
                if effect.entry.request == FLEET:
                    self._fleet_changed(effect)
            case Publish():
                self.fleet.streams.publish(effect)
            case Synced():
                self.fleet.streams.synced(effect.party)
            case Answer():
                self.fleet.streams.answer(effect)
            case TellAdmitted():
                self.clients.admitted(effect)
            case TellTokens():
                self.clients.tokens(effect)
            case TellOutcome():
                self.clients.outcome(effect)
            case TellClosed():
                self.clients.closed(effect.request)
            case _:
                assert_never(effect)

    def _fleet_changed(self, effect: Append) -> None:
        event = effect.entry.event
        if isinstance(event, Attached | Draining | Lost):
            _log.info(
                "fleet_changed",
                event_type=type(event).__name__,
                engine=event.engine,
                incarnation=event.incarnation,
                position=effect.position,
            )
        if isinstance(event, Lost):
            if self.on_lost is not None and event.cause is not LostCause.LEFT:
                for process_id in self.fleet.processes(event):
                    self.on_lost(event.engine, process_id, event.cause.value)
            self.fleet.lost(event)
        self.core.limits = attrs.evolve(self.core.limits, context_tokens=self._context())
        self._note_change()

    def _context(self) -> int:
        """What is offered: an explicit context, or what model and largest pools allow."""
        if self.settings.context_wanted is not None:
            return self.settings.context_wanted
        offered = self.settings.model_context
        for role in Role:
            pools = [
                life.attached.pages * life.attached.page_tokens
                for life in self.core.log.fleet.alive()
                if life.attached.role is role
            ]
            if pools:
                offered = min(offered, max(pools))
        return offered

    def _progress(self) -> None:
        self.fleet.streams.release()
        self.clients.release()
        self._note_change()

    def _note_change(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
