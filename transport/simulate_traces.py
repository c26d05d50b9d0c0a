"""Files of real request traces: the formats of Mooncake and of the Azure public dataset.

Owns: finding a trace, recognising its format, and saying which line cannot be read.
Must not know: what a trace is used for.

Mooncake writes one JSON object a line (`timestamp` in milliseconds, `input_length`,
`output_length`); Azure writes CSV with a head (`TIMESTAMP,ContextTokens,GeneratedTokens`).
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from engine.simulator_values import TraceRequest
from transport.commands_shared import UnreadableFile

VARIABLE = "CUSTODY_TRACES"
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TOKENS_MAX = 1 << 24
_MILLISECOND_NS = 1_000_000


class UnreadableTrace(UnreadableFile):
    """A file is no trace of a known format; `line` counts from 1."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


def find_trace(name: Path) -> Path:
    """The file of that path, or of that name in the folder that CUSTODY_TRACES names.

    Raises UnreadableFile.
    """
    if name.is_file():
        return name
    folder = os.environ.get(VARIABLE)
    if folder is not None and (Path(folder) / name).is_file():
        return Path(folder) / name
    where = f"{folder}, which {VARIABLE} names" if folder else f"a folder that {VARIABLE} names"
    raise UnreadableFile(f"{name}: no such file, neither here nor in {where}")


def read_trace(path: Path, *, limit: int | None = None) -> tuple[TraceRequest, ...]:
    """The first requests of a trace, all without a limit. Raises UnreadableTrace."""
    with path.open(encoding="utf-8", newline="") as lines:
        try:
            head = lines.readline()
            lines.seek(0)
            azure = head.lstrip("\ufeff").startswith(AZURE_FIELDS[0])
            read = _azure(path, lines) if azure else _mooncake(path, lines)
            requests = tuple(islice(read, limit))
        except UnicodeDecodeError as error:
            raise UnreadableTrace(path, 1, f"it is not text: {error.reason}") from error
    if not requests:
        raise UnreadableTrace(path, 1, "it holds no request")
    return requests


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            arrival = fields["timestamp"]
            sizes = fields["input_length"], fields["output_length"]
        except (ValueError, TypeError, KeyError) as error:
            reason = f"no JSON object with timestamp, input_length and output_length: {error!r}"
            raise UnreadableTrace(path, number, reason) from error
        if not isinstance(arrival, int | float) or not 0 <= arrival < float("inf"):
            raise UnreadableTrace(path, number, f"timestamp {arrival!r} is no time since the start")
        yield _request(path, number, int(arrival * _MILLISECOND_NS), *sizes)


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    first: int | None = None
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            arrival = _nanoseconds(row["TIMESTAMP"])
            sizes = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError, KeyError) as error:
            reason = f"no row of {', '.join(AZURE_FIELDS)}: {error!r}"
            raise UnreadableTrace(path, number, reason) from error
        first = arrival if first is None else first
        yield _request(path, number, max(0, arrival - first), *sizes)


def _nanoseconds(text: str) -> int:
    """A wall time to the nanosecond; the dataset writes seven digits of a second."""
    whole, _, fraction = text.partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * 1_000_000_000 + int((fraction + "0" * 9)[:9])


def _request(path: Path, line: int, arrival_ns: int, prompt: object, new: object) -> TraceRequest:
    for name, value in (("prompt", prompt), ("new", new)):
        if type(value) is not int or not 0 <= value <= TOKENS_MAX:
            reason = f"{value!r} {name} tokens: a whole number up to {TOKENS_MAX} is meant"
            raise UnreadableTrace(path, line, reason)
    assert isinstance(prompt, int), "checked above"
    assert isinstance(new, int), "checked above"
    return TraceRequest(arrival_ns, prompt, new)
