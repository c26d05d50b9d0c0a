"""Every setting of a process, once: flags, environment and TOML file are read into these.

Owns: names, defaults, units and checks of settings.
Must not know: how a process uses them.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from lifecycle.events import Role

LOOPBACK = "127.0.0.1"
SCHEDULER_PORT = 50551
DEFAULT_MODEL = Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")


class InvalidSetting(ValueError):
    """A setting cannot be used; the user changes it and starts again."""

    def __init__(self, *, name: str, value: object, reason: str) -> None:
        super().__init__(f"{name} = {value!r}: {reason}")
        self.name = name
        self.value = value
        self.reason = reason


def _above_zero(_instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise InvalidSetting(name=attribute.name, value=value, reason="must be above 0")


@attrs.frozen(kw_only=True)
class SchedulerSettings:
    """The scheduler process.

    log: folder of the segment files, None for a log in memory only;
    context_tokens: None means min(model context, what both pools can hold).
    """

    model: str = str(DEFAULT_MODEL)
    host: str = LOOPBACK
    port: int = SCHEDULER_PORT
    log: Path | None = None
    context_tokens: int | None = None
    queue_limit: int = attrs.field(default=256, validator=_above_zero)
    queue_seconds: float = attrs.field(default=60.0, validator=_above_zero)
    request_seconds_max: float = attrs.field(default=600.0, validator=_above_zero)
    attempts_max: int = attrs.field(default=4, validator=_above_zero)
    growth_tokens: int = attrs.field(default=64, validator=_above_zero)
    settle_seconds: float = attrs.field(default=30.0, validator=_above_zero)
    lease_seconds: float = attrs.field(default=10.0, validator=_above_zero)
    prompt_bytes_max: int = attrs.field(default=4 << 20, validator=_above_zero)
    reader_tokens_max: int = attrs.field(default=4096, validator=_above_zero)
    drain_seconds: float = attrs.field(default=60.0, validator=_above_zero)


@attrs.frozen(kw_only=True)
class EngineSettings:
    """A prefill or decode process; it joins the scheduler at `scheduler` (host:port).

    kv_memory: size of the pool, as "512MiB" or a share of free memory as "20%";
    staging_pages, chunk_tokens: prefill only; batch: decode only.
    """

    role: Role
    engine: str
    scheduler: str = f"{LOOPBACK}:{SCHEDULER_PORT}"
    model: str = str(DEFAULT_MODEL)
    kv_memory: str = "20%"
    page_tokens: int = attrs.field(default=32, validator=_above_zero)
    staging_pages: int = attrs.field(default=64, validator=_above_zero)
    chunk_tokens: int = attrs.field(default=256, validator=_above_zero)
    batch: int = attrs.field(default=16, validator=_above_zero)
    slots: int = attrs.field(default=256, validator=_above_zero)
    growth_tokens: int = attrs.field(default=64, validator=_above_zero)
    plane: str = "shared-memory"
    host: str = LOOPBACK
    threads: int = attrs.field(default=1, validator=_above_zero)
