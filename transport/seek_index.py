"""The file of snapshots beside a log, with which a replay begins in the middle.

Owns: the file's tables, its check sums, and what makes a row worth anything.
Must not know: how entries are judged, and what a verb does with a snapshot.

It is a SQLite file that can be made again at any time.  Nothing in it is believed because it is
there: a snapshot names a batch of the log by its hash, which stands for everything before it, and
counts only where the log holds that very batch.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from lifecycle.events import Entry
from lifecycle.ids import EngineId, Party, RequestId
from lifecycle.snapshot import Snapshot
from lifecycle.state import Phase
from transport import codec
from transport.forensics_chain import Place

FORMAT = "custody.seek"
VERSION = 1
NAME = "seek.index"
TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE snapshot (position INTEGER PRIMARY KEY, place TEXT, body BLOB, sum BLOB);
CREATE TABLE request (name TEXT PRIMARY KEY, first INTEGER, others BLOB) WITHOUT ROWID;
CREATE TABLE late (name TEXT, position INTEGER);
CREATE TABLE refused (position INTEGER PRIMARY KEY, name TEXT, first INTEGER);
"""
_LENGTH = struct.Struct("<I")


class UnusableIndex(Exception):
    """The file is no index, or not one of this log; the log itself may be sound."""


@attrs.frozen
class Kept:
    """What the log comes to behind a position.

    `over` counts requests of which the snapshot holds nothing, by phase; `violations` the first
    violations up to here; `evaluated` the guards that were asked.
    """

    place: Place
    snapshot: Snapshot
    over: tuple[tuple[Phase, int], ...]
    evaluated: int
    violations: int


def index_path(folder: Path) -> Path:
    """Where a log's index is, if nobody says otherwise."""
    return folder / NAME


# --- Rows -------------------------------------------------------------------------------------


def _place_text(place: Place) -> str:
    where = [place.segment, place.offset, place.stop, place.first, place.last]
    return json.dumps([*where, place.digest.hex(), place.time_ns])


def _place_of(text: str) -> Place:
    segment, offset, stop, first, last, digest, time_ns = json.loads(text)
    return Place(segment, offset, stop, first, last, bytes.fromhex(digest), time_ns)


def _sum(place: str, body: bytes) -> bytes:
    return hashlib.sha256(place.encode() + b"\0" + body).digest()


def _body(kept: Kept) -> bytes:
    snapshot = kept.snapshot
    head = {
        "position": snapshot.position,
        "time_ns": snapshot.time_ns,
        "positions": [position for position, _ in snapshot.entries],
        "serials": [[p.engine, p.incarnation, p.rank, serial] for p, serial in snapshot.serials],
        "over": [[phase.name, count] for phase, count in kept.over],
        "evaluated": kept.evaluated,
        "violations": kept.violations,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    batch = codec.batch_to_bytes(entry for _, entry in snapshot.entries)
    return zlib.compress(_LENGTH.pack(len(text)) + text + batch, level=1)


def _kept_of(place: Place, body: bytes) -> Kept:
    plain = zlib.decompress(body)
    (size,) = _LENGTH.unpack_from(plain)
    text, batch = plain[_LENGTH.size : _LENGTH.size + size], plain[_LENGTH.size + size :]
    head = json.loads(text)
    entries = [codec.decode_entry(message) for message in codec.batch_from_bytes(batch)]
    snapshot = Snapshot(
        position=head["position"],
        time_ns=head["time_ns"],
        entries=tuple(zip(head["positions"], entries, strict=True)),
        serials=tuple(
            (Party(EngineId(engine), incarnation, rank), serial)
            for engine, incarnation, rank, serial in head["serials"]
        ),
    )
    over = tuple((Phase[name], count) for name, count in head["over"])
    return Kept(place, snapshot, over, head["evaluated"], head["violations"])


# --- Writing ----------------------------------------------------------------------------------


class IndexWriter:
    """A new index; it bears another name until it is finished."""

    def __init__(self, path: Path) -> None:
        """Begins empty; what an interrupted maker left is removed.  Raises OSError."""
        self._path = path
        self._unfinished = path.with_name(path.name + ".new")
        self._unfinished.unlink(missing_ok=True)
        # The system says what is wrong with a name; SQLite would not.
        self._unfinished.open("xb").close()
        self._file = sqlite3.connect(self._unfinished, isolation_level=None)
        # It can be made again, so nothing waits for the disk.
        self._file.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + TABLES)
        self._file.execute("BEGIN")
        self._rows: list[tuple[str, int, bytes]] = []

    def snapshot(self, kept: Kept) -> None:
        """One more snapshot, behind all others."""
        place, body = _place_text(kept.place), _body(kept)
        row = (kept.snapshot.position, place, body, _sum(place, body))
        self._file.execute("INSERT INTO snapshot VALUES (?, ?, ?, ?)", row)

    def request(self, name: RequestId, positions: Sequence[int]) -> None:
        """Where a request's entries are."""
        first = positions[0]
        others = array("I", [position - first for position in positions[1:]]).tobytes()
        self._rows.append((name, first, others))
        if len(self._rows) == 1024:
            self._flush()

    def late(self, name: RequestId, position: int) -> None:
        """Where another of them is, that came when its request was over."""
        self._file.execute("INSERT INTO late VALUES (?, ?)", (name, position))

    def refused(self, position: int, name: RequestId, *, first: bool) -> None:
        """An entry that broke a rule and changed nothing; whether it was its request's first."""
        self._file.execute("INSERT INTO refused VALUES (?, ?, ?)", (position, name, first))

    def finish(self, *, tool: str, entries: int, last: Place) -> None:
        """Under its own name on return.  Raises OSError."""
        self._flush()
        about = {
            "format": FORMAT,
            "version": VERSION,
            "tool": tool,
            "entries": entries,
            "last": _place_text(last),
        }
        self._file.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        self._file.execute("CREATE INDEX late_name ON late (name)")
        self._file.execute("CREATE INDEX refused_name ON refused (name)")
        self._file.execute("COMMIT")
        self._file.close()
        self._unfinished.replace(self._path)

    def give_up(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def _flush(self) -> None:
        self._file.executemany("INSERT INTO request VALUES (?, ?, ?)", self._rows)
        self._rows.clear()


# --- Reading ----------------------------------------------------------------------------------


class SeekIndex:
    """An index that is there; whether it is one of this log, its caller asks the log."""

    def __init__(self, path: Path) -> None:
        """Raises `UnusableIndex`."""
        self.path = path
        try:
            self._file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            about = dict(self._file.execute("SELECT name, value FROM about"))
            named = about.get("format"), about.get("version")
            if named != (FORMAT, VERSION):
                raise UnusableIndex(f"{path}: is {named[0]} {named[1]}, not {FORMAT} {VERSION}")
            self.last = _place_of(about["last"])
            self.entries = int(about["entries"])
        except (sqlite3.Error, KeyError, TypeError, ValueError) as error:
            raise UnusableIndex(f"{path}: is no index: {error}") from error

    def close(self) -> None:
        """Nothing can be asked any more."""
        self._file.close()

    def before(self, position: int) -> Kept | None:
        """The last snapshot that stands for nothing behind that position.  Raises `UnusableIndex`."""
        rows = self._rows(
            "SELECT place, body, sum FROM snapshot WHERE position <= ? "
            "ORDER BY position DESC LIMIT 1",
            position,
        )
        if not rows:
            return None
        place, body, checksum = rows[0]
        try:
            if _sum(place, body) != checksum:
                raise UnusableIndex(f"{self.path}: a snapshot's check sum does not match")
            return _kept_of(_place_of(place), body)
        except (
            ValueError,
            KeyError,
            TypeError,
            zlib.error,
            struct.error,
            codec.CodecError,
        ) as error:
            raise UnusableIndex(f"{self.path}: a snapshot cannot be read: {error}") from error

    def place_before(self, position: int) -> Place | None:
        """The last place behind which that position comes."""
        rows = self._rows(
            "SELECT place FROM snapshot WHERE position < ? ORDER BY position DESC LIMIT 1",
            position,
        )
        return _place_of(rows[0][0]) if rows else None

    def positions(self, name: str) -> list[int]:
        """Where the request's entries are, in their order; empty when there are none."""
        rows = self._rows("SELECT first, others FROM request WHERE name = ?", name)
        if not rows:
            return []
        first, packed = rows[0]
        others = array("I")
        others.frombytes(packed)
        late = self._rows("SELECT position FROM late WHERE name = ? ORDER BY position", name)
        return [first, *(first + other for other in others), *(position for (position,) in late)]

    def refused(self, name: str) -> dict[int, bool]:
        """Positions of the request's entries that broke a rule, and which was the first."""
        rows = self._rows("SELECT position, first FROM refused WHERE name = ?", name)
        return {position: bool(first) for position, first in rows}

    def names(self) -> Iterator[RequestId]:
        """Every request."""
        for (name,) in self._rows("SELECT name FROM request ORDER BY first"):
            yield RequestId(name)

    def _rows(self, question: str, *values: Any) -> list[Any]:
        try:
            return self._file.execute(question, values).fetchall()
        except sqlite3.Error as error:
            raise UnusableIndex(f"{self.path}: is no index: {error}") from error


def kept_entries(pairs: Iterable[Sequence[tuple[int, Entry]]]) -> list[tuple[int, Entry]]:
    """The entries of several requests in the log's order."""
    return sorted((pair for one in pairs for pair in one), key=lambda pair: pair[0])
