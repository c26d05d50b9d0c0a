"""A bounded queue from the task that owns the state to one stream that relays it.

Owns: how much may wait for a slow reader, and how a stream ends.
Must not know: what is relayed.

The owner never waits: `put` answers at once, and a full mailbox is the owner's to judge.
Both sides run on one event loop, so there is no lock.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order, each with a weight; their sum may not exceed the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waiting = 0
        self.closed = False
        self._items: deque[tuple[T, int]] = deque()
        self._wake = anyio.Event()

    def put(self, item: T, weight: int = 1) -> bool:
        """Add an item; False, and nothing added, when it does not fit or the mailbox is closed."""
        if self.closed or self.waiting + weight > self.limit:
            return False
        self._items.append((item, weight))
        self.waiting += weight
        self._wake.set()
        return True

    def close(self, last: T | None = None) -> None:
        """Nothing comes after what waits, and after `last`, which always fits."""
        if self.closed:
            return
        if last is not None:
            self._items.append((last, 0))
        self.closed = True
        self._wake.set()

    def cut(self, last: T | None = None) -> None:
        """Drop what waits, and close."""
        if not self.closed:
            self._items.clear()
            self.waiting = 0
        self.close(last)

    async def take(self, most: int = 256) -> list[T]:
        """Wait for items and take at most that many; empty once the mailbox is closed and empty."""
        while not self._items:
            if self.closed:
                return []
            self._wake = anyio.Event()
            await self._wake.wait()
        taken: list[T] = []
        while self._items and len(taken) < most:
            item, weight = self._items.popleft()
            self.waiting -= weight
            taken.append(item)
        return taken
