"""Log and findings for human eyes.

Owns: one plain sentence for each event, tables, and the text of a finding.
Must not know: where entries come from, or which exit code follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, assert_never

from engine.store import Stored
from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    ByEngine,
    ByScheduler,
    Drained,
    Draining,
    Dropped,
    Entry,
    Finished,
    FleetEvent,
    Lost,
    Proof,
    Proposer,
    Purpose,
    Quarantined,
    Recovered,
    Rejected,
    Released,
    RequestEvent,
    Requeued,
    Reserved,
    Resumed,
    Transferred,
    Verified,
)
from lifecycle.ids import FLEET, GrantId, PageRange, Party, TokenRange, count_pages
from lifecycle.replay import Finding
from lifecycle.rules import RULES
from lifecycle.wording import counted, form
from transport.spelling import spelt
from transport.status_text import wrapped

if TYPE_CHECKING:
    from rich.table import Table

    from transport.pb import log_pb2

MILLISECOND_NS = 1_000_000


def who(proposer: Proposer) -> str:
    """Who an entry goes back to, in a few letters."""
    match proposer:
        case ByEngine(party, _number):
            return _party(party)
        case ByScheduler():
            return "scheduler"
        case _:
            assert_never(proposer)


def _party(party: Party) -> str:
    return party.engine if party.rank == 0 else f"{party.engine} rank {party.rank}"


def _grant(grant: GrantId) -> str:
    return f"grant {_party(grant.owner)}:{grant.serial}"


def _pages(pages: Sequence[PageRange]) -> str:
    spans = [str(p.first) if p.count == 1 else f"{p.first} to {p.stop - 1}" for p in pages]
    return f"{form('page', count_pages(pages))} {', '.join(spans)}"


def _tokens(tokens: TokenRange) -> str:
    if tokens.count < 2:
        return f"token {tokens.start}" if tokens.count else "no token"
    return f"tokens {tokens.start} to {tokens.stop - 1}"


def _parties(parties: Sequence[Party]) -> str:
    return ", ".join(_party(party) for party in parties)


def sentence(entry: Entry) -> str:
    """What the event says, for a reader who has not read the schema."""
    event = entry.event
    if isinstance(event, FleetEvent):
        return _fleet_sentence(event)
    return _request_sentence(entry, event)


def _request_sentence(entry: Entry, event: RequestEvent) -> str:
    match event:
        case Admitted():
            legs = ", ".join(
                f"{leg.engine} books {leg.pages_booked} of {counted(leg.pages_free, 'free page')}"
                for leg in (event.prefill, event.decode)
            )
            return (
                f"Attempt {entry.attempt} may own pages: "
                f"{counted(event.prompt_tokens, 'prompt token')} and at "
                f"most {counted(event.new_tokens_max, 'new one')} fit the context of "
                f"{event.context_tokens}; "
                f"{legs}."
            )
        case Rejected():
            return f"Refused as {event.code.name}, owning nothing: {event.reason}."
        case Reserved():
            return _reserved(event)
        case Transferred():
            return (
                f"The KV of {_tokens(event.tokens)} is written into "
                f"{_grant(event.grant)}, {_pages(event.pages)}: {event.size_bytes} bytes, computed "
                f"by step {event.step}."
            )
        case Drained():
            proof = (
                "says that it has nothing in flight"
                if event.proof is Proof.ACKNOWLEDGED
                else "was shut out by the owner"
            )
            return f"{_party(event.party)} {proof} and never writes to {_grant(event.grant)} again."
        case Verified():
            return (
                f"Decode compared {counted(event.headers_checked, 'header')} and "
                f"{counted(event.digests_checked, 'digest')} on {counted(event.pages, 'page')} "
                f"({event.method}); from here it may read."
            )
        case Finished():
            return (
                f"The answer is whole ({event.reason.value}) with "
                f"{counted(event.tokens, 'token')}; "
                f"header reads: {event.reads_checked} checked, {event.reads_unchecked} not."
            )
        case Requeued():
            return (
                f"This attempt ends ({event.cause.value}, says {event.reported_by}) after "
                f"{counted(event.tokens_relayed, 'relayed token')}; another follows."
            )
        case Aborted() | Quarantined() | Released() | Dropped():
            return _ending(event)
        case _:
            assert_never(event)


def _reserved(event: Reserved) -> str:
    let_in = f"lets {_parties(event.parties)} write" if event.parties else "lets nobody else write"
    purpose = {
        Purpose.SOURCE: "where prefill computes",
        Purpose.DESTINATION: "where the prompt arrives",
        Purpose.GROWTH: "where the answer grows",
    }[event.purpose]
    return (
        f"Grant {_party(event.grant.owner)}:{event.grant.serial} holds {_pages(event.pages)} for "
        f"{_tokens(event.tokens)}, {purpose}, tag {event.tag:016x}; it {let_in}."
    )


def _ending(event: Aborted | Quarantined | Released | Dropped) -> str:
    match event:
        case Aborted():
            said = f": {event.message}" if event.message else ""
            page = "" if event.page is None else f" (page {event.page})"
            return f"Ended without an answer, {event.cause.value}, says {event.reported_by}{page}{said}."
        case Quarantined():
            return f"The pages of {_grant(event.grant)} leave circulation ({event.cause.value})."
        case Released():
            return f"The pages of {_grant(event.grant)} are free again."
        case Dropped():
            return (
                f"{counted(event.count, 'late proposal')} {event.kind} of {_party(event.party)} "
                "changed "
                f"nothing (rule {event.rule})."
            )
        case _:
            assert_never(event)


def _fleet_sentence(event: FleetEvent) -> str:
    match event:
        case Attached():
            return (
                f"{event.engine} joins as {event.role.value} with {counted(event.pages, 'page')} "
                "of "
                f"{counted(event.page_tokens, 'token')} over {event.plane}."
            )
        case Draining():
            return f"{event.engine} finishes what it has and is given nothing new."
        case Lost():
            return f"{event.engine} is no longer part of the fleet ({event.cause.value})."
        case Resumed():
            return f"Scheduler life {event.epoch} begins after position {event.last_position}."
        case Recovered():
            return (
                f"The pages of {_grant(event.grant)} return from quarantine ({event.proof.value})."
            )
        case _:
            assert_never(event)


def log_table(stored: Sequence[Stored]) -> Table:
    """Entries in order, with times counted from the first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("position", justify="right")
    table.add_column("after ms", justify="right")
    table.add_column("by", no_wrap=True)
    table.add_column("event", no_wrap=True)
    table.add_column("what it says", ratio=1)
    start = stored[0].entry.time_ns if stored else 0
    for one in stored:
        table.add_row(
            str(one.position),
            f"{(one.entry.time_ns - start) / MILLISECOND_NS:.1f}",
            spelt(who(one.entry.proposer)),
            type(one.entry.event).__name__,
            spelt(sentence(one.entry)),
        )
    return table


def clock(time_ns: int) -> str:
    """A moment in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(time_ns / 1e9, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def entry_line(stored: Stored) -> str:
    """One entry as one line of a log that is followed."""
    entry = stored.entry
    return (
        f"{stored.position} {clock(entry.time_ns)} {'fleet' if entry.request == FLEET else entry.request} "
        f"{who(entry.proposer)} {type(entry.event).__name__}: {sentence(entry)}"
    )


def request_lines(summary: log_pb2.RequestSummary) -> Iterator[str]:
    """One request in a list: what became of it, and under that, indented, when and where."""
    from transport.pb.log_pb2 import Phase

    phase = Phase.Name(summary.phase).removeprefix("PHASE_").lower()
    # Who is rejected has no other phase.
    how = "" if summary.outcome.lower() in ("", phase) else f" {summary.outcome}"
    why = f" ({summary.outcome_reason})" if summary.outcome else ""
    attempt = f", attempt {summary.attempt}" if summary.attempt else ""
    yield from wrapped(f"{summary.request_id} {phase}{how}{why}{attempt}")
    milliseconds = (summary.last_time_ns - summary.first_time_ns) / MILLISECOND_NS
    yield (
        f"    {clock(summary.first_time_ns)}, {milliseconds:.1f} ms, "
        f"positions {summary.first_position} to {summary.last_position}"
    )


def finding_lines(finding: Finding) -> Iterator[str]:
    """What is wrong, for one violation."""
    violation = finding.violation
    rule = RULES[violation.rule]
    yield (
        f"violation at position {finding.position}: request {violation.request}, "
        f"sequence {violation.sequence}"
    )
    yield f"  rule: {rule.name} ({violation.guard})"
    if finding.entry is None:
        yield "  event: none; something never came"
    else:
        entry = finding.entry
        yield f"  event: {type(entry.event).__name__} by {who(entry.proposer)}: {sentence(entry)}"
    yield f"  found: {violation.message}"
    yield f"  rule says: {rule.sentence}"
    if rule.reports:
        yield f"  reported in public as: {', '.join(rule.reports)}"
