"""Entries, events and proposals, to protobuf and back, without loss.

Owns: which event stands in which field of the schema, and the promise of totality:
what was encoded decodes to an equal value, and whatever bytes come in, the answer is a value,
`MalformedRecord` or `UnknownEvent`, never another exception.
Must not know: streams, files, or which event is legal when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, assert_never

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    Drained,
    Draining,
    Dropped,
    Entry,
    Event,
    Failed,
    Finished,
    Lost,
    Proposable,
    Proposal,
    Quarantined,
    Recovered,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Resumed,
    Transferred,
    Verified,
)
from lifecycle.ids import RequestId
from transport import codec_fleet as fleet
from transport import codec_requests as requests
from transport.codec_values import (
    CodecError,
    MalformedRecord,
    UnencodableRecord,
    UnknownEvent,
    decode_grant,
    decode_pages,
    decode_party,
    decode_proposer,
    encode_grant,
    encode_pages,
    encode_party,
    encode_proposer,
    require,
)
from transport.pb import lifecycle_pb2 as pb

__all__ = [
    "CodecError",
    "MalformedRecord",
    "UnencodableRecord",
    "UnknownEvent",
    "batch_from_bytes",
    "batch_to_bytes",
    "decode_entry",
    "decode_event",
    "decode_grant",
    "decode_pages",
    "decode_party",
    "decode_proposal",
    "encode_entry",
    "encode_event",
    "encode_grant",
    "encode_pages",
    "encode_party",
    "encode_proposal",
    "entry_from_bytes",
    "entry_to_bytes",
    "proposal_from_bytes",
    "proposal_to_bytes",
]

M = TypeVar("M", bound=Message)


def encode_event(event: Event) -> pb.Event:
    """Raises `UnencodableRecord` when a value does not fit the schema."""
    try:
        return _encode_event(event)
    except (ValueError, TypeError) as error:
        raise UnencodableRecord(type(event).__name__, str(error)) from error


def _encode_event(event: Event) -> pb.Event:
    match event:
        case Admitted():
            return pb.Event(admitted=requests.encode_admitted(event))
        case Rejected():
            return pb.Event(rejected=requests.encode_rejected(event))
        case Reserved():
            return pb.Event(reserved=requests.encode_reserved(event))
        case Transferred():
            return pb.Event(transferred=requests.encode_transferred(event))
        case Drained():
            return pb.Event(drained=requests.encode_drained(event))
        case Verified():
            return pb.Event(verified=requests.encode_verified(event))
        case Finished():
            return pb.Event(finished=requests.encode_finished(event))
        case Aborted():
            return pb.Event(aborted=requests.encode_aborted(event))
        case Requeued():
            return pb.Event(requeued=requests.encode_requeued(event))
        case Quarantined():
            return pb.Event(quarantined=requests.encode_quarantined(event))
        case Released():
            return pb.Event(released=requests.encode_released(event))
        case Dropped():
            return pb.Event(dropped=requests.encode_dropped(event))
        case Attached():
            return pb.Event(attached=fleet.encode_attached(event))
        case Draining():
            return pb.Event(draining=fleet.encode_draining(event))
        case Lost():
            return pb.Event(lost=fleet.encode_lost(event))
        case Resumed():
            return pb.Event(resumed=fleet.encode_resumed(event))
        case Recovered():
            return pb.Event(recovered=fleet.encode_recovered(event))
        case _:
            assert_never(event)


def decode_event(message: pb.Event) -> Event:
    """Raises `MalformedRecord` or, for an event of a later version, `UnknownEvent`."""
    try:
        return _decode_event(message)
    except ValueError as error:
        raise MalformedRecord(f"Event.{message.WhichOneof('event')}", str(error)) from error


_DECODERS: dict[str, Callable[[Any], Event]] = {
    "admitted": requests.decode_admitted,
    "rejected": requests.decode_rejected,
    "reserved": requests.decode_reserved,
    "transferred": requests.decode_transferred,
    "drained": requests.decode_drained,
    "verified": requests.decode_verified,
    "finished": requests.decode_finished,
    "aborted": requests.decode_aborted,
    "requeued": requests.decode_requeued,
    "quarantined": requests.decode_quarantined,
    "released": requests.decode_released,
    "dropped": requests.decode_dropped,
    "attached": fleet.decode_attached,
    "draining": fleet.decode_draining,
    "lost": fleet.decode_lost,
    "resumed": fleet.decode_resumed,
    "recovered": fleet.decode_recovered,
}


def _decode_event(message: pb.Event) -> Event:
    name = message.WhichOneof("event")
    if name is None:
        raise _nothing_known("Event.event", message)
    return _DECODERS[name](getattr(message, name))


def _nothing_known(field: str, message: Message) -> CodecError:
    """An empty choice is malformed, unless the field that was set is one of a later version."""
    unknown = UnknownFieldSet(message)
    numbers = tuple(sorted({unknown[i].field_number for i in range(len(unknown))}))
    return UnknownEvent(field, numbers) if numbers else MalformedRecord(field, "is missing")


def encode_entry(entry: Entry) -> pb.Entry:
    """Raises `UnencodableRecord` when a value does not fit the schema."""
    event = encode_event(entry.event)
    try:
        return pb.Entry(
            request=entry.request,
            sequence=entry.sequence,
            attempt=entry.attempt,
            proposer=encode_proposer(entry.proposer),
            time_ns=entry.time_ns,
            event=event,
        )
    except (ValueError, TypeError) as error:
        raise UnencodableRecord("Entry", str(error)) from error


def decode_entry(message: pb.Entry) -> Entry:
    """Raises `MalformedRecord` or `UnknownEvent`."""
    said = message.event
    name = said.WhichOneof("event")
    if name is None or not message.HasField("proposer"):
        require(message, "proposer")
        require(message, "event")
        raise _nothing_known("Event.event", said)
    try:
        event = _DECODERS[name](getattr(said, name))
    except ValueError as error:
        raise MalformedRecord(f"Event.{name}", str(error)) from error
    try:
        return Entry(
            RequestId(message.request),
            message.sequence,
            message.attempt,
            decode_proposer(message.proposer),
            message.time_ns,
            event,
        )
    except ValueError as error:
        raise MalformedRecord("Entry", str(error)) from error


def encode_proposal(proposal: Proposal) -> pb.Proposal:
    """Raises `UnencodableRecord` when a value does not fit the schema."""
    try:
        message = pb.Proposal(
            party=encode_party(proposal.party),
            number=proposal.number,
            request=proposal.request,
            attempt=proposal.attempt,
        )
        _encode_body(proposal.body, message)
    except (ValueError, TypeError) as error:
        raise UnencodableRecord("Proposal", str(error)) from error
    return message


def _encode_body(body: Proposable, message: pb.Proposal) -> None:
    match body:
        case Reserved():
            message.reserved.CopyFrom(requests.encode_reserved(body))
        case Transferred():
            message.transferred.CopyFrom(requests.encode_transferred(body))
        case Drained():
            message.drained.CopyFrom(requests.encode_drained(body))
        case Verified():
            message.verified.CopyFrom(requests.encode_verified(body))
        case Finished():
            message.finished.CopyFrom(requests.encode_finished(body))
        case Released():
            message.released.CopyFrom(requests.encode_released(body))
        case Failed():
            message.failed.CopyFrom(requests.encode_failed(body))
        case _:
            assert_never(body)


def decode_proposal(message: pb.Proposal) -> Proposal:
    """Raises `MalformedRecord` or `UnknownEvent`."""
    require(message, "party")
    try:
        return Proposal(
            party=decode_party(message.party),
            number=message.number,
            request=RequestId(message.request),
            attempt=message.attempt,
            body=_decode_body(message),
        )
    except ValueError as error:
        raise MalformedRecord("Proposal", str(error)) from error


def _decode_body(message: pb.Proposal) -> Proposable:
    match message.WhichOneof("body"):
        case "reserved":
            return requests.decode_reserved(message.reserved)
        case "transferred":
            return requests.decode_transferred(message.transferred)
        case "drained":
            return requests.decode_drained(message.drained)
        case "verified":
            return requests.decode_verified(message.verified)
        case "finished":
            return requests.decode_finished(message.finished)
        case "released":
            return requests.decode_released(message.released)
        case "failed":
            return requests.decode_failed(message.failed)
        case None:
            raise _nothing_known("Proposal.body", message)


def _parse(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedRecord(message.DESCRIPTOR.name, str(error)) from error
    return message


def entry_to_bytes(entry: Entry) -> bytes:
    return encode_entry(entry).SerializeToString(deterministic=True)


def entry_from_bytes(data: bytes) -> Entry:
    return decode_entry(_parse(pb.Entry(), data))


def proposal_to_bytes(proposal: Proposal) -> bytes:
    return encode_proposal(proposal).SerializeToString(deterministic=True)


def proposal_from_bytes(data: bytes) -> Proposal:
    return decode_proposal(_parse(pb.Proposal(), data))


def batch_to_bytes(entries: Iterable[Entry]) -> bytes:
    """Entries at consecutive positions as one `EntryBatch`."""
    batch = pb.EntryBatch(entries=[encode_entry(entry) for entry in entries])
    return batch.SerializeToString(deterministic=True)


def batch_from_bytes(data: bytes) -> tuple[pb.Entry, ...]:
    """The batch's entries, parsed but not yet decoded, so that each can fail by itself."""
    return tuple(_parse(pb.EntryBatch(), data).entries)
