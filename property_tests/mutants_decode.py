"""Decode cores with one guard removed or one proof forged.

Owns: what each of them does instead of the product's method.
Must not know: what finds them; the registry says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.core import EngineCore
from engine.decode import DecodeCore, DecodeJob
from engine.effects import Propose, VerifyPages
from engine.holdings import Job, proposal_key
from lifecycle.events import (
    Aborted,
    Admitted,
    Cause,
    Proposable,
    Proposal,
    Purpose,
)
from lifecycle.ids import PageRange, RequestId
from lifecycle.state import Grant, Phase, RequestState, Settlement

PARTIES = "drained-before-released/parties"
RECOVERED = "drained-before-released/recovered"

# --- settlement -------------------------------------------------------------------------------


class OneAckOfMany(DecodeCore):
    """The first acknowledgement is taken for all writer ranks."""

    def _release(self, state: RequestState, grant: Grant) -> None:
        if grant.drained or not grant.reserved.parties:
            super()._release(state, grant)


class Patient(DecodeCore):
    """Waits for every party by itself, whatever the log would allow."""

    def _release(self, state: RequestState, grant: Grant) -> None:
        if not grant.undrained:
            super()._release(state, grant)


class FreeOnAbort(DecodeCore):
    """An abort frees at once; everything else waits for the drain."""

    def _release(self, state: RequestState, grant: Grant) -> None:
        if isinstance(state.outcome, Aborted) or not grant.undrained:
            super()._release(state, grant)


class FreeOnFailure(DecodeCore):
    """A client's abort waits for the drain; a failed transfer frees at once."""

    def _release(self, state: RequestState, grant: Grant) -> None:
        outcome = state.outcome
        asked = isinstance(outcome, Aborted) and outcome.cause in {
            Cause.CLIENT_CANCEL,
            Cause.DEADLINE,
        }
        if not asked or not grant.undrained:
            super()._release(state, grant)


class StaleAck(DecodeCore):
    """A writer's acknowledgement of an earlier attempt is taken for this one's."""

    def _release(self, state: RequestState, grant: Grant) -> None:
        before = {p for g in state.grants if g.attempt < grant.attempt for p in g.drained}
        if all(party in before for party in grant.undrained):
            super()._release(state, grant)


class DoubleRelease(DecodeCore):
    """Two paths give the same pages back."""

    def _take_back(self, request: RequestId) -> None:
        for holding in self.held_for(request):
            grant = self.log.state(request).grant(holding.reserved.grant)
            if grant is not None and grant.settlement is Settlement.RELEASED:
                self.allocator.give_back((r.first, r.count) for r in holding.reserved.pages)
        super()._take_back(request)


class FreeUnderStep(DecodeCore):
    """Pages are released while a step may still touch them."""

    def touched(self, request: RequestId) -> bool:
        return False


class AttemptForgotten(DecodeCore):
    """Whatever carries an abort mark settles its present attempt, and no earlier one."""

    def _settle(self, state: RequestState) -> None:
        aborted = isinstance(state.outcome, Aborted)
        kept = state.grants
        if aborted:
            grants = tuple(g for g in kept if g.attempt == state.attempt)
            state = _with_grants(state, grants)
        super()._settle(state)


def _with_grants(state: RequestState, grants: tuple[Grant, ...]) -> RequestState:
    return RequestState(
        state.request,
        state.phase,
        state.sequence,
        state.attempt,
        state.time_ns,
        state.deadline_ns,
        state.settle_by_ns,
        state.first,
        state.admitted,
        grants,
        state.outcome,
        state.relayed,
    )


class PartialAcquire(DecodeCore):
    """Where not all pages can be had, those that could are kept and forgotten."""

    def take(self, count: int, after: int | None = None) -> tuple[PageRange, ...] | None:
        taken = super().take(count, after)
        if taken is None and self.allocator.free:
            self.allocator.take(self.allocator.free)
        return taken


# --- reading ----------------------------------------------------------------------------------


class ReadsWhatCame(DecodeCore):
    """Decode takes what the writers say for the whole."""

    drains_awaited = True

    def _check_arrived(self, state: RequestState, job: DecodeJob) -> None:
        if job.verified is not None or job.verifying:
            super()._check_arrived(state, job)
            return
        grants = [g for g in state.current(Purpose.DESTINATION) if g.id.owner == self.party]
        if not grants or (self.drains_awaited and any(g.undrained for g in grants)):
            return
        writes = tuple(
            (g.reserved, w.transfer.tokens, w.transfer.pages, w.transfer.digest)
            for g in grants
            for w in g.written
        )
        covered = sum(tokens.count for _, tokens, _, _ in writes)
        if self.drains_awaited or covered == len(job.payload.tokens) - 1:
            job.verifying = True
            self.effects.append(VerifyPages(state.request, state.attempt, writes))


class ReadBeforeDrain(ReadsWhatCame):
    """Decode reads once everything is covered, though a writer has not drained."""

    drains_awaited = False


class BelievesPlaceholder(ReadsWhatCame):
    """Decode believes its own copy of the prompt, and takes what the writers say for the whole."""

    def _same_prompt(self, admitted: Admitted, job: Job) -> bool:
        return True


class OnlyKv(DecodeCore):
    """Pages are reserved, and checked, for the first kind of state alone."""

    def _reserve(self, state: RequestState, job: DecodeJob) -> None:
        DecodeCore._reserve(self, state, job)


class OneTag(DecodeCore):
    """Every grant bears the same tag, so that comparing tags tells nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mint = lambda: 1

    def copy(self, mint: Callable[[], int]) -> OneTag:
        return super().copy(lambda: 1)


class DecodesUnverified(DecodeCore):
    """Decode begins when it has compared, before the log says `Verified`."""

    def _runnable(self, job: DecodeJob) -> bool:
        state = self.log.state(job.request)
        early = state.phase is Phase.ADMITTED and job.verified is not None
        if early and self.is_live(job) and job.finished is None:
            return self._position(job) < self._seat(job, state).room
        return super()._runnable(job)


# --- proposing, and lives ---------------------------------------------------------------------


class EarlyFinal(EngineCore[Any]):
    """Proposes without asking its own copy, and takes every refusal for final."""

    def propose(self, state: RequestState, body: Proposable) -> bool:
        key = proposal_key(state.request, state.attempt, body)
        if key in self.keys or key in self.accepted or key in self.refused:
            return False
        proposal = Proposal(self.party, self.next_number, state.request, state.attempt, body)
        self.outstanding[self.next_number] = proposal
        self.keys.add(key)
        self.next_number += 1
        self.effects.append(Propose(proposal))
        return True


class EarlyFinalDecode(EarlyFinal, DecodeCore):
    """A decode rank of that kind."""


class KeepsPosition(EngineCore[Any]):
    """A new epoch is obeyed, but the copy of the log and its positions are kept."""

    def begin_sync(self, epoch: int) -> None:
        if not self.epoch:
            super().begin_sync(epoch)
            return
        self.epoch = epoch
        self.syncing = True


class KeepsPositionDecode(KeepsPosition, DecodeCore):
    """A decode rank of that kind."""


# --- the two that test the search -------------------------------------------------------------


class OneByOne(DecodeCore):
    """A step runs one request. Slower, and nothing is wrong with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch = 1


class KeepsOne(DecodeCore):
    """A page is taken before anybody asks for one, and belongs to nobody: wrong in every run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allocator.take(1)
