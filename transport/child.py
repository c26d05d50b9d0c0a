"""One child process of a program that waits for it line by line, without an event loop.

Owns: starting a part of this program, its announcements on standard output, its end.
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

PROGRAM = (sys.executable, "-P", "-m", "transport.cli")


class ChildFailed(Exception):
    """A child ended, or stayed silent for too long, before it said what was waited for."""

    def __init__(self, name: str, message: str, *, said: str) -> None:
        super().__init__(f"{name}: {message}" + (f"\n{said}" if said else ""))
        self.name = name


class Child:
    """A process that announces itself in JSON lines; its standard error goes to a file."""

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
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
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
            try:
                said = self._said.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                message = f"said no {event!r} in {timeout:.0f} s"
                raise ChildFailed(self.name, message, said=self.said_errors()) from None
            if said is None:
                code = self.process.wait()
                message = f"ended with exit code {code} before it said {event!r}"
                raise ChildFailed(self.name, message, said=self.said_errors())
            if said.get("event") == event:
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

    def _finish(self) -> None:
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
