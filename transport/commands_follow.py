"""`replay --follow`: a running scheduler's log judged as it grows.

Owns: what is printed while it goes on, and the verdict where it ends.
Must not know: how entries are judged.

Every request that was seen is kept, as in any replay, since any may still be named; those that are
over are on disk.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from transport.commands_shared import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNREADABLE,
    connect,
    say,
    say_json,
)
from transport.replaying import followed, wanted

if TYPE_CHECKING:
    from transport.settings import CallSettings


def follow(
    scheduler: str,
    door: CallSettings,
    *,
    request: str | None,
    first: int | None,
    to: int | None,
    json: bool,
) -> int:
    """Print each violation when it is there; with a last position, the totals and a verdict.

    Without one it goes on until it is interrupted or the scheduler ends.
    """
    from lifecycle.ends import Ends
    from lifecycle.replay import Replayer
    from transport import render, replay_text
    from transport.aside import DiskAside
    from transport.forensics_read import LiveCapture

    shown = []
    with connect(scheduler, door) as client, closing(client.tail(follow=True)) as entries:
        capture = LiveCapture(entries)
        replayer = Replayer(aside=DiskAside())
        ends = Ends(replayer)
        for finding in followed(capture, replayer, ends, to=to):
            if not wanted(finding, request, first, to):
                continue
            shown.append(finding)
            if json:
                say_json(replay_text.finding_object(finding))
            else:
                for line in render.finding_lines(finding):
                    say(line)
    report = replayer.report(whole=capture.whole)
    late = [one for one in report.findings if one.entry is None]
    shown += [one for one in late if wanted(one, request, first, to)]
    if json:
        document = replay_text.replay_object(capture, report, shown)
        say_json(document | replay_text.ends_object(ends))
    else:
        for line in replay_text.replay_lines(capture, report, late, ends):
            say(line)
    if not capture.whole:
        return EXIT_UNREADABLE
    return EXIT_FAILED if shown else EXIT_OK
