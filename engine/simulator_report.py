"""What a replayed trace showed: how long clients waited, who was refused, how long pages were held.

Owns: the books of a run and their summary.
Must not know: how a run moves, and how a summary is printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from engine.simulator_values import SECOND, Goals, TraceRequest
from lifecycle.events import (
    Aborted,
    Dropped,
    Entry,
    Finished,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
)
from lifecycle.ids import GrantId, RequestId, count_pages


@attrs.define
class _Asked:
    """One client: when it came, when its first and last token came."""

    request: TraceRequest
    came_ns: int
    first_ns: int = 0
    last_ns: int = 0
    got: int = 0


@attrs.frozen
class Spread:
    """A median and two percentiles, by nearest rank; zeros of nothing."""

    count: int
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of any number of values."""
        ordered = sorted(values)
        return cls(len(ordered), *(_rank(ordered, percent) for percent in (50, 90, 99)))


def _rank(ordered: Sequence[float], percent: int) -> float:
    if not ordered:
        return 0.0
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


@attrs.frozen
class Summary:
    """A run in numbers. Times are in seconds of the virtual clock.

    `handed_off` counts rejected requests of which anything but the rejection stands in the log.
    `good` counts requests that kept both goals.
    """

    requests: int
    finished: int
    good: int
    tokens: int
    virtual_s: float
    rejected: dict[str, int]
    aborted: dict[str, int]
    requeued: int
    handed_off: int
    first_token_s: Spread
    token_s: Spread
    held_s: dict[str, Spread]
    page_seconds: dict[str, float]
    pages_compared: int
    foreign_reads: int
    rules_evaluated: int

    @property
    def goodput_per_s(self) -> float:
        """Requests that kept both goals, for each second."""
        return self.good / self.virtual_s if self.virtual_s else 0.0


class Books:
    """What is noted while a trace is replayed."""

    def __init__(self) -> None:
        self.end_ns = 0
        self.open: dict[RequestId, _Asked] = {}
        self.held: dict[GrantId, tuple[int, int, str]] = {}
        self.requests = 0
        self.events: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.rejected: dict[RequestId, str] = {}
        self.walked: set[RequestId] = set()
        self._ended: list[_Asked] = []
        self._holding: dict[str, list[float]] = {}
        self._page_ns: Counter[str] = Counter()
        self._start_ns: int | None = None

    def came(self, name: RequestId, request: TraceRequest, now_ns: int) -> None:
        """A client asked."""
        self._start_ns = now_ns if self._start_ns is None else self._start_ns
        self.requests += 1
        self.open[name] = _Asked(request, now_ns)

    def tokens(self, name: RequestId, count: int, now_ns: int) -> None:
        """A client got tokens."""
        asked = self.open[name]
        asked.first_ns = asked.first_ns or now_ns
        asked.last_ns = now_ns
        asked.got += count

    def outcome(self, name: RequestId, outcome: Finished | Aborted | Rejected, now_ns: int) -> None:
        """A client was told its end."""
        asked = self.open.pop(name)
        asked.last_ns = asked.last_ns or now_ns
        if isinstance(outcome, Finished):
            self._ended.append(asked)

    def entry(self, entry: Entry) -> None:
        """An entry was appended."""
        event = entry.event
        self.events[type(event).__name__] += 1
        match event:
            case Rejected(code=code):
                self.rejected[entry.request] = code.value
            case Aborted(cause=cause):
                self.aborted[cause.value] += 1
            case Reserved():
                pages = count_pages(event.pages)
                self.held[event.grant] = (entry.time_ns, pages, event.purpose.value)
            case Released(grant) | Quarantined(grant):
                self._settled(grant, entry.time_ns)
        if entry.request in self.rejected and not isinstance(event, Rejected | Dropped):
            self.walked.add(entry.request)

    def _settled(self, grant: GrantId, now_ns: int) -> None:
        since, pages, purpose = self.held.pop(grant)
        self._holding.setdefault(purpose, []).append((now_ns - since) / SECOND)
        self._page_ns[purpose] += pages * (now_ns - since)

    def summary(
        self, goals: Goals, *, pages_compared: int, foreign_reads: int, rules_evaluated: int
    ) -> Summary:
        """Everything in numbers, with what was counted elsewhere."""
        first = [asked.first_ns - asked.came_ns for asked in self._ended]
        each = [
            (asked.last_ns - asked.first_ns) / (asked.got - 1)
            for asked in self._ended
            if asked.got > 1
        ]
        good = sum(
            asked.first_ns - asked.came_ns <= goals.first_token_ns
            and asked.last_ns - asked.first_ns <= goals.token_ns * max(1, asked.got - 1)
            for asked in self._ended
        )
        return Summary(
            requests=self.requests,
            finished=len(self._ended),
            good=good,
            tokens=sum(asked.got for asked in self._ended),
            virtual_s=(self.end_ns - (self._start_ns or 0)) / SECOND,
            rejected=dict(sorted(Counter(self.rejected.values()).items())),
            aborted=dict(sorted(self.aborted.items())),
            requeued=self.events[Requeued.__name__],
            handed_off=len(self.walked),
            first_token_s=Spread.of([ns / SECOND for ns in first]),
            token_s=Spread.of([ns / SECOND for ns in each]),
            held_s={name: Spread.of(times) for name, times in sorted(self._holding.items())},
            page_seconds={name: ns / SECOND for name, ns in sorted(self._page_ns.items())},
            pages_compared=pages_compared,
            foreign_reads=foreign_reads,
            rules_evaluated=rules_evaluated,
        )
