"""A prefill rank's decisions: compute at `Admitted`, post at decode's `Reserved`, drain, release.

Owns: what was computed, what was posted, which staging pages a write in flight holds.
Must not know: torch, the data plane, time.

Prefill writes the KV of prompt tokens 0 to n-2; decode runs the last one.
With several ranks each writes its own share of a destination grant's pages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from typing import Self

import attrs

from engine.allocator import PageAllocator
from engine.core import EngineCore
from engine.digests import Keyed
from engine.effects import EngineEffect, Payload, Post, PrefillSlice, Step
from engine.holdings import Job
from lifecycle.events import (
    Cause,
    Drained,
    Failed,
    Proof,
    Proposal,
    Purpose,
    Reserved,
    Transferred,
)
from lifecycle.ids import (
    GrantId,
    PageRange,
    Party,
    RequestId,
    TokenRange,
    count_pages,
    pages_for,
    prefill_pages,
    slice_pages,
)
from lifecycle.state import Grant, RequestState


class Posted(Enum):
    """What became of a posted write."""

    DONE = "done"
    FAILED = "failed"
    IN_DOUBT = "in_doubt"


@attrs.define
class PrefillJob(Job):
    """One attempt: its source grant, tokens computed, and the step that computed the last."""

    source: Reserved | None = None
    computed: int = 0
    computing: int = 0
    step: int = 0


@attrs.define
class Writing:
    """A write in flight, or one that nobody knows the end of; it holds staging pages."""

    post: Post
    in_doubt: bool = False


def share(pages: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The logical pages (first, stop) that a rank writes: contiguous, nearly equal parts."""
    return pages * rank // ranks, pages * (rank + 1) // ranks


class PrefillCore(EngineCore[PrefillJob]):
    """One rank that computes prompts and writes them to decode."""

    purpose = Purpose.SOURCE

    def __init__(
        self,
        party: Party,
        *,
        pages: int,
        page_tokens: int,
        mint: Callable[[], int],
        staging: int,
        chunk_tokens: int,
        digest: Keyed,
    ) -> None:
        """`staging` pages hold writes in flight; a step computes at most `chunk_tokens`."""
        super().__init__(party, pages=pages, page_tokens=page_tokens, mint=mint, digest=digest)
        self.staging = PageAllocator(staging)
        self.chunk_tokens = chunk_tokens
        self.writings: dict[int, Writing] = {}
        self.posted: dict[GrantId, int] = {}
        self.reports: dict[tuple[GrantId, TokenRange], Transferred] = {}
        self.next_ticket = 1

    def copy(self, mint: Callable[[], int]) -> Self:
        """As the base class says."""
        other = super().copy(mint)
        other.staging = self.staging.copy()
        other.writings = {ticket: copy.copy(w) for ticket, w in self.writings.items()}
        other.posted = dict(self.posted)
        other.reports = dict(self.reports)
        return other

    # --- steps --------------------------------------------------------------------------------

    def can_step(self) -> bool:
        """Whether `plan_step` would plan something."""
        return any(self._runnable(job) for job in self.jobs.values())

    def _runnable(self, job: PrefillJob) -> bool:
        return job.source is not None and job.computed < self._wanted(job) and self.is_live(job)

    def plan_step(self) -> Step | None:
        """The next chunk of every request that has room for it, oldest first, or None."""
        room = self.chunk_tokens
        slices: list[PrefillSlice] = []
        for job in self.jobs.values():
            rest = self._wanted(job) - job.computed
            if job.source is None or not self._runnable(job) or room == 0:
                continue
            count = min(rest, room)
            whole = count - (job.computed + count) % self.page_tokens
            if count < rest and whole > 0:
                # Chunks end on page borders, so that every page is sealed by one step.
                count = whole
            room -= count
            job.computing = count
            slices.append(
                PrefillSlice(
                    job.request,
                    job.attempt,
                    job.computed,
                    count,
                    job.source.pages,
                    job.source.tag,
                )
            )
        if not slices:
            return None
        self.steps_started += 1
        self.running = frozenset(s.request for s in slices)
        return Step(self.steps_started, tuple(slices))

    def step_ended(
        self, step: Step, failed: dict[RequestId, Failed] | None = None
    ) -> list[EngineEffect]:
        """A pass has ended: its tokens are computed, except for requests that failed in it."""
        self.steps_ended = step.number
        self.running = frozenset()
        for part in step.slices:
            job = self.jobs.get(part.request)
            if job is None or job.attempt != part.attempt:
                continue
            why = (failed or {}).get(part.request)
            if why is not None:
                self.fail(job, why)
                continue
            job.computed += job.computing
            job.computing = 0
            job.step = step.number
        return self.advance_all()

    # --- writes -------------------------------------------------------------------------------

    def post_ended(
        self, ticket: int, how: Posted, *, size_bytes: int = 0, digest: int = 0
    ) -> list[EngineEffect]:
        """A write has ended, or nobody knows; what is in doubt may be reported again later."""
        writing = self.writings[ticket]
        post = writing.post
        job = self.jobs.get(post.request)
        if how is Posted.IN_DOUBT:
            writing.in_doubt = True
        else:
            del self.writings[ticket]
            self.staging.give_back((r.first, r.count) for r in post.staging)
        if self.log.state(post.request).grant(post.grant) is None:
            # Its request is over and forgotten: nobody is to hear of this write.
            self.posted.pop(post.grant, None)
        elif how is Posted.DONE and not writing.in_doubt:
            self.reports[(post.grant, post.tokens)] = Transferred(
                post.grant,
                post.tokens,
                post.target_pages,
                size_bytes,
                digest,
                post.step,
                post.steps_ended,
            )
        elif job is not None and job.attempt == post.attempt:
            self.fail(job, Failed(Cause.TRANSFER_FAILED, f"write {ticket} is {how.value}"))
        return self.advance_all()

    # --- what a request needs -----------------------------------------------------------------

    def _begin(self, state: RequestState, payload: Payload) -> None:
        admitted = state.admitted
        if admitted is None or self.party not in admitted.prefill.parties():
            return
        job = self.jobs.get(state.request)
        if job is not None and job.attempt == state.attempt:
            job.payload = payload
            return
        self.jobs[state.request] = PrefillJob(state.request, state.attempt, payload)

    def _wanted(self, job: PrefillJob) -> int:
        return len(job.payload.tokens) - 1

    def _advance(self, state: RequestState) -> None:
        self._settle(state)
        job = self.jobs.get(state.request)
        if job is None or not self.is_live(job) or state.admitted is None:
            self.waiting.pop(state.request, None)
            self._drop_reports(state)
            return
        if not self._same_prompt(state.admitted, job):
            return
        if job.source is None:
            self._reserve(state, job)
        elif state.grant(job.source.grant) is None:
            self.propose(state, job.source)
        for grant in state.current(Purpose.DESTINATION):
            if self.party in grant.undrained:
                self._write(state, job, grant)
        self._release_source(state, job)

    def _reserve(self, state: RequestState, job: PrefillJob) -> None:
        tokens = len(job.payload.tokens)
        pages = self.take(prefill_pages(tokens, self.page_tokens))
        if pages is None:
            # The pages are booked; those that hold them are on their way home.
            self.waiting[state.request] = None
            return
        self.waiting.pop(state.request, None)
        covered = TokenRange(0, max(1, tokens - 1))
        kind = state.admitted.kinds[0] if state.admitted else ""
        job.source = self.hold(job, Purpose.SOURCE, pages, covered, kind=kind)
        self.propose(state, job.source)

    def _write(self, state: RequestState, job: PrefillJob, grant: Grant) -> None:
        """Post what is computed of this rank's share, report what ended, drain when all did."""
        for (name, _), report in tuple(self.reports.items()):
            if name == grant.id:
                self.propose(state, report)
        size = self.page_tokens
        wanted = self._wanted(job)
        ranks = state.admitted.prefill.ranks if state.admitted else 1
        first, stop = share(pages_for(wanted, size), rank=self.party.rank, ranks=ranks)
        done = max(first, self.posted.get(grant.id, first))
        ready = pages_for(wanted, size) if job.computed >= wanted else job.computed // size
        while done < min(stop, ready):
            pages = min(min(stop, ready) - done, self.staging.free)
            if pages == 0:
                self.waiting[state.request] = None
                return
            self._post(job, grant, first=done, pages=pages)
            done += pages
            self.posted[grant.id] = done
        if done < stop or self._writing(grant.id):
            return
        # Proposals are taken in order, so this one cannot overtake the transfers before it.
        self.propose(state, Drained(grant.id, self.party, Proof.ACKNOWLEDGED))

    def _post(self, job: PrefillJob, grant: Grant, *, first: int, pages: int) -> None:
        runs = self.staging.take(pages)
        # There is room, and what is computed lies in a source.
        assert runs is not None
        assert job.source is not None
        size = self.page_tokens
        tokens = TokenRange(first * size, min((first + pages) * size, self._wanted(job)))
        post = Post(
            ticket=self.next_ticket,
            request=job.request,
            attempt=job.attempt,
            grant=grant.id,
            tokens=tokens,
            source_pages=slice_pages(job.source.pages, start=first, stop=first + pages),
            target_pages=slice_pages(grant.reserved.pages, start=first, stop=first + pages),
            staging=tuple(PageRange(*run) for run in runs),
            tag=grant.reserved.tag,
            step=job.step,
            steps_ended=self.steps_ended,
        )
        self.next_ticket += 1
        self.writings[post.ticket] = Writing(post)
        self.effects.append(post)

    def _release_source(self, state: RequestState, job: PrefillJob) -> None:
        """Give the source pages back as soon as every share of this rank has been written.

        A rank whose share is written may still have to compute what others write.
        """
        if job.source is None or job.computed < self._wanted(job):
            return
        source = state.grant(job.source.grant)
        destinations = state.current(Purpose.DESTINATION)
        if state.admitted is None or len(destinations) < state.admitted.destinations:
            # Another rank, or another kind of state, is still to be reserved and written.
            return
        if source is not None and all(self.party not in g.undrained for g in destinations):
            self._release(state, source)

    def _release(self, state: RequestState, grant: Grant) -> None:
        if not self._busy(state.request):
            super()._release(state, grant)

    def _drop_reports(self, state: RequestState) -> None:
        names = {g.id for g in state.grants}
        self.reports = {k: r for k, r in self.reports.items() if k[0] not in names}
        for name in names:
            if not self._writing(name):
                self.posted.pop(name, None)

    def _take_back(self, request: RequestId) -> None:
        if not self._busy(request):
            super()._take_back(request)

    def _dropped(self, proposal: Proposal, rule: str) -> None:
        if isinstance(proposal.body, Transferred):
            self.reports.pop((proposal.body.grant, proposal.body.tokens), None)
            job = self.jobs.get(proposal.request)
            if job is not None and job.attempt == proposal.attempt:
                self.fail(job, Failed(Cause.TRANSFER_FAILED, f"a transfer broke {rule}"))

    def end_sync(self) -> list[EngineEffect]:
        """As the base class says; what was posted for grants that the log forgot is forgotten."""
        known = {g.id for state in self.log.requests.values() for g in state.grants}
        self.reports = {k: r for k, r in self.reports.items() if k[0] in known}
        self.posted = {k: n for k, n in self.posted.items() if k in known or self._writing(k)}
        return super().end_sync()

    def _orphaned(self, job: PrefillJob) -> None:
        job.failed = True

    def _writing(self, grant: GrantId) -> bool:
        return any(w.post.grant == grant for w in self.writings.values())

    def _busy(self, request: RequestId) -> bool:
        # A write in doubt has left: it reads staging, and no longer the pages it was packed from.
        return any(w.post.request == request and not w.in_doubt for w in self.writings.values())

    @property
    def staging_held(self) -> int:
        """Staging pages that writes in flight, or in doubt, hold."""
        return sum(count_pages(w.post.staging) for w in self.writings.values())
