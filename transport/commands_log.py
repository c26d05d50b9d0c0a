"""The verbs that look at logs: `log ls`, `log show`, `log tail`, `log export`.

Owns: where a log comes from (a scheduler or files).
Must not know: how entries are judged or worded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

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
    note,
    say,
    say_json,
    say_message,
    say_table,
)
from transport.progress import Reading

if TYPE_CHECKING:
    from engine.store import Stored
    from transport.pb.log_pb2 import RequestSummary

log_app = App(name="log", help="Look at an event log, check it, and write it in another form.")

Form = Literal["jsonl", "parquet"]
PhaseName = Literal["new", "rejected", "admitted", "decoding", "requeued", "ended", "closed"]
Wanted = Callable[["RequestSummary"], bool]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
    since: datetime | None = None,
    until: datetime | None = None,
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
    since
        Only requests that were not over before this date or time, in UTC if it says nothing else.
    until
        Only requests that began before this date or time.
    scheduler
        Address of a running scheduler.
    log
        Read this log folder or file instead of asking a scheduler.
    json
        Print JSON Lines, one request a line.
    """
    if limit is not None and limit < 0:
        raise UsageError(f"--limit {limit}: must not be negative")
    wanted = _wanted(phase, since, until)
    if log is not None:
        return _list_of(log, wanted, limit, json=json)
    with connect(scheduler, door) as client:
        _print_requests(filter(wanted, client.requests()), limit, json=json)
    return EXIT_OK


def _list_of(log: Path, wanted: Wanted, limit: int | None, *, json: bool) -> int:
    """The requests of a log, and on standard error what is missing from it."""
    from transport.commands_forensics import opened
    from transport.log_index import summaries
    from transport.replay_text import missing_lines

    with opened(log) as capture:
        with Reading(capture, shown=not json):
            found = tuple(islice(filter(wanted, summaries(capture)), limit))
        _print_requests(iter(found), limit, json=json)
        for line in () if capture.whole else missing_lines(capture):
            note(line)
        return EXIT_OK if capture.intact else EXIT_UNREADABLE


def _print_requests(requests: Iterator[RequestSummary], limit: int | None, *, json: bool) -> None:
    from transport import render

    for one in islice(requests, limit):
        if json:
            say_message(one, zeros=True)
        else:
            for line in render.request_lines(one):
                say(line)


def _wanted(phase: PhaseName | None, since: datetime | None, until: datetime | None) -> Wanted:
    from transport.pb.log_pb2 import Phase

    number = None if phase is None else Phase.Value(f"PHASE_{phase.upper()}")
    first_ns, stop_ns = _nanoseconds(since), _nanoseconds(until)
    if first_ns is not None and stop_ns is not None and stop_ns <= first_ns:
        raise UsageError(f"--until {until}: must be after --since {since}")

    def wanted(one: RequestSummary) -> bool:
        return (
            number in (None, one.phase)
            and (first_ns is None or one.last_time_ns >= first_ns)
            and (stop_ns is None or one.first_time_ns < stop_ns)
        )

    return wanted


def _nanoseconds(moment: datetime | None) -> int | None:
    """Since 1970; a moment without a zone is UTC, as all that is printed."""
    if moment is None:
        return None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return (moment - EPOCH) // timedelta(microseconds=1) * 1_000


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
    if log is not None:
        found = None if whole else _by_index(request, log)
        if found is None:
            return _show_of(log, request, json=json)
        _print_entries(request, found, json=json)
        return EXIT_OK
    with connect(scheduler, door) as client:
        _print_entries(request, client.request_log(request), json=json)
    return EXIT_OK


def _show_of(log: Path, request: str, *, json: bool) -> int:
    """The request's entries in a log, and on standard error what is missing from it."""
    from engine.store import Stored
    from transport.commands_forensics import opened
    from transport.explain import CANDIDATES_MAX
    from transport.replay_text import missing_lines

    with opened(log) as capture:
        others: deque[str] = deque(maxlen=CANDIDATES_MAX)
        found = [Stored(*one) for one in capture.opening() if one[1].request == request]
        with Reading(capture, shown=not json):
            for position, entry in capture:
                if entry.request == request:
                    found.append(Stored(position, entry))
                elif entry.sequence == 0:
                    others.append(entry.request)
        for line in () if capture.whole else missing_lines(capture):
            note(line)
        _print_entries(request, found, others, json=json)
        return EXIT_OK if capture.intact else EXIT_UNREADABLE


def _print_entries(
    request: str, entries: Sequence[Stored], others: Sequence[str] = (), *, json: bool
) -> None:
    """Raises `UnknownRequest`, which names those of the others that look like it."""
    from transport import jsonlines, render
    from transport.explain import near

    if not entries:
        raise UnknownRequest(request, near(request, others))
    if json:
        for one in entries:
            say_json(jsonlines.entry_object(one))
    else:
        say_table(render.log_table(entries))


def _by_index(request: str, log: Path) -> tuple[Stored, ...] | None:
    """The request's entries where an index says that they are, and whatever came since it."""
    from engine.store import Stored
    from transport.seek_index import UnusableIndex, index_path
    from transport.seeking import of_request
    from transport.uncollected import uncollected

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

    Foreign logs and logs with missing parts are written as what they are.

    Parameters
    ----------
    output
        The file to write; standard output if absent or "-".
    scheduler
        Address of a running scheduler.
    log
        Read this log folder or file instead of asking a scheduler.
    form
        jsonl for JSON Lines, or parquet, which needs the extra of that name and --output.
    json
        Say as JSON what was written as Parquet; JSON Lines are JSON in any case.
    """
    from transport.commands_convert import export_lines, export_parquet

    write = export_parquet if form == "parquet" else export_lines
    return write(output, scheduler=scheduler, door=door, log=log, json=json)
