"""What the simulated engine writes down: entries in its own order, with its own clock.

Owns: sequence numbers, proposers, and the file.
Must not know: the truth; nothing in here has seen the memory.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from engine.store import Stored
from lifecycle.events import (
    ByEngine,
    ByScheduler,
    Drained,
    Entry,
    Event,
    Finished,
    Released,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import FLEET, Party, RequestId
from transport.jsonlines import entry_object

SOURCE = "incident-simulation"


class Recorder:
    """Takes events in and numbers them."""

    def __init__(self, *, prefill: Party, decode: Party) -> None:
        """An empty log of these two engines."""
        self.entries: list[tuple[int, Entry]] = []
        self._prefill = prefill
        self._decode = decode
        self._sequences: Counter[str] = Counter()
        self._numbers: Counter[Party] = Counter()

    def add(self, time_ns: int, request: str, attempt: int, event: Event) -> None:
        """The next entry."""
        speaker = self._speaker(event)
        if speaker is None:
            proposer: ByEngine | ByScheduler = ByScheduler(1)
        else:
            self._numbers[speaker] += 1
            proposer = ByEngine(speaker, self._numbers[speaker])
        name = RequestId(request)
        entry = Entry(name, self._sequences[request], attempt, proposer, time_ns, event)
        self._sequences[request] += 1
        self.entries.append((len(self.entries) + 1, entry))

    def _speaker(self, event: Event) -> Party | None:
        if isinstance(event, Reserved | Released):
            return event.grant.owner
        if isinstance(event, Transferred):
            return self._prefill
        if isinstance(event, Drained):
            return event.party
        return self._decode if isinstance(event, Verified | Finished) else None

    @property
    def fleet(self) -> int:
        """How many entries the fleet has."""
        return self._sequences[FLEET]

    def write(self, path: Path) -> None:
        """The log as JSON Lines, version 1, marked as foreign."""
        header = {
            "format": "custody.log",
            "version": 1,
            "source": SOURCE,
            "foreign": True,
            "complete": True,
            "entries": len(self.entries),
        }
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(header) + "\n")
            for position, entry in self.entries:
                line = entry_object(Stored(position, entry))
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
