"""Schedulers and worlds with one guard removed or one proof forged.

Owns: what each of them does instead of the product's method, or of the store and the planes.
Must not know: what finds them; the registry says so.
"""

from __future__ import annotations

from typing import Any

import attrs

from engine.effects import (
    Answer,
    Payload,
    Publish,
    SchedulerEffect,
    TellOutcome,
    TellTokens,
)
from engine.queue import Pending
from engine.scheduler import Scheduler
from engine.sequencer import Line, Relay
from lifecycle.admission import Submission, admit
from lifecycle.decide import Command, Look, Lose, decide
from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    Drained,
    Entry,
    Event,
    Finished,
    Proposal,
    Proposer,
    QuarantineCause,
    Quarantined,
    RejectCode,
    Rejected,
    Released,
    Reserved,
    Role,
)
from lifecycle.ids import FLEET, Party, RequestId, request_id
from lifecycle.state import LIVE, Phase, Violation

# --- the door ---------------------------------------------------------------------------------


class RejectedWalks(Scheduler):
    """A rejection is logged, but the queue still holds the request and lets it in."""

    def _reject_waiting(self, pending: Pending, code: RejectCode, reason: str) -> None:
        super()._reject_waiting(pending, code, reason)
        self.queue.push(pending)


class Chooses(Scheduler):
    """A scheduler whose admission can be replaced; everything else in `_pump` is the product's."""

    def choose(self, wanted: Submission) -> Admitted | None:
        return admit(self.log, wanted, self.limits)

    def payload_of(self, pending: Pending) -> Payload:
        return pending.payload

    def _pump(self) -> None:
        while (pending := self.queue.head()) is not None:
            wanted = pending.wanted
            if self.now_ns >= wanted.deadline_ns:
                return
            admitted = self.choose(wanted)
            if admitted is None:
                return
            self.queue.pop(pending)
            payload = self.payload_of(pending)
            relay = self.relays.get(wanted.request)
            if relay is None:
                relay = self.relays[wanted.request] = Relay(payload, wanted)
            relay.payload, relay.attempt, relay.held = payload, wanted.attempt, 0
            self._append(wanted.request, wanted.attempt, admitted)


class WrongField(Chooses):
    """A cancel in the queue marks the request and swaps its prompt; the door reads no mark."""

    def cancel(
        self, request: RequestId, cause: Any, reported_by: str, now_ns: int
    ) -> list[SchedulerEffect]:
        pending = self.queue.find(request)
        if pending is None or self.log.state(request).phase is not Phase.NEW:
            return super().cancel(request, cause, reported_by, now_ns)
        self._at(now_ns)
        self.queue.pop(pending)
        self.queue.push(attrs.evolve(pending, payload=Payload(pending.payload.tokens[:1])))
        return self._done()


class OneLegCapacity(Chooses):
    """Capacity is checked on decode; prefill is compared with the context."""

    def _refuse(self, wanted: Submission) -> Rejected | None:
        refusal = super()._refuse(wanted)
        pool = refusal is not None and refusal.code is RejectCode.KV_POOL_CAPACITY_EXCEEDED
        return None if pool else refusal

    def choose(self, wanted: Submission) -> Admitted | None:
        view = self.log.copy()
        for party in view.ledger:
            life = view.fleet.life(party.engine, party.incarnation)
            if life is not None and life.attached.role is Role.PREFILL:
                room = self.limits.context_tokens
                view.ledger[party] = attrs.evolve(view.ledger[party], capacity=room)
        return admit(view, wanted, self.limits)


class AnyLayout(Scheduler):
    """The layout that an engine brings is taken for everybody's."""

    def attach(self, attached: Attached, now_ns: int) -> list[SchedulerEffect]:
        lives = tuple(
            (name, attrs.evolve(life, attached=attrs.evolve(life.attached, layout=attached.layout)))
            for name, life in self.log.fleet.lives
        )
        self.log.fleet = attrs.evolve(self.log.fleet, lives=lives)
        return super().attach(attached, now_ns)


class Unbooked(Scheduler):
    """A request is admitted without pages being promised to it."""

    def _append(
        self, request: RequestId, attempt: int, event: Event, by: Proposer | None = None
    ) -> int:
        position = super()._append(request, attempt, event, by)
        for party, account in tuple(self.log.ledger.items()):
            promises = tuple((name, 0) for name, _ in account.booked)
            self.log.ledger[party] = attrs.evolve(account, booked=promises)
        return position


class MintsTwice(Scheduler):
    """Two requests in a row get one id."""

    def mint(self) -> RequestId:
        name = super().mint()
        if self._serial % 2:
            return name
        return request_id(epoch=self.epoch, serial=self._serial - 1)


class Reenters(Scheduler):
    """A requeued request comes back in before its last attempt is settled."""

    def _react(self, request: RequestId, event: Event) -> None:
        super()._react(request, event)
        state = self.log.state(request)
        if state.phase is Phase.REQUEUED and state.unsettled:
            self._requeue(state)


# --- settlement and time ----------------------------------------------------------------------


class TimerFrees(Scheduler):
    """A timer gives back what was not drained."""

    def _carry_out(self, command: Command) -> None:
        if not isinstance(command, Look):
            super()._carry_out(command)
            return
        for request, event in decide(self.log, command):
            freed = Released(event.grant) if isinstance(event, Quarantined) else event
            self._append(request, self.log.state(request).attempt, freed)


class OwnerLostForgotten(Scheduler):
    """A lost owner's grants are not put into quarantine."""

    def _carry_out(self, command: Command) -> None:
        if not isinstance(command, Lose):
            super()._carry_out(command)
            return
        for request, event in decide(self.log, command):
            if isinstance(event, Quarantined) and event.cause is QuarantineCause.OWNER_LOST:
                continue
            attempt = 0 if request == FLEET else self.log.state(request).attempt
            self._append(request, attempt, event)


class SettlesByAttempt(Scheduler):
    """A proof counts only while the attempt runs in which its grant was made."""

    def _take(self, proposal: Proposal) -> Answer | None:
        state = self.log.state(proposal.request)
        over = state.phase not in LIVE or state.attempt != proposal.attempt
        if isinstance(proposal.body, Drained | Released) and over:
            why = "the attempt is over"
            rule = "current-attempt"
            return self._drop(proposal, Violation(rule, rule, why, proposal.request, 0))
        return super()._take(proposal)


class RepeatDropped(Scheduler):
    """A repeated proposal is answered as if it had never taken effect."""

    def propose(self, proposal: Proposal, now_ns: int) -> list[SchedulerEffect]:
        line = self.lines.get(proposal.party)
        if line is not None and proposal.number < line.expected:
            return [Answer(proposal.party, proposal.number, 0, "settled-once")]
        return super().propose(proposal, now_ns)


class DrainOvertakes(Scheduler):
    """Proposals are taken as they come; a gap is not waited for."""

    def propose(self, proposal: Proposal, now_ns: int) -> list[SchedulerEffect]:
        line = self.lines.get(proposal.party, Line())
        line.expected = max(line.expected, proposal.number)
        return super().propose(proposal, now_ns)


# --- what is shown ----------------------------------------------------------------------------


class SilentReject(Scheduler):
    """The prefill leg is not told that a request is over."""

    def _publish(self, party: Party, position: int, entry: Entry) -> None:
        state = self.log.state(entry.request)
        admitted = state.admitted
        writers = () if admitted is None else admitted.prefill.parties()
        if isinstance(state.outcome, Aborted) and party in writers:
            return
        super()._publish(party, position, entry)


class PublishedEarly(Scheduler):
    """A grant that lets in remote writers is shown to them before it is durable."""

    def _publish(self, party: Party, position: int, entry: Entry) -> None:
        super()._publish(party, position, entry)
        last = self.effects[-1]
        if isinstance(last, Publish) and isinstance(entry.event, Reserved):
            self.effects[-1] = attrs.evolve(last, durable=0)


class ForgetsBackfill(Scheduler):
    """A cursor is believed, though older entries were shown to a late joiner."""

    def _seen(self, party: Party, request: RequestId, cursor: int) -> int:
        named = (party.engine, party.incarnation)
        known = request == FLEET or named in self._concerned(request)
        return cursor if known else self.position


class BelievesCursor(Scheduler):
    """A cursor of an earlier epoch is taken for one of this epoch."""

    def connect(
        self, party: Party, *, epoch: int, position: int, next_number: int, now_ns: int
    ) -> list[SchedulerEffect]:
        return super().connect(
            party,
            epoch=self.epoch if epoch else 0,
            position=position,
            next_number=next_number,
            now_ns=now_ns,
        )


# --- what clients are told --------------------------------------------------------------------


class AnsweredEarly(Scheduler):
    """The client is told before the log can no longer forget it."""

    def _react(self, request: RequestId, event: Event) -> None:
        before = len(self.effects)
        super()._react(request, event)
        for index in range(before, len(self.effects)):
            effect = self.effects[index]
            if isinstance(effect, TellOutcome):
                self.effects[index] = attrs.evolve(effect, durable=0)


class RelaysAlways(Scheduler):
    """Tokens are relayed whatever the request's phase is."""

    def tokens(
        self,
        party: Party,
        request: RequestId,
        attempt: int,
        *,
        first: int,
        tokens: tuple[int, ...],
        texts: tuple[str, ...],
        logprobs: tuple[float, ...],
    ) -> list[SchedulerEffect]:
        relay = self.relays.get(request)
        known = 0 if relay is None else relay.held - first
        if relay is None or not 0 <= known < len(tokens):
            return []
        start = len(relay.tokens)
        relay.tokens.extend(tokens[known:])
        relay.held += len(tokens) - known
        return [TellTokens(request, start, tokens[known:], texts[known:], logprobs[known:])]


class RelaysUnverified(RelaysAlways):
    """Tokens of a running attempt are relayed before decode may read."""

    def tokens(
        self,
        party: Party,
        request: RequestId,
        attempt: int,
        *,
        first: int,
        tokens: tuple[int, ...],
        texts: tuple[str, ...],
        logprobs: tuple[float, ...],
    ) -> list[SchedulerEffect]:
        state = self.log.state(request)
        if state.phase not in LIVE or state.attempt != attempt:
            return []
        return super().tokens(
            party, request, attempt, first=first, tokens=tokens, texts=texts, logprobs=logprobs
        )


class FinishedEarly(Scheduler):
    """Success is accepted before the tokens that it counts are here."""

    def _take(self, proposal: Proposal) -> Answer | None:
        relay = self.relays.get(proposal.request)
        if isinstance(proposal.body, Finished) and relay is not None:
            relay.held = max(relay.held, proposal.body.tokens)
        return super()._take(proposal)


class SuccessOverwrites(Scheduler):
    """A success that arrives after an abort is told as well."""

    def _take(self, proposal: Proposal) -> Answer | None:
        state = self.log.state(proposal.request)
        if isinstance(proposal.body, Finished) and isinstance(state.outcome, Aborted):
            self.effects.append(TellOutcome(proposal.request, proposal.body, self.position))
        return super()._take(proposal)
