"""The command line: verbs, where settings come from, and exit codes.

Owns: the list of verbs, the order flag > environment > file > default, errors to exit codes.
Must not know: what any verb does; each lives in a `commands_` module and imports late.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog
from cyclopts import App, CycloptsError, Parameter

from transport import (
    commands_bench,
    commands_chat,
    commands_config,
    commands_convert,
    commands_credentials,
    commands_drain,
    commands_evidence,
    commands_exposures,
    commands_forensics,
    commands_fuzz,
    commands_index,
    commands_log,
    commands_metrics,
    commands_run,
    commands_simulate,
    commands_use,
    commands_verify,
)
from transport.commands_shared import (
    CRASHED,
    DASH,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_UNREACHABLE,
    EXIT_UNREADABLE,
    EXIT_USAGE,
    Json,
    Terminated,
    UnreadableFile,
    UsageError,
    complain,
    part,
    say,
)
from transport.config_sources import given_file, sources
from transport.settings import DEFAULT_MODEL, InvalidSetting, flag_name

app = App(
    name="custody",
    help=(
        "Serves language models and keeps a chain of custody for every KV page.\n\n"
        "Begin with `custody demo`, or with `custody serve --log FOLDER` and, in another terminal, "
        "`custody generate PROMPT`; then `custody replay FOLDER` judges what was logged."
    ),
    version=commands_use.version_line,
    version_flags=("--version",),
    default_parameter=Parameter(name_transform=flag_name),
)
for verb in (
    commands_run.serve,
    commands_run.scheduler,
    commands_run.prefill,
    commands_run.decode,
    commands_use.generate,
    commands_chat.chat,
    commands_use.cancel,
    commands_drain.drain,
    commands_use.status,
    commands_use.health,
    commands_forensics.replay,
    commands_exposures.exposures,
    commands_forensics.explain,
    commands_forensics.timeline,
    commands_forensics.diff,
    commands_metrics.metrics,
    commands_fuzz.fuzz,
    commands_simulate.simulate,
    commands_use.version,
):
    app.command(verb)
app.command(commands_evidence.slice_log, name="slice")
app.command(commands_evidence.bundle_app)
app.command(commands_convert.log_app)
for log_verb in (commands_index.index, commands_verify.verify, commands_verify.sign):
    commands_convert.log_app.command(log_verb)
app.command(commands_credentials.credentials_app)
app.command(commands_bench.bench_app)
app.command(commands_config.config_app)

# Arguments that may be left out have names; the library would call them all ARGS.
for verb_name, arguments in (
    ("prefill", "[ENGINE]"),
    ("decode", "[ENGINE]"),
    ("generate", "[PROMPT]"),
    ("replay", "[FILE]"),
    ("metrics", "[FILE]"),
    ("fuzz", "[MUTANT...]"),
):
    app[verb_name].usage = f"Usage: custody {verb_name} [OPTIONS] {arguments}"
commands_config.config_app["show"].usage = "Usage: custody config show [OPTIONS] [VERB] [FLAGS...]"


@app.command
def demo(*, model: str | None = None, keep: Path | None = None, json: Json = False) -> int:
    """Start everything with a small pool, ask, refuse, show the log, replay it, shut down.

    Parameters
    ----------
    model
        Model to serve.
    keep
        Folder for the log and the parts' own logs; without it a temporary one.
    json
        Print JSON Lines, one piece of the story a line.
    """
    from transport.demo import run_demo

    return run_demo(model=model, keep=keep, json=json)


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print a script that completes verbs and flags in a shell.

    Parameters
    ----------
    shell
        The shell that the script is for.
    """
    # The generator ends some scripts with spaces, and each with a newline of its own.
    for line in app.generate_completion(prog_name="custody", shell=shell).splitlines():
        say(line.rstrip())
    return EXIT_OK


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(env_var="CUSTODY_CONFIG")] = None,
) -> Any:
    """Read settings and run a verb.

    Parameters
    ----------
    config
        TOML file of settings; custody.toml of this folder if absent.
    """
    given_file.set(config)
    app.config = sources()
    return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    # What an earlier one of this process was bound to is not its own.
    structlog.contextvars.clear_contextvars()
    try:
        dashed = [DASH if token == "-" else token for token in tokens]
        result = app.meta(
            dashed, exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except (CycloptsError, InvalidSetting, UsageError) as error:
        return complain(error, code=EXIT_USAGE, json="--json" in tokens)
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except Terminated:
        return EXIT_SIGNAL + signal.SIGTERM
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as error:
        # So ends the library that draws help pages when nobody reads them any more.
        if isinstance(error.__context__, BrokenPipeError):
            return _reader_left()
        raise
    except Exception as error:
        code = _exit_code(error)
        if code is not None:
            return complain(error, code=code, json="--json" in tokens, hint=_hint(error))
        if not part() or sys.stderr.isatty():
            raise
        # Every line of a part's log is JSON, also its last one.
        structlog.get_logger("custody").critical(CRASHED, exc_info=error)
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def _reader_left() -> int:
    """The code for a reader of standard output that has gone.

    What is still buffered must not complain at exit either.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_SIGNAL + signal.SIGPIPE


def _exit_code(error: Exception) -> int | None:
    """The code of an error that a verb may end with; None for what nobody foresaw."""
    if isinstance(error, commands_log.UnknownRequest):
        return EXIT_FAILED
    if isinstance(error, OSError):
        return EXIT_FAILED
    if isinstance(error, UnreadableFile):
        return EXIT_UNREADABLE
    # Imported only now that something went wrong: these modules are slow to import.
    from engine.memory_size import MemorySizeError
    from engine.model_config import ModelError
    from engine.pool import PoolTooSmallError
    from engine.store import StoreDamaged, StoreError, StoreTooNew
    from kernels.layout import LayoutUnsupportedError
    from transport.bundle import NoBundle
    from transport.client import Refused, Unreachable
    from transport.convert import IncompleteLog
    from transport.jsonlines import UnreadableLog
    from transport.parquet import NoParquet, UnusableMeans
    from transport.seek_index import UnusableIndex

    if isinstance(
        error, UnusableIndex | UnreadableLog | StoreDamaged | StoreTooNew | NoBundle | IncompleteLog
    ):
        return EXIT_UNREADABLE
    if isinstance(error, Unreachable):
        return EXIT_UNREACHABLE
    if isinstance(error, Refused):
        return EXIT_REFUSED
    if isinstance(error, StoreError):
        return EXIT_FAILED
    # A model that cannot be loaded and memory that holds no pool are settings to change.
    unusable = ModelError | MemorySizeError | PoolTooSmallError | LayoutUnsupportedError
    if isinstance(error, unusable | NoParquet | UnusableMeans):
        return EXIT_USAGE
    return None


def _hint(error: Exception) -> str:
    """What to do about it, where the error itself cannot know."""
    from engine.model_config import ModelNotFound
    from transport.client import Unreachable

    if isinstance(error, Unreachable):
        return "`custody serve` starts a scheduler; --scheduler names the address of another"
    if not isinstance(error, ModelNotFound):
        return ""
    where = "" if error.path.is_absolute() else f"looked for in {Path.cwd()}; "
    fetched = (
        "`make model` in a checkout fetches this default, or "
        if (error.path == DEFAULT_MODEL)
        else ""
    )
    return (
        f"{where}{fetched}name another model with --model or CUSTODY_MODEL: a GGUF file, "
        f"a folder in Hugging Face's format, or a hub id"
    )


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated


def open_closed() -> None:
    """Let a standard stream that was closed for this process be the null device.

    Python has none then, and the next file that is opened would take its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for good


def main() -> None:
    """The entry of the console script."""
    open_closed()
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
