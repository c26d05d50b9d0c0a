"""Metrics of a running scheduler: the log's tally, and what only the process knows.

Owns: the metrics that no log holds, and one moment's values of everything.
Must not know: HTTP, text forms, and how an event changes a count.

Counters come from the log alone; what is added here are levels, which no log could tell.
"""

from __future__ import annotations

from collections.abc import Iterator

from lifecycle.tally_metrics import Family, Labels, Value, gauge
from transport.scheduler_owner import SchedulerOwner

QUEUED = gauge(
    "custody_queued_requests",
    "Requests that wait for admission; the log does not know them yet.",
)
ACCEPTING = gauge(
    "custody_accepting",
    "Whether new requests are let in: 1, or 0 while the scheduler shuts down.",
)
LOG_WRITABLE = gauge(
    "custody_log_writable",
    "Whether the store took what it was given last: 1, or 0 while it cannot be written.",
)
LOG_WAITING = gauge("custody_log_waiting_entries", "Entries that the store has not taken yet.")
LOG_VOLATILE = gauge(
    "custody_log_volatile_entries",
    "Entries that the store has taken and not made durable yet.",
)
LOG_ROOM = gauge(
    "custody_log_room_bytes", "Free bytes where the log lies, if the store knows.", known=()
)
LOG_ROOM_MIN = gauge("custody_log_room_min_bytes", "Free bytes below which nothing is admitted.")
CONNECTED = gauge(
    "custody_rank_connected",
    "Whether the stream of each rank that lives is up: 1 or 0.",
    ("engine", "incarnation", "rank"),
    (),
)
LIVE_METRICS = (
    *(QUEUED, ACCEPTING, LOG_WRITABLE, LOG_WAITING, LOG_VOLATILE),
    *(LOG_ROOM, LOG_ROOM_MIN, CONNECTED),
)
"""Levels of the running process, in the order in which they are shown."""


def snapshot(owner: SchedulerOwner) -> tuple[Family, ...]:
    """Everything at one moment; called by the owner task."""
    return (*owner.journal.tally.families(), *_live(owner))


def _live(owner: SchedulerOwner) -> Iterator[Family]:
    journal, core = owner.journal, owner.core
    yield Family(QUEUED, {(): len(core.queue.waiting())})
    yield Family(ACCEPTING, {(): int(core.accepting)})
    yield Family(LOG_WRITABLE, {(): int(journal.failure is None)})
    yield Family(LOG_WAITING, {(): journal.waiting})
    yield Family(LOG_VOLATILE, {(): max(0, journal.appended - journal.durable)})
    room = journal.room_bytes
    yield Family(LOG_ROOM, {} if room is None else {(): room})
    yield Family(LOG_ROOM_MIN, {(): journal.room_bytes_min})
    links = owner.fleet.streams.links
    connected: dict[Labels, Value] = {
        (party.engine, str(party.incarnation), str(party.rank)): int(party in links)
        for party in core.log.ledger
    }
    yield Family(CONNECTED, connected)
