"""`GET /metrics` for Prometheus, on a port of its own.

Owns: the port, HTTP/1.1 around one resource, TLS and who may read.
Must not know: what any metric means.

It binds the scheduler's host under the scheduler's rules: beyond loopback only with TLS and
credentials, and where there are credentials only an operator may read.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import attrs
import h11
import structlog
from anyio.streams.tls import TLSAttribute, TLSStream

from transport.credentials import CallerRole, CredentialFiles, CredentialsError, file_stamp
from transport.metrics import snapshot
from transport.metrics_text import encoded, registry
from transport.scheduler_owner import OwnerEnded, SchedulerOwner
from transport.settings import InvalidSetting, SchedulerSettings

PATH = b"/metrics"
CONNECTIONS_MAX = 16
"""Scrapers at once; whoever comes beyond that takes the place of the one that has said nothing for
longest, and is turned away when every other is being answered."""
REQUEST_SECONDS = 10.0
"""How long a handshake, a request or its answer may take."""
IDLE_SECONDS = 150.0
"""How long a connection may wait for its next request; scrapes are usually a minute apart at most."""
READ_BYTES = 16 << 10
GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)
"""How a connection ends that nobody is to blame for; `ssl.SSLError` and `TimeoutError` are among
them, as kinds of OSError."""

_log = structlog.get_logger("custody.metrics")


@attrs.frozen
class Reply:
    """What is sent back."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def _plain(status: int, text: str, *headers: tuple[str, str]) -> Reply:
    kind = ("Content-Type", "text/plain; charset=utf-8")
    return Reply(status, f"{text}\n".encode(), (kind, *headers))


class ServerContext:
    """The TLS context of a server's files, made anew when they change."""

    def __init__(self, *, cert: str, key: str, client_ca: str | None) -> None:
        """Read the files. Raises OSError or ssl.SSLError."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamps = self._stamp()
        self._context = self._read()

    def current(self) -> ssl.SSLContext:
        """The context for the next connection; files that do not fit leave the old one in force."""
        stamps = self._stamp()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._context = self._read()
            except (OSError, ssl.SSLError) as error:
                _log.error("certificates_unusable", reason=str(error), file=self._cert)
        return self._context

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        files = (self._cert, self._key, self._client_ca)
        return tuple(None if name is None else file_stamp(Path(name)) for name in files)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._client_ca)
        # A key under a password cannot be used by a server, and nobody is asked for one.
        context.load_cert_chain(self._cert, self._key, password=lambda: "")
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class MetricsServer:
    """Answers scrapers of one scheduler."""

    def __init__(
        self,
        owner: SchedulerOwner,
        *,
        files: CredentialFiles | None,
        context: ServerContext | None,
    ) -> None:
        """Without `files` everybody who reaches the port may read; without `context` in clear."""
        self._owner = owner
        self._files = files
        self._context = context
        self._connections = 0
        self._silent: dict[anyio.CancelScope, None] = {}

    async def handle(self, stream: anyio.abc.SocketStream) -> None:
        """Serve one connection until it ends."""
        async with stream:
            if self._connections >= CONNECTIONS_MAX and not self._end_a_silent_one():
                return
            self._connections += 1
            try:
                await self._converse(stream)
            except GONE:
                # A scraper that goes away, is slow or sends what is no TLS ends its own connection.
                return
            except Exception:  # noqa: BLE001 - it is logged, and concerns one connection
                # Whoever looks at the scheduler must not be able to end it.
                _log.exception("metrics_failed")
            finally:
                self._connections -= 1

    def _end_a_silent_one(self) -> bool:
        """End the connection that is waited for longest; False when none is."""
        scope = next(iter(self._silent), None)
        if scope is None:
            return False
        del self._silent[scope]
        scope.deadline = anyio.current_time()
        return True

    @contextmanager
    def _listening(self, seconds: float) -> Iterator[None]:
        """Wait for what the scraper says, in a place that another may take.

        Raises TimeoutError after `seconds`, and when the place is taken.
        """
        with anyio.fail_after(seconds) as scope:
            self._silent[scope] = None
            try:
                yield
            finally:
                self._silent.pop(scope, None)

    async def _converse(self, plain: anyio.abc.SocketStream) -> None:
        stream: anyio.abc.ByteStream = plain
        if self._context is not None:
            with self._listening(REQUEST_SECONDS):
                stream = await TLSStream.wrap(
                    plain,
                    server_side=True,
                    ssl_context=self._context.current(),
                    standard_compatible=False,
                )
        connection, patience = h11.Connection(h11.SERVER), REQUEST_SECONDS
        while True:
            try:
                with self._listening(patience):
                    request = await _next_request(stream, connection)
                if request is None:
                    return
                with anyio.fail_after(REQUEST_SECONDS):
                    reply = await self._answer(request, stream)
            except h11.RemoteProtocolError as error:
                reply = _plain(
                    error.error_status_hint, "this is no request", ("Connection", "close")
                )
                request = None
            with anyio.fail_after(REQUEST_SECONDS):
                await _send(stream, connection, reply, body=_has_body(request))
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()
            patience = IDLE_SECONDS

    async def _answer(self, request: h11.Request, stream: anyio.abc.ByteStream) -> Reply:
        if request.target.partition(b"?")[0] != PATH:
            return _plain(404, f"there is nothing but {PATH.decode()}")
        refusal = await self._refusal(request, stream)
        if refusal is not None:
            return refusal
        if request.method not in {b"GET", b"HEAD"}:
            return _plain(405, "metrics are only read", ("Allow", "GET, HEAD"))
        try:
            families = await self._owner.ask(partial(snapshot, self._owner))
        except OwnerEnded:
            return _plain(503, "the scheduler has ended")
        accept = ", ".join(_values(request, b"accept"))
        body, content_type = encoded(registry(families, process=True), accept)
        return Reply(200, body, (("Content-Type", content_type),))

    async def _refusal(self, request: h11.Request, stream: anyio.abc.ByteStream) -> Reply | None:
        """Why the caller may not read, if so; None lets it in."""
        if self._files is None:
            return None
        await anyio.to_thread.run_sync(self._files.refresh)
        credentials = self._files.current
        given = _values(request, b"authorization")
        if given:
            kind, _, token = given[0].partition(" ")
            one = len(given) == 1 and kind.lower() == "bearer"
            found = credentials.of_token(token.strip()) if one else None
        else:
            shown = _attribute(stream, TLSAttribute.peer_certificate_binary)
            found = None
            if shown is not None:
                names = _names(_attribute(stream, TLSAttribute.peer_certificate) or {})
                pem = ssl.DER_cert_to_PEM_cert(shown).encode()
                found = credentials.of_certificate(pem, names)
        if found is None:
            return _plain(401, "an operator's credential is needed", ("WWW-Authenticate", "Bearer"))
        if found.role is not CallerRole.OPERATOR:
            return _plain(403, f"metrics are not for the role {found.role.value}")
        return None


def _attribute(of: anyio.TypedAttributeProvider, attribute: Any) -> Any:
    """What anyio knows of a stream or listener, or None."""
    return of.extra(attribute, None)  # noqa: S610 - the rule takes it for a database query


def _names(certificate: object) -> Iterable[str]:
    """Common and alternative names of a verified certificate, as `ssl` gives it."""
    assert isinstance(certificate, dict)
    for part in certificate.get("subject", ()):
        yield from (value for key, value in part if key == "commonName")
    yield from (value for _, value in certificate.get("subjectAltName", ()))


def _values(request: h11.Request, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in request.headers if key == name]


def _has_body(request: h11.Request | None) -> bool:
    return request is None or request.method != b"HEAD"


async def _next_request(
    stream: anyio.abc.ByteStream, connection: h11.Connection
) -> h11.Request | None:
    """The next request, its body read and forgotten; None when there is no other."""
    request: h11.Request | None = None
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                raise h11.RemoteProtocolError("no body is wanted", error_status_hint=417)
            try:
                data = await stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                data = b""
            connection.receive_data(data)
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.EndOfMessage):
            return request
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return None


async def _send(
    stream: anyio.abc.ByteStream, connection: h11.Connection, reply: Reply, *, body: bool
) -> None:
    headers = [*reply.headers, ("Content-Length", str(len(reply.body)))]
    out = connection.send(h11.Response(status_code=reply.status, headers=headers)) or b""
    if body:
        out += connection.send(h11.Data(data=reply.body)) or b""
    out += connection.send(h11.EndOfMessage()) or b""
    await stream.send(out)


@asynccontextmanager
async def serving_metrics(
    owner: SchedulerOwner, settings: SchedulerSettings
) -> AsyncIterator[str | None]:
    """Answer scrapers while the body runs; the bound address, None without a port.

    Raises InvalidSetting when the port, the credentials or the certificates cannot be used.
    """
    if settings.metrics_port is None:
        yield None
        return
    server = MetricsServer(owner, files=_files(settings), context=_context(settings))
    listener = await _bind(settings.host.strip("[]"), settings.metrics_port)
    address = f"{settings.host}:{_attribute(listener, anyio.abc.SocketAttribute.local_port)}"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(listener.serve, server.handle))
        _log.info("metrics_ready", address=address, path=PATH.decode())
        yield address
        tasks.cancel_scope.cancel()


async def _bind(host: str, port: int) -> anyio.abc.Listener[anyio.abc.SocketStream]:
    try:
        return (await anyio.create_tcp_listener(local_host=host, local_port=port)).listeners[0]
    except OSError as error:
        reason = f"cannot be bound: {error.strerror or error}"
        raise InvalidSetting(name="metrics_port", value=port, reason=reason) from error


def _files(settings: SchedulerSettings) -> CredentialFiles | None:
    if settings.credentials is None:
        return None
    try:
        return CredentialFiles(settings.credentials)
    except CredentialsError as error:
        value, reason = str(error.path), str(error)
        raise InvalidSetting(name="credentials", value=value, reason=reason) from error


def _context(settings: SchedulerSettings) -> ServerContext | None:
    cert, key, authority = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None or key is None:
        return None
    try:
        return ServerContext(
            cert=str(cert), key=str(key), client_ca=None if authority is None else str(authority)
        )
    except (OSError, ssl.SSLError) as error:
        reason = f"certificate, key or client authority cannot be used: {error}"
        raise InvalidSetting(name="tls_cert", value=str(cert), reason=reason) from error
