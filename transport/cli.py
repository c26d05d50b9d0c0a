"""The command line: verbs, where settings come from, and exit codes.

Owns: the list of verbs, the order flag > environment > file > default, errors to exit codes.
Must not know: what any verb does; each lives in a `commands_` module and imports late.
"""

from __future__ import annotations

import json as json_module
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import App, CycloptsError, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env

from transport import (
    commands_bench,
    commands_credentials,
    commands_log,
    commands_run,
    commands_use,
)
from transport.commands_shared import (
    DASH,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_UNREACHABLE,
    EXIT_UNREADABLE,
    EXIT_USAGE,
    UsageError,
    note,
)
from transport.settings import (
    InvalidSetting,
    JoinSettings,
    SchedulerSettings,
    flag_name,
)

CONFIG_FILE = Path("custody.toml")
ENVIRONMENT_PREFIX = "CUSTODY_"
COUNTS = ("prefill", "decode")

app = App(
    name="custody",
    help="Serves language models and keeps a chain of custody for every KV page.",
    version_flags=(),
    default_parameter=Parameter(name_transform=flag_name),
)
for verb in (
    commands_run.serve,
    commands_run.scheduler,
    commands_run.prefill,
    commands_run.decode,
    commands_use.generate,
    commands_use.status,
    commands_log.replay,
    commands_use.version,
):
    app.command(verb)
app.command(commands_log.log_app)
app.command(commands_credentials.credentials_app)
app.command(commands_bench.bench_app)


@app.command
def demo(*, model: str | None = None, keep: Path | None = None) -> int:
    """Start everything with a small pool, ask, refuse, show the log, replay it, shut down.

    Parameters
    ----------
    model
        Model to serve.
    keep
        Folder for the log and the parts' own logs; without it a temporary one.
    """
    from transport.demo import run_demo

    return run_demo(model=model, keep=keep)


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


_KINDS: tuple[type[attrs.AttrsInstance], ...] = (SchedulerSettings, JoinSettings)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Path | None = None,
) -> Any:
    """Read settings and run a verb.

    Parameters
    ----------
    config
        TOML file of settings; custody.toml of this folder if absent.
    """
    sources: list[Any] = [Env(ENVIRONMENT_PREFIX, command=False)]
    if config is not None or CONFIG_FILE.is_file():
        sources.append(FileSettings(config or CONFIG_FILE))
    app.config = tuple(sources)
    return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        dashed = [DASH if token == "-" else token for token in tokens]
        result = app.meta(
            dashed, exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except (CycloptsError, InvalidSetting, UsageError) as error:
        return _complain(tokens, error, code=EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_SIGNAL + 2
    except BrokenPipeError:
        # The reader has gone; what is still buffered must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGNAL + 13
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        return _complain(tokens, error, code=code)
    return result if isinstance(result, int) else EXIT_OK


def _exit_code(error: Exception) -> int | None:
    """The code of an error that a verb may end with; None for what nobody foresaw."""
    if isinstance(error, commands_log.UnknownRequest):
        return EXIT_FAILED
    if isinstance(error, OSError):
        return EXIT_FAILED
    # Imported only now that something went wrong: these modules are slow to import.
    from engine.model_config import ModelError
    from engine.pool import MemorySizeError, PoolTooSmallError
    from engine.store import StoreError
    from kernels.layout import LayoutUnsupportedError
    from transport.client import Refused, Unreachable
    from transport.jsonlines import UnreadableLog

    if isinstance(error, UnreadableLog):
        return EXIT_UNREADABLE
    if isinstance(error, Unreachable):
        return EXIT_UNREACHABLE
    if isinstance(error, Refused):
        return EXIT_REFUSED
    if isinstance(error, StoreError):
        return EXIT_FAILED
    # A model that cannot be loaded and memory that holds no pool are settings to change.
    unusable = (ModelError, MemorySizeError, PoolTooSmallError, LayoutUnsupportedError)
    return EXIT_USAGE if isinstance(error, unusable) else None


def _complain(tokens: Sequence[str], error: Exception, *, code: int) -> int:
    message = str(error).strip()
    about: dict[str, Any] = {"exit_code": code, "message": message}
    if code == EXIT_REFUSED:
        for name in ("code", "reason", "message", "numbers"):
            about[name] = getattr(error, name)
    if "--json" in tokens:
        note(json_module.dumps({"error": about}))
        return code
    note(f"custody: {message}")
    for name, value in about.get("numbers", {}).items():
        note(f"  {name} = {value}")
    return code


def main() -> None:
    """The entry of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
