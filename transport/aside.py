"""Requests that are over, kept on disk while a long log is read.

Owns: the temporary file, and which of them are in memory.
Must not know: when a request is over.

The latest stay in memory, since most late entries come soon; the rest goes by the batch into a
temporary file that has no name and ends with the process.
"""

from __future__ import annotations

import io
import pickle
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Generic

import attrs

from lifecycle.events import FLEET_EVENTS, REQUEST_EVENTS, ByEngine, Entry, Leg
from lifecycle.ids import GrantId, PageRange, Party, RequestId, TokenRange
from lifecycle.shelf import N
from lifecycle.state import Grant, RequestState, Written

LATEST = 4_096
BATCH = 256
_BATCHES_KEPT = 4

_VALUES = (
    *(RequestState, Grant, Written, Leg, Party, GrantId, PageRange, TokenRange),
    *(Entry, ByEngine, *REQUEST_EVENTS, *FLEET_EVENTS),
)


def _reduced(kind: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    """How a value is pickled: its class and its fields, which is half the work of the default."""
    names = [field.name for field in attrs.fields(kind)]
    values = attrgetter(*names)
    if len(names) == 1:
        return lambda value: (kind, (values(value),))
    return lambda value: (kind, values(value))


_REDUCED = {kind: _reduced(kind) for kind in _VALUES}


def packed(value: object) -> bytes:
    """A log's values as bytes, for `pickle.loads` in this very process."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCED
    pickler.dump(value)
    return out.getvalue()


class NotPutAside(OSError):
    """A temporary file cannot be written; who reads the log makes room or names another folder."""

    def __init__(self, reason: object) -> None:
        super().__init__(
            f"what was read cannot be kept in a temporary file, for which TMPDIR names the folder: "
            f"{reason}"
        )


class DiskAside(Generic[N]):
    """The latest in memory, the others in a temporary file."""

    def __init__(self, *, latest: int | None = None) -> None:
        """Nothing is on disk until more than `latest` requests were put, `LATEST` if not said."""
        self._most = LATEST if latest is None else latest
        self._batch_size = max(1, min(BATCH, self._most))
        self._latest: OrderedDict[RequestId, N] = OrderedDict()
        self._disk: sqlite3.Connection | None = None
        self._highest = RequestId("")
        self._batches = 0
        self._read: OrderedDict[int, dict[RequestId, N]] = OrderedDict()

    @property
    def in_memory(self) -> int:
        """How many of them are not on disk."""
        return len(self._latest)

    def put(self, one: N) -> None:
        """Keep this in place of what was kept of the same request before.  Raises `NotPutAside`."""
        self._latest[one.request] = one
        self._latest.move_to_end(one.request)
        if len(self._latest) >= self._most + self._batch_size:
            try:
                self._spill()
            except sqlite3.Error as error:
                raise NotPutAside(error) from error

    def find(self, request: RequestId) -> N | None:
        """What was put last."""
        one = self._latest.get(request)
        if one is not None or self._disk is None or request > self._highest:
            return one
        number = self._place(self._disk, request)
        return None if number is None else self._batch(self._disk, number)[request]

    def names(self) -> Iterator[RequestId]:
        """Every request that was put."""
        if self._disk is not None:
            for (request,) in self._disk.execute("SELECT request FROM place"):
                if request not in self._latest:
                    yield RequestId(request)
        yield from tuple(self._latest)

    def values(self) -> Iterator[N]:
        """What was put last of every request: the oldest first, by the batch."""
        if self._disk is not None:
            for number in range(1, self._batches + 1):
                for name, one in self._batch(self._disk, number).items():
                    if name not in self._latest and self._place(self._disk, name) == number:
                        yield one
        yield from tuple(self._latest.values())

    def broke(self, request: RequestId) -> bool:
        """Nothing was skipped, so nothing was broken there."""
        return False

    def _spill(self) -> None:
        if self._disk is None:
            # An empty name is a file of its own that is removed when it is closed.
            self._disk = sqlite3.connect("", isolation_level=None)
            self._disk.execute("CREATE TABLE batch (number INTEGER PRIMARY KEY, states BLOB)")
            self._disk.execute("CREATE TABLE place (request TEXT PRIMARY KEY, batch) WITHOUT ROWID")
        states = dict(self._latest.popitem(last=False) for _ in range(self._batch_size))
        self._batches += 1
        self._disk.execute("BEGIN")
        self._disk.execute("INSERT INTO batch VALUES (?, ?)", (self._batches, packed(states)))
        self._disk.executemany(
            "INSERT OR REPLACE INTO place VALUES (?, ?)", ((name, self._batches) for name in states)
        )
        self._disk.execute("COMMIT")
        self._highest = max(self._highest, *states)

    def _place(self, disk: sqlite3.Connection, request: RequestId) -> int | None:
        found = disk.execute("SELECT batch FROM place WHERE request = ?", (request,)).fetchone()
        return None if found is None else int(found[0])

    def _batch(self, disk: sqlite3.Connection, number: int) -> dict[RequestId, N]:
        states = self._read.get(number)
        if states is None:
            (content,) = disk.execute(
                "SELECT states FROM batch WHERE number = ?", (number,)
            ).fetchone()
            # The file is this process's own, and nobody else can open it.
            states = self._read[number] = pickle.loads(content)  # noqa: S301 - written above
            if len(self._read) > _BATCHES_KEPT:
                self._read.popitem(last=False)
        return states
