"""From a log to what a timeline shows: judged whole, then cut to what can be drawn.

Owns: the one reading of the log, and the sentences above the drawing.
Must not know: the page, or the trace format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from lifecycle.forensics_exposures import Inquiry
from lifecycle.forensics_values import Exposures, Positioned
from lifecycle.ids import RequestId
from lifecycle.replay import Replayer, Report
from lifecycle.wording import counted
from transport.aside import DiskAside
from transport.explain import NotInLog, near
from transport.forensics_read import Capture
from transport.forensics_text import exposure_lines
from transport.replaying import found_in, inquired
from transport.spool import Spool
from transport.timeline_model import EVENTS_MAX, Model, choose

SUMMARY_LINES = 12


@attrs.frozen
class Drawn:
    """A timeline's content, and the entries in it."""

    document: dict[str, Any]
    shown: list[Positioned]
    found: Exposures
    report: Report
    total: int


def read(
    capture: Capture, *, title: str, wanted: Sequence[str] = (), most: int = EVENTS_MAX
) -> Drawn:
    """Read and judge the whole log, and choose what is drawn.  Raises `NotInLog`."""
    inquiry = Inquiry(from_the_beginning=capture.claims_whole, shelf=DiskAside())
    replayer = Replayer(foreign=capture.foreign, snapshot=capture.snapshot, aside=DiskAside())
    entries = Spool()
    for one in inquired(capture, inquiry, replayer):
        entries.append(one)
    for name in wanted:
        if inquiry.story(RequestId(name)) is None:
            raise NotInLog(near(name, inquiry.names()), request=name)
    found = found_in(capture, inquiry)
    report = replayer.report(whole=capture.whole)
    shown = choose(entries, found, report, wanted=wanted, most=most)
    summary = list(exposure_lines(capture, found, reads=False))[:SUMMARY_LINES]
    summary += [
        f"{counted(count, 'request')} broke the rule {rule} first" for rule, count in report.by_rule
    ]
    model = Model(shown, found, report)
    document = model.document(title=f"Timeline of {title}", summary=summary, total=len(entries))
    return Drawn(document, shown, found, report, len(entries))
