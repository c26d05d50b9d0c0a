"""The scheduler process, from the open port to the orderly end.

Owns: the order of starting and of shutting down.
Must not know: flags, signals, and what any service does.

Shutting down: refuse with a reason on the open port, finish what is here, let the engines leave if
somebody tells them to, end the streams of those that stay, flush, and only then close the port.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import attrs
import grpc
import structlog

from engine.store import EventStore, StoreError, StoreUnavailable
from lifecycle.events import Cause
from transport.access import open_access
from transport.logging_setup import bind, configure_structlog
from transport.metrics_server import serving_metrics
from transport.scheduler_owner import SchedulerOwner
from transport.server import Services, load_served_model, make_owner
from transport.settings import InvalidSetting, SchedulerSettings
from transport.stores.memory import MemoryStore
from transport.stores.retention_limits import Retention
from transport.stores.segments import SegmentStore
from transport.tls import listen, server_credentials

GRACE_SECONDS = 2.0
LEAVE_SECONDS = 15.0
"""How long engines that were told to leave may take; it is less than whoever tells them waits."""

SEAL_SECONDS = 60.0
RETAIN_SECONDS = 60.0

_log = structlog.get_logger("custody.scheduler")


async def run_scheduler(
    settings: SchedulerSettings,
    *,
    ready: Callable[[str], None],
    stop: anyio.Event,
    store: EventStore | None = None,
    hurry: anyio.Event | None = None,
    settled: Callable[[], None] | None = None,
    lost: Callable[[str, int, str], None] | None = None,
) -> int:
    """Serve until `stop` is set, then finish what is here; 0 when all of it was finished.

    `ready` is called with the bound address, host:port.  `store` replaces the settings' log.
    `settled` is called when nothing is open any more, for somebody who then tells the engines to
    leave: they are waited for, so that their leaving is in the log.  Without it nobody is.
    `hurry` ends every wait: what is open is aborted, and the log says so.
    `lost` is told engine, process id and cause of every engine that is given up.
    Raises ModelError, StoreError or InvalidSetting when it cannot start.
    """
    if not structlog.is_configured():
        configure_structlog()
    access = open_access(settings.credentials, settings.engine_credentials)
    if settings.credentials is None:
        _log.warning("open_to_everybody", host=settings.host, reason="no credentials are set")
    tls = server_credentials(settings)
    model = await anyio.to_thread.run_sync(load_served_model, settings.model)
    if store is None:
        store = await anyio.to_thread.run_sync(_open, settings)
    try:
        owner = make_owner(settings, model=model, store=store)
        owner.on_lost = lost
        try:
            services = Services.assemble(owner, model=model, settings=settings, access=access)
            address = _bind(services, settings, tls)
            bind(epoch=owner.core.epoch)
            hurry = anyio.Event() if hurry is None else hurry
            seconds = settings.drain_seconds
            kept = None if settings.retain is None else Retention.parse(settings.retain)
            ends = Ends(
                stop=stop, hurry=hurry, settled=settled, drain_seconds=seconds, retention=kept
            )
            async with serving_metrics(owner, settings):
                return await _serve(services, owner, address=address, ready=ready, ends=ends)
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


@attrs.frozen(kw_only=True)
class Ends:
    """When serving ends, and how long and for whom the end waits; when history does."""

    stop: anyio.Event
    hurry: anyio.Event
    settled: Callable[[], None] | None
    drain_seconds: float
    retention: Retention | None = None


async def _serve(
    services: Services,
    owner: SchedulerOwner,
    *,
    address: str,
    ready: Callable[[str], None],
    ends: Ends,
) -> int:
    await services.server.start()
    async with anyio.create_task_group() as tasks:
        try:
            tasks.start_soon(owner.run)
            tasks.start_soon(services.access.watch)
            tasks.start_soon(services.watch_health, owner)
            tasks.start_soon(keep_sealing, owner.journal.store)
            if ends.retention is not None:
                tasks.start_soon(keep_retained, owner, ends.retention, RETAIN_SECONDS)
            _log.info("scheduler_ready", address=address, model=owner.settings.model)
            ready(address)
            await ends.stop.wait()
            code = await _drain(owner, ends)
            services.log.close()
            await services.health.enter_graceful_shutdown()
        finally:
            # Closing the port is the last thing, for a closed port cannot say why.
            with anyio.CancelScope(shield=True):
                await services.server.stop(GRACE_SECONDS)
        tasks.cancel_scope.cancel()
    _log.info("scheduler_stopped", code=code)
    return code


async def keep_sealing(store: EventStore, *, pause_seconds: float = SEAL_SECONDS) -> None:
    """Put the log's full parts into their smallest form, now and again, until cancelled."""
    while True:
        try:
            # A part that is being sealed outlives this task; closing the store waits for it.
            parts = await anyio.to_thread.run_sync(store.seal, abandon_on_cancel=True)
        except StoreError as error:
            _log.error("log_not_sealed", reason=str(error))
        else:
            if parts:
                _log.info("log_sealed", parts=parts)
        await anyio.sleep(pause_seconds)


async def keep_retained(owner: SchedulerOwner, retention: Retention, pause_seconds: float) -> None:
    """Drop the log's oldest full parts, now and again, until cancelled."""
    store = owner.journal.store
    while True:
        keep = await owner.ask(lambda: frozenset(owner.core.entries))
        before_ns = None if retention.age_ns is None else owner.now() - retention.age_ns
        drop = partial(store.retain, bytes_max=retention.size_bytes, before_ns=before_ns, keep=keep)
        try:
            positions = await anyio.to_thread.run_sync(drop, abandon_on_cancel=True)
        except StoreError as error:
            _log.error("log_not_dropped", reason=str(error))
        else:
            if positions:
                first = store.first_position
                _log.info("log_dropped", positions=positions, first_position=first)
                await owner.tell(partial(owner.journal.index.forget_before, first, keep))
        await anyio.sleep(pause_seconds)


async def _drain(owner: SchedulerOwner, ends: Ends) -> int:
    """Finish what is here, as long as it may take; 1 when something had to be cut off."""
    await owner.tell(owner.stop_accepting)
    with anyio.move_on_after(ends.drain_seconds):
        await _until(owner, lambda: owner.settled or ends.hurry.is_set())
    code = 0 if await owner.ask(lambda: owner.settled) else 1
    if code:
        await owner.tell(partial(_cut_off, owner))
        # Engines have no say in when this ends, but a moment to settle what was cut off.
        with anyio.move_on_after(GRACE_SECONDS):
            await _until(owner, lambda: owner.settled)
    if ends.settled is not None:
        ends.settled()
        with anyio.move_on_after(LEAVE_SECONDS):
            await _until(owner, lambda: not owner.fleet.streams.links or ends.hurry.is_set())
    await owner.ask(owner.fleet.shut_down)
    try:
        await anyio.to_thread.run_sync(owner.journal.store.flush)
    except StoreUnavailable as error:
        _log.error("log_unavailable_at_end", reason=str(error))
        code = 1
    return code


def _cut_off(owner: SchedulerOwner) -> None:
    """Abort or reject whatever is open; the log says so, and clients are told."""
    _log.warning("scheduler_forced", requests_open=owner.requests_open)
    waiting = [pending.wanted.request for pending in owner.core.queue.waiting()]
    for request in (*owner.core.log.requests, *waiting):
        owner.perform(owner.core.cancel(request, Cause.SHUTDOWN, "scheduler", owner.now()))


async def _until(owner: SchedulerOwner, holds: Callable[[], bool]) -> None:
    while True:
        changed = owner.changed
        if await owner.ask(holds):
            return
        with anyio.move_on_after(0.1):
            await changed.wait()
