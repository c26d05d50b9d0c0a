"""The explorer: a seeded random walk over what is enabled in a small world.

Owns: seeds, budgets of faults, and what is drawn next.
Must not know: what an action means.

In half of the runs each kind of fault is switched off at random (swarm testing, Groce and
others, ISSTA 2012): a rare fault is met more often where common ones are absent.
In half of the runs some actors are slow, so that long delays are met, too.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import attrs

from engine.minimiser import minimise
from engine.trace import Trace, Worlds
from engine.world import World
from engine.world_values import FAULTS, Action, Found, Scenario

__all__ = ["Manner", "Outcome", "Trace", "explore", "minimise", "walk"]

FAULT_KINDS = frozenset(FAULTS)
FOREIGN_FAULT = "fault:"
"""How the names of an adapted engine's faults begin."""
STEPS_MAX = 400
"""Steps of one run, unless it is given another number."""
PACES = (1.0, 1.0, 0.1, 0.01)
"""In half of the runs some actors are much slower than others, drawn once for the run."""


@attrs.define
class Outcome:
    """What a search saw: how much it did, what was reached, and the finding, if there was one."""

    runs: int = 0
    steps: int = 0
    sometimes: Counter[str] = attrs.Factory(Counter)
    trace: Trace | None = None


class Manner:
    """How one run is walked, all drawn from its seed: faults left out, their weight, paces."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        """`chance` goes on where this has stopped to draw."""
        self.chance = random.Random(seed)
        faults = dict(scenario.faults)
        if seed % 2:
            for kind in FAULTS:
                if kind in faults and self.chance.random() < 0.5:
                    faults[kind] = 0
        self.scenario = attrs.evolve(scenario, faults=faults)
        self.weight = self.chance.choice((0.3, 0.1, 0.03, 0.01))
        self.paces: dict[tuple[object, ...], float] | None = {} if seed % 4 > 1 else None

    def draw(self, chance: random.Random, possible: tuple[Action, ...]) -> Action:
        """What happens next."""
        return _draw(chance, possible, self.weight, self.paces)


def walk(
    scenario: Scenario,
    seed: int,
    *,
    steps: int = STEPS_MAX,
    worlds: Worlds = World,
    taken: list[Action] | None = None,
) -> tuple[Any, Trace | None, int]:
    """One run; the same seed walks the same way. Returns the world, the finding, the steps.

    `taken` is filled with the actions of the run, whether or not it finds anything.
    """
    manner = Manner(scenario, seed)
    drawn, chance = manner.scenario, manner.chance
    world = worlds(drawn)
    actions: list[Action] = [] if taken is None else taken
    calm = False
    try:
        for _ in range(steps):
            possible = world.enabled()
            if not possible:
                break
            action = manner.draw(chance, possible)
            actions.append(action)
            world.step(action)
        calm = True
        world.calm()
    except Found as found:
        rule = found.rule or world.broken_rule()
        return world, Trace(seed, drawn, tuple(actions), calm, found, rule, worlds), len(actions)
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
    common = [a for a in possible if a[0] not in FAULT_KINDS and a[0][:6] != FOREIGN_FAULT]
    if common and chance.random() > weight:
        return _paced(chance, common, paces)
    kinds = sorted({a[0] for a in possible} - {a[0] for a in common})
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
    steps: int = STEPS_MAX,
    worlds: Worlds = World,
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
