"""`log index`: make the file with which a long log is entered in its middle.

Owns: where the index is written, and the exit code of a log that gets none.
Must not know: what an index holds.
"""

from __future__ import annotations

from pathlib import Path

from lifecycle.wording import counted
from transport.commands_forensics import opened
from transport.commands_shared import (
    EXIT_OK,
    EXIT_UNREADABLE,
    Json,
    UsageError,
    note,
    say,
    say_json,
)


def index(log: Path, /, *, output: Path | None = None, json: Json = False) -> int:
    """Replay a log once and keep a snapshot every few thousand entries, for seeking in it later.

    Exits 0 when the index was written, also of a log that broke rules, and 5 when the log is
    damaged or has gaps, which gets no index.

    Parameters
    ----------
    log
        A folder of segments.
    output
        The index; `seek.index` in the log's folder if absent.
    json
        Print one JSON document.
    """
    from importlib.metadata import version

    from transport.forensics_read import SegmentCapture
    from transport.progress import Reading
    from transport.seek_build import NotIndexed, build
    from transport.seek_index import index_path

    path = output if output is not None else index_path(log)
    with opened(log) as capture:
        if not log.is_dir() or not isinstance(capture, SegmentCapture):
            raise UsageError(f"{log}: only a folder of segments can be entered in its middle")
        try:
            with Reading(capture, shown=not json):
                built = build(capture, path, tool=f"custody {version('kv-custody')}")
        except NotIndexed as error:
            note(f"custody: {log}: {error}")
            return EXIT_UNREADABLE
    size = path.stat().st_size
    if json:
        written = {
            "index": str(path),
            "bytes": size,
            "entries": built.entries,
            "last_position": built.last.last,
            "head": built.last.digest.hex(),
            "snapshots": built.snapshots,
            "violations": built.violations,
        }
        say_json(written)
    else:
        say(
            f"{counted(built.entries, 'entry')} to position {built.last.last}, "
            f"{counted(built.snapshots, 'snapshot')}, {counted(built.violations, 'violation')}; "
            f"{counted(size, 'byte')} written to {path}"
        )
        say(f"chain ends with {built.last.digest.hex()}")
    return EXIT_OK
