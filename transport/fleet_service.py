"""The engines' streams: a relay between gRPC and the scheduler's owner task.

Owns: reading and writing of one stream.
Must not know: what an item means.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import grpc
import structlog

from transport import refusals
from transport.access import caller
from transport.fleet_streams import Link
from transport.pb import fleet_pb2 as pb
from transport.pb import fleet_pb2_grpc
from transport.scheduler_owner import SchedulerOwner

ITEMS_PER_MESSAGE = 64
_log = structlog.get_logger("custody.fleet")


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """Engines join here."""

    def __init__(self, owner: SchedulerOwner) -> None:
        self._owner = owner

    # grpc.aio takes a coroutine that reads and writes by the context as well as a generator.
    async def Connect(  # type: ignore[override]
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Relay one rank's stream until either side ends it."""
        link = Link()
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        items = list(first.items)
        if not items or items[0].WhichOneof("item") != "hello":
            refusal = refusals.bad_argument("items", "the first item of a stream is a hello")
            await context.abort_with_status(refusal.status())
        who, engine = caller(), items[0].hello.party.engine
        if not who.may_join_as(engine):
            message = f"this credential is bound to engine {who.engine!r}, not to {engine!r}"
            refusal = refusals.permission_denied(message, engine=engine)
            await context.abort_with_status(refusal.status())
        try:
            await self._owner.tell(partial(self._owner.fleet.hello, link, items[0].hello))
            if len(items) > 1:
                await self._owner.tell(partial(self._owner.fleet.items, link, items[1:]))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, link, context)
                await self._write(link, context)
                tasks.cancel_scope.cancel()
        finally:
            await self._owner.tell(partial(self._owner.fleet.streams.gone, link))

    async def _read(self, link: Link, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await self._owner.tell(partial(self._owner.fleet.items, link, tuple(message.items)))
        except grpc.RpcError as error:
            _log.info("engine_stream_broken", party=str(link.party), error=str(error))
        # The engine sends nothing more, so there is nobody to write to.
        link.outbox.close()

    async def _write(self, link: Link, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while items := await link.outbox.take(ITEMS_PER_MESSAGE):
            await context.write(pb.ConnectResponse(items=items))
