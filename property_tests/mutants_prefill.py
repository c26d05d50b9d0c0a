"""Prefill cores with one guard removed or one proof forged.

Owns: what each of them does instead of the product's method.
Must not know: what finds them; the registry says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from engine.effects import EngineEffect
from engine.holdings import Job
from engine.prefill import Posted, PrefillCore, PrefillJob
from lifecycle.events import Aborted, Admitted, Drained, Proof, Purpose
from lifecycle.ids import GrantId
from lifecycle.state import LIVE, Grant, Phase, RequestState
from property_tests.mutants_decode import EarlyFinal, KeepsPosition


class FreeUnderCompute(PrefillCore):
    """A rank gives its source back when its share is written, though it still computes."""

    def _release_source(self, state: RequestState, job: PrefillJob) -> None:
        computed, job.computed = job.computed, self._wanted(job)
        super()._release_source(state, job)
        job.computed = computed


class AckEarly(PrefillCore):
    """A write in flight is acknowledged as ended."""

    def _writing(self, _grant: GrantId) -> bool:
        return False


class SharedFlag(PrefillCore):
    """One flag stands for all writes into a grant; the first that ends takes it down."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended: frozenset[GrantId] = frozenset()

    def post_ended(
        self, ticket: int, how: Posted, *, size_bytes: int = 0, digest: int = 0
    ) -> list[EngineEffect]:
        self.ended |= {self.writings[ticket].post.grant}
        return super().post_ended(ticket, how, size_bytes=size_bytes, digest=digest)

    def _writing(self, grant: GrantId) -> bool:
        return grant not in self.ended and super()._writing(grant)


class AckForgotten(PrefillCore):
    """Cleaning up after an abort forgets whom to tell that the writes have ended."""

    def _settle(self, state: RequestState) -> None:
        if isinstance(state.outcome, Aborted):
            for grant in state.grants:
                if grant.id.owner == self.party:
                    self._release(state, grant)
            return
        super()._settle(state)


class AbortedRequeued(PrefillCore):
    """An aborted attempt goes on as if it were unfinished."""

    def is_live(self, job: Job) -> bool:
        state = self.log.state(job.request)
        over = state.phase in {Phase.ENDED, Phase.CLOSED} and state.attempt == job.attempt
        return (over and not job.failed) or super().is_live(job)

    def _settle(self, state: RequestState) -> None:
        job = self.jobs.get(state.request)
        if job is None or not self.is_live(job) or state.phase in LIVE:
            super()._settle(state)

    def _take_back(self, request: Any) -> None:
        job = self.jobs.get(request)
        if job is None or not self.is_live(job):
            super()._take_back(request)


class LateChunk(PrefillCore):
    """What was computed is still sent after the attempt's end."""

    def _advance(self, state: RequestState) -> None:
        super()._advance(state)
        job = self.jobs.get(state.request)
        if job is None or job.source is None or state.phase in LIVE or not job.computed:
            return
        if state.grant(job.source.grant) is None or job.source.grant not in self.holdings:
            return
        for grant in state.current(Purpose.DESTINATION):
            if self.party in grant.drained and grant.id not in self.posted:
                self._write(state, job, grant)


class DrainThenPost(PrefillCore):
    """A party drains first and posts the rest afterwards."""

    def _write(self, state: RequestState, job: PrefillJob, grant: Grant) -> None:
        if job.computed:
            self.propose(state, Drained(grant.id, self.party, Proof.ACKNOWLEDGED))
        super()._write(state, job, grant)


class SendBeforeCompute(PrefillCore):
    """A chunk is sent while the step that fills it still runs."""

    def _write(self, state: RequestState, job: PrefillJob, grant: Grant) -> None:
        computed = job.computed
        job.computed += job.computing
        super()._write(state, job, grant)
        job.computed = computed


class FreeSource(PrefillCore):
    """What a write reads is given back when it is posted, not when it has ended."""

    def _post(self, job: PrefillJob, grant: Grant, *, first: int, pages: int) -> None:
        ticket = self.next_ticket
        super()._post(job, grant, first=first, pages=pages)
        if ticket in self.writings:
            post = self.writings[ticket].post
            self.staging.give_back((r.first, r.count) for r in post.staging)
            self.writings[ticket].post = attrs.evolve(post, staging=())


class ShortHandoff(PrefillCore):
    """Prefill's own idea of the length is believed, and it is a page short."""

    def _wanted(self, job: PrefillJob) -> int:
        return max(0, super()._wanted(job) - self.page_tokens)


class WritesPlaceholder(PrefillCore):
    """Prefill writes what it was given, whatever the admission says about its length."""

    def _same_prompt(self, admitted: Admitted, job: Job) -> bool:
        return True


class OneTagSource(PrefillCore):
    """Every source grant bears the same tag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mint = lambda: 1

    def copy(self, mint: Callable[[], int]) -> OneTagSource:
        return super().copy(lambda: 1)


class EarlyFinalPrefill(EarlyFinal, PrefillCore):
    """A prefill rank that asks nobody and takes every refusal for final."""


class KeepsPositionPrefill(KeepsPosition, PrefillCore):
    """A prefill rank that keeps its copy of the log over a new epoch."""
