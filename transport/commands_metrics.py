"""The verb that shows metrics: `metrics`, of a running scheduler or of a log.

Owns: where the metrics come from, and the exit code of an incomplete or illegal log.
Must not know: how anything is counted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lifecycle.wording import counted
from transport.commands_shared import (
    CALL,
    DEFAULT_SCHEDULER,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNREADABLE,
    Door,
    Json,
    SchedulerAddress,
    connect,
    note,
    say_json,
)


def metrics(
    file: Path | None = None,
    /,
    *,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """Print every metric in the text form of Prometheus; of a log exactly as its server counted.

    Parameters
    ----------
    file
        A folder of segments, one segment, JSON Lines or Parquet to count instead of asking a
        scheduler; "-" reads JSON Lines from standard input.
    scheduler
        Address of a running scheduler.
    json
        Print JSON Lines, one metric with its samples a line.
    """
    code = EXIT_OK
    if file is None:
        with connect(scheduler, door) as client:
            text = client.metrics()
    else:
        text, code = _of_log(file, json=json)
    if json:
        from transport.metrics_text import document

        for family in document(text):
            say_json(family)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
    return code


def _of_log(file: Path, *, json: bool) -> tuple[str, int]:
    """The metrics of a log, and the exit code that `replay` would give it."""
    from lifecycle.replay import Replayer
    from lifecycle.tally import Tally
    from transport.commands_forensics import opened
    from transport.metrics_text import exposition
    from transport.progress import Reading
    from transport.replaying import replayed

    with opened(file) as capture:
        replayer = Replayer(foreign=capture.foreign, snapshot=capture.snapshot)
        tally = Tally(replayer.history)
        with Reading(capture, shown=not json):
            replayed(capture, replayer, tally)
            report = replayer.report(whole=capture.whole)
    text = exposition(tally.families())
    if not capture.whole:
        note("incomplete: what is missing is not counted")
        return text, EXIT_UNREADABLE
    if not report.clean:
        how = "counted as they stand" if capture.foreign else "not counted"
        note(
            f"{counted(len(report.findings), 'request')} with a violation; "
            f"illegal entries are {how}"
        )
        return text, EXIT_FAILED
    return text, EXIT_OK
