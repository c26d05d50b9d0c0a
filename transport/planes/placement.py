"""Who may place which bytes: the owner's table where the receiver places them itself.

Owns exposures, what was ended for ever, and which copies are under way.
It must not know streams, memory or threads other than its own lock; it never waits.
"""

import enum
import threading
from collections.abc import Sequence

import attrs

from engine.dataplane import GrantKey, PartyKey, Span, check_span
from engine.dataplane_errors import GrantEnded, PlaneMisused

TICKETS_PER_GRANT_MAX = 65_536


class Refusal(enum.Enum):
    """Why a ticket or a frame is not let in."""

    NOT_EXPOSED = "the grant is not exposed"
    FENCED = "the grant or the party was refused for ever"
    PARTY = "the grant does not let this party in"
    SPAN = "the bytes are outside the exposed spans"
    TICKET = "the ticket was used, given up, or broke its declared order"


class Fate(enum.Enum):
    """What the table knows of a ticket."""

    PLACED = "placed whole"
    QUIESCED = "not placed whole, and never touched again"
    PENDING = "a copy is under way"
    UNKNOWN = "the grant is not known here"


class _State(enum.Enum):
    OPEN = "open"
    PLACED = "placed"
    GIVEN_UP = "given up"


@attrs.frozen
class TicketName:
    """Names a ticket at its owner: grant, writing party, and the writer's never-reused id."""

    grant: GrantKey
    party: PartyKey
    ticket: bytes


@attrs.frozen
class _Exposure:
    asked: tuple[Span, ...]
    spans: tuple[Span, ...]
    parties: frozenset[PartyKey]
    tickets: dict[TicketName, _State] = attrs.field(factory=dict)


def merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the same bytes as sorted spans that neither touch nor overlap."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda one: one.offset):
        if merged and span.offset <= merged[-1].end:
            last = merged.pop()
            end = max(last.end, span.end)
            merged.append(Span(offset=last.offset, length=end - last.offset))
        else:
            merged.append(span)
    return tuple(merged)


class PlacementTable:
    """The exposures of one pool. Thread-safe.

    What has ended stays in `_ended` for the life of the pool: a fence that is forgotten after one
    use would let the next late frame in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exposures: dict[GrantKey, _Exposure] = {}
        self._ended: set[GrantKey] = set()
        self._refused_parties: set[PartyKey] = set()
        self._placing: set[TicketName] = set()

    def expose(
        self,
        grant: GrantKey,
        *,
        spans: Sequence[Span],
        parties: Sequence[PartyKey],
        pool_bytes: int,
    ) -> None:
        """Let parties in; the same exposure again is a repeat and changes nothing."""
        for span in spans:
            check_span(what="span", offset=span.offset, length=span.length, limit=pool_bytes)
        with self._lock:
            if grant in self._ended:
                raise GrantEnded(grant)
            known = self._exposures.get(grant)
            if known is None:
                self._exposures[grant] = _Exposure(
                    tuple(spans), merge_spans(spans), frozenset(parties)
                )
            elif known.asked != tuple(spans) or known.parties != frozenset(parties):
                raise PlaneMisused(f"grant {grant} is already exposed otherwise")

    def admit(self, name: TicketName, extents: Sequence[Span]) -> Refusal | None:
        """Let a ticket in, judged whole before its first byte; None means yes."""
        with self._lock:
            refusal = self._refusal(name)
            if refusal is not None:
                return refusal
            exposure = self._exposures[name.grant]
            # One ticket id has one stream in its life, so a copy is known by its ticket alone.
            if name in exposure.tickets or len(exposure.tickets) >= TICKETS_PER_GRANT_MAX:
                return Refusal.TICKET
            if not all(self._inside(exposure, extent) for extent in extents):
                return Refusal.SPAN
            exposure.tickets[name] = _State.OPEN
            return None

    def begin(self, name: TicketName, extent: Span) -> Refusal | None:
        """Ask to copy one frame; None means yes, and `end` must follow the copy."""
        with self._lock:
            refusal = self._refusal(name)
            if refusal is not None:
                return refusal
            exposure = self._exposures[name.grant]
            if exposure.tickets.get(name) is not _State.OPEN or name in self._placing:
                return Refusal.TICKET
            if not self._inside(exposure, extent):
                return Refusal.SPAN
            self._placing.add(name)
            return None

    def end(self, name: TicketName) -> None:
        """Say that the copy of `begin` has ended, well or badly."""
        with self._lock:
            self._placing.discard(name)

    def complete(self, name: TicketName) -> bool:
        """Record that every byte was placed; False if the ticket was given up before."""
        with self._lock:
            exposure = self._exposures.get(name.grant)
            if exposure is None or exposure.tickets.get(name) is not _State.OPEN:
                return False
            exposure.tickets[name] = _State.PLACED
            return True

    def give_up(self, name: TicketName) -> None:
        """Place nothing more of a ticket; one that was placed whole stays so."""
        with self._lock:
            self._give_up(name)

    def settle(self, name: TicketName) -> Fate:
        """Give a ticket up and say its fate."""
        with self._lock:
            exposure = self._exposures.get(name.grant)
            if exposure is None:
                if name.grant not in self._ended:
                    return Fate.UNKNOWN
            elif exposure.tickets.get(name) is _State.PLACED:
                return Fate.PLACED
            else:
                self._give_up(name)
            return Fate.PENDING if name in self._placing else Fate.QUIESCED

    def fence(self, grant: GrantKey) -> bool:
        """Refuse the grant for ever; True once the last copy for it has ended."""
        with self._lock:
            self._ended.add(grant)
            self._exposures.pop(grant, None)
            return all(name.grant != grant for name in self._placing)

    def fence_party(self, party: PartyKey) -> bool:
        """Refuse the party for ever; True once the last copy from it has ended."""
        with self._lock:
            self._refused_parties.add(party)
            return all(name.party != party for name in self._placing)

    def _refusal(self, name: TicketName) -> Refusal | None:
        if name.grant in self._ended or name.party in self._refused_parties:
            return Refusal.FENCED
        exposure = self._exposures.get(name.grant)
        if exposure is None:
            return Refusal.NOT_EXPOSED
        return None if name.party in exposure.parties else Refusal.PARTY

    def _give_up(self, name: TicketName) -> None:
        exposure = self._exposures.get(name.grant)
        # An id that has not arrived yet is recorded too: its opening may still be on the way.
        if exposure is not None and exposure.tickets.get(name) is not _State.PLACED:
            exposure.tickets[name] = _State.GIVEN_UP

    @staticmethod
    def _inside(exposure: _Exposure, extent: Span) -> bool:
        return any(
            span.offset <= extent.offset and extent.end <= span.end for span in exposure.spans
        )
