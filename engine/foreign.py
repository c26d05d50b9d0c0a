"""Somebody else's engine under our search: what it has to say, and what must hold of it.

Owns: the adapter's protocol, the facts it reports, and the oracles over them.
Must not know: any engine. Nothing of our own lifecycle is asked of one.

An adapter is a few lines around a model of the other system, or around the system itself if it can
be driven step by step: `enabled` names what can happen next, `apply` lets it happen, `observe`
reports the facts since it was last asked. The walk, the minimiser and the trace file then work as
they do for our own worlds. Pages remember who wrote them last, so nobody's word is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs

from engine.world_values import Action, Found

CALM_STEPS_MAX = 2_000


@attrs.frozen
class Held:
    """The request may use this page from now on."""

    request: str
    page: int


@attrs.frozen
class Freed:
    """The page is given back; others may have it."""

    request: str
    page: int


@attrs.frozen
class Wrote:
    """The request's bytes were written to this page, whoever did it and whenever it was asked."""

    request: str
    page: int


@attrs.frozen
class Read:
    """The request's computation has read this page."""

    request: str
    page: int


@attrs.frozen
class Refused:
    """The client was told that the request is not served."""

    request: str


@attrs.frozen
class Ended:
    """The client was told how the request ended; `succeeded` if it got an answer."""

    request: str
    succeeded: bool


Fact = Held | Freed | Wrote | Read | Refused | Ended


class Foreign(Protocol):
    """What an engine has to offer in order to be searched."""

    def enabled(self) -> Sequence[str]:
        """Names of all that can happen now; equal engines give equal names in equal order.

        A name says whom it concerns ("land r2"), not a place in a list: traces are reduced by
        leaving names out. What must be left alone at the end starts with "fault:".
        """
        ...

    def apply(self, name: str) -> None:
        """Let it happen."""
        ...

    def observe(self) -> Iterable[Fact]:
        """The facts since the last call, in their order."""
        ...


class ForeignWorld:
    """A foreign engine as a world: the same `enabled`, `step` and `calm` as ours."""

    def __init__(self, engine: Foreign) -> None:
        """Around an engine that has not begun."""
        self.engine = engine
        self.owners: dict[int, str] = {}
        self.writers: dict[int, str] = {}
        self.refused: set[str] = set()
        self.ended: set[str] = set()
        self.sometimes: Counter[str] = Counter()
        self._look()

    def enabled(self) -> tuple[Action, ...]:
        """Everything that can happen now."""
        return tuple((name,) for name in self.engine.enabled())

    def step(self, action: Action) -> None:
        """Do one thing and look at what it did. Raises Found."""
        self.sometimes[action[0].split(" ")[0]] += 1
        self.engine.apply(action[0])
        self._look()

    def calm(self) -> None:
        """Without faults, let everything happen; nobody who has ended may hold a page."""
        for turn in range(CALM_STEPS_MAX):
            actions = [a for a in self.enabled() if not a[0].startswith("fault:")]
            if not actions:
                left = {p: r for p, r in self.owners.items() if r in self.ended | self.refused}
                if left:
                    raise Found("leak", f"ended requests hold pages: {left}", rule="conservation")
                return
            self.step(actions[turn % len(actions)])
        raise Found("never-quiet", f"still moving after {CALM_STEPS_MAX} actions", rule="bounded")

    def broken_rule(self) -> str:
        """There is no log whose rules could be asked; findings name theirs."""
        return ""

    def _look(self) -> None:
        for fact in self.engine.observe():
            self.sometimes[type(fact).__name__] += 1
            self._judge(fact)

    def _judge(self, fact: Fact) -> None:
        request = fact.request
        match fact:
            case Refused():
                self.refused.add(request)
                held = sorted(page for page, owner in self.owners.items() if owner == request)
                if held:
                    raise Found("refused-owns", f"{request} holds {held}", rule="one-decision")
            case Ended():
                if request in self.refused or request in self.ended:
                    raise Found("answered-twice", f"{request}", rule="first-cause-wins")
                self.ended.add(request)
            case Held(page=page):
                if request in self.refused:
                    raise Found(
                        "refused-owns", f"{request} was refused, takes {page}", rule="one-decision"
                    )
                if page in self.owners:
                    raise Found(
                        "two-owners", f"page {page} is {self.owners[page]}'s", rule="one-owner"
                    )
                self.owners[page] = request
            case Freed(page=page):
                if self.owners.get(page) != request:
                    raise Found("freed-twice", f"{request} frees {page}", rule="settled-once")
                del self.owners[page]
            case Wrote(page=page):
                owner = self.owners.get(page)
                if owner != request:
                    raise Found(
                        "late-write",
                        f"bytes of {request} land on page {page}, which is {owner or 'free'}",
                        rule="drained-before-released",
                    )
                self.writers[page] = request
            case Read(page=page):
                self._read(request, page)

    def _read(self, request: str, page: int) -> None:
        writer = self.writers.get(page)
        if request in self.refused:
            raise Found(
                "refused-walks",
                f"{request} was refused and reads page {page}, written by {writer or 'nobody'}",
                rule="one-decision",
            )
        if writer != request:
            raise Found(
                "observed-foreign",
                f"{request} reads page {page}, written by {writer or 'nobody'}",
                rule="read-what-was-written",
            )
