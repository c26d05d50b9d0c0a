"""The search over the small world: silent on the real cores, and it finds every mutant."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from engine.explorer import explore, minimise, walk
from engine.scenarios import CROWDED, SCENARIOS, focus
from engine.world import World
from engine.world_values import EYES, FAULTS, Asked, Found, Scenario
from lifecycle.events import Released
from lifecycle.rules import RULES
from property_tests.mutants import BY_NAME

ROOT = Path(__file__).resolve().parent.parent

REACHED = (
    "landed-after-end",
    "landed-from-a-dead-writer",
    "step-outlived-its-request",
    "repeated-proposal-answered",
    "lost-Reserved",
    "lost-Released",
    "rejoined",
    "doubt-resolved",
    "reland",
    "Quarantined",
    "Requeued",
    "Dropped",
    "Finished",
    "waited-out",
)
"""Situations that a search must have been in, or its silence means nothing."""


def search(name: str, runs: int) -> Counter[str]:
    """Walk one scenario and insist that nothing was found."""
    outcome = explore(SCENARIOS[name], runs=runs)
    print(f"{name}: {outcome.runs} runs, {outcome.steps} steps, {dict(outcome.sometimes)}")
    assert outcome.trace is None, str(minimise(outcome.trace))
    return outcome.sometimes


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_cores_survive_a_short_walk(name: str) -> None:
    """No oracle sees anything in a short search of any scenario."""
    search(name, runs=12)


def test_every_oracle_has_a_rule_and_is_explained() -> None:
    """Each finding of a world stands in the table, and the rule that it watches is known."""
    table = (ROOT / "docs" / "worlds.md").read_text()
    raised = {
        name
        for path in (ROOT / "engine").glob("world*.py")
        for name in re.findall(r'Found\(\s*"([a-z-]+)"', path.read_text())
    }
    assert not {name for name in raised if f"`{name}`" not in table}
    assert raised - {"late-write", "log-diverged", "replay", "sequencer"} == set(EYES)
    assert set(EYES.values()) <= set(RULES)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_cores_survive_a_long_walk_that_was_everywhere() -> None:
    """No oracle sees anything in a long search, and every dangerous situation was reached."""
    reached: Counter[str] = Counter()
    for name in SCENARIOS:
        reached.update(search(name, runs=150))
    assert [what for what in REACHED if not reached[what]] == []


def test_headers_hold_where_the_plane_lies() -> None:
    """Writes that land after DONE are detected by headers, and no foreign byte is decoded from."""
    outcome = explore(focus(lie=6, cancel=2), runs=100)
    assert outcome.trace is None, str(outcome.trace)
    assert outcome.sometimes["lie"] > 0
    assert outcome.sometimes["isolation-detected"] > 0


def test_the_same_seed_walks_the_same_way() -> None:
    """A seed is enough to walk again: same log, same counts."""
    one, _, steps = walk(CROWDED, 11)
    two, _, again = walk(CROWDED, 11)
    assert steps == again
    assert one.stored == two.stored
    assert one.sometimes == two.sometimes


def rest(world: World) -> None:
    """Let everything happen but faults, repeats and flushes."""
    while True:
        held_back = {*FAULTS, "flush", "retransmit"}
        possible = [a for a in world.enabled() if a[0] not in held_back]
        if not possible:
            return
        world.step(possible[0])


@pytest.mark.parametrize("flushed", [True, False])
def test_a_new_life_makes_durable_what_it_found(flushed: bool) -> None:
    """Without that, pages whose release the next crash forgets are in two hands."""
    scenario = Scenario(
        asked=(Asked(3, 1),),
        ranks=1,
        faults={"crash": 1, "process-crash": 1},
        flush_at_start=flushed,
    )
    world = World(scenario)
    rest(world)
    while sum(isinstance(entry.event, Released) for _, entry in world.stored) < 2:
        world.step(("flush",))
        rest(world)
    assert world.durable < len(world.stored)
    world.step(("process-crash",))
    rest(world)
    if flushed:
        world.step(("crash",))
        world.calm()
        return
    with pytest.raises(Found, match="freed-but-held"):
        world.step(("crash",))


def test_a_minimised_trace_finds_the_same() -> None:
    """Dropping actions keeps the finding and leaves fewer of them."""
    trace = explore(BY_NAME["double-release"].put_into(CROWDED), runs=5).trace
    assert trace is not None
    small = minimise(trace)
    assert len(small.actions) < len(trace.actions)
    assert small.found.name == trace.found.name


def test_a_copy_is_independent_and_equal() -> None:
    """A copy has the same key, and what happens to it does not happen to the original."""
    world = World(CROWDED)
    for _ in range(60):
        before = world.key()
        twin = world.copy()
        assert before == twin.key()
        for action in twin.enabled()[:3]:
            if action in twin.enabled():
                twin.step(action)
        assert before == world.key()
        world.step(world.enabled()[0])
