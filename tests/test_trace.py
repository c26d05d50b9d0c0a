"""Traces: one file format that everything reads and writes, replayed by names, and reduced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from engine.exhaust import exhaust
from engine.explorer import explore, minimise, walk
from engine.minimiser import STEPS_MAX, _Search
from engine.scenarios import CROWDED, ONE, SCENARIOS
from engine.trace import (
    CODE_FIELDS,
    Trace,
    TraceError,
    TraceFile,
    dumps,
    loads,
    name_actions,
    record,
    replay_names,
)
from engine.trace_names import describe, find_action, name_action
from engine.world import World
from engine.world_values import Action, Asked, Found, Scenario
from property_tests.mutants import BY_NAME, hunt
from transport.fuzz_files import corpus_paths, read_trace
from transport.fuzz_replay import judge, replay_file

TRACES = Path(__file__).parent / "traces"
KEPT = corpus_paths(TRACES)
DOUBLE = BY_NAME["double-release"]


@pytest.fixture(scope="module")
def found() -> Trace:
    """A trace of a mutant, not reduced."""
    trace = explore(DOUBLE.put_into(CROWDED), runs=20).trace
    assert trace is not None
    return trace


def plain(scenario: Scenario) -> Scenario:
    """The scenario without the code in it."""
    return attrs.evolve(scenario, **{name: getattr(Scenario(), name) for name in CODE_FIELDS})


# --- kept traces ------------------------------------------------------------------------------


def test_traces_are_kept() -> None:
    """There are scenarios to regress on, and their names are those of their mutants."""
    assert len(KEPT) >= 5
    for path in KEPT:
        file = read_trace(path)
        assert not file.mutant or path.name.startswith(file.mutant)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_a_kept_trace_does_what_its_file_says(path: Path) -> None:
    """Each replays whole, finds what it expects, and names the rule."""
    file = read_trace(path)
    replayed = replay_file(file)
    assert replayed.skipped == ()
    verdict = judge(file, replayed)
    assert verdict.good, verdict.sentence
    assert dumps(file) == path.read_text()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_the_product_survives_what_breaks_a_mutant(path: Path) -> None:
    """The same actions find nothing in the product's own code."""
    file = attrs.evolve(read_trace(path), mutant="")
    verdict = judge(file, replay_file(file))
    assert verdict.good, verdict.sentence


# --- the format -------------------------------------------------------------------------------


def test_a_file_survives_writing_and_reading(found: Trace) -> None:
    """What is read is what was written, and the same trace is the same text."""
    for trace in (found, minimise(found)):
        file = record(trace, mutant="double-release", title='a "title"\n\x7f\u2028é')
        again = loads(dumps(file))
        assert again == attrs.evolve(file, scenario=plain(file.scenario))
        assert dumps(again) == dumps(file)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_can_be_kept(name: str) -> None:
    """No scenario holds anything that a file cannot."""
    assert loads(dumps(TraceFile(SCENARIOS[name], ()))).scenario == SCENARIOS[name]


GOOD = dumps(
    TraceFile(
        Scenario(asked=(Asked(1, 1),), ranks=3, judged=False, faults={"tick": 1}), ("submit r1",)
    )
)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("custody.trace", "another", "format"),
        ("version = 1", "version = 2", "version"),
        ("version = 1", "version = ", "file"),
        ("seed = 0", 'seed = "0"', "file.seed"),
        ("seed = 0", "sead = 0", "file"),
        ("ranks = 3", "ranks = true", "scenario.ranks"),
        ("ranks = 3", "rank = 3", "scenario"),
        ("judged = false", "judged = 1", "scenario.judged"),
        ("prompt_tokens = 1", 'prompt_tokens = "1"', "scenario.asked.prompt_tokens"),
        ("prompt_tokens = 1, ", "", "scenario.asked"),
        ("asked = [{", "asked = [1, {", "scenario.asked"),
        ('"tick" = 1', '"tick" = -1', "scenario.faults.tick"),
        ('"submit r1"', "1", "trace.actions"),
        ("calm = false", "calm = 0", "trace.calm"),
        ('finding = ""', "finding = 1", "expected.finding"),
        ("[trace]", "[trace]\nother = 1", "trace"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(old: str, new: str, place: str) -> None:
    """Whoever mends a file is told where."""
    assert old in GOOD
    with pytest.raises(TraceError) as caught:
        loads(GOOD.replace(old, new))
    assert caught.value.place == place


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_names_lead_back_to_their_actions(seed: int) -> None:
    """On the way of a walk each enabled action has a name of its own, which finds it again."""
    taken: list[Action] = []
    walk(CROWDED, seed, steps=120, taken=taken)
    world = World(CROWDED)
    for action in taken:
        possible = world.enabled()
        names = [name_action(world, one) for one in possible]
        assert len(set(names)) == len(names)
        assert [find_action(world, name) for name in names] == list(possible)
        for one in possible:
            sentence, requests = describe(world, one)
            assert sentence
            assert requests <= set(world.clients)
        if action not in possible:
            break
        world.step(action)


def test_what_cannot_happen_has_no_action() -> None:
    """A name of something that is not enabled finds nothing, and a replay leaves it out."""
    world = World(CROWDED)
    for name in ("cancel r1", "land p0 r1/1 t0", "submit r2", "nonsense", "", "up p0 #2"):
        assert find_action(world, name) is None
    replayed = replay_names(CROWDED, ["cancel r1", "submit r1"], calm=False)
    assert replayed.skipped == ("cancel r1",)
    assert [row.name for row in replayed.rows] == ["submit r1"]


def test_a_replay_finds_the_same(found: Trace) -> None:
    """By names the whole trace leads to the same finding as by actions."""
    names = name_actions(found.scenario, found.actions)
    replayed = replay_names(found.scenario, names, calm=found.calm)
    assert str(replayed.found) == str(found.found)
    assert (replayed.rule, replayed.skipped) == (found.rule, ())


def test_an_exhaustive_finding_is_a_trace_too() -> None:
    """What breadth first finds is kept and replayed in the same format."""
    scenario = DOUBLE.put_into(ONE)
    result = exhaust(scenario)
    assert result.found is not None
    trace = Trace(0, scenario, result.trace, calm=False, found=result.found)
    file = loads(dumps(record(trace, mutant="double-release")))
    replayed = replay_file(file)
    assert str(replayed.found) == str(result.found)


# --- the minimiser ----------------------------------------------------------------------------

SOME = (
    "double-release",
    "free-on-abort",
    "answer-before-durable",
    "old-incarnation",
    "one-ack-of-many",
)


@pytest.mark.parametrize("name", SOME)
def test_a_reduced_trace_finds_the_same_by_less(name: str) -> None:
    """Same oracle, same rule, fewer actions, within the bound of steps."""
    one = BY_NAME[name]
    trace = hunt(one).outcome.trace
    assert trace is not None
    search = _Search(trace, STEPS_MAX)
    search.run()
    assert search.left > -1_500
    small = search.result()
    assert len(small.actions) < len(trace.actions)
    assert (small.found.name, small.rule) == (trace.found.name, trace.rule)
    file = record(small)
    again = replay_names(
        small.scenario, file.actions, calm=small.calm, eager=small.eager, worlds=one.worlds
    )
    assert again.found is not None
    assert (again.found.name, again.rule, again.skipped) == (small.found.name, small.rule, ())
    assert record(minimise(trace)) == file


def test_a_reduced_trace_is_about_as_short_as_can_be(found: Trace) -> None:
    """In a world that is exhausted, the reduction of a walk ends within two of the optimum."""
    scenario = DOUBLE.put_into(attrs.evolve(ONE, eager=frozenset(), faults={"cancel": 1}))
    trace = next(t for seed in range(50) if (t := walk(scenario, seed)[1]) is not None)
    small = minimise(trace)
    optimum = exhaust(attrs.evolve(small.scenario, eager=small.eager))
    assert optimum.found is not None
    assert optimum.found.name == small.found.name
    assert len(small.actions) <= len(optimum.trace) + 2


def test_a_minimiser_without_steps_gives_back_what_it_had(found: Trace) -> None:
    """The bound holds from the first step on."""
    small = minimise(found, steps_max=0)
    assert small.actions == found.actions
    assert small.found.name == found.found.name


def test_worlds_import_nothing_heavy() -> None:
    """Searching and replaying need neither torch nor gRPC nor protobuf."""
    code = (
        "import sys, engine.explorer, engine.exhaust, engine.foreign, engine.scenarios, "
        "transport.commands_fuzz, transport.fuzz_search, transport.fuzz_mutants, "
        "transport.fuzz_replay, transport.fuzz_corpus; "
        "print({'torch', 'grpc', 'google.protobuf', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_finding_without_a_trace_is_no_trace() -> None:
    """A world that stays clean gives a walk without a trace, and its actions all the same."""
    taken: list[Action] = []
    _, trace, steps = walk(ONE, 0, taken=taken)
    assert trace is None
    assert len(taken) == steps > 0
    assert issubclass(Found, Exception)
