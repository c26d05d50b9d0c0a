"""Every setting of a process, once: flags, environment and TOML file are read into these.

Owns: names, defaults, units and checks of settings, and what each is for (its own docstring).
Must not know: how a process uses them, or what reads them.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

import attrs

from engine.memory_size import MemorySizeError, parse_memory
from lifecycle.events import Role
from transport.stores.retention_limits import Retention

LOOPBACK = "127.0.0.1"
SCHEDULER_PORT = 50551
DEFAULT_MODEL = Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
PAGE_TOKENS_MAX = 1 << 16
"""As `kernels.layout` has it, whose import takes seconds."""
_ANY_BYTES = 1 << 62
PLANES = ("shared-memory", "grpc")
WEIGHTS = ("float", "int8")
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - named to be refused
FLAG_NAMES = {"context_tokens": "context"}


class InvalidSetting(ValueError):
    """A setting cannot be used; the user changes it and starts again."""

    def __init__(self, *, name: str, value: object, reason: str) -> None:
        super().__init__(f"{name} = {value!r}: {reason}")
        self.name = name
        self.value = value
        self.reason = reason


def flag_name(field: str) -> str:
    """The flag of a field without its dashes; environment and TOML names follow from it."""
    return FLAG_NAMES.get(field, field.replace("_", "-"))


def to_flags(settings: attrs.AttrsInstance) -> tuple[str, ...]:
    """The arguments that make another process read equal settings; None is left to its default."""
    flags: list[str] = []
    for field in attrs.fields(type(settings)):
        value = getattr(settings, field.name)
        if value is not None:
            flags += (f"--{flag_name(field.name)}", str(value))
    return tuple(flags)


def is_loopback(host: str) -> bool:
    """Whether the host names this machine alone, judged without asking a resolver."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _above_zero(_instance: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not value > 0:
        raise InvalidSetting(name=attribute.name, value=value, reason="must be above 0")


def _not_negative(_instance: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if value < 0:
        raise InvalidSetting(name=attribute.name, value=value, reason="must not be negative")


def _retention(
    _instance: object, attribute: attrs.Attribute[str | None], value: str | None
) -> None:
    if value is None:
        return
    try:
        Retention.parse(value)
    except ValueError as error:
        raise InvalidSetting(name=attribute.name, value=value, reason=str(error)) from error


def _memory(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    """Whether it is a size at all; how many pages it holds hangs on the model."""
    try:
        parse_memory(value, free_bytes=_ANY_BYTES)
    except MemorySizeError as error:
        raise InvalidSetting(name=attribute.name, value=value, reason=error.reason) from error


def _page_tokens(_instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 0 < value <= PAGE_TOKENS_MAX:
        reason = f"a page holds 1 to {PAGE_TOKENS_MAX} tokens"
        raise InvalidSetting(name=attribute.name, value=value, reason=reason)


def _port(_instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 0 <= value < 1 << 16:
        raise InvalidSetting(name=attribute.name, value=value, reason="is no port (0 to 65535)")


def _address(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    _, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal():
        raise InvalidSetting(name=attribute.name, value=value, reason="is no address (host:port)")


def require_loopback_or_tls(address: str, *, tls: bool, name: str = "scheduler") -> None:
    """What leaves this machine is encrypted. Raises InvalidSetting."""
    if not tls and not is_loopback(address.rpartition(":")[0]):
        reason = "beyond loopback nothing is sent without TLS: give --tls-ca"
        raise InvalidSetting(name=name, value=address, reason=reason)


def _both_or_none(settings: object, first: str, second: str) -> None:
    if (getattr(settings, first) is None) is not (getattr(settings, second) is None):
        given, missing = (first, second) if getattr(settings, second) is None else (second, first)
        reason = f"it needs --{flag_name(missing)} beside it"
        raise InvalidSetting(name=given, value=str(getattr(settings, given)), reason=reason)


def _check_listening(settings: SchedulerSettings | JoinSettings) -> None:
    """Whoever listens beyond loopback encrypts, and knows its callers."""
    _both_or_none(settings, "tls_cert", "tls_key")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        value = str(settings.tls_client_ca)
        reason = "client certificates need TLS: give --tls-cert and --tls-key"
        raise InvalidSetting(name="tls_client_ca", value=value, reason=reason)
    if is_loopback(settings.host):
        return
    wanted = {"--tls-cert": settings.tls_cert, "--credentials": settings.credentials}
    missing = [flag for flag, value in wanted.items() if value is None]
    if missing:
        reason = (
            f"a host beyond loopback (such as {LOOPBACK}) is bound only with TLS and credentials; "
            f"missing: {', '.join(missing)}"
        )
        raise InvalidSetting(name="host", value=settings.host, reason=reason)


def _plane(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in PLANES:
        reason = f"no such data plane; there are {', '.join(PLANES)}"
        raise InvalidSetting(name=attribute.name, value=value, reason=reason)


def _weights(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in WEIGHTS:
        reason = f"no such weights; there are {', '.join(WEIGHTS)}"
        raise InvalidSetting(name=attribute.name, value=value, reason=reason)


def _device(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not DEVICE.fullmatch(value):
        reason = "a device is cpu, cuda or cuda:0 (AMD's are called cuda too)"
        raise InvalidSetting(name=attribute.name, value=value, reason=reason)


@attrs.frozen(kw_only=True)
class SchedulerSettings:
    """The scheduler process."""

    model: str = str(DEFAULT_MODEL)
    """Model: a GGUF file, a local directory in Hugging Face's format, or a hub id."""
    host: str = LOOPBACK
    """Host to bind; one beyond loopback needs TLS and credentials."""
    port: int = attrs.field(default=SCHEDULER_PORT, validator=_port)
    """Port to bind; 0 takes a free one."""
    log: Path | None = None
    """Folder of the event log's segment files; without it the log is in memory only."""
    retain: str | None = attrs.field(default=None, validator=_retention)
    """How much of the log is kept, by age, size or both: "30d", "20GiB", "30d,20GiB"."""
    log_wait_seconds: float = attrs.field(default=5.0, validator=_above_zero)
    """Longest flush of the log; while one takes longer the log counts as unavailable."""
    log_room_bytes_min: int = attrs.field(default=256 << 20, validator=_not_negative)
    """Free bytes where the log lies below which nothing is admitted; 0 looks at nothing."""
    context_tokens: int | None = attrs.field(default=None, validator=_above_zero)
    """Context in tokens; without it, the least of the model's context and what both pools hold."""
    queue_limit: int = attrs.field(default=256, validator=_above_zero)
    """Most requests that wait for admission."""
    queue_seconds: float = attrs.field(default=60.0, validator=_above_zero)
    """Longest wait for admission."""
    engine_wait_seconds: float = attrs.field(default=30.0, validator=_above_zero)
    """Longest wait for an engine that could hold the request, while there is none."""
    request_seconds_max: float = attrs.field(default=600.0, validator=_above_zero)
    """Longest life of a request, also for clients that give no deadline."""
    attempts_max: int = attrs.field(default=4, validator=_above_zero)
    """Most attempts of one request."""
    growth_tokens: int = attrs.field(default=64, validator=_above_zero)
    """Tokens booked beyond the prompt, and the first step of a request's growth."""
    settle_seconds: float = attrs.field(default=30.0, validator=_above_zero)
    """Time that the parties of an ended attempt have to settle its grants."""
    lease_seconds: float = attrs.field(default=10.0, validator=_above_zero)
    """How long a broken engine stream is nothing; after it the engine is lost."""
    prompt_bytes_max: int = attrs.field(default=4 << 20, validator=_above_zero)
    """Most bytes of a prompt, checked before it is tokenised."""
    reader_tokens_max: int = attrs.field(default=4096, validator=_above_zero)
    """Most tokens held for a client that reads slowly; beyond it the client is cut."""
    drain_seconds: float = attrs.field(default=60.0, validator=_above_zero)
    """Longest orderly shutdown."""
    credentials: Path | None = None
    """TOML file of those who may call; read again when it changes."""
    engine_credentials: Path | None = None
    """A second such file, for engines only; `serve` makes one for each run."""
    tenant_key: Path | None = None
    """File of the key that lets tenants see their requests of earlier lives; made if absent."""
    tls_cert: Path | None = None
    """Certificate chain of this server (PEM); read again when it changes."""
    tls_key: Path | None = None
    """Private key of that certificate (PEM)."""
    tls_client_ca: Path | None = None
    """Certificates (PEM) that sign those of clients; every client must then show one."""
    metrics_port: int | None = attrs.field(default=None, validator=attrs.validators.optional(_port))
    """Port on which Prometheus reads /metrics, under the same rules; not set: none."""

    def __attrs_post_init__(self) -> None:
        _check_listening(self)


@attrs.frozen(kw_only=True)
class DialSettings:
    """How a process that calls knows whom it reaches, and shows who it is."""

    tls_ca: Path | None = None
    """Certificates (PEM) that sign those of servers; with it every call is encrypted."""
    tls_server_name: str | None = None
    """Name to expect in servers' certificates, if it is not the host of their address."""
    tls_client_cert: Path | None = None
    """Certificate chain to show to servers (PEM)."""
    tls_client_key: Path | None = None
    """Private key of that certificate (PEM)."""

    def __attrs_post_init__(self) -> None:
        _both_or_none(self, "tls_client_cert", "tls_client_key")
        for name in ("tls_server_name", "tls_client_cert"):
            value = getattr(self, name)
            if value is not None and self.tls_ca is None:
                reason = "it has no use without --tls-ca"
                raise InvalidSetting(name=name, value=str(value), reason=reason)


@attrs.frozen(kw_only=True)
class CallSettings(DialSettings):
    """A client of a running scheduler."""

    token_file: Path | None = None
    """File that holds the bearer token to send."""


@attrs.frozen(kw_only=True)
class PoolSettings(DialSettings):
    """Memory and work of an engine, and its calls; `serve` gives all engines the same."""

    kv_memory: str = attrs.field(default="20%", validator=_memory)
    """Size of the KV pool: bytes as "512MiB", or a share of free memory as "20%"."""
    page_tokens: int = attrs.field(default=32, validator=_page_tokens)
    """Tokens that a KV page holds."""
    staging_pages: int = attrs.field(default=64, validator=_above_zero)
    """Prefill: pages of packed chunks that wait for their destination."""
    chunk_tokens: int = attrs.field(default=256, validator=_above_zero)
    """Prefill: most tokens of one forward pass."""
    batch: int = attrs.field(default=16, validator=_above_zero)
    """Decode: most requests of one forward pass."""
    slots: int = attrs.field(default=256, validator=_above_zero)
    """Most requests that the engine holds at once."""
    plane: str = attrs.field(default=PLANES[0], validator=_plane)
    """Data plane between engines: shared-memory (one host) or grpc."""
    threads: int | None = attrs.field(default=None, validator=_above_zero)
    """Threads that compute; not set: as many as there are cores, at most 8."""
    device: str = attrs.field(default="cpu", validator=_device)
    """Where engines compute and keep pages: cpu, cuda or cuda:0; a GPU computes in bfloat16."""
    weights: str = attrs.field(default=WEIGHTS[0], validator=_weights)
    """Weights: float, or int8 for a quarter of the memory and faster decoding on CPUs."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.weights == "int8" and self.device != "cpu":
            reason = f"int8 is for CPUs, and the device is {self.device}"
            raise InvalidSetting(name="weights", value=self.weights, reason=reason)


@attrs.frozen(kw_only=True)
class JoinSettings(PoolSettings):
    """An engine process, whatever its role."""

    scheduler: str = attrs.field(default=f"{LOOPBACK}:{SCHEDULER_PORT}", validator=_address)
    """Address of the scheduler to join (host:port)."""
    model: str = str(DEFAULT_MODEL)
    """Model: a GGUF file, a local directory in Hugging Face's format, or a hub id."""
    host: str = LOOPBACK
    """Host that the data plane binds; one beyond loopback needs TLS and credentials."""
    growth_tokens: int = attrs.field(default=64, validator=_above_zero)
    """Decode: tokens of a request's first growth step; must equal the scheduler's."""
    token_file: Path | None = None
    """File that holds the bearer token to send."""
    credentials: Path | None = None
    """Decode with the grpc plane: TOML file of the engines that may write pages here."""
    tls_cert: Path | None = None
    """Decode with the grpc plane: certificate chain of the pages' server (PEM)."""
    tls_key: Path | None = None
    """Private key of that certificate (PEM)."""
    tls_client_ca: Path | None = None
    """Certificates (PEM) that sign those of other engines; each must then show one."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_listening(self)
        if self.host.strip("[]") in WILDCARDS:
            reason = "other engines are told this host, so it must be one that they can reach"
            raise InvalidSetting(name="host", value=self.host, reason=reason)
        require_loopback_or_tls(self.scheduler, tls=self.tls_ca is not None)


@attrs.frozen(kw_only=True)
class EngineSettings(JoinSettings):
    """A prefill or decode process with its name in the fleet."""

    role: Role
    """What the engine does."""
    engine: str
    """Its name."""
