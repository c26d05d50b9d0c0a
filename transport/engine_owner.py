"""The one owner of an engine's core: it performs effects and hands out work for the compute thread.

Owns: the order in which effects are performed, and which job is next.
Must not know: streams, tasks, threads; every method is called from one thread and returns at once.

Work for the compute thread is a `Job`; what it returns is called by the owner's thread again.
Jobs run one at a time, so no copy and no comparison ever runs beside a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import attrs

from engine.core import EngineCore
from engine.dataplane import DataPlane
from engine.decode import DecodeCore
from engine.effects import (
    EngineEffect,
    Forget,
    Payload,
    Propose,
)
from engine.holdings import Job as CoreJob
from engine.pool import KVPool
from engine.prefill import PrefillCore
from lifecycle.events import Cause, Entry, Failed, Proposal
from lifecycle.ids import GrantId, Party, RequestId
from lifecycle.state import LIVE, Settlement

Continuation = Callable[[], None]
Job = Callable[[], Continuation]


@attrs.frozen
class NewTokens:
    """New tokens of one attempt, for the scheduler; `first` counts the attempt's from 0."""

    request: RequestId
    attempt: int
    first: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    stop: str | int | None = None


Outgoing = Proposal | NewTokens
Send = Callable[[Outgoing], None]
Note = Callable[..., None]
"""A sentence and its fields, for the process's own log."""


@attrs.frozen
class Counters:
    """What an engine has counted since it started."""

    header_reads_checked: int
    header_mismatches: int
    header_reads_unchecked: int
    prompt_tokens_computed: int
    tokens_sampled: int
    steps: int
    bytes_posted: int
    pages_free: int
    slots_used: int


CoreT = TypeVar("CoreT", bound="EngineCore[CoreJob] | PrefillCore | DecodeCore")


class Owner(Generic[CoreT]):
    """What prefill and decode share."""

    def __init__(
        self, core: CoreT, *, plane: DataPlane, pool: KVPool, send: Send, note: Note
    ) -> None:
        self.core = core
        self.plane = plane
        self.pool = pool
        self.note = note
        self._send = send
        self._jobs: deque[Job] = deque()

    # --- what the scheduler says --------------------------------------------------------------

    def peer(self, party: Party, descriptor: str) -> None:
        """Another engine's rank can be reached there; empty if it has no pool to write to."""

    def process(self, party: Party, process: str) -> None:
        """Another engine's rank is that process, as its `this_process` says; empty if unknown."""

    def receive(self, position: int, entry: Entry, payload: Payload | None = None) -> None:
        """A published entry. Raises LogDivergedError."""
        self.perform(self.core.receive(position, entry, payload))

    def answer(self, number: int, position: int, rule: str = "") -> None:
        """A proposal was answered."""
        self.perform(self.core.answer(number, position, rule))

    def begin_sync(self, epoch: int, *, next_number: int) -> None:
        """A scheduler life that does not know this engine; it expects that proposal next."""
        self.core.begin_sync(epoch)
        # What was proposed since the stream's first message has never been sent.
        self.core.next_number = next_number

    def end_sync(self) -> None:
        """Everything that concerns this rank has been published."""
        if self.core.syncing:
            self.perform(self.core.end_sync())

    def repeat(self) -> None:
        """Send everything again that was not answered; tokens first, since proposals count them."""
        for proposal in self.core.retransmit():
            self._send(proposal)

    # --- work ---------------------------------------------------------------------------------

    def next_job(self) -> Job | None:
        """What the idle compute thread does next: copies and comparisons first, then a step."""
        if self._jobs:
            return self._jobs.popleft()
        return self._step_job()

    def perform(self, effects: list[EngineEffect]) -> None:
        """Perform effects in order."""
        for effect in effects:
            match effect:
                case Propose(proposal):
                    self._send(proposal)
                    self._note_failure(proposal)
                case Forget(request):
                    # The compute thread may be using what it keeps for other requests.
                    self._jobs.append(partial(self._forget_job, request))
                    self._forgotten(request)
                case _:
                    self._perform_one(effect)

    def _note_failure(self, proposal: Proposal) -> None:
        """Say here, too, why an attempt failed; that pages are short is no fault."""
        body = proposal.body
        if isinstance(body, Failed) and body.cause is not Cause.OUT_OF_PAGES:
            request, cause = proposal.request, body.cause.value
            self.note("attempt_failed", request_id=request, cause=cause, reason=body.message)

    def poll(self) -> None:
        """The data plane has, or may have, something to say."""

    def tick(self) -> None:
        """Try again what could not be done; called a few times a second or more."""
        self.poll()

    def wind_up(self) -> bool:
        """After the last job: begin no write any more, and say whether none can land any more.

        False until that is proved, so ask again.
        """
        return True

    # --- what is held -------------------------------------------------------------------------

    @property
    def restless(self) -> bool:
        """Whether something waits for a tick."""
        return False

    @property
    def idle(self) -> bool:
        """Whether nothing is held, owed or running, save what is quarantined for ever."""
        return not (self.core.outstanding or self._jobs or self.core.running) and all(
            self._is_over(job) for job in self.core.jobs.values()
        )

    def _is_over(self, job: CoreJob) -> bool:
        state = self.core.log.state(job.request)
        if state.phase in LIVE:
            return False
        grants = [state.grant(h.reserved.grant) for h in self.core.held_for(job.request)]
        return all(g is not None and g.settlement is Settlement.QUARANTINED for g in grants)

    def writable(self) -> tuple[GrantId, ...]:
        """Grants of others that this engine may still write."""
        return ()

    def exposed(self, _grant: GrantId) -> bool:
        """Whether others were let into a grant."""
        return False

    def counters(self) -> Counters:
        """What was counted up to now."""
        reads = self.pool.counters
        prompt_tokens, sampled, steps = self._computed()
        return Counters(
            header_reads_checked=reads.reads_checked,
            header_mismatches=reads.mismatches,
            header_reads_unchecked=reads.reads_unchecked,
            prompt_tokens_computed=prompt_tokens,
            tokens_sampled=sampled,
            steps=steps,
            bytes_posted=self._bytes_posted(),
            pages_free=self.core.allocator.free,
            slots_used=len(self.core.jobs),
        )

    # --- what subclasses say ------------------------------------------------------------------

    def _step_job(self) -> Job | None:
        raise NotImplementedError

    def _perform_one(self, effect: EngineEffect) -> None:
        raise NotImplementedError

    def _forget_job(self, request: RequestId) -> Continuation:
        raise NotImplementedError

    def _forgotten(self, request: RequestId) -> None:
        """The request is closed for this engine."""

    def _computed(self) -> tuple[int, int, int]:
        """Prompt tokens computed, tokens sampled, steps."""
        raise NotImplementedError

    def _bytes_posted(self) -> int:
        return 0


def nothing() -> None:
    """What is left to do after a job that only tidied up."""
