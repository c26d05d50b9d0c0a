"""Legal logs with one entry changed: what a reducer without some guard lets in.

Owns: which logs, which changes, and who objects.
Must not know: what a guard compares.

At each place of a log every change is tried that the whole reducer refuses. A reducer without the
guard that refused it is asked again; where it lets the entry in, the second model must object,
at once or at what follows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any

import attrs

from engine.explorer import walk
from lifecycle.admission import Limits, Submission, admit
from lifecycle.events import (
    Admitted,
    Attached,
    ByEngine,
    ByScheduler,
    Drained,
    Entry,
    Event,
    Proof,
    Purpose,
    Released,
    Reserved,
    Role,
    Transferred,
    Verified,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, GrantId, Party, RequestId
from lifecycle.state import Phase
from property_tests.mutants_base import WORLDS
from property_tests.witness import Witness

LOGS = (
    ("crowded", 4),
    ("tight", 1),
    ("failures", 5),
    ("lost engines", 3),
    ("placing", 2),
    ("two kinds", 0),
    ("streams", 6),
    ("late joiners", 3),
    ("deadlines", 2),
    ("slow store", 0),
)
TOTAL = "unbroken-log/total"
"""The one guard that is gone only where the looks across requests are."""
TRIES_MAX = 400
"""How many changes are tried for each guard."""
FOLLOWING = 12
"""How many of the entries that follow are heard when the change itself did no harm."""


def logs() -> list[list[Entry]]:
    """What the product's own cores wrote in some worlds."""
    made = []
    for name, seed in LOGS:
        world, trace, _ = walk(WORLDS[name], seed, steps=200)
        assert trace is None
        made.append([entry for _, entry in world.stored])
    return made


# --- changes ----------------------------------------------------------------------------------


def _values(value: Any) -> Iterator[Any]:
    """Other values in place of this one, near it."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, Enum):
        yield from (other for other in type(value) if other is not value)
    elif isinstance(value, int):
        yield from (value - 1, value + 1, value + 7, 0, 1)
    elif isinstance(value, str):
        yield value + "'"
    elif isinstance(value, tuple) and value:
        yield value[:-1]
        yield (*value, value[-1])
        if len(value) > 1:
            yield value[1:]
        for index, item in enumerate(value):
            for other in _changed(item):
                yield (*value[:index], other, *value[index + 1 :])
    elif attrs.has(type(value)):
        yield from _changed(value)


def _changed(value: Any) -> Iterator[Any]:
    if not attrs.has(type(value)):
        yield from _values(value)
        return
    for field in attrs.fields(type(value)):
        if not field.init:
            continue
        for other in _values(getattr(value, field.name)):
            try:
                yield attrs.evolve(value, **{field.name: other})
            except (TypeError, ValueError):
                # An event that exists is well formed: this one cannot exist.
                continue


def _speakers(log: list[Entry]) -> list[ByEngine | ByScheduler]:
    parties: dict[Party, None] = {}
    for entry in log:
        if isinstance(entry.proposer, ByEngine):
            parties[entry.proposer.party] = None
    extra = Party(next(iter(parties)).engine, 9, 0) if parties else None
    epochs = {e.proposer.epoch for e in log if isinstance(e.proposer, ByScheduler)}
    named = [*parties, extra] if extra is not None else []
    speakers: list[ByEngine | ByScheduler] = [ByEngine(party, 999) for party in named]
    return [*speakers, *(ByScheduler(epoch) for epoch in sorted(epochs)), ByScheduler(77)]


def changes(log: list[Entry], at: int) -> Iterator[Entry]:
    """Entries that could stand at that place of the log instead of the right one."""
    entry = log[at]
    if entry.request == FLEET:
        return
    yield attrs.evolve(entry, sequence=entry.sequence + 1)
    yield attrs.evolve(entry, time_ns=0)
    for attempt in (entry.attempt - 1, entry.attempt + 1):
        if attempt >= 0:
            yield attrs.evolve(entry, attempt=attempt)
    for by in _speakers(log):
        yield attrs.evolve(entry, proposer=by)
    for event in _changed(entry.event):
        yield attrs.evolve(entry, event=event)


def moved(log: list[Entry], at: int, history: History) -> Iterator[Entry]:
    """Other entries of the log at that place: repeated, or too early, or for another request."""
    near = log[max(0, at - 40) : at + 25]
    requests = {e.request for e in near if e.request != FLEET}
    for other in near:
        if other.request == FLEET:
            continue
        for request in requests:
            state = history.state(request)
            again = attrs.evolve(
                other, request=request, sequence=state.sequence, time_ns=history.time_ns
            )
            yield again
            if other.attempt != state.attempt:
                yield attrs.evolve(again, attempt=max(1, state.attempt))


def offered(history: History) -> Iterator[Entry]:
    """What somebody might say now, of itself well formed: proofs, releases, early admissions."""
    for request, state in history.requests.items():

        def said(by: ByEngine | ByScheduler, event: Event, attempt: int) -> Entry:
            number = history.state(request).sequence  # noqa: B023 - used at once
            return Entry(request, number, attempt, by, history.time_ns, event)  # noqa: B023

        for grant in state.grants:
            owner = ByEngine(grant.id.owner, 999)
            yield said(owner, Released(grant.id), state.attempt)
            for party in grant.undrained:
                yield said(owner, Drained(grant.id, party, Proof.FENCED), state.attempt)
        first = state.first
        if state.phase is Phase.REQUEUED and first is not None:
            again = Submission(
                request,
                first.tenant,
                first.prompt_tokens + state.relayed,
                first.prompt_digest,
                first.new_tokens_max - state.relayed,
                first.deadline_ns,
                state.attempt + 1,
            )
            event = admit(history, again, Limits(first.context_tokens, 1, first.attempts_max))
            if event is not None:
                yield said(ByScheduler(history.fleet.epoch), event, state.attempt + 1)


def fewer(entry: Entry) -> Iterator[Entry]:
    """The same check of fewer pages, or legs that agree on another layout."""
    event = entry.event
    if isinstance(event, Verified):
        for pages in range(1, event.pages):
            less = attrs.evolve(event, pages=pages, headers_checked=pages, digests_checked=pages)
            yield attrs.evolve(entry, event=less)
            for name in event.grants:
                yield attrs.evolve(entry, event=attrs.evolve(less, grants=(name,)))
    elif isinstance(event, Admitted):
        prefill = attrs.evolve(event.prefill, layout="other")
        decode = attrs.evolve(event.decode, layout="other")
        yield attrs.evolve(entry, event=attrs.evolve(event, prefill=prefill, decode=decode))
        yield attrs.evolve(entry, event=attrs.evolve(event, decode=decode))


def variants(log: list[Entry]) -> Iterator[list[Entry]]:
    """The log itself, and logs that differ from it by more than one entry."""
    yield log
    for change in ({"slots": 1}, {"layout": "other"}):
        yield [
            attrs.evolve(e, event=attrs.evolve(e.event, **change))
            if isinstance(e.event, Attached) and e.event.role is Role.DECODE
            else e
            for e in log
        ]
    written = [at for at, e in enumerate(log) if isinstance(e.event, Transferred)]
    for at in written[:3]:
        yield log[:at] + log[at + 1 :]
    named: dict[RequestId, list[GrantId]] = {}
    for entry in log:
        if isinstance(entry.event, Reserved) and entry.event.purpose is Purpose.DESTINATION:
            named.setdefault(entry.request, []).append(entry.event.grant)
    for grants in list(named.values())[:2]:
        if len(grants) > 1:
            yield [e for e in log if getattr(e.event, "grant", None) != grants[-1]]


# --- who objects ------------------------------------------------------------------------------


class Hunter:
    """Guards not yet caught, and by what the others were.

    Those with a backup are removed by themselves, and in one go with all that back them up.
    """

    def __init__(self, backups: Mapping[str, tuple[str, ...]]) -> None:
        self.backups = backups
        self.caught: dict[tuple[str, ...], str] = {}
        self.tried: dict[tuple[str, ...], int] = {}

    def consider(
        self, entry: Entry, whole: History, witness: Witness, following: list[Entry]
    ) -> None:
        """Ask about one changed entry at the place that `whole` has reached."""
        violation = whole.check(entry)
        if violation is None:
            return
        guard = violation.guard
        if guard == TOTAL:
            # Engines' copies look at single requests: there the next guard is the first.
            violation = whole._reducer.check(whole.state(entry.request), entry)
            guard = guard if violation is None else violation.guard
        self._try((guard,), entry, whole, witness, following)
        if guard in self.backups:
            self._try((guard, *self.backups[guard]), entry, whole, witness, following)

    def _try(
        self,
        gone: tuple[str, ...],
        entry: Entry,
        whole: History,
        witness: Witness,
        following: list[Entry],
    ) -> None:
        tries = self.tried.get(gone, 0)
        if gone in self.caught or tries > TRIES_MAX:
            return
        self.tried[gone] = tries + 1
        without = _history(gone)
        other = whole.copy()
        other._reducer, other._cross = without._reducer, without._cross
        other.crossguards = TOTAL not in gone
        if other.check(entry) is not None:
            return
        judge = copy.deepcopy(witness)
        for step in (entry, *following[:FOLLOWING]):
            state = other.state(step.request)
            number = other.fleet.sequence if step.request == FLEET else state.sequence
            now = step if step is entry else attrs.evolve(step, sequence=number)
            if other.apply(now) is not None:
                continue
            try:
                judge.take(now)
            except (AssertionError, KeyError) as objection:
                event = type(entry.event).__name__
                self.caught[gone] = f"{event}: {objection}" if str(objection) else event
                return


@cache
def _history(gone: tuple[str, ...]) -> History:
    return History(without=gone)


def caught_by_changes(
    backups: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> dict[tuple[str, ...], str]:
    """Guards whose removal a changed log shows, each with what was objected.

    A guard of `backups` is removed alone, and once more together with those that are named.
    """
    hunter = Hunter(backups)
    for original in logs():
        for number, log in enumerate(variants(original)):
            _search(hunter, log, deep=number == 0)
    return hunter.caught


def _search(hunter: Hunter, log: list[Entry], *, deep: bool) -> None:
    """Walk along one log; where an entry is illegal by now, it is a change of itself."""
    whole, witness = History(), Witness()
    for at, original in enumerate(log):
        state = whole.state(original.request)
        number = whole.fleet.sequence if original.request == FLEET else state.sequence
        entry = attrs.evolve(original, sequence=number)
        following = log[at + 1 : at + 1 + FOLLOWING]
        for other in (entry, *fewer(entry)):
            hunter.consider(other, whole, witness, following)
        if deep:
            for other in changes(log, at):
                hunter.consider(other, whole, witness, following)
            for other in (*moved(log, at, whole), *offered(whole)):
                hunter.consider(other, whole, witness, [entry, *following])
        if whole.apply(entry) is None:
            witness.take(entry)
