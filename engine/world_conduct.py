"""How the cores behave towards each other in a world: oracles about what they propose and decide.

Owns: who may be given up, what an admission leaves free, what an engine may ask for, and when.
Must not know: memory, logs as a whole, and which action led here.

Nobody reads a foreign page when one of these is broken; somebody waits, is ended, or computes
again for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.effects import Answer, EngineEffect, Propose, SchedulerEffect, Step
from engine.world_shells import PREFILLS, Shells
from engine.world_values import Found
from lifecycle.events import (
    Aborted,
    Admitted,
    Cause,
    Drained,
    Entry,
    Failed,
    Finished,
    Leg,
    Lost,
    Proposal,
    Purpose,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import Party, RequestId, pages_for, prefill_pages
from lifecycle.state import LIVE, RequestState, Settlement

States = Mapping[RequestId, RequestState]


class Conduct(Shells):
    """A world that sees who acts out of turn."""

    given_up: frozenset[tuple[Party, RequestId, int]] = frozenset()
    """Attempts that a rank has reported as failed."""

    # --- the scheduler ------------------------------------------------------------------------

    def _append(self, position: int, entry: Entry) -> None:
        super()._append(position, entry)
        if isinstance(entry.event, Admitted):
            self._judge_room(entry, entry.event.decode)

    def _judge_room(self, entry: Entry, leg: Leg) -> None:
        """A newcomer leaves one growth step for each request that decodes there."""
        known = {(e.request, e.attempt) for _, e in self.stored if isinstance(e.event, Admitted)}
        running = sum(
            (state.request, state.attempt) in known and state.request != entry.request
            for state in _decoding_on(leg, self.scheduler.log.requests)
        )
        growth = pages_for(self.scenario.growth_tokens, self.scenario.page_tokens)
        left = leg.pages_free - leg.pages_booked
        if left < running * growth:
            message = f"{entry.request} leaves {left} pages for the growth of {running} requests"
            raise Found("no-room-to-grow", message)

    def judge_yielding(self, before: States, asker: RequestId, said: Iterable[Entry]) -> None:
        """For want of pages the youngest gives way, and nobody as long as pages come home."""
        for entry in said:
            event = entry.event
            if not isinstance(event, Requeued | Aborted):
                continue
            if event.cause not in {Cause.OUT_OF_PAGES, Cause.ATTEMPTS_EXHAUSTED}:
                continue
            leg = before[asker].admitted
            assert leg is not None
            here = _decoding_on(leg.decode, before)
            others = [s for s in here if s.request != asker]
            may = [s.request for s in here[1:] if s.request == asker or not self._keeps(s)]
            may = [r for r in may if before[r].attempt < self.scenario.attempts_max]
            if entry.request != (may[-1] if may else asker):
                raise Found("gave-way", f"{entry.request} gave way for {asker}, not {may or asker}")
            if not may and (any(map(self._has_all, others)) or _comes_home(leg.decode, before)):
                raise Found("gave-way", f"{asker} gave way though pages are on their way to it")
            return

    def _has_all(self, state: RequestState) -> bool:
        client = self.clients[state.request]
        return client.got >= client.asked.new_tokens

    def _keeps(self, state: RequestState) -> bool:
        """Whether it has its whole answer, or has grown too large to come back."""
        client, scenario = self.clients[state.request], self.scenario
        grown = client.asked.prompt_tokens + client.got
        engines = {life.attached.engine for life in self.scheduler.log.fleet.alive()}
        large = prefill_pages(grown, scenario.page_tokens) > scenario.prefill_pages
        return self._has_all(state) or (large and bool(engines & set(PREFILLS)))

    def judge_repeat(
        self, proposal: Proposal, known: bool, effects: Iterable[SchedulerEffect]
    ) -> None:
        """What stands in the log already is answered with its place, not dropped."""
        for effect in effects:
            if known and isinstance(effect, Answer) and not effect.position:
                raise Found("repeat-refused", f"{proposal.party} is refused what the log holds")

    def holds(self, proposal: Proposal) -> bool:
        """Whether the drain that is proposed stands in the log of an open request."""
        body = proposal.body
        if not isinstance(body, Drained) or proposal.request not in self.scheduler.log.requests:
            return False
        named = (body.grant, body.party)
        return any(
            isinstance(e.event, Drained) and (e.event.grant, e.event.party) == named
            for _, e in self.stored
        )

    # --- engines ------------------------------------------------------------------------------

    def act(self, party: Party, effects: Iterable[EngineEffect]) -> None:
        """Look at what an engine proposes, then do what it asks for."""
        effects = tuple(effects)
        for effect in effects:
            if isinstance(effect, Propose):
                self._judge_proposal(party, effect.proposal)
        super().act(party, effects)

    def _judge_proposal(self, party: Party, proposal: Proposal) -> None:
        core, body = self.cores[party], proposal.body
        if isinstance(body, Failed):
            if body.cause is not Cause.OUT_OF_PAGES:
                self.given_up |= {(party, proposal.request, proposal.attempt)}
            return
        waiting = sum(not isinstance(p.body, Failed) for p in core.outstanding.values())
        if waiting > self.scenario.outstanding_max:
            raise Found("too-many-proposals", f"{party} has {waiting} proposals without an answer")
        if (party, proposal.request, proposal.attempt) in self.given_up and isinstance(
            body, Reserved | Transferred | Verified | Finished
        ):
            raise Found("works-on", f"{party} failed {proposal.request} and proposes {body}")
        if isinstance(body, Reserved) and body.purpose is Purpose.GROWTH:
            job = self.decode(party).jobs[proposal.request]
            spare = body.tokens.start - (len(job.payload.tokens) - 1 + job.given)
            if spare > self.scenario.page_tokens // 2:
                raise Found("hoards", f"{proposal.request} grows with room for {spare} tokens")

    def judge_guest(self, party: Party, entry: Entry) -> None:
        """Who has no part in an attempt does nothing for it."""
        event, job = entry.event, self.cores[party].jobs.get(entry.request)
        if not isinstance(event, Admitted) or job is None or job.attempt != entry.attempt:
            return
        if party not in (*event.prefill.parties(), *event.decode.parties()):
            raise Found("works-uninvited", f"{party} works for {entry.request}")

    def judge_loss(self, party: Party, entry: Entry) -> None:
        """Who hears that a writer is lost shuts it out at once, where the plane can."""
        event, core = entry.event, self.cores[party]
        mine = core.log.fleet.life(party.engine, party.incarnation)
        if not isinstance(event, Lost) or not self.scenario.placing or core.syncing:
            return
        if mine is None or mine.lost is not None:
            return
        gone = (event.engine, event.incarnation)
        shut = {(fence.grant, fence.party) for _, fence in self.fences} | self.refused
        for grant in (g for state in core.log.requests.values() for g in state.grants):
            if grant.id.owner != party or grant.settlement is Settlement.RELEASED:
                continue
            writers = [w for w in grant.undrained if (w.engine, w.incarnation) == gone]
            if any((grant.id, writer) not in shut for writer in writers):
                raise Found("left-open", f"{party} lets {writers} into {grant.id}")

    def judge_failures(self, party: Party, step: Step, effects: Iterable[EngineEffect]) -> None:
        """A pass that failed ends the attempts that were in it, and no other."""
        ran = {(part.request, part.attempt) for part in step.slices}
        for effect in effects:
            if not isinstance(effect, Propose) or not isinstance(effect.proposal.body, Failed):
                continue
            named = (effect.proposal.request, effect.proposal.attempt)
            if effect.proposal.body.message == "injected" and named not in ran:
                raise Found("failed-another", f"{party}: {named} was not in the pass that failed")


def _decoding_on(leg: Leg, states: States) -> list[RequestState]:
    """Whose running attempt decodes on that life, oldest first."""
    life = (leg.engine, leg.incarnation)
    return sorted(
        (
            s
            for s in states.values()
            if s.phase in LIVE
            and s.admitted is not None
            and (s.admitted.decode.engine, s.admitted.decode.incarnation) == life
        ),
        key=lambda s: s.request,
    )


def _comes_home(leg: Leg, states: States) -> bool:
    life = (leg.engine, leg.incarnation)
    return any(
        (grant.id.owner.engine, grant.id.owner.incarnation) == life
        for state in states.values()
        for grant in state.unsettled
        if state.phase not in LIVE or grant.attempt < state.attempt
    )
