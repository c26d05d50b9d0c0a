"""A replay in words and as JSON: the verdict, the state before each violation, the world at a place.

Owns: how a replay's report is said to people and to programs.
Must not know: how entries are judged, or which exit code follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from lifecycle.ends import Ends
from lifecycle.ids import count_pages
from lifecycle.replay import Finding, Replayer, Report
from lifecycle.rules import RULES
from lifecycle.state import OPEN, Grant, RequestState
from lifecycle.wording import counted
from transport.forensics_read import Capture
from transport.render import clock, finding_lines

LINES_SHOWN = 20


def replay_lines(
    capture: Capture, report: Report, shown: Sequence[Finding], ends: Ends
) -> Iterator[str]:
    """Totals, then the violations shown; the last line is the verdict."""
    if capture.foreign:
        yield f"foreign log of {capture.source}: it was made by another system and entered unchecked"
    yield (
        f"{counted(report.entries, 'entry')} of {counted(report.requests, 'request')}; "
        f"{counted(report.rules, 'rule')}, {counted(report.evaluations, 'guard evaluation')}"
    )
    yield "events: " + (", ".join(f"{name} {count}" for name, count in report.events) or "none")
    yield "phases: " + (", ".join(f"{name} {count}" for name, count in report.phases) or "none")
    ended = ends_object(ends)
    yield "ends: " + (", ".join(f"{how} {count}" for how, count in ended["ends"].items()) or "none")
    for cause, pages in ended["quarantined_pages"].items():
        yield f"pages in quarantine ({cause}): {pages}"
    for finding in shown[:LINES_SHOWN]:
        yield from finding_lines(finding)
        if finding.before is not None:
            yield f"  before: {state_line(finding.before)}"
            yield from (f"    {grant_line(grant)}" for grant in finding.before.grants)
    if len(shown) > LINES_SHOWN:
        yield f"... and {len(shown) - LINES_SHOWN} more; --json has them all"
    if report.findings:
        yield "broken first: " + ", ".join(f"{rule} {n}" for rule, n in report.by_rule)
    if report.uncompared:
        yield f"requests that read without comparing any page: {report.uncompared}"
    yield from missing_lines(capture)
    if not capture.whole:
        yield "incomplete: what is missing may hide a violation, or be the cause of one shown here"
    elif report.clean:
        yield "clean"
    else:
        yield f"{counted(len(report.findings), 'request')} with a violation"


def missing_lines(capture: Capture) -> Iterator[str]:
    """What is not there, or could not be read."""
    for gap in capture.missing[:LINES_SHOWN]:
        last = "an unknown end" if gap.last is None else str(gap.last)
        yield f"missing: positions {gap.first} to {last}: {gap.reason}"
    for one in capture.unknown[:LINES_SHOWN]:
        place = f"line {one.line}" if one.line else f"position {one.position}"
        yield f"not evaluated: {place}, event {one.name or 'without a name'}: {one.reason}"
    yield from (f"note: {text}" for text in capture.notes[:LINES_SHOWN])


def state_line(state: RequestState) -> str:
    """A request in one line."""
    outcome = f", outcome {type(state.outcome).__name__}" if state.outcome is not None else ""
    return (
        f"{state.label()}, attempt {state.attempt}, next entry {state.sequence}, "
        f"{len(state.unsettled)} of {counted(len(state.grants), 'grant')} unsettled{outcome}"
    )


def grant_line(grant: Grant) -> str:
    """A grant in one line."""
    reserved = grant.reserved
    written = ", ".join(
        f"{w.transfer.tokens.start} to {w.transfer.tokens.stop - 1}" for w in grant.written
    )
    open_to = ", ".join(str(party) for party in grant.undrained) or "nobody else"
    return (
        f"{reserved.purpose.value} grant {grant.id}, {grant.settlement.value}: "
        f"{counted(count_pages(reserved.pages), 'page')} from {reserved.pages[0].first} on for "
        "tokens "
        f"{reserved.tokens.start} to {reserved.tokens.stop - 1}, "
        f"written {written or 'nothing'}, open to {open_to}"
    )


def world_lines(replayer: Replayer) -> Iterator[str]:
    """The world as it was behind the replayed position: engines, pages, open requests."""
    history = replayer.history
    yield f"behind position {replayer.position}, {clock(history.time_ns)}, epoch {history.fleet.epoch}"
    for name, life in history.fleet.lives:
        joined = life.attached
        state = (
            f"lost ({life.lost.value})" if life.lost else "draining" if life.draining else "live"
        )
        yield f"engine {name}, life {joined.incarnation}: {joined.role.value}, {state}"
    for party, account in history.ledger.items():
        yield (
            f"pages of {party}: {account.free_pages} free + {account.held_pages} held + "
            f"{account.booked_pages} booked + {account.quarantined_pages} quarantined = "
            f"{account.capacity}"
        )
    yield "requests: " + (", ".join(f"{n} {c}" for n, c in replayer.phases()) or "none")
    held = [s for s in history.requests.values() if s.phase in OPEN or s.unsettled]
    for one in held[:LINES_SHOWN]:
        yield f"{one.request}: {state_line(one)}"
        yield from (f"  {grant_line(grant)}" for grant in one.unsettled)
    if len(held) > LINES_SHOWN:
        yield (
            f"... and {counted(len(held) - LINES_SHOWN, 'more open request')}; --json has them all"
        )


# --- JSON -------------------------------------------------------------------------------------


def replay_object(capture: Capture, report: Report, shown: Sequence[Finding]) -> dict[str, Any]:
    """The same as one JSON document."""
    return {
        "source": capture.source,
        "foreign": capture.foreign,
        "complete": capture.whole,
        "clean": report.clean and capture.whole,
        "entries": report.entries,
        "requests": report.requests,
        "rules": report.rules,
        "evaluations": report.evaluations,
        "events": dict(report.events),
        "phases": dict(report.phases),
        "missing": [
            {"first": gap.first, "last": gap.last, "reason": gap.reason} for gap in capture.missing
        ],
        "unknown": [
            {"line": one.line, "position": one.position, "event": one.name, "reason": one.reason}
            for one in capture.unknown
        ],
        "notes": capture.notes,
        "by_rule": dict(report.by_rule),
        "uncompared": report.uncompared,
        "violations": [finding_object(finding) for finding in shown],
    }


def ends_object(ends: Ends) -> dict[str, Any]:
    """How requests ended, and the pages in quarantine at the end; `metrics` has everything."""
    pages: Counter[str] = Counter()
    for kept in ends.quarantine.values():
        pages[kept.cause.value] += kept.pages
    return {
        "ends": {f"{outcome} ({reason})": n for (outcome, reason), n in ends.outcomes.items() if n},
        "quarantined_pages": dict(pages),
    }


def finding_object(finding: Finding) -> dict[str, Any]:
    """One violation as an object."""
    violation = finding.violation
    return {
        "position": finding.position,
        "request": violation.request,
        "sequence": violation.sequence,
        "rule": violation.rule,
        "guard": violation.guard,
        "event": type(finding.entry.event).__name__ if finding.entry else None,
        "sentence": violation.message,
        "claim": RULES[violation.rule].sentence,
        "reports": list(RULES[violation.rule].reports),
        "before": None if finding.before is None else state_object(finding.before),
    }


def state_object(state: RequestState) -> dict[str, Any]:
    """A request's state."""
    return {
        "request": state.request,
        "phase": state.phase.value,
        "attempt": state.attempt,
        "sequence": state.sequence,
        "deadline_ns": state.deadline_ns,
        "outcome": type(state.outcome).__name__ if state.outcome is not None else None,
        "grants": [_grant_object(grant) for grant in state.grants],
    }


def _grant_object(grant: Grant) -> dict[str, Any]:
    reserved = grant.reserved
    return {
        "grant": str(grant.id),
        "purpose": reserved.purpose.value,
        "attempt": grant.attempt,
        "settlement": grant.settlement.value,
        "pages": [[run.first, run.count] for run in reserved.pages],
        "tokens": [reserved.tokens.start, reserved.tokens.stop],
        "written": [[w.transfer.tokens.start, w.transfer.tokens.stop] for w in grant.written],
        "undrained": [str(party) for party in grant.undrained],
    }


def world_object(replayer: Replayer) -> dict[str, Any]:
    """The world behind the replayed position."""
    history = replayer.history
    return {
        "position": replayer.position,
        "time_ns": history.time_ns,
        "epoch": history.fleet.epoch,
        "engines": [
            {
                "engine": name,
                "incarnation": life.attached.incarnation,
                "role": life.attached.role.value,
                "draining": life.draining,
                "lost": life.lost.value if life.lost else None,
            }
            for name, life in history.fleet.lives
        ],
        "pages": [
            {
                "party": str(party),
                "free": account.free_pages,
                "held": account.held_pages,
                "booked": account.booked_pages,
                "quarantined": account.quarantined_pages,
                "capacity": account.capacity,
            }
            for party, account in history.ledger.items()
        ],
        "requests": [
            state_object(state)
            for state in history.requests.values()
            if state.phase in OPEN or state.unsettled
        ],
    }


def request_lines(state: RequestState) -> Iterator[str]:
    """One request at the end of a replay, and its grants."""
    yield f"{state.request}: {state_line(state)}"
    yield from (f"  {grant_line(grant)}" for grant in state.grants)
