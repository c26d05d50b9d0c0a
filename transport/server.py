"""The scheduler's parts put together: the owner of a life, and a gRPC server with its services.

Owns: options of the server, health, reflection.
Must not know: when anything starts and ends, and what any service does.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

import attrs
import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from engine.digests import keyed_digest
from engine.scheduler import Scheduler
from engine.store import EventStore
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weights import load_config
from lifecycle.decide import Limits
from lifecycle.wording import counted
from transport.access import Access
from transport.admin_service import AdminService
from transport.fleet_service import FleetService
from transport.generation_service import NANOSECONDS, GenerationService
from transport.log_service import LogService
from transport.new_credentials import write_private
from transport.pb import (
    admin_pb2,
    admin_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
)
from transport.scheduler_owner import OwnerSettings, SchedulerOwner
from transport.settings import InvalidSetting, SchedulerSettings
from transport.tokenising import Tokenising
from transport.wellformed import WellFormed

MESSAGE_BYTES_MAX = 64 << 20
GRACE_SECONDS = 2.0
KEY_BYTES = 32

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Gateways ping every few seconds, also without a call; that is no abuse.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # While a probe of the bandwidth is out no other ping is sent, and it may wait for a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Two schedulers on one port would each get half of the engines.
    ("grpc.so_reuseport", 0),
)

SERVICES: tuple[str, ...] = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (generation_pb2, "GenerationService"),
        (fleet_pb2, "FleetService"),
        (log_pb2, "LogService"),
        (admin_pb2, "AdminService"),
    )
)
GENERATION = SERVICES[0]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_log = structlog.get_logger("custody.server")


@attrs.frozen
class ServedModel:
    """What the scheduler knows of the model: no weights."""

    name: str
    tokenizer: Tokenizer
    vocabulary: int
    context: int


def load_served_model(source: str) -> ServedModel:
    """Tokenizer and figures of a model. Raises ModelError; blocks for seconds."""
    config = load_config(source)
    return ServedModel(Path(source).stem, load_tokenizer(source), config.vocabulary, config.context)


def make_owner(
    settings: SchedulerSettings, *, model: ServedModel, store: EventStore
) -> SchedulerOwner:
    """Begin a scheduler life on this store: its epoch is durable before anything else."""
    key = secrets.token_bytes(KEY_BYTES)
    epoch = store.take_epoch()
    context = settings.context_tokens
    if context is not None and context > model.context:
        reason = f"the model's context is {counted(model.context, 'token')}"
        raise InvalidSetting(name="context_tokens", value=context, reason=reason)
    core = Scheduler(
        limits=Limits(
            context_tokens=context or model.context,
            growth_tokens=settings.growth_tokens,
            attempts_max=settings.attempts_max,
            settle_ns=nanoseconds(settings.settle_seconds),
        ),
        epoch=epoch,
        digest=keyed_digest(key),
        queue_limit=settings.queue_limit,
        queue_ns=nanoseconds(settings.queue_seconds),
        engine_wait_ns=nanoseconds(settings.engine_wait_seconds),
    )
    owner = SchedulerOwner(
        core,
        store,
        OwnerSettings(
            model=model.name,
            model_context=model.context,
            context_wanted=context,
            tokenizer=model.tokenizer.fingerprint,
            digest_key=key,
            tenant_salt=tenant_salt(settings),
            lease_ns=nanoseconds(settings.lease_seconds),
            reader_tokens_max=settings.reader_tokens_max,
            log_slow_ns=nanoseconds(settings.log_wait_seconds),
            log_room_bytes_min=settings.log_room_bytes_min,
        ),
        now=time.time_ns,
        monotonic=time.monotonic_ns,
    )
    owner.resume()
    return owner


def tenant_salt(settings: SchedulerSettings) -> bytes:
    """The key of tenants' commitments: of this life, or kept in a file. Raises InvalidSetting."""
    salt, path = secrets.token_bytes(KEY_BYTES), settings.tenant_key
    if path is None:
        return salt
    try:
        with suppress(FileExistsError):
            write_private(path, salt)
        salt = path.read_bytes()
    except OSError as error:
        reason = error.strerror or "cannot be used"
        raise InvalidSetting(name="tenant_key", value=str(path), reason=reason) from error
    if len(salt) != KEY_BYTES:
        reason = f"holds {len(salt)} bytes, {KEY_BYTES} are needed"
        raise InvalidSetting(name="tenant_key", value=str(path), reason=reason)
    return salt


@attrs.define
class Services:
    """The gRPC server with everything on it."""

    server: grpc.aio.Server
    health: health.HealthServicer
    log: LogService
    access: Access

    @classmethod
    def assemble(
        cls,
        owner: SchedulerOwner,
        *,
        model: ServedModel,
        settings: SchedulerSettings,
        access: Access,
    ) -> Services:
        """Put the services of this scheduler on a server that does not listen yet."""
        server = grpc.aio.server(interceptors=(access, WellFormed()), options=SERVER_OPTIONS)
        tokenising = Tokenising(
            model.tokenizer,
            model=model.name,
            vocabulary=model.vocabulary,
            prompt_bytes_max=settings.prompt_bytes_max,
        )
        generation = GenerationService(
            owner, tokenising, request_seconds_max=settings.request_seconds_max
        )
        log = LogService(owner)
        servicer = health.HealthServicer()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(owner), server)
        log_pb2_grpc.add_LogServiceServicer_to_server(log, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(owner), server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        names = (*SERVICES, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return cls(server, servicer, log, access)

    async def watch_health(self, owner: SchedulerOwner) -> None:
        """Keep the health of generation equal to whether a request would have a chance."""
        for name in ("", *SERVICES[1:]):
            await self.health.set(name, health_pb2.HealthCheckResponse.SERVING)
        known = None
        while True:
            changed, serving = owner.changed, owner.serving
            if serving != known:
                known = serving
                await self.health.set(
                    GENERATION,
                    health_pb2.HealthCheckResponse.SERVING
                    if serving
                    else health_pb2.HealthCheckResponse.NOT_SERVING,
                )
            await changed.wait()


def nanoseconds(seconds: float) -> int:
    """Seconds as a whole number of nanoseconds."""
    return int(seconds * NANOSECONDS)
