"""What an inquiry remembers of one request, and of one grant.

Owns: the counters and lists that the pass over a log fills.
Must not know: slots, other requests, or what follows from it.

These change in place, because the pass makes millions of them; nothing here outlives the pass.
One story is left of each request, so what is mostly empty is a value that all of them share.
"""

from __future__ import annotations

from lifecycle.events import Purpose, RejectCode, Reserved
from lifecycle.forensics_values import Doubt, Read, Told
from lifecycle.ids import GrantId, PageRange, RequestId, TokenRange


class Held:
    """A grant: where it is, since when, and who may still write into it.

    It names its request, whose story may have left the memory.
    """

    __slots__ = (
        *("attempt", "pages", "position", "purpose", "released", "request", "tokens"),
        *("undrained", "used"),
    )

    def __init__(
        self, request: RequestId, reserved: Reserved, *, position: int, attempt: int
    ) -> None:
        """As it was reserved at this position, in this attempt of its request."""
        self.request = request
        self.attempt = attempt
        self.purpose = reserved.purpose
        self.pages: tuple[PageRange, ...] = reserved.pages
        self.tokens: TokenRange = reserved.tokens
        self.undrained = frozenset(reserved.parties)
        self.position = position
        self.released = 0
        self.used = 0

    def overlaps(self, other: Held) -> bool:
        """Whether both grants name a page; they belong to the same pool."""
        return any(
            mine.first < its.stop and its.first < mine.stop
            for mine in self.pages
            for its in other.pages
        )


class Story:
    """A request, as far as the log has come."""

    __slots__ = (
        *("attempt", "compared", "doubts", "ended_ns", "ended_position", "first_ns"),
        *("first_position", "first_token_ns", "gap", "grants", "number", "prefilled"),
        *("prompt_tokens", "reads", "refused", "relayed", "request", "sequence", "tenant", "told"),
        *("unchecked", "verified"),
    )

    def __init__(self, request: RequestId, number: int, *, position: int, time_ns: int) -> None:
        """First seen here, after `number` others."""
        self.request = request
        self.tenant = ""
        self.number = number
        self.first_position = position
        self.first_ns = time_ns
        self.sequence = 0
        self.gap = False
        self.attempt = 0
        self.refused: RejectCode | None = None
        self.prompt_tokens = 0
        self.prefilled = 0
        self.relayed = 0
        self.verified = False
        self.compared = False
        self.unchecked = True
        self.told = Told.NOTHING
        self.first_token_ns = 0
        self.ended_position = 0
        self.ended_ns = 0
        self.grants: dict[GrantId, Held] = {}
        self.reads: list[Read] = []
        self.doubts: frozenset[Doubt] = frozenset()

    @property
    def over(self) -> bool:
        """Whether its client was told something and nobody is left who may write for it.

        What it copied from is kept: a write that comes late all the same is compared with it.
        """
        if self.told is Told.NOTHING:
            return False
        for held in self.grants.values():
            if not held.released or held.purpose is not Purpose.SOURCE:
                return False
        return True

    def leave(self, grant: GrantId) -> None:
        """Forget a grant, if it is known; a dictionary that was filled once never shrinks."""
        self.grants.pop(grant, None)
        if not self.grants:
            self.grants = {}

    def next_attempt(self) -> None:
        """What was verified and sent counts for one attempt only."""
        self.verified = False
        self.compared = False
        self.prefilled = 0
