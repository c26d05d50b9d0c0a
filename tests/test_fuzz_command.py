"""`custody fuzz` and `custody replay` of traces: what they print, keep, and end with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs
import pytest

from engine.scenarios import ONE, SCENARIOS, of_seed
from engine.trace import TraceFile, dumps
from transport import cli, fuzz_mutants
from transport.fuzz_files import needless, read_trace
from transport.fuzz_mutants import quantile
from transport.progress import Searching

TRACES = Path(__file__).parent / "traces"
BROKEN = "--adapter=tests.toy_engine:broken"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if only the product were installed."""
    for name in [n for n in sys.modules if n.split(".")[0] == "property_tests"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "property_tests", None)


def output(capsys: pytest.CaptureFixture[str]) -> Any:
    """What was printed as JSON."""
    return json.loads(capsys.readouterr().out)


# --- random -----------------------------------------------------------------------------------


def test_a_clean_search_ends_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """It says how much was searched, and how to do it again."""
    assert cli.run(["fuzz", "--seed=7", "--runs=9"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("9 runs, ")
    assert "seed 7" in said
    assert said.endswith("nothing found\n")
    assert not Path("fuzz-findings").exists()


def test_the_same_seed_searches_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs and steps are a function of the seed; without one it is drawn and printed."""
    counts = []
    for _ in range(2):
        assert cli.run(["fuzz", "--seed=3", "--runs=10", "--json"]) == 0
        value = output(capsys)
        counts.append((value["runs"], value["steps"], value["reached"]))
    assert counts[0] == counts[1]
    assert cli.run(["fuzz", "--runs=1", "--json"]) == 0
    assert output(capsys)["seed"] >= 0


def test_every_scenario_meets_every_mode_of_a_seed() -> None:
    """A run's scenario is a function of its seed, and none is tied to one mode of the walk."""
    met = {(of_seed(seed)[0], seed % 4) for seed in range(4 * len(SCENARIOS))}
    assert len(met) == 4 * len(SCENARIOS)


def test_seconds_end_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    """A search for a moment ends after its chunk."""
    assert cli.run(["fuzz", "--seed=1", "--seconds=0.001", "--json"]) == 0
    assert output(capsys)["runs"] == 8


@pytest.mark.process
def test_processes_share_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes walk the same seeds as one."""
    found = []
    for jobs in (1, 2):
        assert cli.run(["fuzz", "--seed=5", "--runs=24", f"--jobs={jobs}", "--json"]) == 0
        value = output(capsys)
        found.append((value["runs"], value["steps"], value["reached"]))
    assert found[0] == found[1]


def test_a_finding_is_a_sentence_a_table_a_command_and_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failure can be read, replayed and found on disk."""
    assert cli.run(["fuzz", BROKEN, "--seed=2", "--runs=20", "--junit=report.xml"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Found refused-walks (rule one-decision): ")
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    files = [Path(line.removeprefix("file:   ")) for line in lines if line.startswith("file:")]
    assert [path.exists() for path in files] == [True, True]
    assert f"replay: custody replay {files[0]}" in lines
    assert lines[-1] == "found"
    (case,) = ET.parse("report.xml").getroot().iter("testcase")  # noqa: S314 - our own
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["message"] == lines[0]
    again = next(line for line in lines if line.startswith("again: ")).split()[2:]
    assert cli.run(again) == 1
    assert cli.run(["fuzz", f"--replay={files[0]}"]) == 0
    assert cli.run(["replay", str(files[1])]) == 0


def test_a_finding_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The same as one document."""
    assert cli.run(["fuzz", BROKEN, "--seed=2", "--runs=20", "--json"]) == 1
    finding = output(capsys)["finding"]
    assert (finding["oracle"], finding["rule"]) == ("refused-walks", "one-decision")
    assert len(finding["actions"]) == 3
    assert all(Path(name).exists() for name in finding["files"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--runs=0"],
        ["--seconds=0"],
        ["--seconds=nan"],
        ["--jobs=0"],
        ["--trials=0"],
        ["--profile=never"],
        ["some-mutant"],
        ["--mutants", "--exhaustive"],
        ["--mutants", "no-such-mutant"],
        ["--replay=x", "--exhaustive"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What makes no sense exits with 2 and a sentence."""
    assert cli.run(["fuzz", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("custody: ")


# --- the corpus -------------------------------------------------------------------------------


def test_a_corpus_grows_and_is_merged(capsys: pytest.CaptureFixture[str]) -> None:
    """What was reached is kept, replayed first, and needs no second copy."""
    assert cli.run(["fuzz", "--seed=1", "--runs=12", "--corpus=kept", "--json"]) == 0
    first = output(capsys)["corpus"]
    assert first["replayed"] == 0
    assert first["kept"] == len(list(Path("kept").iterdir())) > 0
    assert cli.run(["fuzz", "--seed=1", "--runs=12", "--corpus=kept", "--json"]) == 0
    second = output(capsys)["corpus"]
    assert second["replayed"] == first["kept"]
    assert second["kept"] == 0
    assert len(list(Path("kept").iterdir())) <= first["kept"]


def test_a_broken_trace_of_a_corpus_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """A kept trace that is not as it should be is told before anything is searched."""
    file = TraceFile(ONE, ("submit r1",), finding="late-write", mutant="", adapter="")
    folder = Path("kept")
    folder.mkdir()
    toy = TraceFile(ONE, (), adapter="tests.toy_engine:broken", finding="leak")
    (folder / "clean.trace.toml").write_text(dumps(file))
    (folder / "wrong.trace.toml").write_text(dumps(toy))
    assert cli.run(["fuzz", "--seed=1", "--runs=1", "--corpus=kept", "--junit=r.xml"]) == 1
    said = capsys.readouterr().out
    assert "wrong.trace.toml: expected leak of adapter" in said
    assert "clean.trace.toml:" not in said
    (folder / "broken.trace.toml").write_text("format")
    assert cli.run(["fuzz", "--seed=1", "--runs=1", "--corpus=kept"]) == 5
    assert capsys.readouterr().err.startswith("custody: kept/broken.trace.toml: ")
    assert cli.run(["fuzz", "--runs=1", "--corpus=kept/broken.trace.toml"]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_a_trace_is_needless_when_others_reach_all_of_it() -> None:
    """The merge keeps what alone reaches something."""
    one, two, three = (Path(name) for name in ("one", "two", "three"))
    reached = [(one, frozenset("ab")), (two, frozenset("abc")), (three, frozenset("d"))]
    assert needless(reached) == [one]


# --- replaying a trace ------------------------------------------------------------------------


def test_a_replay_prints_the_table_the_rule_and_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mutant's trace ends with 0 when it does what its file says."""
    path = TRACES / "double-release.trace.toml"
    assert cli.run(["replay", str(path)]) == 0
    said = capsys.readouterr().out
    assert "made with the mutant double-release" in said
    assert "\n  1  submit r1" in said
    assert "rule settled-once: Each grant is granted once and settled once." in said
    assert said.splitlines()[-1].startswith("as expected of mutant double-release: allocator")
    assert cli.run(["replay", str(path), "--json"]) == 0
    value = output(capsys)
    assert value["as_it_should_be"]
    assert value["found"]["rule"] == value["expected"]["rule"] == "settled-once"
    assert value["actions"][0]["name"] == "submit r1"


def test_a_mutant_that_is_not_found_again_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Another finding than the expected one, or none, ends with 1."""
    file = read_trace(TRACES / "double-release.trace.toml")
    for changed in (
        attrs.evolve(file, rule="bounded"),
        attrs.evolve(file, finding="leak"),
        attrs.evolve(file, actions=()),
    ):
        Path("changed.toml").write_text(dumps(changed))
        assert cli.run(["replay", "changed.toml"]) == 1
        assert "expected " in capsys.readouterr().out.splitlines()[-1]


def test_the_products_own_trace_is_green_once_it_is_repaired(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever a file expects of the product, only a finding ends with 1."""
    file = attrs.evolve(read_trace(TRACES / "double-release.trace.toml"), mutant="")
    Path("own.toml").write_text(dumps(file))
    assert cli.run(["replay", "own.toml"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "clean: nothing is found; it once showed allocator"


def test_an_unreadable_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that says that it is a trace and is none ends with 5."""
    Path("bad.toml").write_text('format = "custody.trace"\nversion = 9\n')
    assert cli.run(["replay", "bad.toml"]) == 5
    assert "version: must be 1, not 9" in capsys.readouterr().err
    assert cli.run(["fuzz", "--replay=missing.toml"]) == 5


@pytest.mark.usefixtures("without_checkout")
def test_mutants_need_a_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    """Without one, hunting and replaying a mutant's trace say so."""
    path = TRACES / "double-release.trace.toml"
    for arguments in (["fuzz", "--mutants"], ["replay", str(path)]):
        assert cli.run(arguments) == 2
        assert "property_tests/ of a checkout" in capsys.readouterr().err


# --- the hunt ---------------------------------------------------------------------------------


def test_the_hunt_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A mutant's line says by which rule and oracle, how soon, and how short."""
    arguments = ["fuzz", "--mutants", "double-release", "--trials=2"]
    assert cli.run([*arguments, "--corpus=kept", "--junit=r.xml"]) == 0
    head, line, last = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["mutant", "found", "rule", "oracle"]
    assert head.split()[4:] == ["runs", "CPU", "s", "length", "optimum", "above"]
    assert line.split()[:6] == ["double-release", "2", "of", "2", "settled-once", "allocator"]
    assert last == "all as it should be"
    assert cli.run(["replay", "kept/double-release.trace.toml"]) == 0
    capsys.readouterr()
    assert cli.run([*arguments, "--json"]) == 0
    (row,) = output(capsys)["mutants"]
    assert (row["found"], row["rules"], row["as_it_should_be"]) == (2, ["settled-once"], True)
    assert row["minimise_s_max"] < 30


def test_a_mutant_that_is_missed_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missed mutants end with 1 and are named; a harmless one must be missed."""
    assert cli.run(["fuzz", "--mutants", "same-memory", "--trials=1", "--runs=1"]) == 1
    assert "not as it should be: same-memory" in capsys.readouterr().out
    monkeypatch.setattr(fuzz_mutants, "GREEN_RUNS", 3)
    assert cli.run(["fuzz", "--mutants", "harmless", "--trials=1"]) == 0


def test_quantiles_are_values_that_were_seen() -> None:
    """The 95th percentile of twenty is the nineteenth."""
    values = [float(n) for n in range(20, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile([], 0.5)) == (10, 19, 0)


# --- exhaustive -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_small_worlds_are_exhausted(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is visited whole, and nothing is found."""
    assert cli.run(["fuzz", "--exhaustive", "--json", "--junit=r.xml"]) == 0
    worlds = output(capsys)["worlds"]
    assert all(world["complete"] and not world["found"] for world in worlds)
    assert len(list(ET.parse("r.xml").getroot().iter("testcase"))) == len(worlds)  # noqa: S314 - our own


def test_an_interrupted_search_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a search without a verdict, but not without its last numbers and its seed."""

    def interrupted() -> None:
        with Searching("begins", shown=True) as searching:
            searching.say("40 runs, seed 7")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().err == "custody: interrupted: 40 runs, seed 7\n"
