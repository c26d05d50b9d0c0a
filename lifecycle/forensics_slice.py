"""Each violation as the fewest entries that show it when they are replayed alone.

Owns: which entries are tried without which, and what is restated when others are gone.
Must not know: files; how a rule is checked.

Entries are left out one by one and in halves while the same guard is broken by the same request
(delta debugging, Zeller and Hildebrandt 2002).  What a shorter log must say otherwise is restated:
sequence numbers, and in an admission the free pages and the fleet's position, unless they are what
is wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import attrs

from lifecycle.events import Admitted, Entry, Leg, Rejected, Released, Reserved
from lifecycle.forensics_values import Positioned
from lifecycle.history import History
from lifecycle.ids import FLEET, GrantId, Party, RequestId, mask_of
from lifecycle.replay import Finding, Replayer

TRIES_MAX = 4_000
CANDIDATES_MAX = 500_000
"""Of more entries nobody waits for the smaller ones, and they would be in memory all at once."""
SEQUENCE_GUARD = "unbroken-log/sequence"
STATED = ("capacity-proved/counted", "capacity-proved/judged-at")
"""Guards that compare what an admission says with the pages and the fleet."""


@attrs.frozen
class Slice:
    """The entries, numbered from 1, and what they show."""

    entries: tuple[Positioned, ...]
    finding: Finding
    original: Finding


def smallest(entries: Iterable[Positioned], finding: Finding, *, foreign: bool) -> Slice | None:
    """The fewest entries found that show the finding; None when none do that can be tried.

    `entries` are iterated several times.
    """
    search = _Search(finding, foreign=foreign)
    for candidates in _circles(entries, finding):
        if search.shows(candidates) is not None:
            return search.reduce(candidates)
    return None


def _circles(entries: Iterable[Positioned], finding: Finding) -> Iterable[list[Entry]]:
    """Ever more of the log: the request and the fleet, then whoever had its pages, then all."""
    request = finding.violation.request
    stop = None if finding.entry is None else finding.position

    def known() -> Iterator[Positioned]:
        return (one for one in entries if stop is None or one[0] <= stop)

    near = [one for one in known() if one[1].request in (request, FLEET)]
    yield [entry for _, entry in near]
    last = list(deque(known(), maxlen=1))
    if near[-1:] != last:
        yield [entry for _, entry in near + last]
    mine = _pages(entry for _, entry in near if entry.request == request)
    # Of a grant that is reserved twice the later holder counts: the earlier one may break
    # something else before.
    holders: dict[GrantId, RequestId] = {}
    for _, entry in known():
        event = entry.event
        if isinstance(event, Reserved):
            holders.pop(event.grant, None)
            if mask_of(event.pages) & mine.get(event.grant.owner, 0):
                holders[event.grant] = entry.request
    for wanted in ({request, FLEET, *holders.values()}, None):
        wider = (entry for _, entry in known() if wanted is None or entry.request in wanted)
        candidates = list(islice(wider, CANDIDATES_MAX + 1))
        if len(candidates) <= CANDIDATES_MAX:
            yield candidates


def _pages(entries: Iterable[Entry]) -> dict[Party, int]:
    """Every page that was ever granted by these, as masks by owner."""
    pages: dict[Party, int] = {}
    for entry in entries:
        if isinstance(entry.event, Reserved):
            owner = entry.event.grant.owner
            pages[owner] = pages.get(owner, 0) | mask_of(entry.event.pages)
    return pages


class _Search:
    """One reduction and what it has spent."""

    def __init__(self, finding: Finding, *, foreign: bool) -> None:
        self.original = finding
        self.foreign = foreign
        self.tries = 0

    def shows(self, entries: Sequence[Entry]) -> Slice | None:
        """The log of these entries, if it breaks the same guard in the same request."""
        self.tries += 1
        wanted = _story(self.original)
        replayer = Replayer(foreign=self.foreign)
        counts: Counter[str] = Counter()
        kept: list[Positioned] = []
        for position, entry in enumerate(entries, start=1):
            stated = self._restated(replayer.history, entry, counts[entry.request])
            counts[entry.request] += 1
            kept.append((position, stated))
            replayer.take(position, stated)
        for found in replayer.report().findings:
            if _story(found) == wanted:
                return Slice(tuple(kept), found, self.original)
        return None

    def _restated(self, history: History, entry: Entry, sequence: int) -> Entry:
        guard = self.original.violation.guard
        event = entry.event
        if guard not in STATED and isinstance(event, Admitted):
            event = attrs.evolve(
                event,
                prefill=_leg(history, event.prefill),
                decode=_leg(history, event.decode),
                fleet_position=history.fleet.sequence,
            )
        elif guard not in STATED and isinstance(event, Rejected):
            event = attrs.evolve(event, fleet_position=history.fleet.sequence)
        if guard == SEQUENCE_GUARD:
            sequence = entry.sequence
        return attrs.evolve(entry, event=event, sequence=sequence)

    def reduce(self, entries: Sequence[Entry]) -> Slice | None:
        """Leave out halves, then quarters, down to single entries, again while it helps."""
        left = list(entries)
        size = max(1, len(left) // 2)
        while size:
            start, dropped = 0, False
            while start < len(left) and self.tries < TRIES_MAX:
                shorter = left[:start] + left[start + size :]
                if shorter and self.shows(shorter) is not None:
                    left, dropped = shorter, True
                else:
                    start += size
            if not (dropped and size == 1):
                size //= 2
        self._drop_grants(left)
        return self.shows(left)

    def _drop_grants(self, left: list[Entry]) -> None:
        """A reservation and its release need each other, so they go together."""
        for entry in [e for e in left if isinstance(e.event, Released)]:
            shorter = [
                e
                for e in left
                if not (
                    isinstance(e.event, Reserved | Released)
                    and isinstance(entry.event, Released)
                    and e.event.grant == entry.event.grant
                )
            ]
            if len(shorter) < len(left) and self.tries < TRIES_MAX and self.shows(shorter):
                left[:] = shorter


def _story(finding: Finding) -> tuple[object, ...]:
    """What makes two findings the same: whose, by which guard, at what event, in which phase."""
    violation, before = finding.violation, finding.before
    kind = None if finding.entry is None else type(finding.entry.event)
    phase = None if before is None else before.phase
    return violation.request, violation.guard, kind, phase


def _leg(history: History, leg: Leg) -> Leg:
    accounts = [history.ledger[p] for p in leg.parties() if p in history.ledger]
    if len(accounts) != leg.ranks:
        return leg
    return attrs.evolve(
        leg,
        pages_capacity=min(account.usable_pages for account in accounts),
        pages_free=max(0, min(account.free_pages for account in accounts)),
    )
