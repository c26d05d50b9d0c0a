"""Claims about structured logs: stable names, no content, trace ids only where they are valid."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from transport import logging_setup
from transport.logging_setup import CONTENT, trace_fields

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
TRANSPORT = Path(logging_setup.__file__).parent


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """What is set up here is taken back."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Every call that writes a log line with a literal event."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func)
        logs = name.startswith("_log.") and name.removeprefix("_log.") in LEVELS
        if logs or name in {"self.note", "self._note"}:
            yield node


def test_every_event_has_a_stable_name_and_no_content() -> None:
    """Events are literals in snake case, and no field is named like a prompt or an answer."""
    found = 0
    for path in sorted(TRANSPORT.rglob("*.py")):
        if path.parent.name == "pb":
            continue
        for call in calls(ast.parse(path.read_text())):
            found += 1
            (event,) = call.args
            assert isinstance(event, ast.Constant), ast.unparse(call)
            assert re.fullmatch(r"[a-z]+(_[a-z]+)*", str(event.value)), ast.unparse(call)
            assert not {word.arg for word in call.keywords} & CONTENT, ast.unparse(call)
    assert found > 30


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("traceparent", f"00-{TRACE}-{SPAN}")],
        [("traceparent", f"00-{TRACE.upper()}-{SPAN}-01")],
        [("traceparent", f"ff-{TRACE}-{SPAN}-01")],
        [("traceparent", f"00-{TRACE}-{SPAN}-01-more")],
        [("traceparent", f"00-{'0' * 32}-{SPAN}-01")],
        [("traceparent", f"00-{TRACE}-{'0' * 16}-01")],
        [("traceparent", f"00-{TRACE}-{SPAN}-01")] * 2,
        [("traceparent", b"00")],
        [("tracestate", f"00-{TRACE}-{SPAN}-01")],
    ],
)
def test_what_is_no_traceparent_is_no_trace(metadata: list[tuple[str, str | bytes]]) -> None:
    """A header that the standard calls invalid gives no ids at all."""
    assert trace_fields(metadata) == {}


@pytest.mark.parametrize("text", [f"00-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-00-later"])
def test_a_traceparent_gives_both_ids(text: str) -> None:
    """Of this version, and of later ones that say more."""
    assert trace_fields([("x", "y"), ("traceparent", text)]) == {
        "trace_id": TRACE,
        "span_id": SPAN,
    }


def test_lines_are_json_with_what_is_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """A line bears its event, level, time and what is bound, and never content."""
    logging_setup.configure_logging()
    logging_setup.bind(part="here")
    structlog.get_logger().warning("something_happened", prompt="secret", count=3)
    line = json.loads(capsys.readouterr().err)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "something_happened", "level": "warning", "part": "here", "count": 3}


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback is a field of its line."""
    logging_setup.configure_logging()
    try:
        raise ValueError("what went wrong")
    except ValueError:
        structlog.get_logger().exception("it_failed")
    line = json.loads(capsys.readouterr().err)
    assert "what went wrong" in line["exception"]


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of another process comes between a line and its end, buffered or not."""
    writes: list[str] = []

    class Unbuffered(io.StringIO):
        def write(self, text: str, /) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Unbuffered())
    logging_setup.configure_logging()
    structlog.get_logger().info("something_happened")
    logging.getLogger("some.library").warning("it is late")
    assert [json.loads(text)["event"] for text in writes] == [
        "something_happened",
        "library_message",
    ]
    assert all(text.endswith("}\n") for text in writes)


def test_libraries_speak_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    """A library's warning is a line with a name of ours and its prose beside it."""
    logging_setup.configure_logging()
    logging.getLogger("some.library").warning("it is %s", "late")
    logging.getLogger("some.library").info("not worth a line")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["library"]) == ("library_message", "some.library")
    assert line["message"] == "it is late"


def test_a_terminal_is_written_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal a line is no JSON, and has no colour when NO_COLOR is set."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    logging_setup.configure_logging()
    structlog.get_logger().info("something_happened", count=3)
    text = capsys.readouterr().err
    assert "something_happened" in text
    assert "count=3" in text
    assert "\x1b" not in text
    assert not text.startswith("{")
