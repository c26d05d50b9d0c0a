"""Replay: take a sequence of entries and say what was wrong with it.

Owns: the report of a replay; the first violation of each request and the state before it; what
stayed unbounded; which requests may be put aside.
Must not know: files and formats; where requests that are put aside go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import attrs

from lifecycle.events import FLEET_EVENTS, Entry, Finished, Verified
from lifecycle.guards_ends import pages_checked, reads_checked
from lifecycle.history import History
from lifecycle.ids import FLEET, RequestId
from lifecycle.rules import RULES
from lifecycle.shelf import Shelf
from lifecycle.snapshot import Snapshot, restore
from lifecycle.state import OPEN, TERMINAL, Phase, RequestState, Violation

UNCOMPARED = ("read-what-was-written/verified", "read-what-was-written/reads")
"""Guards that an engine without page headers breaks with every single request."""


class Aside(Shelf[RequestState], Protocol):
    """Where a replay puts requests that are over, so that a long log needs no more memory."""

    def broke(self, request: RequestId) -> bool:
        """Whether a part of the log that this replay has not seen holds its first violation."""


@attrs.frozen
class Finding:
    """A violation, the position of its entry in the sequence, and the entry itself.

    `entry` is None where the fault is that something never came; `before` is the request's state
    without the entry.
    """

    position: int
    violation: Violation
    entry: Entry | None
    before: RequestState | None = None


@attrs.frozen
class Report:
    """What a replay saw.

    `evaluations` counts the guards that were asked; `rules` the rules that stood over them;
    `uncompared` the requests of another system that read without comparing any page.
    """

    entries: int
    requests: int
    evaluations: int
    rules: int
    findings: tuple[Finding, ...]
    phases: tuple[tuple[str, int], ...]
    events: tuple[tuple[str, int], ...]
    uncompared: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.findings

    @property
    def by_rule(self) -> tuple[tuple[str, int], ...]:
        """How many requests broke each rule first."""
        return tuple(sorted(Counter(f.violation.rule for f in self.findings).items()))


class Replayer:
    """A replay under way: `take` entries in order, look at `history`, then ask for the `report`.

    An illegal entry of our own log changes nothing, and its request's later violations are not
    reported: they would only follow from the first.  Of another system's log, and of one with
    something missing, an illegal entry is taken in after it was reported (`forcing`): it tells
    what that system did with its pages, which others' entries would contradict otherwise.
    """

    def __init__(
        self,
        *,
        without: Iterable[str] = (),
        foreign: bool = False,
        snapshot: Snapshot | None = None,
        history: History | None = None,
        aside: Aside | None = None,
    ) -> None:
        """Begin empty, behind a snapshot, or with a history; for `without` see `History`.

        With `aside`, requests that are over leave `history`; `state`, `names` and `phases` know them.
        """
        self.foreign = foreign
        self.forcing = foreign
        without = (*without, *UNCOMPARED) if foreign else tuple(without)
        if history is not None:
            self.history = history
        elif snapshot is None:
            self.history = History(without=without)
        else:
            self.history = restore(snapshot, without=without)
        self.findings: dict[RequestId, Finding] = {}
        self.entries = 0
        self.position = 0
        self.over: Counter[Phase] = Counter()
        self._aside = aside
        self._kinds: Counter[type] = Counter()
        self._uncompared: set[RequestId] = set()

    def take(self, position: int, entry: Entry) -> Violation | None:
        """The next entry; returns what is wrong with it."""
        self.entries += 1
        self.position = position
        self._kinds[type(entry.event)] += 1
        history, request, aside = self.history, entry.request, self._aside
        if aside is not None and request not in history.requests:
            self._bring_back(request, aside)
        if self.foreign:
            self._compare(entry)
        violation = history.apply(entry)
        if violation is not None:
            if request not in self.findings and not self._broke(request):
                before = history.requests.get(request)
                self.findings[request] = Finding(position, violation, entry, before)
            if self.forces(entry):
                history.take(entry)
        if aside is not None:
            state = history.requests.get(request)
            if state is not None and state.phase in TERMINAL and not state.unsettled:
                self._put_aside(state, aside)
        return violation

    def _bring_back(self, request: RequestId, aside: Aside) -> None:
        state = aside.find(request)
        if state is not None:
            self.history.requests[request] = state
            self.over[state.phase] -= 1

    def _put_aside(self, state: RequestState, aside: Aside) -> None:
        del self.history.requests[state.request]
        self.over[state.phase] += 1
        aside.put(state)

    def _broke(self, request: RequestId) -> bool:
        return self._aside is not None and self._aside.broke(request)

    def state(self, request: RequestId) -> RequestState | None:
        """The request as it is now, or None where the log does not know it."""
        state = self.history.requests.get(request)
        if state is None and self._aside is not None:
            state = self._aside.find(request)
        return state

    def names(self) -> Iterator[RequestId]:
        """Every request of the log, and those that only broke a rule."""
        known = self.history.requests
        yield from known
        if self._aside is not None:
            yield from (name for name in self._aside.names() if name not in known)
        yield from (name for name in self.findings if self.state(name) is None)

    def phases(self) -> tuple[tuple[str, int], ...]:
        """How many requests there are in each phase."""
        counted = Counter(state.phase.value for state in self.history.requests.values())
        for phase, count in self.over.items():
            counted[phase.value] += count
        return tuple(sorted((phase, count) for phase, count in counted.items() if count))

    def lose(self) -> None:
        """Entries are missing here, which made others' illegal: take them in as they stand."""
        self.forcing = True

    def forces(self, entry: Entry) -> bool:
        """Whether an illegal entry is taken in; what is about the fleet never is."""
        about_fleet = entry.request == FLEET or isinstance(entry.event, FLEET_EVENTS)
        return self.forcing and not about_fleet

    def _compare(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, Verified):
            message = pages_checked(self.history.state(entry.request), entry, event)
        elif isinstance(event, Finished):
            message = reads_checked(self.history.state(entry.request), entry, event)
        else:
            return
        if message is not None:
            self._uncompared.add(entry.request)

    def report(self, *, whole: bool = True) -> Report:
        """What was seen; of a log that is not whole nobody says what stayed open for ever."""
        findings = dict(self.findings)
        if whole:
            for finding in unbounded(self.history, self.position):
                if self._broke(finding.violation.request):
                    continue
                findings.setdefault(finding.violation.request, finding)
        phases = self.phases()
        return Report(
            entries=self.entries,
            requests=sum(count for _, count in phases),
            evaluations=self.history.evaluated,
            rules=len(RULES),
            findings=tuple(sorted(findings.values(), key=lambda f: f.position)),
            phases=phases,
            events=tuple(sorted((kind.__name__, count) for kind, count in self._kinds.items())),
            uncompared=len(self._uncompared),
        )


def replay(
    entries: Iterable[tuple[int, Entry]],
    *,
    without: Iterable[str] = (),
    accepted: Callable[[Entry], None] | None = None,
) -> Report:
    """Reduce positioned entries in order and report the first violation of each request.

    `accepted` is called with each legal entry.
    """
    replayer = Replayer(without=without)
    for position, entry in entries:
        if replayer.take(position, entry) is None and accepted is not None:
            accepted(entry)
    return replayer.report()


def unbounded(history: History, position: int) -> Iterable[Finding]:
    """Requests that the log leaves open past their deadline, by the log's own last time.

    A deadline is acted on when the scheduler looks, so one settlement time passes before an
    open request counts as forgotten.
    """
    now = history.time_ns
    for state in history.requests.values():
        grace = state.admitted.settle_ns if state.admitted is not None else 0
        limit = 0
        if state.phase in OPEN:
            limit = state.deadline_ns + grace
        elif state.phase is Phase.ENDED:
            limit = state.settle_by_ns + grace
        if limit and now > limit:
            message = f"{state.phase.value} at {now} ns, {now - limit} ns past every deadline"
            violation = Violation(
                "bounded", "bounded/closed", message, state.request, state.sequence
            )
            yield Finding(position, violation, None, state)
