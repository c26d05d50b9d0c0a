"""What is counted over a log: the name, kind, labels and meaning of every metric.

Owns: the list of metrics, and the values that they take.
Must not know: how an event changes a value (`tally`), or how values are shown.

Names follow the habits of Prometheus: no colons, units last, `_total` behind what only grows.
Every label set that can be named beforehand is shown from the start, at 0: a series that is born
at 1 looks as if nothing had ever grown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import product

import attrs

from lifecycle.events import (
    FLEET_EVENTS,
    REQUEST_EVENTS,
    Cause,
    FinishReason,
    LostCause,
    Proof,
    Purpose,
    QuarantineCause,
    RecoveryProof,
    RejectCode,
    Role,
)
from lifecycle.rules import RULES
from lifecycle.state import Phase

SECOND_NS = 1_000_000_000

BOUNDS_NS: tuple[int, ...] = tuple(
    milliseconds * 1_000_000
    for milliseconds in (
        *(1, 2, 5, 10, 25, 50, 100, 250, 500),
        *(1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000),
    )
)
"""Upper bounds of every distribution's buckets; one more bucket takes what is beyond the last."""

Labels = tuple[str, ...]


class Kind(Enum):
    """How a metric's value moves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen
class Distribution:
    """How many observations fell into each bucket (one more than bounds), and their sum."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_NS) + 1)
    sum_ns: int = 0

    def with_one(self, duration_ns: int) -> Distribution:
        """One more observation; a bound belongs to the bucket that it closes."""
        counts = list(self.counts)
        counts[bisect_left(BOUNDS_NS, duration_ns)] += 1
        return Distribution(tuple(counts), self.sum_ns + duration_ns)


Value = int | Distribution


@attrs.frozen(kw_only=True)
class Metric:
    """One metric; `known` are the label sets that are shown before anything happened."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    known: tuple[Labels, ...] = ((),)

    def zeros(self) -> dict[Labels, Value]:
        """Every known label set, with nothing counted."""
        zero: Value = Distribution() if self.kind is Kind.HISTOGRAM else 0
        return dict.fromkeys(self.known, zero)


@attrs.frozen
class Family:
    """A metric and its values at one moment, by the values of its labels."""

    metric: Metric
    values: Mapping[Labels, Value]


def each(*members: Iterable[Enum]) -> tuple[Labels, ...]:
    """Every combination of these enumerations' values."""
    return tuple(product(*[[str(member.value) for member in kind] for kind in members]))


def _outcomes() -> tuple[Labels, ...]:
    return (
        *(("finished", reason.value) for reason in FinishReason),
        *(("aborted", cause.value) for cause in Cause),
        *(("rejected", code.value) for code in RejectCode),
    )


def _counter(
    name: str, text: str, labels: Labels = (), known: tuple[Labels, ...] = ((),)
) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=labels, known=known)


def gauge(name: str, text: str, labels: Labels = (), known: tuple[Labels, ...] = ((),)) -> Metric:
    """A metric that shows a level."""
    return Metric(name=name, kind=Kind.GAUGE, help=text, labels=labels, known=known)


TIMED = (Phase.ADMITTED, Phase.DECODING, Phase.REQUEUED, Phase.ENDED)
"""Phases that a request leaves again."""

_RANK = ("engine", "incarnation", "rank", "role")

# --- requests -------------------------------------------------------------------------------------

EVENTS = _counter(
    "custody_events_total",
    "Entries of the log, by event.",
    ("event",),
    tuple((kind.__name__,) for kind in (*REQUEST_EVENTS, *FLEET_EVENTS)),
)
REQUESTS = _counter(
    "custody_requests_total",
    "Requests that reached their logical end, by outcome and reason.",
    ("outcome", "reason"),
    _outcomes(),
)
OPEN_REQUESTS = gauge(
    "custody_open_requests",
    "Requests that hold or may still hold pages, by phase.",
    ("phase",),
    each(TIMED),
)
ATTEMPTS = _counter(
    "custody_attempts_total",
    "Attempts that were admitted, by whether the request had one before.",
    ("attempt",),
    (("first",), ("again",)),
)
REQUEUES = _counter(
    "custody_requeues_total",
    "Attempts that ended without an answer and were followed by another, by cause.",
    ("cause",),
    each(Cause),
)
PROMPT_TOKENS = _counter(
    "custody_prompt_tokens_total", "Prompt tokens of admitted requests, each counted once."
)
NEW_TOKENS = _counter(
    "custody_new_tokens_total", "New tokens of finished requests, over all of their attempts."
)
PHASE_SECONDS = Metric(
    name="custody_phase_seconds",
    kind=Kind.HISTOGRAM,
    help="Time that requests spent in a phase, observed when they left it.",
    labels=("phase",),
    known=each(TIMED),
)
STAGES = ("reserve", "write", "drain", "verify")
HANDOFF_SECONDS = Metric(
    name="custody_handoff_seconds",
    kind=Kind.HISTOGRAM,
    help=(
        "Stages of a hand-off that was verified: from admission to the last destination grant, "
        "from there to the last write, to the last proof, to the verification."
    ),
    labels=("stage",),
    known=tuple((stage,) for stage in STAGES),
)
FIRST_TOKEN_SECONDS = Metric(
    name="custody_first_token_seconds",
    kind=Kind.HISTOGRAM,
    help=(
        "Time from the first admission to the first token, by the decode engine's clock, "
        "of finished requests that were never requeued after a token."
    ),
)
REQUEST_SECONDS = Metric(
    name="custody_request_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from the first admission to the logical end, by outcome.",
    labels=("outcome",),
    known=(("finished",), ("aborted",)),
)

# --- grants and pages -----------------------------------------------------------------------------

GRANTS = _counter(
    "custody_grants_total", "Grants that were reserved, by purpose.", ("purpose",), each(Purpose)
)
RESERVED_PAGES = _counter(
    "custody_reserved_pages_total",
    "Pages of grants that were reserved, by purpose.",
    ("purpose",),
    each(Purpose),
)
TRANSFERS = _counter("custody_transfers_total", "Accepted writes into destination grants.")
TRANSFERRED_BYTES = _counter("custody_transferred_bytes_total", "Bytes of accepted writes.")
DRAINS = _counter(
    "custody_drains_total",
    "Parties that were shown to write a grant no more, by proof.",
    ("proof",),
    each(Proof),
)
RELEASED_PAGES = _counter(
    "custody_released_pages_total", "Pages of grants that their owners took back."
)
QUARANTINED_PAGES = _counter(
    "custody_quarantined_pages_total",
    "Pages of grants that left circulation without a proof, by cause.",
    ("cause",),
    each(QuarantineCause),
)
RECOVERIES = _counter(
    "custody_recoveries_total",
    "Quarantined grants that were later shown to be safe, by proof.",
    ("proof",),
    each(RecoveryProof),
)
ENGINE_PAGES = gauge(
    "custody_engine_pages",
    "Pages of each rank that lives, by state; the four states sum to its capacity.",
    (*_RANK, "state"),
    (),
)
QUARANTINE_PAGES = gauge(
    "custody_quarantine_pages",
    "Pages of each rank that lives which are out of circulation now, by cause.",
    (*_RANK, "cause"),
    (),
)
ENGINE_SLOTS = gauge(
    "custody_engine_slots",
    "Request slots of each rank that lives, by state.",
    (*_RANK, "state"),
    (),
)

# --- isolation ------------------------------------------------------------------------------------

VERIFIED_PAGES = _counter(
    "custody_verified_pages_total", "Pages that decode compared before it read a prompt's KV."
)
VERIFIED_HEADERS = _counter(
    "custody_verified_headers_total", "Headers of blocks that decode compared before it read them."
)
VERIFIED_DIGESTS = _counter(
    "custody_verified_digests_total", "Digests of blocks that decode compared before it read them."
)
READS_CHECKED = _counter(
    "custody_reads_checked_total",
    "Page headers that were compared around decode steps, of finished requests.",
)
READS_UNCHECKED = _counter(
    "custody_reads_unchecked_total",
    "Pages that were read without a comparison, of finished requests; anything above 0 is a fault.",
)
ISOLATION_VIOLATIONS = _counter(
    "custody_isolation_violations_total",
    "Requests that were aborted because a page did not bear their tag.",
)
DROPPED_PROPOSALS = _counter(
    "custody_dropped_proposals_total",
    "Late or illegal proposals that changed nothing, by the rule that they broke.",
    ("rule",),
    tuple((name,) for name in RULES),
)

# --- fleet ----------------------------------------------------------------------------------------

ENGINES = gauge(
    "custody_engines",
    "Engines that are part of the fleet, by role and by whether they take new requests.",
    ("role", "state"),
    tuple(product([role.value for role in Role], ["attached", "draining"])),
)
ATTACHMENTS = _counter(
    "custody_attachments_total",
    "Lives of engines that joined the fleet, by role.",
    ("role",),
    each(Role),
)
LOSSES = _counter(
    "custody_losses_total",
    "Lives of engines that are over, by cause; `left` is an orderly end.",
    ("cause",),
    each(LostCause),
)
EPOCH = gauge("custody_scheduler_epoch", "The scheduler's life; it only grows.")

METRICS: tuple[Metric, ...] = (
    *(EVENTS, REQUESTS, OPEN_REQUESTS, ATTEMPTS, REQUEUES, PROMPT_TOKENS, NEW_TOKENS),
    *(PHASE_SECONDS, HANDOFF_SECONDS, FIRST_TOKEN_SECONDS, REQUEST_SECONDS),
    *(GRANTS, RESERVED_PAGES, TRANSFERS, TRANSFERRED_BYTES, DRAINS, RELEASED_PAGES),
    *(QUARANTINED_PAGES, RECOVERIES, ENGINE_PAGES, QUARANTINE_PAGES, ENGINE_SLOTS),
    *(VERIFIED_PAGES, VERIFIED_HEADERS, VERIFIED_DIGESTS, READS_CHECKED, READS_UNCHECKED),
    *(ISOLATION_VIOLATIONS, DROPPED_PROPOSALS, ENGINES, ATTACHMENTS, LOSSES, EPOCH),
)
"""Every metric of a log, in the order in which they are shown."""
