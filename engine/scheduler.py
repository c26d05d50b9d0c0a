"""The sequencer of every request's log: it decides, checks proposals, appends, publishes.

Owns: the reduced log, the queue, tokens of open requests, the answers to proposals.
Must not know: streams, stores, clocks, tokenizers; every call is given the time.

Each method returns effects in the order in which a shell performs them: append, publish, answer.
Whatever cannot be taken back carries the position that must be durable first.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from engine.digests import Keyed
from engine.effects import (
    Answer,
    Append,
    Payload,
    Publish,
    SchedulerEffect,
    Synced,
    TellAdmitted,
    TellClosed,
    TellOutcome,
    TellTokens,
)
from engine.queue import FairQueue, Pending
from lifecycle.decide import (
    Command,
    End,
    Fail,
    Limits,
    Look,
    Lose,
    Restart,
    Submission,
    admit,
    audience,
    decide,
    refuse,
    rejected,
    waits_for_durability,
)
from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    ByEngine,
    ByScheduler,
    Cause,
    Drained,
    Draining,
    Dropped,
    Entry,
    Event,
    Failed,
    Finished,
    Leg,
    LostCause,
    Proposal,
    Proposer,
    RejectCode,
    Rejected,
    Resumed,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, EngineId, Party, RequestId, request_id
from lifecycle.state import OPEN, Phase, RequestState, Settlement, Violation

ANSWERS_KEPT = 8192
"""How many answers per rank are kept for repeats; an engine has fewer proposals outstanding."""


class SequencerError(RuntimeError):
    """The scheduler decided something that its own rules refuse: a bug, never input."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"{violation.guard}: {violation.message}")
        self.violation = violation


class RefusedEngineError(Exception):
    """An engine may not join: the reason names what was compared."""

    def __init__(self, *, engine: EngineId, reason: str) -> None:
        super().__init__(f"{engine} may not join: {reason}")
        self.engine = engine
        self.reason = reason


@attrs.define
class Relay:
    """An open request's tokens: the payload of its attempt, and what its client has."""

    payload: Payload
    submission: Submission
    attempt: int = 0
    held: int = 0
    tokens: list[int] = attrs.Factory(list)


@attrs.define
class Line:
    """What the scheduler knows of a rank's proposals: the next number, and its answers."""

    expected: int = 1
    answers: dict[int, Answer] = attrs.Factory(dict)
    acknowledged: int = 0


class Scheduler:
    """One scheduler life. Its state is the reduced log and what a crash may forget."""

    def __init__(
        self,
        *,
        limits: Limits,
        epoch: int,
        digest: Keyed,
        queue_limit: int = 256,
        queue_ns: int = 60_000_000_000,
        without: Iterable[str] = (),
    ) -> None:
        """Begin with an empty log; `resume` takes in what a store holds."""
        self.limits = limits
        self.epoch = epoch
        self.log = History(without=without)
        self.position = 0
        self.now_ns = 0
        self.queue = FairQueue(queue_limit)
        self.queue_ns = queue_ns
        self.relays: dict[RequestId, Relay] = {}
        self.entries: dict[RequestId, list[tuple[int, Entry]]] = {FLEET: []}
        self.lines: dict[Party, Line] = {}
        self.drops: dict[tuple[Party, RequestId, str], int] = {}
        self.accepting = True
        self.effects: list[SchedulerEffect] = []
        self._digest = digest
        self._serial = 0

    # --- lives --------------------------------------------------------------------------------

    def resume(self, stored: Iterable[tuple[int, Entry]], now_ns: int) -> list[SchedulerEffect]:
        """Take in a store's log, begin this epoch, and abort what nobody waits for any more."""
        for position, entry in stored:
            violation = self.log.apply(entry)
            if violation is not None:
                raise SequencerError(violation)
            self.entries.setdefault(entry.request, []).append((position, entry))
            self.position = position
        self._at(max(now_ns, self.log.time_ns))
        self._append(FLEET, 0, Resumed(self.epoch, self.position))
        self._carry_out(Restart())
        for request in tuple(self.log.requests):
            self._evict(request)
        return self._done()

    def attach(self, attached: Attached, now_ns: int) -> list[SchedulerEffect]:
        """Let a new life of an engine in, or recognise one. Raises RefusedEngineError."""
        self._at(now_ns)
        current = self.log.fleet.current(attached.engine)
        if current is not None and current.attached.incarnation == attached.incarnation:
            if current.lost is not None:
                reason = f"incarnation {attached.incarnation} was lost ({current.lost.value})"
                raise RefusedEngineError(engine=attached.engine, reason=reason)
            return self._done()
        if current is not None and current.attached.incarnation > attached.incarnation:
            reason = f"incarnation {attached.incarnation} is older than "
            reason += f"{current.attached.incarnation}"
            raise RefusedEngineError(engine=attached.engine, reason=reason)
        for life in self.log.fleet.alive():
            if life.attached.layout != attached.layout and life.attached.engine != attached.engine:
                reason = f"its layout {attached.layout} is not {life.attached.layout} "
                reason += f"of {life.attached.engine}"
                raise RefusedEngineError(engine=attached.engine, reason=reason)
        if current is not None and current.lost is None:
            self._lose(attached.engine, current.attached.incarnation, LostCause.REPLACED)
        self._append(FLEET, 0, attached)
        self._pump()
        return self._done()

    def connect(
        self, party: Party, *, epoch: int, position: int, next_number: int, now_ns: int
    ) -> list[SchedulerEffect]:
        """Bring a rank up to date: from its cursor in this epoch, from the beginning otherwise."""
        self._at(now_ns)
        cursor = position if epoch == self.epoch else 0
        line = self.lines.get(party)
        if line is None or epoch != self.epoch:
            self.lines[party] = Line(expected=next_number)
        named = (party.engine, party.incarnation)
        due = [
            (at, entry)
            for request, log in self.entries.items()
            for at, entry in log
            if at > cursor and (request == FLEET or named in self._concerned(request))
        ]
        for at, entry in sorted(due, key=lambda pair: pair[0]):
            self._publish(party, at, entry)
        self.effects.append(Synced(party))
        return self._done()

    def lose(
        self, engine: EngineId, incarnation: int, cause: LostCause, now_ns: int
    ) -> list[SchedulerEffect]:
        """A life of an engine is over."""
        self._at(now_ns)
        self._lose(engine, incarnation, cause)
        self._pump()
        return self._done()

    def drain(self, engine: EngineId, now_ns: int) -> list[SchedulerEffect]:
        """Give an engine nothing new."""
        self._at(now_ns)
        life = self.log.fleet.current(engine)
        if life is not None and life.usable:
            self._append(FLEET, 0, Draining(engine, life.attached.incarnation))
        return self._done()

    def stop_accepting(self) -> None:
        """Refuse every new request from now on, with a reason; finish what is here."""
        self.accepting = False

    @property
    def idle(self) -> bool:
        """Whether no request is open, waiting or unsettled."""
        return not self.queue.waiting() and all(
            state.phase in {Phase.CLOSED, Phase.REJECTED} for state in self.log.requests.values()
        )

    # --- clients ------------------------------------------------------------------------------

    def mint(self) -> RequestId:
        """A new request's name; it contains the epoch, so it is never minted twice."""
        self._serial += 1
        return request_id(epoch=self.epoch, serial=self._serial)

    def submit(
        self,
        request: RequestId,
        *,
        tenant: str,
        payload: Payload,
        new_tokens_max: int,
        deadline_ns: int,
        now_ns: int,
    ) -> list[SchedulerEffect]:
        """Decide on a new request now, or let it wait for room."""
        self._at(now_ns)
        wanted = Submission(
            request=request,
            tenant=tenant,
            prompt_tokens=len(payload.tokens),
            prompt_digest=self._digest(request, payload.tokens),
            new_tokens_max=new_tokens_max,
            deadline_ns=deadline_ns,
        )
        refusal = self._refuse(wanted)
        if refusal is not None:
            self._append(request, 0, refusal)
            return self._done()
        self.queue.push(Pending(wanted, payload, self.now_ns + self.queue_ns))
        self._pump()
        return self._done()

    def refuse(
        self, request: RequestId, *, tenant: str, code: RejectCode, reason: str, now_ns: int
    ) -> list[SchedulerEffect]:
        """Reject what never became a prompt: malformed, unknown model, out of vocabulary."""
        self._at(now_ns)
        wanted = Submission(request, tenant, 0, b"", 0, now_ns)
        self._append(request, 0, rejected(self.log, wanted, self.limits, code, reason))
        return self._done()

    def cancel(
        self, request: RequestId, cause: Cause, reported_by: str, now_ns: int
    ) -> list[SchedulerEffect]:
        """End a request from outside; ending twice, or an unknown one, changes nothing."""
        self._at(now_ns)
        pending = self.queue.find(request)
        if pending is not None and self.log.state(request).phase is Phase.NEW:
            code = RejectCode.DEADLINE if cause is Cause.DEADLINE else RejectCode.CANCELLED
            self._reject_waiting(pending, code, f"{cause.value} while waiting in the queue")
        else:
            self._carry_out(End(request, cause, reported_by))
        self._pump()
        return self._done()

    def tick(self, now_ns: int) -> list[SchedulerEffect]:
        """End, reject and quarantine what is overdue."""
        self._at(now_ns)
        for pending in self.queue.expired(self.now_ns):
            late = self.now_ns >= pending.wanted.deadline_ns
            code = RejectCode.DEADLINE if late else RejectCode.QUEUE_TIMEOUT
            limit = pending.wanted.deadline_ns if late else pending.expires_ns
            reason = (
                f"waited in the queue until {self.now_ns} ns, {self.now_ns - limit} ns too long"
            )
            self._reject_waiting(pending, code, reason)
        self._carry_out(Look(self.now_ns))
        self._pump()
        return self._done()

    # --- engines ------------------------------------------------------------------------------

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
        """Relay the next tokens, only while this attempt decodes; repeats and gaps are ignored."""
        state = self.log.state(request)
        relay = self.relays.get(request)
        if relay is None or state.phase is not Phase.DECODING or state.attempt != attempt:
            return []
        if state.admitted is None or party not in state.admitted.decode.parties():
            return []
        known = relay.held - first
        if known < 0 or known >= len(tokens):
            return []
        fresh = tokens[known:]
        start = len(relay.tokens)
        relay.tokens.extend(fresh)
        relay.held += len(fresh)
        return [TellTokens(request, start, fresh, texts[known:], logprobs[known:])]

    def acknowledge(self, party: Party, position: int) -> None:
        """The rank has taken in everything published up to here."""
        line = self.lines.get(party)
        if line is not None and position > line.acknowledged:
            line.acknowledged = position
            for request in [r for r, s in self.log.requests.items() if s.phase is Phase.CLOSED]:
                self._evict(request)

    def propose(self, proposal: Proposal, now_ns: int) -> list[SchedulerEffect]:
        """Take a proposal in order; a repeat is answered as before, a gap is not answered."""
        self._at(now_ns)
        line = self.lines.get(proposal.party)
        if line is None or proposal.number > line.expected:
            return []
        if proposal.number < line.expected:
            known = line.answers.get(proposal.number)
            return [] if known is None else [known]
        answer = self._take(proposal)
        if answer is None:
            return self._done()
        line.expected += 1
        line.answers[proposal.number] = answer
        line.answers.pop(proposal.number - ANSWERS_KEPT, None)
        self.effects.append(answer)
        self._pump()
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
        if isinstance(body, Finished) and state.phase is Phase.DECODING:
            relay = self.relays.get(proposal.request)
            if relay is not None and relay.held < body.tokens:
                # The tokens that it counts are still on their way; the engine repeats both.
                return None
        by = ByEngine(party, number)
        entry = Entry(proposal.request, state.sequence, proposal.attempt, by, self.now_ns, body)
        violation = self.log.check(entry)
        if violation is not None:
            return self._drop(proposal, violation)
        position = self._append(proposal.request, proposal.attempt, body, by)
        return Answer(party, number, position)

    def _take_failure(self, proposal: Proposal, failed: Failed, state: RequestState) -> Answer:
        party, number = proposal.party, proposal.number
        concerned = (party.engine, party.incarnation) in self._concerned(proposal.request)
        life = self.log.fleet.life(party.engine, party.incarnation)
        alive = life is not None and life.lost is None
        before = self.position
        if concerned and alive and state.attempt == proposal.attempt and state.phase in OPEN:
            relays = tuple((name, len(r.tokens)) for name, r in self.relays.items())
            relayed = dict(relays).get(proposal.request, state.relayed)
            self._carry_out(Fail(proposal.request, party, failed, relayed, relays))
        if self.position > before:
            return Answer(party, number, before + 1)
        rule = "quiet-after-end" if alive else "incarnation-fences"
        violation = Violation(
            rule, rule, "the failure concerns nothing that runs", proposal.request, 0
        )
        return self._drop(proposal, violation)

    def _repeat(self, proposal: Proposal) -> int | None:
        """The position at which this proposal's effect already stands in the log."""
        body, party = proposal.body, proposal.party
        for position, entry in self.entries.get(proposal.request, ()):
            known = entry.event
            same = known == body and entry.attempt == proposal.attempt
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

    # --- the one way into the log -------------------------------------------------------------

    def _append(
        self, request: RequestId, attempt: int, event: Event, by: Proposer | None = None
    ) -> int:
        """Append, publish to whom it concerns, tell the client; return the position."""
        if request == FLEET:
            sequence = self.log.fleet.sequence
        else:
            sequence = self.log.state(request).sequence
        proposer = ByScheduler(self.epoch) if by is None else by
        entry = Entry(request, sequence, attempt, proposer, self.now_ns, event)
        before = self.log.state(request)
        violation = self.log.apply(entry)
        if violation is not None:
            raise SequencerError(violation)
        self.position += 1
        self.effects.append(Append(self.position, entry))
        self.entries.setdefault(request, []).append((self.position, entry))
        if isinstance(event, Admitted):
            self._backfill(request, before)
        for party in self._parties(request):
            self._publish(party, self.position, entry)
        self._react(request, event)
        return self.position

    def _concerned(self, request: RequestId) -> tuple[tuple[EngineId, int], ...]:
        seen: dict[tuple[EngineId, int], None] = {}
        for _, entry in self.entries.get(request, ()):
            if isinstance(entry.event, Admitted):
                for named in audience(self.log.state(request), entry):
                    seen[named] = None
        return tuple(seen)

    def _parties(self, request: RequestId) -> list[Party]:
        if request == FLEET:
            return list(self.lines)
        named = self._concerned(request)
        return [p for p in self.lines if (p.engine, p.incarnation) in named]

    def _backfill(self, request: RequestId, before: RequestState) -> None:
        """Show an engine that joins a request at a later attempt what came before."""
        earlier = self.entries[request][:-1]
        if before.admitted is None:
            return
        known: set[tuple[EngineId, int]] = set()
        for _, entry in earlier:
            if isinstance(entry.event, Admitted):
                known.update((leg.engine, leg.incarnation) for leg in _legs(entry.event))
        for party in self._parties(request):
            if (party.engine, party.incarnation) not in known:
                for position, entry in earlier:
                    self._publish(party, position, entry)

    def _publish(self, party: Party, position: int, entry: Entry) -> None:
        durable = position if waits_for_durability(entry.event) else 0
        payload = None
        relay = self.relays.get(entry.request)
        if isinstance(entry.event, Admitted) and relay and relay.attempt == entry.attempt:
            payload = relay.payload
        self.effects.append(Publish(party, position, entry, payload, durable))

    def _react(self, request: RequestId, event: Event) -> None:
        if isinstance(event, Rejected | Finished | Aborted):
            self.effects.append(TellOutcome(request, event, self.position))
            pending = self.queue.find(request)
            if pending is not None:
                self.queue.pop(pending)
        elif isinstance(event, Admitted):
            self.effects.append(TellAdmitted(request, self.log.state(request).attempt, event))
        state = self.log.state(request)
        if state.phase is Phase.REQUEUED and not state.unsettled:
            self._requeue(state)
        if state.phase in {Phase.CLOSED, Phase.REJECTED}:
            self.relays.pop(request, None)
            self._evict(request)

    def _requeue(self, state: RequestState) -> None:
        """Everything of the last attempt is settled: wait for the next one."""
        relay = self.relays.get(state.request)
        if relay is None or state.first is None or self.queue.find(state.request) is not None:
            return
        tokens = relay.payload.tokens[: state.first.prompt_tokens] + tuple(relay.tokens)
        payload = Payload(tokens, len(relay.tokens), relay.payload.sampling)
        wanted = attrs.evolve(
            relay.submission,
            prompt_tokens=len(tokens),
            prompt_digest=self._digest(state.request, tokens),
            new_tokens_max=state.first.new_tokens_max - len(relay.tokens),
            attempt=state.attempt + 1,
        )
        self.queue.push_again(Pending(wanted, payload, relay.submission.deadline_ns))

    def _evict(self, request: RequestId) -> None:
        """Forget a closed request once every engine has heard of its end."""
        state = self.log.requests.get(request)
        if state is None or state.phase not in {Phase.CLOSED, Phase.REJECTED}:
            return
        if any(g.settlement is Settlement.QUARANTINED for g in state.grants):
            return
        last = self.entries[request][-1][0]
        for party in self._parties(request):
            life = self.log.fleet.life(party.engine, party.incarnation)
            alive = life is not None and life.lost is None
            if alive and self.lines[party].acknowledged < last:
                return
        del self.log.requests[request]
        del self.entries[request]
        for key in [k for k in self.drops if k[1] == request]:
            del self.drops[key]
        self.effects.append(TellClosed(request))

    # --- decisions ----------------------------------------------------------------------------

    def _refuse(self, wanted: Submission) -> Rejected | None:
        if not self.accepting:
            reason = "this deployment is shutting down and takes no new requests"
            return rejected(self.log, wanted, self.limits, RejectCode.DRAINING, reason)
        refusal = refuse(self.log, wanted, self.limits)
        if refusal is not None:
            return refusal
        if self.queue.full:
            reason = f"{len(self.queue)} requests wait in a queue of {self.queue.limit}"
            return rejected(self.log, wanted, self.limits, RejectCode.QUEUE_FULL, reason)
        if wanted.deadline_ns <= self.now_ns:
            reason = f"the deadline {wanted.deadline_ns} ns is not after {self.now_ns} ns"
            return rejected(self.log, wanted, self.limits, RejectCode.DEADLINE, reason)
        return None

    def _reject_waiting(self, pending: Pending, code: RejectCode, reason: str) -> None:
        self.queue.pop(pending)
        wanted = pending.wanted
        self._append(wanted.request, 0, rejected(self.log, wanted, self.limits, code, reason))

    def _pump(self) -> None:
        """Admit from the head of the queue as long as there is room."""
        while (pending := self.queue.head()) is not None:
            wanted = pending.wanted
            if self.now_ns >= wanted.deadline_ns:
                return
            admitted = admit(self.log, wanted, self.limits)
            if admitted is None:
                return
            self.queue.pop(pending)
            relay = self.relays.get(wanted.request)
            if relay is None:
                relay = self.relays[wanted.request] = Relay(pending.payload, wanted)
            relay.payload, relay.attempt, relay.held = pending.payload, wanted.attempt, 0
            self._append(wanted.request, wanted.attempt, admitted)

    def _carry_out(self, command: Command) -> None:
        for request, event in decide(self.log, command):
            attempt = 0 if request == FLEET else self.log.state(request).attempt
            self._append(request, attempt, event)

    def _lose(self, engine: EngineId, incarnation: int, cause: LostCause) -> None:
        relayed = tuple((name, len(relay.tokens)) for name, relay in self.relays.items())
        self._carry_out(Lose(engine, incarnation, cause, relayed))
        for party in [p for p in self.lines if (p.engine, p.incarnation) == (engine, incarnation)]:
            line = self.lines[party]
            line.acknowledged = self.position
        for request in tuple(self.log.requests):
            self._evict(request)

    def _at(self, now_ns: int) -> None:
        self.now_ns = max(self.now_ns, now_ns, self.log.time_ns)

    def _done(self) -> list[SchedulerEffect]:
        effects, self.effects = self.effects, []
        return effects


def _legs(admitted: Admitted) -> tuple[Leg, Leg]:
    return admitted.prefill, admitted.decode
