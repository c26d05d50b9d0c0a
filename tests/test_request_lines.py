"""Claims about a list of requests for human eyes."""

from __future__ import annotations

import itertools

import pytest

from lifecycle.events import Cause, FinishReason, RejectCode
from transport import render
from transport.pb import log_pb2
from transport.status_text import COLUMNS

LARGE = 9_999_999_999
"""More entries than a log has had."""
SECOND_NS = 1_000_000_000
BEGAN_NS = 1_764_496_800 * SECOND_NS + 123_000_000
ENDS = [
    ("", ""),
    *(("Finished", reason.name) for reason in FinishReason),
    *(("Aborted", cause.name) for cause in Cause),
    *(("Rejected", code.name) for code in RejectCode),
]


def summary(phase: int, outcome: str, reason: str, *, attempt: int) -> log_pb2.RequestSummary:
    """A request with a name as ours are, and an hour between its first and its last entry."""
    return log_pb2.RequestSummary(
        request_id="00000001-000000000001",
        phase=log_pb2.Phase.ValueType(phase),
        outcome=outcome,
        outcome_reason=reason,
        first_position=LARGE,
        last_position=LARGE,
        first_time_ns=BEGAN_NS,
        last_time_ns=BEGAN_NS + 3_600 * SECOND_NS,
        attempt=attempt,
    )


def test_no_line_is_longer_than_a_terminal() -> None:
    """Whatever the phase and the end: a line that begins with the id, and one that is indented."""
    for phase, (outcome, reason) in itertools.product(log_pb2.Phase.values()[1:], ENDS):
        if (outcome == "Rejected") is not (phase == log_pb2.PHASE_REJECTED):
            continue
        first, second = render.request_lines(summary(phase, outcome, reason, attempt=99))
        assert max(len(first), len(second)) <= COLUMNS, first
        assert first.startswith("00000001-000000000001 ")
        assert second.startswith("    2025-11-30T")


@pytest.mark.parametrize(
    ("phase", "outcome", "reason", "attempt", "first"),
    [
        (log_pb2.PHASE_CLOSED, "Finished", "STOP", 1, "closed Finished (STOP), attempt 1"),
        (log_pb2.PHASE_DECODING, "", "", 2, "decoding, attempt 2"),
        (log_pb2.PHASE_REJECTED, "Rejected", "QUEUE_FULL", 0, "rejected (QUEUE_FULL)"),
    ],
)
def test_nothing_is_lost(phase: int, outcome: str, reason: str, attempt: int, first: str) -> None:
    """Phase, end, reason and attempt, then beginning, duration and positions."""
    lines = list(render.request_lines(summary(phase, outcome, reason, attempt=attempt)))
    assert lines == [
        f"00000001-000000000001 {first}",
        f"    2025-11-30T10:00:00.123Z, 3600000.0 ms, positions {LARGE} to {LARGE}",
    ]
