"""Structured logs: one form for every process, and what every line of a call bears.

Owns: how a log line looks, which fields are bound to a process and to a call, W3C trace ids.
Must not know: which events there are; each module names its own, stably, in snake case.

The lifecycle log is data and stands elsewhere.  Prompts, answers and token ids never stand here.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, TextIO, cast

import structlog

CONTENT = frozenset(
    {"prompt", "content", "messages", "text", "texts", "token_ids", "tokens", "answer"}
)
"""Fields that would hold what was asked or answered; a line is written without them."""

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
"""https://www.w3.org/TR/trace-context/#traceparent-header"""

Fields = MutableMapping[str, Any]


class _StandardError(io.TextIOBase):
    """Standard error as it is at the moment of writing."""

    def write(self, text: str, /) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


_ERRORS = _StandardError()


def configure_structlog() -> None:
    """Our own lines go to standard error: for people on a terminal, as JSON Lines elsewhere."""
    structlog.configure(
        processors=[*_shared(), _last()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # Parts of a deployment share standard error, so a line and its end are written at once.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _ERRORS)),
    )


def configure_logging() -> None:
    """The same, and libraries' warnings in the same form; for a process that is ours alone."""
    configure_structlog()
    meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[as_event, *_shared()], processors=[meta, _last()]
    )
    handler = logging.StreamHandler(_ERRORS)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)


def _shared() -> tuple[structlog.typing.Processor, ...]:
    # The terminal's renderer draws errors itself.
    errors = () if sys.stderr.isatty() else (structlog.processors.format_exc_info,)
    return (
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        without_content,
        *errors,
    )


def _last() -> structlog.typing.Processor:
    if sys.stderr.isatty():
        return structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
    return structlog.processors.JSONRenderer(ensure_ascii=False)


def bind(**fields: object) -> None:
    """Have every later line of this task, and of those that it starts, bear these fields."""
    structlog.contextvars.bind_contextvars(**fields)


def without_content(_logger: object, _name: str, fields: Fields) -> Fields:
    """Drop fields that are named like content, whoever passed them."""
    for name in CONTENT & fields.keys():
        del fields[name]
    return fields


def as_event(_logger: object, _name: str, fields: Fields) -> Fields:
    """Give a library's line a stable name, for its own is prose."""
    record: logging.LogRecord | None = fields.get("_record")
    fields["message"] = fields.pop("event", "")
    fields["event"] = "library_message"
    fields["library"] = record.name if record is not None else ""
    return fields


def trace_fields(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """`trace_id` and `span_id` of a call's traceparent; empty when it has none that is valid."""
    given = [value for key, value in metadata if key == "traceparent"]
    if len(given) != 1 or not isinstance(given[0], str):
        return {}
    match = TRACEPARENT.fullmatch(given[0])
    if match is None:
        return {}
    version, trace, span, more = match.groups()
    if version == "ff" or (version == "00" and more) or not (int(trace, 16) and int(span, 16)):
        return {}
    return {"trace_id": trace, "span_id": span}
