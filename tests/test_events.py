"""An event, a name or a range that exists is well formed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from lifecycle.events import (
    FLEET_EVENTS,
    REQUEST_EVENTS,
    ByScheduler,
    Event,
    Purpose,
    Resumed,
)
from lifecycle.ids import (
    EngineId,
    PageRange,
    Party,
    TokenRange,
    pages_for,
    party_of,
    prefill_pages,
    ranks_of,
    slice_pages,
)
from lifecycle.rules import RULES
from tests import handmade as hand


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hand.source(tag=0), "64 bits and not 0: 0"),
        (lambda: hand.source(tag=1 << 64), "64 bits and not 0"),
        (lambda: hand.source(parties=(hand.PREFILL,)), "a source grant may not let in 1 parties"),
        (lambda: hand.destination(parties=()), "a destination grant may not let in 0 parties"),
        (lambda: hand.growth(purpose=Purpose.DESTINATION), "may not let in 0 parties"),
        (lambda: hand.finished(tokens=0), "Finished.tokens must be a whole number >= 1: 0"),
        (lambda: hand.finished(pages_read=-1), "must be a whole number >= 0: -1"),
        (lambda: hand.finished(pages_read=True), "must be a whole number >= 0: True"),
        (lambda: Party(hand.PREFILL.engine, 0, 0), "Party.incarnation"),
        (lambda: TokenRange(3, 2), "may not end before it starts: 3 to 2"),
        (lambda: PageRange(0, 0), "PageRange.count"),
        (lambda: ByScheduler(0), "ByScheduler.epoch"),
        (lambda: Resumed(1, -1), "Resumed.last_position"),
        (lambda: hand.source(pages=()), "pages"),
    ],
)
def test_what_is_not_well_formed_is_refused_on_construction(
    make: Callable[[], object], message: str
) -> None:
    """The message names the field and the number."""
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_the_lists_of_events_are_the_unions() -> None:
    """Seventeen events, each in exactly one of the two logs, and none of them subclassed."""
    assert set(REQUEST_EVENTS) | set(FLEET_EVENTS) == set(Event.__args__)
    assert not set(REQUEST_EVENTS) & set(FLEET_EVENTS)
    assert not [kind for kind in Event.__args__ if kind.__subclasses__()]
    assert set(hand.USUAL) == set(REQUEST_EVENTS)


@pytest.mark.parametrize(
    ("tokens", "pages", "prefill"), [(1, 1, 1), (4, 1, 1), (5, 2, 1), (6, 2, 2), (8, 2, 2)]
)
def test_prefill_needs_pages_for_all_tokens_but_the_last(
    tokens: int, pages: int, prefill: int
) -> None:
    """Whole pages; decode runs the last prompt token itself; one page at the least."""
    assert (pages_for(tokens, 4), prefill_pages(tokens, 4)) == (pages, prefill)


def test_logical_pages_are_cut_out_of_scattered_ranges() -> None:
    """A grant's pages are numbered through its ranges; beyond the last is an error."""
    ranges = (PageRange(10, 2), PageRange(3, 1), PageRange(20, 3))
    assert slice_pages(ranges, start=1, stop=4) == (
        PageRange(11, 1),
        PageRange(3, 1),
        PageRange(20, 1),
    )
    assert slice_pages(ranges, start=0, stop=6) == ranges
    assert slice_pages(ranges, start=2, stop=2) == ()
    with pytest.raises(ValueError, match="logical page 6 is outside a grant of 6 pages"):
        slice_pages(ranges, start=0, stop=7)


def test_every_rule_is_a_sentence() -> None:
    """A rule has a name, one sentence, and reports without repetition."""
    assert len(RULES) == 22
    for name, rule in RULES.items():
        assert name == rule.name
        assert rule.sentence[0].isupper()
        assert rule.sentence.endswith(".")
        assert len(set(rule.reports)) == len(rule.reports)


def test_a_party_is_one_object_and_still_compared_by_value() -> None:
    """Who is decoded or listed is the same object; who is made elsewhere is equal to it."""
    party = party_of(EngineId("a"), 2, 0)
    assert party is party_of(EngineId("a"), 2, 0)
    assert ranks_of(EngineId("a"), 2, 1)[0] is party
    assert party == Party(EngineId("a"), 2, 0)
    assert hash(party) == hash(Party(EngineId("a"), 2, 0))
    assert party != party_of(EngineId("a"), 2, 1)
