"""The verbs that turn a log's forms into one another: `log import`, `log export` to Parquet, and
`log schema` of a form.

Owns: which form is written where.
Must not know: the forms.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lifecycle.wording import counted
from transport.commands_forensics import log_or_scheduler, opened
from transport.commands_log import log_app
from transport.commands_shared import (
    EXIT_OK,
    EXIT_UNREADABLE,
    Json,
    Switch,
    UsageError,
    is_standard,
    note,
    say,
    say_json,
)

if TYPE_CHECKING:
    from transport.convert import Recorded
    from transport.forensics_read import Capture
    from transport.jsonlines import UnknownRecord
    from transport.settings import CallSettings

READABLE = ("request", "sequence", "attempt", "time_ns")
"""What a record of which only the bytes are kept says of itself."""

__all__ = ["export_lines", "export_parquet", "import_log", "log_app", "schema"]


@log_app.command
def schema(*, sql: Switch = False, json: Switch = False) -> int:  # noqa: ARG001 - accepted everywhere; a schema is JSON
    """Print the JSON Schema of a line of JSON Lines, or the views in SQL over a log as Parquet.

    Parameters
    ----------
    sql
        Print the script that `exposures` runs in DuckDB, which needs the variable `log` alone.
    json
        Accepted everywhere; a schema is JSON in any case.
    """
    import json as json_module

    from transport.json_schema import line_schema

    if sql:
        from transport.exposures_sql import script

        for line in script().splitlines():
            say(line)
        return EXIT_OK
    for line in json_module.dumps(line_schema(), indent=1).splitlines():
        say(line)
    return EXIT_OK


@log_app.command(name="import")
def import_log(file: Path, /, *, output: Path, json: Json = False) -> int:
    """Write a log as segment files, with check sums and a chain of hashes made anew.

    Parameters
    ----------
    file
        JSON Lines or Parquet of our own, whole; "-" reads JSON Lines from standard input.
    output
        The folder for the segments, which must be absent or empty.
    json
        Print one JSON document.
    """
    from transport.convert import import_entries
    from transport.partial import partial_folder
    from transport.progress import Reading

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output}: is there already, and is no empty folder")
    with opened(file) as capture:
        if capture.foreign:
            raise UsageError(f"{file} is a foreign log; segments would pass it off as our own")
        left_out: list[UnknownRecord] = []
        with Reading(capture, shown=not json), partial_folder(output) as folder:
            count, head = import_entries(_recorded(capture, left_out), folder)
            _expect_whole(capture, left_out)
        if json:
            written = {
                "output": str(output),
                "entries": count,
                "head": head.hex(),
                "complete": capture.whole,
            }
            say_json(written)
        else:
            say(f"{counted(count, 'entry')} written to {output}; the chain ends with {head.hex()}")
            for one in capture.unknown:
                say(f"not understood, and kept as it is: {_place(one)}: {one.reason}")
        return EXIT_OK if capture.whole else EXIT_UNREADABLE


def _place(one: UnknownRecord) -> str:
    return f"line {one.line}" if one.line else f"position {one.position}"


def _expect_whole(capture: Capture, left_out: list[UnknownRecord]) -> None:
    """Raises `IncompleteLog`, for what is missing at the end nobody would miss."""
    from transport.chain_problems import Wrong
    from transport.convert import IncompleteLog
    from transport.forensics_read import LinesCapture
    from transport.verify_text import problem_line

    gone = [f"positions {gap.first} to {gap.last} are missing" for gap in capture.missing]
    gone += [f"{_place(one)}: {one.reason}" for one in left_out]
    # A clock that went back took nothing away.
    gone += [problem_line(one) for one in capture.problems if one.wrong is not Wrong.CLOCK]
    if not capture.claims_whole and (isinstance(capture, LinesCapture) or not capture.problems):
        gone += [*capture.notes, "its header says that it is not complete"]
    if gone:
        raise IncompleteLog(gone[0])


def _recorded(capture: Capture, left_out: list[UnknownRecord]) -> Iterator[tuple[int, Recorded]]:
    """Every entry, and every record of a later version whose bytes are known, in their order."""
    passed_over: list[UnknownRecord] = []
    capture.passing_over = passed_over.append
    for position, entry in capture:
        yield from _verbatim(passed_over, left_out)
        yield position, entry
    yield from _verbatim(passed_over, left_out)


def _verbatim(
    passed_over: list[UnknownRecord], left_out: list[UnknownRecord]
) -> Iterator[tuple[int, Recorded]]:
    """The records of which somebody kept the bytes, in place of what they say."""
    from google.protobuf.message import DecodeError

    from transport.pb import lifecycle_pb2 as pb

    while passed_over:
        one = passed_over.pop(0)
        kept, message = one.record.get("bytes"), pb.Entry()
        try:
            message.ParseFromString(bytes.fromhex(kept if isinstance(kept, str) else ""))
        except (ValueError, DecodeError):
            kept = None
        # What stands beside the bytes is what people read, so both have to agree.
        agree = all(one.record.get(name) == getattr(message, name) for name in READABLE)
        if kept and agree and one.position is not None:
            yield one.position, message
        else:
            left_out.append(one)


def export_lines(
    output: Path | None, *, scheduler: str, door: CallSettings, log: Path | None, json: bool
) -> int:
    """`log export` as JSON Lines: exits 0, or 5 when more is missing than what was dropped."""
    from transport.lines_file import no_lines
    from transport.partial import partial_file
    from transport.progress import Reading
    from transport.replay_text import missing_lines

    with log_or_scheduler(log, scheduler, door) as capture, no_lines() as lines:
        with Reading(capture, shown=not json):
            lines.read(capture)
        if output is None or is_standard(output):
            lines.write(capture, sys.stdout)
        else:
            with partial_file(output) as path, path.open("w", encoding="utf-8", newline="") as out:
                lines.write(capture, out)
        for line in missing_lines(capture):
            note(line)
        if lines.left_out:
            note(f"left out, for nothing could be read of it: {lines.left_out}")
        if output is not None and not is_standard(output):
            note(f"{counted(lines.entries, 'entry')} written to {output}")
        return EXIT_OK if capture.intact else EXIT_UNREADABLE


def export_parquet(
    output: Path | None, *, scheduler: str, door: CallSettings, log: Path | None, json: bool
) -> int:
    """`log export --format parquet`: exits as for JSON Lines."""
    if output is None or is_standard(output):
        raise UsageError("--format parquet: name the file with --output; it is no stream")
    from transport.parquet import write_parquet
    from transport.progress import Reading

    with log_or_scheduler(log, scheduler, door) as capture:
        with Reading(capture, shown=not json):
            count = write_parquet(capture, output)
        size = output.stat().st_size
        if json:
            written = {
                "output": str(output),
                "entries": count,
                "unknown": len(capture.unknown),
                "bytes": size,
                "complete": capture.whole,
            }
            say_json(written)
        else:
            say(f"{counted(count, 'entry')} written to {output}, {size} bytes")
            for one in capture.missing:
                last = "an unknown end" if one.last is None else one.last
                say(
                    f"missing, which the file says too: positions {one.first} to {last}: {one.reason}"
                )
            if capture.unknown:
                say(f"kept as they are, for they could not be understood: {len(capture.unknown)}")
        return EXIT_OK if capture.intact else EXIT_UNREADABLE
