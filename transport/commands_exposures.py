"""The verb `exposures`: who was exposed to whom, by the pass over entries or in SQL.

Owns: which of the two answers for which form of a log, and the exit code of what was found.
Must not know: how anything is found or worded.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from transport.commands_forensics import opened
from transport.commands_shared import (
    EXIT_FAILED,
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
from transport.progress import Asking, Reading

if TYPE_CHECKING:
    from lifecycle.forensics_values import Exposures
    from transport.forensics_read import Capture


def exposures(
    log: Path,
    /,
    *,
    reads: Switch = False,
    memory_limit: str | None = None,
    temporary: Path | None = None,
    json: Json = False,
) -> int:
    """Say who was exposed to whom; exits 0 nobody, 1 somebody, 5 nobody as far as the log goes.

    Parameters
    ----------
    log
        A folder of segments, one segment, JSON Lines or Parquet, also of another system;
        "-" reads JSON Lines from standard input.  Parquet is asked in SQL, which is faster and
        takes logs that are larger than memory.
    reads
        Print every run of tokens that was read and not written by its reader.
    memory_limit
        Memory that the database may use over Parquet, such as 4GB; four fifths of all if absent.
    temporary
        Folder for what does not fit into that memory; one of its own in the system's folder for
        temporary files if absent.
    json
        Print one JSON document, with every response and every read.
    """
    from transport import forensics_text

    capture, found = _asked(log, memory_limit, temporary, shown=not json)
    if json:
        say_json(forensics_text.exposures_object(capture, found))
    else:
        for line in forensics_text.exposure_lines(capture, found, reads=reads):
            say(line)
        if found.affected.most and not is_standard(log):
            note(f"`custody explain REQUEST --log {log}` tells the story of one of them")
            note(f"`custody bundle {log}` puts the evidence into one archive")
    if found.affected.most:
        return EXIT_FAILED
    return EXIT_OK if capture.whole else EXIT_UNREADABLE


def _asked(
    log: Path, memory_limit: str | None, temporary: Path | None, *, shown: bool
) -> tuple[Capture, Exposures]:
    """A log with what is found in it: by the pass over its entries, or in SQL."""
    from lifecycle.forensics_exposures import Inquiry
    from transport.aside import DiskAside
    from transport.replaying import found_in, inquired
    from transport.stores import segment_files

    if not is_standard(log) and segment_files.is_parquet(log):
        from transport.exposures_sql import exposures_of
        from transport.parquet import Means
        from transport.parquet_read import open_parquet

        with ExitStack() as stack:
            table = open_parquet(log, stack, Means(memory_limit, temporary))
            with Asking(table.percent, shown=shown) as asking:
                return table, exposures_of(table, told=asking.say).exposures
    if memory_limit is not None or temporary is not None:
        raise UsageError("--memory-limit and --temporary are for Parquet, which is asked in SQL")
    with opened(log) as capture:
        inquiry = Inquiry(from_the_beginning=capture.claims_whole, shelf=DiskAside())
        with Reading(capture, shown=shown):
            for _ in inquired(capture, inquiry):
                pass
            return capture, found_in(capture, inquiry)
