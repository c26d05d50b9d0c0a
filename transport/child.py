"""One child process of a program that waits for it line by line, without an event loop.

Owns: starting a part of this program, its lines on standard output, questions to it, its end.
Must not know: what the part does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PYTHON = (sys.executable, "-P")
PROGRAM = (*PYTHON, "-m", "transport.cli")
MEASURED = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}
LEAVE_SECONDS = 40.0


def clean_environment() -> dict[str, str]:
    """An environment for what is measured: no settings of ours, and no library's network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUSTODY_")}
    return kept | MEASURED


class ChildFailed(Exception):
    """A child ended, or stayed silent for too long, before it said what was waited for."""

    def __init__(self, name: str, message: str, *, said: str = "") -> None:
        super().__init__(f"{name}: {message}" + (f"\n{said}" if said else ""))
        self.name = name


class Child:
    """A process that speaks in JSON lines; its standard error goes to a file.

    environment: all that it sees of one; this process's own without it.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        errors: Path,
        program: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.errors = errors
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with errors.open("ab") as stream:
            self.process = subprocess.Popen(
                [*program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
                env=environment,
            )
        self._reader = threading.Thread(target=self._read, name=f"{name} lines", daemon=True)
        self._reader.start()

    @property
    def process_id(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    self._said.put(said)
        self._said.put(None)

    def said_errors(self, lines: int = 20) -> str:
        """The last lines of its standard error."""
        text = self.errors.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def wait_event(self, event: str, *, timeout: float) -> dict[str, Any]:
        """The next announcement of this kind; others before it are dropped.

        Raises `ChildFailed` when the child ends or says nothing in time.
        """
        until = time.monotonic() + timeout
        while True:
            said = self._next(repr(event), timeout=max(0.0, until - time.monotonic()))
            if said.get("event") == event:
                return said

    def read(self) -> dict[str, Any]:
        """The next line, however long it takes.  Raises `ChildFailed` when the child ends."""
        return self._next("anything", timeout=None)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line and read one.  Raises `ChildFailed` when the child ends or has ended."""
        assert self.process.stdin is not None
        # Whether it still listens is what its answer says.
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        return self.read()

    def _next(self, wanted: str, *, timeout: float | None) -> dict[str, Any]:
        try:
            said = self._said.get(timeout=timeout)
        except queue.Empty:
            message = f"did not say {wanted} in time"
            raise ChildFailed(self.name, message, said=self.said_errors()) from None
        if said is None:
            # Whoever asks again is told again.
            self._said.put(None)
            code = self.process.wait()
            message = f"ended with exit code {code} before it said {wanted}"
            raise ChildFailed(self.name, message, said=self.said_errors())
        return said

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a child that has ended gets none."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, *, timeout: float) -> int:
        """Its exit code.  Raises `ChildFailed` when it does not end in time."""
        try:
            code = self.process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            message = f"did not end in {timeout:.0f} s"
            raise ChildFailed(self.name, message, said=self.said_errors()) from None
        self._finish()
        return code

    def kill(self) -> None:
        """End it at once and wait for it; again is nothing."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._finish()

    def end(self, *, terminate: bool) -> None:
        """End it in order, by SIGTERM or by the end of its input, and by force if it stays."""
        self._hang_up()
        if terminate:
            self.signal(signal.SIGTERM)
        with suppress(ChildFailed):
            self.wait(timeout=LEAVE_SECONDS)
        self.kill()

    def _hang_up(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def _finish(self) -> None:
        self._hang_up()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
