"""Each event of the fleet's log, to protobuf and back.

Owns: the fields of the fleet events.
Must not know: how entries wrap them.
"""

from __future__ import annotations

from lifecycle.events import Attached, Draining, Lost, Recovered, Resumed
from lifecycle.ids import EngineId
from transport.codec_values import (
    FENCE_SCOPES,
    LOST_CAUSES,
    RECOVERY_PROOFS,
    ROLES,
    decode_grant,
    encode_grant,
    require,
)
from transport.pb import lifecycle_pb2 as pb


def encode_attached(event: Attached) -> pb.Attached:
    return pb.Attached(
        engine=event.engine,
        incarnation=event.incarnation,
        role=ROLES.encode(event.role),
        ranks=event.ranks,
        pages=event.pages,
        page_tokens=event.page_tokens,
        layers=event.layers,
        slots=event.slots,
        context_tokens=event.context_tokens,
        layout=event.layout,
        endpoints=event.endpoints,
        plane=event.plane,
        fence_scope=FENCE_SCOPES.encode(event.fence_scope),
    )


def decode_attached(message: pb.Attached) -> Attached:
    return Attached(
        engine=EngineId(message.engine),
        incarnation=message.incarnation,
        role=ROLES.decode(message.role),
        ranks=message.ranks,
        pages=message.pages,
        page_tokens=message.page_tokens,
        layers=message.layers,
        slots=message.slots,
        context_tokens=message.context_tokens,
        layout=message.layout,
        endpoints=tuple(message.endpoints),
        plane=message.plane,
        fence_scope=FENCE_SCOPES.decode(message.fence_scope),
    )


def encode_draining(event: Draining) -> pb.Draining:
    return pb.Draining(
        engine=event.engine,
        incarnation=event.incarnation,
    )


def decode_draining(message: pb.Draining) -> Draining:
    return Draining(
        engine=EngineId(message.engine),
        incarnation=message.incarnation,
    )


def encode_lost(event: Lost) -> pb.Lost:
    return pb.Lost(
        engine=event.engine,
        incarnation=event.incarnation,
        cause=LOST_CAUSES.encode(event.cause),
    )


def decode_lost(message: pb.Lost) -> Lost:
    return Lost(
        engine=EngineId(message.engine),
        incarnation=message.incarnation,
        cause=LOST_CAUSES.decode(message.cause),
    )


def encode_resumed(event: Resumed) -> pb.Resumed:
    return pb.Resumed(
        epoch=event.epoch,
        last_position=event.last_position,
    )


def decode_resumed(message: pb.Resumed) -> Resumed:
    return Resumed(
        epoch=message.epoch,
        last_position=message.last_position,
    )


def encode_recovered(event: Recovered) -> pb.Recovered:
    return pb.Recovered(
        grant=encode_grant(event.grant),
        proof=RECOVERY_PROOFS.encode(event.proof),
    )


def decode_recovered(message: pb.Recovered) -> Recovered:
    require(message, "grant")
    return Recovered(
        grant=decode_grant(message.grant),
        proof=RECOVERY_PROOFS.decode(message.proof),
    )
