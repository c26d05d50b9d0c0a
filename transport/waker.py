"""Wake-ups from any thread for one task of an event loop.

Owns: the way from a thread to the loop.
Must not know: who wakes, and why.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import anyio


class Waker:
    """Carries wake-ups from any thread to one task of the loop on which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = anyio.Event()

    def __call__(self) -> None:
        """Wake the task; of several wake-ups it may see one."""
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Wait for a wake-up."""
        await self._event.wait()
        self._event = anyio.Event()
