"""A TCP relay that can stop, cut and go on: the network between two processes.

Owns: connections and the bytes on their way.
Must not know: what they mean.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

CHUNK_BYTES = 1 << 16
LINGER_NONE = struct.pack("ii", 1, 0)


class Relay:
    """Listens on a port of its own, and passes everything on to a target that may change."""

    def __init__(self, target: str = "") -> None:
        self.target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._going = threading.Event()
        self._going.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._thread.start()

    def stall(self) -> None:
        """Deliver nothing, either way, until it heals; nobody is told."""
        self._going.clear()

    def heal(self, *, broken: bool = False) -> None:
        """Deliver again: what was on its way, or, when `broken`, only what comes on new ones."""
        if broken:
            self._reset()
        self._going.set()

    def close(self) -> None:
        """End it; again is nothing."""
        if self._closed:
            return
        self._closed = True
        self._going.set()
        # Closing alone would leave the thread waiting.
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        self._reset()

    def _reset(self) -> None:
        with self._lock:
            sockets = tuple(self._open)
        for one in sockets:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._going.wait()
        host, _, port = self.target.rpartition(":")
        try:
            far = socket.create_connection((host, int(port)))
        except (OSError, ValueError):
            near.close()
            return
        with self._lock:
            self._open |= {near, far}
        for one in (near, far):
            with suppress(OSError):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        # Closed by nobody who does not know that both are at rest: the number of a closed socket is
        # the next connection's, and whoever still waits on it would take that one's bytes.
        with self._lock:
            self._open -= {near, far}
        near.close()
        far.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while octets := source.recv(CHUNK_BYTES):
                self._going.wait()
                target.sendall(octets)
        except OSError:
            pass
        self._going.wait()
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
