"""What the sans-IO cores ask their shells to do, as values.

Owns: the effects and the plans of a step.
Must not know: how anything is done, torch, sockets or clocks.

A shell performs effects in the order in which it got them.
"""

from __future__ import annotations

import attrs

from lifecycle.events import (
    Aborted,
    Admitted,
    Entry,
    Finished,
    Proposal,
    Rejected,
    Reserved,
)
from lifecycle.ids import GrantId, PageRange, Party, RequestId, TokenRange


@attrs.frozen
class Payload:
    """What travels beside an `Admitted` and is never logged.

    tokens: the attempt's whole prompt, tokens relayed by earlier attempts at its end;
    relayed: how many those are; sampling: the shell's own object, opaque to the cores.
    """

    tokens: tuple[int, ...]
    relayed: int = 0
    sampling: object = None


# --- engine to shell --------------------------------------------------------------------------


@attrs.frozen
class Propose:
    """Send this proposal, and again until it is answered."""

    proposal: Proposal


@attrs.frozen
class Post:
    """Pack source pages into staging under the grant's tag and post them as one write."""

    ticket: int
    request: RequestId
    attempt: int
    grant: GrantId
    tokens: TokenRange
    source_pages: tuple[PageRange, ...]
    target_pages: tuple[PageRange, ...]
    staging: tuple[PageRange, ...]
    tag: int
    step: int
    steps_ended: int


@attrs.frozen
class Expose:
    """Let the parties of a logged grant write into its pages."""

    reserved: Reserved


@attrs.frozen
class Fence:
    """Shut a party out of a grant for ever, and report when that is proved."""

    grant: GrantId
    party: Party


@attrs.frozen
class Retire:
    """The grant has ended; nothing of it is expected any more."""

    grant: GrantId


@attrs.frozen
class VerifyPages:
    """Compare headers and digests of what arrived: (reserved, tokens, pages, digest) a write."""

    request: RequestId
    attempt: int
    writes: tuple[tuple[Reserved, TokenRange, tuple[PageRange, ...], int], ...]


@attrs.frozen
class Forget:
    """The request concerns this engine no longer: drop its payload."""

    request: RequestId


EngineEffect = Propose | Post | Expose | Fence | Retire | VerifyPages | Forget


@attrs.frozen
class PrefillSlice:
    """Tokens `start` to `start + count - 1` of a request are computed into its source pages."""

    request: RequestId
    attempt: int
    start: int
    count: int
    pages: tuple[PageRange, ...]
    tag: int


@attrs.frozen
class DecodeSlice:
    """One token of a request: the token at `position` is run, and the next one is sampled.

    `index` counts this attempt's new tokens from 0; `tags` has one tag for each page range.
    """

    request: RequestId
    attempt: int
    position: int
    index: int
    pages: tuple[PageRange, ...]
    tags: tuple[int, ...]


@attrs.frozen
class Step:
    """A forward pass: its running number, and what it does for whom."""

    number: int
    slices: tuple[PrefillSlice, ...] | tuple[DecodeSlice, ...]


# --- scheduler to shell -----------------------------------------------------------------------


@attrs.frozen
class Append:
    """Append this entry to the store at this position, before anything that follows is done."""

    position: int
    entry: Entry


@attrs.frozen
class Publish:
    """Send an entry to a rank once the store is durable up to `durable` (0: at once)."""

    party: Party
    position: int
    entry: Entry
    payload: Payload | None
    durable: int


@attrs.frozen
class Synced:
    """The rank has been sent all that concerns it; what it holds beyond that was never logged."""

    party: Party


@attrs.frozen
class Answer:
    """A proposal took effect at `position`, or was dropped by `rule` (then `position` is 0)."""

    party: Party
    number: int
    position: int
    rule: str = ""


@attrs.frozen
class TellAdmitted:
    """The client learns that its request was admitted."""

    request: RequestId
    attempt: int
    admitted: Admitted


@attrs.frozen
class TellTokens:
    """The client's next tokens; `first` counts from the request's first new token."""

    request: RequestId
    first: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]


@attrs.frozen
class TellOutcome:
    """The client's answer, once the store is durable up to `durable`."""

    request: RequestId
    outcome: Finished | Aborted | Rejected
    durable: int


@attrs.frozen
class TellClosed:
    """The request is closed and forgotten: its tokens are gone from memory."""

    request: RequestId


SchedulerEffect = (
    Append | Publish | Synced | Answer | TellAdmitted | TellTokens | TellOutcome | TellClosed
)
