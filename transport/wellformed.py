"""Messages that cannot be read: refused by status, before or within any handler.

Owns: what happens when the bytes of a request are no message of its type.
Must not know: what a method does, and who may call it.

The library would end such a call with UNKNOWN, which says that the server is at fault, and would
write a traceback for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from transport import refusals

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger("custody.wellformed")


class Malformed(Exception):
    """These bytes are no message of the type that the method takes."""

    def __init__(self, *, size_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes cannot be read")
        self.size_bytes = size_bytes


class WellFormed(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Hands handlers whole messages only; stands behind whoever decides who may call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler behind a check of what it is sent."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.request_streaming:
            function = handler.stream_stream or handler.stream_unary
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.stream_unary_rpc_method_handler
            )
            deserializer = partial(_read_or_raise, handler.request_deserializer)
        else:
            function = handler.unary_stream or handler.unary_unary
            make = (
                grpc.unary_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            # The library reads a single message before the handler, where nobody could refuse.
            deserializer = partial(_read, handler.request_deserializer)
        return make(
            partial(_serve, function, method),
            request_deserializer=deserializer,
            response_serializer=handler.response_serializer,
        )


def _read(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserialize(data)
    except DecodeError:
        return Malformed(size_bytes=len(data))


def _read_or_raise(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    found = _read(deserialize, data)
    if isinstance(found, Malformed):
        raise found
    return found


async def _serve(function: Any, method: str, request: Any, context: Context) -> Any:
    found: list[Malformed] = []
    response: Any = None
    if isinstance(request, Malformed):
        found.append(request)
    else:
        try:
            response = await _run(function, request, context)
        except* Malformed as group:
            # A handler may read its stream in a task group, so what it raises may be nested.
            found += _leaves(group)
    if found:
        _log.info("malformed_message", method=method, size_bytes=found[0].size_bytes)
        await context.abort_with_status(
            refusals.malformed(method, size_bytes=found[0].size_bytes).status()
        )
    return response


async def _run(function: Any, request: Any, context: Context) -> Any:
    if not inspect.isasyncgenfunction(function):
        return await function(request, context)
    async with aclosing(function(request, context)) as responses:
        async for response in responses:
            await context.write(response)
    return None


def _leaves(group: BaseExceptionGroup[Malformed]) -> list[Malformed]:
    found: list[Malformed] = []
    for one in group.exceptions:
        found += _leaves(one) if isinstance(one, BaseExceptionGroup) else [one]
    return found
