"""What the scheduler decides: victims, ends, quarantine; `admission` is decided beside it.

Owns: pure functions from a reduced log and a command to the events that follow.
Must not know: queues, streams, stores; nothing here remembers anything.

`decide(history, command)` returns the events in the order in which they are to be appended;
`waits_for_durability` says which events nobody may see before they are durable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import attrs

from lifecycle.admission import (
    Limits,
    Submission,
    admit,
    growth_booked,
    outgrown,
    refuse,
    rejected,
    unplaceable,
)
from lifecycle.events import (
    Aborted,
    Attached,
    Cause,
    Event,
    Failed,
    Leg,
    Lost,
    LostCause,
    Purpose,
    QuarantineCause,
    Quarantined,
    Released,
    Requeued,
    Reserved,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, EngineId, Party, RequestId
from lifecycle.state import LIVE, OPEN, Grant, Phase, RequestState

__all__ = [
    "Command",
    "Decided",
    "End",
    "Fail",
    "Limits",
    "Look",
    "Lose",
    "Restart",
    "Submission",
    "admit",
    "decide",
    "growth_booked",
    "refuse",
    "rejected",
    "unplaceable",
    "victim",
    "waits_for_durability",
]

Decided = tuple[RequestId, Event]


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
    message: str = ""


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
            ended = Aborted(command.cause, command.reported_by, command.message)
            return ((command.request, ended),)
        case Lose():
            return tuple(_lose(history, command))
        case Look():
            return tuple(_look(history, command.now_ns))
        case Restart():
            return tuple(_restart(history))
        case _:
            assert_never(command)


# --- ends -------------------------------------------------------------------------------------

_RETRIED = frozenset({Cause.OUT_OF_PAGES, Cause.ENGINE_LOST, Cause.TRANSFER_FAILED})


def _end(history: History, state: RequestState, cause: Cause, reporter: str, relayed: int) -> Event:
    """Requeue where another attempt may help, is allowed and has a place; abort otherwise."""
    admitted = state.admitted
    retry = admitted is not None and state.attempt < admitted.attempts_max
    room = state.first is not None and relayed < state.first.new_tokens_max
    if cause in _RETRIED and retry and room and not _outgrown(history, state, relayed):
        return Requeued(cause, reporter, relayed)
    if cause is Cause.OUT_OF_PAGES:
        return Aborted(Cause.ATTEMPTS_EXHAUSTED, reporter)
    return Aborted(cause, reporter)


def _outgrown(history: History, state: RequestState, relayed: int) -> bool:
    """Whether the next attempt could never be placed: what was relayed is part of its prompt."""
    return state.first is not None and outgrown(history, state.first.prompt_tokens + relayed)


def _fail(history: History, command: Fail) -> Iterable[Decided]:
    state = history.state(command.request)
    if state.admitted is None or state.phase not in LIVE:
        return
    failed = command.failed
    reporter = str(command.reporter)
    if failed.cause is not Cause.OUT_OF_PAGES:
        event = _end(history, state, failed.cause, reporter, command.relayed)
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
    decode, counts = state.admitted.decode, dict(command.others)
    others = [
        s
        for s in _running_on(history, decode.engine, decode.incarnation)
        if s.request != state.request
    ]
    whole = frozenset(s.request for s in others if _has_all(s, counts.get(s.request, s.relayed)))
    large = frozenset(
        s.request for s in others if _outgrown(history, s, counts.get(s.request, s.relayed))
    )
    # The oldest keeps its pages, so that somebody always comes to an end.
    other = victim(history, decode.engine, decode.incarnation, whole | large)
    if other is None and (whole or _coming_home(history, decode)):
        # Pages are on their way: somebody's `Finished` is, or an ended attempt gives its own back.
        return
    chosen = state if other is None else history.state(other)
    relayed = counts.get(chosen.request, command.relayed)
    yield chosen.request, _end(history, chosen, Cause.OUT_OF_PAGES, reporter, relayed)


def _holds(grant: Grant, owner: Party, page: int | None) -> bool:
    """Whether this grant of that owner contains the page."""
    return (
        page is not None
        and grant.id.owner == owner
        and any(r.first <= page < r.stop for r in grant.reserved.pages)
    )


def _running_on(history: History, engine: EngineId, incarnation: int) -> list[RequestState]:
    """Whose running attempt that life decodes, oldest first: the greatest id was minted last."""
    return sorted(
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


def _coming_home(history: History, leg: Leg) -> bool:
    """Whether that life still holds pages of attempts that are over."""
    return any(
        (grant.id.owner.engine, grant.id.owner.incarnation) == (leg.engine, leg.incarnation)
        for state in history.requests.values()
        for grant in state.unsettled
        if state.phase not in LIVE or grant.attempt < state.attempt
    )


def _has_all(state: RequestState, relayed: int) -> bool:
    """Whether the client has every token that it may get."""
    return state.first is not None and relayed >= state.first.new_tokens_max


def victim(
    history: History,
    engine: EngineId,
    incarnation: int,
    kept: frozenset[RequestId] = frozenset(),
) -> RequestId | None:
    """The youngest request on a decode engine that has an attempt left; None when there is none.

    Never the oldest. A request in its last attempt has all its pages booked, so it asks for
    none and gives none. Those `kept` give none either: their answer is whole, or they have grown
    too large to come back.
    """
    for state in reversed(_running_on(history, engine, incarnation)[1:]):
        if state.request in kept or state.admitted is None:
            continue
        if state.attempt < state.admitted.attempts_max:
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
    whole = len(destinations) == admitted.destinations
    handed_over = whole and not any(g.undrained for g in destinations)
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
            yield state.request, _end(history, state, Cause.ENGINE_LOST, reporter, count)
        for grant in state.unsettled:
            owner = grant.id.owner
            if (owner.engine, owner.incarnation) == (command.engine, command.incarnation):
                yield state.request, Quarantined(grant.id, QuarantineCause.OWNER_LOST)


def _restart(history: History) -> Iterable[Decided]:
    for state in list(history.requests.values()):
        if state.phase in OPEN:
            yield state.request, Aborted(Cause.SCHEDULER_RESTARTED, "scheduler")
        for grant in state.unsettled:
            # The log may end between a loss and what follows from it.
            if _why(history, grant) is QuarantineCause.OWNER_LOST:
                yield state.request, Quarantined(grant.id, QuarantineCause.OWNER_LOST)


def _look(history: History, now_ns: int) -> Iterable[Decided]:
    for state in list(history.requests.values()):
        if state.phase in OPEN and now_ns >= state.deadline_ns:
            yield state.request, Aborted(Cause.DEADLINE, "scheduler")
        # Only an attempt that ended has a time to settle by.
        if state.settle_by_ns and now_ns >= state.settle_by_ns:
            for grant in state.unsettled:
                yield state.request, Quarantined(grant.id, _why(history, grant))


def _why(history: History, grant: Grant) -> QuarantineCause:
    owner = grant.id.owner
    life = history.fleet.life(owner.engine, owner.incarnation)
    if life is None or life.lost is not None:
        return QuarantineCause.OWNER_LOST
    return QuarantineCause.NO_PROOF


# --- what waits for the disk -------------------------------------------------------------------


def waits_for_durability(event: Event) -> bool:
    """Whether engines may see this event only when it can no longer be forgotten.

    A grant that lets in a remote writer could be written after a crash that forgot it, and
    pages given back could be granted twice.
    """
    if isinstance(event, Reserved):
        return bool(event.parties)
    return isinstance(event, Released | Attached)
