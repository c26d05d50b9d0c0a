"""Lines between the harness and the gates inside its parts: one JSON object a line, answered in order.

Owns: the socket, the framing, who is connected, and what was reached.
Must not know: what a command does.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Message = dict[str, Any]
ANSWER_SECONDS = 60.0


class Wire:
    """One connection; `heard` is called in the wire's own thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")
        self._lock = threading.Lock()

    def say(self, message: Message) -> None:
        """Send; a wire whose other end is gone says nothing."""
        with self._lock:
            try:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return

    def hear(self) -> Message | None:
        """The next message; None when the other end is gone."""
        try:
            line = self._file.readline()
        except (OSError, ValueError):
            return None
        return json.loads(line) if line else None

    def shut(self) -> None:
        """Have whoever listens here hear the end."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it; nobody listens any more."""
        self._file.close()
        self._connection.close()


def join(path: str, name: str, heard: Callable[[Message], None]) -> Wire:
    """A part's end: say who it is, then have a thread hand over every command."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    wire = Wire(connection)
    wire.say({"name": name})

    def listen() -> None:
        while (message := wire.hear()) is not None:
            heard(message)
            wire.say({"did": message["command"]})

    threading.Thread(target=listen, name="gate", daemon=True).start()
    return wire


class Remote:
    """The harness's end of one part's gate."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._told: deque[str] = deque()
        self._did: queue.Queue[str] = queue.Queue()
        self._reached: queue.Queue[Message] = queue.Queue()
        self._thread = threading.Thread(target=self._listen, name="remote gate", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while (message := self._wire.hear()) is not None:
            if "did" in message:
                self._did.put(message["did"])
            else:
                self._reached.put(message)
        self._wire.close()
        self._did.put("")

    def command(self, command: str, **fields: Any) -> None:
        """Have the gate do something, and wait until it has."""
        self.tell(command, **fields)
        while self._told:
            wanted = self._told.popleft()
            did = self._did.get(timeout=ANSWER_SECONDS)
            assert did == wanted, f"asked to {wanted}, the gate did {did or 'end'}"

    def tell(self, command: str, **fields: Any) -> None:
        """The same without waiting: for a part that stands still; the next command waits for it."""
        self._told.append(command)
        self._wire.say({"command": command, **fields})

    def close(self) -> None:
        """Listen no more."""
        self._wire.shut()
        self._thread.join()

    def wait_reached(self, seconds: float = ANSWER_SECONDS) -> Message:
        """What the gate holds now. Raises queue.Empty."""
        return self._reached.get(timeout=seconds)


class Switchboard:
    """Where parts' gates join; a later life of a part takes its name over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._remotes: dict[str, Remote] = {}
        self._all: list[Remote] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._accept, name="switchboard", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            wire = Wire(connection)
            hello = wire.hear()
            if hello is None:
                wire.close()
                continue
            with self._changed:
                self._remotes[hello["name"]] = Remote(wire)
                self._all.append(self._remotes[hello["name"]])
                self._changed.notify_all()

    def expect(self, name: str) -> None:
        """Forget an earlier life of a part."""
        with self._changed:
            self._remotes.pop(name, None)

    def remote(self, name: str) -> Remote:
        """The gate of a part, which joins as soon as its process runs."""
        with self._changed:
            joined = self._changed.wait_for(lambda: name in self._remotes, ANSWER_SECONDS)
            assert joined, f"{name} has no gate"
            return self._remotes[name]

    def close(self) -> None:
        """Take no more, and let go of all."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        for remote in self._all:
            remote.close()
        self.path.unlink(missing_ok=True)
