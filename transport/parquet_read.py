"""A log read from Parquet, as a stream and as far as it says what is missing.

Owns: whether a file is such a log, and rows as entries again.
Must not know: what is looked for in the entries.

Parquet has neither check sums of its own nor a chain; what the writer said of both is in the
account, and is repeated, not proved again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from lifecycle.events import Entry
from lifecycle.forensics_values import Missing
from lifecycle.ids import EngineId, Party
from lifecycle.snapshot import Snapshot
from lifecycle.wording import counted
from transport import parquet_schema as schema
from transport.codec_values import MalformedRecord
from transport.forensics_chain import Problem, Wrong
from transport.forensics_read import Capture
from transport.jsonlines import UnknownRecord, UnreadableLog
from transport.parquet import MEANS, ONE_THREAD, Means, connect, quoted, signals_heard

if TYPE_CHECKING:
    import duckdb

FETCHED_ROWS = 2_048
PATTERN = frozenset("*?[]{}")
"""What makes a file's name a pattern."""
RECORDS = f"({quoted(schema.ENTRY)}, {quoted(schema.UNKNOWN)})"
"""What a log's own rows are, in its order."""


@attrs.frozen
class Account:
    """What the writer of a file said of the log: at its beginning, and at its end."""

    claims_whole: bool = False
    next_position: int = 1
    missing_before: tuple[Missing, ...] = ()
    snapshot: Snapshot | None = None
    entries: int | None = None
    complete: bool = False
    missing: tuple[Missing, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    head: bytes | None = None

    @classmethod
    def of(cls, document: str) -> Account:
        """Raises ValueError, TypeError or KeyError for what no writer of ours wrote."""
        said = json.loads(document)
        head, kept = said["head"], said["snapshot"]
        return cls(
            claims_whole=bool(said["claims_whole"]),
            next_position=int(said["next_position"]),
            missing_before=_gaps(said["missing_before"]),
            snapshot=None if kept is None else _snapshot(kept),
            entries=int(said["entries"]),
            complete=bool(said["complete"]),
            missing=_gaps(said["missing"]),
            notes=tuple(str(note) for note in said["notes"]),
            problems=tuple(Problem(Wrong(wrong), *rest) for wrong, *rest in said["problems"]),
            head=None if head is None else bytes.fromhex(head),
        )


def _snapshot(kept: Mapping[str, Any]) -> Snapshot:
    """Without its entries, which are rows of their own."""
    serials = tuple(
        (Party(EngineId(engine), incarnation, rank), serial)
        for engine, incarnation, rank, serial in kept["serials"]
    )
    return Snapshot(int(kept["position"]), int(kept["time_ns"]), serials=serials)


def _gaps(found: Sequence[Any]) -> tuple[Missing, ...]:
    return tuple(Missing(first, last, reason) for first, last, reason in found)


class ParquetCapture(Capture):
    """A Parquet file; `connection` and `path` are there for whoever asks it in SQL."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, path: Path, *, name: str | None = None
    ) -> None:
        """Reads the metadata and the account; `name` is how DuckDB finds it.

        Raises `UnreadableLog`.
        """
        self.connection = connection
        self.path = path
        self.name = str(path) if name is None else name
        told = self._metadata()
        super().__init__(foreign=told["foreign"] == "true", source=told["source"])
        self._columns = self._known_columns()
        self._at = {name: number for number, name in enumerate(self._columns)}
        self._events = {
            name: self._at[column]
            for name, column in schema.EVENT_COLUMNS.items()
            if column in self._at
        }
        self._accounts = self.rows(
            f"SELECT document FROM {self.table()} WHERE record = {quoted(schema.ACCOUNT)}"
        )
        self.account = self._read_account()
        if self.account.snapshot is not None:
            condition = f"record = {quoted(schema.KEPT)} ORDER BY file_row_number"
            entries = tuple(self._entries(connection, condition))
            snapshot = attrs.evolve(self.account.snapshot, entries=entries)
            self.account = attrs.evolve(self.account, snapshot=snapshot)
        self.begin_again()

    def begin_again(self) -> None:
        """As if nothing of it had been read yet."""
        super().__init__(foreign=self.foreign, source=self.source)
        self.claims_whole = self.account.claims_whole
        self.missing = list(self.account.missing_before)
        self.snapshot = self.account.snapshot
        self._next = self.account.next_position
        if len(self._accounts) != 1:
            reason = f"{counted(len(self._accounts), 'account')} of what is missing, not one"
            self.notes.append(reason)

    # --- What the file says of itself -----------------------------------------------------------

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Everything that a query finds.  Raises `UnreadableLog`."""
        import duckdb

        try:
            return self.connection.execute(query).fetchall()
        except duckdb.Error as error:
            raise UnreadableLog(0, f"{self.path}: {error}") from error

    def percent(self) -> float | None:
        """How much of the running query is done, as far as DuckDB knows; any thread may ask."""
        import duckdb

        try:
            percent: float = self.connection.query_progress()
        except duckdb.Error:
            return None
        return percent if percent >= 0 else None

    def _metadata(self) -> dict[str, str]:
        import duckdb

        try:
            # The footer first: a file that was cut has none.
            self.connection.execute(f"SELECT * FROM {self.table()} LIMIT 0")
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise UnreadableLog(0, f"{self.path}: Parquet that cannot be read: {reason}") from error
        name = quoted(self.name)
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
        return f"read_parquet({quoted(self.name)}, file_row_number = true)"

    def _known_columns(self) -> list[str]:
        found = {name for name, *_ in self.rows(f"DESCRIBE SELECT * FROM {self.table()}")}
        needed = {*schema.HEAD_COLUMNS, "proposer", *schema.TAIL_COLUMNS}
        if lacking := sorted(needed - found):
            raise UnreadableLog(0, f"{self.path}: Parquet without the column {lacking[0]!r}")
        return [name for name in schema.columns() if name in found]

    def _read_account(self) -> Account:
        if len(self._accounts) != 1:
            return Account()
        try:
            return Account.of(self._accounts[0][0])
        except (ValueError, TypeError, KeyError) as error:
            raise UnreadableLog(0, f"{self.path}: its account is malformed: {error!r}") from error

    # --- Entries --------------------------------------------------------------------------------

    def _read(self) -> Iterator[tuple[int, Entry]]:
        count = 0
        self.connection.execute(ONE_THREAD)
        # A cursor of its own: others may ask while this one is read.
        for position, entry in self._entries(self.connection.cursor(), f"record IN {RECORDS}"):
            count += 1
            yield position, entry
        # Who stops before the end asks nothing more, and may have closed the connection.
        self.connection.execute("RESET threads")
        self._settle(count)

    def _settle(self, count: int) -> None:
        """What the account adds to what was found, once every row was read."""
        account = self.account
        if not account.complete:
            self.claims_whole = False
        if account.entries is not None and count != account.entries:
            self.claims_whole = False
            self.notes.append(
                f"{counted(count, 'entry')}, and the account counts {account.entries}"
            )
        known = {(gap.first, gap.last) for gap in account.missing}
        found = [gap for gap in self.missing if (gap.first, gap.last) not in known]
        self.missing = [*account.missing, *found]
        self.notes = [*account.notes, *self.notes]
        self.problems = list(account.problems)
        self.head = account.head

    def survey(self) -> list[int]:
        """Find what is missing without reading entries; `whole` is known then.

        Returns the places before which something is missing, as `joined` would tell them.  Raises
        duckdb.Error where numbers are too large for it.
        """
        losses = [-1] if self.missing and self.snapshot is None else []
        count, entries, low, high = self.connection.execute(
            "SELECT count(*), count(*) FILTER (record = 'entry'), "
            "min(position::BIGINT - file_row_number), max(position::BIGINT - file_row_number) "
            f"FROM {self.table()} WHERE record IN {RECORDS}"
        ).fetchall()[0]
        start = len(self.opening())
        if count != entries or (low, high) != (self._next - start, self._next - start):
            self._breaks(losses)
        self._settle(entries)
        return losses

    def _breaks(self, losses: list[int]) -> None:
        """Look at every place at which positions do not go on by one, or say nothing."""
        found = self.connection.execute(
            "SELECT * FROM (SELECT file_row_number AS place, record, position::BIGINT AS position, "
            "time_ns::BIGINT AS time_ns, lag(record) OVER w AS before, "
            "lag(position::BIGINT) OVER w AS position_before, "
            "max(time_ns::BIGINT) FILTER (record = 'entry') OVER (ORDER BY file_row_number "
            "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS time_before, "
            f"line, event, reason, document FROM {self.table()} WHERE record IN {RECORDS} "
            "WINDOW w AS (ORDER BY file_row_number)) "
            "WHERE record = 'unknown' OR before IS NULL OR before = 'unknown' "
            "OR position <> position_before + 1 ORDER BY place"
        )
        at = {"position": 2, "line": 7, "event": 8, "reason": 9, "document": 10}
        while rows := found.fetchmany(FETCHED_ROWS):
            for row in rows:
                place, record, position, time_ns, before, position_before, time_before = row[:7]
                if before == schema.ENTRY and not self.foreign:
                    # Up to here positions went on by one.
                    self._next = max(self._next, position_before + 1)
                self._last_ns = max(self._last_ns, time_before or 0)
                known = len(self.missing) + len(self.unknown)
                if record == schema.UNKNOWN:
                    self._unreadable(_unknown_of(row, at))
                else:
                    self._place(position, time_ns)
                if len(self.missing) + len(self.unknown) > known:
                    losses.append(place)

    def placed(self, condition: str) -> Iterator[tuple[int, int, int, Entry]]:
        """Place, hash of the request, position and entry of the rows of which this is so."""
        condition = f"{condition} ORDER BY file_row_number"
        for row in self._rows(self.connection, condition):
            found = self._entry(row)
            if found is not None:
                yield (row[-1], row[-2], *found)

    def _entries(
        self, cursor: duckdb.DuckDBPyConnection, condition: str
    ) -> Iterator[tuple[int, Entry]]:
        for row in self._rows(cursor, condition):
            found = self._entry(row)
            if found is not None:
                yield found

    def _rows(self, cursor: duckdb.DuckDBPyConnection, condition: str) -> Iterator[tuple[Any, ...]]:
        """The known columns, the request's hash and the place, in the file's order."""
        import duckdb

        names = ", ".join([*self._columns, "hash(request)", "file_row_number"])
        query = f"SELECT {names} FROM {self.table()} WHERE {condition}"
        place = -1
        try:
            cursor.execute(query)
            while rows := cursor.fetchmany(FETCHED_ROWS):
                for row in rows:
                    if row[-1] <= place:
                        reason = f"row {row[-1]} came behind row {place}"
                        raise UnreadableLog(0, f"{self.path}: DuckDB lost the order: {reason}")
                    place = row[-1]
                    yield row
        except duckdb.Error as error:
            raise UnreadableLog(0, f"{self.path}: {error}") from error

    def _entry(self, row: tuple[Any, ...]) -> tuple[int, Entry] | None:
        events = self._events
        record, position, request, sequence, attempt, time_ns, name, proposer = row[:8]
        if record == schema.UNKNOWN:
            self._unreadable(_unknown_of(row, self._at))
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


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def open_parquet(path: Path, stack: ExitStack, means: Means = MEANS) -> ParquetCapture:
    """The file as a capture.  Raises `NoParquet` or `UnreadableLog`."""
    connection = connect(means)
    stack.callback(connection.close)
    stack.enter_context(signals_heard(connection))
    name = str(path)
    if set(name) & PATTERN:
        # A name is a pattern to DuckDB, and would find nothing, or other files.
        number = os.open(path, os.O_RDONLY)
        stack.callback(os.close, number)
        name = f"/dev/fd/{number}"
    return ParquetCapture(connection, path, name=name)
