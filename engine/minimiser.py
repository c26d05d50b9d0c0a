"""The minimiser: the same finding by fewer actions.

Owns: what is tried, in which order, and when to stop.
Must not know: what an action means.

Delta debugging (Zeller and Hildebrandt 2002) over names of actions, which mean the same thing
after others are gone. Whole requests are tried first, with everything that concerns them alone;
then kinds of actions are left to happen by themselves, where their moment does not matter.
A copy of the world stands where the kept part ends, so that a try costs only what follows.
At last, shorter ways are looked for breadth first in the world that is left.
It is bounded by steps, not by time, so that the same trace always gives the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from engine.exhaust import CALM_STEPS, nearest
from engine.trace import Trace, advance, name_actions
from engine.trace_names import describe, find_action
from engine.world import World
from engine.world_values import FAULTS, Action, Found, Scenario

STEPS_MAX = 20_000
"""Steps of all tries together; a second at the pace of an ordinary core."""
BY_THEMSELVES = (
    *("connect", "answer", "down", "step", "up", "flush", "verify", "done"),
    *("step-end", "land", "fenced", "failed"),
)
"""Actions that may be left to happen by themselves as soon as they can: each uses something up."""


def minimise(trace: Trace, *, steps_max: int = STEPS_MAX) -> Trace:
    """The same oracle and rule by as few actions as are found within so many steps."""
    search = _Search(trace, steps_max)
    search.run()
    return search.result()


class _Search:
    """One reduction: the best so far, and what may still be spent."""

    def __init__(self, trace: Trace, steps_max: int) -> None:
        self.trace = trace
        self.left = steps_max
        self.scenario = trace.scenario
        self.eager = trace.eager
        self.names = list(
            name_actions(trace.scenario, trace.actions, eager=trace.eager, worlds=trace.worlds)
        )

    def run(self) -> None:
        """Requests, then halves down to single actions, again while it helps; then pairs."""
        # A world that others adapted need not be copied, and asks for no requests.
        whole = isinstance(self.trace.worlds(self.scenario), World)
        while self.left > 0:
            before = len(self.names)
            if whole:
                self._drop_requests()
                self._let_happen()
            size = max(1, len(self.names) // 2)
            while size:
                self._sweep(size)
                size //= 2
            if self._undercut():
                break
            if len(self.names) == before:
                self._drop_pairs()
                break
        self._drop_faults()

    def result(self) -> Trace:
        """The reduced trace, with the finding as it now reads."""
        world = self.trace.worlds(self.scenario)
        actions: list[Action] = []
        try:
            for name in self.names:
                action = find_action(world, name)
                if action is not None:
                    actions.append(action)
                    advance(world, action, self.eager)
            if self.trace.calm:
                world.calm()
        except Found as found:
            return attrs.evolve(
                self.trace,
                scenario=self.scenario,
                actions=tuple(actions),
                found=found,
                eager=self.eager,
            )
        return self.trace

    # --- tries --------------------------------------------------------------------------------

    def _do(self, world: Any, name: str, done: list[str]) -> None:
        """Do what the name says, if it can happen, and note it. Raises Found."""
        action = find_action(world, name)
        self.left -= 1
        if action is not None:
            done.append(name)
            self.left -= advance(world, action, self.eager)

    def _try(self, world: Any, names: Iterable[str]) -> list[str] | None:
        """What of these was done when the same is found; None when it is not."""
        done: list[str] = []
        try:
            for name in names:
                self._do(world, name, done)
            if self.trace.calm:
                self._calm(world)
        except Found as found:
            same = found.name == self.trace.found.name
            if same and (found.rule or world.broken_rule()) == self.trace.rule:
                return done
        return None

    def _calm(self, world: Any) -> None:
        """Let the world come to rest, which broken code does not always. Raises Found."""
        try:
            world.calm()
        finally:
            self.left -= getattr(world, "turns", CALM_STEPS)

    def _world(self, names: Iterable[str] = (), scenario: Scenario | None = None) -> Any:
        """A world in which these have happened."""
        world = self.trace.worlds(scenario or self.scenario)
        for name in names:
            self._do(world, name, [])
        return world

    def _twin(self, world: Any, kept: Sequence[str]) -> Any:
        """An independent world in the same state."""
        if isinstance(world, World):
            self.left -= 1
            return world.copy()
        return self._world(kept)

    def _sweep(self, size: int, start: int = 0) -> bool:
        """Drop runs of that many actions wherever the finding stays, from `start` on."""
        kept, rest, dropped = self.names[:start], self.names[start:], False
        world = self._world(kept)
        while rest and self.left > 0:
            shorter = self._try(self._twin(world, kept), rest[size:])
            if shorter is not None:
                rest, dropped = shorter, True
                continue
            run, rest = rest[:size], rest[size:]
            for name in run if rest else ():
                self._do(world, name, [])
            kept += run
        self.names = kept + rest
        return dropped

    def _drop_requests(self) -> None:
        number = len(self.scenario.asked)
        while number and len(self.scenario.asked) > 1 and self.left > 0:
            asked = self.scenario.asked
            fewer = attrs.evolve(self.scenario, asked=asked[: number - 1] + asked[number:])
            names = [_renumbered(n, number) for n in self._without(number)]
            done = self._try(self._world(scenario=fewer), names)
            if done is not None:
                self.scenario, self.names = fewer, done
            number -= 1

    def _let_happen(self) -> None:
        """Kinds of actions whose moment does not matter happen by themselves."""
        for kind in BY_THEMSELVES:
            whose = sorted({_actor(name) for name in self.names if name.split(" ")[0] == kind})
            if kind not in self.eager and not self._let(kind) and len(whose) > 1:
                for actor in whose:
                    self._let(actor)

    def _let(self, what: str) -> bool:
        """Let a kind, or one actor's of a kind, happen by itself, if it is found all the same."""
        before = self.eager
        if what in before or self.left <= 0:
            return False
        self.eager = frozenset({e for e in before if e.split(" ")[0] != what} | {what})
        names = [name for name in self.names if what not in (name.split(" ")[0], _actor(name))]
        done = self._try(self._world(), names)
        if done is None:
            self.eager = before
            return False
        self.names = done
        return True

    def _without(self, number: int) -> list[str]:
        """The actions without those that concern that request alone."""
        world = self._world()
        kept: list[str] = []
        try:
            for name in self.names:
                action = find_action(world, name)
                if action is None:
                    continue
                whose = [list(world.clients).index(r) + 1 for r in describe(world, action)[1]]
                if whose != [number] and name != f"submit r{number}":
                    kept.append(name)
                self.left -= advance(world, action, self.eager)
        except Found:
            pass
        return kept

    def _undercut(self) -> bool:
        """In what is left of its world every shorter way can often be tried; whether it was."""
        small, steps = self.result(), max(0, self.left // 4)
        self.left -= steps
        best = nearest(small, steps_max=steps)
        if best is None:
            return False
        names = name_actions(small.scenario, best, eager=small.eager, worlds=small.worlds)
        self.names = list(names)
        return True

    def _drop_pairs(self) -> None:
        """Two actions that need each other go together."""
        first = 0
        while first < len(self.names) and self.left > 0:
            before = self.names
            kept, rest = before[:first], before[first + 1 :]
            world = self._world(kept)
            for second in range(len(rest)):
                if self.left <= 0:
                    break
                done = self._try(self._twin(world, kept), rest[:second] + rest[second + 1 :])
                if done is not None:
                    self.names = kept + done
                    break
            first += self.names is before

    def _drop_faults(self) -> None:
        """The scenario allows no fault that is not used, if the finding does not need it."""
        used = Counter(name.split(" ")[0] for name in self.names)
        faults = {k: used[k] for k in FAULTS if used[k] and k in self.scenario.faults}
        if "lie" in self.scenario.faults:
            faults["lie"] = self.scenario.faults["lie"]
        fewer = attrs.evolve(self.scenario, faults=faults)
        if self._try(self._world(scenario=fewer), self.names) is not None:
            self.scenario = fewer


def _actor(name: str) -> str:
    """The kind of an action and whose it is: `land p0` of `land p0 r2/1 t4`."""
    return " ".join(name.split(" ")[:2])


def _renumbered(name: str, gone: int) -> str:
    """The name after a request has gone: those behind it move up."""
    words = name.split(" ")
    for index, word in enumerate(words):
        head, slash, tail = word.partition("/")
        if head[:1] == "r" and head[1:].isdecimal() and int(head[1:]) > gone:
            words[index] = f"r{int(head[1:]) - 1}{slash}{tail}"
    return " ".join(words)
