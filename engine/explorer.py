"""The explorer: a seeded random walk over what is enabled in a small world.

Owns: seeds, budgets of faults, traces and their reduction.
Must not know: what an action means.

In half of the runs each kind of fault is switched off at random (swarm testing, Groce and
others, ISSTA 2012): a rare fault is met more often where common ones are absent.
In half of the runs some actors are slow, so that long delays are met, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from engine.world import World
from engine.world_values import FAULTS, Action, Found, Scenario

FAULT_KINDS = frozenset(FAULTS)
PACES = (1.0, 1.0, 0.1, 0.01)
"""In half of the runs some actors are much slower than others, drawn once for the run."""


@attrs.frozen
class Trace:
    """One run that found something: its seed, the scenario, the actions, and the finding."""

    seed: int
    scenario: Scenario
    actions: tuple[Action, ...]
    calm: bool
    found: Found
    rule: str = ""

    def __str__(self) -> str:
        """The seed, the finding, and one action a line."""
        lines = [f"seed {self.seed}: {self.found} (rule {self.rule or 'none in the log'})"]
        lines += [f"  {name} {' '.join(str(w) for w in whom)}" for name, *whom in self.actions]
        return "\n".join(lines)


@attrs.define
class Outcome:
    """What a search saw: how much it did, what was reached, and the finding, if there was one."""

    runs: int = 0
    steps: int = 0
    sometimes: Counter[str] = attrs.Factory(Counter)
    trace: Trace | None = None


def walk(
    scenario: Scenario, seed: int, *, steps: int = 400, worlds: Callable[[Scenario], World] = World
) -> tuple[World, Trace | None, int]:
    """One run; the same seed walks the same way. Returns the world, the finding, the steps."""
    chance = random.Random(seed)
    faults = dict(scenario.faults)
    if seed % 2:
        for kind in FAULTS:
            if kind in faults and chance.random() < 0.5:
                faults[kind] = 0
    drawn = attrs.evolve(scenario, faults=faults)
    world = worlds(drawn)
    actions: list[Action] = []
    calm = False
    weight = chance.choice((0.3, 0.1, 0.03, 0.01))
    paces: dict[tuple[object, ...], float] | None = {} if seed % 4 > 1 else None
    try:
        for _ in range(steps):
            possible = world.enabled()
            if not possible:
                break
            action = _draw(chance, possible, weight, paces)
            actions.append(action)
            world.step(action)
        calm = True
        world.calm()
    except Found as found:
        rule = found.rule or world.broken_rule()
        return world, Trace(seed, drawn, tuple(actions), calm, found, rule), len(actions)
    return world, None, len(actions)


def _draw(
    chance: random.Random,
    possible: tuple[Action, ...],
    weight: float,
    paces: dict[tuple[object, ...], float] | None,
) -> Action:
    """An action: a fault with that probability, and then each kind of fault alike.

    `paces` keeps how fast each actor is in this run; without it all are alike.
    """
    common = [a for a in possible if a[0] not in FAULT_KINDS]
    if common and chance.random() > weight:
        return _paced(chance, common, paces)
    kinds = sorted({a[0] for a in possible if a[0] in FAULT_KINDS})
    if not kinds:
        return _paced(chance, common, paces)
    kind = chance.choice(kinds)
    return chance.choice([a for a in possible if a[0] == kind])


def _actor(action: Action) -> tuple[object, ...]:
    return tuple(action)[:2]


def _paced(
    chance: random.Random, possible: list[Action], paces: dict[tuple[object, ...], float] | None
) -> Action:
    if paces is None:
        return chance.choice(possible)
    for action in possible:
        if _actor(action) not in paces:
            paces[_actor(action)] = chance.choice(PACES)
    return chance.choices(possible, [paces[_actor(action)] for action in possible])[0]


def explore(
    scenario: Scenario,
    *,
    runs: int,
    first_seed: int = 0,
    steps: int = 400,
    worlds: Callable[[Scenario], World] = World,
) -> Outcome:
    """Walk until something is found or the runs are used up."""
    outcome = Outcome()
    for seed in range(first_seed, first_seed + runs):
        world, trace, count = walk(scenario, seed, steps=steps, worlds=worlds)
        outcome.runs += 1
        outcome.steps += count
        outcome.sometimes.update(world.sometimes)
        if trace is not None:
            outcome.trace = trace
            break
    return outcome


def reproduces(scenario: Scenario, actions: Sequence[Action], *, name: str, calm: bool) -> bool:
    """Whether these actions, as far as each is enabled, lead to a finding of that name."""
    world = World(scenario)
    try:
        for action in actions:
            if action in world.enabled():
                world.step(action)
        if calm:
            world.calm()
    except Found as found:
        return found.name == name
    return False


def minimise(trace: Trace) -> Trace:
    """Delta debugging (Zeller and Hildebrandt 2002): drop actions as long as the finding stays."""
    actions, name = list(trace.actions), trace.found.name
    size = max(1, len(actions) // 2)
    while size:
        start = 0
        while start < len(actions):
            fewer = actions[:start] + actions[start + size :]
            if reproduces(trace.scenario, fewer, name=name, calm=trace.calm):
                actions = fewer
            else:
                start += size
        size //= 2
    return attrs.evolve(trace, actions=tuple(actions))
