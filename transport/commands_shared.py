"""What the commands share: exit codes, common options, and writing data to standard output.

Owns: the meaning of exit codes; the one place that writes to standard output and error.
Must not know: any single command.
"""

from __future__ import annotations

import json as json_module
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, UnusedCliTokensError
from structlog.contextvars import get_contextvars

from transport.settings import LOOPBACK, SCHEDULER_PORT, CallSettings
from transport.spelling import spelt

if TYPE_CHECKING:
    from pathlib import Path

    from google.protobuf.message import Message
    from rich.table import Table

    from transport.client import Client

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_UNREADABLE = 5
EXIT_SIGNAL = 128
DEFAULT_SCHEDULER = f"{LOOPBACK}:{SCHEDULER_PORT}"
PLAIN_COLUMNS = 120
FAILED = "verb_failed"
"""The event of the line that says why a verb ends, and CRASHED, of one that nobody foresaw."""
CRASHED = "verb_crashed"
DASH = "\0-"
"""What stands for a lone "-" while arguments are parsed, which would be taken for a flag."""

Json = Annotated[bool, Parameter(negative="")]
"""Whether data is printed as JSON."""

Switch = Annotated[bool, Parameter(negative="")]
"""A flag that is only ever set."""

SchedulerAddress = Annotated[str, Parameter(name="--scheduler")]
"""Where a running scheduler listens."""

Door = Annotated[CallSettings, Parameter(name="*")]
"""How a verb that calls a scheduler shows who it is."""

CALL = CallSettings()


class UsageError(Exception):
    """The arguments make no sense together."""


class UnreadableFile(Exception):
    """What is to be read is not there, or is nothing of its kind."""


class Terminated(BaseException):
    """SIGTERM arrived; what is open is closed on the way out."""


def connect(scheduler: str, door: CallSettings) -> Client:
    """A client of that scheduler. Raises InvalidSetting."""
    from transport.client import Client

    return Client(scheduler, door)


def key_bytes(path: Path, flag: str = "--key") -> bytes:
    """What a key's file holds. Raises UsageError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {(error.strerror or str(error)).lower()}") from error


def require_timeout(seconds: float | None) -> None:
    """A time limit that can be kept, or none. Raises UsageError."""
    if seconds is not None and not seconds > 0:
        raise UsageError(f"--timeout {seconds:g}: must be above 0")


def undashed(text: str) -> str:
    """The text that the user wrote."""
    return "-" if text == DASH else text


def is_standard(name: object) -> bool:
    """Whether a file's name means standard input or output."""
    return str(name) in (DASH, "-")


def say(text: str = "") -> None:
    """Write one line of data; no foreign name in it begins another one, or commands a terminal."""
    sys.stdout.write(spelt(text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Write progress or a complaint, which may have several lines, spelt as `say` spells them."""
    sys.stderr.write("\n".join(spelt(line) for line in text.split("\n")) + "\n")
    sys.stderr.flush()


def say_json(value: Any) -> None:
    """Write one JSON value as one line."""
    say(json_module.dumps(value, separators=(",", ":"), ensure_ascii=False))


def say_message(message: Message, *, zeros: bool = False) -> None:
    """Write a message in protobuf's JSON mapping as one line; `zeros` keeps empty fields."""
    from google.protobuf import json_format

    value = json_format.MessageToDict(message, always_print_fields_with_no_presence=zeros)
    say_json(value)


def complain(error: Exception, *, code: int, json: bool, hint: str = "") -> int:
    """Say what went wrong on standard error, with everything that a refusal tells.

    hint: what to do about it.  A part of a deployment has bound its name to its log's lines; its
    complaint is one of them, and on a terminal it is prose as they are.
    """
    message = _told(error)
    about: dict[str, Any] = {"exit_code": code, "message": message}
    if hint:
        about["hint"] = hint
    if code == EXIT_REFUSED:
        for name in ("code", "reason", "message", "numbers"):
            about[name] = getattr(error, name)
    if not sys.stderr.isatty() if part() else json:
        line = {"event": FAILED, **get_contextvars(), "level": "error", "timestamp": _now()}
        note(json_module.dumps({**line, "error": about}))
        return code
    note(f"custody: {message}")
    if hint:
        note(f"  {hint}")
    for name, value in sorted(about.get("numbers", {}).items()):
        note(f"  {name} = {value}")
    return code


def _told(error: Exception) -> str:
    """What an error says, with a file's name before what the system says of it."""
    message = str(error).strip()
    if isinstance(error, UnusedCliTokensError):
        return f"there is no argument for {' '.join(map(repr, error.unused_tokens or ()))}"
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.filename is not None and cause.strerror:
        said = f"{cause.filename}: {cause.strerror[:1].lower()}{cause.strerror[1:]}"
        message = message.replace(str(cause), said)
    return message


def part() -> str:
    """The name of the part of a deployment that this process is; empty if it is none."""
    return str(get_contextvars().get("part", ""))


def _now() -> str:
    return datetime.now(tz=UTC).isoformat().replace("+00:00", "Z")


def say_table(table: Table) -> None:
    """Draw a table on standard output: coloured on a terminal, wide and plain elsewhere."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(
        highlight=False,
        no_color=True if "NO_COLOR" in os.environ or not terminal else None,
        width=None if terminal else PLAIN_COLUMNS,
        soft_wrap=False,
        # A foreign name in brackets or colons is that name.
        markup=False,
        emoji=False,
    )
    if terminal:
        console.print(table)
        return
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        say(line.rstrip())
