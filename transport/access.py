"""Who may call which method: decided before any handler.

Owns: the table of methods and roles, who a call comes from, and ending calls of the revoked.
Must not know: what a method does.

Handlers ask `caller()`; a tenant comes from there and never from a request.
Without credentials everybody who reaches the port may do everything, as one tenant.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import grpc
import structlog

from transport import refusals
from transport.credentials import CallerRole, Credential, CredentialFiles, CredentialsError
from transport.refusals import Refusal
from transport.settings import InvalidSetting

DEFAULT_TENANT = "default"
WATCH_SECONDS = 1.0
BEARER = "bearer"

Context = grpc.aio.ServicerContext[Any, Any]
Roles = frozenset[CallerRole]
Judge = Callable[[Context], "Credential | Refusal"]

_CLIENT = frozenset({CallerRole.CLIENT})
_ENGINE = frozenset({CallerRole.ENGINE})
_OPERATOR = frozenset({CallerRole.OPERATOR})
_READERS = _CLIENT | _OPERATOR
_ANY = frozenset(CallerRole)

METHODS: Mapping[str, Roles | None] = {
    "/custody.v1.GenerationService/Generate": _CLIENT,
    "/custody.v1.GenerationService/Complete": _CLIENT,
    "/custody.v1.FleetService/Connect": _ENGINE,
    "/custody.v1.PagesService/Write": _ENGINE,
    "/custody.v1.PagesService/Settle": _ENGINE,
    # A client reads and cancels what is its tenant's; the handlers see to that.
    "/custody.v1.LogService/GetRequestLog": _READERS,
    "/custody.v1.LogService/ListRequests": _READERS,
    "/custody.v1.LogService/Tail": _READERS,
    "/custody.v1.AdminService/CancelRequest": _READERS,
    "/custody.v1.AdminService/GetStatus": _OPERATOR,
    "/custody.v1.AdminService/GetMetrics": _OPERATOR,
    "/custody.v1.AdminService/DrainEngine": _OPERATOR,
    "/custody.v1.AdminService/DrainScheduler": _OPERATOR,
    # Probes have no credentials.
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
}
"""Who may call what; None is everybody.  A method that is not here may be called by nobody."""

_log = structlog.get_logger("custody.access")


@attrs.frozen(kw_only=True)
class Caller:
    """Who a call comes from, by its credential."""

    name: str
    roles: Roles
    tenant: str = ""
    engine: str = ""

    @property
    def sees_all(self) -> bool:
        """Whether requests of every tenant are this caller's business."""
        return CallerRole.OPERATOR in self.roles

    def may_join_as(self, engine: str) -> bool:
        """Whether the credential allows this engine's id."""
        return self.engine in {"", engine}


ANYBODY = Caller(name="anybody", roles=_ANY, tenant=DEFAULT_TENANT)
"""The caller of every call while there are no credentials."""

_CALLER: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Who the present call comes from. Raises LookupError outside of one that was let in."""
    return _CALLER.get()


class Access(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """The door of one server."""

    def __init__(self, files: CredentialFiles | None) -> None:
        """Without files the door is open."""
        self._files = files
        self._open: dict[Credential, set[_OpenCall]] = {}

    async def watch(self) -> None:
        """Read changed credentials, and end the calls of those that are gone, until cancelled."""
        while self._files is not None:
            await anyio.sleep(WATCH_SECONDS)
            if await anyio.to_thread.run_sync(self._files.refresh):
                self._end_revoked(self._files.current.entries)

    def _end_revoked(self, entries: frozenset[Credential]) -> None:
        for credential in self._open.keys() - entries:
            _log.warning("credential_revoked", caller=credential.name)
            for call in self._open[credential]:
                call.revoked = True
                call.task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler behind a check, or one that refuses without reading the request."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        roles = METHODS.get(method, frozenset())
        if roles is None:
            return handler
        if self._files is None:
            return _rebuilt(handler, partial(self._enter, _function(handler), ANYBODY))
        found = self._judge(method, roles, handler_call_details.invocation_metadata or ())
        if isinstance(found, Refusal):
            refuse = partial(_refuse, found, method)
            return grpc.stream_stream_rpc_method_handler(refuse)
        return _rebuilt(handler, partial(self._admit, _function(handler), found, method))

    # --- judging ------------------------------------------------------------------------------

    def _judge(self, method: str, roles: Roles, metadata: Any) -> Credential | Refusal | Judge:
        """Who calls by a bearer token; what will know by the certificate; or why not."""
        assert self._files is not None
        credentials = self._files.current
        given = [value for key, value in metadata if key == "authorization"]
        if not given and credentials.by_certificate:
            return partial(self._judge_certificate, method, roles)
        if not given:
            return refusals.unauthenticated("no credential was given")
        kind, _, token = str(given[0]).partition(" ")
        if len(given) > 1 or kind.lower() != BEARER or not token.strip():
            return refusals.unauthenticated("one bearer token is needed")
        found = credentials.of_token(token.strip())
        if found is None:
            return refusals.unauthenticated("the bearer token is not known")
        return _allowed(found, method, roles)

    def _judge_certificate(
        self, method: str, roles: Roles, context: Context
    ) -> Credential | Refusal:
        """Who calls by the certificate that the handshake has verified."""
        assert self._files is not None
        identity: Mapping[str, Iterable[bytes]] = context.auth_context()
        shown = tuple(identity.get("x509_pem_cert", ()))
        if not shown:
            return refusals.unauthenticated("no credential was given")
        names = [
            name.decode(errors="replace")
            for key in ("x509_common_name", "x509_subject_alternative_name")
            for name in identity.get(key, ())
        ]
        found = self._files.current.of_certificate(shown[0], names)
        if found is None:
            return refusals.unauthenticated("the client certificate is not known")
        return _allowed(found, method, roles)

    # --- calls --------------------------------------------------------------------------------

    async def _admit(
        self, function: Any, found: Credential | Judge, method: str, request: Any, context: Context
    ) -> Any:
        credential = found if isinstance(found, Credential) else found(context)
        if isinstance(credential, Refusal):
            return await _refuse(credential, method, request, context)
        task = asyncio.current_task()
        assert task is not None
        call = _OpenCall(task)
        self._open.setdefault(credential, set()).add(call)
        try:
            return await self._enter(function, _as_caller(credential), request, context)
        except asyncio.CancelledError:
            if not call.revoked:
                raise
            task.uncancel()
            refusal = refusals.unauthenticated("the credential was revoked during the call")
            return await _refuse(refusal, method, request, context)
        finally:
            calls = self._open[credential]
            calls.discard(call)
            if not calls:
                del self._open[credential]

    async def _enter(self, function: Any, who: Caller, request: Any, context: Context) -> Any:
        """Run the handler as this caller; each call has a context of its own."""
        _CALLER.set(who)
        if not inspect.isasyncgenfunction(function):
            return await function(request, context)
        # A generator that is left to the collector may outlive its loop.
        async with aclosing(function(request, context)) as responses:
            async for response in responses:
                await context.write(response)
        return None


def open_access(path: Path | None, engines: Path | None = None) -> Access:
    """The door that these files keep; without any it is open. Raises InvalidSetting."""
    if path is None:
        return Access(None)
    try:
        return Access(CredentialFiles(path, engines))
    except CredentialsError as error:
        reason = str(error)
        raise InvalidSetting(name="credentials", value=str(error.path), reason=reason) from error


@attrs.define(eq=False)
class _OpenCall:
    task: asyncio.Task[Any]
    revoked: bool = False


def _as_caller(credential: Credential) -> Caller:
    return Caller(
        name=credential.name,
        roles=frozenset({credential.role}),
        tenant=credential.tenant,
        engine=credential.engine,
    )


def _allowed(credential: Credential, method: str, roles: Roles) -> Credential | Refusal:
    if credential.role in roles:
        return credential
    return refusals.permission_denied(
        f"{method} is not for the role {credential.role.value}", method=method
    )


async def _refuse(refusal: Refusal, method: str, _request: Any, context: Context) -> None:
    _log.info("call_refused", method=method, code=refusal.code.name, peer=context.peer())
    await context.abort_with_status(refusal.status())


def _function(handler: Any) -> Any:
    return (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )


_REBUILD: Mapping[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _rebuilt(handler: Any, behaviour: Any) -> Any:
    """A handler of the same form with other behaviour."""
    make = _REBUILD[handler.request_streaming, handler.response_streaming]
    return make(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
