"""Making a log's index: one replay of all of it, with a snapshot every few thousand entries.

Owns: what a snapshot must hold, how often one is taken, and which logs get an index.
Must not know: the index's file format.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections import Counter
from pathlib import Path

import attrs

from lifecycle.events import Entry, Lost
from lifecycle.ids import FLEET, RequestId
from lifecycle.replay import Replayer
from lifecycle.snapshot import is_over, take
from lifecycle.state import TERMINAL, Phase
from transport.aside import DiskAside
from transport.forensics_chain import Place
from transport.forensics_read import SegmentCapture
from transport.seek_index import IndexWriter, Kept, kept_entries

EVERY = 2_048
"""Entries between two snapshots; more where more is kept, so that the file stays a part of the log."""


class NotIndexed(Exception):
    """The log is damaged or has gaps: of what is behind those, nobody can say what it comes to."""


@attrs.frozen
class Built:
    """What was made."""

    entries: int
    snapshots: int
    violations: int
    last: Place


class _Builder:
    """A replay under way, and what the next snapshot must hold."""

    def __init__(self, capture: SegmentCapture, writer: IndexWriter, every: int) -> None:
        self._survey = capture.survey
        self._writer = writer
        self._every = every
        self.replayer = Replayer(snapshot=capture.snapshot, aside=DiskAside())
        self.snapshots = 0
        self._kept: dict[RequestId, list[tuple[int, Entry]]] = {}
        self._positions: dict[RequestId, array[int]] = {}
        self._kept_count = 0
        self._since = 0
        for position, entry in capture.opening():
            self._keep(position, entry)

    def take(self, position: int, entry: Entry) -> None:
        request, replayer = entry.request, self.replayer
        violations = len(replayer.findings)
        if request not in self._kept and replayer.state(request) is not None:
            self._writer.late(request, position)
            if replayer.take(position, entry) is not None:
                self._writer.refused(position, request, first=len(replayer.findings) > violations)
        elif replayer.take(position, entry) is None:
            self._keep(position, entry)
        else:
            self._positions.setdefault(request, array("Q")).append(position)
            self._kept.setdefault(request, [])
            self._writer.refused(position, request, first=len(replayer.findings) > violations)
        self._forget(request)
        if isinstance(entry.event, Lost):
            # What an owner that lived held back may be over by now.
            for name in tuple(self._kept):
                self._forget(name)
        self._since += 1
        if self._since >= (max(self._every, self._kept_count) if self._every else 1):
            place = self._survey.place
            if place is not None and place.last == position:
                self._snapshot(place)

    def _keep(self, position: int, entry: Entry) -> None:
        self._kept.setdefault(entry.request, []).append((position, entry))
        self._positions.setdefault(entry.request, array("Q")).append(position)
        self._kept_count += 1

    def _forget(self, request: RequestId) -> None:
        if request == FLEET or request not in self._kept:
            return
        state = self.replayer.state(request)
        if state is None or state.phase not in TERMINAL or state.unsettled:
            return
        if is_over(state, self.replayer.history.ledger):
            self._kept_count -= len(self._kept.pop(request))
            self._writer.request(request, self._positions.pop(request))

    def _snapshot(self, place: Place) -> None:
        replayer = self.replayer
        entries = kept_entries(self._kept.values())
        over: Counter[Phase] = Counter(replayer.over)
        # What is kept of those that are over comes back with the snapshot.
        for name in self._kept:
            if name not in replayer.history.requests:
                state = replayer.state(name)
                if state is not None:
                    over[state.phase] -= 1
        kept = Kept(
            place=place,
            snapshot=take(place.last, replayer.history, entries),
            over=tuple((phase, count) for phase, count in over.items() if count),
            evaluated=replayer.history.evaluated,
            violations=len(replayer.findings),
        )
        self._writer.snapshot(kept)
        self.snapshots += 1
        self._since = 0

    def finish(self, tool: str, last: Place) -> Built:
        for name, positions in self._positions.items():
            self._writer.request(name, positions)
        self._writer.finish(tool=tool, entries=self.replayer.entries, last=last)
        violations = len(self.replayer.findings)
        return Built(self.replayer.entries, self.snapshots, violations, last)


def build(
    capture: SegmentCapture,
    path: Path,
    *,
    tool: str,
    every: int = EVERY,
) -> Built:
    """Replay the whole log and write its index.

    `every` is how many entries lie between two snapshots; 0 takes one behind every batch.
    Raises `NotIndexed` or OSError.
    """
    writer = IndexWriter(path)
    try:
        builder = _Builder(capture, writer, every)
        for position, entry in capture:
            builder.take(position, entry)
        last = capture.survey.place
        dropped = 0 if capture.snapshot is None else 1
        if last is None or capture.problems or capture.unknown or len(capture.missing) > dropped:
            raise NotIndexed(
                "parts of the log are damaged, missing or unknown; `replay` names them"
            )
        return builder.finish(tool, last)
    except sqlite3.Error as error:
        writer.give_up()
        raise OSError(f"{path}: {error}") from error
    except BaseException:
        writer.give_up()
        raise
