"""The one way into the log: append, publish to whom it concerns, tell the client, forget.

Owns: the reduced log, positions, who is shown what, tokens of open requests.
Must not know: why something is appended; that is the `scheduler`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Self

import attrs

from engine.digests import Keyed
from engine.effects import (
    Answer,
    Append,
    Payload,
    Publish,
    SchedulerEffect,
    TellAdmitted,
    TellClosed,
    TellOutcome,
)
from engine.queue import FairQueue, Pending
from lifecycle.decide import Command, Limits, Submission, decide, waits_for_durability
from lifecycle.events import (
    Aborted,
    Admitted,
    ByScheduler,
    Entry,
    Event,
    Finished,
    Proposer,
    Rejected,
    Reserved,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, EngineId, Party, RequestId
from lifecycle.state import TERMINAL, Grant, Phase, RequestState, Settlement, Violation

LET_IN_MAX = 65_536
"""How many grants that let writers in are remembered by their tags, also after they were settled."""


class SequencerError(RuntimeError):
    """The scheduler decided something that its own rules refuse: a bug, never input."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"{violation.guard}: {violation.message}")
        self.violation = violation


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


class Sequencer:
    """A reduced log that is extended by `_append` alone; effects pile up until they are taken."""

    def __init__(
        self,
        *,
        limits: Limits,
        epoch: int,
        digest: Keyed,
        queue_limit: int = 256,
        queue_ns: int = 60_000_000_000,
        engine_wait_ns: int = 0,
        without: Iterable[str] = (),
    ) -> None:
        """Begin with an empty log; `resume` takes in what a store holds.

        engine_wait_ns: how long a request waits for engines that could hold it; 0 is for ever.
        """
        self.limits = limits
        self.epoch = epoch
        self.log = History(without=without)
        self.position = 0
        self.now_ns = 0
        self.queue = FairQueue(queue_limit)
        self.queue_ns = queue_ns
        self.engine_wait_ns = engine_wait_ns
        self.relays: dict[RequestId, Relay] = {}
        self.entries: dict[RequestId, list[tuple[int, Entry]]] = {FLEET: []}
        self.audiences: dict[RequestId, tuple[tuple[EngineId, int], ...]] = {}
        self.lines: dict[Party, Line] = {}
        self.drops: dict[tuple[Party, RequestId, str], int] = {}
        self.let_in: dict[int, tuple[Party, ...]] = {}
        self.accepting = True
        self.admitting = True
        self.effects: list[SchedulerEffect] = []
        self._digest = digest
        self._serial = 0

    def copy(self) -> Self:
        """An independent copy; values inside are shared."""
        other = copy.copy(self)
        other.log = self.log.copy()
        other.queue = self.queue.copy()
        other.relays = {
            name: Relay(r.payload, r.submission, r.attempt, r.held, list(r.tokens))
            for name, r in self.relays.items()
        }
        other.entries = {name: list(log) for name, log in self.entries.items()}
        other.audiences = dict(self.audiences)
        other.lines = {
            party: Line(line.expected, dict(line.answers), line.acknowledged)
            for party, line in self.lines.items()
        }
        other.drops = dict(self.drops)
        other.let_in = dict(self.let_in)
        other.effects = list(self.effects)
        return other

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
        violation = self.log.apply(entry)
        if violation is not None:
            raise SequencerError(violation)
        self.position += 1
        self.effects.append(Append(self.position, entry))
        self.entries.setdefault(request, []).append((self.position, entry))
        if isinstance(event, Admitted):
            self._backfill(request, self._concern(request, event))
        self._note_let_in(event)
        for party in self._parties(request):
            self._publish(party, self.position, entry)
        self._react(request, event)
        return self.position

    def _note_let_in(self, event: Event) -> None:
        """A tag is met again where its writer writes, perhaps long after its grant was settled."""
        if isinstance(event, Reserved) and event.parties:
            self.let_in[event.tag] = event.parties
            if len(self.let_in) > LET_IN_MAX:
                del self.let_in[next(iter(self.let_in))]

    def _concerned(self, request: RequestId) -> tuple[tuple[EngineId, int], ...]:
        return self.audiences.get(request, ())

    def _parties(self, request: RequestId) -> list[Party]:
        if request == FLEET:
            return list(self.lines)
        named = self._concerned(request)
        return [p for p in self.lines if (p.engine, p.incarnation) in named]

    def _concern(self, request: RequestId, event: Admitted) -> list[tuple[EngineId, int]]:
        """Note whom an attempt concerns from now on; return who had no part in it before."""
        known = self.audiences.get(request, ())
        legs = (event.prefill, event.decode)
        new = [(leg.engine, leg.incarnation) for leg in legs]
        new = [named for named in new if named not in known]
        self.audiences[request] = (*known, *new)
        return new

    def _backfill(self, request: RequestId, newcomers: list[tuple[EngineId, int]]) -> None:
        """Show an engine that joins a request at a later attempt what came before."""
        earlier = self.entries[request][:-1]
        for party in self._parties(request):
            if (party.engine, party.incarnation) in newcomers:
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
        if state.phase in TERMINAL:
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
        deadline_ns = relay.submission.deadline_ns
        self.queue.push_again(Pending(wanted, payload, deadline_ns, self.now_ns))

    def _evict(self, request: RequestId) -> None:
        """Forget a request that is over, and tell who relays for it."""
        if self._forget(request):
            self.effects.append(TellClosed(request))

    def _forget(self, request: RequestId) -> bool:
        """Forget a closed request once every engine has heard of its end; says whether it did."""
        state = self.log.requests.get(request)
        if state is None or state.phase not in TERMINAL:
            return False
        if any(self._may_change(grant) for grant in state.grants):
            return False
        last = self.entries[request][-1][0]
        for party in self._parties(request):
            life = self.log.fleet.life(party.engine, party.incarnation)
            alive = life is not None and life.lost is None
            if alive and self.lines[party].acknowledged < last:
                return False
        del self.log.requests[request]
        del self.entries[request]
        self.audiences.pop(request, None)
        for key in [k for k in self.drops if k[1] == request]:
            del self.drops[key]
        return True

    def _may_change(self, grant: Grant) -> bool:
        """Whether somebody who lives may still say something of a quarantined grant."""
        parties = (grant.id.owner, *grant.undrained)
        lives = (self.log.fleet.life(p.engine, p.incarnation) for p in parties)
        return grant.settlement is Settlement.QUARANTINED and any(
            life is not None and life.lost is None for life in lives
        )

    def _carry_out(self, command: Command) -> None:
        for request, event in decide(self.log, command):
            attempt = 0 if request == FLEET else self.log.state(request).attempt
            self._append(request, attempt, event)

    def _at(self, now_ns: int) -> None:
        self.now_ns = max(self.now_ns, now_ns, self.log.time_ns)

    def _done(self) -> list[SchedulerEffect]:
        effects, self.effects = self.effects, []
        return effects
