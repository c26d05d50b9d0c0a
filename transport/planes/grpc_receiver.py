"""The owner's half of the gRPC plane: the service that places bytes into the pool.

Owns the check of credentials, the declared order of frames, and the placing copy.
It must not know channels or tickets of a writer, and emits nothing: it wakes its plane.
"""

import hmac
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import numpy as np

from engine.dataplane import WRITES_PER_TICKET_MAX, PartyKey, Span
from transport.pb import pages_pb2, pages_pb2_grpc
from transport.planes.placement import Fate, PlacementTable, Refusal, TicketName
from transport.planes.segment import Bytes, Copy

_REASONS: dict[Refusal, pages_pb2.RefusalReason.ValueType] = {
    Refusal.NOT_EXPOSED: pages_pb2.REFUSAL_REASON_NOT_EXPOSED,
    Refusal.FENCED: pages_pb2.REFUSAL_REASON_FENCED,
    Refusal.PARTY: pages_pb2.REFUSAL_REASON_PARTY,
    Refusal.SPAN: pages_pb2.REFUSAL_REASON_SPAN,
    Refusal.TICKET: pages_pb2.REFUSAL_REASON_TICKET,
}

_SETTLEMENTS: dict[Fate, pages_pb2.Settlement.ValueType] = {
    Fate.PLACED: pages_pb2.SETTLEMENT_PLACED,
    Fate.QUIESCED: pages_pb2.SETTLEMENT_QUIESCED,
    Fate.PENDING: pages_pb2.SETTLEMENT_PENDING,
    Fate.UNKNOWN: pages_pb2.SETTLEMENT_UNKNOWN,
}


class DeclaredOrder:
    """The extents of a ticket, consumed frame by frame in the order in which they were declared."""

    def __init__(self, extents: Sequence[Span]) -> None:
        self._extents = extents
        self._index = 0
        self._within = 0

    def take(self, frame: Span) -> bool:
        """Whether the frame is the next declared bytes; if so they count as taken."""
        if self.whole:
            return False
        extent = self._extents[self._index]
        expected = extent.offset + self._within
        if frame.offset != expected or frame.length <= 0 or frame.end > extent.end:
            return False
        self._within += frame.length
        if self._within == extent.length:
            self._index += 1
            self._within = 0
        return True

    @property
    def whole(self) -> bool:
        """Whether every declared byte was taken."""
        return self._index == len(self._extents)


class PagesServicer(pages_pb2_grpc.PagesServiceServicer):
    """Serves one pool of one incarnation, on a grpc.aio server that its process owns."""

    def __init__(
        self,
        *,
        table: PlacementTable,
        pool: Bytes,
        incarnation: str,
        key: bytes,
        copy: Copy,
        wake: Callable[[], None],
        may_be: Callable[[PartyKey], bool] = lambda _party: True,
    ) -> None:
        """`may_be` says whether the present caller may write as that party."""
        self._may_be = may_be
        self._table = table
        self._pool = pool
        self._incarnation = incarnation
        self._key = key
        self._copy = copy
        self._wake = wake

    async def Write(
        self,
        request_iterator: AsyncIterator[pages_pb2.WriteRequest],
        context: grpc.aio.ServicerContext[pages_pb2.WriteRequest, pages_pb2.WriteResponse],
    ) -> AsyncIterator[pages_pb2.WriteResponse]:
        """Take one ticket; the last response is final."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("step") != "opening":
            yield _refused(pages_pb2.REFUSAL_REASON_TICKET)
            return
        opening = first.opening
        name = _name(opening.credentials, opening.name)
        extents = [Span(offset=one.target_offset, length=one.length) for one in opening.extents]
        reason = self._admit(opening.credentials, name, extents)
        if reason is not None:
            yield _refused(reason)
            return
        try:
            yield pages_pb2.WriteResponse(accepted=pages_pb2.Accepted())
            order = DeclaredOrder(extents)
            placed_bytes = 0
            refusal: Refusal | None = None
            async for request in request_iterator:
                refusal = self._place(name, order, request)
                if refusal is not None:
                    break
                placed_bytes += len(request.frame.payload)
            if refusal is None and not (order.whole and self._table.complete(name)):
                refusal = Refusal.TICKET
            # From here on this stream places nothing, so either answer may be final.
            self._table.give_up(name)
            if refusal is not None:
                yield _refused(_REASONS[refusal], placed_bytes)
            else:
                yield pages_pb2.WriteResponse(placed=pages_pb2.Placed(placed_bytes=placed_bytes))
        finally:
            self._table.give_up(name)
            self._wake()

    async def Settle(
        self,
        request: pages_pb2.SettleRequest,
        context: grpc.aio.ServicerContext[pages_pb2.SettleRequest, pages_pb2.SettleResponse],
    ) -> pages_pb2.SettleResponse:
        """Give a ticket up and say its fate."""
        fate = Fate.UNKNOWN
        if self._knows(request.credentials):
            fate = self._table.settle(_name(request.credentials, request.name))
        return pages_pb2.SettleResponse(settlement=_SETTLEMENTS[fate])

    def _knows(self, credentials: pages_pb2.Credentials) -> bool:
        same_key = hmac.compare_digest(credentials.key, self._key)
        same_life = credentials.incarnation == self._incarnation
        return same_key and same_life and self._may_be(credentials.party)

    def _admit(
        self, credentials: pages_pb2.Credentials, name: TicketName, extents: list[Span]
    ) -> pages_pb2.RefusalReason.ValueType | None:
        if not self._knows(credentials):
            return pages_pb2.REFUSAL_REASON_CREDENTIALS
        if not 0 < len(extents) <= WRITES_PER_TICKET_MAX or not name.ticket:
            return pages_pb2.REFUSAL_REASON_TICKET
        if any(extent.length == 0 for extent in extents):
            return pages_pb2.REFUSAL_REASON_SPAN
        refusal = self._table.admit(name, extents)
        return None if refusal is None else _REASONS[refusal]

    def _place(
        self, name: TicketName, order: DeclaredOrder, request: pages_pb2.WriteRequest
    ) -> Refusal | None:
        """Copy one frame between `begin` and `end`, which a fence waits for."""
        if request.WhichOneof("step") != "frame":
            return Refusal.TICKET
        payload = request.frame.payload
        span = Span(offset=request.frame.target_offset, length=len(payload))
        if not order.take(span):
            return Refusal.TICKET
        refusal = self._table.begin(name, span)
        if refusal is not None:
            return refusal
        try:
            source = np.frombuffer(payload, dtype=np.uint8)
            self._copy(self._pool[span.offset : span.end], source)
        finally:
            self._table.end(name)
            self._wake()
        return None


def _name(credentials: pages_pb2.Credentials, name: pages_pb2.TicketName) -> TicketName:
    return TicketName(grant=name.grant, party=credentials.party, ticket=name.ticket)


def _refused(
    reason: pages_pb2.RefusalReason.ValueType, placed_bytes: int = 0
) -> pages_pb2.WriteResponse:
    return pages_pb2.WriteResponse(
        refused=pages_pb2.Refused(reason=reason, placed_bytes=placed_bytes)
    )
