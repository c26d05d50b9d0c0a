"""Which processes a supervised deployment is made of, and with which arguments each starts.

Owns: how settings of the whole become those of each part.
Must not know: how a process is started, watched or ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from transport.new_credentials import EphemeralEngine, ephemeral_engine
from transport.settings import (
    InvalidSetting,
    PoolSettings,
    SchedulerSettings,
    flag_name,
    to_flags,
)


@attrs.frozen(kw_only=True)
class Parts:
    """What to run."""

    prefill: int
    decode: int
    scheduler: SchedulerSettings
    pool: PoolSettings

    def __attrs_post_init__(self) -> None:
        for name in ("prefill", "decode"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidSetting(name=name, value=value, reason="at least 1 is needed")
        wanted = (("tls_cert", "tls_ca"), ("tls_client_ca", "tls_client_cert"))
        for served, dialled in wanted:
            value = getattr(self.scheduler, served)
            if value is not None and getattr(self.pool, dialled) is None:
                reason = f"the engines call this scheduler and need --{flag_name(dialled)}"
                raise InvalidSetting(name=served, value=str(value), reason=reason)

    def scheduler_command(self, known: EphemeralEngine | None = None) -> tuple[str, ...]:
        """The arguments of the scheduler process."""
        settings = self.scheduler
        if known is not None:
            settings = attrs.evolve(settings, engine_credentials=known.credentials)
        return ("scheduler", *to_flags(settings))

    def engine_commands(
        self, address: str, known: EphemeralEngine | None = None
    ) -> dict[str, tuple[str, ...]]:
        """The arguments of each engine process by the engine's name."""
        joined = (
            *to_flags(self.pool),
            *("--scheduler", address, "--host", self.scheduler.host),
            *("--model", self.scheduler.model),
            *("--growth-tokens", str(self.scheduler.growth_tokens)),
            *self._door_flags(),
        )
        if known is not None:
            joined = (*joined, "--token-file", str(known.token_file))
            joined = (*joined, "--credentials", str(known.credentials))
        return {
            f"{verb}-{number}": (verb, f"{verb}-{number}", *joined)
            for verb, count in (("prefill", self.prefill), ("decode", self.decode))
            for number in range(count)
        }

    def _door_flags(self) -> tuple[str, ...]:
        """The engines' own server has the scheduler's certificates."""
        names = ("tls_cert", "tls_key", "tls_client_ca")
        given = {name: getattr(self.scheduler, name) for name in names}
        return tuple(
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{flag_name(name)}", str(value))
        )

    @contextmanager
    def engine_credential(self) -> Iterator[EphemeralEngine | None]:
        """What this run's engines show, when anybody must show something."""
        if self.scheduler.credentials is None:
            yield None
            return
        with ephemeral_engine() as known:
            yield known
