"""A scheduler with fake engines in this process, over loopback gRPC, for tests of the services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import attrs
import grpc
from google.rpc import error_details_pb2, status_pb2

from engine.store import EventStore
from lifecycle.events import Role
from tests.fake_engine import FakeEngine
from transport.pb import (
    admin_pb2_grpc,
    fleet_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
)
from transport.scheduler_shell import run_scheduler
from transport.settings import SchedulerSettings
from transport.stores.memory import MemoryStore
from transport.tls import PLAIN, Dial

SAFETY_SECONDS = 50


@attrs.define
class Deployment:
    """A scheduler that serves, and clients of it."""

    address: str
    channel: grpc.aio.Channel
    store: EventStore
    stop: anyio.Event
    hurry: anyio.Event
    prefill: FakeEngine
    decode: FakeEngine
    tasks: anyio.abc.TaskGroup
    dial: Dial
    codes: list[int] = attrs.Factory(list)
    ended: anyio.Event = attrs.Factory(anyio.Event)

    @property
    def generation(self) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        stub: generation_pb2_grpc.GenerationServiceAsyncStub
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        return stub

    @property
    def log(self) -> log_pb2_grpc.LogServiceAsyncStub:
        stub: log_pb2_grpc.LogServiceAsyncStub = log_pb2_grpc.LogServiceStub(self.channel)
        return stub

    @property
    def admin(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(self.channel)
        return stub

    @property
    def fleet(self) -> fleet_pb2_grpc.FleetServiceAsyncStub:
        stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(self.channel)
        return stub

    async def tail_until(self, *wanted: str, request: str = "") -> list[log_pb2.StoredEntry]:
        """Follow the log until each of these events was seen (of that request, if given)."""
        missing = list(wanted)
        seen: list[log_pb2.StoredEntry] = []
        call = self.log.Tail(log_pb2.TailRequest(follow=True), metadata=self.dial.metadata())
        async for message in call:
            for stored in message.entries:
                seen.append(stored)
                kind = stored.entry.event.WhichOneof("event")
                if kind in missing and request in {"", stored.entry.request}:
                    missing.remove(kind)
            if not missing:
                break
        call.cancel()
        return seen


@asynccontextmanager
async def deployment(
    model: Path,
    *,
    store: EventStore | None = None,
    engines: bool = True,
    text: str = "x",
    pause_at: int | None = None,
    pages: int = 64,
    dial: Dial = PLAIN,
    engine_dial: Dial = PLAIN,
    **settings: object,
) -> AsyncIterator[Deployment]:
    """A scheduler, and one prefill and one decode engine that are attached to it.

    `dial` is the channel's and of `tail_until`, `engine_dial` the engines'.
    """
    store = MemoryStore() if store is None else store
    stop, hurry, up = anyio.Event(), anyio.Event(), anyio.Event()
    found: list[str] = []

    def ready(address: str) -> None:
        found.append(address)
        up.set()

    wanted = SchedulerSettings(model=str(model), port=0, **settings)  # type: ignore[arg-type]
    with anyio.fail_after(SAFETY_SECONDS):
        async with anyio.create_task_group() as tasks:
            here: Deployment | None = None

            async def serve() -> None:
                code = await run_scheduler(wanted, ready=ready, stop=stop, hurry=hurry, store=store)
                if here is not None:
                    here.codes.append(code)
                    here.ended.set()

            tasks.start_soon(serve)
            await up.wait()
            async with dial.aio_channel(found[0], ()) as channel:
                prefill = FakeEngine(Role.PREFILL, found[0], pages=pages, dial=engine_dial)
                decode = FakeEngine(
                    *(Role.DECODE, found[0]),
                    pages=pages,
                    text=text,
                    pause_at=pause_at,
                    dial=engine_dial,
                )
                here = Deployment(
                    *(found[0], channel, store, stop, hurry),
                    *(prefill, decode, tasks, dial),
                )
                if engines:
                    tasks.start_soon(prefill.run)
                    await prefill.synced.wait()
                    tasks.start_soon(decode.run)
                    await decode.synced.wait()
                yield here
                decode.go_on()
                stop.set()
                await here.ended.wait()
            tasks.cancel_scope.cancel()


def ask(
    tokens: int = 7, new: int = 4, *, key: str = "", **fields: object
) -> generation_pb2.GenerateRequest:
    """A request of so many prompt and new tokens."""
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=list(range(3, 3 + tokens))),
        sampling=generation_pb2.Sampling(new_tokens_max=new),
        idempotency_key=key,
        **fields,  # type: ignore[arg-type]
    )


def details(
    error: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo, dict[str, object]]:
    """The ErrorInfo of a status, and every detail by its type's name."""
    from grpc_status import rpc_status

    status: status_pb2.Status | None = rpc_status.from_call(error)
    assert status is not None
    found: dict[str, object] = {}
    for packed in status.details:
        name = packed.type_url.rsplit(".", 1)[-1]
        message = getattr(error_details_pb2, name)()
        assert packed.Unpack(message)
        assert name not in found
        found[name] = message
    info = found["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    return info, found
