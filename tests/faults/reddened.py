"""A real log with one event changed for each rule: the log was clean, and that rule must turn it red.

Owns: for each rule, which request of a log is changed, where, and how.
Must not know: how the log came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from engine.store import Stored
from lifecycle.events import (
    Aborted,
    Admitted,
    ByEngine,
    ByScheduler,
    Cause,
    Drained,
    Draining,
    Dropped,
    Entry,
    Event,
    Finished,
    Proposer,
    Purpose,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import FLEET, GrantId, PageRange, RequestId, TokenRange
from lifecycle.replay import replay
from lifecycle.rules import RULES

Log = list[tuple[int, Entry]]
Change = Callable[[Entry], Entry]
Kind = TypeVar("Kind", bound=Event)
NUMBER = 1 << 40
"""A number that no proposal has."""


@attrs.frozen
class Piece:
    """A log from its beginning to the end of one request, which has what a change needs."""

    log: Log
    request: RequestId

    def entries(self, kind: type[Event]) -> list[Entry]:
        """The request's entries of that kind, in order."""
        mine = (e for _, e in self.log if e.request == self.request)
        return [entry for entry in mine if isinstance(entry.event, kind)]

    def events(self, kind: type[Kind]) -> list[Kind]:
        """The request's events of that kind, in order."""
        mine = (e.event for _, e in self.log if e.request == self.request)
        return [event for event in mine if isinstance(event, kind)]

    def changed(self, kind: type[Event], change: Change, nth: int = 0) -> Log:
        """The log with the request's nth event of that kind changed."""
        target = self.entries(kind)[nth]
        return [(p, change(e) if e is target else e) for p, e in self.log]


def first_piece(entries: Sequence[Stored], suits: Callable[[Piece], bool]) -> Piece | None:
    """The first request to end that suits, with everything before its end."""
    mine: dict[RequestId, Log] = {}
    ends: dict[RequestId, int] = {}
    for at, one in enumerate(entries):
        mine.setdefault(one.entry.request, []).append((one.position, one.entry))
        ends[one.entry.request] = at
    for request, at in sorted(ends.items(), key=lambda pair: pair[1]):
        if request != FLEET and suits(Piece(mine[request], request)):
            return Piece([(one.position, one.entry) for one in entries[: at + 1]], request)
    return None


def answered(piece: Piece) -> bool:
    """One attempt, several writes, a whole answer, and then several grants given back."""
    kinds = [type(e.event) for _, e in piece.log if e.request == piece.request]
    if kinds.count(Admitted) != 1 or kinds.count(Transferred) < 2 or Finished not in kinds:
        return False
    return kinds.count(Released) > 1 and Released in kinds[kinds.index(Finished) :]


def ended_while_written(piece: Piece) -> bool:
    """One attempt, which ended before its writer had drained."""
    kinds = [type(e.event) for _, e in piece.log if e.request == piece.request]
    if kinds.count(Admitted) != 1 or Aborted not in kinds:
        return False
    after = kinds[kinds.index(Aborted) :]
    return Drained in after and Released in after[after.index(Drained) :]


def requeued_decoding(piece: Piece) -> bool:
    """An attempt that ended after some of its tokens were told."""
    return any(event.tokens_relayed for event in piece.events(Requeued))


def _with(**changes: Any) -> Change:
    return lambda entry: attrs.evolve(entry, event=attrs.evolve(entry.event, **changes))


def _by(proposer: Proposer) -> Change:
    return lambda entry: attrs.evolve(entry, proposer=proposer)


def _instead(event: Event, proposer: Proposer) -> Change:
    return lambda entry: attrs.evolve(entry, event=event, proposer=proposer)


def _not_drained(piece: Piece) -> Log:
    """As if the writer's proof had never taken effect."""
    drained = piece.events(Drained)[0]
    dropped = Dropped(drained.party, NUMBER, "Drained", "current-attempt", drained.grant)
    return piece.changed(Drained, _instead(dropped, ByScheduler(_epoch(piece.log))))


def _writer(piece: Piece) -> ByEngine:
    """Somebody else of the same attempt: the party that wrote."""
    return ByEngine(piece.events(Drained)[0].party, NUMBER)


def _decode(piece: Piece) -> ByEngine:
    reserved = piece.events(Reserved)
    owner = next(r.grant.owner for r in reserved if r.parties)
    return ByEngine(owner, NUMBER)


def _leg(piece: Piece, name: str, **changes: Any) -> Log:
    leg = getattr(piece.events(Admitted)[0], name)
    return piece.changed(Admitted, _with(**{name: attrs.evolve(leg, **changes)}))


def _destination(piece: Piece) -> int:
    reserved = piece.events(Reserved)
    return next(nth for nth, one in enumerate(reserved) if one.parties)


def _other_pages(piece: Piece) -> Log:
    pages = piece.events(Transferred)[0].pages
    return piece.changed(
        Transferred, _with(pages=(PageRange(pages[0].first + 1, pages[0].count), *pages[1:]))
    )


def _first_write_again(piece: Piece) -> Log:
    again = piece.entries(Transferred)[0].event
    return piece.changed(Verified, _instead(again, _writer(piece)))


def _one_write_less(piece: Piece) -> Log:
    writer = _writer(piece)
    grant = piece.events(Transferred)[-1].grant
    dropped = Dropped(writer.party, NUMBER, "Transferred", "current-attempt", grant)
    return piece.changed(Transferred, _instead(dropped, ByScheduler(_epoch(piece.log))), -1)


def _late_grant(piece: Piece) -> Log:
    reserved = piece.events(Reserved)[_destination(piece)]
    late = attrs.evolve(reserved, grant=GrantId(reserved.grant.owner, NUMBER))
    return piece.changed(Released, _instead(late, _decode(piece)), -1)


def _released_again(piece: Piece) -> Log:
    first = piece.entries(Released)[0]
    return piece.changed(Released, _instead(first.event, first.proposer), -1)


def _others_page(piece: Piece) -> Log:
    """The answer grows into a page that the prompt has."""
    reserved = piece.events(Reserved)[_destination(piece)]
    size = piece.events(Admitted)[0].decode.page_tokens
    grown = attrs.evolve(
        reserved,
        grant=GrantId(reserved.grant.owner, NUMBER),
        purpose=Purpose.GROWTH,
        pages=(PageRange(reserved.pages[0].first, 1),),
        tokens=TokenRange(reserved.tokens.stop, reserved.tokens.stop + size),
        parties=(),
    )
    return piece.changed(Finished, _instead(grown, _decode(piece)))


def _too_much(piece: Piece) -> Log:
    """A grant says more tokens than its pages hold."""
    nth = _destination(piece)
    tokens = piece.events(Reserved)[nth].tokens
    return piece.changed(Reserved, _with(tokens=TokenRange(tokens.start, tokens.stop + 4096)), nth)


def _cut_off(piece: Piece) -> Log:
    """The log stops before the answer, and the fleet goes on past every deadline."""
    at = next(
        i
        for i, (_, e) in enumerate(piece.log)
        if e.request == piece.request and isinstance(e.event, Finished)
    )
    admitted = piece.events(Admitted)[0]
    fleet = [e for _, e in piece.log[:at] if e.request == FLEET][-1]
    leg = admitted.decode
    late = attrs.evolve(
        fleet,
        sequence=fleet.sequence + 1,
        proposer=ByScheduler(_epoch(piece.log[:at])),
        time_ns=admitted.deadline_ns + admitted.settle_ns + 1,
        event=Draining(leg.engine, leg.incarnation),
    )
    return [*piece.log[:at], (piece.log[at][0], late)]


def _epoch(log: Log) -> int:
    return max(e.proposer.epoch for _, e in log if isinstance(e.proposer, ByScheduler))


Make = Callable[[Piece], Log]
CHANGES: dict[str, tuple[Callable[[Piece], bool], Make]] = {
    "one-decision": (answered, lambda p: p.changed(Admitted, _by(_decode(p)))),
    "capacity-proved": (answered, lambda p: p.changed(Admitted, _with(context_tokens=1))),
    "current-attempt": (answered, lambda p: p.changed(Verified, _by(_writer(p)))),
    "written-within-grant": (answered, _other_pages),
    "whole-before-read": (answered, _one_write_less),
    "exclusive-before-read": (answered, _not_drained),
    "first-cause-wins": (
        answered,
        lambda p: p.changed(
            Released, _instead(Aborted(Cause.DEADLINE, "x"), ByScheduler(_epoch(p.log))), -1
        ),
    ),
    "quiet-after-end": (answered, _late_grant),
    "drained-before-released": (ended_while_written, _not_drained),
    "drained-is-final": (answered, _first_write_again),
    "time-is-no-proof": (
        answered,
        lambda p: p.changed(Drained, _by(ByScheduler(_epoch(p.log)))),
    ),
    "settled-once": (answered, _released_again),
    "requeue-keeps-resources-honest": (
        requeued_decoding,
        lambda p: p.changed(
            Requeued, _with(tokens_relayed=p.events(Requeued)[0].tokens_relayed + 1)
        ),
    ),
    "bounded": (answered, _cut_off),
    "one-owner": (answered, _others_page),
    "conservation": (answered, _too_much),
    "incarnation-fences": (answered, lambda p: _leg(p, "decode", incarnation=1)),
    "compatible-legs": (answered, lambda p: _leg(p, "prefill", layout="other")),
    "unbroken-log": (
        answered,
        lambda p: p.changed(Verified, lambda e: attrs.evolve(e, sequence=e.sequence + 1)),
    ),
    "computed-before-sent": (answered, lambda p: p.changed(Transferred, _with(step=1 << 40))),
    "read-what-was-written": (answered, lambda p: p.changed(Finished, _with(reads_unchecked=1))),
    "acted-after-logged": (
        answered,
        lambda p: p.changed(Transferred, _with(grant=GrantId(_decode(p).party, NUMBER))),
    ),
}


def unnoticed(entries: Sequence[Stored]) -> tuple[list[str], list[str]]:
    """Rules that did not turn a changed log red, and rules for which this log has no place."""
    assert set(CHANGES) == set(RULES)
    blind: list[str] = []
    absent: list[str] = []
    for rule, (suits, make) in CHANGES.items():
        piece = first_piece(entries, suits)
        if piece is None:
            absent.append(rule)
            continue
        findings = replay(make(piece)).findings
        if not findings or findings[0].violation.rule != rule:
            said = findings[0].violation if findings else "clean"
            blind.append(f"{rule}: {said}")
    return blind, absent
