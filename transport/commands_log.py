"""The verbs that look at logs: `log ls`, `log show`, `log tail`, `log export`.

Owns: where a log comes from (a scheduler or files).
Must not know: how entries are judged or worded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from lifecycle.wording import counted
from transport.commands_shared import (
    CALL,
    DEFAULT_SCHEDULER,
    EXIT_OK,
    EXIT_UNREADABLE,
    Door,
    Json,
    SchedulerAddress,
    Switch,
    UsageError,
    connect,
    is_standard,
    note,
    say,
    say_json,
    say_message,
    say_table,
)
from transport.progress import Reading, Waiting, on_terminal

if TYPE_CHECKING:
    from engine.store import Stored
    from transport.pb.log_pb2 import RequestSummary
    from transport.settings import CallSettings

log_app = App(name="log", help="Look at an event log, check it, and write it in another form.")

Form = Literal["jsonl", "parquet"]
PhaseName = Literal["new", "rejected", "admitted", "decoding", "requeued", "ended", "closed"]


class UnknownRequest(Exception):
    """No entry has this request's id; `near` are ids that look like it."""

    def __init__(self, request: str, near: Sequence[str] = ()) -> None:
        hint = f"; near it are {', '.join(near)}" if near else ""
        super().__init__(f"the log holds no entry of request {request}{hint}")
        self.request = request
        self.near = tuple(near)


@log_app.command(name="ls")
def list_requests(
    *,
    limit: int | None = None,
    phase: PhaseName | None = None,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    log: Path | None = None,
    json: Json = False,
) -> int:
    """List requests in the order of their first entries, two lines each.

    The first says what became of it, the second when it began, how long it took, and where its
    entries stand.

    Parameters
    ----------
    limit
        Most requests to list; all if absent.
    phase
        Only requests in this phase.
    scheduler
        Address of a running scheduler.
    log
        Read this log folder or file instead of asking a scheduler.
    json
        Print JSON Lines, one request a line.
    """
    if limit is not None and limit < 0:
        raise UsageError(f"--limit {limit}: must not be negative")
    if log is not None:
        return _list_of(log, phase, limit, json=json)
    with connect(scheduler, door) as client:
        _print_requests(_in_phase(client.requests(), phase), limit, json=json)
    return EXIT_OK


def _list_of(log: Path, phase: PhaseName | None, limit: int | None, *, json: bool) -> int:
    """The requests of a log, and on standard error what is missing from it."""
    from transport.commands_forensics import opened
    from transport.log_index import summaries
    from transport.replay_text import missing_lines

    with opened(log) as capture:
        with Reading(capture, shown=not json):
            found = tuple(islice(_in_phase(summaries(capture), phase), limit))
        _print_requests(iter(found), limit, json=json)
        for line in () if capture.whole else missing_lines(capture):
            note(line)
        # A beginning that was dropped on purpose is told, and is no damage.
        dropped = capture.snapshot is not None and not capture.damaged
        return EXIT_OK if capture.whole or dropped else EXIT_UNREADABLE


def _reading(log: Path, *, json: bool) -> Waiting:
    """Shown while a whole log is read at once."""
    return Waiting(f"reading {log}", shown=on_terminal() and not json)


def _print_requests(requests: Iterator[RequestSummary], limit: int | None, *, json: bool) -> None:
    from transport import render

    for one in islice(requests, limit):
        if json:
            say_message(one, zeros=True)
        else:
            for line in render.request_lines(one):
                say(line)


def _in_phase(
    requests: Iterator[RequestSummary], phase: PhaseName | None
) -> Iterator[RequestSummary]:
    from transport.pb.log_pb2 import Phase

    if phase is None:
        return requests
    wanted = Phase.Value(f"PHASE_{phase.upper()}")
    return (one for one in requests if one.phase == wanted)


@log_app.command
def tail(
    *,
    position: Annotated[int | None, Parameter(name="--from")] = None,
    follow: Switch = False,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """Print the log from a position on, an entry a line.

    Parameters
    ----------
    position
        The first position to print; where the log begins if absent.
    follow
        Wait for more at the end, until interrupted.
    scheduler
        Address of a running scheduler.
    json
        Print JSON Lines, one entry a line.
    """
    from transport import jsonlines, render

    if position is not None and position < 1:
        raise UsageError(f"--from {position}: positions begin at 1")
    with (
        connect(scheduler, door) as client,
        closing(client.tail(position or 0, follow=follow)) as entries,
    ):
        for one in entries:
            if json:
                say_json(jsonlines.entry_object(one))
            else:
                say(render.entry_line(one))
    return EXIT_OK


@log_app.command
def show(
    request: str,
    /,
    *,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    log: Path | None = None,
    whole: Switch = False,
    json: Json = False,
) -> int:
    """Print every entry of one request.

    Parameters
    ----------
    request
        The request's id.
    scheduler
        Address of a running scheduler.
    log
        Read this log folder or file instead of asking a scheduler.
    whole
        Use no index of the log: read all of it.
    json
        Print JSON Lines, one entry a line.
    """
    from transport import jsonlines, render

    with _reading(log, json=json) if log is not None else nullcontext():
        entries = _of_request(request, scheduler=scheduler, door=door, log=log, whole=whole)
    if json:
        for one in entries:
            say_json(jsonlines.entry_object(one))
    else:
        say_table(render.log_table(entries))
    return EXIT_OK


def _of_request(
    request: str, *, scheduler: str, door: CallSettings, log: Path | None, whole: bool
) -> tuple[Stored, ...]:
    if log is None:
        with connect(scheduler, door) as client:
            entries = client.request_log(request)
    elif not whole and (found := _by_index(request, log)) is not None:
        entries = found
    else:
        from transport.jsonlines import read_log

        entries = tuple(one for one in read_log(log).entries if one.entry.request == request)
    if not entries:
        raise UnknownRequest(request)
    return entries


def _by_index(request: str, log: Path) -> tuple[Stored, ...] | None:
    """The request's entries where an index says that they are, and whatever came since it."""
    from engine.store import Stored
    from transport.forensics_read import uncollected
    from transport.seek_index import UnusableIndex, index_path
    from transport.seeking import of_request

    if not log.is_dir() or not index_path(log).exists():
        return None
    try:
        with uncollected():
            found, last = of_request(log, request)
    except UnusableIndex as error:
        note(f"the index is not used, everything is read: {error}")
        return None
    note(f"by the index {index_path(log)}: of positions 1 to {last} only this request's were read")
    return tuple(Stored(position, entry) for position, entry in found)


@log_app.command
def export(
    *,
    output: Path | None = None,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    log: Path | None = None,
    form: Annotated[Form, Parameter(name="--format")] = "jsonl",
    json: Switch = False,
) -> int:
    """Write the whole log as JSON Lines, version 1, or as Parquet.

    Parameters
    ----------
    output
        The file to write; standard output if absent or "-".
    scheduler
        Address of a running scheduler.
    log
        Read this log folder or file instead of asking a scheduler.
    form
        jsonl for JSON Lines, or parquet, which needs the extra of that name; Parquet needs --output,
        and takes in foreign logs and logs with missing parts as what they are.
    json
        Say as JSON what was written as Parquet; JSON Lines are JSON in any case.
    """
    if form == "parquet":
        from transport.commands_convert import export_parquet

        return export_parquet(output, scheduler=scheduler, door=door, log=log, json=json)
    from transport.jsonlines import write_jsonlines

    with _reading(log, json=json) if log is not None else nullcontext():
        entries, complete = _whole(scheduler=scheduler, door=door, log=log)
    if entries and entries[0].position > 1:
        missing = f"positions 1 to {entries[0].position - 1} are not in this export"
        note(f"{missing}; a snapshot that stands for them stays in the log's folder")
    if output is None or is_standard(output):
        write_jsonlines(sys.stdout, entries, complete=complete)
        sys.stdout.flush()
    else:
        writing = Waiting(f"writing {output}", shown=on_terminal() and not json)
        with output.open("w", encoding="utf-8") as stream, writing:
            write_jsonlines(stream, entries, complete=complete)
        note(f"{counted(len(entries), 'entry')} written to {output}")
    return EXIT_OK


def _whole(
    *, scheduler: str, door: CallSettings, log: Path | None
) -> tuple[tuple[Stored, ...], bool]:
    """All entries that are to be had, and whether nothing is missing."""
    if log is None:
        with connect(scheduler, door) as client:
            entries = tuple(client.tail())
        return entries, not entries or entries[0].position == 1
    from transport.jsonlines import read_log

    file = read_log(log)
    if file.foreign:
        raise UsageError(f"{log} is a foreign log; an export would pass it off as our own")
    for one in file.unknown:
        note(f"left out, for its event is unknown: position {one.position}: {one.reason}")
    return file.entries, file.complete and not file.unknown
