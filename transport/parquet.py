"""A log written as Parquet: a stream of rows that DuckDB packs.

Owns: the connection to DuckDB, the file's metadata, and the account of what is missing, which is
the last row.
Must not know: how such a file is read, or what is asked of it.

The package is optional: without it every way in says which extra brings it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from lifecycle.forensics_values import Missing
from transport import parquet_schema as schema
from transport.forensics_read import Capture
from transport.json_values import NUMBER_MAX
from transport.jsonlines import UnknownRecord
from transport.partial import partial_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import duckdb

ONE_THREAD = "SET threads = 1"
"""Rows then come in the order in which they are read."""
FLUSH_BYTES = 1 << 18


class NoParquet(Exception):
    """Parquet cannot be read or written here: its package is not installed."""

    def __init__(self) -> None:
        super().__init__("Parquet needs the package duckdb, which the extra `parquet` brings")


class UnusableMeans(Exception):
    """DuckDB takes no such limit or folder."""


class NotWritten(OSError):
    """DuckDB could not write the file."""


@attrs.frozen
class Means:
    """What DuckDB may use: memory as it spells it ("4GB"), and a folder for what does not fit."""

    memory_limit: str | None = None
    temporary: Path | None = None


MEANS = Means()


def connect(means: Means = MEANS) -> duckdb.DuckDBPyConnection:
    """A database in memory.  Raises `NoParquet` or `UnusableMeans`."""
    try:
        import duckdb
    except ImportError as error:
        raise NoParquet from error
    connection = duckdb.connect(":memory:")
    # Nothing is fetched from anywhere; how far a query is can be asked, and is drawn by us alone.
    connection.execute("SET autoinstall_known_extensions = false")
    connection.execute("SET enable_progress_bar = true")
    connection.execute("SET enable_progress_bar_print = false")
    # DuckDB makes this folder when it needs it, and takes it away again; its own choice would be one
    # in the folder where the verb was started.  Nobody else can have made this one before.
    temporary = means.temporary or Path(tempfile.gettempdir()) / f"custody-{secrets.token_hex(8)}"
    try:
        connection.execute(f"SET temp_directory = {quoted(str(temporary))}")
        if means.memory_limit is not None:
            connection.execute(f"SET memory_limit = {quoted(means.memory_limit)}")
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise UnusableMeans(f"--memory-limit, --temporary: {reason}") from error
    return connection


@contextmanager
def signals_heard(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Raise what a signal's handler raised, for which DuckDB ends a query with another error."""
    raised: list[BaseException] = []

    def keeping(handler: Callable[[int, FrameType | None], Any]) -> Callable[..., Any]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                raised.append(error)
                connection.interrupt()
                raise

        return handle

    before = {}
    # Handlers run in the main thread, and only there they can be set.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, keeping(handler))
    try:
        yield
    except Exception as error:
        if raised:
            raise raised[0] from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def quoted(text: str) -> str:
    """As a string of SQL."""
    return "'" + text.replace("'", "''") + "'"


# --- Writing ----------------------------------------------------------------------------------


def write_parquet(capture: Capture, output: Path) -> int:
    """Write a capture, whatever it lacks.  Returns the entries written.

    Raises `NoParquet` or `NotWritten`; the output is there when all of it is.
    """
    with closing(connect()) as connection, partial_file(output) as path:
        # Entries are made by one thread in any case, and the order of rows hangs on nothing else.
        connection.execute(ONE_THREAD)
        return _copied(connection, capture, path)


def _copied(connection: duckdb.DuckDBPyConnection, capture: Capture, path: Path) -> int:
    """Rows go through a pipe: this thread makes them, DuckDB reads and packs them meanwhile."""
    source, sink = os.pipe()
    failed: list[Exception] = []

    def copy() -> None:
        try:
            connection.execute(_copy_statement(capture, source, path))
        except Exception as error:  # noqa: BLE001 - told where the rows come from
            failed.append(error)
        finally:
            # Whoever still writes is told that nobody reads any more.
            os.close(source)

    thread = threading.Thread(target=copy, name="parquet")
    thread.start()
    count = 0
    try:
        with os.fdopen(sink, "wb", buffering=FLUSH_BYTES) as stream:
            for so_far, line in _lines(capture):
                stream.write(line)
                count = so_far
    except BrokenPipeError as error:
        thread.join()
        raise _not_written(path, failed) from error
    finally:
        thread.join()
    if failed:
        raise _not_written(path, failed)
    return count


def _not_written(path: Path, failed: list[Exception]) -> NotWritten:
    reason = str(failed[0]) if failed else "DuckDB stopped reading"
    return NotWritten(f"{path}: {reason}")


def _copy_statement(capture: Capture, source: int, path: Path) -> str:
    columns = ", ".join(f"{quoted(n)}: {quoted(kind)}" for n, kind in schema.columns().items())
    options = copy_options(source=capture.source, foreign=capture.foreign)
    return (
        f"COPY (SELECT * FROM read_json('/dev/fd/{source}', format = 'newline_delimited', "
        f"columns = {{{columns}}})) TO {quoted(str(path))} {options}"
    )


def copy_options(*, source: str, foreign: bool) -> str:
    """How a table of this format is packed, and its metadata, in SQL."""
    metadata = {
        "format": schema.FORMAT,
        "version": str(schema.VERSION),
        "source": source,
        "foreign": str(foreign).lower(),
        "written_by": f"kv-custody {version('kv-custody')}",
    }
    whole = {name: value.encode(errors="replace").decode() for name, value in metadata.items()}
    pairs = ", ".join(f"{quoted(name)}: {quoted(value)}" for name, value in whole.items())
    return f"(FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2, KV_METADATA {{{pairs}}})"


def _lines(capture: Capture) -> Iterator[tuple[int, bytes]]:
    """How many entries there were so far, and each row as a line of JSON."""
    count = 0
    passed_over: list[UnknownRecord] = []
    capture.passing_over = passed_over.append
    beginning = _beginning(capture)
    for position, entry in capture.opening():
        yield count, _line(schema.row_of(position, entry, record=schema.KEPT))
    for position, entry in capture:
        # What could not be understood stands where it stood.
        while passed_over:
            yield count, _line(_unknown_row(passed_over.pop(0)))
        count += 1
        yield count, _line(schema.row_of(position, entry))
    for one in passed_over:
        yield count, _line(_unknown_row(one))
    document = json.dumps({**beginning, **_end(capture, count)})
    yield count, _line({"record": schema.ACCOUNT, "document": document})


def _line(row: dict[str, Any]) -> bytes:
    # Of a foreign name's halves of characters nothing is left; `document` has them as escapes.
    text = json.dumps(row, separators=(",", ":"), ensure_ascii=False)
    return (text + "\n").encode(errors="replace")


def _unknown_row(one: UnknownRecord) -> dict[str, Any]:
    row = {
        "record": schema.UNKNOWN,
        "event": one.name,
        "line": one.line,
        "reason": one.reason,
        "document": json.dumps(one.record),
    }
    # A position of a foreign record may be any number; the document has it in any case.
    if one.position is not None and 0 <= one.position <= NUMBER_MAX:
        row["position"] = one.position
    return row


def _beginning(capture: Capture) -> dict[str, Any]:
    """What is known of a capture before anything of it was read."""
    kept = capture.snapshot
    return {
        "claims_whole": capture.claims_whole,
        "next_position": capture.next_position,
        "missing_before": _gaps(capture.missing),
        "snapshot": None
        if kept is None
        else {
            "position": kept.position,
            "time_ns": kept.time_ns,
            "serials": [[*attrs.astuple(party), serial] for party, serial in kept.serials],
        },
    }


def _end(capture: Capture, entries: int) -> dict[str, Any]:
    """What a capture says of itself once everything was read."""
    return {
        "entries": entries,
        "complete": capture.claims_whole,
        "missing": _gaps(capture.missing),
        "notes": capture.notes,
        "problems": [[one.wrong.value, *attrs.astuple(one)[1:]] for one in capture.problems],
        "head": None if capture.head is None else capture.head.hex(),
    }


def _gaps(missing: list[Missing]) -> list[list[Any]]:
    return [[gap.first, gap.last, gap.reason] for gap in missing]
