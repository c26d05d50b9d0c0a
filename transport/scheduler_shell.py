"""The scheduler process, from the open port to the orderly end.

Owns: the order of starting and of shutting down.
Must not know: flags, signals, and what any service does.

Shutting down: refuse with a reason on the open port, finish what is here, end the engines'
streams, flush, and only then close the port.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import anyio
import anyio.to_thread
import grpc
import structlog

from engine.store import EventStore, StoreUnavailable
from lifecycle.events import Cause
from transport.access import open_access
from transport.scheduler_owner import SchedulerOwner
from transport.server import Services, load_served_model, make_owner
from transport.settings import InvalidSetting, SchedulerSettings
from transport.stores.memory import MemoryStore
from transport.stores.segments import SegmentStore
from transport.tls import listen, server_credentials

GRACE_SECONDS = 2.0

_log = structlog.get_logger("custody.scheduler")


async def run_scheduler(
    settings: SchedulerSettings,
    *,
    ready: Callable[[str], None],
    stop: anyio.Event,
    store: EventStore | None = None,
) -> int:
    """Serve until `stop` is set, then finish what is here; 0 when all of it was finished.

    `ready` is called with the bound address, host:port.  `store` replaces the settings' log.
    Raises ModelError, StoreError or InvalidSetting when it cannot start.
    """
    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    access = open_access(settings.credentials, settings.engine_credentials)
    if settings.credentials is None:
        _log.warning("open_to_everybody", host=settings.host, reason="no credentials are set")
    tls = server_credentials(settings)
    model = await anyio.to_thread.run_sync(load_served_model, settings.model)
    if store is None:
        store = await anyio.to_thread.run_sync(_open, settings)
    try:
        owner = make_owner(settings, model=model, store=store)
        try:
            services = Services.assemble(owner, model=model, settings=settings, access=access)
            address = _bind(services, settings, tls)
            return await _serve(services, owner, settings, address=address, ready=ready, stop=stop)
        finally:
            owner.close()
    finally:
        store.close()


def _open(settings: SchedulerSettings) -> EventStore:
    return MemoryStore() if settings.log is None else SegmentStore(settings.log)


def _bind(
    services: Services, settings: SchedulerSettings, tls: grpc.ServerCredentials | None
) -> str:
    """The bound address."""
    wanted = f"{settings.host}:{settings.port}"
    try:
        port = listen(services.server, wanted, tls)
    except RuntimeError as error:
        raise InvalidSetting(name="port", value=wanted, reason="cannot be bound") from error
    return f"{settings.host}:{port}"


async def _serve(
    services: Services,
    owner: SchedulerOwner,
    settings: SchedulerSettings,
    *,
    address: str,
    ready: Callable[[str], None],
    stop: anyio.Event,
) -> int:
    await services.server.start()
    async with anyio.create_task_group() as tasks:
        try:
            tasks.start_soon(owner.run)
            tasks.start_soon(services.access.watch)
            tasks.start_soon(services.watch_health, owner)
            model, epoch = owner.settings.model, owner.core.epoch
            _log.info("scheduler_ready", address=address, epoch=epoch, model=model)
            ready(address)
            await stop.wait()
            code = await _drain(owner, seconds=settings.drain_seconds)
            services.log.close()
            await services.health.enter_graceful_shutdown()
        finally:
            # Closing the port is the last thing, for a closed port cannot say why.
            with anyio.CancelScope(shield=True):
                await services.server.stop(GRACE_SECONDS)
        tasks.cancel_scope.cancel()
    _log.info("scheduler_stopped", code=code)
    return code


async def _drain(owner: SchedulerOwner, *, seconds: float) -> int:
    """Finish what is here, at most that long; 1 when something had to be cut off."""
    await owner.tell(owner.stop_accepting)
    code = 1
    with anyio.move_on_after(seconds):
        await _settled(owner)
        code = 0
    if code:

        def cut_off() -> None:
            _log.warning("scheduler_forced", requests_open=owner.requests_open)
            for request in (
                *owner.core.log.requests,
                *(p.wanted.request for p in owner.core.queue.waiting()),
            ):
                effects = owner.core.cancel(request, Cause.SHUTDOWN, "scheduler", owner.now())
                owner.perform(effects)

        await owner.tell(cut_off)
    await owner.ask(owner.fleet.shut_down)
    try:
        await anyio.to_thread.run_sync(owner.journal.store.flush)
    except StoreUnavailable as error:
        _log.error("log_unavailable_at_end", reason=str(error))
        code = 1
    return code


async def _settled(owner: SchedulerOwner) -> None:
    while True:
        changed = owner.changed
        if await owner.ask(lambda: owner.settled):
            return
        with anyio.move_on_after(0.1):
            await changed.wait()
