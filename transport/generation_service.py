"""What clients call: a relay between gRPC calls and the scheduler's owner task.

Owns: one call's deadline, its reading, and what its end means.
Must not know: how a request is decided or served.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
import structlog

from lifecycle.events import Cause
from transport.access import caller
from transport.client_records import Asked, Reader
from transport.logging_setup import bind, trace_fields
from transport.mailbox import Mailbox
from transport.pb import generation_pb2 as pb
from transport.pb import generation_pb2_grpc, lifecycle_pb2
from transport.refusals import Refusal
from transport.scheduler_owner import SchedulerOwner
from transport.tokenising import Tokenising, UnusableRequest

NANOSECONDS = 1_000_000_000
_WHOLE_ANSWER = 1 << 40

Context = grpc.aio.ServicerContext[Any, Any]
_log = structlog.get_logger("custody.generation")


class Refused(Exception):
    """The call ends with this status."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Generates text."""

    def __init__(
        self, owner: SchedulerOwner, tokenising: Tokenising, *, request_seconds_max: float
    ) -> None:
        """`request_seconds_max` bounds every request, whatever deadline its call has."""
        self._owner = owner
        self._tokenising = tokenising
        self._request_seconds_max = request_seconds_max

    # grpc.aio takes a coroutine that writes by the context as well as a generator.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Stream the admission, chunks and the outcome, or end with a status."""
        reader: Reader = Mailbox(self._owner.clients.reader_tokens_max)
        self._bind(context)
        try:
            async with self._reading(reader, context):
                async for step in self._steps(request, reader, context):
                    await context.write(step)
        except Refused as refused:
            await _abort(context, refused.refusal)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        """The same in one answer."""
        response = pb.CompleteResponse()
        texts: list[str] = []
        reader: Reader = Mailbox(_WHOLE_ANSWER)
        self._bind(context)
        try:
            async with self._reading(reader, context):
                async for step in self._steps(request.generation, reader, context):
                    match step.WhichOneof("step"):
                        case "admission":
                            response.admission.CopyFrom(step.admission)
                        case "chunk":
                            response.chunk.token_ids.extend(step.chunk.token_ids)
                            response.chunk.logprobs.extend(step.chunk.logprobs)
                            texts.append(step.chunk.text)
                        case "outcome":
                            response.outcome.CopyFrom(step.outcome)
                        case None:
                            pass
        except Refused as refused:
            await _abort(context, refused.refusal)
        response.chunk.text = "".join(texts)
        return response

    def _bind(self, context: Context) -> None:
        """Have every line of this call, whose task is its own, say whose call it is."""
        # What is bound by others belongs to the process.
        bind(
            tenant=self._owner.clients.commit(caller().tenant),
            **trace_fields(context.invocation_metadata() or ()),
        )

    @asynccontextmanager
    async def _reading(self, reader: Reader, context: Context) -> AsyncIterator[None]:
        """However the call ends, the owner task hears of it, and why."""
        cause = Cause.CLIENT_GONE
        try:
            yield
        except asyncio.CancelledError:
            # A cancelled call, a call past its deadline and a lost connection look alike.
            late = _seconds_left(context) <= 0
            cause = Cause.DEADLINE if late else Cause.CLIENT_CANCEL
            _log.info("request_left", cause=cause.value)
            raise
        finally:
            await self._owner.tell(partial(self._owner.clients.leave, reader, cause))

    async def _steps(
        self, request: pb.GenerateRequest, reader: Reader, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """What the reader is told, in order. Raises Refused for any end but an answer."""
        await self._submit(request, reader, context)
        while steps := await reader.take():
            for step in steps:
                if isinstance(step, Refusal):
                    raise Refused(step)
                _note(step)
                yield step

    async def _submit(self, request: pb.GenerateRequest, reader: Reader, context: Context) -> None:
        owner, tenant = self._owner, caller().tenant
        asked_ns = owner.now()
        seconds = min(_seconds_left(context), self._request_seconds_max)
        try:
            prepared = await self._tokenising.prepare(
                request, context_tokens=owner.core.limits.context_tokens
            )
        except UnusableRequest as error:
            refuse = partial(
                owner.clients.refuse,
                reader,
                tenant=tenant,
                field=error.field,
                reason=str(error),
                told=error.told,
                numbers=error.numbers,
            )
            await owner.tell(refuse)
            return
        asked = Asked(
            tokens=prepared.tokens,
            sampling=prepared.sampling,
            new_tokens_max=prepared.new_tokens_max,
            deadline_ns=asked_ns + int(seconds * NANOSECONDS),
            asked_ns=asked_ns,
            tenant=tenant,
            key=request.idempotency_key,
            body=_body(request),
        )
        await owner.tell(partial(owner.clients.submit, reader, asked))


def _note(step: pb.GenerateResponse) -> None:
    """One line when a request is admitted, and one when it is answered."""
    match step.WhichOneof("step"):
        case "admission":
            admission = step.admission
            bind(request_id=admission.request_id)
            _log.info(
                "request_admitted",
                attempt=admission.attempt,
                prompt_count=admission.prompt_tokens,
                prefill_engine=admission.prefill_engine,
                decode_engine=admission.decode_engine,
                queued_ns=admission.queued_ns,
            )
        case "outcome":
            outcome = step.outcome
            _log.info(
                "request_answered",
                finish_reason=lifecycle_pb2.FinishReason.Name(outcome.finish_reason),
                prompt_count=outcome.usage.prompt_tokens,
                new_count=outcome.usage.new_tokens,
                attempts=outcome.attempts,
                time_to_first_token_ns=outcome.time_to_first_token_ns,
            )
        case _:
            pass


def _seconds_left(context: Context) -> float:
    # The library's stubs do not say that a call without a deadline has none.
    left: Any = context.time_remaining()
    return math.inf if left is None else float(left)


def _body(request: pb.GenerateRequest) -> bytes:
    """What two calls with one key must have in common."""
    plain = pb.GenerateRequest()
    plain.CopyFrom(request)
    plain.ClearField("idempotency_key")
    return hashlib.sha256(plain.SerializeToString(deterministic=True)).digest()


async def _abort(context: Context, refusal: Refusal) -> NoReturn:
    if "request_id" in refusal.metadata:
        bind(request_id=refusal.metadata["request_id"])
    _log.info("request_refused", code=refusal.code.name, reason=refusal.reason)
    await context.abort_with_status(refusal.status())
    raise AssertionError("abort_with_status does not return")
