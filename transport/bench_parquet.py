"""How fast a log as Parquet is asked: the part of `custody bench forensics` that needs DuckDB.

Owns: a table of any length, made of one log again and again, and what is timed over it.
Must not know: how anything is judged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from lifecycle.ids import EPOCH_DIGITS, FLEET, SERIAL_DIGITS
from transport import exposures_sql
from transport import parquet_schema as schema
from transport.forensics_read import open_capture
from transport.parquet import MEANS, Means, connect, copy_options, quoted, write_parquet
from transport.parquet_read import open_parquet
from transport.uncollected import uncollected

if TYPE_CHECKING:
    import duckdb

COPIES_MOST = 40
"""Copies that one statement makes; a longer table is made in several rounds."""
COPY_SUFFIX = ".copy"


@attrs.frozen
class Timed:
    """One thing that was timed: on the clock, and as processor time of all threads."""

    name: str
    wall_seconds: float
    cpu_seconds: float
    entries: int

    def document(self) -> dict[str, Any]:
        """As JSON, with its rate on the clock."""
        return {
            "name": self.name,
            "entries": self.entries,
            "wall_seconds": round(self.wall_seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "entries_per_second": round(self.entries / self.wall_seconds),
        }


def _timed(name: str, entries: int, run: Callable[[], object]) -> Timed:
    wall, used = time.perf_counter(), time.process_time()
    run()
    return Timed(name, time.perf_counter() - wall, time.process_time() - used, entries)


def measured(folder: Path, table: Path, entries: int, means: Means = MEANS) -> Iterator[Timed]:
    """A log of segments written as Parquet, read as entries again, and asked in SQL."""

    def export() -> None:
        with ExitStack() as stack, uncollected():
            write_parquet(open_capture(folder, stack), table)

    def read() -> None:
        with ExitStack() as stack, uncollected():
            for _ in open_parquet(table, stack):
                pass

    yield _timed("parquet_export", entries, export)
    yield _timed("parquet_read", entries, read)
    yield asked(table, entries, means)


def asked(table: Path, entries: int, means: Means) -> Timed:
    """`exposures` over a table in which nobody was exposed."""

    def ask() -> None:
        with ExitStack() as stack:
            answered = exposures_sql.exposures_of(open_parquet(table, stack, means))
            found = answered.exposures
            assert answered.sql
            assert found.entries == entries
            assert found.whole
            assert found.affected.most == 0

    return _timed("parquet_exposures", entries, ask)


# --- A table of any length ----------------------------------------------------------------------


@attrs.frozen
class _Base:
    """What a copy is moved by: entries that are no fleet's, time, and serials of requests."""

    entries: int
    fleet: int
    span_ns: int
    serials: int
    account: str


def repeated(base: Path, table: Path, rows: int, means: Means = MEANS) -> int:
    """Write a table's entries again and again as later requests; returns how many there are then.

    Pages and tokens are as legal as those of the log, and that is what `exposures` reads;
    proposals and grants repeat their numbers.  The result has at least so many rows.
    """
    with closing(connect(means)) as connection:
        made, count = base, _read_base(connection, base).entries
        rounds = 0
        while count < rows:
            about = _read_base(connection, made)
            copies = min(COPIES_MOST, -(-(rows - about.fleet) // (about.entries - about.fleet)))
            rounds += 1
            target = table.with_name(f"{table.name}.{rounds}")
            connection.execute(_copies(made, target, about, copies))
            for name in table.parent.glob(f"*{COPY_SUFFIX}"):
                name.unlink()
            if made != base:
                made.unlink()
            made = target
            count = about.fleet + copies * (about.entries - about.fleet)
        if made != base:
            made.replace(table)
        return count


def _read_base(connection: duckdb.DuckDBPyConnection, path: Path) -> _Base:
    source = f"read_parquet({quoted(str(path))})"
    ((entries, fleet, span_ns, serials),) = connection.execute(
        f"SELECT count(*), count(*) FILTER (request = {quoted(FLEET)}), "
        "max(time_ns) - min(time_ns) + 1, "
        f"max(('0x' || request[-{SERIAL_DIGITS}:])::BIGINT) "
        f"FROM {source} WHERE record = {quoted(schema.ENTRY)}"
    ).fetchall()
    (account,) = connection.execute(
        f"SELECT document FROM {source} WHERE record = {quoted(schema.ACCOUNT)}"
    ).fetchall()
    return _Base(entries, fleet, span_ns, serials, account[0])


def _copies(source: Path, target: Path, about: _Base, copies: int) -> str:
    """The statement that writes so many copies, and their account as the last row.

    Each copy is the file by a name of its own, for one scan of many files keeps their order, which
    a union of scans was seen to lose.
    """
    names = []
    for number in range(copies):
        name = target.with_name(f"{target.name}.{number}{COPY_SUFFIX}")
        name.symlink_to(source)
        names.append(quoted(str(name)))
    entries = about.fleet + copies * (about.entries - about.fleet)
    account = {**json.loads(about.account), "entries": entries, "head": None}
    start, copy = EPOCH_DIGITS + 1, "copy"
    moved = {
        "position": f"(position + {copy} * {about.entries - about.fleet})::UBIGINT",
        "time_ns": f"(time_ns + {copy} * {about.span_ns})::UBIGINT",
        "request": f"CASE request WHEN {quoted(FLEET)} THEN request ELSE request[:{start}] || "
        f"printf('%0{SERIAL_DIGITS}x', ('0x' || request[-{SERIAL_DIGITS}:])::BIGINT "
        f"+ {copy} * {about.serials}) END",
        "finished": "CASE WHEN finished IS NOT NULL THEN struct_update(finished, first_token_ns := "
        f"(finished.first_token_ns + {copy} * {about.span_ns})::UBIGINT) END",
        "document": f"CASE record WHEN {quoted(schema.ACCOUNT)} "
        f"THEN {quoted(json.dumps(account))} END",
    }
    columns = ", ".join(
        f"{moved[name]} AS {name}" if name in moved else name for name in schema.columns()
    )
    return (
        f"COPY (SELECT {columns} FROM (SELECT *, regexp_extract(filename, "
        f"'([0-9]+){COPY_SUFFIX}$', 1)::BIGINT AS copy "
        f"FROM read_parquet([{', '.join(names)}], filename = true)) "
        f"WHERE (copy = 0 OR request <> {quoted(FLEET)} OR request IS NULL) "
        f"AND (record = {quoted(schema.ENTRY)} OR copy = {copies - 1})) "
        f"TO {quoted(str(target))} {copy_options(source='custody', foreign=False)}"
    )
