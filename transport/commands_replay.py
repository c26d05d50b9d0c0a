"""`custody replay` of a file or a folder: where it begins, and which exit code follows.

Owns: what is said of a part that was not read.
Must not know: how an index is compared with its log, how entries are judged or worded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lifecycle.ids import RequestId
from lifecycle.wording import counted
from transport.commands_forensics import expect_known
from transport.commands_shared import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNREADABLE,
    is_standard,
    note,
    say,
    say_json,
)
from transport.progress import Reading
from transport.replaying import replayed, wanted

if TYPE_CHECKING:
    from transport.seeking import Begun


def replay_file(
    file: Path,
    *,
    request: str | None,
    at: int | None,
    first: int | None,
    to: int | None,
    index: Path | None,
    whole: bool,
    json: bool,
) -> int:
    """Judge a log, or with an index the part of it that was asked for."""
    from transport.uncollected import uncollected

    behind = at if at is not None else None if first is None else first - 1
    with ExitStack() as stack:
        stack.enter_context(uncollected())
        here = stack.enter_context(_begun(file, behind=behind, index=index, whole=whole))
        if here.refused:
            note(f"the index is not used, everything is read: {here.refused}")
        if at is not None:
            return _world(here, at, json=json)
        return _verdict(here, request=request, first=first, to=to, json=json)


@contextmanager
def _begun(file: Path, *, behind: int | None, index: Path | None, whole: bool) -> Iterator[Begun]:
    from lifecycle.replay import Replayer
    from transport.aside import DiskAside
    from transport.forensics_read import open_lines
    from transport.seeking import Begun, begun

    if is_standard(file):
        capture = open_lines(sys.stdin.buffer)
        yield Begun(capture, Replayer(foreign=capture.foreign, aside=DiskAside()))
        return
    with begun(file, behind=behind, index=index, whole=whole) as here:
        yield here


def _verdict(
    here: Begun, *, request: str | None, first: int | None, to: int | None, json: bool
) -> int:
    from lifecycle.ends import Ends
    from transport import replay_text

    capture, replayer = here.capture, here.replayer
    ends = Ends(replayer)
    # With an index both ends can be left out; without one the end is read as it ever was.
    stop = to if here.skipped is not None else None
    with Reading(capture, shown=not json):
        replayed(capture, replayer, ends, at=stop)
        report = replayer.report(whole=capture.whole and stop is None)
    state = replayer.state(RequestId(request)) if request else None
    if request is not None and state is None and request not in replayer.findings:
        expect_known(request, tuple(replayer.names()))
    shown = [one for one in report.findings if wanted(one, request, first, to)]
    if json:
        document = replay_text.replay_object(capture, report, shown)
        document |= replay_text.ends_object(ends)
        document |= _part_object(here, stop)
        if request is not None:
            document["state"] = None if state is None else replay_text.state_object(state)
        say_json(document)
    else:
        for line in _part_lines(here, stop):
            say(line)
        for line in replay_text.replay_lines(capture, report, shown, ends):
            say(line)
        for line in () if state is None else replay_text.request_lines(state):
            say(line)
    if not capture.whole:
        return EXIT_UNREADABLE
    return EXIT_FAILED if shown else EXIT_OK


def _world(here: Begun, at: int, *, json: bool) -> int:
    """Everything as it is behind the replayed position."""
    from transport import replay_text
    from transport.replaying import taken

    capture, replayer = here.capture, here.replayer
    with Reading(capture, shown=not json):
        for _ in taken(capture, replayer, at=at):
            pass
    if json:
        document = replay_text.world_object(replayer)
        document |= {"complete": not capture.damaged, **_part_object(here, at)}
        say_json(document)
    else:
        for line in replay_text.world_lines(replayer):
            say(line)
        for line in _part_lines(here, at):
            say(line)
        for line in replay_text.missing_lines(capture) if capture.damaged else ():
            say(line)
    return EXIT_UNREADABLE if capture.damaged else EXIT_OK


def _part_lines(here: Begun, stop: int | None) -> Iterator[str]:
    """What was not looked at in this call, and who says what it comes to."""
    skipped = here.skipped
    if skipped is None:
        return
    yield (
        f"not read: positions 1 to {skipped.last}; what they come to is from {skipped.index}, "
        f"which saw {counted(skipped.violations, 'violation')} there; the log still holds the batch that "
        f"ends there, with the hash {skipped.head}"
    )
    if stop is not None:
        yield f"not read: everything behind position {stop}"
    yield (
        f"read and judged: from position {skipped.last + 1} on; entries, events and ends are of "
        "this part, requests, phases and guard evaluations of all up to its end"
    )


def _part_object(here: Begun, stop: int | None) -> dict[str, Any]:
    skipped = here.skipped
    if skipped is None:
        return {"skipped": None}
    return {
        "skipped": {
            "first": 1,
            "last": skipped.last,
            "behind": stop,
            "index": skipped.index,
            "head": skipped.head,
            "violations": skipped.violations,
        }
    }
