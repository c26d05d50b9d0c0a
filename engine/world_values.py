"""What a world is made of: its scenario, its findings, and what its clients saw.

Owns: plain values.
Must not know: how a world moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from engine.allocator import AllocatorError
from engine.core import PROPOSALS_OUTSTANDING_MAX, LogDivergedError
from engine.decode import DecodeCore
from engine.prefill import PrefillCore
from engine.scheduler import Scheduler
from engine.sequencer import SequencerError
from lifecycle.events import FenceScope
from lifecycle.ids import Party, RequestId

Core = PrefillCore | DecodeCore
Action = tuple[str, *tuple[object, ...]]
"""What can happen next: a name, and whom it concerns."""


class Found(Exception):
    """An oracle saw what must never be; `name` is the oracle's."""

    def __init__(self, name: str, message: str, *, rule: str = "") -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message
        self.rule = rule


CORE_ERRORS = (SequencerError, LogDivergedError, AllocatorError)
"""What the cores raise when they cannot go on."""


def as_found(error: SequencerError | LogDivergedError | ValueError) -> Found:
    """The finding that an error of a core is."""
    match error:
        case SequencerError():
            return Found("sequencer", str(error), rule=error.violation.rule)
        case LogDivergedError():
            return Found("log-diverged", str(error), rule=error.rule)
        case AllocatorError():
            return Found("allocator", str(error))
    return Found("ill-formed", str(error))


EYES: Mapping[str, str] = {
    "allocator": "settled-once",
    "answer-before-durable": "acted-after-logged",
    "answered-twice": "first-cause-wins",
    "dropped-though-taken": "settled-once",
    "computed-before-sent": "computed-before-sent",
    "conservation": "conservation",
    "failed-another": "current-attempt",
    "failed-for-nothing": "bounded",
    "fenced-the-living": "time-is-no-proof",
    "foreign-staging": "drained-before-released",
    "forgotten": "conservation",
    "freed-but-held": "acted-after-logged",
    "gave-way": "requeue-keeps-resources-honest",
    "hoards": "capacity-proved",
    "id-minted-twice": "one-decision",
    "ill-formed": "one-decision",
    "isolation": "read-what-was-written",
    "leak": "conservation",
    "left-open": "incarnation-fences",
    "never-quiet": "bounded",
    "no-room-to-grow": "capacity-proved",
    "not-closed": "bounded",
    "observed-foreign": "read-what-was-written",
    "position-gap": "unbroken-log",
    "read-unheld": "drained-before-released",
    "repeat-refused": "settled-once",
    "replay-differs": "unbroken-log",
    "step-on-unheld": "drained-before-released",
    "stepped-after-end": "quiet-after-end",
    "stuck": "bounded",
    "token-after-end": "quiet-after-end",
    "token-before-verified": "whole-before-read",
    "token-order": "quiet-after-end",
    "too-many-proposals": "bounded",
    "truncated": "first-cause-wins",
    "two-owners": "one-owner",
    "unanswered": "bounded",
    "works-on": "quiet-after-end",
    "works-uninvited": "current-attempt",
    "wrong-prompt": "whole-before-read",
    "wrong-offset": "compatible-legs",
}
"""The rule that each oracle watches where the log itself says nothing."""


@attrs.frozen
class Asked:
    """One request of the scenario: prompt tokens, new tokens, and how long it may take."""

    prompt_tokens: int
    new_tokens: int
    deadline_ns: int = 1_000


FAULTS = (
    "lose",
    "repeat",
    "swap",
    "break",
    "crash",
    "process-crash",
    "cancel",
    "tick",
    "doubt",
    "hang",
    "fail",
    "reland",
    "lie",
    "restart",
    "declare-lost",
    "step-fails",
    "echo",
    "garble",
    "forge",
    "late",
    "overdue",
    "torn",
)
"""Kinds of faults that a run has a budget for, in a fixed order."""


@attrs.frozen
class Scenario:
    """A small world: what is asked of it, how large it is, and how often each fault may come.

    `placing`: the receiver places bytes, refuses unexposed grants, and can fence one.
    `eager`: actions that happen by themselves as soon as they can, so that fewer orders remain.
    """

    asked: tuple[Asked, ...] = (Asked(4, 2), Asked(4, 2))
    ranks: int = 2
    page_tokens: int = 2
    prefill_pages: int = 4
    decode_pages: int = 4
    staging: int = 2
    chunk_tokens: int = 2
    growth_tokens: int = 1
    attempts_max: int = 2
    slots: int = 4
    placing: bool = False
    faults: Mapping[str, int] = attrs.Factory(dict)
    eager: frozenset[str] = frozenset()
    scheduler: Callable[..., Scheduler] = Scheduler
    prefill: Callable[..., PrefillCore] = PrefillCore
    decode: Callable[..., DecodeCore] = DecodeCore
    judged: bool = True
    """Whether logs are replayed on the way; without it memory and clients have to see a fault."""
    epochs_repeat: bool = False
    """A broken store that gives every life the same epoch."""
    flush_at_start: bool = True
    """A scheduler makes durable what it found before it says what the log holds."""
    slow: frozenset[str] = frozenset()
    """Actions that do not happen as long as anything else can: a slow store, a slow wire."""
    kinds: int = 1
    """Kinds of state that a prompt leaves behind and that decode needs."""
    late_cancels: bool = False
    """Clients may cancel what has ended."""
    misfit_life: int = 0
    """The life of the decode engine that comes with another layout; 0 is none."""
    prefills: int = 1
    """Prefill engines, at most two."""
    decodes: int = 1
    """Decode engines, at most two."""
    engine_wait_ns: int = 0
    """How long a request waits for engines that could hold it; 0 is for ever."""
    outstanding_max: int = PROPOSALS_OUTSTANDING_MAX
    """How many proposals an engine has without an answer; failures come on top of them."""

    @property
    def fence_scope(self) -> FenceScope:
        """What the owner's data plane can prove."""
        return FenceScope.GRANT if self.placing else FenceScope.NONE


@attrs.frozen
class Client:
    """What one client knows: its tokens, whether its request has ended, and what it was told."""

    asked: Asked
    epoch: int
    got: int = 0
    ended: bool = False
    told: object = None
    gone: bool = False
    since_ns: int = 0


@attrs.frozen
class Tokens:
    """Tokens on an engine's stream, outside the log."""

    request: RequestId
    attempt: int
    first: int
    tokens: tuple[int, ...]


class Mint:
    """Tags that are a function of the party and a count, so that equal paths meet again."""

    def __init__(self, party: Party, count: int = 0) -> None:
        """Tags of one life of one rank."""
        self.party = party
        self.count = count

    def __call__(self) -> int:
        """The next tag; never 0."""
        self.count += 1
        engine = int.from_bytes(self.party.engine.encode()[:2], "big")
        return ((engine * 64 + self.party.incarnation) * 8 + self.party.rank) * 4096 + self.count

    def copy(self) -> Mint:
        """One that goes on from the same count."""
        return Mint(self.party, self.count)
