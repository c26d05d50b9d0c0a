"""What a check of a log's files found, in words and as JSON.

Owns: how a problem of the chain is said.
Must not know: how it was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from lifecycle.wording import counted
from transport.forensics_chain import Problem, Wrong
from transport.forensics_read import Capture, LinesCapture, SegmentCapture
from transport.head_signature import Signed
from transport.replay_text import missing_lines


def verify_lines(capture: Capture, signed: Sequence[Signed] | None = None) -> Iterator[str]:
    """What was checked, who signed it, every problem with its place, and the verdict.

    `signed` is None where no signatures were looked for.
    """
    if isinstance(capture, SegmentCapture):
        survey = capture.survey
        yield (
            f"{counted(len(survey.paths), 'segment')}, {counted(survey.batch_count, 'batch')}, "
            f"{counted(survey.entries, 'entry')}, "
            f"{counted(survey.size_bytes, 'byte')} unpacked"
        )
        yield f"chain ends with {survey.head.hex()}"
        if signed is not None:
            yield from signature_lines(signed, survey.span[1])
    else:
        form = (
            "JSON Lines, which have" if isinstance(capture, LinesCapture) else "Parquet, which has"
        )
        yield f"{counted(capture.entries_read, 'entry')} in {form} no check sums and no chain"
    for problem in capture.problems:
        yield problem_line(problem)
    if not capture.problems:
        yield from missing_lines(capture)
    if capture.problems:
        yield f"{counted(len(capture.problems), 'problem')}"
    else:
        yield "intact" if capture.whole else "incomplete: what is there is intact"


def signature_lines(signed: Sequence[Signed], last: int) -> Iterator[str]:
    """Each signature that holds, by whom it is, and what none is of."""
    holds = [one for one in signed if not one.problem and one.compared]
    if not signed:
        yield "not signed"
    for one in signed:
        whose = (
            "a given key" if one.named else "a key that nobody named, which the file holds itself"
        )
        if one in holds:
            yield f"signed up to position {one.position} by {whose}, fingerprint {one.fingerprint}"
        elif not one.problem:
            yield f"{one.file}: position {one.position} is not in these segments, so nothing compares"
    reached = max((one.position for one in holds), default=last)
    if reached < last:
        yield f"positions {reached + 1} to {last} are not signed"


def problem_line(problem: Problem) -> str:
    """Segment, offset, positions, and what is wrong."""
    positions = ""
    if problem.last_position:
        positions = f", positions {problem.first_position} to {problem.last_position}"
    if problem.wrong is Wrong.SIGNATURE:
        where = f"{problem.segment}: " if problem.segment else ""
        return f"{where}{problem.wrong.value}: {problem.message}"
    # A line has no place but its number.
    byte = "" if problem.segment.startswith("line ") else f", byte {problem.offset}"
    return f"{problem.segment}{byte}{positions}: {problem.wrong.value}: {problem.message}"


def verify_object(capture: Capture, signed: Sequence[Signed] | None = None) -> dict[str, Any]:
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
        "signatures": None if signed is None else [attrs.asdict(one) for one in signed],
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
