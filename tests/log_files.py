"""A whole log at once, for tests that compare all of it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import attrs

from engine.store import Stored
from lifecycle.snapshot import Snapshot
from transport.forensics_read import Capture, open_capture
from transport.jsonlines import UnknownRecord


@attrs.frozen
class LogFile:
    """What a log holds; `complete`: nothing of it is missing or damaged."""

    entries: tuple[Stored, ...]
    foreign: bool
    complete: bool
    unknown: tuple[UnknownRecord, ...]
    source: str
    snapshot: Snapshot | None = None


def read_capture(capture: Capture) -> LogFile:
    """Read it to its end."""
    entries = tuple(Stored(position, entry) for position, entry in capture)
    return LogFile(
        entries=entries,
        foreign=capture.foreign,
        complete=capture.claims_whole and not capture.missing and not capture.problems,
        unknown=tuple(capture.unknown),
        source=capture.source,
        snapshot=capture.snapshot,
    )


def read_log(path: Path) -> LogFile:
    """A folder of segments, one segment, Parquet or JSON Lines.  Raises `UnreadableLog`."""
    with ExitStack() as stack:
        return read_capture(open_capture(path, stack))
