"""The writer's bookkeeping that all back ends share: tickets, their answers, a copying thread.

Owns the rule that a final answer never changes.
It must not know what a copy or a stream is.
"""

import contextlib
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import attrs

from engine.dataplane import Answer, GrantKey, Peer, Ticket
from engine.dataplane_errors import PlaneBusy, PlaneMisused

POSTS_WAITING_MAX = 1_024

_FINAL = frozenset({Answer.DONE, Answer.FAILED_QUIESCED})


@attrs.define
class _Progress:
    answer: Answer = Answer.IN_FLIGHT
    reason: str = ""


class TicketBook:
    """The tickets of one plane. Thread-safe; a ticket that nobody holds is forgotten."""

    def __init__(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._progress: weakref.WeakKeyDictionary[Ticket, _Progress] = weakref.WeakKeyDictionary()
        self._in_flight: Counter[int] = Counter()
        self._serial = 0

    def open(self, *, peer: Peer, grant: GrantKey, length: int) -> Ticket:
        """Make a ticket that is in flight."""
        with self._lock:
            self._serial += 1
            ticket = Ticket(serial=self._serial, peer=peer, grant=grant, length=length)
            self._progress[ticket] = _Progress()
            self._in_flight[peer.serial] += 1
            return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Forget a ticket whose post is about to raise."""
        with self._lock:
            del self._progress[ticket]
            self._in_flight[ticket.peer.serial] -= 1

    def answer(self, ticket: Ticket) -> Answer:
        """Return the present answer, or raise `PlaneMisused` for another plane's ticket."""
        with self._lock:
            return self._of(ticket).answer

    def reason(self, ticket: Ticket) -> str:
        """Return why the ticket failed or is in doubt."""
        with self._lock:
            return self._of(ticket).reason

    def settle(self, ticket: Ticket, answer: Answer, reason: str = "") -> None:
        """Record an answer. A final one stays; `IN_DOUBT` may only become final."""
        with self._lock:
            progress = self._of(ticket)
            if progress.answer in _FINAL:
                return
            if progress.answer is Answer.IN_FLIGHT:
                self._in_flight[ticket.peer.serial] -= 1
            progress.answer = answer
            progress.reason = reason
        self.wake()

    def in_flight(self, peer: Peer) -> int:
        """Count the tickets to `peer` that may still read local memory."""
        with self._lock:
            return self._in_flight[peer.serial]

    def wake(self) -> None:
        """Tell the plane's holder that an answer may have changed."""
        if self._wake is not None:
            self._wake()

    def _of(self, ticket: Ticket) -> _Progress:
        progress = self._progress.get(ticket)
        if progress is None:
            raise PlaneMisused(f"ticket {ticket.serial} is not of this plane")
        return progress


class Worker:
    """One thread that runs jobs in order, behind a bounded queue.

    A job answers for its own errors.
    """

    def __init__(self, *, name: str, waiting_max: int = POSTS_WAITING_MAX) -> None:
        self._waiting_max = waiting_max
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting_max)
        self._dismissed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job, or raise `PlaneBusy`."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise PlaneBusy(self._waiting_max) from None

    def dismiss(self) -> None:
        """Let the thread end once it has run what is queued; does not wait."""
        self._dismissed.set()
        # A full queue needs no nudge: the thread will look at the event.
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(None)

    def stop(self) -> None:
        """Run what is queued, then end the thread and wait for it."""
        self.dismiss()
        self._thread.join()

    def _run(self) -> None:
        while not (self._dismissed.is_set() and self._jobs.empty()):
            job = self._jobs.get()
            if job is not None:
                job()
            # A job that lingered here would keep its staging region and its ticket alive.
            del job
