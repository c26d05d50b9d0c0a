"""Cores with one guard removed or one proof forged: what the search must find.

Each is the real decision code with a method replaced; the product has no hooks for this.
`oracles` are the findings that count as finding it, `rule` what the log shows (empty when the
fault leaves no trace in a log: then memory or a client has to see it).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from engine.decode import DecodeCore, DecodeJob
from engine.effects import (
    Answer,
    Publish,
    SchedulerEffect,
    TellOutcome,
    TellTokens,
    VerifyPages,
)
from engine.prefill import PrefillCore, PrefillJob
from engine.scheduler import Scheduler
from engine.sequencer import Line
from engine.world import World
from engine.world_memory import Write
from engine.world_options import Key
from engine.world_values import Action, Asked, Scenario
from lifecycle.decide import Command, Look, Lose, decide
from lifecycle.events import (
    Aborted,
    Drained,
    Entry,
    Event,
    Finished,
    Proof,
    Proposal,
    Proposer,
    Purpose,
    QuarantineCause,
    Quarantined,
    Released,
    Reserved,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, GrantId, Party, RequestId
from lifecycle.state import LIVE, Grant, RequestState

FAULTS = {
    "lose": 2,
    "repeat": 2,
    "swap": 2,
    "break": 1,
    "crash": 2,
    "process-crash": 1,
    "cancel": 2,
    "tick": 2,
    "doubt": 1,
    "hang": 1,
    "fail": 1,
    "reland": 2,
    "restart": 1,
    "declare-lost": 1,
    "step-fails": 1,
}
CROWDED = Scenario(
    asked=(Asked(4, 2), Asked(5, 2), Asked(5, 1), Asked(1, 3), Asked(4, 2)),
    decode_pages=6,
    faults=FAULTS,
)
"""More than fits at once, so that pages change hands: two writer ranks, one decode engine."""


def blinded(cls: type[Any], *names: str) -> type[Any]:
    """An engine core whose copy of the log is reduced without these guards."""

    class Blinded(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.log = History(without=names, crossguards=False)

        def begin_sync(self, epoch: int) -> None:
            super().begin_sync(epoch)
            self.log = History(without=names, crossguards=False)

    return Blinded


def focus(**faults: int) -> Scenario:
    """The scenario with these faults only; `breaks` are breaks of a stream."""
    named = {name.replace("_", "-"): count for name, count in faults.items()}
    if "breaks" in named:
        named["break"] = named.pop("breaks")
    return attrs.evolve(CROWDED, faults=named)


def unjudged(scenario: Scenario) -> Scenario:
    """The scenario without its log being replayed on the way: memory has to see the fault."""
    return attrs.evolve(scenario, judged=False)


def without(
    *names: str,
    scheduler: Callable[..., Scheduler] = Scheduler,
    prefill: type[PrefillCore] = PrefillCore,
    decode: type[DecodeCore] = DecodeCore,
    scenario: Scenario = CROWDED,
) -> Scenario:
    """The scenario with these guards taken away everywhere, and perhaps other cores."""
    return attrs.evolve(
        scenario,
        scheduler=partial(scheduler, without=names) if names else scheduler,
        prefill=blinded(prefill, *names) if names else prefill,
        decode=blinded(decode, *names) if names else decode,
    )


# --- settlement -------------------------------------------------------------------------------

PARTIES = "drained-before-released/parties"
RECOVERED = "drained-before-released/recovered"


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


class DoubleRelease(DecodeCore):
    """Two paths give the same pages back."""

    def _take_back(self, request: RequestId) -> None:
        for holding in self.held_for(request):
            grant = self.log.state(request).grant(holding.reserved.grant)
            if grant is not None and grant.settlement.value == "released":
                self.allocator.give_back((r.first, r.count) for r in holding.reserved.pages)
        super()._take_back(request)


class FreeUnderStep(DecodeCore):
    """Pages are released while a step may still touch them."""

    def touched(self, request: RequestId) -> bool:
        return False


class FreeUnderCompute(PrefillCore):
    """A rank gives its source back when its share is written, though it still computes."""

    def _release_source(self, state: RequestState, job: PrefillJob) -> None:
        computed, job.computed = job.computed, self._wanted(job)
        super()._release_source(state, job)
        job.computed = computed


# --- writers ----------------------------------------------------------------------------------


class AckEarly(PrefillCore):
    """A write in flight is acknowledged as ended."""

    def _writing(self, _grant: GrantId) -> bool:
        return False


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


class FreeStaging(PrefillCore):
    """Staging is given back when a write is posted, not when it has ended."""

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


# --- readers ----------------------------------------------------------------------------------


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


# --- the scheduler ----------------------------------------------------------------------------


class PublishedEarly(Scheduler):
    """A grant that lets in remote writers is shown to them before it is durable."""

    def _publish(self, party: Party, position: int, entry: Entry) -> None:
        super()._publish(party, position, entry)
        last = self.effects[-1]
        if isinstance(last, Publish) and isinstance(entry.event, Reserved):
            self.effects[-1] = attrs.evolve(last, durable=0)


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


class FinishedEarly(Scheduler):
    """Success is accepted before the tokens that it counts are here."""

    def _take(self, proposal: Proposal) -> Answer | None:
        relay = self.relays.get(proposal.request)
        if isinstance(proposal.body, Finished) and relay is not None:
            relay.held = max(relay.held, proposal.body.tokens)
        return super()._take(proposal)


class RepeatDropped(Scheduler):
    """A repeated proposal is answered as if it had never taken effect."""

    def propose(self, proposal: Proposal, now_ns: int) -> list[SchedulerEffect]:
        line = self.lines.get(proposal.party)
        if line is not None and proposal.number < line.expected:
            return [Answer(proposal.party, proposal.number, 0, "settled-once")]
        return super().propose(proposal, now_ns)


class SuccessOverwrites(Scheduler):
    """A success that arrives after an abort is told as well."""

    def _take(self, proposal: Proposal) -> Answer | None:
        state = self.log.state(proposal.request)
        if isinstance(proposal.body, Finished) and isinstance(state.outcome, Aborted):
            self.effects.append(TellOutcome(proposal.request, proposal.body, self.position))
        return super()._take(proposal)


class DrainOvertakes(Scheduler):
    """Proposals are taken as they come; a gap is not waited for."""

    def propose(self, proposal: Proposal, now_ns: int) -> list[SchedulerEffect]:
        line = self.lines.get(proposal.party, Line())
        line.expected = max(line.expected, proposal.number)
        return super().propose(proposal, now_ns)


class ForgetsBackfill(Scheduler):
    """A cursor is believed, though older entries were shown to a late joiner."""

    def _seen(self, party: Party, request: RequestId, cursor: int) -> int:
        named = (party.engine, party.incarnation)
        known = request == FLEET or named in self._concerned(request)
        return cursor if known else self.position


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


class SameMemory(World):
    """A new incarnation lives in the memory of the old one, whose addresses still work."""

    def _do_land(self, party: Party, ticket: int) -> None:
        write = self.writes[(party, ticket)]
        owner = write.post.grant.owner
        if owner in self.cores:
            super()._do_land(party, ticket)
            return
        current = self.cores[attrs.evolve(owner, incarnation=self.incarnations[owner.engine])]
        self.memory.land(current, write)

    def _enabled_write(self, key: Key, write: Write, out: list[Action]) -> None:
        super()._enabled_write(key, write, out)
        if write.post.grant.owner not in self.cores and not write.landed:
            out.append(("land", *key))


# --- the list ---------------------------------------------------------------------------------


@attrs.frozen
class Mutant:
    """A scenario with a hole, what may find it, and the rule that its log breaks."""

    name: str
    scenario: Scenario
    oracles: frozenset[str]
    rule: str = ""
    runs_max: int = 600
    worlds: type[World] = World


def _mutant(name: str, scenario: Scenario, oracles: str, rule: str = "", **more: Any) -> Mutant:
    return Mutant(name, scenario, frozenset(oracles.split()), rule, **more)


CANCELS = focus(cancel=3, lose=1, repeat=1)
LOSSES = focus(restart=2, declare_lost=1, breaks=3)
ODD = attrs.evolve(CANCELS, asked=(Asked(5, 2), Asked(5, 1), Asked(5, 2)))

MUTANTS = (
    _mutant(
        "free-on-abort",
        unjudged(without(PARTIES, RECOVERED, scenario=CANCELS)),
        "late-write",
        "drained-before-released",
    ),
    _mutant(
        "one-ack-of-many",
        unjudged(without(PARTIES, RECOVERED, decode=OneAckOfMany, scenario=CANCELS)),
        "late-write",
        "drained-before-released",
    ),
    _mutant(
        "timer-frees",
        unjudged(
            without(
                *(PARTIES, RECOVERED, "time-is-no-proof/by-engine", "settled-once/owner"),
                scheduler=TimerFrees,
                decode=Patient,
                scenario=focus(cancel=3, tick=3),
            )
        ),
        "late-write step-on-unheld",
        "time-is-no-proof",
    ),
    _mutant("owner-lost-forgotten", without(scheduler=OwnerLostForgotten), "stuck"),
    _mutant("double-release", without(decode=DoubleRelease), "allocator"),
    _mutant(
        "free-under-step",
        without(decode=FreeUnderStep, scenario=CANCELS),
        "step-on-unheld read-unheld",
    ),
    _mutant(
        "free-under-compute",
        without(prefill=FreeUnderCompute, scenario=CANCELS),
        "step-on-unheld",
    ),
    _mutant("ack-early", without(prefill=AckEarly, scenario=CANCELS), "late-write"),
    _mutant("late-chunk", without(prefill=LateChunk), "late-write"),
    _mutant(
        "post-after-drain",
        without("drained-is-final/transfer", prefill=DrainThenPost),
        "late-write replay",
        "drained-is-final",
    ),
    _mutant("send-before-compute", without(prefill=SendBeforeCompute), "computed-before-sent"),
    _mutant("free-staging", without(prefill=FreeStaging, scenario=CANCELS), "foreign-staging"),
    _mutant(
        "short-handoff",
        without(
            "whole-before-read/covered", prefill=ShortHandoff, decode=ReadsWhatCame, scenario=ODD
        ),
        "isolation",
        "whole-before-read",
    ),
    _mutant(
        "read-before-drain",
        without("exclusive-before-read/drained", decode=ReadBeforeDrain),
        "replay isolation",
        "exclusive-before-read",
    ),
    _mutant(
        "published-not-durable",
        attrs.evolve(focus(crash=1), asked=(Asked(3, 1),), scheduler=PublishedEarly),
        "late-write",
        runs_max=1_500,
    ),
    _mutant("answer-before-durable", without(scheduler=AnsweredEarly), "answer-before-durable"),
    _mutant(
        "token-after-end",
        without(scheduler=RelaysAlways),
        "token-after-end",
        "quiet-after-end",
    ),
    _mutant("ok-before-last-token", without(scheduler=FinishedEarly), "truncated"),
    _mutant(
        "success-overwrites-abort",
        without(scheduler=SuccessOverwrites, scenario=CANCELS),
        "answered-twice",
    ),
    _mutant(
        "repeat-dropped",
        without(scheduler=RepeatDropped, scenario=focus(breaks=4)),
        "freed-but-held late-write",
    ),
    _mutant("drain-overtakes", without(scheduler=DrainOvertakes), "stuck leak never-quiet"),
    _mutant(
        "id-minted-twice",
        attrs.evolve(CROWDED, epochs_repeat=True),
        "sequencer id-minted-twice",
        "unbroken-log",
    ),
    _mutant(
        "old-incarnation",
        without("incarnation-fences/proposer"),
        "replay",
        "incarnation-fences",
    ),
    _mutant(
        "forgets-backfill",
        without(scheduler=ForgetsBackfill, scenario=LOSSES),
        "log-diverged",
        "unbroken-log",
    ),
    _mutant("same-memory", focus(restart=3), "late-write", worlds=SameMemory),
    _mutant(
        "unbooked",
        without("conservation/promised", "capacity-proved/counted", scheduler=Unbooked),
        "stuck replay",
        "capacity-proved",
    ),
)
"""Historical and design mutants that this world can hold."""
