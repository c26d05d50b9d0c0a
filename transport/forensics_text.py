"""Exposures in words and as JSON.

Owns: how a finding of an inquiry is said to people and to programs.
Must not know: how anything was found, or which exit code follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lifecycle.events import RejectCode
from lifecycle.forensics_values import (
    Bounds,
    Doubt,
    Exposures,
    Missing,
    Read,
    Response,
    Source,
    Threshold,
    Told,
)
from lifecycle.wording import counted
from transport.forensics_read import Capture
from transport.render import clock

HTTP_DUE: dict[RejectCode, int] = {
    RejectCode.INVALID_REQUEST: 400,
    RejectCode.CONTEXT_LENGTH_EXCEEDED: 400,
    RejectCode.KV_POOL_CAPACITY_EXCEEDED: 400,
    RejectCode.QUEUE_FULL: 429,
    RejectCode.QUEUE_TIMEOUT: 429,
    RejectCode.TENANT_QUOTA_EXCEEDED: 429,
    RejectCode.DRAINING: 503,
    RejectCode.NOT_READY: 503,
    RejectCode.NO_ENGINE: 503,
    RejectCode.DEADLINE: 504,
    RejectCode.CANCELLED: 499,
}
"""What a rejection is over HTTP."""
HTTP_ANSWER = 200

DOUBTS: dict[Doubt, str] = {
    Doubt.OWN_ENTRIES_MISSING: "entries of its own are missing, in which its writes may stand",
    Doubt.NO_PAGES: "the log does not say which pages it read",
    Doubt.OPEN_DOOR: "another request's write to its pages was still under way",
    Doubt.LATE_WRITE: "another request's write landed where it wrote tokens of its own",
    Doubt.GAP_IN_LOG: "entries are missing from its time, and its reads were not compared",
    Doubt.NOT_VERIFIED: "it read without Verified, in a log in which others were verified",
    Doubt.SOURCE_REUSED: "what it was sent was copied from pages that another held by then",
}
SOURCES: dict[Source, str] = {
    Source.REQUEST: "another request",
    Source.BEFORE: "somebody before this log",
    Source.NOBODY: "nobody: the memory was new",
}
LINES_SHOWN = 20
DAY_SECONDS = 86_400


def duration(nanoseconds: int) -> str:
    """In the unit that suits it."""
    seconds = nanoseconds / 1e9
    if seconds >= DAY_SECONDS:
        return f"{seconds / DAY_SECONDS:.1f} days"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def bounds(value: Bounds) -> str:
    """One number where both are equal."""
    if value.least == value.most:
        return str(value.least)
    return f"at least {value.least}, at most {value.most}"


def status_due(response: Response) -> int:
    """The HTTP status that the client should have had; 0 where the log does not say."""
    return HTTP_DUE[response.refused] if response.refused is not None else 0


# --- Words ------------------------------------------------------------------------------------


def exposure_lines(capture: Capture, found: Exposures, *, reads: bool) -> Iterator[str]:
    """The verdict first, then who, then what is not known."""
    if capture.foreign:
        yield f"foreign log of {capture.source}: it was made by another system and entered unchecked"
    window = f"{clock(found.first_ns)} to {clock(found.last_ns)}" if found.entries else "no time"
    yield f"{counted(found.entries, 'entry')} of {counted(found.requests, 'request')}, {window}"
    yield f"answers: {found.answers}"
    yield f"affected answers: {bounds(found.affected)}"
    yield f"exposed requests: {bounds(found.exposed)}"
    certain = found.certain
    if certain:
        yield f"first affected answer: {clock(certain[0].time_ns)}"
        yield f"last affected answer: {clock(certain[-1].time_ns)}"
        due = [r for r in certain if r.refused is not None]
        if due:
            statuses = sorted({status_due(r) for r in due})
            words = " or ".join(str(status) for status in statuses)
            yield f"answered with {HTTP_ANSWER} where {words} was due: {len(due)}"
    for threshold in found.thresholds:
        yield threshold_line(threshold)
    for pair in found.pairs[:LINES_SHOWN]:
        yield (
            f"tenant {pair.reader} read bytes of {pair.writer}: {counted(pair.responses, 'answer')}"
        )
    yield from _cut(len(found.pairs), "pairs of tenants")
    for kind in sorted({s.kind for s in found.symptoms}):
        seen = {s.request for s in found.symptoms if s.kind == kind}
        among = len(seen & {r.request for r in certain})
        yield f"symptom {kind}: {counted(len(seen), 'answer')}, {among} of them affected"
    for response in found.responses[:LINES_SHOWN]:
        yield from _response_lines(response, reads=reads)
    yield from _cut(len(found.responses), "responses")
    yield from missing_lines(capture, found)


def _cut(count: int, what: str) -> Iterator[str]:
    if count > LINES_SHOWN:
        yield f"... and {count - LINES_SHOWN} more {what}; --json has them all"


def threshold_line(threshold: Threshold) -> str:
    """Where the affected begin."""
    pools = "".join(
        f"; the pool of {engine} holds {counted(tokens, 'token')}"
        for engine, tokens in threshold.pools
    )
    return (
        f"threshold: every affected answer has {threshold.quantity} of {threshold.above} or more, "
        f"every other {threshold.below} or less{pools}"
    )


def _response_lines(response: Response, *, reads: bool) -> Iterator[str]:
    how = "affected" if response.certain else "not to be cleared"
    told = {
        Told.ANSWER: "answered",
        Told.PART: "given a part of an answer at most",
        Told.REFUSAL: "refused",
        Told.NOTHING: "not ended in this log",
    }[response.told]
    refused = f", rejected as {response.refused.value}" if response.refused is not None else ""
    yield (
        f"{clock(response.time_ns)} {response.request} of {response.tenant or 'an unknown tenant'}, "
        f"prompt of {response.prompt_tokens}: {how}, {told}{refused}"
    )
    for doubt in response.doubts:
        yield f"  doubt: {DOUBTS[doubt]}"
    if not response.reads:
        return
    writers = {read.writer for read in response.reads if read.writer is not None}
    stale = max(read.stale_ns for read in response.reads)
    yield (
        f"  read {counted(response.tokens, 'token')} in {counted(len(response.reads), 'run')} "
        "that it had not written: "
        f"{counted(len(writers), 'earlier request')}, the oldest bytes {duration(stale)} old"
    )
    if reads:
        for read in response.reads:
            yield f"  {read_line(read)}"


def read_line(read: Read) -> str:
    """One run."""
    whose = read.writer or SOURCES[read.source]
    tenant = f" of {read.writer_tenant}" if read.writer_tenant else ""
    age = f", {duration(read.stale_ns)} old" if read.writer is not None else ""
    return (
        f"tokens {read.start} to {read.stop - 1} on pages {read.first_page} to "
        f"{read.first_page + read.pages - 1} of {read.owner}: bytes of {whose}{tenant}{age}"
    )


def missing_lines(capture: Capture, found: Exposures) -> Iterator[str]:
    """What nobody can know from this log."""
    for gap in found.missing[:LINES_SHOWN]:
        yield gap_line(gap)
    yield from _cut(len(found.missing), "gaps")
    for record in capture.unknown[:LINES_SHOWN]:
        place = f"line {record.line}" if record.line else f"position {record.position}"
        yield f"not evaluated: {place}: {record.reason}"
    yield from (f"note: {text}" for text in capture.notes[:LINES_SHOWN])
    positions, times = shares(found)
    if not capture.whole:
        yield (
            f"incomplete: at least {positions:.2%} of the positions and {times:.2%} of the time are not "
            "covered; the bounds say what that leaves open"
        )


def gap_line(gap: Missing) -> str:
    """Which positions are gone."""
    last = "an unknown end" if gap.last is None else str(gap.last)
    return f"missing: positions {gap.first} to {last}: {gap.reason}"


def shares(found: Exposures) -> tuple[float, float]:
    """The parts of positions and of time that the log does not cover."""
    everything = found.entries + found.missing_positions
    window = found.last_ns - found.first_ns
    return (
        found.missing_positions / everything if everything else 0.0,
        min(1.0, found.missing_ns / window) if window else 0.0,
    )


# --- JSON -------------------------------------------------------------------------------------


def exposures_object(capture: Capture, found: Exposures) -> dict[str, Any]:
    """The same, whole, as one JSON document."""
    positions, times = shares(found)
    certain = found.certain
    due = [r for r in certain if r.refused is not None]
    return {
        "source": capture.source,
        "foreign": capture.foreign,
        "complete": capture.whole,
        "entries": found.entries,
        "requests": found.requests,
        "answers": found.answers,
        "window": {"first_ns": found.first_ns, "last_ns": found.last_ns},
        "affected": {"least": found.affected.least, "most": found.affected.most},
        "exposed_requests": {"least": found.exposed.least, "most": found.exposed.most},
        "first_affected_ns": certain[0].time_ns if certain else None,
        "last_affected_ns": certain[-1].time_ns if certain else None,
        "answered_though_refused": len(due),
        "status_told": HTTP_ANSWER if certain else None,
        "status_due": sorted({status_due(r) for r in due}),
        "thresholds": [
            {
                "quantity": one.quantity,
                "unaffected_most": one.below,
                "affected_least": one.above,
                "pools": [{"engine": name, "tokens": tokens} for name, tokens in one.pools],
            }
            for one in found.thresholds
        ],
        "pairs": [
            {"reader": one.reader, "writer": one.writer, "answers": one.responses}
            for one in found.pairs
        ],
        "symptoms": [
            {
                "request": one.request,
                "kind": one.kind,
                "found": one.found,
                "expected": one.expected,
                "sentence": one.sentence,
            }
            for one in found.symptoms
        ],
        "responses": [response_object(one) for one in found.responses],
        "not_covered": {
            "positions": found.missing_positions,
            "position_share": positions,
            "time_ns": found.missing_ns,
            "time_share": times,
            "gaps": [
                {"first": gap.first, "last": gap.last, "reason": gap.reason}
                for gap in found.missing
            ],
            "unknown": [
                {"line": one.line, "position": one.position, "reason": one.reason}
                for one in capture.unknown
            ],
            "notes": capture.notes,
        },
    }


def response_object(response: Response) -> dict[str, Any]:
    """One response with all its reads."""
    return {
        "request": response.request,
        "tenant": response.tenant,
        "prompt_tokens": response.prompt_tokens,
        "certain": response.certain,
        "told": response.told.value,
        "position": response.position,
        "time_ns": response.time_ns,
        "rejected_as": response.refused.value if response.refused is not None else None,
        "status_due": status_due(response) or None,
        "foreign_tokens": response.tokens,
        "doubts": [doubt.value for doubt in response.doubts],
        "reads": [_read_object(read) for read in response.reads],
    }


def _read_object(read: Read) -> dict[str, Any]:
    return {
        "owner": str(read.owner),
        "first_page": read.first_page,
        "pages": read.pages,
        "start": read.start,
        "stop": read.stop,
        "source": read.source.value,
        "writer": read.writer,
        "writer_tenant": read.writer_tenant,
        "written_position": read.written_position,
        "written_ns": read.written_ns,
        "read_ns": read.read_ns,
        "stale_ns": read.stale_ns,
    }
