"""What a timeline shows: chosen entries, and grants, transfers and foreign reads drawn from them.

Owns: which entries are shown when there are too many, and the compact form that the page reads.
Must not know: how it is drawn.

Everything points at entries by their number among those shown, so that a page can be laid out by
time or by order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import attrs

from lifecycle.events import (
    Attached,
    ByEngine,
    Drained,
    Entry,
    Purpose,
    Quarantined,
    Released,
    Reserved,
    Transferred,
)
from lifecycle.forensics_values import Exposures, Positioned, Read, Told
from lifecycle.ids import FLEET, GrantId, RequestId, count_pages
from lifecycle.replay import Report
from transport.render import sentence
from transport.spool import Entries

EVENTS_MAX = 10_000
TEXT_MAX = 160
READS_MAX = 2_000
RUNS_MAX = 8
"""Of a grant in many pieces the longest are drawn; the text says how many there are."""


@attrs.define
class _Grant:
    lane: int
    request: int
    purpose: Purpose
    runs: list[list[int]]
    pages: int
    start: int
    stop: int = -1
    drains: list[list[Any]] = attrs.Factory(list)
    waiting: list[str] = attrs.Factory(list)
    quarantined: bool = False


def choose(
    entries: Entries,
    found: Exposures,
    report: Report,
    *,
    wanted: Iterable[str] = (),
    most: int = EVENTS_MAX,
) -> list[Positioned]:
    """At most so many entries: of the wanted requests, or of those that matter, then of all.

    Those that matter broke a rule, read what they had not written, or wrote what was read.
    """
    named = set(wanted)
    if named:
        ours = (one for one in entries if one[1].request in named or one[1].request == FLEET)
        return list(islice(ours, most))
    if len(entries) <= most:
        return list(entries)
    ranked: dict[str, None] = {}
    for response in found.responses:
        ranked[response.request] = None
    for finding in report.findings:
        ranked[finding.violation.request] = None
    for response in found.responses:
        for read in response.reads:
            if read.writer is not None:
                ranked[read.writer] = None
    counts = _counted(entries, frozenset({FLEET, *ranked}), others=max(most, EVENTS_MAX))
    chosen = {FLEET: None}
    left = most - counts.get(FLEET, 0)
    for request in (*ranked, *counts):
        if request not in chosen and counts.get(request, 0) <= left:
            chosen[RequestId(request)] = None
            left -= counts.get(request, 0)
    return [one for one in entries if one[1].request in chosen]


def _counted(
    entries: Iterable[Positioned], named: frozenset[str], *, others: int
) -> dict[str, int]:
    """How many entries the named requests have, and the first others, in the order of their first."""
    counts: dict[str, int] = {}
    for _, entry in entries:
        request = entry.request
        known = counts.get(request)
        if known is not None:
            counts[request] = known + 1
        elif request in named or others > 0:
            others -= request not in named
            counts[request] = 1
    return counts


class Model:
    """The compact form, as `json.dumps` takes it."""

    def __init__(self, shown: Sequence[Positioned], found: Exposures, report: Report) -> None:
        """Of these entries, with what was found in the whole log."""
        self._found = found
        self._lanes: dict[str, int] = {"scheduler": 0}
        self._pools: dict[int, int] = {}
        self._kinds: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._spans: list[list[int]] = []
        self._tenants: dict[str, str] = {}
        self._positions = [position for position, _ in shown]
        self._base_ns = shown[0][1].time_ns if shown else 0
        self._events: list[list[Any]] = []
        self._grants: dict[GrantId, _Grant] = {}
        self._all_grants: list[_Grant] = []
        self._transfers: list[list[Any]] = []
        self._broken = {f.violation.request: f for f in report.findings}
        for index, (_, entry) in enumerate(shown):
            self._take(index, entry)

    def _lane(self, name: str) -> int:
        return self._lanes.setdefault(name, len(self._lanes))

    def _take(self, index: int, entry: Entry) -> None:
        by = entry.proposer
        lane = self._lane(str(by.party)) if isinstance(by, ByEngine) else 0
        request = -1
        if entry.request != FLEET:
            request = self._requests.setdefault(entry.request, len(self._requests))
            if request == len(self._spans):
                self._spans.append([index, index])
            self._spans[request][1] = index
        name = type(entry.event).__name__
        kind = self._kinds.setdefault(name, len(self._kinds))
        text = sentence(entry)
        if len(text) > TEXT_MAX:
            text = text[: TEXT_MAX - 1] + "…"
        moment = (entry.time_ns - self._base_ns) // 1_000
        self._events.append([moment, kind, request, lane, text])
        self._pages(index, request, lane, entry)

    def _pages(self, index: int, request: int, lane: int, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, Attached):
            for rank in range(event.ranks):
                party = f"{event.engine}/{event.incarnation}/{rank}"
                self._pools[self._lane(party)] = event.pages
        elif isinstance(event, Reserved):
            longest = sorted(event.pages, key=lambda run: -run.count)[:RUNS_MAX]
            owner = self._lane(str(event.grant.owner))
            grant = _Grant(
                owner,
                request,
                event.purpose,
                [[run.first, run.count] for run in longest],
                count_pages(event.pages),
                index,
                waiting=[str(party) for party in event.parties],
            )
            self._grants[event.grant] = grant
            self._all_grants.append(grant)
            top = max(run.stop for run in event.pages)
            self._pools[owner] = max(self._pools.get(owner, 1), top)
        elif isinstance(event, Transferred):
            owner = self._lane(str(event.grant.owner))
            first = event.pages[0]
            place = [lane, owner, request, index, first.first, first.count]
            self._transfers.append(place)
        elif isinstance(event, Drained) and event.grant in self._grants:
            grant = self._grants[event.grant]
            grant.drains.append([index, str(event.party), event.proof.value])
            if str(event.party) in grant.waiting:
                grant.waiting.remove(str(event.party))
        elif isinstance(event, Released | Quarantined) and event.grant in self._grants:
            grant = self._grants[event.grant]
            grant.stop = index
            grant.quarantined = isinstance(event, Quarantined)

    def _index(self, position: int) -> int:
        """The number of the entry at that position, -1 when it is not shown."""
        index = bisect_left(self._positions, position)
        hit = index < len(self._positions) and self._positions[index] == position
        return index if hit else -1

    def _reads(self) -> list[list[Any]]:
        out = []
        listed: list[tuple[int, Read]] = [
            (response.position, read)
            for response in self._found.responses
            for read in response.reads
            if read.reader in self._requests
        ]
        listed.sort(key=lambda item: item[1].start - item[1].stop)
        # The longest run of every reader comes before anybody's second.
        turns: dict[str, int] = {}
        ranked = []
        for place, (position, read) in enumerate(listed):
            turn = turns[read.reader] = turns.get(read.reader, 0) + 1
            ranked.append((turn, place, position, read))
        ranked.sort(key=lambda item: item[:2])
        for _, _, position, read in ranked[:READS_MAX]:
            reader = self._requests[read.reader]
            writer = self._requests.get(read.writer or "", -1)
            lane = self._lane(str(read.owner))
            out.append(
                [
                    reader,
                    lane,
                    read.first_page,
                    read.pages,
                    writer,
                    self._index(read.written_position) if read.writer else -1,
                    self._index(position),
                    read.start,
                    read.stop,
                    read.writer or read.source.value,
                ]
            )
        return out

    def document(self, *, title: str, summary: Sequence[str], total: int) -> dict[str, Any]:
        """Everything that the page reads."""
        responses = {r.request: r for r in self._found.responses}
        requests = []
        for name, number in self._requests.items():
            response, finding = responses.get(RequestId(name)), self._broken.get(RequestId(name))
            affected = 0
            if response is not None and response.told is Told.ANSWER:
                affected = 2 if response.certain else 1
            rule = "" if finding is None else finding.violation.rule
            requests.append([name, *self._spans[number], affected, rule])
        reads = self._reads()
        return {
            "title": title,
            "summary": list(summary),
            "total": total,
            "base_ns": str(self._base_ns),
            "lanes": list(self._lanes),
            "pools": sorted(self._pools.items()),
            "kinds": list(self._kinds),
            "requests": requests,
            "positions": self._positions,
            "events": self._events,
            "grants": [
                [
                    *(g.lane, g.request, g.purpose.value, g.runs, g.pages, g.start, g.stop),
                    *(g.drains, g.waiting, int(g.quarantined)),
                ]
                for g in self._all_grants
            ],
            "transfers": self._transfers,
            "reads": reads,
        }
