"""The verbs of an inquiry into a captured log: `replay`, `exposures` and those beside them.

Owns: where the log comes from, and the exit code of what was found.
Must not know: how anything is found or worded.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lifecycle.ids import RequestId
from lifecycle.wording import counted
from transport.commands_log import UnknownRequest
from transport.commands_shared import (
    CALL,
    DEFAULT_SCHEDULER,
    EXIT_FAILED,
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
)
from transport.progress import Reading

if TYPE_CHECKING:
    from transport.forensics_read import Capture
    from transport.settings import CallSettings

From = Annotated[int | None, Parameter(name="--from")]
"""The first position that is looked at."""
Requests = Annotated[tuple[str, ...], Parameter(negative="")]
"""Requests that are looked at alone."""
Index = Annotated[Path | None, Parameter(name="--index")]
"""The index of a log that does not lie beside it."""
HASH_BYTES = 32


@contextmanager
def opened(log: Path) -> Iterator[Capture]:
    """The log as a stream; "-" is JSON Lines from standard input."""
    from transport.forensics_read import open_capture, open_lines
    from transport.uncollected import uncollected

    with ExitStack() as stack, uncollected():
        if is_standard(log):
            yield open_lines(sys.stdin.buffer)
        else:
            yield open_capture(log, stack)


def expect_known(request: str, known: Collection[str]) -> None:
    """Raises `UnknownRequest` with ids that look like it."""
    if request not in known:
        from transport.explain import near

        raise UnknownRequest(request, near(request, known))


def replay(
    file: Path | None = None,
    /,
    *,
    request: str | None = None,
    at: int | None = None,
    first: From = None,
    to: int | None = None,
    follow: Switch = False,
    index: Index = None,
    whole: Switch = False,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """Replay a log or a trace against every rule; exits 0 clean, 1 violations, 5 incomplete.

    Parameters
    ----------
    file
        A folder of segments, one segment, JSON Lines or Parquet, also of another system, or a
        trace of a search; "-" reads JSON Lines from standard input.
    request
        Show only what this request did wrong, and its state at the end.
    at
        Stop behind this position and show engines, pages and open requests as they were then.
    first
        Show only violations from this position on; everything before is replayed, or known from
        the log's index.
    to
        Show only violations up to this position; with --follow, end there.
    follow
        Replay a running scheduler's log and go on with it, printing violations as they come.
    index
        The log's index, where it does not lie beside the log; see `log index`.
    whole
        Use no index: read and judge everything from the beginning.
    scheduler
        Address of the scheduler that is followed.
    json
        Print one JSON document; with --follow, each violation and then the document.
    """
    for name, position in (("--at", at), ("--from", first), ("--to", to)):
        if position is not None and position < 1:
            raise UsageError(f"{name} {position}: positions begin at 1")
    if follow and (file is not None or at is not None or index is not None):
        raise UsageError("--follow asks a scheduler; it takes neither a file, --at nor --index")
    if whole and index is not None:
        raise UsageError("--whole uses no index, and --index names one")
    if follow:
        from transport.commands_follow import follow as go_on

        return go_on(scheduler, door, request=request, first=first, to=to, json=json)
    if file is None:
        raise UsageError("name a FILE, or --follow a running scheduler")
    from transport.fuzz_files import is_trace

    narrowed = not (request is None and at is None and first is None and to is None)
    if not is_standard(file) and is_trace(file):
        from transport.fuzz_replay import replay_trace

        if narrowed:
            raise UsageError("--request, --at, --from and --to look at logs; this is a trace")
        return replay_trace(file, json=json)
    from transport.commands_replay import replay_file

    return replay_file(
        file, request=request, at=at, first=first, to=to, index=index, whole=whole, json=json
    )


def explain(
    request: str,
    /,
    *,
    log: Path | None = None,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """Tell one request's story in plain sentences, and whether its client was told the truth.

    Parameters
    ----------
    request
        The request's id.
    log
        Read this log folder or file, also of another system, instead of asking a scheduler.
    scheduler
        Address of a running scheduler.
    json
        Print one JSON document.
    """
    from transport import explain as stories

    with log_or_scheduler(log, scheduler, door) as capture:
        try:
            with Reading(capture, shown=not json):
                story = stories.explain(RequestId(request), capture)
        except stories.NotInLog as error:
            raise UnknownRequest(request, error.near) from error
        if json:
            say_json(stories.explanation_object(story))
        else:
            for line in stories.explanation_lines(story):
                say(line)
        return EXIT_OK if capture.whole else EXIT_UNREADABLE


def timeline(
    log: Path,
    /,
    *,
    output: Path = Path("timeline.html"),
    perfetto: Path | None = None,
    request: Requests = (),
    limit: int = 10_000,
    json: Json = False,
) -> int:
    """Draw a log as one HTML file that needs no network, and as a Perfetto trace if wanted.

    Parameters
    ----------
    log
        A folder of segments, one segment, JSON Lines or Parquet, also of another system;
        "-" reads JSON Lines from standard input.
    output
        The HTML file.
    perfetto
        A file for Perfetto's viewer, with flow arrows from prefill to decode.
    request
        Draw only this request; may be given several times.
    limit
        Most entries to draw; the requests with findings come first.
    json
        Print one JSON document about what was written.
    """
    if limit < 1:
        raise UsageError(f"--limit {limit}: at least one entry must be drawn")
    from transport import timeline as pages
    from transport import timeline_story
    from transport.explain import NotInLog

    with opened(log) as capture, Reading(capture, shown=not json) as reading:
        try:
            drawn = timeline_story.read(capture, title=log.name, wanted=request, most=limit)
        except NotInLog as error:
            raise UnknownRequest(error.request, error.near) from error
        reading.say("drawing")
        html = pages.page(drawn.document)
        output.write_text(html, encoding="utf-8")
        if perfetto is not None:
            from transport.perfetto import perfetto as trace_of

            perfetto.write_bytes(trace_of(drawn.shown, drawn.found))
        reading.stop()
        if json:
            written = {
                "output": str(output),
                "perfetto": None if perfetto is None else str(perfetto),
                "bytes": len(html.encode()),
                "entries": drawn.total,
                "drawn": len(drawn.shown),
                "complete": capture.whole,
            }
            say_json(written)
        else:
            say(f"{len(drawn.shown)} of {counted(drawn.total, 'entry')} drawn in {output}")
            if len(drawn.shown) < drawn.total and not request:
                note("requests with findings come first; --limit draws more, --request only one")
            if perfetto is not None:
                say(f"the same as a Perfetto trace in {perfetto}")
        return EXIT_OK if capture.whole else EXIT_UNREADABLE


@contextmanager
def log_or_scheduler(log: Path | None, scheduler: str, door: CallSettings) -> Iterator[Capture]:
    """The log as a stream, or that of a running scheduler where none is named."""
    if log is not None:
        with opened(log) as capture:
            yield capture
        return
    from transport.forensics_read import LiveCapture

    with connect(scheduler, door) as client, closing(client.tail()) as entries:
        yield LiveCapture(entries)


def diff(left: Path, right: Path, /, *, everything: Switch = False, json: Json = False) -> int:
    """Compare two logs of the same traffic; exits 0 the same, 1 different, 5 incomplete.

    Parameters
    ----------
    left
        A folder of segments, one segment, JSON Lines or Parquet.
    right
        The log to compare it with.
    everything
        Compare drawn, keyed and timed fields too: tags, digests, deadlines.
    json
        Print one JSON document.
    """
    import attrs

    from lifecycle.forensics_diff import difference
    from transport import diff_text

    with opened(left) as one, opened(right) as other:
        with Reading(one, other, shown=not json):
            found = difference(one, other, everything=everything)
        if json:
            say_json({"same": found.same, **attrs.asdict(found)})
        else:
            for line in diff_text.difference_lines(found):
                say(line)
        if not found.same:
            return EXIT_FAILED
        return EXIT_OK if one.whole and other.whole else EXIT_UNREADABLE
