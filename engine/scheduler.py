"""What the outside asks of the sequencer: requests, proposals, engines, time.

Owns: when something is decided, and the answers to proposals.
Must not know: streams, stores, clocks, tokenizers; every call is given the time.

Each method returns effects in the order in which a shell performs them: append, publish, answer.
Whatever cannot be taken back carries the position that must be durable first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.effects import (
    Payload,
    SchedulerEffect,
    Synced,
    TellTokens,
)
from engine.judge import Judge
from engine.queue import Pending
from engine.sequencer import Line, Relay, SequencerError
from lifecycle.decide import (
    End,
    Look,
    Restart,
    Submission,
    admit,
    refuse,
    rejected,
    unplaceable,
)
from lifecycle.events import (
    Admitted,
    Attached,
    Cause,
    Draining,
    Entry,
    LostCause,
    Proposal,
    RejectCode,
    Rejected,
    Resumed,
)
from lifecycle.ids import FLEET, EngineId, Party, RequestId, request_id
from lifecycle.snapshot import Snapshot, restore
from lifecycle.state import TERMINAL, Phase
from lifecycle.wording import counted

ANSWERS_KEPT = 8192
"""How many answers per rank are kept for repeats; an engine has fewer proposals outstanding."""


_REJECTED_FOR = {Cause.DEADLINE: RejectCode.DEADLINE, Cause.SHUTDOWN: RejectCode.DRAINING}
"""What a cause that ends a request is called for one that was never admitted."""


class RefusedEngineError(Exception):
    """An engine may not join: the reason names what was compared."""

    def __init__(self, *, engine: EngineId, reason: str) -> None:
        super().__init__(f"{engine} may not join: {reason}")
        self.engine = engine
        self.reason = reason


class Scheduler(Judge):
    """One scheduler life. Its state is the reduced log and what a crash may forget."""

    # --- lives --------------------------------------------------------------------------------

    def resume(
        self,
        stored: Iterable[tuple[int, Entry]],
        now_ns: int,
        snapshot: Snapshot | None = None,
        *,
        last_of: Callable[[RequestId], int | None] | None = None,
    ) -> list[SchedulerEffect]:
        """Take in a store's log, begin this epoch, and abort what nobody waits for any more.

        `snapshot` stands for what was before the log's first entry.  `last_of` tells where a
        request's last entry stands: behind it what is over is forgotten, so that a long log takes
        no more memory than a short one.
        """
        if snapshot is not None:
            self.log = restore(snapshot)
            for position, entry in snapshot.entries:
                self._remember(position, entry)
            self.position = snapshot.position
        for position, entry in stored:
            violation = self.log.apply(entry)
            if violation is not None:
                raise SequencerError(violation)
            self._remember(position, entry)
            self.position = position
            if last_of is not None and position == last_of(entry.request):
                self._forget(entry.request)
        self._at(max(now_ns, self.log.time_ns))
        self._append(FLEET, 0, Resumed(self.epoch, self.position))
        self._carry_out(Restart())
        for request in tuple(self.log.requests):
            self._evict(request)
        return self._done()

    def _remember(self, position: int, entry: Entry) -> None:
        self.entries.setdefault(entry.request, []).append((position, entry))
        if isinstance(entry.event, Admitted):
            self._concern(entry.request, entry.event)
        self._note_let_in(entry.event)

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
        due = [
            (at, entry)
            for request, log in self.entries.items()
            for at, entry in log
            if at > self._seen(party, request, cursor)
        ]
        for at, entry in sorted(due, key=lambda pair: pair[0]):
            self._publish(party, at, entry)
        self.effects.append(Synced(party))
        return self._done()

    def _seen(self, party: Party, request: RequestId, cursor: int) -> int:
        """Up to where a rank with that cursor has a request's log.

        Who joined at a later attempt was shown older entries just before that `Admitted`: until
        it has that, it may lack any of them, though its cursor is beyond them.
        """
        if request == FLEET:
            return cursor
        named = (party.engine, party.incarnation)
        for at, entry in self.entries[request]:
            if isinstance(entry.event, Admitted):
                legs = (entry.event.prefill, entry.event.decode)
                if named in [(leg.engine, leg.incarnation) for leg in legs]:
                    return cursor if cursor >= at else 0
        return self.position

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
            state.phase in TERMINAL for state in self.log.requests.values()
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
        self.queue.push(Pending(wanted, payload, self.now_ns + self.queue_ns, self.now_ns))
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
            code = _REJECTED_FOR.get(cause, RejectCode.CANCELLED)
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
            reason = (
                f"the deadline {pending.wanted.deadline_ns} ns passed in the queue"
                if late
                else f"waited in the queue for longer than the {self.queue_ns} ns that it allows"
            )
            self._reject_waiting(pending, code, reason)
        self._end_unplaceable()
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
        """Relay the next tokens, only while this attempt decodes; repeats and gaps are ignored.

        Tokens beyond what was admitted are cut off: no engine can fill this memory without end.
        """
        state = self.log.state(request)
        relay = self.relays.get(request)
        if relay is None or state.phase is not Phase.DECODING or state.attempt != attempt:
            return []
        admitted = state.admitted
        if admitted is None or not admitted.decode.has(party):
            return []
        known = relay.held - first
        if known < 0 or known >= len(tokens):
            return []
        last = admitted.new_tokens_max - first
        fresh = tokens[known:last]
        if not fresh:
            return []
        start = len(relay.tokens)
        relay.tokens.extend(fresh)
        relay.held += len(fresh)
        return [TellTokens(request, start, fresh, texts[known:last], logprobs[known:last])]

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

    # --- decisions ----------------------------------------------------------------------------

    def _refuse(self, wanted: Submission) -> Rejected | None:
        if not self.accepting:
            reason = "this deployment is shutting down and takes no new requests"
            return rejected(self.log, wanted, self.limits, RejectCode.DRAINING, reason)
        refusal = refuse(self.log, wanted, self.limits)
        if refusal is not None:
            return refusal
        if self.queue.full:
            reason = (
                f"the queue of {self.queue.limit} is full: {counted(len(self.queue), 'request')} "
                "waiting"
            )
            return rejected(self.log, wanted, self.limits, RejectCode.QUEUE_FULL, reason)
        if wanted.deadline_ns <= self.now_ns:
            reason = f"the deadline {wanted.deadline_ns} ns has passed"
            return rejected(self.log, wanted, self.limits, RejectCode.DEADLINE, reason)
        return None

    def _reject_waiting(self, pending: Pending, code: RejectCode, reason: str) -> None:
        self.queue.pop(pending)
        wanted = pending.wanted
        self._append(wanted.request, 0, rejected(self.log, wanted, self.limits, code, reason))

    def _end_unplaceable(self) -> None:
        """End who has waited long enough for engines that could hold it.

        Since its last event the fleet is as it is now, so nobody's wait is counted too long.
        """
        if not self.engine_wait_ns:
            return
        for pending in self.queue.waiting():
            waited_ns = self.now_ns - max(pending.since_ns, self.log.fleet.time_ns)
            if waited_ns < self.engine_wait_ns:
                continue
            reason = unplaceable(self.log, pending.wanted)
            if reason is None:
                continue
            reason = f"{reason}; it has been so for {waited_ns / 1e9:.1f} s"
            if self.log.state(pending.wanted.request).phase is Phase.NEW:
                self._reject_waiting(pending, RejectCode.NO_ENGINE, reason)
            else:
                self._carry_out(End(pending.wanted.request, Cause.NO_ENGINE, "scheduler", reason))

    def _pump(self) -> None:
        """Admit from the head of the queue as long as there is room."""
        while self.admitting and (pending := self.queue.head()) is not None:
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
