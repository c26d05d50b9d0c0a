"""One request's story in plain sentences: what was decided, where its pages were, what was told.

Owns: which facts of a log make a story, and the sentence for each.
Must not know: how a read is judged (`forensics_exposures`) or which rule is broken (`replay`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import attrs

from lifecycle.events import (
    Aborted,
    Admitted,
    Drained,
    Dropped,
    Entry,
    Finished,
    Leg,
    Proof,
    Purpose,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.forensics_exposures import Inquiry
from lifecycle.forensics_values import Response, Source, Told
from lifecycle.ids import GrantId, PageRange, RequestId, TokenRange, count_pages
from lifecycle.replay import Replayer
from lifecycle.rules import RULES
from lifecycle.wording import counted
from transport.aside import DiskAside
from transport.forensics_read import Capture
from transport.forensics_text import (
    DOUBTS,
    HTTP_ANSWER,
    HTTP_DUE,
    SOURCES,
    duration,
    response_object,
)
from transport.render import clock
from transport.replaying import found_in, inquired

CANDIDATES_MAX = 20_000


@attrs.frozen
class Sentence:
    """One fact, when it was recorded, and where; position 0 stands for a conclusion."""

    position: int
    time_ns: int
    text: str


@attrs.frozen
class Explanation:
    """The story of a request in the log's order, and what follows from it.

    `true` is None where the log cannot say.
    """

    request: RequestId
    story: tuple[Sentence, ...]
    verdict: tuple[Sentence, ...]
    told: Told
    true: bool | None
    response: Response | None
    rule: str


class NotInLog(Exception):
    """No entry has this id; `near` are ids that look like it."""

    def __init__(self, near: Sequence[str], *, request: str) -> None:
        super().__init__()
        self.request = request
        self.near = tuple(near)


def explain(request: RequestId, capture: Capture) -> Explanation:
    """Read a whole log for the sake of one request.  Raises `NotInLog`."""
    inquiry = Inquiry(from_the_beginning=capture.claims_whole, shelf=DiskAside())
    replayer = Replayer(foreign=capture.foreign, snapshot=capture.snapshot, aside=DiskAside())
    own = [one for one in inquired(capture, inquiry, replayer) if one[1].request == request]
    # The fleet's entries bear an id, too, and are nobody's story.
    story = inquiry.story(request)
    if story is None:
        raise NotInLog(near(request, inquiry.names()), request=request)
    found = found_in(capture, inquiry)
    response = next((r for r in found.responses if r.request == request), None)
    verdict = [*_coverage(own), *_reads(response)]
    finding = replayer.findings.get(request)
    rule = ""
    if finding is not None:
        rule = finding.violation.rule
        text = f"It broke the rule {rule}: {finding.violation.message}. {RULES[rule].sentence}"
        time_ns = finding.entry.time_ns if finding.entry is not None else 0
        verdict.append(Sentence(finding.position, time_ns, text))
    told, true = _told(story.told, response, own, whole=capture.whole)
    verdict.append(told)
    return Explanation(
        request, tuple(_story(own)), tuple(verdict), story.told, true, response, rule
    )


def near(request: str, known: Iterable[str]) -> list[str]:
    """Ids that look like it: those that contain it, or else whatever is spelt alike."""
    holding: list[str] = []
    latest: deque[str] = deque(maxlen=CANDIDATES_MAX)
    for one in known:
        if request and request in one and len(holding) < 3:
            holding.append(one)
        latest.append(one)
    return holding or get_close_matches(request, latest, n=3, cutoff=0.5)


# --- What happened ----------------------------------------------------------------------------


def _story(own: Sequence[tuple[int, Entry]]) -> Iterator[Sentence]:
    grants: dict[GrantId, Reserved] = {}
    for position, entry in own:
        if isinstance(entry.event, Reserved):
            grants[entry.event.grant] = entry.event
        text = _sentence(entry, grants)
        if text:
            # Names keep their spelling.
            begin = "The" if text.startswith("the ") else text[:3]
            yield Sentence(position, entry.time_ns, begin + text[3:])


def _sentence(entry: Entry, grants: dict[GrantId, Reserved]) -> str:
    event = entry.event
    match event:
        case Admitted():
            total = event.prompt_tokens + event.new_tokens_max
            return (
                f"It was admitted as attempt {entry.attempt} for tenant {event.tenant}: "
                f"{counted(event.prompt_tokens, 'prompt token')} and at most "
                f"{counted(event.new_tokens_max, 'new one')} "
                f"are {total} in a context of {event.context_tokens}; "
                f"{_leg(event.prefill)}; {_leg(event.decode)}."
            )
        case Rejected():
            return _rejected(event)
        case Reserved():
            let_in = ", ".join(str(party) for party in event.parties)
            return (
                f"{event.grant.owner} took {_pages(event.pages)} as {event.purpose.value} for "
                f"tokens {_tokens(event.tokens)}"
                + (f", and let {let_in} write there." if let_in else ", for itself alone.")
            )
        case Transferred():
            return f"Tokens {_tokens(event.tokens)} were written to {_pages(event.pages)}."
        case Drained():
            how = (
                "said that nothing of it is on its way and that it never writes there again"
                if event.proof is Proof.ACKNOWLEDGED
                else "was shut out by the owner"
            )
            return f"{event.party} {how}, for {_named(event.grant, grants)}."
        case Verified():
            return (
                f"Decode began to read: it compared {counted(event.headers_checked, 'header')} and "
                f"{counted(event.digests_checked, 'digest')} on {counted(event.pages, 'page')} "
                f"({event.method})."
            )
        case Requeued():
            return (
                f"The attempt ended without an answer ({event.cause.value}, reported by "
                f"{event.reported_by}); {counted(event.tokens_relayed, 'token')} had gone out."
            )
        case Quarantined():
            return f"{_named(event.grant, grants)} went out of circulation ({event.cause.value})."
        case Released():
            return f"{_named(event.grant, grants)} was given back."
        case Dropped():
            return f"A {event.kind} by {event.party} changed nothing, by the rule {event.rule}."
        case _:
            return ""


def _rejected(event: Rejected) -> str:
    limit = f", the limit compared was {event.capacity_tokens}" if event.capacity_tokens else ""
    return (
        f"It was rejected ({event.code.value}) for tenant {event.tenant}: {event.reason}; "
        f"the prompt has {counted(event.prompt_tokens, 'token')}, with "
        f"{counted(event.new_tokens_max, 'new one')} asked "
        f"for, the context is {event.context_tokens}{limit}."
    )


def _leg(leg: Leg) -> str:
    return (
        f"{leg.engine} needed {counted(leg.pages_needed, 'page')}, booked {leg.pages_booked}, "
        "and had "
        f"{leg.pages_free} free of {leg.pages_capacity}"
    )


def _tokens(tokens: TokenRange) -> str:
    return f"{tokens.start} to {tokens.stop - 1}" if tokens.count else "none"


def _pages(pages: Sequence[PageRange]) -> str:
    count = count_pages(pages)
    first = pages[0]
    if len(pages) == 1:
        return f"pages {first.first} to {first.stop - 1}" if count > 1 else f"page {first.first}"
    return f"{counted(count, 'page')} in {counted(len(pages), 'run')} from page {first.first} on"


def _named(grant: GrantId, grants: dict[GrantId, Reserved]) -> str:
    known = grants.get(grant)
    return f"the {known.purpose.value} grant {grant}" if known is not None else f"grant {grant}"


# --- What covered what ------------------------------------------------------------------------


def _coverage(own: Sequence[tuple[int, Entry]]) -> Iterator[Sentence]:
    prompt: int | None = None
    written: dict[GrantId, list[TokenRange]] = {}
    for _, entry in own:
        event = entry.event
        if isinstance(event, Admitted | Rejected):
            prompt = event.prompt_tokens
        elif isinstance(event, Reserved) and event.purpose is Purpose.DESTINATION:
            written[event.grant] = []
        elif isinstance(event, Transferred) and event.grant in written:
            written[event.grant].append(event.tokens)
    if prompt is None:
        if written:
            yield Sentence(0, 0, "How long its prompt was, this log does not say.")
        return
    for grant, ranges in written.items():
        gaps, reached = [], 0
        for tokens in sorted(ranges):
            if tokens.start > reached:
                gaps.append(TokenRange(reached, tokens.start))
            reached = max(reached, tokens.stop)
        if reached < prompt - 1:
            gaps.append(TokenRange(reached, prompt - 1))
        needed = TokenRange(0, max(0, prompt - 1))
        if gaps:
            missing = ", ".join(_tokens(gap) for gap in gaps)
            text = f"Of tokens {_tokens(needed)} in {grant}, {missing} were never written for it."
        else:
            text = f"All of tokens {_tokens(needed)} were written into {grant}, none is missing."
        yield Sentence(0, 0, text)


def _reads(response: Response | None) -> Iterator[Sentence]:
    if response is None:
        return
    for doubt in response.doubts:
        yield Sentence(0, 0, f"It cannot be cleared: {DOUBTS[doubt]}.")
    if not response.reads:
        return
    owners: dict[str, int] = {}
    for read in response.reads:
        whose = read.writer if read.source is Source.REQUEST else SOURCES[read.source]
        owners[str(whose)] = owners.get(str(whose), 0) + read.stop - read.start
    most = sorted(owners.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{tokens} of {whose}" for whose, tokens in most[:5])
    more = f" and of {len(most) - 5} more" if len(most) > 5 else ""
    stale = max(read.stale_ns for read in response.reads)
    age = f"; the oldest were {duration(stale)} old" if stale else ""
    tokens = counted(response.tokens, "token")
    text = (
        f"It read {tokens} that it had not written: {shown}{more}{age}."
        if response.certain
        else f"By what there is of it, it read {tokens} that it had not written."
    )
    yield Sentence(0, 0, text)


# --- What the client was told -----------------------------------------------------------------


def _told(
    told: Told, response: Response | None, own: Sequence[tuple[int, Entry]], *, whole: bool
) -> tuple[Sentence, bool | None]:
    position, last = own[-1]
    ending = (Finished, Aborted, Rejected)
    for place, entry in own:
        if isinstance(entry.event, ending):
            position, last = place, entry
    event = last.event
    if isinstance(event, Finished):
        waited = event.first_token_ns - own[0][1].time_ns
        first = f", the first after {duration(waited)}" if waited > 0 else ""
        words = (
            f"The client was told success (HTTP {HTTP_ANSWER}) with "
            f"{counted(event.tokens, 'new token')}{first} ({event.reason.value})."
        )
    elif isinstance(event, Aborted):
        part = "after a part of an answer" if told is Told.PART else "without an answer"
        words = (
            f"The client was told of an error {part}: {event.cause.value}, reported by "
            f"{event.reported_by}{': ' + event.message if event.message else ''}."
        )
    elif isinstance(event, Rejected):
        words = f"The client was refused (HTTP {HTTP_DUE[event.code]})."
    else:
        return Sentence(position, last.time_ns, "In this log the client was told nothing."), None
    true: bool | None = True
    verdict = "That was the truth."
    if told is Told.ANSWER and response is not None:
        if response.refused is not None:
            due = HTTP_DUE[response.refused]
            true, verdict = False, f"That was not the truth: it had been rejected, {due} was due."
        elif response.certain:
            true, verdict = False, "That was not the truth: the answer was made from others' bytes."
        else:
            true, verdict = None, "Whether that was the truth, this log cannot say."
    elif told is Told.ANSWER and not whole:
        verdict = "By what there is of this log, that was the truth."
    return Sentence(position, last.time_ns, f"{words} {verdict}"), true


# --- Output -----------------------------------------------------------------------------------


def explanation_lines(story: Explanation) -> Iterator[str]:
    """A sentence a line: what was recorded, with its time, and under a heading what follows."""
    yield f"request {story.request}"
    yield from map(_line, story.story)
    yield "verdict"
    yield from map(_line, story.verdict)


def _line(one: Sentence) -> str:
    return f"{clock(one.time_ns)}  {one.text}" if one.time_ns else f"  {one.text}"


def explanation_object(story: Explanation) -> dict[str, Any]:
    """The same as one JSON document."""
    return {
        "request": story.request,
        "told": story.told.value,
        "true": story.true,
        "rule": story.rule or None,
        "sentences": [
            {"position": one.position, "time_ns": one.time_ns, "text": one.text}
            for one in (*story.story, *story.verdict)
        ],
        "exposure": None if story.response is None else response_object(story.response),
    }
