"""Every event of a request's log and of the fleet's log.

Owns: the events' fields and what makes a single event well formed.
Must not know: which event is legal when; that is decided in `phases` and `guards` alone.

An event that exists is well formed: constructors validate, and nobody subclasses an event.
An `Entry` is an event with the header that the sequencer gave it.
Units stand last in a name: `_ns` nanoseconds, `_tokens`, `_pages`, `_bytes`.
"""

from __future__ import annotations

from enum import Enum

import attrs

from lifecycle.ids import (
    PAGES_MAX,
    RANKS_MAX,
    EngineId,
    GrantId,
    PageRange,
    Party,
    RequestId,
    TokenRange,
    at_most,
    natural,
    positive,
    ranks_of,
)

KV = "kv"
"""The one kind of state that Llama-family models hand over."""


class Purpose(Enum):
    """What a grant's pages are for; only a destination lets anybody in besides its owner."""

    SOURCE = "source"
    DESTINATION = "destination"
    GROWTH = "growth"


# Guards compare with these again and again, and Python 3.11 looks for a member through its
# metaclass, which takes ten times as long as a name of the module.
SOURCE = Purpose.SOURCE
DESTINATION = Purpose.DESTINATION
GROWTH = Purpose.GROWTH


class Proof(Enum):
    """Why nothing can land any more: the writer says so, or the owner has revoked access."""

    ACKNOWLEDGED = "acknowledged"
    FENCED = "fenced"


class RejectCode(Enum):
    """Why a request was not admitted."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_POOL_CAPACITY_EXCEEDED = "kv_pool_capacity_exceeded"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    TENANT_QUOTA_EXCEEDED = "tenant_quota_exceeded"
    DRAINING = "draining"
    NOT_READY = "not_ready"
    NO_ENGINE = "no_engine"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Cause(Enum):
    """Why an attempt or a request ended without its answer."""

    CLIENT_CANCEL = "client_cancel"
    CLIENT_GONE = "client_gone"
    SLOW_READER = "slow_reader"
    DEADLINE = "deadline"
    OUT_OF_PAGES = "out_of_pages"
    ENGINE_LOST = "engine_lost"
    ENGINE_FAILED = "engine_failed"
    PROMPT_MISMATCH = "prompt_mismatch"
    TRANSFER_FAILED = "transfer_failed"
    ISOLATION_VIOLATION = "isolation_violation"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    SCHEDULER_RESTARTED = "scheduler_restarted"
    SHUTDOWN = "shutdown"
    NO_ENGINE = "no_engine"
    LOG_UNAVAILABLE = "log_unavailable"


class FinishReason(Enum):
    """Why decode stopped by itself."""

    STOP = "stop"
    LENGTH = "length"


class QuarantineCause(Enum):
    """Why pages left circulation without a proof that nobody can write them."""

    NO_PROOF = "no_proof"
    OWNER_LOST = "owner_lost"
    ISOLATION = "isolation"


class Role(Enum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"


class FenceScope(Enum):
    """How far an owner can revoke access by its own act."""

    NONE = "none"
    PROCESS = "process"
    GRANT = "grant"
    REGION = "region"


class LostCause(Enum):
    """Why an incarnation is no longer part of the fleet."""

    LEFT = "left"
    LEASE = "lease"
    REPLACED = "replaced"
    EXIT_OBSERVED = "exit_observed"
    RULE_BROKEN = "rule_broken"


class RecoveryProof(Enum):
    """What showed that a quarantined grant can no longer be written."""

    DRAINED_LATE = "drained_late"
    FENCED = "fenced"
    EXIT_OBSERVED = "exit_observed"


@attrs.frozen
class ByEngine:
    """Proposed by a rank of an engine, as the proposal with this running number."""

    party: Party
    number: int = attrs.field(validator=positive)


@attrs.frozen
class ByScheduler:
    """Decided by the scheduler in this epoch."""

    epoch: int = attrs.field(validator=positive)


Proposer = ByEngine | ByScheduler


@attrs.frozen
class Leg:
    """One engine of an attempt, with the numbers that prove that it can hold the request.

    `pages_capacity` counts the pool without quarantine; `pages_free` is what was neither
    held, booked nor quarantined before this admission; both are the least over the ranks.
    """

    engine: EngineId
    incarnation: int = attrs.field(validator=positive)
    ranks: int = attrs.field(validator=at_most(RANKS_MAX))
    page_tokens: int = attrs.field(validator=positive)
    pages_needed: int = attrs.field(validator=positive)
    pages_booked: int = attrs.field(validator=positive)
    pages_capacity: int = attrs.field(validator=natural)
    pages_free: int = attrs.field(validator=natural)
    layout: str

    def parties(self) -> tuple[Party, ...]:
        """Every rank of this leg."""
        return ranks_of(self.engine, self.incarnation, self.ranks)

    def has(self, party: Party) -> bool:
        """Whether that is a rank of this leg."""
        return (
            party.engine == self.engine
            and party.incarnation == self.incarnation
            and party.rank < self.ranks
        )


@attrs.frozen
class Admitted:
    """This attempt may own resources on these two legs, and its first pages are booked.

    `tenant` is a commitment, not a name; `prompt_digest` is keyed; no text and no token id.
    `settle_ns` is the time that parties have to settle after the attempt ended.
    """

    prompt_tokens: int = attrs.field(validator=positive)
    prompt_digest: bytes
    new_tokens_max: int = attrs.field(validator=positive)
    context_tokens: int = attrs.field(validator=positive)
    prefill: Leg
    decode: Leg
    tenant: str
    deadline_ns: int = attrs.field(validator=positive)
    settle_ns: int = attrs.field(validator=positive)
    attempts_max: int = attrs.field(validator=positive)
    fleet_position: int = attrs.field(validator=natural)
    kinds: tuple[str, ...] = (KV,)

    @property
    def destinations(self) -> int:
        """How many destination grants make this attempt's hand-off whole."""
        return self.decode.ranks * len(self.kinds)


@attrs.frozen
class Rejected:
    """Not admitted, by these numbers; terminal, and owns nothing.

    `capacity_tokens` is the limit that was compared, in tokens (0 when none was).
    """

    code: RejectCode
    reason: str
    prompt_tokens: int = attrs.field(validator=natural)
    new_tokens_max: int = attrs.field(validator=natural)
    context_tokens: int = attrs.field(validator=natural)
    capacity_tokens: int = attrs.field(validator=natural)
    tenant: str
    fleet_position: int = attrs.field(validator=natural)


def _tag(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 0 < value < 1 << 64:
        msg = f"{type(instance).__name__}.{attribute.name} must be 64 bits and not 0: {value}"
        raise ValueError(msg)


@attrs.frozen
class Reserved:
    """A grant: these pages hold this token range, and these parties may write besides the owner."""

    grant: GrantId
    purpose: Purpose
    pages: tuple[PageRange, ...] = attrs.field(validator=attrs.validators.min_len(1))
    tokens: TokenRange
    kind: str
    tag: int = attrs.field(validator=_tag, repr=hex)
    parties: tuple[Party, ...] = ()

    def __attrs_post_init__(self) -> None:
        if (self.purpose is DESTINATION) != bool(self.parties):
            msg = f"a {self.purpose.value} grant may not let in {len(self.parties)} parties"
            raise ValueError(msg)


@attrs.frozen
class Transferred:
    """A token range is written into a destination grant.

    `step` is the forward pass that computed it, `steps_ended` the last pass that had ended
    when the write was posted; `digest` is the sum of the blocks' digests.
    """

    grant: GrantId
    tokens: TokenRange
    pages: tuple[PageRange, ...] = attrs.field(validator=attrs.validators.min_len(1))
    size_bytes: int = attrs.field(validator=positive)
    digest: int = attrs.field(validator=natural, repr=hex)
    step: int = attrs.field(validator=natural)
    steps_ended: int = attrs.field(validator=natural)


@attrs.frozen
class Drained:
    """The party has nothing in flight to this grant and never posts to it again."""

    grant: GrantId
    party: Party
    proof: Proof


@attrs.frozen
class Verified:
    """Decode compared the headers and digests of every page that the prompt covers."""

    grants: tuple[GrantId, ...] = attrs.field(validator=attrs.validators.min_len(1))
    pages: int = attrs.field(validator=natural)
    headers_checked: int = attrs.field(validator=natural)
    digests_checked: int = attrs.field(validator=natural)
    method: str


@attrs.frozen
class Finished:
    """Decode ended by itself: how many new tokens, when the first came, what was read.

    `tokens` and `digest` count and digest this attempt's new tokens;
    `reads_checked` counts page headers compared before loads, `reads_unchecked` must be 0.
    """

    reason: FinishReason
    tokens: int = attrs.field(validator=positive)
    first_token_ns: int = attrs.field(validator=natural)
    digest: bytes
    pages_read: int = attrs.field(validator=natural)
    reads_checked: int = attrs.field(validator=natural)
    reads_unchecked: int = attrs.field(validator=natural)


@attrs.frozen
class Aborted:
    """The request's logical end without an answer; the first cause wins."""

    cause: Cause
    reported_by: str
    message: str = ""
    page: int | None = None
    tag_expected: int | None = None
    tag_found: int | None = None


@attrs.frozen
class Requeued:
    """This attempt ends without an answer; the next begins when this one is settled.

    `tokens_relayed` counts all tokens that the client has received, over all attempts.
    """

    cause: Cause
    reported_by: str
    tokens_relayed: int = attrs.field(validator=natural)


@attrs.frozen
class Quarantined:
    """The grant's pages pass from the request to the fleet, out of circulation."""

    grant: GrantId
    cause: QuarantineCause


@attrs.frozen
class Released:
    """The owner has taken the grant's pages back; nothing of its own can touch them any more."""

    grant: GrantId


@attrs.frozen
class Dropped:
    """A late or illegal proposal changed nothing; `count` of its kind fell together."""

    party: Party
    number: int = attrs.field(validator=positive)
    kind: str
    rule: str
    grant: GrantId | None = None
    count: int = attrs.field(default=1, validator=positive)


@attrs.frozen
class Attached:
    """A new life of an engine joined the fleet; every address of an earlier life is dead.

    One endpoint a rank, in order; `layers` blocks make one page.
    """

    engine: EngineId
    incarnation: int = attrs.field(validator=positive)
    role: Role
    ranks: int = attrs.field(validator=at_most(RANKS_MAX))
    pages: int = attrs.field(validator=at_most(PAGES_MAX))
    page_tokens: int = attrs.field(validator=positive)
    layers: int = attrs.field(validator=positive)
    slots: int = attrs.field(validator=positive)
    context_tokens: int = attrs.field(validator=positive)
    layout: str
    endpoints: tuple[str, ...]
    plane: str
    fence_scope: FenceScope


@attrs.frozen
class Draining:
    """The engine finishes what it has and is given nothing new."""

    engine: EngineId
    incarnation: int = attrs.field(validator=positive)


@attrs.frozen
class Lost:
    """The incarnation is no longer part of the fleet; none of its proposals counts but `Drained`."""

    engine: EngineId
    incarnation: int = attrs.field(validator=positive)
    cause: LostCause


@attrs.frozen
class Resumed:
    """A scheduler life began: its epoch, and the last position that it found durable."""

    epoch: int = attrs.field(validator=positive)
    last_position: int = attrs.field(validator=natural)


@attrs.frozen
class Recovered:
    """It was shown later that nobody can write this quarantined grant any more."""

    grant: GrantId
    proof: RecoveryProof


RequestEvent = (
    Admitted
    | Rejected
    | Reserved
    | Transferred
    | Drained
    | Verified
    | Finished
    | Aborted
    | Requeued
    | Quarantined
    | Released
    | Dropped
)
FleetEvent = Attached | Draining | Lost | Resumed | Recovered
Event = RequestEvent | FleetEvent

REQUEST_EVENTS: tuple[type[RequestEvent], ...] = (
    Admitted,
    Rejected,
    Reserved,
    Transferred,
    Drained,
    Verified,
    Finished,
    Aborted,
    Requeued,
    Quarantined,
    Released,
    Dropped,
)
FLEET_EVENTS: tuple[type[FleetEvent], ...] = (Attached, Draining, Lost, Resumed, Recovered)


@attrs.frozen
class Entry:
    """One event as the sequencer recorded it.

    `sequence` counts the entries of this request from 0 without gaps; `time_ns` is the
    sequencer's wall clock, never decreasing; `attempt` is 0 for a rejection and for the fleet.
    """

    request: RequestId
    sequence: int = attrs.field(validator=natural)
    attempt: int = attrs.field(validator=natural)
    proposer: Proposer
    time_ns: int = attrs.field(validator=natural)
    event: Event


@attrs.frozen
class Failed:
    """An engine's report that it cannot go on; the scheduler decides what becomes of it.

    It is a proposal without an event of its own: the log holds the `Aborted` or `Requeued`.
    """

    cause: Cause
    message: str = ""
    page: int | None = None
    tag_expected: int | None = None
    tag_found: int | None = None


Proposable = Reserved | Transferred | Drained | Verified | Finished | Released | Failed


@attrs.frozen
class Proposal:
    """What a rank sends: numbered without gaps per party, repeated until answered."""

    party: Party
    number: int = attrs.field(validator=positive)
    request: RequestId
    attempt: int = attrs.field(validator=positive)
    body: Proposable
