"""A few threads that do one piece of work together, again and again.

Owns: helper threads, and the promise that none of them is in the work when `run` has returned.
Must not know: what the work is. It must release the interpreter, or there is nothing to share.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[int], None]
"""Called by every thread with a number of its own, from 0; whoever comes late may be left out."""


class _Turn:
    """One piece of work: who has begun it, and whether it is still open to others."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._inside = 0
        self._closed = False
        self._left = threading.Event()
        self.error: BaseException | None = None

    def join(self, number: int) -> None:
        """Take part, unless the work is over already."""
        if not self._enter():
            return
        try:
            self._work(number)
        except BaseException as error:  # noqa: BLE001 - it is raised where the work was asked for
            self.error = error
        self._leave()

    def _enter(self) -> bool:
        with self._lock:
            self._inside += not self._closed
            return not self._closed

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._closed and not self._inside:
                self._left.set()

    def close(self) -> None:
        """Let nobody in any more, and wait for those who are inside."""
        with self._lock:
            self._closed = True
            if not self._inside:
                return
        self._left.wait()


class Team:
    """`size` threads, the caller among them; helpers start with the first work and end with it.

    One work runs at a time: a second call of `run` waits for its turn.
    """

    def __init__(self, size: int) -> None:
        self.size = max(1, size)
        self._turn = threading.Lock()
        self._inboxes: list[SimpleQueue[_Turn | None]] = []

    def run(self, work: Work) -> None:
        """Do the work here and, as far as they come in time, in the helpers; raises what it raises.

        Raises RuntimeError, with nothing done, if a helper's thread cannot be started.
        """
        if self.size == 1:
            work(0)
            return
        with self._turn:
            if not self._inboxes:
                self._start()
            turn = _Turn(work)
            for inbox in self._inboxes:
                inbox.put(turn)
            try:
                work(0)
            finally:
                turn.close()
        if turn.error is not None:
            raise turn.error

    def _start(self) -> None:
        """All helpers or, where one cannot be had, none; the next work tries again."""
        inboxes: list[SimpleQueue[_Turn | None]] = [SimpleQueue() for _ in range(self.size - 1)]
        dismiss = weakref.finalize(self, _dismiss, inboxes)
        try:
            for number, inbox in enumerate(inboxes, start=1):
                threading.Thread(
                    target=_help, args=(number, inbox), name=f"step-{number}", daemon=True
                ).start()
        except BaseException:
            dismiss()
            raise
        self._inboxes = inboxes


def _help(number: int, inbox: SimpleQueue[_Turn | None]) -> None:
    while (turn := inbox.get()) is not None:
        turn.join(number)
        del turn


def _dismiss(inboxes: list[SimpleQueue[_Turn | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)
