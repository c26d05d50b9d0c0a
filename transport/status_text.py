"""A deployment's status for human eyes, on a terminal of the usual width.

Owns: which facts stand on which line.
Must not know: how a status is asked for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lifecycle.wording import counted
from transport.spelling import spelt

if TYPE_CHECKING:
    from transport.pb import admin_pb2

COLUMNS = 80
ENDED = "ended but not settled"
"""What the phase ENDED is to somebody who has not read the table: its pages are on their way home."""


def status_lines(status: admin_pb2.GetStatusResponse) -> Iterator[str]:
    """The deployment in a few lines of at most `COLUMNS` characters, if no name is longer."""
    for line in _lines(status):
        yield from wrapped(line)


def wrapped(line: str) -> list[str]:
    """The line in pieces that a usual terminal holds, the later ones indented.

    What a foreign name holds is spelt before, because wrapping takes an end of a line for a space.
    """
    return textwrap.wrap(
        spelt(line),
        COLUMNS,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _lines(status: admin_pb2.GetStatusResponse) -> Iterator[str]:
    yield f"model {status.model or 'unknown'}, context {counted(status.context_tokens, 'token')}"
    draining = ", draining" if status.draining else ""
    yield f"scheduler: process {status.process_id}, life {status.epoch}{draining}"
    first = status.log_first_position
    yield (
        f"log: position {status.log_position}, durable to {status.durable_position}"
        + (f", begins at {first}" if first > 1 else "")
    )
    if status.log_failure:
        yield f"nothing is admitted: {status.log_failure}"
    yield f"requests: {', '.join([f'{status.queued} queued', *_phases(status)])}"
    for engine in status.engines:
        for rank in engine.ranks:
            yield from _engine(engine, rank, context_tokens=status.context_tokens)


def _phases(status: admin_pb2.GetStatusResponse) -> Iterator[str]:
    from transport.pb import log_pb2

    if not status.phases:
        yield "none open"
    for one in status.phases:
        name = log_pb2.Phase.Name(one.phase).removeprefix("PHASE_").lower()
        yield f"{one.count} {ENDED if one.phase == log_pb2.PHASE_ENDED else name}"


def _engine(
    engine: admin_pb2.EngineStatus, rank: admin_pb2.RankStatus, *, context_tokens: int
) -> Iterator[str]:
    from transport.pb import admin_pb2, lifecycle_pb2

    state = admin_pb2.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower()
    role = lifecycle_pb2.Role.Name(engine.role).removeprefix("ROLE_").lower()
    name = f"{engine.engine} rank {rank.rank}" if rank.rank else engine.engine
    pages, counters = rank.pages, rank.counters
    yield (
        f"{name}: {role}, {state}, process {rank.process_id}, {counted(engine.requests, 'request')}"
    )
    yield (
        f"  {counted(pages.capacity, 'page')} of {counted(engine.page_tokens, 'token')}: "
        f"{counted(pages.capacity * engine.page_tokens, 'token')} for a context of {context_tokens}"
    )
    yield (
        f"  pages: {pages.free} free + {pages.held} held + {pages.booked} booked + "
        f"{pages.quarantined} quarantined{_causes(rank)} = {pages.capacity}"
    )
    yield (
        f"  page headers: {counters.header_reads_checked} checked, "
        f"{counters.header_reads_unchecked} unchecked, {counters.header_mismatches} wrong"
    )


def _causes(rank: admin_pb2.RankStatus) -> str:
    from transport.pb.lifecycle_pb2 import QuarantineCause

    shown = [
        f"{one.pages} {QuarantineCause.Name(one.cause).removeprefix('QUARANTINE_CAUSE_').lower()}"
        for one in rank.quarantined
    ]
    return f" ({', '.join(shown)})" if shown else ""
