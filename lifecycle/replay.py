"""Replay: take a sequence of entries and say what was wrong with it.

Owns: the report of a replay; the first violation of each request and the state before it; what
stayed unbounded.
Must not know: files and formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import attrs

from lifecycle.events import FLEET_EVENTS, Entry, Finished, Verified
from lifecycle.guards_ends import pages_checked, reads_checked
from lifecycle.history import History
from lifecycle.ids import FLEET, RequestId
from lifecycle.rules import RULES
from lifecycle.snapshot import Snapshot, restore
from lifecycle.state import OPEN, Phase, RequestState, Violation

UNCOMPARED = ("read-what-was-written/verified", "read-what-was-written/reads")
"""Guards that an engine without page headers breaks with every single request."""


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
    ) -> None:
        """Begin empty, or behind a snapshot; for `without` see `History`."""
        self.foreign = foreign
        self.forcing = foreign
        without = (*without, *UNCOMPARED) if foreign else tuple(without)
        if snapshot is None:
            self.history = History(without=without)
        else:
            self.history = restore(snapshot, without=without)
        self.findings: dict[RequestId, Finding] = {}
        self.entries = 0
        self.position = 0
        self._kinds: Counter[type] = Counter()
        self._uncompared: set[RequestId] = set()

    def take(self, position: int, entry: Entry) -> Violation | None:
        """The next entry; returns what is wrong with it."""
        self.entries += 1
        self.position = position
        self._kinds[type(entry.event)] += 1
        history = self.history
        if self.foreign:
            self._compare(entry)
        violation = history.apply(entry)
        if violation is not None:
            if entry.request not in self.findings:
                before = history.requests.get(entry.request)
                self.findings[entry.request] = Finding(position, violation, entry, before)
            if self.forces(entry):
                history.take(entry)
        return violation

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
                findings.setdefault(finding.violation.request, finding)
        phases = Counter(state.phase.value for state in self.history.requests.values())
        return Report(
            entries=self.entries,
            requests=len(self.history.requests),
            evaluations=self.history.evaluated,
            rules=len(RULES),
            findings=tuple(sorted(findings.values(), key=lambda f: f.position)),
            phases=tuple(sorted(phases.items())),
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
