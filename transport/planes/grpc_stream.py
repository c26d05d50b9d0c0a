"""gRPC streams: the writer sends frames, and the owner of the pool places them itself.

Owns channels, one sending thread for each peer, and the owner's table of exposures.
It must not know the engine's server: its process adds `servicer()` to one and publishes where.
A stale write is impossible by construction, because a fenced grant is refused at every frame.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import grpc

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
from engine.dataplane_errors import PeerClosed, PlaneBusy, PlaneMisused
from transport.pb import pages_pb2, pages_pb2_grpc
from transport.planes.grpc_frames import (
    CHANNEL_OPTIONS,
    INQUIRY_SECONDS_MAX,
    SERVER_OPTIONS,
    TICKET_SECONDS_MAX,
    FrameSource,
    judge,
)
from transport.planes.grpc_receiver import PagesServicer
from transport.planes.placement import PlacementTable
from transport.planes.segment import Bytes, Copy, as_bytes, copy_bytes
from transport.planes.tickets import TicketBook, Worker
from transport.tls import PLAIN, Dial

__all__ = ["PLANE_NAME", "SERVER_OPTIONS", "GrpcStreamPlane"]

PLANE_NAME = "grpc-stream"
KEY_BYTES = 32


@attrs.define
class _Link:
    channel: grpc.Channel
    stub: pages_pb2_grpc.PagesServiceStub
    credentials: pages_pb2.Credentials
    worker: Worker
    closing: bool = False


class GrpcStreamPlane:
    """The gRPC back end of one process; `party` is who writes, `incarnation` whose pool it is."""

    capabilities = Capabilities(
        name=PLANE_NAME, fence_scope=FenceScope.GRANT, receiver_places_bytes=True
    )

    def __init__(
        self,
        *,
        party: PartyKey,
        incarnation: str,
        wake: Callable[[], None] | None = None,
        copy: Copy = copy_bytes,
        dial: Dial = PLAIN,
    ) -> None:
        self._party = party
        self._incarnation = incarnation
        self._copy = copy
        self._dial = dial
        self._key = secrets.token_bytes(KEY_BYTES)
        self._ticket_prefix = secrets.token_bytes(16)
        self._region: Bytes | None = None
        self._endpoint: str | None = None
        self._table = PlacementTable()
        self._book = TicketBook(wake)
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._peer_serial = 0

    def register(self, buffer: memoryview) -> Region:
        """Declare the staging region, or the owner's pool."""
        if self._region is not None:
            raise PlaneMisused("a plane has one region, and this one has it already")
        self._region = as_bytes(buffer)
        return Region(length=self._region.size)

    def servicer(self, may_be: Callable[[PartyKey], bool] = lambda _party: True) -> PagesServicer:
        """Return what the owner's process adds to its grpc.aio server.

        may_be: whether the caller of the moment may write as that party.
        """
        return PagesServicer(
            table=self._table,
            pool=self._registered(),
            incarnation=self._incarnation,
            key=self._key,
            copy=self._copy,
            wake=self._book.wake,
            may_be=may_be,
        )

    def listening_at(self, endpoint: str) -> None:
        """Say under which target, such as `127.0.0.1:50051`, the server listens."""
        self._endpoint = endpoint

    def descriptor(self) -> str:
        """Return where and which the pool is."""
        if self._endpoint is None:
            raise PlaneMisused("only an owner whose server listens has a descriptor")
        return Descriptor(
            plane=PLANE_NAME,
            endpoint=self._endpoint,
            pool_bytes=self._registered().size,
            incarnation=self._incarnation,
            key=self._key.hex(),
        ).encode()

    def open_peer(self, descriptor: str) -> Peer:
        """Make a channel; who answers there is checked before the first byte of every ticket."""
        published = Descriptor.decode(descriptor, plane=PLANE_NAME)
        channel = self._dial.channel(published.endpoint, CHANNEL_OPTIONS)
        credentials = pages_pb2.Credentials(
            incarnation=published.incarnation, key=bytes.fromhex(published.key), party=self._party
        )
        with self._lock:
            self._peer_serial += 1
            peer = Peer(
                serial=self._peer_serial,
                incarnation=published.incarnation,
                pool_bytes=published.pool_bytes,
            )
            self._links[peer.serial] = _Link(
                channel=channel,
                stub=pages_pb2_grpc.PagesServiceStub(channel),
                credentials=credentials,
                worker=Worker(name=f"custody-pages-{peer.serial}"),
            )
            return peer

    def post(self, peer: Peer, writes: Sequence[Write], grant: GrantKey) -> Ticket:
        """Queue the ticket for the peer's sending thread."""
        staging = self._registered()
        length = check_writes(writes, staging_bytes=staging.size, pool_bytes=peer.pool_bytes)
        with self._lock:
            link = self._links.get(peer.serial)
            if link is None or link.closing:
                raise PeerClosed(f"peer {peer.incarnation} is closed")
            ticket = self._book.open(peer=peer, grant=grant, length=length)
            try:
                link.worker.submit(partial(self._perform, link, ticket, tuple(writes)))
            except PlaneBusy:
                self._book.withdraw(ticket)
                raise
            return ticket

    def _perform(self, link: _Link, ticket: Ticket, writes: tuple[Write, ...]) -> None:
        if link.closing:
            self._book.settle(ticket, Answer.FAILED_QUIESCED, "closed before it began")
            return
        source = FrameSource(
            opening=pages_pb2.Opening(
                credentials=link.credentials,
                name=self._name(ticket),
                extents=[
                    pages_pb2.Extent(target_offset=write.target_offset, length=write.length)
                    for write in writes
                ],
            ),
            staging=self._registered(),
            writes=writes,
        )
        try:
            final, trouble = self._converse(link, source)
        except Exception as error:  # noqa: BLE001 - the ticket must end, whatever it was
            final, trouble = None, f"{type(error).__name__}: {error}"
        left = source.stop()
        self._book.settle(ticket, *judge(ticket, final=final, trouble=trouble, left=left))

    def _converse(
        self, link: _Link, source: FrameSource
    ) -> tuple[pages_pb2.WriteResponse | None, str]:
        """Run one stream to its end; return the owner's final answer, if any, and the status."""
        final: pages_pb2.WriteResponse | None = None
        call = link.stub.Write(
            iter(source), timeout=TICKET_SECONDS_MAX, metadata=self._dial.metadata()
        )
        try:
            for response in call:
                if response.WhichOneof("answer") == "accepted":
                    source.admit()
                else:
                    final = response
        except grpc.RpcError:
            return final, f"{call.code().name}: {call.details()}"
        return final, "the stream ended without an answer"

    def poll(self, ticket: Ticket) -> Answer:
        """Say where the ticket stands."""
        return self._book.answer(ticket)

    def explain(self, ticket: Ticket) -> str:
        """Say why it failed or is in doubt."""
        return self._book.reason(ticket)

    def inquire(self, ticket: Ticket) -> None:
        """Ask the owner to give the ticket up and to say what was placed; before `close`."""
        if self._book.answer(ticket) is not Answer.IN_DOUBT:
            return
        with self._lock:
            link = self._links.get(ticket.peer.serial)
        if link is not None:
            # A full queue means only that the caller must ask again.
            with contextlib.suppress(PlaneBusy):
                link.worker.submit(partial(self._ask, link, ticket))

    def _ask(self, link: _Link, ticket: Ticket) -> None:
        request = pages_pb2.SettleRequest(credentials=link.credentials, name=self._name(ticket))
        try:
            answer = link.stub.Settle(
                request, timeout=INQUIRY_SECONDS_MAX, metadata=self._dial.metadata()
            )
            settlement = answer.settlement
        except Exception as error:  # noqa: BLE001 - no answer of any kind is no proof
            self._book.settle(ticket, Answer.IN_DOUBT, f"inquiry failed: {type(error).__name__}")
            return
        match settlement:
            case pages_pb2.SETTLEMENT_PLACED:
                self._book.settle(ticket, Answer.DONE)
            case pages_pb2.SETTLEMENT_QUIESCED:
                self._book.settle(ticket, Answer.FAILED_QUIESCED, "given up at the owner")
            case _:
                known = pages_pb2.Settlement.Name(settlement)
                self._book.settle(ticket, Answer.IN_DOUBT, f"the owner says {known}")

    def expose(
        self, grant: GrantKey, *, spans: Sequence[Span], parties: Sequence[PartyKey]
    ) -> None:
        """Let frames of these parties into these spans."""
        pool_bytes = self._registered().size
        self._table.expose(grant, spans=spans, parties=parties, pool_bytes=pool_bytes)

    def fence(self, grant: GrantKey) -> FenceProof | None:
        """Refuse the grant for ever; proved once the last placing copy has ended."""
        if not self._table.fence(grant):
            return None
        return FenceProof(
            scope=FenceScope.GRANT,
            grant=grant,
            parties=None,
            evidence="refused for ever, and no placing copy is under way",
        )

    def fence_party(
        self, party: PartyKey, observed: ObservedExit | None = None
    ) -> FenceProof | None:
        """Refuse the party for ever; an observed exit is not needed."""
        if observed is not None and observed.party != party:
            raise PlaneMisused(f"the exit of {observed.party} proves nothing about {party}")
        if not self._table.fence_party(party):
            return None
        return FenceProof(
            scope=FenceScope.GRANT,
            grant=None,
            parties=(party,),
            evidence="refused for ever, and no placing copy is under way",
        )

    def retire(self, grant: GrantKey) -> None:
        """End the exposure for ever."""
        self._table.fence(grant)

    def close(self, peer: Peer) -> CloseProof | None:
        """Drop what has not begun, let what has begun end, then close the channel."""
        with self._lock:
            link = self._links.get(peer.serial)
            if link is None:
                return CloseProof(peer=peer)
            link.closing = True
            if self._book.in_flight(peer):
                return None
            del self._links[peer.serial]
        link.worker.dismiss()
        link.channel.close()
        return CloseProof(peer=peer)

    def shutdown(self) -> None:
        """Cancel every stream, which leaves its ticket in doubt, and wait for the threads."""
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
            for link in links:
                link.closing = True
        for link in links:
            link.channel.close()
            link.worker.stop()

    def _name(self, ticket: Ticket) -> pages_pb2.TicketName:
        # A random prefix per plane keeps ids unique over all writers of an owner.
        identity = self._ticket_prefix + ticket.serial.to_bytes(8, "big")
        return pages_pb2.TicketName(grant=ticket.grant, ticket=identity)

    def _registered(self) -> Bytes:
        if self._region is None:
            raise PlaneMisused("register a region first")
        return self._region
