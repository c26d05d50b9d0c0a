"""A log read from Parquet, as a stream and as far as it says what is missing.

Owns: whether a file is such a log, and rows as entries again.
Must not know: what is looked for in the entries.

Parquet has neither check sums of its own nor a chain; what the writer said of both is in the
account, and is repeated, not proved again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.store import Stored
from lifecycle.events import Entry
from lifecycle.forensics_values import Missing
from lifecycle.ids import EngineId, Party
from lifecycle.snapshot import Snapshot
from lifecycle.wording import counted
from transport import parquet_schema as schema
from transport.codec_values import MalformedRecord
from transport.forensics_chain import Problem, Wrong
from transport.forensics_read import Capture
from transport.jsonlines import LogFile, UnknownRecord, UnreadableLog
from transport.parquet import MEANS, Means, connect, quoted

if TYPE_CHECKING:
    import duckdb

FETCHED_ROWS = 2_048


class ParquetCapture(Capture):
    """A Parquet file; `connection` and `path` are there for whoever asks it in SQL."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, path: Path) -> None:
        """Reads the metadata and the account.  Raises `UnreadableLog`."""
        self.connection = connection
        self.path = path
        told = self._metadata()
        super().__init__(foreign=told["foreign"] == "true", source=told["source"])
        self._columns = self._known_columns()
        self._account = self._read_account()
        account = self._account
        self.claims_whole = bool(account.get("claims_whole"))
        self.missing = _gaps(account.get("missing_before"))
        self._next = account.get("next_position", 1)
        kept = account.get("snapshot")
        if kept is not None:
            self.snapshot = self._snapshot_of(kept)

    @property
    def entries(self) -> int:
        """How many entries there are, as the account counts them."""
        counted = self._account.get("entries", 0)
        return int(counted)

    # --- What the file says of itself -----------------------------------------------------------

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Everything that a query finds.  Raises `UnreadableLog`."""
        import duckdb

        try:
            return self.connection.execute(query).fetchall()
        except duckdb.Error as error:
            raise UnreadableLog(0, f"{self.path}: {error}") from error

    def _metadata(self) -> dict[str, str]:
        import duckdb

        try:
            # The footer first: a file that was cut has none.
            self.connection.execute(f"SELECT * FROM {self.table()} LIMIT 0")
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise UnreadableLog(0, f"{self.path}: Parquet that cannot be read: {reason}") from error
        name = quoted(str(self.path))
        found = self.rows(f"SELECT key, value FROM parquet_kv_metadata({name})")
        told = {_text(key): _text(value) for key, value in found}
        if told.get("format") != schema.FORMAT:
            raise UnreadableLog(0, f'{self.path}: Parquet whose "format" is not "{schema.FORMAT}"')
        if told.get("version") != str(schema.VERSION):
            version = told.get("version")
            raise UnreadableLog(0, f"{self.path}: version {version!r} is not {schema.VERSION}")
        return {"source": "", "foreign": "", **told}

    def table(self) -> str:
        """The file in SQL, with `file_row_number` as the place of each row."""
        return f"read_parquet({quoted(str(self.path))}, file_row_number = true)"

    def _known_columns(self) -> list[str]:
        found = {name for name, *_ in self.rows(f"DESCRIBE SELECT * FROM {self.table()}")}
        needed = {*schema.HEAD_COLUMNS, "proposer", *schema.TAIL_COLUMNS}
        if lacking := sorted(needed - found):
            raise UnreadableLog(0, f"{self.path}: Parquet without the column {lacking[0]!r}")
        return [name for name in schema.columns() if name in found]

    def _read_account(self) -> Mapping[str, Any]:
        kind = quoted(schema.ACCOUNT)
        found = self.rows(f"SELECT document FROM {self.table()} WHERE record = {kind}")
        if len(found) != 1:
            self.notes.append(
                f"{len(found)} accounts of what is missing, where one is the last row"
            )
            return {}
        account = json.loads(found[0][0])
        assert isinstance(account, dict)
        return account

    def _snapshot_of(self, kept: Mapping[str, Any]) -> Snapshot:
        entries = tuple(self._entries(f"record = {quoted(schema.KEPT)}"))
        serials = tuple(
            (Party(EngineId(engine), incarnation, rank), serial)
            for engine, incarnation, rank, serial in kept["serials"]
        )
        return Snapshot(kept["position"], kept["time_ns"], entries, serials)

    # --- Entries --------------------------------------------------------------------------------

    def _read(self) -> Iterator[tuple[int, Entry]]:
        kinds = f"({quoted(schema.ENTRY)}, {quoted(schema.UNKNOWN)})"
        count = 0
        for position, entry in self._entries(f"record IN {kinds}"):
            count += 1
            yield position, entry
        self._settle(count)

    def _settle(self, count: int) -> None:
        """What the account adds to what was found, once every row was read."""
        account = self._account
        if not account.get("complete"):
            self.claims_whole = False
        if count != account.get("entries", count):
            self.claims_whole = False
            self.notes.append(
                f"{counted(count, 'entry')}, of which the account counts {account['entries']}"
            )
        told = _gaps(account.get("missing"))
        known = {(gap.first, gap.last) for gap in told}
        self.missing = told + [g for g in self.missing if (g.first, g.last) not in known]
        self.notes = [*account.get("notes", ()), *self.notes]
        self.problems = (
            [Problem(Wrong(wrong), *rest) for wrong, *rest in account["problems"]]
            if ("problems" in account)
            else []
        )
        head = account.get("head")
        self.head = None if head is None else bytes.fromhex(head)

    def entries_where(self, condition: str) -> Iterator[tuple[int, Entry]]:
        """Entries of which this is so, in the file's order, without a look at what is missing."""
        return self._entries(condition)

    def _entries(self, condition: str) -> Iterator[tuple[int, Entry]]:
        import duckdb

        names = self._columns
        at = {name: names.index(name) for name in names}
        events = {name: at[column] for name, column in schema.EVENT_COLUMNS.items() if column in at}
        query = f"SELECT {', '.join(names)} FROM {self.table()} WHERE {condition}"
        try:
            # A cursor of its own: others may ask while this one is read.
            cursor = self.connection.cursor().execute(query)
            while rows := cursor.fetchmany(FETCHED_ROWS):
                for row in rows:
                    found = self._entry(row, events, at)
                    if found is not None:
                        yield found
        except duckdb.Error as error:
            raise UnreadableLog(0, f"{self.path}: {error}") from error

    def _entry(
        self, row: tuple[Any, ...], events: Mapping[str, int], at: Mapping[str, int]
    ) -> tuple[int, Entry] | None:
        record, position, request, sequence, attempt, time_ns, name, proposer = row[:8]
        if record == schema.UNKNOWN:
            self._unreadable(_unknown_of(row, at))
            return None
        try:
            if name not in events:
                raise MalformedRecord("event", f"no event is called {name!r}")
            if position is None or proposer is None or row[events[name]] is None:
                raise MalformedRecord(name, "is missing")
            head = request, sequence, attempt, time_ns
            return position, schema.entry_of(head, proposer, name, row[events[name]])
        except MalformedRecord as error:
            said = {"request": request, "sequence": sequence, "position": position}
            self._unreadable(UnknownRecord(0, position, name or "", str(error), said))
            return None


def _unknown_of(row: tuple[Any, ...], at: Mapping[str, int]) -> UnknownRecord:
    document = json.loads(row[at["document"]])
    position = row[at["position"]]
    if position is None and type(document.get("position")) is int:
        position = document["position"]
    return UnknownRecord(
        row[at["line"]] or 0, position, row[at["event"]] or "", row[at["reason"]] or "", document
    )


def _gaps(found: Any) -> list[Missing]:
    return [Missing(first, last, reason) for first, last, reason in found or ()]


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def open_parquet(path: Path, stack: ExitStack, means: Means = MEANS) -> ParquetCapture:
    """The file as a capture.  Raises `NoParquet` or `UnreadableLog`."""
    connection = connect(means)
    stack.callback(connection.close)
    return ParquetCapture(connection, path)


def read_parquet(path: Path) -> LogFile:
    """The whole file at once.  Raises `NoParquet` or `UnreadableLog`."""
    with ExitStack() as stack:
        capture = open_parquet(path, stack)
        entries = tuple(Stored(position, entry) for position, entry in capture)
        return LogFile(
            entries=entries,
            foreign=capture.foreign,
            complete=capture.claims_whole and not capture.missing,
            unknown=tuple(capture.unknown),
            source=capture.source,
            snapshot=capture.snapshot,
        )
