"""A line for each request of the log, in the order of their first entries.

Owns: what a list of requests shows beyond a phase, which the reduced log knows.
Must not know: stores, pages of answers, gRPC.

It is memory only and rebuilt from the log at start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import attrs

from lifecycle.events import Aborted, Admitted, Entry, Finished, Rejected
from lifecycle.ids import FLEET, RequestId
from lifecycle.replay import Replayer
from lifecycle.state import Phase, RequestState
from transport.aside import DiskAside
from transport.pb import log_pb2 as pb
from transport.replaying import taken

if TYPE_CHECKING:
    from transport.forensics_read import Capture

PHASES = {phase: pb.Phase.Value(f"PHASE_{phase.name}") for phase in Phase}


@attrs.define
class Line:
    """Where a request's entries stand, when they were made, and how it ended.

    `tenant` is the commitment of its first event.
    """

    request: RequestId
    first_position: int
    last_position: int
    first_time_ns: int
    last_time_ns: int
    attempt: int = 0
    outcome: str = ""
    outcome_reason: str = ""
    tenant: str = ""


class Lines:
    """Lines in the order of their first entries, each with a number that it keeps."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._dropped = 0

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    @property
    def stop(self) -> int:
        """One more than the last line's number; the first one was 0."""
        return self._dropped + len(self._lines)

    def append(self, line: Line) -> None:
        """Add the next line."""
        self._lines.append(line)

    def between(self, start: int, stop: int) -> list[Line]:
        """The lines of these numbers that are still there."""
        return self._lines[max(0, start - self._dropped) : max(0, stop - self._dropped)]

    def forget_before(self, position: int) -> None:
        """Drop the oldest lines as long as they end before that position."""
        count = 0
        while count < len(self._lines) and self._lines[count].last_position < position:
            count += 1
        del self._lines[:count]
        self._dropped += count


class LogIndex:
    """Lines by request, growing with the log."""

    def __init__(self) -> None:
        self._all = Lines()
        self._by_request: dict[RequestId, Line] = {}
        self._by_tenant: dict[str, Lines] = {}

    def note(self, position: int, entry: Entry) -> None:
        """Take in the entry at this position; the fleet's own log is no request."""
        if entry.request == FLEET:
            return
        line = self._by_request.get(entry.request)
        if line is None:
            line = Line(entry.request, position, position, entry.time_ns, entry.time_ns)
            if isinstance(entry.event, Admitted | Rejected):
                line.tenant = entry.event.tenant
            self._by_request[entry.request] = line
            self._by_tenant.setdefault(line.tenant, Lines()).append(line)
            self._all.append(line)
        line.last_position = position
        line.last_time_ns = entry.time_ns
        line.attempt = max(line.attempt, entry.attempt)
        event = entry.event
        if isinstance(event, Rejected):
            line.outcome, line.outcome_reason = "Rejected", event.code.name
        elif isinstance(event, Aborted):
            line.outcome, line.outcome_reason = "Aborted", event.cause.name
        elif isinstance(event, Finished):
            line.outcome, line.outcome_reason = "Finished", event.reason.name

    @property
    def lines(self) -> Lines:
        """Every request's line."""
        return self._all

    def of_tenant(self, tenant: str) -> Lines:
        """The lines of one tenant, by its commitment."""
        return self._by_tenant.get(tenant, Lines())

    def forget_before(self, position: int, keep: Collection[RequestId]) -> None:
        """Forget requests of which the log holds nothing any more.

        Those to keep may go on: they are listed no longer, and stay their tenants' own.
        """
        for lines in (self._all, *self._by_tenant.values()):
            lines.forget_before(position)
        for request, line in tuple(self._by_request.items()):
            if line.last_position < position and request not in keep:
                del self._by_request[request]

    def find(self, request: RequestId) -> Line | None:
        """The line of that request."""
        return self._by_request.get(request)


def summary(line: Line, state: RequestState | None) -> pb.RequestSummary:
    """The line as a message; a request without a state has been settled and forgotten."""
    if state is not None:
        phase = state.phase
    else:
        phase = Phase.REJECTED if line.outcome == "Rejected" else Phase.CLOSED
    return pb.RequestSummary(
        request_id=line.request,
        phase=PHASES[phase],
        outcome=line.outcome,
        outcome_reason=line.outcome_reason,
        first_position=line.first_position,
        last_position=line.last_position,
        first_time_ns=line.first_time_ns,
        last_time_ns=line.last_time_ns,
        attempt=line.attempt,
    )


def summaries(capture: Capture) -> Iterator[pb.RequestSummary]:
    """A log's requests in the order of their first entries, in the phases that `replay` counts."""
    index = LogIndex()
    replayer = Replayer(foreign=capture.foreign, snapshot=capture.snapshot, aside=DiskAside())
    for position, entry in capture.opening():
        index.note(position, entry)
    for position, entry, _ in taken(capture, replayer):
        index.note(position, entry)
    for line in index.lines:
        yield summary(line, replayer.state(line.request) or RequestState(line.request))
