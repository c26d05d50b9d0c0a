"""The values that events are made of, to protobuf and back.

Owns: the codec's errors, the enums' tables, parties, grants, ranges, proposers, legs.
Must not know: which event carries which value.

Decoders raise `MalformedRecord` for a field that is missing or unknown, and let the
constructors' `ValueError` pass; `transport.codec` turns it into a `MalformedRecord`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from lifecycle.events import (
    ByEngine,
    ByScheduler,
    Cause,
    FenceScope,
    FinishReason,
    Leg,
    LostCause,
    Proof,
    Proposer,
    Purpose,
    QuarantineCause,
    RecoveryProof,
    RejectCode,
    Role,
)
from lifecycle.ids import EngineId, GrantId, PageRange, Party, TokenRange, party_of
from transport.pb import lifecycle_pb2 as pb

E = TypeVar("E", bound=Enum)


class CodecError(Exception):
    """A record cannot be carried over."""


class MalformedRecord(CodecError):
    """A record from outside breaks the schema: whoever sent or stored it is at fault."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class UnknownEvent(CodecError):
    """A record holds an event of a later version; it is well formed as far as can be told."""

    def __init__(self, field: str, numbers: tuple[int, ...]) -> None:
        super().__init__(f"{field} holds none of the known events, but the fields {numbers}")
        self.field = field
        self.numbers = numbers


class UnencodableRecord(CodecError):
    """A value of our own does not fit the schema, say a number of more than 64 bits."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind} does not fit the schema: {reason}")
        self.kind = kind
        self.reason = reason


class EnumTable(Generic[E]):
    """One enum of the lifecycle and its counterpart in the schema, matched by name."""

    def __init__(self, members: type[E], wire: Any, prefix: str) -> None:
        self.members = members
        self.wire = wire
        self._name = members.__name__
        self._to = {member: wire.Value(f"{prefix}_{member.name}") for member in members}
        self._from = {number: member for member, number in self._to.items()}

    def encode(self, member: E) -> Any:
        """The number in the schema; Any, because each schema enum has a number type of its own."""
        return self._to[member]

    def decode(self, number: int) -> E:
        """The member; raises `MalformedRecord` for a number without one."""
        member = self._from.get(number)
        if member is None:
            raise MalformedRecord(self._name, f"{number} is no known value")
        return member


PURPOSES = EnumTable(Purpose, pb.Purpose, "PURPOSE")
PROOFS = EnumTable(Proof, pb.Proof, "PROOF")
REJECT_CODES = EnumTable(RejectCode, pb.RejectCode, "REJECT_CODE")
CAUSES = EnumTable(Cause, pb.Cause, "CAUSE")
FINISH_REASONS = EnumTable(FinishReason, pb.FinishReason, "FINISH_REASON")
QUARANTINE_CAUSES = EnumTable(QuarantineCause, pb.QuarantineCause, "QUARANTINE_CAUSE")
ROLES = EnumTable(Role, pb.Role, "ROLE")
FENCE_SCOPES = EnumTable(FenceScope, pb.FenceScope, "FENCE_SCOPE")
LOST_CAUSES = EnumTable(LostCause, pb.LostCause, "LOST_CAUSE")
RECOVERY_PROOFS = EnumTable(RecoveryProof, pb.RecoveryProof, "RECOVERY_PROOF")
ENUM_TABLES: tuple[EnumTable[Any], ...] = (
    PURPOSES,
    PROOFS,
    REJECT_CODES,
    CAUSES,
    FINISH_REASONS,
    QUARANTINE_CAUSES,
    ROLES,
    FENCE_SCOPES,
    LOST_CAUSES,
    RECOVERY_PROOFS,
)


def require(message: Message, field: str) -> None:
    """Raise `MalformedRecord` unless the sub-message is there: its default could pass for data."""
    if not message.HasField(field):
        raise MalformedRecord(f"{message.DESCRIPTOR.name}.{field}", "is missing")


def encode_party(party: Party) -> pb.Party:
    return pb.Party(engine=party.engine, incarnation=party.incarnation, rank=party.rank)


@lru_cache(maxsize=4096)
def _party(engine: str, incarnation: int, rank: int) -> Party:
    return party_of(EngineId(engine), incarnation, rank)


def decode_party(message: pb.Party) -> Party:
    return _party(message.engine, message.incarnation, message.rank)


def encode_grant(grant: GrantId) -> pb.GrantId:
    return pb.GrantId(owner=encode_party(grant.owner), serial=grant.serial)


@lru_cache(maxsize=65_536)
def _grant(engine: str, incarnation: int, rank: int, serial: int) -> GrantId:
    """A grant is named by most entries of its request; equal names are the same object."""
    return GrantId(_party(engine, incarnation, rank), serial)


def decode_grant(message: pb.GrantId) -> GrantId:
    owner = message.owner
    try:
        return _grant(owner.engine, owner.incarnation, owner.rank, message.serial)
    except ValueError:
        # A party that is missing reads as the incarnation 0, which there is none of.
        require(message, "owner")
        raise


def encode_pages(pages: Iterable[PageRange]) -> list[pb.PageRange]:
    return [pb.PageRange(first=r.first, count=r.count) for r in pages]


def decode_pages(messages: Sequence[pb.PageRange]) -> tuple[PageRange, ...]:
    # A repeated field's slice is a list; its own iterator ends by an exception, which costs more.
    return tuple([PageRange(message.first, message.count) for message in messages[:]])


def encode_tokens(tokens: TokenRange) -> pb.TokenRange:
    return pb.TokenRange(start=tokens.start, stop=tokens.stop)


def decode_tokens(message: pb.TokenRange) -> TokenRange:
    return TokenRange(message.start, message.stop)


def encode_proposer(proposer: Proposer) -> pb.Proposer:
    match proposer:
        case ByEngine(party, number):
            by_engine = pb.ByEngine(party=encode_party(party), number=number)
            return pb.Proposer(by_engine=by_engine)
        case ByScheduler(epoch):
            return pb.Proposer(by_scheduler=pb.ByScheduler(epoch=epoch))


def decode_proposer(message: pb.Proposer) -> Proposer:
    match message.WhichOneof("proposer"):
        case "by_engine":
            said = message.by_engine
            party = said.party
            try:
                return ByEngine(_party(party.engine, party.incarnation, party.rank), said.number)
            except ValueError:
                require(said, "party")
                raise
        case "by_scheduler":
            return _by_scheduler(message.by_scheduler.epoch)
        case None:
            raise MalformedRecord("Proposer.proposer", "is missing")


@lru_cache(maxsize=64)
def _by_scheduler(epoch: int) -> ByScheduler:
    """A log has few epochs, and each speaks often."""
    return ByScheduler(epoch)


def encode_leg(leg: Leg) -> pb.Leg:
    return pb.Leg(
        engine=leg.engine,
        incarnation=leg.incarnation,
        ranks=leg.ranks,
        page_tokens=leg.page_tokens,
        pages_needed=leg.pages_needed,
        pages_booked=leg.pages_booked,
        pages_capacity=leg.pages_capacity,
        pages_free=leg.pages_free,
        layout=leg.layout,
    )


def decode_leg(message: pb.Leg) -> Leg:
    # In the order of the fields: a constructor takes a third longer with names.
    return Leg(
        EngineId(message.engine),
        message.incarnation,
        message.ranks,
        message.page_tokens,
        message.pages_needed,
        message.pages_booked,
        message.pages_capacity,
        message.pages_free,
        message.layout,
    )
