"""An in-memory plane without threads: the reference that the contract is read from.

Owns a network whose writes land only when told to, in order, late, or after their stream broke.
It must not know processes or files.
The receiver places the bytes, as in the gRPC plane, so the fence scope is the grant.
"""

import secrets
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from engine.dataplane import (
    Answer,
    Capabilities,
    CloseProof,
    Descriptor,
    FenceProof,
    FenceScope,
    GrantKey,
    ObservedExit,
    PartyKey,
    Peer,
    Region,
    Span,
    Ticket,
    Write,
    check_writes,
)
from engine.dataplane_errors import PeerClosed, PeerMismatch, PlaneMisused
from transport.planes.placement import Fate, PlacementTable, Refusal, TicketName
from transport.planes.segment import Bytes, Copy, as_bytes, copy_bytes
from transport.planes.tickets import TicketBook

PLANE_NAME = "naive"


@attrs.define(eq=False)
class _Message:
    """A ticket's bytes on their way, taken from the staging region when the ticket was posted."""

    writer: "NaivePlane"
    ticket: Ticket
    name: TicketName
    writes: tuple[Write, ...]
    payloads: tuple[Bytes, ...]
    broken: bool = False


class NaiveNetwork:
    """Carries the writes of every plane that was made with it; nothing moves by itself."""

    def __init__(self) -> None:
        self.owners: dict[str, NaivePlane] = {}
        self.messages: deque[_Message] = deque()

    def deliver(self) -> None:
        """Let everything that is on its way arrive, broken streams' bytes included."""
        while self.messages:
            message = self.messages.popleft()
            refusal = self._land(message)
            if not message.broken:
                message.writer.heard(message.ticket, refusal)

    def break_streams(self) -> None:
        """Break what is on its way: the writers see an error, and the bytes still arrive later."""
        for message in self.messages:
            if not message.broken:
                message.broken = True
                message.writer.book.settle(message.ticket, Answer.IN_DOUBT, "the stream broke")

    def _land(self, message: _Message) -> Refusal | None:
        owner = message.writer.owner_of(message.ticket.peer)
        extents = [Span(offset=one.target_offset, length=one.length) for one in message.writes]
        refusal = owner.table.admit(message.name, extents)
        if refusal is not None:
            return refusal
        for extent, payload in zip(extents, message.payloads, strict=True):
            refusal = owner.table.begin(message.name, extent)
            if refusal is not None:
                break
            try:
                owner.copy(owner.pool[extent.offset : extent.end], payload)
            except OSError as error:
                # The writer learns only that the stream broke.
                message.broken = True
                message.writer.book.settle(message.ticket, Answer.IN_DOUBT, str(error))
                refusal = Refusal.TICKET
                break
            finally:
                owner.table.end(message.name)
        if refusal is None and not owner.table.complete(message.name):
            refusal = Refusal.TICKET
        owner.table.give_up(message.name)
        owner.book.wake()
        return refusal


class NaivePlane:
    """The in-memory back end of one party."""

    capabilities = Capabilities(
        name=PLANE_NAME, fence_scope=FenceScope.GRANT, receiver_places_bytes=True
    )

    def __init__(
        self,
        network: NaiveNetwork,
        *,
        party: PartyKey,
        incarnation: str,
        wake: Callable[[], None] | None = None,
        copy: Copy = copy_bytes,
    ) -> None:
        self._network = network
        self._party = party
        self._incarnation = incarnation
        self._key = secrets.token_hex(16)
        self._ticket_prefix = secrets.token_bytes(16)
        self._region: Bytes | None = None
        self._links: dict[int, NaivePlane] = {}
        self._closed: set[int] = set()
        self._peer_serial = 0
        self.book = TicketBook(wake)
        self.table = PlacementTable()
        self.copy = copy

    @property
    def pool(self) -> Bytes:
        """The registered region."""
        if self._region is None:
            raise PlaneMisused("register a region first")
        return self._region

    def register(self, buffer: memoryview) -> Region:
        """Declare the one region."""
        if self._region is not None:
            raise PlaneMisused("a plane has one region, and this one has it already")
        self._region = as_bytes(buffer)
        return Region(length=self._region.size)

    def descriptor(self) -> str:
        """Publish the pool on the network."""
        self._network.owners[self._incarnation] = self
        return Descriptor(
            plane=PLANE_NAME,
            endpoint="here",
            pool_bytes=self.pool.size,
            incarnation=self._incarnation,
            key=self._key,
        ).encode()

    def open_peer(self, descriptor: str) -> Peer:
        """Find the owner on the network and compare its key."""
        published = Descriptor.decode(descriptor, plane=PLANE_NAME)
        owner = self._network.owners.get(published.incarnation)
        if owner is None or owner._key != published.key:  # noqa: SLF001 - the same class
            raise PeerMismatch(endpoint=published.endpoint, why="other incarnation or key")
        self._peer_serial += 1
        self._links[self._peer_serial] = owner
        return Peer(
            serial=self._peer_serial,
            incarnation=published.incarnation,
            pool_bytes=published.pool_bytes,
        )

    def post(self, peer: Peer, writes: Sequence[Write], grant: GrantKey) -> Ticket:
        """Put the bytes on their way."""
        length = check_writes(writes, staging_bytes=self.pool.size, pool_bytes=peer.pool_bytes)
        if peer.serial in self._closed:
            raise PeerClosed(f"peer {peer.incarnation} is closed")
        ticket = self.book.open(peer=peer, grant=grant, length=length)
        payloads = tuple(
            self.pool[one.source_offset : one.source_offset + one.length].copy() for one in writes
        )
        message = _Message(self, ticket, self._name(ticket), tuple(writes), payloads)
        self._network.messages.append(message)
        return ticket

    def poll(self, ticket: Ticket) -> Answer:
        """Say where the ticket stands."""
        return self.book.answer(ticket)

    def explain(self, ticket: Ticket) -> str:
        """Say why it failed or is in doubt."""
        return self.book.reason(ticket)

    def inquire(self, ticket: Ticket) -> None:
        """Give the ticket up at its owner."""
        if self.book.answer(ticket) is not Answer.IN_DOUBT:
            return
        fate = self.owner_of(ticket.peer).table.settle(self._name(ticket))
        if fate is Fate.PLACED:
            self.book.settle(ticket, Answer.DONE)
        elif fate is Fate.QUIESCED:
            self.book.settle(ticket, Answer.FAILED_QUIESCED, "given up at the owner")

    def heard(self, ticket: Ticket, refusal: Refusal | None) -> None:
        """Take the owner's final answer."""
        if refusal is None:
            self.book.settle(ticket, Answer.DONE)
        else:
            self.book.settle(ticket, Answer.FAILED_QUIESCED, refusal.name)

    def owner_of(self, peer: Peer) -> "NaivePlane":
        """Return the plane behind a peer."""
        return self._links[peer.serial]

    def expose(
        self, grant: GrantKey, *, spans: Sequence[Span], parties: Sequence[PartyKey]
    ) -> None:
        """Let these parties into these spans."""
        self.table.expose(grant, spans=spans, parties=parties, pool_bytes=self.pool.size)

    def fence(self, grant: GrantKey) -> FenceProof | None:
        """Refuse the grant for ever."""
        if not self.table.fence(grant):
            return None
        return FenceProof(
            scope=FenceScope.GRANT, grant=grant, parties=None, evidence="refused for ever"
        )

    def fence_party(
        self, party: PartyKey, observed: ObservedExit | None = None
    ) -> FenceProof | None:
        """Refuse the party for ever."""
        if observed is not None and observed.party != party:
            raise PlaneMisused(f"the exit of {observed.party} proves nothing about {party}")
        if not self.table.fence_party(party):
            return None
        return FenceProof(
            scope=FenceScope.GRANT, grant=None, parties=(party,), evidence="refused for ever"
        )

    def retire(self, grant: GrantKey) -> None:
        """End the exposure for ever."""
        self.table.fence(grant)

    def close(self, peer: Peer) -> CloseProof | None:
        """Post no more; proved once no ticket is in flight."""
        self._closed.add(peer.serial)
        return None if self.book.in_flight(peer) else CloseProof(peer=peer)

    def shutdown(self) -> None:
        """Leave the network."""
        if self._network.owners.get(self._incarnation) is self:
            del self._network.owners[self._incarnation]

    def _name(self, ticket: Ticket) -> TicketName:
        identity = self._ticket_prefix + ticket.serial.to_bytes(8, "big")
        return TicketName(grant=ticket.grant, party=self._party, ticket=identity)
