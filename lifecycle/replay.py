"""Replay: take a sequence of entries and say what was wrong with it.

Owns: the report of a replay; the first violation of each request; what stayed unbounded.
Must not know: files and formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import attrs

from lifecycle.events import Entry
from lifecycle.history import History
from lifecycle.ids import RequestId
from lifecycle.rules import RULES
from lifecycle.state import OPEN, Phase, Violation


@attrs.frozen
class Finding:
    """A violation, the position of its entry in the sequence, and the entry itself.

    `entry` is None where the fault is that something never came.
    """

    position: int
    violation: Violation
    entry: Entry | None


@attrs.frozen
class Report:
    """What a replay saw.

    `evaluations` counts the guards that were asked; `rules` the rules that stood over them.
    """

    entries: int
    requests: int
    evaluations: int
    rules: int
    findings: tuple[Finding, ...]
    phases: tuple[tuple[str, int], ...]
    events: tuple[tuple[str, int], ...]

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.findings


def replay(
    entries: Iterable[tuple[int, Entry]],
    *,
    without: Iterable[str] = (),
    accepted: Callable[[Entry], None] | None = None,
) -> Report:
    """Reduce positioned entries in order and report the first violation of each request.

    An illegal entry changes nothing, and its request's later violations are not reported:
    they would only follow from the first.  `accepted` is called with each legal entry.
    """
    history = History(without=without)
    findings: dict[RequestId, Finding] = {}
    kinds: Counter[str] = Counter()
    count = 0
    last_position = 0
    for position, entry in entries:
        count += 1
        kinds[type(entry.event).__name__] += 1
        violation = history.apply(entry)
        if violation is None and accepted is not None:
            accepted(entry)
        if violation is not None and entry.request not in findings:
            findings[entry.request] = Finding(position, violation, entry)
        last_position = position
    for finding in unbounded(history, last_position):
        findings.setdefault(finding.violation.request, finding)
    phases = Counter(state.phase.value for state in history.requests.values())
    return Report(
        entries=count,
        requests=len(history.requests),
        evaluations=history.evaluated,
        rules=len(RULES),
        findings=tuple(sorted(findings.values(), key=lambda f: f.position)),
        phases=tuple(sorted(phases.items())),
        events=tuple(sorted(kinds.items())),
    )


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
            yield Finding(position, violation, None)
