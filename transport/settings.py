"""Every setting of a process, once: flags, environment and TOML file are read into these.

Owns: names, defaults, units and checks of settings, and what each is for (its own docstring).
Must not know: how a process uses them, or what reads them.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import attrs

from lifecycle.events import Role

LOOPBACK = "127.0.0.1"
SCHEDULER_PORT = 50551
DEFAULT_MODEL = Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
PLANES = ("shared-memory", "grpc")
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


def _port(_instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 0 <= value < 1 << 16:
        raise InvalidSetting(name=attribute.name, value=value, reason="is no port (0 to 65535)")


def _loopback(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not is_loopback(value):
        reason = f"only loopback hosts such as {LOOPBACK} are served: nothing is encrypted yet"
        raise InvalidSetting(name=attribute.name, value=value, reason=reason)


def _loopback_address(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal():
        raise InvalidSetting(name=attribute.name, value=value, reason="is no address (host:port)")
    _loopback(_instance, attribute, host)


def _plane(_instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in PLANES:
        reason = f"no such data plane; there are {', '.join(PLANES)}"
        raise InvalidSetting(name=attribute.name, value=value, reason=reason)


@attrs.frozen(kw_only=True)
class SchedulerSettings:
    """The scheduler process."""

    model: str = str(DEFAULT_MODEL)
    """Model: a GGUF file, a local directory in Hugging Face's format, or a hub id."""
    host: str = attrs.field(default=LOOPBACK, validator=_loopback)
    """Host to bind; loopback only."""
    port: int = attrs.field(default=SCHEDULER_PORT, validator=_port)
    """Port to bind; 0 takes a free one."""
    log: Path | None = None
    """Folder of the event log's segment files; without it the log is in memory only."""
    context_tokens: int | None = attrs.field(default=None, validator=_above_zero)
    """Context in tokens; without it, the least of the model's context and what both pools hold."""
    queue_limit: int = attrs.field(default=256, validator=_above_zero)
    """Most requests that wait for admission."""
    queue_seconds: float = attrs.field(default=60.0, validator=_above_zero)
    """Longest wait for admission."""
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


@attrs.frozen(kw_only=True)
class PoolSettings:
    """Memory and work of an engine; `serve` gives all engines the same."""

    kv_memory: str = "20%"
    """Size of the KV pool: bytes as "512MiB", or a share of free memory as "20%"."""
    page_tokens: int = attrs.field(default=32, validator=_above_zero)
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
    threads: int = attrs.field(default=1, validator=_above_zero)
    """Threads that compute."""


@attrs.frozen(kw_only=True)
class JoinSettings(PoolSettings):
    """An engine process, whatever its role."""

    scheduler: str = attrs.field(
        default=f"{LOOPBACK}:{SCHEDULER_PORT}", validator=_loopback_address
    )
    """Address of the scheduler to join (host:port)."""
    model: str = str(DEFAULT_MODEL)
    """Model: a GGUF file, a local directory in Hugging Face's format, or a hub id."""
    host: str = attrs.field(default=LOOPBACK, validator=_loopback)
    """Host that the data plane binds; loopback only."""
    growth_tokens: int = attrs.field(default=64, validator=_above_zero)
    """Decode: tokens of a request's first growth step; must equal the scheduler's."""


@attrs.frozen(kw_only=True)
class EngineSettings(JoinSettings):
    """A prefill or decode process with its name in the fleet."""

    role: Role
    """What the engine does."""
    engine: str
    """Its name."""
