"""Somebody else's engine in a few lines, with the incident's bug, and its repaired twin.

A router sends each request to a prefill leg and a decode leg. Prefill refuses what does not fit.
In the broken engine nobody tells the decode leg: the refused request keeps walking, and decode
reads pages, by the addresses that the router had drawn up, which were never written for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.foreign import Ended, Fact, Freed, Held, Read, Refused, Wrote

PAGES = 3


class Toy:
    """Requests of one or two pages; `repaired` says whether decode hears of a refusal."""

    def __init__(self, *, repaired: bool, sizes: tuple[int, ...] = (2, 2, 1)) -> None:
        self.repaired = repaired
        self.sizes = {f"r{n}": size for n, size in enumerate(sizes, start=1)}
        self.table: dict[str, list[int]] = {}
        self.phase = dict.fromkeys(self.sizes, "new")
        self.free = list(range(PAGES))
        self.refused: set[str] = set()
        self.facts: list[Fact] = []
        self.lines: list[dict[str, Any]] = []

    def enabled(self) -> list[str]:
        """What each request can do next."""
        moves = {"new": "ask", "asked": "prefill", "written": "decode", "read": "finish"}
        out = [f"{moves[phase]} {r}" for r, phase in self.phase.items() if phase in moves]
        there = [r for r, phase in self.phase.items() if phase == "written"]
        return out + [f"fault:cancel {r}" for r in there if r not in self.refused]

    def apply(self, name: str) -> None:
        """One move of one request."""
        kind, request = name.removeprefix("fault:").split(" ")
        getattr(self, "_" + kind)(request)

    def observe(self) -> Iterator[Fact]:
        """What has happened since."""
        facts, self.facts = self.facts, []
        yield from facts

    def _ask(self, request: str) -> None:
        # The addresses that decode is given, whatever prefill will say.
        self.table[request] = list(range(self.sizes[request]))
        if len(self.free) < self.sizes[request]:
            self._refuse(request)
            return
        self.table[request] = [self.free.pop(0) for _ in range(self.sizes[request])]
        self.facts += [Held(request, page) for page in self.table[request]]
        self.phase[request] = "asked"

    def _refuse(self, request: str) -> None:
        self.refused.add(request)
        self.facts.append(Refused(request))
        self._log(request, "Rejected", code="kv_pool_capacity_exceeded", reason="no pages")
        # The bug: the decode leg goes on as if prefill had written.
        self.phase[request] = "over" if self.repaired else "written"

    def _prefill(self, request: str) -> None:
        self.facts += [Wrote(request, page) for page in self.table[request]]
        self.phase[request] = "written"

    def _decode(self, request: str) -> None:
        self.facts += [Read(request, page) for page in self.table[request]]
        self.phase[request] = "read"

    def _finish(self, request: str) -> None:
        self.facts.append(Ended(request, succeeded=True))
        if request in self.refused:
            self._log(request, "Finished", reason="stop", tokens=1)
        self._over(request)

    def _cancel(self, request: str) -> None:
        self.facts.append(Ended(request, succeeded=False))
        self._over(request)

    def _over(self, request: str) -> None:
        self.phase[request] = "over"
        if request not in self.refused:
            self.free += self.table[request]
            self.facts += [Freed(request, page) for page in self.table[request]]

    def _log(self, request: str, event: str, **fields: Any) -> None:
        self.lines.append({"request": request, "event": event, "fields": fields})


def broken() -> Toy:
    """With the incident's bug."""
    return Toy(repaired=False)


def repaired() -> Toy:
    """Without it."""
    return Toy(repaired=True)
