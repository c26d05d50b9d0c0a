"""What the scheduler decides: admission, placement, victims, ends, quarantine.

Owns: pure functions from a reduced log and a command to the events that follow.
Must not know: queues, streams, stores; nothing here remembers anything.

`decide(history, command)` returns the events in the order in which they are to be appended;
`audience` and `waits_for_durability` say who is to see an entry, and when.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import attrs

from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    Cause,
    Entry,
    Event,
    Failed,
    Leg,
    Lost,
    LostCause,
    Purpose,
    QuarantineCause,
    Quarantined,
    RejectCode,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Role,
)
from lifecycle.fleet import Life
from lifecycle.history import History
from lifecycle.ids import FLEET, EngineId, Party, RequestId, pages_for, prefill_pages
from lifecycle.state import LIVE, OPEN, Grant, Phase, RequestState

Decided = tuple[RequestId, Event]


@attrs.frozen
class Limits:
    """What a deployment allows, in tokens, attempts and nanoseconds."""

    context_tokens: int
    growth_tokens: int = 32
    attempts_max: int = 4
    settle_ns: int = 30_000_000_000


@attrs.frozen
class Submission:
    """A request that waits for its decision (again, when `relayed` tokens went out before)."""

    request: RequestId
    tenant: str
    prompt_tokens: int
    prompt_digest: bytes
    new_tokens_max: int
    deadline_ns: int
    attempt: int = 1


@attrs.frozen
class Fail:
    """An engine reports that it cannot go on with a request.

    `relayed` counts the tokens that its client has, `others` those of every live request:
    for want of pages the youngest gives way, which may be another one.
    """

    request: RequestId
    reporter: Party
    failed: Failed
    relayed: int
    others: tuple[tuple[RequestId, int], ...] = ()


@attrs.frozen
class End:
    """The outside world ends a request: a client, a deadline, a shutdown."""

    request: RequestId
    cause: Cause
    reported_by: str


@attrs.frozen
class Lose:
    """A life of an engine is over."""

    engine: EngineId
    incarnation: int
    cause: LostCause
    relayed: tuple[tuple[RequestId, int], ...] = ()


@attrs.frozen
class Look:
    """Time has passed: end and quarantine what is overdue."""

    now_ns: int


@attrs.frozen
class Restart:
    """A new epoch found this log: nobody waits for its open requests any more."""


Command = Fail | End | Lose | Look | Restart


def decide(history: History, command: Command) -> tuple[Decided, ...]:
    """Return the events that the command leads to, in order."""
    match command:
        case Fail():
            return tuple(_fail(history, command))
        case End():
            state = history.state(command.request)
            if state.phase not in OPEN:
                return ()
            return ((command.request, Aborted(command.cause, command.reported_by)),)
        case Lose():
            return tuple(_lose(history, command))
        case Look():
            return tuple(_look(history, command.now_ns))
        case Restart():
            ended = Aborted(Cause.SCHEDULER_RESTARTED, "scheduler")
            return tuple((s.request, ended) for s in history.requests.values() if s.phase in OPEN)
        case _:
            assert_never(command)


# --- admission --------------------------------------------------------------------------------


def refuse(history: History, wanted: Submission, limits: Limits) -> Rejected | None:
    """Say why this request can never be served here, or None. No engine is asked."""
    total = wanted.prompt_tokens + wanted.new_tokens_max
    if wanted.prompt_tokens < 1 or wanted.new_tokens_max < 1:
        return rejected(
            history,
            wanted,
            limits,
            RejectCode.INVALID_REQUEST,
            f"{wanted.prompt_tokens} prompt tokens and {wanted.new_tokens_max} new tokens: "
            "each must be at least 1",
        )
    if total > limits.context_tokens:
        return rejected(
            history,
            wanted,
            limits,
            RejectCode.CONTEXT_LENGTH_EXCEEDED,
            f"{wanted.prompt_tokens} prompt tokens and {wanted.new_tokens_max} new tokens "
            f"exceed the context of {limits.context_tokens} tokens",
            limits.context_tokens,
        )
    prefills, decodes = _lives(history, Role.PREFILL), _lives(history, Role.DECODE)
    if not prefills or not decodes:
        return rejected(
            history,
            wanted,
            limits,
            RejectCode.NO_ENGINE,
            f"{len(prefills)} prefill and {len(decodes)} decode engines are attached: "
            "one of each is needed",
        )
    for lives, tokens, leg in (
        (prefills, max(1, wanted.prompt_tokens - 1), "prefill"),
        (decodes, total, "decode"),
    ):
        pool = max(life.attached.pages * life.attached.page_tokens for life in lives)
        if all(
            pages_for(tokens, life.attached.page_tokens) > life.attached.pages for life in lives
        ):
            return rejected(
                history,
                wanted,
                limits,
                RejectCode.KV_POOL_CAPACITY_EXCEEDED,
                f"{tokens} tokens of KV are needed on a {leg} engine whose pool holds "
                f"{pool} tokens",
                pool,
            )
    return None


def rejected(
    history: History,
    wanted: Submission,
    limits: Limits,
    code: RejectCode,
    reason: str,
    capacity_tokens: int = 0,
) -> Rejected:
    """A rejection with the numbers of this submission."""
    return Rejected(
        code=code,
        reason=reason,
        prompt_tokens=max(0, wanted.prompt_tokens),
        new_tokens_max=max(0, wanted.new_tokens_max),
        context_tokens=limits.context_tokens,
        capacity_tokens=capacity_tokens,
        tenant=wanted.tenant,
        fleet_position=history.fleet.sequence,
    )


def admit(history: History, wanted: Submission, limits: Limits) -> Admitted | None:
    """Place a request on two legs with both legs' pages booked in one step, or None for now."""
    pairs = [
        (p, d)
        for p in _placeable(history, Role.PREFILL)
        for d in _placeable(history, Role.DECODE)
        if p.attached.layout == d.attached.layout
    ]
    best: tuple[int, Leg, Leg] | None = None
    for p, d in pairs:
        prefill = _leg(history, p, wanted, limits)
        decode = _leg(history, d, wanted, limits)
        if prefill is None or decode is None:
            continue
        room = prefill.pages_free - prefill.pages_booked + decode.pages_free - decode.pages_booked
        if best is None or room > best[0]:
            best = (room, prefill, decode)
    if best is None:
        return None
    return Admitted(
        prompt_tokens=wanted.prompt_tokens,
        prompt_digest=wanted.prompt_digest,
        new_tokens_max=wanted.new_tokens_max,
        context_tokens=limits.context_tokens,
        prefill=best[1],
        decode=best[2],
        tenant=wanted.tenant,
        deadline_ns=wanted.deadline_ns,
        settle_ns=limits.settle_ns,
        attempts_max=limits.attempts_max,
        fleet_position=history.fleet.sequence,
    )


def _lives(history: History, role: Role) -> list[Life]:
    return [life for life in history.fleet.alive() if life.attached.role is role]


def _placeable(history: History, role: Role) -> list[Life]:
    return [life for life in _lives(history, role) if life.usable]


def growth_booked(wanted: Submission, limits: Limits) -> int:
    """How many tokens beyond the prompt are booked: a small step, four times more each attempt.

    The last attempt books all that the request may ever need, so it cannot run out of pages.
    """
    if wanted.attempt >= limits.attempts_max:
        return wanted.new_tokens_max
    step: int = limits.growth_tokens * 4 ** (wanted.attempt - 1)
    return min(wanted.new_tokens_max, step)


def _leg(history: History, life: Life, wanted: Submission, limits: Limits) -> Leg | None:
    attached = life.attached
    size = attached.page_tokens
    parties = [Party(attached.engine, attached.incarnation, rank) for rank in range(attached.ranks)]
    accounts = [history.ledger[party] for party in parties]
    if any(len(account.booked) >= account.slots for account in accounts):
        return None
    capacity = min(account.usable_pages for account in accounts)
    free = min(account.free_pages for account in accounts)
    if attached.role is Role.PREFILL:
        needed = booked = prefill_pages(wanted.prompt_tokens, size)
    else:
        needed = pages_for(wanted.prompt_tokens + wanted.new_tokens_max, size)
        booked = pages_for(wanted.prompt_tokens + growth_booked(wanted, limits), size)
        # Whoever decodes here may soon grow by a step: a newcomer must not take that room.
        running = max(len(account.booked) for account in accounts)
        free_after = free - running * pages_for(limits.growth_tokens, size)
        if booked > free_after:
            return None
    if needed > capacity or booked > free:
        return None
    return Leg(
        engine=attached.engine,
        incarnation=attached.incarnation,
        ranks=attached.ranks,
        page_tokens=size,
        pages_needed=needed,
        pages_booked=booked,
        pages_capacity=capacity,
        pages_free=free,
        layout=attached.layout,
    )


# --- ends -------------------------------------------------------------------------------------

_RETRIED = frozenset({Cause.OUT_OF_PAGES, Cause.ENGINE_LOST, Cause.TRANSFER_FAILED})


def _end(state: RequestState, cause: Cause, reporter: str, relayed: int) -> Event:
    """Requeue where another attempt may help and is allowed, abort otherwise."""
    admitted = state.admitted
    retry = admitted is not None and state.attempt < admitted.attempts_max
    room = state.first is not None and relayed < state.first.new_tokens_max
    if cause in _RETRIED and retry and room:
        return Requeued(cause, reporter, relayed)
    if cause is Cause.OUT_OF_PAGES:
        return Aborted(Cause.ATTEMPTS_EXHAUSTED, reporter)
    return Aborted(cause, reporter)


def _fail(history: History, command: Fail) -> Iterable[Decided]:
    state = history.state(command.request)
    if state.phase not in LIVE:
        return
    failed = command.failed
    reporter = str(command.reporter)
    if failed.cause is not Cause.OUT_OF_PAGES:
        event = _end(state, failed.cause, reporter, command.relayed)
        if isinstance(event, Aborted):
            event = Aborted(
                failed.cause,
                reporter,
                failed.message,
                failed.page,
                failed.tag_expected,
                failed.tag_found,
            )
        yield command.request, event
        for grant in state.unsettled:
            if failed.cause is Cause.ISOLATION_VIOLATION and _holds(
                grant, command.reporter, failed.page
            ):
                yield command.request, Quarantined(grant.id, QuarantineCause.ISOLATION)
        return
    decode = state.admitted.decode if state.admitted is not None else None
    if decode is None:
        return
    # The oldest keeps its pages, so that somebody always comes to an end.
    other = victim(history, decode.engine, decode.incarnation)
    chosen = state if other is None else history.state(other)
    relayed = dict(command.others).get(chosen.request, command.relayed)
    yield chosen.request, _end(chosen, Cause.OUT_OF_PAGES, reporter, relayed)


def _holds(grant: Grant, owner: Party, page: int | None) -> bool:
    """Whether this grant of that owner contains the page."""
    return (
        page is not None
        and grant.id.owner == owner
        and any(r.first <= page < r.stop for r in grant.reserved.pages)
    )


def victim(history: History, engine: EngineId, incarnation: int) -> RequestId | None:
    """The youngest request on a decode engine that has an attempt left; None when there is none.

    Never the oldest. A request in its last attempt has all its pages booked, so it asks for
    none and gives none. The greatest id was minted last.
    """
    states = sorted(
        (
            state
            for state in history.requests.values()
            if state.phase in LIVE
            and state.admitted is not None
            and (state.admitted.decode.engine, state.admitted.decode.incarnation)
            == (engine, incarnation)
        ),
        key=lambda state: state.request,
    )
    for state in reversed(states[1:]):
        if state.admitted is not None and state.attempt < state.admitted.attempts_max:
            return state.request
    return None


def _needs(state: RequestState, engine: EngineId, incarnation: int) -> bool:
    """Whether the running attempt cannot end well without that life."""
    admitted = state.admitted
    if admitted is None or state.phase not in LIVE:
        return False
    decode, prefill = admitted.decode, admitted.prefill
    if (decode.engine, decode.incarnation) == (engine, incarnation):
        return True
    # Once every writer has drained from every grant, prefill has nothing left to do for it.
    involved = (prefill.engine, prefill.incarnation) == (engine, incarnation)
    destinations = state.current(Purpose.DESTINATION)
    handed_over = bool(destinations) and not any(g.undrained for g in destinations)
    return involved and state.phase is Phase.ADMITTED and not handed_over


def _lose(history: History, command: Lose) -> Iterable[Decided]:
    life = history.fleet.life(command.engine, command.incarnation)
    if life is None or life.lost is not None:
        return
    yield FLEET, Lost(command.engine, command.incarnation, command.cause)
    relayed = dict(command.relayed)
    for state in list(history.requests.values()):
        if _needs(state, command.engine, command.incarnation):
            count = relayed.get(state.request, state.relayed)
            reporter = f"{command.engine}/{command.incarnation}"
            yield state.request, _end(state, Cause.ENGINE_LOST, reporter, count)
        for grant in state.unsettled:
            owner = grant.id.owner
            if (owner.engine, owner.incarnation) == (command.engine, command.incarnation):
                yield state.request, Quarantined(grant.id, QuarantineCause.OWNER_LOST)


def _look(history: History, now_ns: int) -> Iterable[Decided]:
    for state in list(history.requests.values()):
        if state.phase in OPEN and now_ns >= state.deadline_ns:
            yield state.request, Aborted(Cause.DEADLINE, "scheduler")
        if state.settle_by_ns and now_ns >= state.settle_by_ns:
            for grant in state.unsettled:
                if (
                    state.phase is Phase.ENDED
                    or grant.attempt < state.attempt
                    or (state.phase is Phase.REQUEUED)
                ):
                    yield state.request, Quarantined(grant.id, _why(history, grant))


def _why(history: History, grant: Grant) -> QuarantineCause:
    owner = grant.id.owner
    life = history.fleet.life(owner.engine, owner.incarnation)
    if life is None or life.lost is not None:
        return QuarantineCause.OWNER_LOST
    return QuarantineCause.NO_PROOF


# --- who sees what, and when ------------------------------------------------------------------


def audience(state: RequestState, entry: Entry) -> tuple[tuple[EngineId, int], ...]:
    """The engines that an entry of a request concerns: its legs, owners and parties so far."""
    seen: dict[tuple[EngineId, int], None] = {}
    if state.admitted is not None:
        for leg in (state.admitted.prefill, state.admitted.decode):
            seen[(leg.engine, leg.incarnation)] = None
    for grant in state.grants:
        for party in (grant.id.owner, *grant.reserved.parties):
            seen[(party.engine, party.incarnation)] = None
    if isinstance(entry.event, Admitted):
        for leg in (entry.event.prefill, entry.event.decode):
            seen[(leg.engine, leg.incarnation)] = None
    return tuple(seen)


def waits_for_durability(event: Event) -> bool:
    """Whether engines may see this event only when it can no longer be forgotten.

    A grant that lets in a remote writer could be written after a crash that forgot it, and
    pages given back could be granted twice.
    """
    if isinstance(event, Reserved):
        return bool(event.parties)
    return isinstance(event, Released | Attached)
