"""A child process of the benchmark that answers one line with one line.

Owns: its start with a clean environment, its lines, and its end.
Must not know: what it does.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LEAVE_SECONDS = 40.0
MESSAGE_CHARACTERS = 4_000
# The environment must not change what is measured, nor may a library reach for a network.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}


class PartFailed(RuntimeError):
    """A process of the benchmark ended or said something unexpected; its last words follow."""

    def __init__(self, *, part: str, words: str) -> None:
        super().__init__(f"{part} failed: {words.strip()[-MESSAGE_CHARACTERS:]}")
        self.part = part
        self.words = words


def clean_environment() -> dict[str, str]:
    """The environment without settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUSTODY_")}
    return kept | ENVIRONMENT


class Child:
    """A child process that answers in JSON lines; its complaints are kept in a file."""

    def __init__(self, part: str, command: Sequence[str], folder: Path) -> None:
        self.part = part
        self._words = folder / f"{part}.stderr"
        with self._words.open("wb") as words:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env=clean_environment(),
                text=True,
            )

    def read(self) -> dict[str, Any]:
        """The next line; raises PartFailed when there is none."""
        line = _open(self.process.stdout).readline()
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
        self.process.wait()
        words = self._words.read_text(encoding="utf-8", errors="replace")
        raise PartFailed(part=self.part, words=words or f"said {line!r}")

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line and read one."""
        source = _open(self.process.stdin)
        source.write(json.dumps(question) + "\n")
        source.flush()
        return self.read()

    def end(self, *, terminate: bool) -> None:
        """End it in order, and by force when it does not leave."""
        with suppress(OSError):
            _open(self.process.stdin).close()
        if terminate:
            self.process.terminate()
        try:
            self.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _open(self.process.stdout).close()


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "children are started with pipes"
    return stream
