"""Exhaustion: every state of a small world, breadth first.

Owns: the frontier, the keys seen, the shortest trace to a finding, and how short a trace can be.
Must not know: what an action means.

What is merged is said by `world_key` (numbers that only grow, names of pages, grants and requests)
and by `Scenario.eager` (actions that do not wait: whatever they commute with is met in one order).
A pinned number of states speaks of that abstraction; the explorer merges nothing.

Keys are kept as their hashes, 64 bits each: two different states that hash alike would be taken
for one, which at a million states has a chance of about one in ten million.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import attrs

from engine.trace import Trace, advance
from engine.world import World
from engine.world_values import Action, Found, Scenario

STATES_MAX = 1_000_000
NEAREST_STEPS_MAX = 60_000
"""How long a shorter trace is looked for: some ten seconds of one core."""
CALM_STEPS = 100
"""What coming to rest is counted as."""


@attrs.define
class Exhausted:
    """What was there: states, the longest shortest path, states from which nothing follows."""

    states: int = 0
    depth: int = 0
    ends: int = 0
    complete: bool = True
    seconds: float = 0.0
    sometimes: Counter[str] = attrs.Factory(Counter)
    found: Found | None = None
    trace: tuple[Action, ...] = ()

    def __str__(self) -> str:
        """States, depth, ends and processor seconds in one line."""
        whole = "" if self.complete else " (not complete)"
        return (
            f"{self.states} states{whole}, depth {self.depth}, {self.ends} ends, "
            f"{self.seconds:.1f} s"
        )


def exhaust(
    scenario: Scenario,
    *,
    states_max: int = STATES_MAX,
    worlds: Callable[[Scenario], World] = World,
) -> Exhausted:
    """Visit every reachable state once; stop at the first finding, which is a nearest one.

    A state from which only repeats follow is an end: it must come to rest when it is left alone.
    """
    result = Exhausted()
    began = time.process_time()
    _visit(worlds(scenario), result, states_max)
    result.seconds = time.process_time() - began
    return result


def _visit(first: World, result: Exhausted, states_max: int) -> None:
    start = hash(first.key())
    seen = {start}
    parents: list[tuple[int, Action | None]] = [(-1, None)]
    frontier = [(first, 0, start)]
    while frontier:
        following: list[tuple[World, int, int]] = []
        for world, number, own in frontier:
            moved = False
            for action in world.enabled():
                child = world.copy()
                try:
                    child.step(action)
                except Found as found:
                    result.found = found
                    result.trace = (*_path(parents, number), action)
                    result.states = len(seen)
                    return
                key = hash(child.key())
                moved = moved or key != own
                if key in seen:
                    continue
                seen.add(key)
                parents.append((number, action))
                following.append((child, len(parents) - 1, key))
            if not moved:
                result.sometimes.update(set(world.sometimes))
                result.ends += 1
                try:
                    world.copy().calm()
                except Found as found:
                    result.found = found
                    result.trace = _path(parents, number)
                    result.states = len(seen)
                    return
            if len(seen) > states_max:
                result.complete = False
                result.states = len(seen)
                return
        frontier = following
        result.depth += bool(following)
    result.states = len(seen)


def _path(parents: list[tuple[int, Action | None]], number: int) -> tuple[Action, ...]:
    actions: list[Action] = []
    while number >= 0:
        number, action = parents[number]
        if action is not None:
            actions.append(action)
    return tuple(reversed(actions))


# --- how short a trace can be -----------------------------------------------------------------


def nearest(trace: Trace, *, steps_max: int = NEAREST_STEPS_MAX) -> tuple[Action, ...] | None:
    """The fewest actions that show the same oracle and rule in the trace's own small world.

    The world is the trace's: its requests, its faults, and what happens by itself.
    None where so many steps do not tell, or where the world is not ours and cannot be copied.
    """
    first = trace.worlds(trace.scenario)
    if not isinstance(first, World):
        return None
    if _rests_wrong(first, trace):
        return ()
    seen = {hash(first.key())}
    frontier: list[tuple[World, tuple[Action, ...]]] = [(first, ())]
    left = steps_max
    for _ in range(1, len(trace.actions)):
        following = []
        for world, path in frontier:
            for action in world.enabled():
                child, way = world.copy(), (*path, action)
                try:
                    left -= 2 + advance(child, action, trace.eager)
                except Found as found:
                    if not trace.calm and _same(found, child, trace):
                        return way
                    continue
                key = hash(child.key())
                if key in seen:
                    continue
                seen.add(key)
                left -= CALM_STEPS if trace.calm else 0
                if _rests_wrong(child, trace):
                    return way
                following.append((child, way))
            if left < 0:
                return None
        frontier = following
    return trace.actions


def _same(found: Found, world: World, trace: Trace) -> bool:
    if found.name != trace.found.name:
        return False
    return (found.rule or world.broken_rule()) == trace.rule


def _rests_wrong(world: World, trace: Trace) -> bool:
    """Whether it is found when this world is left alone."""
    if not trace.calm:
        return False
    alone = world.copy()
    try:
        alone.calm()
    except Found as found:
        return _same(found, alone, trace)
    return False
