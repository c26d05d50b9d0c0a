"""What an engine holds for an attempt, and what makes two proposals the same one.

Owns: a holding's record, a job's, a proposal's key, and which proposals an attempt needs.
Must not know: when something is held or proposed; that is `core`'s.
"""

from __future__ import annotations

import attrs

from engine.effects import Payload
from lifecycle.events import (
    Drained,
    Failed,
    Finished,
    Proposable,
    Released,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import RequestId

Key = tuple[object, ...]

OWED = (Reserved, Verified, Finished)
"""What an attempt cannot go on without, and is proposed when nothing is left to wait for.

`Drained` and `Released` may have to wait, and a `Transferred` that is missing is missed by decode.
"""


def proposal_key(request: RequestId, attempt: int, body: Proposable) -> Key:
    """What makes two proposals the same one."""
    match body:
        case Reserved():
            return (request, "reserved", body.grant)
        case Transferred():
            return (request, "transferred", body.grant, body.tokens)
        case Drained():
            return (request, "drained", body.grant, body.party)
        case Released():
            return (request, "released", body.grant)
        case Verified():
            return (request, "verified", attempt)
        case Finished():
            return (request, "finished", attempt)
        case Failed():
            return (request, "failed", attempt, body.cause)


@attrs.define
class Job:
    """What an engine has done for one attempt; everything else is in its copy of the log."""

    request: RequestId
    attempt: int
    payload: Payload
    failed: bool = False
    digested: tuple[tuple[int, ...], bytes] | None = None
    """The prompt's tokens, and their digest: every news of a request asks for it again."""


@attrs.frozen
class Holding:
    """Pages that this engine took for a grant, logged or not yet."""

    request: RequestId
    attempt: int
    reserved: Reserved
