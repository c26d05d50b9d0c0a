"""A log store whose disk may be full, slow, broken, or torn by a crash.

Owns: what of the log survives which end, and when the store refuses.
Must not know: who appends.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from engine.store import Append, StoreUnavailable
from transport.stores.memory import MemoryStore
from transport.stores.sequences import Sequences


class SimulatedStore(MemoryStore):
    """A memory store with a disk's faults.

    full: nothing can be appended; sick: the next flush fails, and then nobody can tell what the
    disk holds beyond the last durable entry until the store is reopened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.sick = False
        self._lost = False

    def append_batch(self, batch: Sequence[Append]) -> int:
        """As the base class says; a full disk refuses, and so does one whose flush has failed."""
        if self._lost:
            raise StoreUnavailable("a flush has failed", lasting=True)
        if self.full:
            raise StoreUnavailable("no space is left")
        return super().append_batch(batch)

    def flush(self) -> int:
        """As the base class says."""
        if self._lost:
            raise StoreUnavailable("a flush has failed", lasting=True)
        if self.sick:
            self.sick, self._lost = False, True
            raise StoreUnavailable("the disk reports an error", lasting=True)
        return super().flush()

    def reopen(self) -> None:
        """Cut off what is not known to be durable."""
        if self._lost:
            self._cut(self._durable)
            self._lost = False
        super().reopen()

    def after_crash(self, chance: Random, *, machine: bool) -> SimulatedStore:
        """What the next life finds: everything, or what was durable and some of the rest."""
        found = SimulatedStore()
        last = len(self._entries)
        if machine:
            last = self._durable + chance.randrange(last - self._durable + 1)
        found._entries = self._entries[:last]
        found._durable = min(self._durable, last)
        found._epoch = self._epoch
        found._cut(last)
        return found

    def _cut(self, last: int) -> None:
        self._entries = self._entries[:last]
        self._sequences = Sequences()
        for position, entry in enumerate(self._entries, start=1):
            self._sequences.note(entry.request, position)
