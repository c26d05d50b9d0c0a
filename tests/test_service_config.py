"""The published service config: what a client that is given it retries, and what it does not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import grpc
import pytest

from transport.pb import fleet_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.anyio

CONFIG = Path(__file__).resolve().parent.parent / "docs/service-config.json"
ATTEMPTS = 4
Context = grpc.aio.ServicerContext[Any, Any]


@attrs.define(eq=False)
class Failing(generation_pb2_grpc.GenerationServiceServicer):
    """Ends every call with a status, and counts the calls."""

    code: grpc.StatusCode
    messages: int = 0
    calls: int = 0

    async def Generate(  # type: ignore[override]  # noqa: N802 - the schema's name
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        self.calls += 1
        for _ in range(self.messages):
            await context.write(generation_pb2.GenerateResponse())
        await context.abort(self.code, "not now")

    async def Complete(  # noqa: N802
        self, request: generation_pb2.CompleteRequest, context: Context
    ) -> generation_pb2.CompleteResponse:
        self.calls += 1
        await context.abort(self.code, "not now")
        raise AssertionError("abort does not return")

    async def Connect(self, request_iterator: Any, context: Context) -> None:  # noqa: N802
        self.calls += 1
        await context.abort(self.code, "not now")


@asynccontextmanager
async def configured(servicer: Failing) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with the published config, to a server that fails."""
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.service_config", CONFIG.read_text())]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel
    await server.stop(None)


async def calls_made(code: grpc.StatusCode, *, messages: int = 0) -> int:
    """How often a failing server sees one call of a client."""
    servicer = Failing(code, messages)
    async with configured(servicer) as channel:
        stub: generation_pb2_grpc.GenerationServiceAsyncStub
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(generation_pb2.GenerateRequest()):
                pass
        assert caught.value.code() is code
    return servicer.calls


async def test_unavailable_is_retried_and_nothing_else() -> None:
    """Four attempts for UNAVAILABLE, one for every other status."""
    for code in grpc.StatusCode:
        if code is grpc.StatusCode.OK:
            continue
        wanted = ATTEMPTS if code is grpc.StatusCode.UNAVAILABLE else 1
        assert await calls_made(code) == wanted, code


async def test_a_stream_that_has_begun_is_not_asked_for_again() -> None:
    """After the first message even UNAVAILABLE is final: the request may have been admitted."""
    assert await calls_made(grpc.StatusCode.UNAVAILABLE, messages=1) == 1


async def test_an_engines_stream_is_not_retried() -> None:
    """Engines reconnect by their own rules, with a new hello."""
    servicer = Failing(grpc.StatusCode.UNAVAILABLE)
    async with configured(servicer) as channel:
        stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
        # Nothing is written: the server ends the call unread, and the library then calls it INTERNAL.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Connect().read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert servicer.calls == 1


async def test_a_config_that_cannot_be_read_would_be_noticed() -> None:
    """The library refuses calls under a broken config, so the tests above have read this one."""
    options = [("grpc.service_config", '{"methodConfig": 7}')]
    async with grpc.aio.insecure_channel("127.0.0.1:1", options=options) as channel:
        stub: generation_pb2_grpc.GenerationServiceAsyncStub
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)config|json|array"):
            async for _ in stub.Generate(generation_pb2.GenerateRequest()):
                pass


def test_it_never_hedges_and_sets_no_timeout() -> None:
    """A second copy of a request costs as much as the first; a deadline is the client's."""
    config = json.loads(CONFIG.read_text())
    for method in config["methodConfig"]:
        assert not {"hedgingPolicy", "timeout"} & method.keys()
        policy = method.get("retryPolicy", {})
        assert policy.get("retryableStatusCodes", ["UNAVAILABLE"]) == ["UNAVAILABLE"]
