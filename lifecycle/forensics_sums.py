"""The sums over an inquiry: bounds, pairs, thresholds, and the two symptoms seen from outside.

Owns: which response counts as affected, and which cannot be cleared.
Must not know: slots and writes; `forensics_exposures` found them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from lifecycle.events import Entry
from lifecycle.forensics_exposures import Inquiry
from lifecycle.forensics_story import Story
from lifecycle.forensics_values import (
    Bounds,
    Doubt,
    Exposures,
    Missing,
    Others,
    Pair,
    Response,
    Source,
    Symptom,
    Threshold,
    Told,
)
from lifecycle.ids import RequestId
from lifecycle.wording import counted

SPEED_FACTOR = 8
"""A first token this many times sooner than usual for the prompt's length is a symptom."""
SPEED_SAMPLES_MIN = 16
"""Of fewer answers nobody can say what is usual."""
LENGTHS_APART_MAX = 1
"""Prefill holds a prompt's tokens but the last, so lengths may differ by one."""


def exposures(
    entries: Iterable[tuple[int, Entry]],
    *,
    missing: Iterable[Missing] = (),
    unknown: int = 0,
    whole: bool = True,
) -> Exposures:
    """Who was exposed to whom, by these entries in their order.

    `missing` are the gaps that are known beforehand, `unknown` counts records that could not be
    read and are in none of them; `whole` says that nothing else is missing from the log.
    """
    listed = tuple(missing)
    inquiry = Inquiry(from_the_beginning=whole and not listed)
    for position, entry in entries:
        inquiry.take(position, entry)
    return summed(inquiry, missing=listed, unknown=unknown, whole=whole)


def summed(
    inquiry: Inquiry,
    *,
    missing: Sequence[Missing] = (),
    missing_ns: int = 0,
    unknown: int = 0,
    whole: bool = True,
    others: Others | None = None,
) -> Exposures:
    """The answer, once every entry has been taken.

    `others` stand for requests that were cleared elsewhere and are no stories of this inquiry.
    """
    unlocated = (not whole and not missing) or any(gap.last is None for gap in missing)
    responses = []
    requests, answers = 0, 0
    most = None if others is None else others.cleared_most
    seen = _Seen()
    for story in inquiry.everyone():
        requests += 1
        seen.take(story)
        answered = story.told is Told.ANSWER
        answers += answered
        if answered or story.reads:
            _doubt(inquiry, story, missing, unlocated=unlocated)
            if story.reads or story.doubts:
                responses.append(_response(story))
            elif answered:
                tokens, end_ns = most or (0, 0)
                most = max(tokens, story.prompt_tokens), max(end_ns, story.ended_ns)
    certain = [r for r in responses if r.certain and r.told is Told.ANSWER]
    possible = sum(r.told is Told.ANSWER for r in responses)
    named = {read.writer for r in certain for read in r.reads if read.writer is not None}
    named_perhaps = {read.writer for r in responses for read in r.reads if read.writer is not None}
    lost = sum(gap.count for gap in missing)
    if others is None:
        symptoms = (*seen.lengths(), *seen.speeds(inquiry))
        others = Others(inquiry.entries, inquiry.first_ns, inquiry.last_ns, 0, 0, None, symptoms)
    return Exposures(
        entries=others.entries,
        requests=requests + others.requests,
        answers=answers + others.answers,
        first_ns=others.first_ns,
        last_ns=others.last_ns,
        responses=tuple(sorted(responses, key=lambda r: (r.time_ns, r.request))),
        affected=Bounds(len(certain), possible),
        exposed=Bounds(len(named), len(named_perhaps)),
        pairs=_pairs(certain),
        thresholds=_thresholds(inquiry, certain, most),
        symptoms=others.symptoms,
        missing=tuple(missing),
        missing_positions=lost + unknown,
        missing_ns=missing_ns,
        unknown=unknown,
    )


def _doubt(inquiry: Inquiry, story: Story, missing: Sequence[Missing], *, unlocated: bool) -> None:
    """Add what the log as a whole says against clearing this request."""
    if story.gap:
        story.doubts |= {Doubt.OWN_ENTRIES_MISSING}
    if inquiry.any_verified and story.told is Told.ANSWER and not story.compared:
        story.doubts |= {Doubt.NOT_VERIFIED}
    if not story.unchecked:
        return
    first, last = story.first_position, story.ended_position
    # A gap before its first entry may hold a late write, but no entry of its own.
    hit = any(gap.first <= last and (gap.last is None or gap.last >= first) for gap in missing)
    if unlocated or hit:
        story.doubts |= {Doubt.GAP_IN_LOG}


def _response(story: Story) -> Response:
    return Response(
        request=story.request,
        tenant=story.tenant,
        prompt_tokens=story.prompt_tokens,
        told=story.told,
        position=story.ended_position,
        time_ns=story.ended_ns,
        first_ns=story.first_ns,
        refused=story.refused,
        reads=tuple(story.reads),
        doubts=tuple(sorted(story.doubts, key=lambda doubt: doubt.value)),
    )


def _pairs(certain: Sequence[Response]) -> tuple[Pair, ...]:
    """Tenants on each side; a writer of whom nobody knows has a sentence in place of a name."""
    answers: Counter[tuple[str, str]] = Counter()
    for response in certain:
        sides = {
            read.writer_tenant if read.source is Source.REQUEST else f"({read.source.value})"
            for read in response.reads
        }
        answers.update((response.tenant, side) for side in sides)
    most_first = sorted(answers.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Pair(reader, writer, n) for (reader, writer), n in most_first)


# --- Thresholds -------------------------------------------------------------------------------


def _thresholds(
    inquiry: Inquiry, certain: Sequence[Response], cleared: tuple[int, int] | None
) -> tuple[Threshold, ...]:
    """Quantities of which every affected answer had more than every unaffected one.

    `cleared` are the most prompt tokens and the latest end of unaffected answers.
    """
    if not certain or cleared is None:
        return ()
    found = []
    for quantity, below, above in (
        ("prompt tokens", cleared[0], min(r.prompt_tokens for r in certain)),
        ("time of the end in ns", cleared[1], min(r.time_ns for r in certain)),
    ):
        if below < above:
            pools = tuple(
                (engine, tokens)
                for engine, tokens in sorted(inquiry.capacities.items())
                if quantity == "prompt tokens" and below <= tokens < above
            )
            found.append(Threshold(quantity, below, above, pools))
    return tuple(found)


# --- Symptoms ---------------------------------------------------------------------------------


def lengths_differ(story: Story) -> bool:
    """Whether an answer's legs did not speak of the same prompt."""
    declared, handed = story.prompt_tokens, story.prefilled
    spoke = story.told is Told.ANSWER and declared and handed
    return bool(spoke) and abs(declared - handed) > LENGTHS_APART_MAX


def length_symptom(request: RequestId, *, handed: int, declared: int) -> Symptom:
    """The legs of this request spoke of two prompts."""
    sentence = f"prefill handed {counted(handed, 'token')} over, the prompt had {declared}"
    return Symptom(request, "lengths_disagree", handed, declared, sentence)


def wait_of(story: Story) -> int:
    """How long the first token of an answer took, in ns; 0 where the log does not tell."""
    if story.told is not Told.ANSWER or not story.prompt_tokens:
        return 0
    return max(0, story.first_token_ns - story.first_ns)


class _Seen:
    """What is seen from outside, gathered in one look at every story.

    Two numbers for each answer are all that is kept of a long log.
    """

    def __init__(self) -> None:
        self._lengths: list[tuple[int, Symptom]] = []
        self._tokens = array("Q")
        self._waits = array("Q")

    def take(self, story: Story) -> None:
        declared, handed = story.prompt_tokens, story.prefilled
        if lengths_differ(story):
            symptom = length_symptom(story.request, handed=handed, declared=declared)
            self._lengths.append((story.number, symptom))
        if wait := wait_of(story):
            self._tokens.append(declared)
            self._waits.append(wait)

    def lengths(self) -> list[Symptom]:
        """Answers whose legs did not speak of the same prompt."""
        return _in_order(self._lengths)

    def speeds(self, inquiry: Inquiry) -> list[Symptom]:
        """Answers that began too soon for their prompt, compared with the other long prompts."""
        tokens = self._tokens
        if len(tokens) < SPEED_SAMPLES_MIN:
            return []
        middle = sorted(tokens)[len(tokens) // 2]
        # Tokens a second, whole numbers all the way, so that every reader finds the same.
        pairs = zip(tokens, self._waits, strict=True)
        speeds = sorted(many * 10**9 // wait for many, wait in pairs if many >= middle)
        usual = max(1, speeds[len(speeds) // 2])
        if speeds[-1] <= usual * SPEED_FACTOR:
            return []
        found = []
        for story in inquiry.everyone():
            many, wait = story.prompt_tokens, wait_of(story)
            if wait and many >= middle and many * 10**9 // wait > usual * SPEED_FACTOR:
                symptom = speed_symptom(story.request, tokens=many, wait_ns=wait, usual=usual)
                found.append((story.number, symptom))
        return _in_order(found)


def _in_order(found: list[tuple[int, Symptom]]) -> list[Symptom]:
    """As their requests came."""
    return [symptom for _, symptom in sorted(found, key=itemgetter(0))]


def speed_symptom(request: RequestId, *, tokens: int, wait_ns: int, usual: int) -> Symptom:
    """The first token came too soon, where so many tokens a second are usual."""
    expected = tokens * 10**9 // usual
    sentence = (
        f"the first of its tokens came {wait_ns / 1e9:.3f} s after a prompt of {tokens}, "
        f"for which {expected / 1e9:.3f} s are usual here"
    )
    return Symptom(request, "first_token_too_soon", wait_ns, expected, sentence)
