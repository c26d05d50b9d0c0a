"""A clock that is moved by what is due, and wires that take time.

Owns: virtual time, the order of what falls due at the same nanosecond, and first-in-first-out wires.
Must not know: what is called.

What was asked for first comes first among equals, so a run depends on nothing but its inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Clock:
    """Virtual nanoseconds, and calls that wait for theirs."""

    def __init__(self, start_ns: int = 0) -> None:
        self.now_ns = start_ns
        self.called = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time_ns: int, call: Callable[[], None]) -> None:
        """Make this call at that time, or next where it has passed."""
        self._asked += 1
        due_ns = max(time_ns, self.now_ns)
        heappush(self._due, (due_ns, self._asked, call))

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Make this call so many nanoseconds from now."""
        self.at(self.now_ns + delay_ns, call)

    def step(self) -> bool:
        """Move to the next call and make it; False when none waits."""
        if not self._due:
            return False
        self.now_ns, _, call = heappop(self._due)
        self.called += 1
        call()
        return True


class Wire(Generic[T]):
    """Items arrive in order, each a fixed time after it was sent; those of one moment together."""

    def __init__(self, clock: Clock, *, delay_ns: int, deliver: Callable[[list[T]], None]) -> None:
        self._clock = clock
        self._delay_ns = delay_ns
        self._deliver = deliver
        self._items: deque[tuple[int, T]] = deque()

    def send(self, item: T) -> None:
        """Put an item on the wire."""
        due = self._clock.now_ns + self._delay_ns
        if not self._items:
            self._clock.at(due, self._arrive)
        self._items.append((due, item))

    def send_all(self, items: Iterable[T]) -> None:
        """Put items on the wire, one behind the other."""
        due = self._clock.now_ns + self._delay_ns
        if not self._items:
            self._clock.at(due, self._arrive)
        self._items.extend([(due, item) for item in items])

    def _arrive(self) -> None:
        arrived: list[T] = []
        items, now_ns = self._items, self._clock.now_ns
        while items and items[0][0] <= now_ns:
            arrived.append(items.popleft()[1])
        if items:
            self._clock.at(items[0][0], self._arrive)
        self._deliver(arrived)
