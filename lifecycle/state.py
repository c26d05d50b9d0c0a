"""What a request is, reduced from its log: one frozen record, and nothing beside it.

Owns: phases, grants and the request's state as values.
Must not know: which event is legal (`phases`, `guards`) or how it changes a state (`reducer`).
"""

from __future__ import annotations

from enum import Enum

import attrs

from lifecycle.events import (
    Aborted,
    Admitted,
    Finished,
    Purpose,
    QuarantineCause,
    Rejected,
    Reserved,
    Transferred,
)
from lifecycle.ids import GrantId, Party, RequestId


class Phase(Enum):
    """Where a request's attempt stands; what lies before `DECODING` is decided by grants."""

    NEW = "new"
    REJECTED = "rejected"
    ADMITTED = "admitted"
    DECODING = "decoding"
    REQUEUED = "requeued"
    ENDED = "ended"
    CLOSED = "closed"

    # Every entry looks up its phase several times; a member is equal to itself alone.
    __hash__ = object.__hash__


LIVE = frozenset({Phase.ADMITTED, Phase.DECODING})
"""Phases in which an attempt is running."""

OPEN = frozenset({Phase.ADMITTED, Phase.DECODING, Phase.REQUEUED})
"""Phases in which the client still waits for its answer."""

TERMINAL = frozenset({Phase.CLOSED, Phase.REJECTED})
"""Phases that are never left: every grant, if there were any, is settled."""


class Settlement(Enum):
    """What became of a grant."""

    HELD = "held"
    RELEASED = "released"
    QUARANTINED = "quarantined"


# Every entry is compared with these, and Python 3.11 looks for a member through its metaclass,
# which takes ten times as long as a name of the module.
HELD = Settlement.HELD
RELEASED = Settlement.RELEASED
QUARANTINED = Settlement.QUARANTINED


@attrs.frozen
class Written:
    """One accepted `Transferred` and the party that wrote it."""

    party: Party
    transfer: Transferred


@attrs.frozen
class Grant:
    """A grant and everything that the log says about it."""

    reserved: Reserved
    attempt: int
    drained: tuple[Party, ...] = ()
    written: tuple[Written, ...] = ()
    settlement: Settlement = Settlement.HELD
    quarantine: QuarantineCause | None = None

    @property
    def id(self) -> GrantId:
        """The grant's name."""
        return self.reserved.grant

    @property
    def undrained(self) -> tuple[Party, ...]:
        """Parties that may still write."""
        parties, drained = self.reserved.parties, self.drained
        # What a grant's life ends with: nobody was let in, or each has drained in its turn.
        return () if parties == drained else tuple([p for p in parties if p not in drained])


@attrs.frozen
class RequestState:
    """`reduce` over a request's log.

    `sequence` is the next entry's number; `deadline_ns` bounds the answer and `settle_by_ns`
    the settlement of what an ended attempt left (0 while none has ended, or the next runs);
    `first` is the first attempt's admission, `relayed` the tokens that earlier attempts
    gave to the client.
    """

    request: RequestId
    phase: Phase = Phase.NEW
    sequence: int = 0
    attempt: int = 0
    time_ns: int = 0
    deadline_ns: int = 0
    settle_by_ns: int = 0
    first: Admitted | None = None
    admitted: Admitted | None = None
    grants: tuple[Grant, ...] = ()
    outcome: Rejected | Finished | Aborted | None = None
    relayed: int = 0

    def grant(self, name: GrantId) -> Grant | None:
        """The grant of that name, if the log knows it."""
        # A name that was read before is the same object; comparing two costs several times as much.
        for grant in self.grants:
            if grant.reserved.grant is name:
                return grant
        serial = name.serial
        for grant in self.grants:
            known = grant.reserved.grant
            if known.serial == serial and known == name:
                return grant
        return None

    def current(self, purpose: Purpose) -> tuple[Grant, ...]:
        """This attempt's grants for that purpose, in the order of their reservation."""
        attempt = self.attempt
        return tuple(
            [g for g in self.grants if g.reserved.purpose is purpose and g.attempt == attempt]
        )

    @property
    def unsettled(self) -> tuple[Grant, ...]:
        """Grants that are neither released nor quarantined."""
        return tuple([g for g in self.grants if g.settlement is HELD])

    def label(self) -> str:
        """The phase in words, with what grants say about it; for people, never for decisions."""
        if self.phase is not Phase.ADMITTED:
            return str(self.phase.value)
        destinations = self.current(Purpose.DESTINATION)
        if not destinations:
            return "prefill" if self.current(Purpose.SOURCE) else "admitted"
        if any(g.undrained for g in destinations):
            return "transfer"
        return "verifying"


@attrs.frozen
class Violation:
    """An event that the log may not hold: the rule it broke, the guard that saw it, and why."""

    rule: str
    guard: str
    message: str
    request: RequestId
    sequence: int
