"""Logs with one thing changed, and messages of later versions: refused by name, or harmless."""

from __future__ import annotations

import random
from functools import cache

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.explorer import walk
from engine.log_changes import Entries, Seen, changed, edited_entries, renumbered
from lifecycle.events import Entry, Event
from lifecycle.history import History
from lifecycle.ids import FLEET
from lifecycle.rules import RULES
from property_tests import strategies
from property_tests.mutants import CROWDED, focus
from property_tests.naive import NaiveModel
from tests import handmade as hand
from transport import codec
from transport.pb import lifecycle_pb2 as pb

SCENARIOS = (CROWDED, attrs.evolve(CROWDED, placing=True), focus(doubt=2, cancel=2, tick=1))


@cache
def log(number: int) -> Entries:
    """The log of a walk, or one by hand where walks are short of a phase."""
    by_hand = (hand.second_decoding, hand.closed, hand.turned_away)
    if number < len(by_hand):
        return by_hand[number](hand.Log()).entries
    entries: Entries = walk(SCENARIOS[number % len(SCENARIOS)], number)[0].stored
    return entries


CAPACITY = {"capacity-proved", "compatible-legs", "incarnation-fences"}
COUNTED = {"capacity-proved", "requeue-keeps-resources-honest"}
RIGHT: dict[str, set[str]] = {
    "attempt": {"current-attempt"},
    "proposer": {
        "current-attempt",
        "drained-is-final",
        "one-decision",
        "settled-once",
        "time-is-no-proof",
        "unbroken-log",
        "written-within-grant",
        "incarnation-fences",
    },
    "time_ns": {"bounded", "unbroken-log"},
    "Admitted.context_tokens": {"capacity-proved"},
    "Admitted.deadline_ns": {"bounded"},
    "Admitted.decode": CAPACITY,
    "Admitted.prefill": CAPACITY,
    "Admitted.fleet_position": {"capacity-proved"},
    "Admitted.new_tokens_max": COUNTED,
    "Admitted.prompt_tokens": COUNTED,
    "Rejected.fleet_position": {"capacity-proved"},
    "Reserved.grant": {"current-attempt", "one-owner", "settled-once"},
    "Reserved.kind": {"whole-before-read"},
    "Reserved.pages": {"conservation", "one-owner"},
    "Reserved.parties": {"current-attempt"},
    "Reserved.purpose": {"current-attempt", "whole-before-read"},
    "Reserved.tokens": {"conservation", "whole-before-read"},
    "Transferred.grant": {"acted-after-logged", "drained-is-final", "written-within-grant"},
    "Transferred.pages": {"written-within-grant"},
    "Transferred.tokens": {"written-within-grant"},
    "Transferred.step": {"computed-before-sent"},
    "Transferred.steps_ended": {"computed-before-sent"},
    "Drained.grant": {"acted-after-logged", "settled-once", "time-is-no-proof"},
    "Drained.party": {"time-is-no-proof", "settled-once"},
    "Drained.proof": {"time-is-no-proof"},
    "Verified.grants": {"whole-before-read"},
    "Verified.pages": {"read-what-was-written"},
    "Verified.headers_checked": {"read-what-was-written"},
    "Verified.digests_checked": {"read-what-was-written"},
    "Finished.tokens": {"first-cause-wins"},
    "Finished.pages_read": {"read-what-was-written"},
    "Finished.reads_unchecked": {"read-what-was-written"},
    "Requeued.tokens_relayed": {"requeue-keeps-resources-honest"},
    "Quarantined.cause": {"incarnation-fences"},
    "Quarantined.grant": {"settled-once", "incarnation-fences"},
    "Released.grant": {"settled-once", "drained-before-released"},
    "Attached.endpoints": {"incarnation-fences"},
    "Attached.incarnation": {"incarnation-fences"},
    "Attached.ranks": {"incarnation-fences"},
    "Lost.engine": {"incarnation-fences"},
    "Lost.incarnation": {"incarnation-fences"},
    "Resumed.epoch": {"unbroken-log"},
}
"""Which rules may refuse an entry of a legal log when this field of it is edited.

A field that is not named here is for people, or binds only what follows: nothing refuses its edit.
"""

NEVER_LEGAL = frozenset(
    {
        "Admitted.fleet_position",
        "Rejected.fleet_position",
        "Reserved.kind",
        "Reserved.purpose",
        "Transferred.grant",
        "Transferred.pages",
        "Transferred.tokens",
        "Drained.party",
        "Drained.proof",
        "Verified.pages",
        "Finished.reads_unchecked",
        "Attached.ranks",
        "Lost.engine",
        "Lost.incarnation",
        "Resumed.epoch",
    }
)
"""Fields of which no other value is legal in its place."""


@pytest.mark.parametrize("number", range(9))
def test_an_edited_field_is_refused_by_its_own_rule(number: int) -> None:
    """Every edit of every field of a legal log is legal, or refused by a rule about that field."""
    entries = log(number)
    seen, history = Seen.of(entries), History()
    for _, entry in entries:
        fleet = history.fleet.sequence
        sequence = fleet if entry.request == FLEET else history.state(entry.request).sequence
        for field, edited in edited_entries(entry, seen):
            violation = history.check(attrs.evolve(edited, sequence=sequence))
            if violation is None:
                assert field not in NEVER_LEGAL, f"{edited} was taken"
            elif field == "attempt" and entry.request == FLEET:
                assert violation.rule in RULES
            else:
                assert violation.rule in RIGHT.get(field, ()), f"{field}: {violation}"
        assert history.apply(renumbered(history, entry)) is None


def test_edits_reach_every_field_that_a_rule_looks_at() -> None:
    """The table above is used: every field in it is edited somewhere, and refused at least once."""
    refused: set[str] = set()
    for number in range(14):
        entries = log(number)
        seen, history = Seen.of(entries), History()
        for _, entry in entries:
            for field, edited in edited_entries(entry, seen):
                if field not in refused:
                    changed_entry = attrs.evolve(
                        edited, sequence=renumbered(history, entry).sequence
                    )
                    if history.check(changed_entry) is not None:
                        refused.add(field)
            history.apply(entry)
    assert sorted(set(RIGHT) - refused) == []


@given(st.integers(0, 11), st.integers(0, 1 << 32))
def test_a_changed_log_is_taken_only_where_the_second_model_agrees(number: int, seed: int) -> None:
    """One entry dropped, repeated, swapped, put elsewhere or edited, with new numbers.

    Every refusal names a rule and changes nothing; whatever is accepted passes the naive model.
    """
    history, model = History(), NaiveModel()
    for _, original in changed(log(number), random.Random(seed)):
        entry = renumbered(history, original)
        before = (history.state(entry.request), dict(history.ledger), history.fleet)
        violation = history.apply(entry)
        if violation is None:
            model.take(entry)
            continue
        assert violation.rule in RULES
        assert before == (history.state(entry.request), history.ledger, history.fleet)


# --- later versions ---------------------------------------------------------------------------

UNKNOWN = st.sampled_from(
    [
        b"\x98\x7d\x05",  # field 2003, a number
        b"\x9a\x7d\x03new",  # field 2003, three bytes
        b"\x9d\x7d\x01\x02\x03\x04",  # field 2003, 32 bits
        b"\x99\x7d\x01\x02\x03\x04\x05\x06\x07\x08",  # field 2003, 64 bits
    ]
)


@given(strategies.entries(), st.lists(UNKNOWN, min_size=1, max_size=3))
def test_fields_of_a_later_version_change_nothing(entry: Entry, unknown: list[bytes]) -> None:
    """An entry with fields that this version does not know is the same entry without them."""
    message = codec.encode_entry(entry)
    inner = getattr(message.event, str(message.event.WhichOneof("event")))
    for extra in unknown:
        message.MergeFromString(extra)
        inner.MergeFromString(extra)
        message.proposer.MergeFromString(extra)
    assert codec.entry_from_bytes(message.SerializeToString()) == entry


@given(strategies.events(), st.integers(200, 4000))
def test_an_event_of_a_later_version_is_unknown_by_its_number(event: Event, number: int) -> None:
    """An event that this version does not know is said to be unknown, never taken for another."""
    message = codec.encode_event(event)
    key, tag = number << 3 | 2, bytearray()
    while key > 0x7F:
        tag.append(key & 0x7F | 0x80)
        key >>= 7
    tag.append(key)
    later = pb.Event.FromString(bytes(tag) + b"\x02\x08\x01")
    with pytest.raises(codec.UnknownEvent) as caught:
        codec.decode_event(later)
    assert caught.value.numbers == (number,)
    message.MergeFrom(later)
    assert codec.decode_event(message) == event
