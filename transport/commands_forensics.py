"""The verbs of an inquiry into a captured log: `exposures` and those beside it.

Owns: where the log comes from, and the exit code of what was found.
Must not know: how anything is found or worded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from transport.commands_shared import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNREADABLE,
    Json,
    Switch,
    is_standard,
    say,
    say_json,
)

if TYPE_CHECKING:
    from transport.forensics_read import Capture


@contextmanager
def opened(log: Path) -> Iterator[Capture]:
    """The log as a stream; "-" is JSON Lines from standard input."""
    from transport.forensics_read import open_capture, open_lines

    with ExitStack() as stack:
        if is_standard(log):
            yield open_lines(sys.stdin.buffer)
        else:
            yield open_capture(log, stack)


def exposures(log: Path, /, *, reads: Switch = False, json: Json = False) -> int:
    """Say who was exposed to whom; exits 0 nobody, 1 somebody, 5 nobody as far as the log goes.

    Parameters
    ----------
    log
        A folder of segments, one segment, or JSON Lines, also of another system;
        "-" reads JSON Lines from standard input.
    reads
        Print every run of tokens that was read and not written by its reader.
    json
        Print one JSON document, with every response and every read.
    """
    from lifecycle.forensics_exposures import Inquiry
    from lifecycle.forensics_sums import summed
    from transport import forensics_text

    with opened(log) as capture:
        inquiry = Inquiry(from_the_beginning=capture.claims_whole)
        gaps = len(capture.missing)
        for position, entry in capture:
            if len(capture.missing) + len(capture.unknown) > gaps:
                gaps = len(capture.missing) + len(capture.unknown)
                inquiry.lose()
            inquiry.take(position, entry)
        found = summed(
            inquiry,
            missing=capture.gaps(),
            missing_ns=capture.missing_ns,
            unknown=len(capture.unknown),
            whole=capture.whole,
        )
    if json:
        say_json(forensics_text.exposures_object(capture, found))
    else:
        for line in forensics_text.exposure_lines(capture, found, reads=reads):
            say(line)
    if found.affected.most:
        return EXIT_FAILED
    return EXIT_OK if capture.whole else EXIT_UNREADABLE
