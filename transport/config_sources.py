"""Where settings come from besides flags: the environment and a TOML file.

Owns: their order, the names that a file may use, and which file is read.
Must not know: what any setting means.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs
from cyclopts import App
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env

from transport.commands_shared import UsageError
from transport.settings import CallSettings, JoinSettings, SchedulerSettings, flag_name

CONFIG_FILE = Path("custody.toml")
ENVIRONMENT_PREFIX = "CUSTODY_"
COUNTS = ("prefill", "decode")

Source = Callable[[App, tuple[str, ...], ArgumentCollection], Any]

given_file: ContextVar[Path | None] = ContextVar("given_file", default=None)
"""The settings file that the command line names."""

_KINDS: tuple[type[attrs.AttrsInstance], ...] = (SchedulerSettings, JoinSettings, CallSettings)


class FileSettings:
    """A TOML file as a source of settings; every key must be a setting of some verb."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path}: {error}") from error
        known = {
            *COUNTS,
            *(flag_name(f.name) for kind in _KINDS for f in attrs.fields(kind)),
        }
        for key, value in self._values.items():
            if key.replace("_", "-") not in known:
                raise UsageError(f"{path}: no setting is called {key!r}")
            if isinstance(value, dict | list):
                raise UsageError(f"{path}: {key!r} must be a single value")

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Give values to the arguments of this verb that have none yet."""
        from cyclopts.token import Token

        for key, value in self._values.items():
            for argument in arguments:
                if argument.tokens or f"--{key.replace('_', '-')}" not in argument.names:
                    continue
                text = str(value).lower() if isinstance(value, bool) else str(value)
                argument.append(Token(keyword=key, value=text, source=str(self._path)))


def environment() -> Env:
    """The environment as a source of settings."""
    return Env(ENVIRONMENT_PREFIX, command=False)


def sources() -> tuple[Source, ...]:
    """What is asked for a setting without a flag, in order. Raises UsageError for a bad file."""
    file = given_file.get()
    if file is None and not CONFIG_FILE.is_file():
        return (environment(),)
    return environment(), FileSettings(file or CONFIG_FILE)
