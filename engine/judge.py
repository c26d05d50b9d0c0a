"""What becomes of a proposal: it takes effect, repeats one that did, waits, or is dropped.

Owns: the check of a single proposal whose turn it is, and the record of those that changed nothing.
Must not know: whose turn it is; that is the `scheduler`'s.
"""

from __future__ import annotations

import attrs

from engine.effects import Answer, SchedulerEffect
from engine.sequencer import Sequencer
from lifecycle.decide import Fail, Lose
from lifecycle.events import (
    ByEngine,
    Cause,
    Drained,
    Dropped,
    Entry,
    Failed,
    Finished,
    LostCause,
    Proof,
    Proposal,
)
from lifecycle.ids import EngineId, Party
from lifecycle.state import OPEN, Phase, RequestState, Settlement, Violation

ANSWERS_OF_LOST = 64
"""How many answers are kept for a life that is over, of which one is kept for each engine."""

MESSAGE_CHARACTERS_MAX = 1_000
"""What the log keeps of an engine's words about its failure; they are for people."""


class Judge(Sequencer):
    """A sequencer that hears engines."""

    def hear_quiet(self, party: Party, *, highest: int, now_ns: int) -> list[SchedulerEffect]:
        """A rank whose life was given up says that nothing of it can land any more.

        That is its own `Drained` for whatever it could write, also for what it never heard of;
        `highest` is its last proposal's number.  Who broke a rule is not believed.
        """
        self._at(now_ns)
        life = self.log.fleet.life(party.engine, party.incarnation)
        if life is None or life.lost in {None, LostCause.RULE_BROKEN}:
            return []
        number = highest
        for state in tuple(self.log.requests.values()):
            for grant in state.grants:
                if party in grant.undrained and grant.settlement is not Settlement.RELEASED:
                    number += 1
                    drained = Drained(grant.id, party, Proof.ACKNOWLEDGED)
                    self._take(Proposal(party, number, state.request, state.attempt, drained))
        return self._done()

    def _take(self, proposal: Proposal) -> Answer | None:
        """Answer a proposal whose turn it is; None when it cannot be taken yet."""
        body, party, number = proposal.body, proposal.party, proposal.number
        state = self.log.state(proposal.request)
        if isinstance(body, Failed):
            return self._take_failure(proposal, body, state)
        first = self._repeat(proposal)
        if first is not None:
            return Answer(party, number, first)
        by = ByEngine(party, number)
        entry = Entry(proposal.request, state.sequence, proposal.attempt, by, self.now_ns, body)
        violation = self.log.check(entry)
        if violation is not None:
            # What can never be taken does not wait, or it would hold up all that follows it.
            return self._drop(proposal, violation)
        if isinstance(body, Finished):
            relay = self.relays.get(proposal.request)
            if relay is not None and relay.held < body.tokens:
                # The tokens that it counts are still on their way; the engine repeats both.
                return None
        position = self._append(proposal.request, proposal.attempt, body, by)
        return Answer(party, number, position)

    def _take_failure(self, proposal: Proposal, failed: Failed, state: RequestState) -> Answer:
        party, number = proposal.party, proposal.number
        concerned = (party.engine, party.incarnation) in self._concerned(proposal.request)
        life = self.log.fleet.life(party.engine, party.incarnation)
        alive = life is not None and life.lost is None
        before = self.position
        if len(failed.message) > MESSAGE_CHARACTERS_MAX:
            failed = attrs.evolve(failed, message=failed.message[:MESSAGE_CHARACTERS_MAX])
        if concerned and alive and state.attempt == proposal.attempt and state.phase in OPEN:
            caught = self._caught(state, failed)
            relays = tuple((name, len(r.tokens)) for name, r in self.relays.items())
            relayed = dict(relays).get(proposal.request, state.relayed)
            self._carry_out(Fail(proposal.request, party, failed, relayed, relays))
            for writer in caught:
                self._lose(writer.engine, writer.incarnation, LostCause.RULE_BROKEN)
        if self.position > before:
            return Answer(party, number, before + 1)
        rule = "quiet-after-end" if alive else "incarnation-fences"
        violation = Violation(
            rule, rule, "the failure concerns nothing that runs", proposal.request, 0
        )
        return self._drop(proposal, violation)

    def _caught(self, state: RequestState, failed: Failed) -> tuple[Party, ...]:
        """Who wrote what a decoding request met in its pages.

        All of its pages were compared before it decoded, or stamped by their owner: whoever was let
        into the grant of a tag that stands there now has written where it may not write any more.
        """
        foreign = failed.tag_found not in {None, failed.tag_expected}
        if failed.cause is not Cause.ISOLATION_VIOLATION or not foreign:
            return ()
        if state.phase is not Phase.DECODING or failed.tag_found is None:
            return ()
        return self.let_in.get(failed.tag_found, ())

    def _repeat(self, proposal: Proposal) -> int | None:
        """The position at which this proposal's effect already stands in the log."""
        body, party, kind = proposal.body, proposal.party, type(proposal.body)
        for position, entry in self.entries.get(proposal.request, ()):
            known = entry.event
            # Almost every entry is of another kind, and so never equal.
            same = type(known) is kind and known == body and entry.attempt == proposal.attempt
            if isinstance(known, Drained) and isinstance(body, Drained):
                same = (known.grant, known.party) == (body.grant, body.party)
            if (
                same
                and isinstance(entry.proposer, ByEngine)
                and (entry.proposer.party == party or isinstance(body, Drained))
            ):
                return position
        return None

    def _drop(self, proposal: Proposal, violation: Violation) -> Answer:
        """Record that a proposal changed nothing: the first of its kind, then each doubling."""
        party, number, request = proposal.party, proposal.number, proposal.request
        answer = Answer(party, number, 0, violation.rule)
        if violation.rule == "drained-is-final":
            self._lose(party.engine, party.incarnation, LostCause.RULE_BROKEN)
        if self.log.state(request).phase is Phase.NEW:
            return answer
        key = (party, request, violation.rule)
        count = self.drops.get(key, 0) + 1
        self.drops[key] = count
        if count & (count - 1) == 0:
            grant = getattr(proposal.body, "grant", None)
            kind = type(proposal.body).__name__
            fell = max(1, count // 2)
            dropped = Dropped(party, number, kind, violation.rule, grant, fell)
            self._append(request, self.log.state(request).attempt, dropped)
        return answer

    def _forget_lines(self, engine: EngineId, incarnation: int) -> None:
        """Forget the lives before this one: a life ends when the next begins, so they are over."""
        for party in [p for p in self.lines if p.engine == engine and p.incarnation < incarnation]:
            del self.lines[party]

    def _lose(self, engine: EngineId, incarnation: int, cause: LostCause) -> None:
        relayed = tuple((name, len(relay.tokens)) for name, relay in self.relays.items())
        self._carry_out(Lose(engine, incarnation, cause, relayed))
        for party in [p for p in self.lines if (p.engine, p.incarnation) == (engine, incarnation)]:
            line = self.lines[party]
            line.acknowledged = self.position
            # What it may still repeat is answered; its stream has ended, so that is not much.
            for number in sorted(line.answers)[:-ANSWERS_OF_LOST]:
                del line.answers[number]
        self._forget_lines(engine, incarnation)
        for request in tuple(self.log.requests):
            self._evict(request)
