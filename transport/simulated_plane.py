"""A data plane whose writes land late and piecemeal, and whose reports may lie.

Owns: what one party may do with the wires, and what it can prove.
Must not know: requests, the log, when anything lands.

Two kinds are simulated, which differ in what the receiver can do.
Where the receiver places bytes, the real placement table decides over each piece, and a grant or
a party can be fenced. One-sided writes land wherever they were addressed, and only the observed
exit of the writer proves that none is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    Span,
    Ticket,
    Write,
    check_writes,
)
from engine.dataplane import Region as Registered
from engine.dataplane_errors import PeerClosed, PeerMismatch, PlaneMisused
from transport.planes.placement import PlacementTable, TicketName
from transport.planes.tickets import TicketBook
from transport.simulated_memory import WORD, Region
from transport.simulated_wires import Flight, Holder, Wires

PLANE_NAME = "simulated"
PIECES_MAX = 4


class SimulatedPlane:
    """The plane of one party; `region` is a pool that others write, or the writer's staging."""

    def __init__(
        self, wires: Wires, region: Region, *, party: PartyKey, wake: Callable[[], None]
    ) -> None:
        self.wires = wires
        self.region = region
        self.party = party
        self.dead = False
        self.holder: Holder | None = None
        self.book = TicketBook(wake)
        self.table = PlacementTable()
        self._links: dict[int, SimulatedPlane] = {}
        self._of: dict[Ticket, Flight] = {}
        self._closed: set[int] = set()
        self._gone: set[PartyKey] = set()
        self._let_in: dict[GrantKey, frozenset[PartyKey]] = {}
        self._posted = 0
        wires.owners[party] = self

    @property
    def capabilities(self) -> Capabilities:
        """What this kind promises."""
        scope = FenceScope.GRANT if self.wires.placing else FenceScope.PROCESS
        return Capabilities(
            name=PLANE_NAME, fence_scope=scope, receiver_places_bytes=self.wires.placing
        )

    def register(self, buffer: memoryview) -> Registered:
        """Never: the region was given when the plane was made, and a plane has one."""
        raise PlaneMisused(f"a plane has one region; {len(buffer)} bytes more were given")

    def descriptor(self) -> str:
        """How others find this region."""
        return Descriptor(
            plane=PLANE_NAME,
            endpoint="here",
            pool_bytes=len(self.region.bytes),
            incarnation=self.party,
            key=self._key,
        ).encode()

    @property
    def _key(self) -> str:
        """A key of this life; it need not be secret, for nobody here guesses."""
        return self.party.encode().hex()

    def open_peer(self, descriptor: str) -> Peer:
        """Find the owner; one that is gone leads nowhere."""
        published = Descriptor.decode(descriptor, plane=PLANE_NAME)
        owner = self.wires.owners.get(published.incarnation)
        if owner is None or owner.dead:
            raise PeerMismatch(endpoint="here", why="nobody is there")
        if published.key != owner._key:  # noqa: SLF001 - of its own class
            raise PeerMismatch(endpoint="here", why="other key")
        serial = len(self._links) + 1
        self._links[serial] = owner
        return Peer(
            serial=serial, incarnation=published.incarnation, pool_bytes=published.pool_bytes
        )

    def post(self, peer: Peer, writes: Sequence[Write], grant: GrantKey) -> Ticket:
        """Put a write on the wire, cut into pieces."""
        size = len(self.region.bytes)
        length = check_writes(writes, staging_bytes=size, pool_bytes=peer.pool_bytes)
        if peer.serial in self._closed:
            raise PeerClosed(f"peer {peer.incarnation} is closed")
        owner = self._links[peer.serial]
        ticket = self.book.open(peer=peer, grant=grant, length=length)
        self._posted += 1
        identity = f"{self.party}#{self._posted}".encode()
        name = TicketName(grant=grant, party=self.party, ticket=identity)
        if self.wires.placing:
            refusal = owner.table.admit(
                name, [Span(offset=w.target_offset, length=w.length) for w in writes]
            )
            if refusal is not None:
                self.book.settle(ticket, Answer.FAILED_QUIESCED, refusal.name)
                return ticket
        flight = Flight(self, owner, ticket, name, tuple(writes), self._cut(writes))
        self._of[ticket] = flight
        self.wires.begin(flight)
        return ticket

    def _cut(self, writes: Sequence[Write]) -> list[Write]:
        """Pieces of whole words, at random borders, none over two pages; a broken page is one."""
        pieces: list[Write] = []
        size, chance = self.region.layout.block_bytes, self.wires.chance
        for write in writes:
            for page in range(write.length // size):
                words = size // WORD
                cuts = sorted(chance.sample(range(1, words), chance.randrange(PIECES_MAX)))
                for first, stop in zip((0, *cuts), (*cuts, words), strict=True):
                    at = page * size + first * WORD
                    pieces.append(
                        Write(
                            source_offset=write.source_offset + at,
                            target_offset=write.target_offset + at,
                            length=(stop - first) * WORD,
                        )
                    )
            rest = write.length % size
            if rest:
                at = write.length - rest
                source, target = write.source_offset + at, write.target_offset + at
                pieces.append(Write(source_offset=source, target_offset=target, length=rest))
        return pieces

    def poll(self, ticket: Ticket) -> Answer:
        """Where the ticket stands."""
        return self.book.answer(ticket)

    def explain(self, ticket: Ticket) -> str:
        """Why it failed or is in doubt."""
        return self.book.reason(ticket)

    def inquire(self, ticket: Ticket) -> None:
        """Ask again about a ticket in doubt."""
        flight = self._of.get(ticket)
        if flight is not None and self.book.answer(ticket) is Answer.IN_DOUBT:
            self.wires.inquire(flight)

    def expose(
        self, grant: GrantKey, *, spans: Sequence[Span], parties: Sequence[PartyKey]
    ) -> None:
        """Let these parties in."""
        size = len(self.region.bytes)
        self.table.expose(grant, spans=spans, parties=parties, pool_bytes=size)
        self._let_in[grant] = frozenset(parties)

    def fence(self, grant: GrantKey) -> FenceProof | None:
        """Refuse the grant for ever, or know that whoever was let in is gone."""
        refused, parties = self.table.fence(grant), self._let_in.get(grant)
        if self.wires.placing:
            said = FenceProof(scope=FenceScope.GRANT, grant=grant, parties=None, evidence="refused")
            return said if refused else None
        if parties is None or not parties <= self._gone:
            return None
        gone = tuple(sorted(parties))
        return FenceProof(scope=FenceScope.PROCESS, grant=grant, parties=gone, evidence="gone")

    def fence_party(
        self, party: PartyKey, observed: ObservedExit | None = None
    ) -> FenceProof | None:
        """Refuse the party for ever, or know that it is gone."""
        if observed is not None and observed.party != party:
            raise PlaneMisused(f"the exit of {observed.party} proves nothing about {party}")
        if observed is not None:
            self._gone.add(party)
        refused = self.wires.placing and self.table.fence_party(party)
        if not refused and party not in self._gone:
            return None
        scope = FenceScope.GRANT if refused else FenceScope.PROCESS
        return FenceProof(scope=scope, grant=None, parties=(party,), evidence="it cannot write")

    def retire(self, grant: GrantKey) -> None:
        """The exposure ends for ever."""
        self.table.fence(grant)
        self._let_in.pop(grant, None)

    def close(self, peer: Peer) -> CloseProof | None:
        """Post no more; proved once no ticket is in flight."""
        self._closed.add(peer.serial)
        reading = any(
            flight.writer is self and flight.ticket.peer is peer and flight.pieces
            for flight in self.wires.flights
        )
        return None if reading or self.book.in_flight(peer) else CloseProof(peer=peer)

    def shutdown(self) -> None:
        """The process ends."""
        self.wires.died(self)
