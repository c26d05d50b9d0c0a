"""The sums over an inquiry: bounds, pairs, thresholds, and the two symptoms seen from outside.

Owns: which response counts as affected, and which cannot be cleared.
Must not know: slots and writes; `forensics_exposures` found them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

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
"""Of fewer long prompts nobody can say what is usual."""
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
    cleared: list[Story] = []
    answers = 0
    for story in inquiry.stories.values():
        answered = story.told is Told.ANSWER
        answers += answered
        if answered or story.reads:
            _doubt(inquiry, story, missing, unlocated=unlocated)
            if story.reads or story.doubts:
                responses.append(_response(story))
            elif answered:
                cleared.append(story)
    certain = [r for r in responses if r.certain and r.told is Told.ANSWER]
    possible = sum(r.told is Told.ANSWER for r in responses)
    named = {read.writer for r in certain for read in r.reads if read.writer is not None}
    named_perhaps = {read.writer for r in responses for read in r.reads if read.writer is not None}
    lost = sum(gap.count for gap in missing)
    if others is None:
        symptoms = (*lengths(inquiry.stories.values()), *_speeds(inquiry))
        others = Others(inquiry.entries, inquiry.first_ns, inquiry.last_ns, 0, 0, None, symptoms)
    ends = [(story.prompt_tokens, story.ended_ns) for story in cleared]
    if others.cleared_most is not None:
        ends.append(others.cleared_most)
    return Exposures(
        entries=others.entries,
        requests=len(inquiry.stories) + others.requests,
        answers=answers + others.answers,
        first_ns=others.first_ns,
        last_ns=others.last_ns,
        responses=tuple(sorted(responses, key=lambda r: (r.time_ns, r.request))),
        affected=Bounds(len(certain), possible),
        exposed=Bounds(len(named), len(named_perhaps)),
        pairs=_pairs(certain),
        thresholds=_thresholds(inquiry, certain, ends),
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
    inquiry: Inquiry, certain: Sequence[Response], cleared: Sequence[tuple[int, int]]
) -> tuple[Threshold, ...]:
    """Quantities of which every affected answer had more than every unaffected one.

    `cleared` are prompt tokens and ends of unaffected answers.
    """
    if not certain or not cleared:
        return ()
    affected = {
        "prompt tokens": [r.prompt_tokens for r in certain],
        "time of the end in ns": [r.time_ns for r in certain],
    }
    others = {
        "prompt tokens": [tokens for tokens, _ in cleared],
        "time of the end in ns": [ended_ns for _, ended_ns in cleared],
    }
    found = []
    for quantity, values in affected.items():
        below, above = max(others[quantity]), min(values)
        if below < above:
            pools = tuple(
                (engine, tokens)
                for engine, tokens in sorted(inquiry.capacities.items())
                if quantity == "prompt tokens" and below <= tokens < above
            )
            found.append(Threshold(quantity, below, above, pools))
    return tuple(found)


# --- Symptoms ---------------------------------------------------------------------------------


def lengths(stories: Iterable[Story]) -> list[Symptom]:
    """Answers whose legs did not speak of the same prompt."""
    found = []
    for story in stories:
        declared, handed = story.prompt_tokens, story.prefilled
        if story.told is not Told.ANSWER or not declared or not handed:
            continue
        if abs(declared - handed) > LENGTHS_APART_MAX:
            found.append(length_symptom(story.request, handed=handed, declared=declared))
    return found


def length_symptom(request: RequestId, *, handed: int, declared: int) -> Symptom:
    """The legs of this request spoke of two prompts."""
    sentence = f"prefill handed {counted(handed, 'token')} over, the prompt had {declared}"
    return Symptom(request, "lengths_disagree", handed, declared, sentence)


def waits(stories: Iterable[Story]) -> list[tuple[int, int, RequestId]]:
    """Prompt tokens, and how long the first token took, of each answer that tells both."""
    found = []
    for story in stories:
        wait = story.first_token_ns - story.first_ns
        if story.told is Told.ANSWER and story.prompt_tokens and wait > 0:
            found.append((story.prompt_tokens, wait, story.request))
    return found


def _speeds(inquiry: Inquiry) -> list[Symptom]:
    """Answers that began too soon for their prompt, compared with the other long prompts."""
    waited = waits(inquiry.stories.values())
    if len(waited) < SPEED_SAMPLES_MIN:
        return []
    middle = sorted(tokens for tokens, _, _ in waited)[len(waited) // 2]
    long = [item for item in waited if item[0] >= middle]
    # Tokens a second, whole numbers all the way, so that every reader finds the same.
    speeds = sorted(tokens * 10**9 // wait for tokens, wait, _ in long)
    usual = max(1, speeds[len(speeds) // 2])
    return [
        speed_symptom(request, tokens=tokens, wait_ns=wait, usual=usual)
        for tokens, wait, request in long
        if tokens * 10**9 // wait > usual * SPEED_FACTOR
    ]


def speed_symptom(request: RequestId, *, tokens: int, wait_ns: int, usual: int) -> Symptom:
    """The first token came too soon, where so many tokens a second are usual."""
    expected = tokens * 10**9 // usual
    sentence = (
        f"the first of its tokens came {wait_ns / 1e9:.3f} s after a prompt of {tokens}, "
        f"for which {expected / 1e9:.3f} s are usual here"
    )
    return Symptom(request, "first_token_too_soon", wait_ns, expected, sentence)
