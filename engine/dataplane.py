"""The data plane adapter: the verbs by which KV pages move, and the values they exchange.

Owns the words of the adapter: what may be written where, what an answer promises, what counts as a
proof.
It must not know torch, sockets, processes or any back end; `transport.planes` holds those.
Grants and parties are opaque strings here, compared for equality only.
"""

import enum
import json
from collections.abc import Sequence
from typing import Protocol

import attrs

from engine.dataplane_errors import DescriptorMalformed, OutOfBounds

GrantKey = str
"""A grant in stable text form; unique for ever, never reused."""

PartyKey = str
"""One life of one rank of one engine in stable text form; never reused by a later life."""


class Answer(enum.Enum):
    """What `poll` says of a ticket; `DONE` and `FAILED_QUIESCED` never change again."""

    IN_FLIGHT = "in flight"
    DONE = "done"
    """Every byte was placed, and nothing of this ticket lands again."""
    FAILED_QUIESCED = "failed, quiesced"
    """Not every byte was placed, and nothing of this ticket lands again."""
    IN_DOUBT = "in doubt"
    """An error after something may have left: bytes may still land. Only proof ends this."""


class FenceScope(enum.Enum):
    """The smallest thing whose access the owner can end with proof."""

    NONE = "none"
    PROCESS = "process"
    GRANT = "grant"
    REGION = "region"


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a back end can promise."""

    name: str
    fence_scope: FenceScope
    receiver_places_bytes: bool


@attrs.frozen(kw_only=True)
class Span:
    """`length` bytes of the owner's pool that begin at `offset`."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first offset behind the span."""
        return self.offset + self.length


@attrs.frozen(kw_only=True)
class Write:
    """Copy `length` bytes from the writer's staging region into the owner's pool region."""

    source_offset: int
    target_offset: int
    length: int


@attrs.frozen(kw_only=True)
class Region:
    """Registered memory of this process; a plane has one, either staging or pool."""

    length: int


@attrs.frozen(kw_only=True)
class Peer:
    """An owner as its writer sees it; `serial` is unique within one plane."""

    serial: int
    incarnation: str
    pool_bytes: int


@attrs.frozen(kw_only=True, eq=False)
class Ticket:
    """One accepted post, compared by identity; the plane forgets it when the caller does."""

    serial: int
    peer: Peer
    grant: GrantKey
    length: int


@attrs.frozen(kw_only=True)
class ObservedExit:
    """Somebody has seen this process end, on the host that holds the memory.

    Only whoever waited for the process, or held a handle of it, may make one.
    A closed stream, a missed heartbeat or a successor that attached is not this.
    """

    party: PartyKey
    pid: int


@attrs.frozen(kw_only=True)
class FenceProof:
    """The owner's proof that nothing lands any more from `parties` (None: from anybody)."""

    scope: FenceScope
    grant: GrantKey | None
    parties: tuple[PartyKey, ...] | None
    evidence: str


@attrs.frozen(kw_only=True)
class CloseProof:
    """The writer's proof that no post to `peer` reads local memory any more."""

    peer: Peer


@attrs.frozen(kw_only=True)
class Descriptor:
    """What an owner publishes: where its pool is, which life it is, and the key to it.

    The encoded form is a credential: it belongs on the engines' streams, and `redacted` in logs.
    """

    plane: str
    endpoint: str
    pool_bytes: int
    incarnation: str
    key: str = attrs.field(repr=False)

    def encode(self) -> str:
        """Return the text form, key included."""
        return json.dumps(attrs.asdict(self), sort_keys=True, separators=(",", ":"))

    def redacted(self) -> str:
        """Return the text form without the key, which no `open_peer` accepts."""
        return attrs.evolve(self, key="").encode()

    @classmethod
    def decode(cls, text: str, *, plane: str) -> "Descriptor":
        """Read the text form of a descriptor for `plane`, or raise `DescriptorMalformed`."""
        try:
            fields = json.loads(text)
        except ValueError:
            raise DescriptorMalformed("it is not JSON") from None
        kinds = {"plane": str, "endpoint": str, "pool_bytes": int, "incarnation": str, "key": str}
        if not isinstance(fields, dict) or fields.keys() != kinds.keys():
            raise DescriptorMalformed(f"it must have exactly the fields {sorted(kinds)}")
        for name, kind in kinds.items():
            if type(fields[name]) is not kind:
                raise DescriptorMalformed(f"{name} must be {kind.__name__}")
            if kind is str and not fields[name].isprintable():
                raise DescriptorMalformed(f"{name} must be printable text")
        if fields["plane"] != plane:
            raise DescriptorMalformed(f"it is for plane {fields['plane']!r}, not {plane!r}")
        if fields["pool_bytes"] <= 0 or not _is_key(fields["key"]):
            raise DescriptorMalformed("it has no pool or no key")
        return cls(**fields)


def _is_key(text: str) -> bool:
    """Whether the text is whole bytes in lower-case hexadecimal digits."""
    return text != "" and len(text) % 2 == 0 and not text.strip("0123456789abcdef")


WRITES_PER_TICKET_MAX = 16_384


def check_span(*, what: str, offset: int, length: int, limit: int) -> None:
    """Raise `OutOfBounds` unless `length` > 0 bytes at `offset` lie inside 0..`limit`."""
    if offset < 0 or length <= 0 or offset + length > limit:
        raise OutOfBounds(what=what, offset=offset, length=length, limit=limit)


def check_writes(writes: Sequence[Write], *, staging_bytes: int, pool_bytes: int) -> int:
    """Return the sum of lengths, or raise `OutOfBounds` for the first write that does not fit."""
    if not 0 < len(writes) <= WRITES_PER_TICKET_MAX:
        raise OutOfBounds(
            what="number of writes", offset=0, length=len(writes), limit=WRITES_PER_TICKET_MAX
        )
    for write in writes:
        check_span(
            what="source", offset=write.source_offset, length=write.length, limit=staging_bytes
        )
        check_span(what="target", offset=write.target_offset, length=write.length, limit=pool_bytes)
    return sum(write.length for write in writes)


class DataPlane(Protocol):
    """One back end, as one process holds it.

    Every verb is synchronous, does not wait for a peer, and may be called from any thread.
    A wake-up given to the back end is called from any thread after an answer may have changed; it
    is a hint and never evidence.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this back end can promise."""
        ...

    def register(self, buffer: memoryview) -> Region:
        """Declare the one region of this plane: staging for a writer, the pool for an owner."""
        ...

    def descriptor(self) -> str:
        """Return what the owner publishes to its writers; it contains the key."""
        ...

    def open_peer(self, descriptor: str) -> Peer:
        """Accept an owner's descriptor; `PeerMismatch` here or a failed ticket at first use."""
        ...

    def expose(
        self, grant: GrantKey, *, spans: Sequence[Span], parties: Sequence[PartyKey]
    ) -> None:
        """Owner: let `parties` write into `spans` for `grant`.

        A back end that cannot enforce this records it.
        Raises `OutOfBounds`, `GrantEnded`, or `PlaneMisused` for a second, different exposure.
        """
        ...

    def post(self, peer: Peer, writes: Sequence[Write], grant: GrantKey) -> Ticket:
        """Writer: start the writes; the staging bytes stay untouched until the ticket has ended.

        Raises `PostRefused` (nothing left, and there is no ticket).
        """
        ...

    def poll(self, ticket: Ticket) -> Answer:
        """Say where the ticket stands; may be asked for ever."""
        ...

    def explain(self, ticket: Ticket) -> str:
        """Say in words why the ticket failed or is in doubt; empty otherwise."""
        ...

    def inquire(self, ticket: Ticket) -> None:
        """Writer: ask the back end again about a ticket in doubt; the answer comes by `poll`.

        An inquiry gives the ticket up: what of it has not landed by then never will.
        """
        ...

    def fence(self, grant: GrantKey) -> FenceProof | None:
        """Owner: refuse the grant for ever; None until that is proved, so ask again."""
        ...

    def fence_party(
        self, party: PartyKey, observed: ObservedExit | None = None
    ) -> FenceProof | None:
        """Owner: refuse everything from one party for ever; None until that is proved."""
        ...

    def retire(self, grant: GrantKey) -> None:
        """Owner: every party has drained, so the exposure ends for ever; proves nothing."""
        ...

    def close(self, peer: Peer) -> CloseProof | None:
        """Writer: post no more to `peer`; None until local memory is no longer read for it."""
        ...

    def shutdown(self) -> None:
        """End the plane; may wait for its threads, so keep it off an event loop."""
        ...
