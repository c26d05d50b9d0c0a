"""What a check of a log's files found, in words and as JSON.

Owns: how a problem of the chain is said.
Must not know: how it was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lifecycle.wording import counted
from transport.forensics_chain import Problem
from transport.forensics_read import Capture, SegmentCapture
from transport.replay_text import missing_lines


def verify_lines(capture: Capture) -> Iterator[str]:
    """What was checked, every problem with its place, and the verdict."""
    if isinstance(capture, SegmentCapture):
        survey = capture.survey
        yield (
            f"{counted(len(survey.paths), 'segment')}, {counted(survey.batch_count, 'batch')}, "
            f"{counted(survey.entries, 'entry')}, "
            f"{counted(survey.size_bytes, 'byte')} unpacked"
        )
        yield f"chain ends with {survey.head.hex()}"
    else:
        yield (
            f"{counted(capture.entries_read, 'entry')} in JSON Lines, which have no check sums "
            "and no chain"
        )
    for problem in capture.problems:
        yield problem_line(problem)
    if not capture.problems:
        yield from missing_lines(capture)
    if capture.problems:
        yield f"{counted(len(capture.problems), 'problem')}"
    else:
        yield "intact" if capture.whole else "incomplete: what is there is intact"


def problem_line(problem: Problem) -> str:
    """Segment, offset, positions, and what is wrong."""
    positions = ""
    if problem.last_position:
        positions = f", positions {problem.first_position} to {problem.last_position}"
    return f"{problem.segment}, byte {problem.offset}{positions}: {problem.wrong.value}: {problem.message}"


def verify_object(capture: Capture) -> dict[str, Any]:
    """The same as one JSON document."""
    chained = isinstance(capture, SegmentCapture)
    return {
        "intact": not capture.problems,
        "complete": capture.whole,
        "entries": capture.entries_read,
        "segments": len(capture.survey.paths) if isinstance(capture, SegmentCapture) else 0,
        "batches": capture.survey.batch_count if isinstance(capture, SegmentCapture) else 0,
        "chained": chained,
        "head": capture.head.hex() if capture.head is not None else None,
        "problems": [
            {
                "wrong": one.wrong.value,
                "segment": one.segment,
                "offset": one.offset,
                "first_position": one.first_position,
                "last_position": one.last_position,
                "message": one.message,
            }
            for one in capture.problems
        ],
        "missing": [
            {"first": gap.first, "last": gap.last, "reason": gap.reason} for gap in capture.missing
        ],
        "unknown": len(capture.unknown),
    }
