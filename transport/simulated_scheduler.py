"""The scheduler of a simulated run: the real owner, desks, journal and core, life after life.

Owns: lives of the scheduler, its flushes and ticks on the virtual clock, and its open doors.
Must not know: engines, clients' patience, and when faults come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

import attrs

from engine.digests import keyed_digest
from engine.scheduler import Scheduler
from engine.simulator_clock import Clock
from engine.store import StoreUnavailable
from lifecycle.decide import Limits
from transport.fleet_streams import Link
from transport.journal import COMMIT_SECONDS
from transport.pb import fleet_pb2 as pb
from transport.scheduler_owner import TICK_SECONDS, OwnerSettings, SchedulerOwner
from transport.simulated_control import MILLISECOND
from transport.simulated_store import SimulatedStore

SECOND = 1_000_000_000
EPOCH_NS = 1_700_000_000 * SECOND
"""Where the wall clock stands when a run begins."""


@attrs.frozen(kw_only=True)
class Terms:
    """How long the scheduler is patient, and what it offers."""

    context_tokens: int
    growth_tokens: int
    attempts_max: int = 3
    settle_ns: int = 2 * SECOND
    lease_ns: int = SECOND
    queue_ns: int = 4 * SECOND
    queue_limit: int = 64
    digest_key: bytes = b"k" * 32
    tenant_salt: bytes = b"s" * 32


class SchedulerPart:
    """One store and the lives of the scheduler over it."""

    def __init__(
        self, terms: Terms, *, make: Callable[..., Scheduler], clock: Clock, chance: Random
    ) -> None:
        self.terms = terms
        self.store = SimulatedStore()
        self.owner: SchedulerOwner | None = None
        self.lives = 0
        self.hung = False
        self.flush_ns = 2 * MILLISECOND
        self.on_death: Callable[[], None] = lambda: None
        self._make_core = make
        self._clock = clock
        self._chance = chance
        self._held_up: deque[Callable[[], None]] = deque()
        self._flushing = False
        self._waking = False

    # --- lives --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life on the store; later again where the store cannot be used."""
        if self.owner is not None:
            return
        owner = self._make(self.store.take_epoch())
        try:
            owner.resume()
        except StoreUnavailable:
            # The process ends, and whoever started it tries again; opening cuts off what is torn.
            owner.close()
            self.store.reopen()
            self._clock.after(100 * MILLISECOND, self.start)
            return
        self.lives += 1
        self.owner = owner
        self._flushing = self._waking = self.hung = False
        self._held_up.clear()
        self._later(int(TICK_SECONDS * SECOND), self._tick)
        self._later(owner.fleet.heartbeat_ns, self._beat)
        self._after()

    def _make(self, epoch: int) -> SchedulerOwner:
        terms = self.terms
        core = self._make_core(
            limits=Limits(
                context_tokens=terms.context_tokens,
                growth_tokens=terms.growth_tokens,
                attempts_max=terms.attempts_max,
                settle_ns=terms.settle_ns,
            ),
            epoch=epoch,
            digest=keyed_digest(terms.digest_key),
            queue_limit=terms.queue_limit,
            queue_ns=terms.queue_ns,
        )
        settings = OwnerSettings(
            model="simulated",
            model_context=terms.context_tokens,
            context_wanted=None,
            tokenizer="simulated",
            digest_key=terms.digest_key,
            tenant_salt=terms.tenant_salt,
            lease_ns=terms.lease_ns,
            reader_tokens_max=4096,
        )
        return SchedulerOwner(
            core,
            self.store,
            settings,
            now=lambda: EPOCH_NS + self._clock.now_ns,
            monotonic=lambda: self._clock.now_ns,
        )

    def die(self, *, machine: bool) -> None:
        """The process is gone; with the machine some of what was not flushed is gone as well."""
        owner = self.owner
        if owner is None:
            return
        self.owner = None
        owner.close()
        sick, full = self.store.sick, self.store.full
        self.store = self.store.after_crash(self._chance, machine=machine)
        self.store.sick, self.store.full = sick, full
        self.on_death()

    def go_on(self) -> None:
        """A process that was stopped goes on with everything that waited for it."""
        self.hung = False
        while self._held_up and not self.hung:
            self._held_up.popleft()()
        self._after()

    # --- messages -----------------------------------------------------------------------------

    def call(self, message: Callable[[SchedulerOwner], None]) -> bool:
        """Have the owner take a message; False when there is none."""
        owner = self.owner
        if owner is None:
            return False
        if self.hung:
            self._held_up.append(partial(self._take, owner, message))
        else:
            self._take(owner, message)
        return True

    def _take(self, owner: SchedulerOwner, message: Callable[[SchedulerOwner], None]) -> None:
        if owner is self.owner:
            message(owner)
            self._after()

    def open(self, link: Link, hello: pb.Hello) -> bool:
        """An engine's stream begins."""
        return self.call(lambda owner: owner.fleet.hello(link, hello))

    def items(self, link: Link, items: tuple[pb.EngineItem, ...]) -> None:
        """An engine says something."""
        self.call(lambda owner: owner.fleet.items(link, items))

    def gone(self, link: Link) -> None:
        """An engine's stream has ended."""
        self.call(lambda owner: owner.fleet.streams.gone(link))

    # --- time ---------------------------------------------------------------------------------

    def _later(self, delay_ns: int, call: Callable[[SchedulerOwner], None]) -> None:
        """Call this life later, if it still lives; one that hangs does it when it goes on."""
        owner = self.owner
        assert owner is not None, "a life asks for its own future"

        def due() -> None:
            if owner is self.owner:
                self.call(call)

        self._clock.after(delay_ns, due)

    def _tick(self, owner: SchedulerOwner) -> None:
        owner.tick()
        self._later(int(TICK_SECONDS * SECOND), self._tick)

    def _beat(self, owner: SchedulerOwner) -> None:
        owner.fleet.streams.heartbeat()
        self._later(owner.fleet.heartbeat_ns, self._beat)

    # --- flushes ------------------------------------------------------------------------------

    def _after(self) -> None:
        """After every message: flush what is to be flushed, as `Journal.run` does."""
        owner = self.owner
        if owner is None or self._flushing or not owner.journal.dirty:
            return
        if owner.journal.urgent:
            self._flush(owner)
        elif not self._waking:
            self._waking = True
            self._clock.after(int(COMMIT_SECONDS * SECOND), partial(self._commit, owner))

    def _commit(self, owner: SchedulerOwner) -> None:
        if owner is not self.owner:
            return
        self._waking = False
        if not self._flushing and not self.hung and owner.journal.dirty:
            self._flush(owner)

    def _flush(self, owner: SchedulerOwner) -> None:
        self._flushing = True
        work = owner.journal.begin(flush=True)
        takes = self._chance.randrange(1, self.flush_ns + 1)

        def done() -> None:
            if owner is not self.owner:
                return
            self._flushing = False
            result = work()
            self.call(lambda one: one.journal.end(*result))

        self._clock.after(takes, done)
