"""A capture judged entry by entry: what every verb that replays or inquires does alike.

Owns: taking entries in behind a gap, which findings are wanted, and a replay that goes on with a
running scheduler.
Must not know: where a capture comes from; how a verb's result is worded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from lifecycle.forensics_sums import summed

if TYPE_CHECKING:
    from lifecycle.events import Entry
    from lifecycle.forensics_exposures import Inquiry
    from lifecycle.forensics_values import Exposures
    from lifecycle.replay import Finding, Replayer
    from transport.forensics_read import Capture


class Counts(Protocol):
    """Whoever counts what a replay took in: all metrics, or how requests ended."""

    def note(self, entry: Entry) -> None:
        """The next entry, once the replay has taken it in."""


def taken(
    capture: Capture, replayer: Replayer, *, at: int | None = None
) -> Iterator[tuple[int, Entry, bool]]:
    """Replay up to a position: each entry, and whether it was taken in."""
    for position, entry, gap in capture.joined():
        if at is not None and position > at:
            break
        if gap:
            replayer.lose()
        legal = replayer.take(position, entry) is None
        yield position, entry, legal or replayer.forces(entry)
    capture.conclude()


def inquired(
    capture: Capture, inquiry: Inquiry, replayer: Replayer | None = None
) -> Iterator[tuple[int, Entry]]:
    """Each entry once the inquiry, and a replay if one is wanted, has taken it.

    What a snapshot kept comes first; a replay begins behind it.
    """
    for position, entry in capture.opening():
        inquiry.take(position, entry)
        yield position, entry
    for position, entry, gap in capture.joined():
        if gap:
            inquiry.lose()
        inquiry.take(position, entry)
        if replayer is not None:
            if gap:
                replayer.lose()
            replayer.take(position, entry)
        yield position, entry


def found_in(capture: Capture, inquiry: Inquiry) -> Exposures:
    """What the inquiry found, once every entry has been taken."""
    return summed(
        inquiry,
        missing=capture.gaps(),
        missing_ns=capture.missing_ns,
        unknown=capture.unplaced,
        whole=capture.whole,
    )


def replayed(
    capture: Capture, replayer: Replayer, counts: Counts, *, at: int | None = None
) -> None:
    """Replay up to a position, and count whatever was taken in."""
    for _, entry, counted in taken(capture, replayer, at=at):
        if counted:
            counts.note(entry)


def followed(
    capture: Capture, replayer: Replayer, counts: Counts, *, to: int | None = None
) -> Iterator[Finding]:
    """The first violation of each request as soon as its entry is there.

    It ends at a position without waiting for what comes behind it.
    """
    told = 0
    for position, entry, counted in taken(capture, replayer, at=to):
        if counted:
            counts.note(entry)
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
