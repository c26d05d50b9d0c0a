"""A small client of a running scheduler, as the command line uses it.

Owns: one channel, typed calls, and the three ways in which a call fails.
Must not know: how anything is printed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.store import Stored
from transport import codec
from transport.pb import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
)
from transport.settings import CallSettings, require_loopback_or_tls
from transport.tls import Dial

DETAILS_KEY = "grpc-status-details-bin"
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
PAGE_REQUESTS = 500
QUICK_SECONDS = 10.0
# The environment's proxies are for the world outside; these calls stay on this machine.
OPTIONS = (("grpc.enable_http_proxy", 0),)


class Unreachable(Exception):
    """Nobody answers at this address, or the connection broke."""

    def __init__(self, address: str, message: str) -> None:
        super().__init__(f"cannot reach {address}: {message}")
        self.address = address
        self.message = message


class Refused(Exception):
    """The server said no: the status code's name, the reason, a sentence, and the numbers."""

    def __init__(self, *, code: str, reason: str, message: str, numbers: Mapping[str, str]) -> None:
        # Where the reason only repeats the code, one of them is enough.
        named = f"{code} {reason}" if reason not in ("", code) else code
        super().__init__(f"{named}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.numbers = dict(numbers)


def refusal(error: grpc.RpcError, address: str) -> Unreachable | Refused:
    """What a failed call means; only a server that answered gives details or another code."""
    code: grpc.StatusCode = error.code()
    info = error_info(error)
    message = error.details() or ""
    if info is None and code is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(address, message)
    return Refused(
        code=code.name,
        reason=info.reason if info is not None else "",
        message=message,
        numbers=info.metadata if info is not None else {},
    )


def error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    """The google.rpc.ErrorInfo that the server attached."""
    metadata = cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key != DETAILS_KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info):
                return info
    return None


class Client:
    """Calls to one scheduler; use it as a context manager."""

    def __init__(self, address: str, call: CallSettings | None = None) -> None:
        """Raises InvalidSetting: beyond loopback nothing is sent without TLS."""
        call = CallSettings() if call is None else call
        require_loopback_or_tls(address, tls=call.tls_ca is not None)
        self.address = address
        self._dial = Dial.of(call, token_file=call.token_file)
        self._channel = self._dial.channel(address, OPTIONS)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._log = log_pb2_grpc.LogServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def _quick(self) -> dict[str, Any]:
        return {"timeout": QUICK_SECONDS, "metadata": self._dial.metadata()}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise refusal(error, self.address) from error

    def generate(
        self, request: generation_pb2.GenerateRequest, *, timeout: float | None = None
    ) -> Generator[generation_pb2.GenerateResponse, None, None]:
        """Admission, chunks, outcome; leaving the iteration early cancels the request."""
        with self._translated():
            call = self._generation.Generate(
                request, timeout=timeout, metadata=self._dial.metadata()
            )
            try:
                yield from call
            finally:
                call.cancel()

    def status(self) -> admin_pb2.GetStatusResponse:
        """What there is and how full it is."""
        with self._translated():
            return self._admin.GetStatus(admin_pb2.GetStatusRequest(), **self._quick())

    def metrics(self) -> str:
        """Every metric, in the text form of Prometheus."""
        with self._translated():
            answer = self._admin.GetMetrics(admin_pb2.GetMetricsRequest(), **self._quick())
        return answer.exposition

    def drain(self, engine: str) -> int:
        """Give an engine nothing new; the incarnation that drains."""
        with self._translated():
            message = admin_pb2.DrainEngineRequest(engine=engine)
            return self._admin.DrainEngine(message, **self._quick()).incarnation

    def cancel(self, request: str) -> bool:
        """End a request; whether this call ended it."""
        with self._translated():
            message = admin_pb2.CancelRequestRequest(request_id=request)
            return self._admin.CancelRequest(message, **self._quick()).cancelled

    def request_log(self, request: str) -> tuple[Stored, ...]:
        """Every entry of one request."""
        with self._translated():
            message = log_pb2.GetRequestLogRequest(request_id=request)
            answer = self._log.GetRequestLog(message, **self._quick())
            return tuple(_stored(one) for one in answer.entries)

    def requests(self) -> Iterator[log_pb2.RequestSummary]:
        """Every request in the order of their first entries, page by page as they are taken."""
        token = ""
        while True:
            with self._translated():
                message = log_pb2.ListRequestsRequest(page_size=PAGE_REQUESTS, page_token=token)
                answer = self._log.ListRequests(message, **self._quick())
            yield from answer.requests
            token = answer.next_page_token
            if not token:
                return

    def tail(self, position: int = 0, *, follow: bool = False) -> Generator[Stored, None, None]:
        """Entries from this position to the present end, or on and on when they are followed.

        0 begins where the log does.
        """
        with self._translated():
            wanted = log_pb2.TailRequest(from_position=position, follow=follow)
            call = self._log.Tail(wanted, metadata=self._dial.metadata())
            try:
                for answer in call:
                    for one in answer.entries:
                        yield _stored(one)
            finally:
                call.cancel()

    def serving(self) -> bool:
        """Whether a request would have a chance now, by the standard health service."""
        with self._translated():
            message = health_pb2.HealthCheckRequest(service=GENERATION)
            answer = self._health.Check(message, timeout=QUICK_SECONDS)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _stored(message: log_pb2.StoredEntry) -> Stored:
    return Stored(message.position, codec.decode_entry(message.entry))
