"""What clients are told when there is no answer: gRPC code, reason and numbers for each cause.

Owns: the table of codes, and the google.rpc details that go with a status.
Must not know: calls, streams, or why something was refused.

A refusal is always a gRPC error status, never a message: gateways turn the latter into a success.
Messages stand alone and name the numbers compared; metadata repeats them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from lifecycle.events import Aborted, Cause, RejectCode, Rejected
from lifecycle.ids import RequestId
from lifecycle.wording import counted

DOMAIN = "custody"
RETRY_SECONDS = 1
# A status travels in headers, of which many clients take no more than 8 KiB.
MESSAGE_CHARACTERS_MAX = 512
VALUE_CHARACTERS_MAX = 256

Code = grpc.StatusCode

REJECTIONS: dict[RejectCode, Code] = {
    RejectCode.INVALID_REQUEST: Code.INVALID_ARGUMENT,
    RejectCode.CONTEXT_LENGTH_EXCEEDED: Code.INVALID_ARGUMENT,
    RejectCode.KV_POOL_CAPACITY_EXCEEDED: Code.OUT_OF_RANGE,
    RejectCode.QUEUE_FULL: Code.RESOURCE_EXHAUSTED,
    RejectCode.QUEUE_TIMEOUT: Code.RESOURCE_EXHAUSTED,
    RejectCode.TENANT_QUOTA_EXCEEDED: Code.RESOURCE_EXHAUSTED,
    RejectCode.DRAINING: Code.UNAVAILABLE,
    RejectCode.NOT_READY: Code.UNAVAILABLE,
    RejectCode.NO_ENGINE: Code.UNAVAILABLE,
    RejectCode.DEADLINE: Code.DEADLINE_EXCEEDED,
    RejectCode.CANCELLED: Code.CANCELLED,
}
"""The code of a rejection; its reason is the rejection's own name."""

ABORTS: dict[Cause, tuple[Code, str]] = {
    Cause.CLIENT_CANCEL: (Code.CANCELLED, "CANCELLED"),
    Cause.CLIENT_GONE: (Code.CANCELLED, "CLIENT_GONE"),
    Cause.SLOW_READER: (Code.RESOURCE_EXHAUSTED, "SLOW_READER"),
    Cause.DEADLINE: (Code.DEADLINE_EXCEEDED, "DEADLINE"),
    Cause.OUT_OF_PAGES: (Code.UNAVAILABLE, "ATTEMPTS_EXHAUSTED"),
    Cause.ENGINE_LOST: (Code.UNAVAILABLE, "ENGINE_LOST"),
    Cause.ENGINE_FAILED: (Code.UNAVAILABLE, "ENGINE_FAILED"),
    Cause.PROMPT_MISMATCH: (Code.UNAVAILABLE, "PROMPT_MISMATCH"),
    Cause.TRANSFER_FAILED: (Code.UNAVAILABLE, "TRANSFER_FAILED"),
    Cause.ISOLATION_VIOLATION: (Code.INTERNAL, "KV_ISOLATION_VIOLATION"),
    Cause.ATTEMPTS_EXHAUSTED: (Code.UNAVAILABLE, "ATTEMPTS_EXHAUSTED"),
    Cause.SCHEDULER_RESTARTED: (Code.UNAVAILABLE, "SCHEDULER_RESTARTED"),
    Cause.SHUTDOWN: (Code.UNAVAILABLE, "SHUTDOWN"),
    Cause.NO_ENGINE: (Code.UNAVAILABLE, "NO_ENGINE"),
    Cause.LOG_UNAVAILABLE: (Code.UNAVAILABLE, "LOG_UNAVAILABLE"),
}
"""Code and reason of a request that ended without its answer after admission."""

_PHRASES: dict[Cause, str] = {
    Cause.CLIENT_CANCEL: "the request was cancelled",
    Cause.CLIENT_GONE: "the client went away",
    Cause.SLOW_READER: "the reader fell too far behind",
    Cause.DEADLINE: "the deadline passed",
    Cause.OUT_OF_PAGES: "no KV pages could be had",
    Cause.ENGINE_LOST: "an engine was lost",
    Cause.ENGINE_FAILED: "an engine failed",
    Cause.PROMPT_MISMATCH: "an engine was given another prompt than was admitted",
    Cause.TRANSFER_FAILED: "the transfer of KV pages failed",
    Cause.ISOLATION_VIOLATION: "a KV page did not bear the tag of this request",
    Cause.ATTEMPTS_EXHAUSTED: "every attempt ended without an answer",
    Cause.SCHEDULER_RESTARTED: "the scheduler was restarted",
    Cause.SHUTDOWN: "the deployment shut down",
    Cause.NO_ENGINE: "no engine could take the request up again",
    Cause.LOG_UNAVAILABLE: "the event log could not be written",
}

_RETRIED = frozenset({RejectCode.QUEUE_FULL, RejectCode.QUEUE_TIMEOUT})


@attrs.frozen(kw_only=True)
class Refusal:
    """A status that a client is given; `field` names what was wrong in its request."""

    code: Code
    reason: str
    message: str
    metadata: Mapping[str, str] = attrs.Factory(dict)
    field: str = ""
    retry_seconds: int | None = None
    quota: str = ""

    def proto(self) -> status_pb2.Status:
        """The google.rpc.Status with each detail type at most once; what is endless is cut."""
        message = _cut(self.message, MESSAGE_CHARACTERS_MAX)
        metadata = {key: _cut(text, VALUE_CHARACTERS_MAX) for key, text in self.metadata.items()}
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=metadata)
        details = [_packed(info)]
        if self.field:
            bad = error_details_pb2.BadRequest()
            bad.field_violations.add(field=self.field, description=message)
            details.append(_packed(bad))
        if self.retry_seconds is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.seconds = self.retry_seconds
            details.append(_packed(retry))
        if self.quota:
            quota = error_details_pb2.QuotaFailure()
            quota.violations.add(subject=self.quota, description=message)
            details.append(_packed(quota))
        number: int = self.code.value[0]
        return status_pb2.Status(code=number, message=message, details=details)

    def status(self) -> grpc.Status:
        """The form that `abort_with_status` takes."""
        status: grpc.Status = rpc_status.to_status(self.proto())
        return status


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


COMPARED: dict[RejectCode, tuple[str, ...]] = {
    RejectCode.QUEUE_FULL: ("waiting", "queue_limit"),
    RejectCode.QUEUE_TIMEOUT: ("queue_ns",),
    RejectCode.NO_ENGINE: ("prefill_engines", "decode_engines"),
    RejectCode.DEADLINE: ("deadline_ns",),
}
"""What a rejection compares beyond the sizes that its event has."""


def rejected(
    request: RequestId,
    event: Rejected,
    *,
    field: str = "",
    told: str = "",
    numbers: Mapping[str, object] | None = None,
) -> Refusal:
    """What the client of a rejected request is told.

    told: a message that says more than the log may hold.
    numbers: what was compared beside the event's own numbers; more than needed does no harm.
    """
    metadata = {
        "request_id": request,
        "prompt_tokens": str(event.prompt_tokens),
        "new_tokens_max": str(event.new_tokens_max),
        "context_tokens": str(event.context_tokens),
    }
    if event.capacity_tokens:
        metadata["capacity_tokens"] = str(event.capacity_tokens)
    known = {} if numbers is None else numbers
    names = tuple(known) if event.code is RejectCode.INVALID_REQUEST else COMPARED.get(event.code)
    metadata |= {name: str(known[name]) for name in names or () if name in known}
    return Refusal(
        code=REJECTIONS[event.code],
        reason=event.code.name,
        message=told or event.reason,
        metadata=metadata,
        field=field,
        retry_seconds=RETRY_SECONDS if event.code in _RETRIED else None,
        quota=event.tenant if event.code is RejectCode.TENANT_QUOTA_EXCEEDED else "",
    )


def aborted(request: RequestId, event: Aborted, *, attempts: int, tokens: int) -> Refusal:
    """What the client of an aborted request is told; its tokens so far were sent."""
    code, reason = ABORTS[event.cause]
    metadata = {
        "request_id": request,
        "cause": event.cause.name,
        "reported_by": event.reported_by,
        "attempts": str(attempts),
        "tokens": str(tokens),
    }
    numbers: dict[str, Any] = {
        "page": event.page,
        "tag_expected": None if event.tag_expected is None else f"{event.tag_expected:#x}",
        "tag_found": None if event.tag_found is None else f"{event.tag_found:#x}",
    }
    metadata |= {name: str(value) for name, value in numbers.items() if value is not None}
    message = f"{_PHRASES[event.cause]} in attempt {attempts}, after {counted(tokens, 'token')}"
    if event.message:
        message = f"{message}: {event.message}"
        metadata["message"] = event.message
    return Refusal(code=code, reason=reason, message=message, metadata=metadata)


def log_unavailable(reason: str, *, request: RequestId | None = None) -> Refusal:
    """The store cannot be written, so nothing can be promised."""
    metadata = {"error": reason}
    if request is not None:
        metadata["request_id"] = str(request)
    return Refusal(
        code=Code.UNAVAILABLE,
        reason="LOG_UNAVAILABLE",
        message=f"the event log cannot be written now: {reason}",
        metadata=metadata,
    )


def slow_reader(request: RequestId, *, waiting: int, limit: int) -> Refusal:
    """This stream is cut, because its reader is too far behind."""
    return Refusal(
        code=Code.RESOURCE_EXHAUSTED,
        reason="SLOW_READER",
        message=f"{counted(waiting, 'token')} waiting for a reader that may be {limit} behind",
        metadata={"request_id": request, "waiting": str(waiting), "limit": str(limit)},
    )


def key_reused(key: str, request: RequestId, *, answered: bool) -> Refusal:
    """The idempotency key names another request, or one whose answer is gone from memory."""
    why = (
        "was answered, and its tokens are no longer held"
        if answered
        else "was asked for with another body"
    )
    return Refusal(
        code=Code.ALREADY_EXISTS,
        reason="REQUEST_ID_REUSED",
        message=f"request {request} of this idempotency key {why}",
        metadata={"request_id": request, "idempotency_key": key},
    )


def not_found(what: str, name: str) -> Refusal:
    """Nothing of that name is known."""
    return Refusal(
        code=Code.NOT_FOUND,
        reason="NOT_FOUND",
        message=f"no {what} is called {name!r}",
        metadata={what: name},
    )


def unauthenticated(message: str) -> Refusal:
    """Who calls is not known; what was shown is never repeated."""
    return Refusal(code=Code.UNAUTHENTICATED, reason="UNAUTHENTICATED", message=message)


def permission_denied(message: str, **metadata: str) -> Refusal:
    """Who calls is known, and may not do this."""
    return Refusal(
        code=Code.PERMISSION_DENIED, reason="PERMISSION_DENIED", message=message, metadata=metadata
    )


def bad_argument(field: str, message: str, **metadata: str) -> Refusal:
    """A field of a request about the log or the deployment cannot be used."""
    return Refusal(
        code=Code.INVALID_ARGUMENT,
        reason="INVALID_REQUEST",
        message=message,
        metadata=metadata,
        field=field,
    )


def malformed(method: str, *, size_bytes: int) -> Refusal:
    """The bytes of a message are no message of the type that the method takes."""
    message = f"the {size_bytes} bytes sent to {method} are no message of its type"
    return Refusal(
        code=Code.INVALID_ARGUMENT,
        reason="INVALID_REQUEST",
        message=message,
        metadata={"method": method, "size_bytes": str(size_bytes)},
    )


def position_out_of_range(position: int, *, first: int, last: int) -> Refusal:
    """The log does not hold this position."""
    return Refusal(
        code=Code.OUT_OF_RANGE,
        reason="POSITION_OUT_OF_RANGE",
        message=f"position {position} is not within {first} to {last}, nor the next one",
        metadata={"position": str(position), "first": str(first), "last": str(last)},
    )
