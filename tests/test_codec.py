"""Claims about `transport.codec`: nothing is lost, and bad input has two typed answers."""

from __future__ import annotations

import typing
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lifecycle.events import (
    FLEET_EVENTS,
    REQUEST_EVENTS,
    Aborted,
    ByScheduler,
    Cause,
    Entry,
    Event,
    Proposable,
    Proposal,
    Released,
    Resumed,
    Transferred,
)
from lifecycle.ids import FLEET, EngineId, GrantId, PageRange, Party, TokenRange
from property_tests import strategies
from transport import codec
from transport.codec_values import ENUM_TABLES
from transport.pb import lifecycle_pb2 as pb

EVENT_TYPES: tuple[type[Event], ...] = typing.get_args(Event)
GRANT = GrantId(Party(EngineId("d0"), 1, 0), 7)


def field_of(name: str) -> str:
    """The field that holds a message of this name in a choice."""
    return name.lower()


def entry_around(event: Event) -> Entry:
    return Entry(FLEET, 0, 0, ByScheduler(1), 5, event)


def test_strategies_and_tuples_name_every_event() -> None:
    """The table of strategies and the tuples of types have exactly the union's members."""
    assert set(strategies.EVENTS) == set(EVENT_TYPES)
    assert {*REQUEST_EVENTS, *FLEET_EVENTS} == set(EVENT_TYPES)


@pytest.mark.parametrize(
    ("message", "union"),
    [(pb.Event, Event), (pb.Proposal, Proposable)],
    ids=["Event", "Proposal"],
)
def test_schema_choices_equal_the_unions(message: Any, union: Any) -> None:
    """Each choice of the schema has a field for each member, of the member's name and type."""
    (choice,) = message.DESCRIPTOR.oneofs
    schema = {field.name: field.message_type.name for field in choice.fields}
    assert schema == {
        field_of(member.__name__): member.__name__ for member in typing.get_args(union)
    }


@pytest.mark.parametrize("event_type", EVENT_TYPES, ids=lambda t: t.__name__)
def test_schema_fields_equal_the_events_fields(event_type: type[Event]) -> None:
    """No field of an event is missing in the schema, and none is there without need."""
    message = getattr(pb, event_type.__name__)
    assert {f.name for f in message.DESCRIPTOR.fields} == {f.name for f in attrs.fields(event_type)}


@pytest.mark.parametrize("table", ENUM_TABLES, ids=lambda table: table.members.__name__)
def test_enums_agree(table: Any) -> None:
    """Each member has its own number, each number but 0 its member; 0 decodes to nothing."""
    assert {table.encode(member) for member in table.members} == set(table.wire.values()) - {0}
    for member in table.members:
        assert table.decode(table.encode(member)) is member
    with pytest.raises(codec.MalformedRecord) as caught:
        table.decode(0)
    assert caught.value.field == table.members.__name__


@pytest.mark.parametrize("event_type", EVENT_TYPES, ids=lambda t: t.__name__)
@given(data=st.data())
def test_each_event_comes_back_equal(event_type: type[Event], data: st.DataObject) -> None:
    """Encoding and decoding an entry around any event gives an equal entry."""
    entry = data.draw(strategies.entries(strategies.EVENTS[event_type]))
    assert codec.entry_from_bytes(codec.entry_to_bytes(entry)) == entry


@given(strategies.proposals())
def test_each_proposal_comes_back_equal(proposal: Proposal) -> None:
    """Encoding and decoding a proposal gives an equal proposal."""
    assert codec.proposal_from_bytes(codec.proposal_to_bytes(proposal)) == proposal


@given(st.lists(strategies.entries(), max_size=4))
def test_a_batch_keeps_order(entries: list[Entry]) -> None:
    """A batch comes back as the same entries in the same order."""
    parsed = codec.batch_from_bytes(codec.batch_to_bytes(entries))
    assert [codec.decode_entry(message) for message in parsed] == entries


def test_zero_is_not_absence() -> None:
    """Page 0 and tag 0 differ from a page and a tag that nobody named."""
    zero = entry_around(Aborted(Cause.DEADLINE, "d0", page=0, tag_expected=0, tag_found=0))
    absent = entry_around(Aborted(Cause.DEADLINE, "d0"))
    assert codec.entry_from_bytes(codec.entry_to_bytes(zero)) == zero
    assert codec.entry_from_bytes(codec.entry_to_bytes(absent)) == absent


@given(st.binary(max_size=200))
@example(b"\xff")
def test_any_bytes_have_a_typed_answer(data: bytes) -> None:
    """Whatever arrives is a value, a malformed record or an unknown event, nothing else."""
    for parse in (codec.entry_from_bytes, codec.proposal_from_bytes, codec.batch_from_bytes):
        try:
            parse(data)
        except (codec.MalformedRecord, codec.UnknownEvent):
            continue


@given(strategies.entries(), st.data())
def test_a_damaged_entry_has_a_typed_answer(entry: Entry, data: st.DataObject) -> None:
    """Flipping any byte of a good entry gives a value or a typed error, nothing else."""
    raw = bytearray(codec.entry_to_bytes(entry))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        codec.entry_from_bytes(bytes(raw))
    except (codec.MalformedRecord, codec.UnknownEvent):
        return


def test_an_event_of_a_later_version_is_named_as_such() -> None:
    """A choice that holds only fields of a later version is unknown, not malformed."""
    message = codec.encode_entry(entry_around(Released(GRANT)))
    message.event.Clear()
    message.event.MergeFromString(b"\x9a\x06\x00")  # field 99, an empty message
    with pytest.raises(codec.UnknownEvent) as caught:
        codec.decode_entry(message)
    assert caught.value.numbers == (99,)


def test_an_empty_choice_is_malformed() -> None:
    """An entry without an event, and a proposal without a body, are malformed by name."""
    message = codec.encode_entry(entry_around(Released(GRANT)))
    message.event.Clear()
    message.event.SetInParent()
    with pytest.raises(codec.MalformedRecord) as caught:
        codec.decode_entry(message)
    assert caught.value.field == "Event.event"
    with pytest.raises(codec.MalformedRecord) as caught:
        codec.decode_proposal(pb.Proposal(party=pb.Party(engine="d0", incarnation=1)))
    assert caught.value.field == "Proposal.body"


def test_a_missing_part_is_not_read_as_its_default() -> None:
    """A transfer without a token range is malformed, not a transfer of no tokens."""
    event = Transferred(GRANT, TokenRange(0, 3), (PageRange(0, 1),), 64, 9, 1, 1)
    message = codec.encode_event(event)
    message.transferred.ClearField("tokens")
    with pytest.raises(codec.MalformedRecord) as caught:
        codec.decode_event(message)
    assert (caught.value.field, caught.value.reason) == ("Transferred.tokens", "is missing")


@pytest.mark.parametrize("part", ["proposer", "event"])
def test_an_entry_needs_its_parts(part: str) -> None:
    """An entry without proposer or event is malformed, and the error names the part."""
    message = codec.encode_entry(entry_around(Released(GRANT)))
    message.ClearField(part)  # type: ignore[arg-type] # the stub wants a literal
    with pytest.raises(codec.MalformedRecord) as caught:
        codec.decode_entry(message)
    assert caught.value.field == f"Entry.{part}"


def test_a_value_that_no_event_may_have_is_malformed() -> None:
    """What a constructor refuses is a malformed record with the constructor's words."""
    message = codec.encode_event(Released(GRANT))
    message.released.grant.serial = 0
    with pytest.raises(codec.MalformedRecord, match="serial"):
        codec.decode_event(message)


def test_a_number_too_large_for_the_schema_is_our_own_fault() -> None:
    """A value of more than 64 bits is refused by a typed error before anything is written."""
    with pytest.raises(codec.UnencodableRecord) as caught:
        codec.encode_event(Resumed(epoch=1 << 64, last_position=0))
    assert caught.value.kind == "Resumed"
    with pytest.raises(codec.UnencodableRecord) as caught:
        codec.encode_entry(Entry(FLEET, 1 << 64, 0, ByScheduler(1), 5, Resumed(1, 0)))
    assert caught.value.kind == "Entry"
