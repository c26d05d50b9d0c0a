"""The version of the protocol between scheduler and engines.

Owns: the two numbers, and which of another part's fit.
Must not know: what changed from one version to the next; `CHANGELOG.md` says so.

The minor number grows when something may be said that was not said before, and stays unsaid to
whoever is older: neighbours work together, so parts are exchanged one by one.  The major number
grows when something means another thing.
"""

from __future__ import annotations

import os
from typing import Any

from transport.process_ends import this_process

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1


def protocol_refusal(major: int, minor: int) -> str | None:
    """Why a part of that version cannot work with this one, or None; 0.0 did not say, and is 1.0."""
    major, minor = (1, 0) if (major, minor) == (0, 0) else (major, minor)
    if major == PROTOCOL_MAJOR and abs(minor - PROTOCOL_MINOR) <= 1:
        return None
    return (
        f"speaks version {major}.{minor} of the protocol, this is "
        f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: minor versions may be one apart"
    )


def about_this_part() -> dict[str, Any]:
    """What a hello says of the process that speaks, whatever its role."""
    return {
        "protocol_major": PROTOCOL_MAJOR,
        "protocol_minor": PROTOCOL_MINOR,
        "process_id": os.getpid(),
        "process": this_process(),
    }
