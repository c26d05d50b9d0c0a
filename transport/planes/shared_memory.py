"""Shared memory: the owner's pool is a memfd that writers on the same host map.

Owns the record of who was let in, and one copying thread.
It must not know gRPC or torch, and cannot revoke: whoever has mapped a segment can write to it
until its process is gone, so the fence scope is the process.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

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
    check_span,
    check_writes,
)
from engine.dataplane_errors import GrantEnded, PeerClosed, PlaneBusy, PlaneMisused
from transport.planes.segment import (
    Bytes,
    Copy,
    Mapping,
    Segment,
    as_bytes,
    copy_bytes,
    create_segment,
)
from transport.planes.tickets import TicketBook, Worker

__all__ = ["PLANE_NAME", "Segment", "SharedMemoryPlane", "create_segment"]

PLANE_NAME = "shared-memory"


@attrs.define
class _Link:
    mapping: Mapping
    closing: bool = False


class SharedMemoryPlane:
    """The shared memory back end of one process; an owner gives its segment, a writer does not."""

    capabilities = Capabilities(
        name=PLANE_NAME, fence_scope=FenceScope.PROCESS, receiver_places_bytes=False
    )

    def __init__(
        self,
        *,
        segment: Segment | None = None,
        wake: Callable[[], None] | None = None,
        copy: Copy = copy_bytes,
    ) -> None:
        self._segment = segment
        self._copy = copy
        self._region: Bytes | None = None
        self._book = TicketBook(wake)
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._peer_serial = 0
        self._worker: Worker | None = None
        self._exposed: dict[GrantKey, frozenset[PartyKey]] = {}
        self._ended: set[GrantKey] = set()
        self._exits: dict[PartyKey, ObservedExit] = {}

    def register(self, buffer: memoryview) -> Region:
        """Declare the staging region, or the owner's pool, which must be its segment."""
        region = as_bytes(buffer)
        if self._region is not None:
            raise PlaneMisused("a plane has one region, and this one has it already")
        if self._segment is not None:
            pool = as_bytes(self._segment.buffer)
            if (region.ctypes.data, region.size) != (pool.ctypes.data, pool.size):
                raise PlaneMisused("the owner's region must be the buffer of its segment")
        self._region = region
        return Region(length=region.size)

    def descriptor(self) -> str:
        """Return where and which the segment is."""
        segment = self._segment
        if segment is None or self._region is None:
            raise PlaneMisused("only an owner with a registered pool has a descriptor")
        return Descriptor(
            plane=PLANE_NAME,
            endpoint=segment.endpoint,
            pool_bytes=segment.size_bytes,
            incarnation=segment.incarnation,
            key=segment.key.hex(),
        ).encode()

    def open_peer(self, descriptor: str) -> Peer:
        """Map the owner's segment and compare its header; `PeerMismatch` if it is another."""
        published = Descriptor.decode(descriptor, plane=PLANE_NAME)
        mapping = Mapping(published)
        with self._lock:
            self._peer_serial += 1
            peer = Peer(
                serial=self._peer_serial,
                incarnation=published.incarnation,
                pool_bytes=published.pool_bytes,
            )
            self._links[peer.serial] = _Link(mapping)
            return peer

    def post(self, peer: Peer, writes: Sequence[Write], grant: GrantKey) -> Ticket:
        """Queue the copies for the copying thread."""
        staging = self._region
        if staging is None or self._segment is not None:
            raise PlaneMisused("only a writer with a registered staging region posts")
        length = check_writes(writes, staging_bytes=staging.size, pool_bytes=peer.pool_bytes)
        with self._lock:
            link = self._links.get(peer.serial)
            if link is None or link.closing:
                raise PeerClosed(f"peer {peer.incarnation} is closed")
            if self._worker is None:
                self._worker = Worker(name="custody-shared-memory")
            ticket = self._book.open(peer=peer, grant=grant, length=length)
            try:
                self._worker.submit(partial(self._perform, link, ticket, tuple(writes)))
            except PlaneBusy:
                self._book.withdraw(ticket)
                raise
            return ticket

    def _perform(self, link: _Link, ticket: Ticket, writes: tuple[Write, ...]) -> None:
        if link.closing:
            self._book.settle(ticket, Answer.FAILED_QUIESCED, "closed before it began")
            return
        reason = self._copy_all(link.mapping, writes)
        answer = Answer.IN_DOUBT if reason else Answer.DONE
        self._book.settle(ticket, answer, reason)

    def _copy_all(self, mapping: Mapping, writes: tuple[Write, ...]) -> str:
        """Copy; return what went wrong. No view of either region outlives this call."""
        pool, staging = mapping.pool, self._region
        try:
            assert pool is not None
            assert staging is not None
            for write in writes:
                source = staging[write.source_offset : write.source_offset + write.length]
                target = pool[write.target_offset : write.target_offset + write.length]
                self._copy(target, source)
        except Exception as error:  # noqa: BLE001 - the ticket must end, whatever it was
            # The words only: a kept traceback would keep the views, and so the mapping.
            return f"{type(error).__name__}: {error}"
        return ""

    def poll(self, ticket: Ticket) -> Answer:
        """Say where the ticket stands."""
        return self._book.answer(ticket)

    def explain(self, ticket: Ticket) -> str:
        """Say why it failed or is in doubt."""
        return self._book.reason(ticket)

    def inquire(self, ticket: Ticket) -> None:
        """End doubt: the one thread that copied for this ticket has left it, so nothing lands."""
        if self._book.answer(ticket) is Answer.IN_DOUBT:
            reason = self._book.reason(ticket)
            self._book.settle(ticket, Answer.FAILED_QUIESCED, reason)

    def expose(
        self, grant: GrantKey, *, spans: Sequence[Span], parties: Sequence[PartyKey]
    ) -> None:
        """Record who was let in; a mapping cannot be narrowed."""
        if self._segment is None:
            raise PlaneMisused("only an owner exposes")
        for span in spans:
            check_span(
                what="span",
                offset=span.offset,
                length=span.length,
                limit=self._segment.size_bytes,
            )
        with self._lock:
            if grant in self._ended:
                raise GrantEnded(grant)
            if self._exposed.setdefault(grant, frozenset(parties)) != frozenset(parties):
                raise PlaneMisused(f"grant {grant} is already exposed to others")

    def fence(self, grant: GrantKey) -> FenceProof | None:
        """Prove only what exits prove: every party that was let in is gone."""
        with self._lock:
            self._ended.add(grant)
            parties = self._exposed.get(grant)
            if parties is None or not parties <= self._exits.keys():
                return None
            gone = ", ".join(f"{party} (pid {self._exits[party].pid})" for party in sorted(parties))
        return FenceProof(
            scope=FenceScope.PROCESS,
            grant=grant,
            parties=tuple(sorted(parties)),
            evidence=f"observed exit of {gone or 'nobody: no party was let in'}",
        )

    def fence_party(
        self, party: PartyKey, observed: ObservedExit | None = None
    ) -> FenceProof | None:
        """Prove nothing until the party's exit has been observed once."""
        if observed is not None and observed.party != party:
            raise PlaneMisused(f"the exit of {observed.party} proves nothing about {party}")
        with self._lock:
            if observed is not None:
                self._exits.setdefault(party, observed)
            seen = self._exits.get(party)
        if seen is None:
            return None
        return FenceProof(
            scope=FenceScope.PROCESS,
            grant=None,
            parties=(party,),
            evidence=f"observed exit of pid {seen.pid}",
        )

    def retire(self, grant: GrantKey) -> None:
        """Forget who was let in."""
        with self._lock:
            self._ended.add(grant)
            self._exposed.pop(grant, None)

    def close(self, peer: Peer) -> CloseProof | None:
        """Drop what has not begun, let what has begun end, then unmap."""
        with self._lock:
            link = self._links.get(peer.serial)
            if link is None:
                return CloseProof(peer=peer)
            link.closing = True
            if self._book.in_flight(peer) or not link.mapping.close():
                return None
            del self._links[peer.serial]
        return CloseProof(peer=peer)

    def shutdown(self) -> None:
        """Close every peer, wait for the copying thread, unmap; the segment is its maker's."""
        with self._lock:
            for link in self._links.values():
                link.closing = True
        if self._worker is not None:
            self._worker.stop()
        with self._lock:
            for link in self._links.values():
                link.mapping.close()
            self._links.clear()
        self._region = None
