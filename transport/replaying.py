"""A capture replayed entry by entry: what `replay`, `metrics` and the demo do alike.

Owns: taking entries in behind a gap, which findings are wanted, and a replay that goes on with a
running scheduler.
Must not know: where a capture comes from; how a verb's result is worded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lifecycle.ids import RequestId
from transport.commands_log import UnknownRequest

if TYPE_CHECKING:
    from lifecycle.events import Entry
    from lifecycle.replay import Finding, Replayer
    from lifecycle.tally import Tally
    from transport.forensics_read import Capture


def taken(
    capture: Capture, replayer: Replayer, *, at: int | None = None
) -> Iterator[tuple[int, Entry, bool]]:
    """Replay up to a position: each entry, and whether it was taken in."""
    # A snapshot stands for what was dropped.
    gaps = 0 if capture.snapshot is None else len(capture.missing)
    for position, entry in capture:
        if at is not None and position > at:
            return
        if len(capture.missing) + len(capture.unknown) > gaps:
            # What is missing made others' entries illegal: take them in as they stand.
            gaps = len(capture.missing) + len(capture.unknown)
            replayer.forcing = True
        legal = replayer.take(position, entry) is None
        yield position, entry, legal or replayer.forces(entry)


def replayed(capture: Capture, replayer: Replayer, tally: Tally, *, at: int | None = None) -> None:
    """Replay up to a position, and count whatever was taken in."""
    for _, entry, counted in taken(capture, replayer, at=at):
        if counted:
            tally.note(entry)


def followed(
    capture: Capture, replayer: Replayer, tally: Tally, *, to: int | None = None
) -> Iterator[Finding]:
    """The first violation of each request as soon as its entry is there.

    It ends at a position without waiting for what comes behind it.
    """
    told = 0
    for position, entry, counted in taken(capture, replayer, at=to):
        if counted:
            tally.note(entry)
        if len(replayer.findings) > told:
            told = len(replayer.findings)
            yield next(reversed(replayer.findings.values()))
        if to is not None and position >= to:
            return


def wanted(finding: Finding, request: str | None, first: int | None, to: int | None) -> bool:
    """Whether a finding is of this request and inside these positions."""
    return (
        (request is None or finding.violation.request == request)
        and (first is None or finding.position >= first)
        and (to is None or finding.position <= to)
    )


def expect_known(request: str, replayer: Replayer) -> None:
    """Raises `UnknownRequest` with ids that look like it."""
    known = replayer.history.requests
    if request in known or RequestId(request) in replayer.findings:
        return
    from difflib import get_close_matches

    raise UnknownRequest(request, get_close_matches(request, list(known), n=3))
