"""The event log for whoever may read it: one request, a list, a tail.

Owns: pages of answers, the pace of a tail, and that a client sees its own tenant's requests only.
Must not know: what an entry means.

A tail is pulled: a slow reader delays only itself, and nothing waits for it in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import anyio
import anyio.to_thread
import grpc

from engine.store import PositionOutOfRange, Stored
from lifecycle.ids import RequestId
from transport import codec, refusals
from transport.access import caller
from transport.log_index import Line, summary
from transport.pb import log_pb2 as pb
from transport.pb import log_pb2_grpc
from transport.refusals import Refusal
from transport.scheduler_owner import SchedulerOwner

PAGE_DEFAULT = 50
PAGE_MAX = 1000
ENTRIES_PER_MESSAGE = 256
HEARTBEAT_SECONDS = 5.0
CUT_BACK_SECONDS = 0.05

Context = grpc.aio.ServicerContext[Any, Any]


class LogService(log_pb2_grpc.LogServiceServicer):
    """Reads the log."""

    def __init__(
        self, owner: SchedulerOwner, *, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        """`heartbeat_seconds` is how often an idle tail says that it is alive."""
        self._owner = owner
        self._store = owner.journal.store
        self._heartbeat_seconds = heartbeat_seconds
        self.closing = anyio.Event()

    async def GetRequestLog(
        self, request: pb.GetRequestLogRequest, context: Context
    ) -> pb.GetRequestLogResponse:
        """Every entry of one request; NOT_FOUND when the log knows none."""
        name = RequestId(request.request_id)
        stored: Sequence[Stored] = ()
        if self._visible(name, self._tenant()):
            stored = await anyio.to_thread.run_sync(self._store.read, name)
        if not stored:
            await _abort(context, refusals.not_found("request", name))
        return pb.GetRequestLogResponse(entries=[encode_stored(s) for s in stored])

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        """One page of requests; the token is the number of requests before the page."""
        token = request.page_token or "0"
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            message = f"{token!r} is no page token of this log"
            refusal = refusals.bad_argument("page_token", message, page_token=token)
            await _abort(context, refusal)
        start = int(token)
        stop = start + min(request.page_size or PAGE_DEFAULT, PAGE_MAX)
        tenant = self._tenant()
        return await self._owner.ask(lambda: self._page(start, stop, tenant=tenant))

    def _tenant(self) -> str | None:
        """The commitment that the caller's requests bear; None when it may see all."""
        who = caller()
        return None if who.sees_all else self._owner.clients.commit(who.tenant)

    def _visible(self, request: RequestId, tenant: str | None) -> bool:
        """Whether these entries are the caller's business; another's are as if unknown."""
        line = self._owner.journal.index.find(request)
        return tenant is None or (line is not None and line.tenant == tenant)

    def _page(self, start: int, stop: int, *, tenant: str | None) -> pb.ListRequestsResponse:
        index = self._owner.journal.index
        lines = index.lines if tenant is None else index.of_tenant(tenant)
        more = str(stop) if stop < lines.stop else ""
        summaries = [self._summary(line) for line in lines.between(start, stop)]
        return pb.ListRequestsResponse(requests=summaries, next_page_token=more)

    def _summary(self, line: Line) -> pb.RequestSummary:
        return summary(line, self._owner.core.log.requests.get(line.request))

    # grpc.aio takes a coroutine that writes by the context as well as a generator.
    async def Tail(  # type: ignore[override]
        self, request: pb.TailRequest, context: Context
    ) -> None:
        """The log from a position on, and what comes if it is followed."""
        first = self._store.first_position
        position, tenant = request.from_position or first, self._tenant()
        while True:
            try:
                stored = await anyio.to_thread.run_sync(self._read, position)
            except PositionOutOfRange as error:
                if error.first <= position <= self._owner.journal.appended + 1:
                    # The store has been cut back, and is given again what this reader has seen.
                    await anyio.sleep(CUT_BACK_SECONDS)
                    continue
                refusal = refusals.position_out_of_range(
                    error.position, first=error.first, last=error.last
                )
                await _abort(context, refusal)
            if stored:
                visible = [s for s in stored if self._visible(s.entry.request, tenant)]
                if visible:
                    entries = [encode_stored(s) for s in visible]
                    await context.write(pb.TailResponse(entries=entries))
                position = stored[-1].position + 1
            elif not request.follow or self.closing.is_set():
                return
            elif position > self._owner.journal.appended:
                await self._wait(context)

    def _read(self, position: int) -> list[Stored]:
        return list(islice(self._store.tail(position), ENTRIES_PER_MESSAGE))

    async def _wait(self, context: Context) -> None:
        """Wait for more, or say that there is nothing."""
        journal = self._owner.journal
        with anyio.move_on_after(self._heartbeat_seconds):
            await journal.grown.wait()
            return
        heartbeat = pb.TailHeartbeat(
            last_position=journal.appended, durable_position=journal.durable
        )
        await context.write(pb.TailResponse(heartbeat=heartbeat))

    def close(self) -> None:
        """Let every tail end after what there is."""
        self.closing.set()
        self._owner.journal.grown.set()


def encode_stored(stored: Stored) -> pb.StoredEntry:
    """An entry with its position."""
    return pb.StoredEntry(position=stored.position, entry=codec.encode_entry(stored.entry))


async def _abort(context: Context, refusal: Refusal) -> None:
    await context.abort_with_status(refusal.status())
