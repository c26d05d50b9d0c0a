"""Small worlds whose every state is visited: nothing is found, and their number is known.

What happens by itself (`eager`) is said beside each world: its order against the rest is not
explored here, which the walks do.
A number changes when the cores decide differently; then the change is to be understood before a
new number is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from engine.allocator import PageAllocator, PageRun
from engine.decode import DecodeCore
from engine.exhaust import exhaust, nearest
from engine.explorer import explore, minimise
from engine.scenarios import AT_ONCE, CROWDED, ONE, PAIR, SMALL
from engine.trace import Trace, is_eager
from engine.world import World
from engine.world_values import Action, Asked, Found
from lifecycle.events import Reserved
from lifecycle.ids import EngineId, PageRange, Party
from property_tests.mutants import BY_NAME

PINNED = {
    "no fault": (163, 22),
    "two requests, four pages, abort": (23419, 37),
    "two writers, two attempts; lost, repeated, overtaken proposals": (19185, 25),
    "two requests, the scheduler crashes and loses its log's tail": (17290, 37),
    "two requests, an engine restarts": (2723, 38),
    "two requests, the scheduler crashes and an engine restarts": (7192, 25),
    "two requests in turn over two writers, abort": (5368, 39),
    "abort, doubt, late writes, deadlines": (3854, 19),
}
"""Of each small world the number of states and the longest shortest path."""


LARGE = 10_000
"""Worlds with more states are exhausted at night."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if states > LARGE else ())
        for name, (states, _) in PINNED.items()
    ],
)
def test_small_worlds_are_exhausted(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """Every state of a small world is visited, nothing is found, and their number is known."""
    result = exhaust(SMALL[name])
    record_property("summary", f"exhausted, {name}: {result}")
    assert result.found is None, f"{result.found} after {result.trace}"
    assert result.complete
    assert (result.states, result.depth) == PINNED[name]


def test_every_small_world_is_pinned() -> None:
    """None is searched whose number of states nobody knows."""
    assert set(PINNED) == set(SMALL)


def test_the_smallest_world_is_exhausted() -> None:
    """A world without faults but with every order of writes and reports, exhausted at once."""
    result = exhaust(ONE)
    assert result.found is None
    assert (result.states, result.depth) == PINNED["no fault"]
    assert str(result).startswith("163 states, depth 22, ")


def test_exhaustion_finds_a_shortest_trace() -> None:
    """Breadth first, a mutant is found by a trace that no other one undercuts."""
    result = exhaust(BY_NAME["double-release"].put_into(ONE))
    assert result.found is not None
    assert result.found.name == "allocator"
    assert 0 < len(result.trace) <= 22


def test_exhaustion_says_when_it_was_not_complete() -> None:
    """A world that is larger than allowed is no exhausted one."""
    result = exhaust(PAIR, states_max=50)
    assert not result.complete
    assert "not complete" in str(result)


# --- symmetry ---------------------------------------------------------------------------------


def test_requests_that_ask_alike_are_one_state() -> None:
    """Of two requests it does not matter which one is ahead: about half of the states remain.

    Deadlines that differ tell the two apart, and nothing in these worlds acts on a deadline.
    """
    alike = attrs.evolve(PAIR, eager=AT_ONCE | {"flush", "submit"}, faults={"cancel": 1})
    apart = attrs.evolve(alike, asked=(Asked(3, 1, 1_000), Asked(3, 1, 1_001)))
    merged, all_of_them = exhaust(alike), exhaust(apart)
    assert merged.found is None
    assert all_of_them.found is None
    assert merged.states < all_of_them.states <= 2 * merged.states
    assert merged.depth == all_of_them.depth


@pytest.mark.parametrize("name", ["free-on-abort", "double-release"])
def test_symmetry_hides_no_mutant(name: str) -> None:
    """A mutant that is found where requests are told apart is found where they are not."""
    small = attrs.evolve(
        PAIR, prefill_pages=2, staging=1, eager=AT_ONCE | {"flush"}, faults={"cancel": 1}
    )
    alike = BY_NAME[name].put_into(small)
    apart = attrs.evolve(alike, asked=(Asked(3, 1, 1_000), Asked(3, 1, 1_001)))
    merged, told_apart = exhaust(alike), exhaust(apart)
    assert merged.found is not None
    assert told_apart.found is not None
    assert merged.found.name == told_apart.found.name
    assert len(merged.trace) == len(told_apart.trace)


class FromTheTop(PageAllocator):
    """Gives out pages from the other end of a run."""

    def _best_run(self, count: int) -> PageRun:
        start, size = super()._best_run(count)
        return (start + size - min(size, count), min(size, count))

    def copy(self) -> PageAllocator:
        other = super().copy()
        other.__class__ = FromTheTop
        return other


class DecodeFromTheTop(DecodeCore):
    """The decode core over such a pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allocator = FromTheTop(self.allocator.capacity)


def pages_of(world: World) -> set[PageRange]:
    """Every range of pages that the log names."""
    events = (entry.event for _, entry in world.stored)
    return {run for event in events if isinstance(event, Reserved) for run in event.pages}


def test_the_number_of_a_page_does_not_tell_states_apart() -> None:
    """Pages from the other end of the pool: the same actions lead to states with equal keys."""
    scenario = attrs.evolve(PAIR, asked=(Asked(5, 1), Asked(3, 1)), faults={"cancel": 1})
    one = World(scenario)
    other = World(attrs.evolve(scenario, decode=DecodeFromTheTop))
    steps = 0
    while possible := one.enabled():
        assert possible == other.enabled()
        assert one.key() == other.key()
        action = possible[steps * 7 % len(possible)]
        one.step(action)
        other.step(action)
        steps += 1
    assert pages_of(one) != pages_of(other)


@pytest.fixture(scope="module")
def reduced() -> Trace:
    """A mutant's reduced trace, with as many actions as are needed."""
    trace = explore(BY_NAME["free-on-failure"].put_into(CROWDED), runs=200).trace
    assert trace is not None
    return minimise(trace)


def test_how_short_a_trace_can_be_is_known(reduced: Trace) -> None:
    """No way of fewer actions leads there, and the shortest one is found beside a longer one."""
    best = nearest(reduced)
    assert best is not None
    assert 0 < len(best) <= len(reduced.actions)
    again = nearest(attrs.evolve(reduced, actions=(*reduced.actions, ("flush",))))
    assert again is not None
    assert len(again) == len(best)
    assert nearest(reduced, steps_max=1) is None


def test_one_actor_alone_may_act_by_itself() -> None:
    """A kind of action happens by itself for all, or for the rank that is named."""
    one, other = Party(EngineId("p"), 1, 0), Party(EngineId("p"), 1, 1)
    assert is_eager(("down", one), frozenset({"down"}))
    assert is_eager(("down", one), frozenset({"down p0"}))
    assert not is_eager(("down", other), frozenset({"down p0"}))
    assert not is_eager(("flush",), frozenset({"down p0"}))


class AsksForEver(World):
    """A world in which something can always happen by itself, and changes nothing."""

    def enabled(self) -> tuple[Action, ...]:
        return (*super().enabled(), ("spin",))

    def _do_spin(self) -> None:
        return


def test_what_happens_by_itself_ends() -> None:
    """Code that keeps itself busy for ever is found, not waited for."""
    world = AsksForEver(attrs.evolve(ONE, eager=frozenset({"spin"})))
    with pytest.raises(Found, match="never-quiet"):
        world.step(("submit",))
    assert world.broken_rule() == "bounded"
