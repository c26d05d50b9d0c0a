"""What an inquiry into a log finds, as values.

Owns: one foreign read, one verdict on a response, and the sums over a log.
Must not know: how any of it is found, or how it is printed.

Bounds are pairs: what the log proves, and what it cannot exclude.
"""

from __future__ import annotations

from enum import Enum

import attrs

from lifecycle.events import Entry, RejectCode
from lifecycle.ids import EngineId, Party, RequestId

Positioned = tuple[int, Entry]
"""An entry, and where it stands in the log, from 1."""


class Source(Enum):
    """Whose bytes lay where a request read without having written there last."""

    REQUEST = "request"
    """Another request's, which the log names."""
    BEFORE = "before_the_log"
    """Somebody's whose write is not in the log."""
    NOBODY = "nobody"
    """The memory was new, and the log has everything since: nobody had written there."""


class Doubt(Enum):
    """Why a response cannot be cleared, nor counted as affected."""

    OWN_ENTRIES_MISSING = "own_entries_missing"
    """The request's own log has a gap, in which its writes may stand."""
    NO_PAGES = "no_pages"
    """The log does not say which pages it read."""
    OPEN_DOOR = "open_door"
    """Another request's write was still under way to its pages when it read them."""
    LATE_WRITE = "late_write"
    """Another request's write landed where it was writing its own tokens."""
    GAP_IN_LOG = "gap_in_log"
    """Entries are missing from the time in which it held its pages, and nothing was compared."""
    NOT_VERIFIED = "not_verified"
    """It read without `Verified`, in a log in which others were verified."""
    SOURCE_REUSED = "source_reused"
    """What was sent was copied from pages that another request held by then."""


class Told(Enum):
    """What the client of a request got."""

    ANSWER = "answer"
    """All of it, with success."""
    PART = "part"
    """Some tokens at most, then an error."""
    REFUSAL = "refusal"
    """A refusal, and no token."""
    NOTHING = "nothing"
    """The log does not say."""


@attrs.frozen
class Missing:
    """Positions `first` to `last` that the log should hold and does not.

    `last` is None where nobody knows how far it goes.
    """

    first: int
    last: int | None
    reason: str

    @property
    def count(self) -> int:
        """How many, as far as it is known."""
        return 0 if self.last is None else self.last - self.first + 1


@attrs.frozen
class Read:
    """A run of token slots that `reader` read and had not written last.

    `tokens` are the reader's token numbers `start` to `stop - 1`; `pages` are those of `owner`.
    `written_position` and `written_ns` are 0 where nobody is known to have written.
    """

    reader: RequestId
    owner: Party
    first_page: int
    pages: int
    start: int
    stop: int
    source: Source
    writer: RequestId | None
    writer_tenant: str
    written_position: int
    written_ns: int
    read_ns: int

    @property
    def stale_ns(self) -> int:
        """How old the bytes were when they were read."""
        return self.read_ns - self.written_ns if self.writer is not None else 0


@attrs.frozen
class Response:
    """A request that read, or may have read, what it had not written.

    `position` and `time_ns` are those of the entry that ended it; `refused` is the code by which
    it should have been refused, if the log holds one.
    """

    request: RequestId
    tenant: str
    prompt_tokens: int
    told: Told
    position: int
    time_ns: int
    first_ns: int
    refused: RejectCode | None
    reads: tuple[Read, ...]
    doubts: tuple[Doubt, ...]

    @property
    def certain(self) -> bool:
        """Whether the log proves it."""
        return bool(self.reads) and Doubt.OWN_ENTRIES_MISSING not in self.doubts

    @property
    def tokens(self) -> int:
        """How many tokens were not its own."""
        return sum(read.stop - read.start for read in self.reads)


@attrs.frozen
class Bounds:
    """At least so many, and at most so many."""

    least: int
    most: int


@attrs.frozen
class Pair:
    """A tenant that read and a tenant whose bytes they were."""

    reader: str
    writer: str
    responses: int


@attrs.frozen
class Threshold:
    """A number that separates affected answers from the others: `below` < limit <= `above`.

    `below` is the greatest of the unaffected, `above` the least of the affected; `pools` are
    the engines whose pool lies between, with its tokens.
    """

    quantity: str
    below: int
    above: int
    pools: tuple[tuple[EngineId, int], ...] = ()


@attrs.frozen
class Symptom:
    """Something that is seen from outside, without looking at pages."""

    request: RequestId
    kind: str
    found: int
    expected: int
    sentence: str


@attrs.frozen
class Others:
    """Requests that were cleared without being looked at one by one, as sums.

    `entries`, `first_ns` and `last_ns` are those of the whole log; `requests` and `answers` count
    these alone; `cleared_most` are the most prompt tokens and the latest end among their answers.
    `symptoms` are those of all requests.
    """

    entries: int
    first_ns: int
    last_ns: int
    requests: int
    answers: int
    cleared_most: tuple[int, int] | None
    symptoms: tuple[Symptom, ...]


@attrs.frozen
class Exposures:
    """The answer to: who was exposed to whom.

    `answers` counts all answered requests; `responses` are those that are affected or cannot be
    cleared; `missing_positions` is how many positions of the log, `missing_ns` the time between
    entries, about which nothing is known.
    """

    entries: int
    requests: int
    answers: int
    first_ns: int
    last_ns: int
    responses: tuple[Response, ...]
    affected: Bounds
    exposed: Bounds
    pairs: tuple[Pair, ...]
    thresholds: tuple[Threshold, ...]
    symptoms: tuple[Symptom, ...]
    missing: tuple[Missing, ...]
    missing_positions: int
    missing_ns: int
    unknown: int

    @property
    def whole(self) -> bool:
        """Whether nothing was missing."""
        return not self.missing and not self.unknown

    @property
    def certain(self) -> tuple[Response, ...]:
        """Answers that the log proves to be affected."""
        return tuple(r for r in self.responses if r.certain and r.told is Told.ANSWER)
