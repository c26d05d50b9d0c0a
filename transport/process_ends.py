"""Which process of which machine this is, and seeing another one end.

Owns: the text by which a process is told apart from all others, and one handle for each watched one.
Must not know: engines, planes, why anybody asks.

A number of a process means something in one namespace of one boot of one machine only, and may be
given again; so the text has all of these, and the moment at which the process began.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

PROCESS_CHARACTERS_MAX = 200
"""No text of `this_process` is longer."""

_STARTED = 19
"""Where the kernel writes a process's start, counted behind its name."""


def this_process() -> str:
    """This process as others may look for it: `boot/namespace/number/start`; empty if unknown."""
    space, started = _space(), _started(os.getpid())
    return f"{space}/{os.getpid()}/{started}" if space and started else ""


class Watched:
    """A process that somebody named by `this_process`; what was not seen is never claimed."""

    def __init__(self, process: str) -> None:
        """Begin to watch; a text that names no process of this machine is watched in vain."""
        self.process_id = 0
        self._ended = False
        self._handle = -1
        space, _, rest = process.rpartition("/")
        self._started = rest
        space, _, number = space.rpartition("/")
        numbers = number + self._started
        whole = number and self._started and numbers.isascii() and numbers.isdecimal()
        if whole and space == _space():
            self.process_id = int(number)
        self.ended()

    def ended(self) -> bool:
        """Whether the process has been seen to be gone; it stays gone."""
        if self._handle < 0 and self.process_id and not self._ended:
            self._open()
        if self._handle >= 0 and not self._ended:
            asked = select.poll()
            asked.register(self._handle, select.POLLIN)
            self._ended = bool(asked.poll(0))
        if self._ended:
            self.close()
        return self._ended

    def _open(self) -> None:
        """Take a handle, which is of one process for ever, whoever gets its number later."""
        try:
            self._handle = os.pidfd_open(self.process_id)
        except ProcessLookupError:
            self._ended = True
            return
        except (OSError, OverflowError):
            # No handle is free, or the number is none; asked again, it may be.
            return
        known = _started(self.process_id)
        # A number is given again only after its first owner is gone.
        self._ended = bool(known) and known != self._started

    def close(self) -> None:
        """Stop watching; what was seen stays."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _space() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def _started(process_id: int) -> str:
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{process_id}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[_STARTED].decode("ascii")
    return ""
