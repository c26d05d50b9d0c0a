"""The benchmark compares like with like, and says so; no test asserts a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.tiny import tiny_llama
from transport import bench, bench_transformers, cli
from transport.bench_context import BenchSettings, Bystanders, Context, UnknownMeasure
from transport.bench_inside import _UncheckedBatch, unchecked
from transport.bench_kernels import (
    STEPS,
    KernelSettings,
    Turns,
    _added,
    _quickest,
    run_kernels,
)
from transport.bench_parts import Peer, PeerRun
from transport.bench_stats import (
    SCHEMA,
    Arrivals,
    Figure,
    Report,
    Spread,
    Target,
    UnusableSample,
    decode_rate,
    interleave,
    percentile,
)
from transport.child import Child, ChildFailed, clean_environment
from transport.commands_bench import report_lines
from transport.settings import InvalidSetting


def quiet(_: str) -> None:
    """Nobody watches the progress."""


def figure(**changes: Any) -> Figure:
    plain = Figure(
        name="speed",
        says="how fast",
        unit="tokens/s",
        ours=(10.0, 30.0, 20.0),
        theirs=(20.0, 20.0, 10.0),
        peer="them",
        target=Target(value=1.0, better="higher"),
    )
    return attrs.evolve(plain, **changes)


# --- Statistics -----------------------------------------------------------------------------------


def test_a_spread_is_the_middle_and_both_ends() -> None:
    """The median of an even number of samples lies between the middle two."""
    assert Spread.of([4.0, 1.0, 3.0, 2.0]) == Spread(2.5, 1.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_a_ratio_is_made_of_neighbours() -> None:
    """Each round is divided by its own peer; medians are never divided by each other."""
    assert figure().ratios == (0.5, 1.5, 2.0)
    assert Spread.of(figure().ratios).median == 1.5
    assert figure(theirs=()).ratios == ()


def test_sides_take_turns() -> None:
    """Ours, theirs, ours, theirs; both sides of a round are told its number."""
    calls: list[tuple[str, int]] = []

    def side(name: str) -> Callable[[int], str]:
        def run(number: int) -> str:
            calls.append((name, number))
            return f"{name}{number}"

        return run

    assert interleave(2, side("a"), side("b")) == (("a0", "b0"), ("a1", "b1"))
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


@pytest.mark.parametrize(
    ("better", "value", "met"),
    [("higher", 1.5, True), ("higher", 1.6, False), ("lower", 1.5, True), ("lower", 1.4, False)],
)
def test_a_target_is_met_by_the_median_ratio(better: str, value: float, met: bool) -> None:
    """The median ratio of 1.5 meets a bound of 1.5 from either side."""
    assert figure(target=Target(value=value, better=better)).met is met  # type: ignore[arg-type]


def test_without_a_peer_our_own_value_meets_the_target() -> None:
    """A latency has a bound and no peer; a figure without a bound is neither met nor missed."""
    alone = figure(theirs=(), target=Target(value=20.0, better="lower"))
    assert alone.met is True
    assert figure(target=None).met is None


@pytest.mark.parametrize(
    "changes",
    [{"ours": ()}, {"theirs": (1.0,)}, {"theirs": (1.0, 0.0, 2.0)}],
    ids=["nothing", "unpaired", "zero"],
)
def test_samples_without_a_ratio_are_refused(changes: dict[str, Any]) -> None:
    """No sample, another number of them, or a peer of 0 is a defect and not a figure."""
    with pytest.raises(UnusableSample):
        figure(**changes)


def test_a_percentile_is_a_sample() -> None:
    """99 of 100 samples are at most the 99th percentile, which was measured itself."""
    assert percentile([float(n) for n in range(100, 0, -1)], 0.99) == 99.0
    assert percentile([5.0], 0.99) == 5.0
    with pytest.raises(UnusableSample):
        percentile([], 0.99)


# --- Throughput -----------------------------------------------------------------------------------


def test_decode_is_measured_while_all_decode() -> None:
    """What the first stream gives before the last begins, and after it has its tokens, is left out."""
    early = Arrivals(tuple((0.5 * n, 1) for n in range(1, 41)))
    late = Arrivals(tuple((10.0 + 0.5 * n, 1) for n in range(9)))
    # The window is 10 to 12 seconds: four tokens of each stream.
    assert decode_rate([early, late], new_tokens=5) == pytest.approx(8 / 2.0)


def test_decode_of_one_stream_leaves_the_first_token_out() -> None:
    """The first token belongs to prefill: five tokens are four steps."""
    stream = Arrivals(((3.0, 1), (4.0, 2), (5.0, 2)))
    assert decode_rate([stream], new_tokens=5) == pytest.approx(2.0)


def test_a_stream_that_ends_early_closes_the_window() -> None:
    """A stream that has ended does not count as a slow one."""
    short = Arrivals(((0.0, 1), (1.0, 1), (2.0, 1)))
    long = Arrivals(tuple((0.5 + n, 1) for n in range(9)))
    assert decode_rate([short, long], new_tokens=9) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "streams",
    [
        [],
        [Arrivals(())],
        [Arrivals(((0.0, 1),))],
        [Arrivals(((0.0, 1), (1.0, 1))), Arrivals(((5.0, 1), (6.0, 1)))],
    ],
    ids=["none", "silent", "short", "apart"],
)
def test_no_rate_without_a_common_window(streams: list[Arrivals]) -> None:
    """Streams that never decoded all at once have no common throughput."""
    with pytest.raises(UnusableSample):
        decode_rate(streams, new_tokens=2)


def test_the_peer_is_measured_alike() -> None:
    """Its prefill ends with the first logits, and its steps after that count for the whole batch."""
    run = PeerRun(steps=(2.0, 3.0, 4.0), tokens=((1, 2, 3), (4, 5, 6)))
    assert run.prefill_seconds == 2.0
    assert run.decode_rate == pytest.approx(2.0)
    with pytest.raises(UnusableSample):
        _ = PeerRun(steps=(2.0,), tokens=((1,),)).decode_rate


# --- Reports --------------------------------------------------------------------------------------


def report() -> Report:
    return Report(
        date="2026-01-01T00:00:00+00:00",
        machine={"cores": 2},
        settings=attrs.asdict(BenchSettings()),
        versions={"torch": "2"},
        figures=(figure(), figure(name="alone", theirs=(), target=None, notes={"steps": 0})),
    )


def test_a_report_is_json_of_one_shape() -> None:
    """Every figure has the same keys; what does not apply is null and not missing."""
    found = json.loads(json.dumps(report().to_object()))
    assert found["schema"] == SCHEMA
    assert set(found) == {"schema", "date", "machine", "settings", "versions", "figures"}
    keys = {"name", "says", "unit", "ours", "peer", "ratio", "target", "notes"}
    first, alone = found["figures"]
    assert set(first) == set(alone) == keys
    assert first["ours"] == {
        "median": 20.0,
        "low": 10.0,
        "high": 30.0,
        "samples": [10.0, 30.0, 20.0],
    }
    assert first["peer"]["name"] == "them"
    assert first["ratio"]["samples"] == [0.5, 1.5, 2.0]
    assert first["target"] == {"value": 1.0, "better": "higher", "met": True}
    assert (alone["peer"], alone["ratio"], alone["target"]) == (None, None, None)
    assert alone["notes"] == {"steps": 0}


def test_a_report_in_text_names_ratio_target_and_notes() -> None:
    """A reader sees what was compared, how it spread, and what is missed."""
    text = "\n".join(report_lines(report()))
    assert "ratio  1.5 (0.5 to 2)" in text
    assert "target at least 1: met" in text
    assert "steps = 0" in text


# --- Settings and surroundings --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("runs", 0),
        ("batch", 0),
        ("threads", 0),
        ("new_tokens", 1),
        ("prompt_tokens", 1),
        ("peer", "x"),
    ],
)
def test_settings_that_measure_nothing_are_refused(name: str, value: Any) -> None:
    """The setting and its value are named."""
    with pytest.raises(InvalidSetting) as refused:
        BenchSettings(**{name: value})
    assert (refused.value.name, refused.value.value) == (name, value)


def test_an_unknown_measure_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is a usage error that lists the measures."""
    with pytest.raises(UnknownMeasure):
        bench.run_bench(BenchSettings(only=("speed",)), progress=pytest.fail)
    assert cli.run(["bench", "serve", "--only", "speed"]) == 2
    assert "single" in capsys.readouterr().err


def test_settings_of_the_environment_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a measured process does is a function of the command alone."""
    monkeypatch.setenv("CUSTODY_LOG", "elsewhere")
    assert not [name for name in clean_environment() if name.startswith("CUSTODY_")]


def test_a_child_that_ends_is_reported_in_its_own_words(tmp_path: Path) -> None:
    """Whoever reads the failure need not look for a file."""
    program = (sys.executable, "-c", "raise SystemExit('out of luck')")
    child = Child("part", (), errors=tmp_path / "errors", program=program)
    with pytest.raises(ChildFailed, match="out of luck"):
        child.read()
    with pytest.raises(ChildFailed, match="exit code 1"):
        child.ask({})
    child.end(terminate=False)


def test_a_child_answers_line_by_line_and_leaves_with_its_input(tmp_path: Path) -> None:
    """What it says beside its lines is no answer; the end of its input is its end."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "print('a library says hello', flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({**json.loads(line), 'seen': dict(os.environ)}), flush=True)\n"
    )
    program = (sys.executable, str(script))
    child = Child("part", (), errors=tmp_path / "errors", program=program, environment={"A": "b"})
    answers = [child.ask({"number": number}) for number in (1, 2)]
    assert [answer["number"] for answer in answers] == [1, 2]
    assert answers[0]["seen"].get("A") == "b"
    assert "HOME" not in answers[0]["seen"]
    child.end(terminate=False)
    assert child.process.returncode == 0


def test_own_work_is_not_a_bystanders() -> None:
    """Work of this process is taken out of the machine's load, so the rest cannot be negative."""
    bystanders = Bystanders()
    sum(range(100_000))
    assert bystanders.cores() >= 0.0


def test_prompts_differ_and_repeat_with_their_seed(tmp_path: Path) -> None:
    """No prompt shares its beginning with another, and the next run has the same ones."""
    settings = BenchSettings(model=str(tiny_llama(tmp_path / "tiny")), peer="none")
    found = []
    for _ in range(2):
        with Context(settings, progress=quiet) as context:
            found.append([context.prompt(9) for _ in range(3)])
            assert all(64 <= token < context.config.vocabulary for token in found[-1][0])
    assert found[0] == found[1]
    assert len({prompt[:4] for prompt in found[0]}) == 3


# --- Against a tiny model -------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["headers", "transfer"])
def test_measures_inside_a_process_run(tmp_path: Path, measure: str) -> None:
    """Each gives as many pairs as rounds, whatever their values."""
    settings = BenchSettings(
        model=str(tiny_llama(tmp_path / "tiny")),
        prompt_tokens=40,
        batch=2,
        runs=2,
        threads=1,
        peer="none",
        only=(measure,),
    )
    found = bench.run_bench(settings, progress=quiet)
    assert found.figures
    assert all(len(figure.ratios) == 2 for figure in found.figures)
    assert all("cores_busy_with_others_meanwhile" in figure.notes for figure in found.figures)


def test_kernels_are_measured_beside_their_references(tmp_path: Path) -> None:
    """Every figure of `bench kernels` is there, in pairs, with what the memory can do."""
    settings = KernelSettings(
        model=str(tiny_llama(tmp_path / "tiny")), threads=1, runs=2, shapes=((1, 20), (2, 40))
    )
    found = run_kernels(settings, progress=quiet)
    names = [figure.name for figure in found.figures]
    assert names == [
        "step-1x20", "int8-1x20", "check-1x20", "bandwidth-1x20", "attention-1x20",
        "context-read-1x20",
        "step-2x40", "int8-2x40", "check-2x40", "bandwidth-2x40", "attention-2x40",
        "context-read-2x40",
        "pack", "verify",
    ]  # fmt: skip
    assert all(len(figure.ratios) == 2 for figure in found.figures)


def test_a_figure_ends_when_its_time_is_up() -> None:
    """On a machine so busy that one call takes all the time there is, each round still has its one
    turn of every side; where there is time, sides take turns up to a bound and the quickest counts.
    """
    calls: list[str] = []

    def side(name: str, *seconds: float) -> Callable[[], float]:
        left = list(seconds)

        def run() -> float:
            calls.append(name)
            return left.pop(0) if len(left) > 1 else left[0]

        return run

    hurried = KernelSettings(model="", runs=2, figure_seconds=1e-9)
    found = _quickest(hurried, side("a", 3.0, 2.0), side("b", 5.0))
    assert calls == ["a", "b", "a", "b"]
    assert found == Turns(((3.0, 5.0), (2.0, 5.0)), 1)
    calls.clear()
    patient = KernelSettings(model="", runs=1, figure_seconds=1e9)
    found = _quickest(patient, side("a", 3.0, 2.0, 4.0), side("b", 5.0))
    assert found == Turns(((2.0, 5.0),), STEPS)
    assert calls == ["a", "b"] * STEPS


def test_a_context_that_noise_hides_meets_no_target() -> None:
    """A long step that was no slower than a short one says nothing for us."""
    assert _added(long=2.0, short=1.5) == 2.0
    assert _added(long=1.5, short=1.5) == _added(long=1.0, short=1.5) == 0.0


def test_the_unchecked_step_is_out_of_reach() -> None:
    """Only the benchmark's own modules name it: no setting and no engine leads there."""
    root = Path(bench.__file__).resolve().parent.parent
    names = (_UncheckedBatch.__name__, f"{unchecked.__name__}(")
    users = [
        path.name
        for folder in ("engine", "transport", "kernels")
        for path in (root / folder).rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in names)
    ]
    assert sorted(users) == ["bench_inside.py", "bench_kernels.py"]


def test_transformers_answers_lines(tmp_path: Path) -> None:
    """Every row gets exactly the tokens asked for, and each step its time, prefill first."""
    pytest.importorskip("transformers")
    model = bench_transformers.load(tiny_llama(tmp_path / "tiny"))
    asked = {"prompts": [[70, 71, 72], [80, 81, 82]], "new_tokens": 4}
    answers = StringIO()
    bench_transformers.answer_lines(model, StringIO(json.dumps(asked) + "\n"), answers)
    found = json.loads(answers.getvalue())
    assert [len(row) for row in found["tokens"]] == [4, 4]
    assert len(found["steps"]) == 4
    assert found["steps"] == sorted(found["steps"])


@pytest.mark.process
def test_the_peer_lives_through_several_runs(tmp_path: Path) -> None:
    """One process answers again and again and leaves when it is let go."""
    pytest.importorskip("transformers")
    directory = str(tiny_llama(tmp_path / "tiny"))
    with Peer(model=directory, threads=1, folder=tmp_path) as peer:
        assert peer.versions["transformers"]
        first, second = (peer.generate([[70, 71, 72]], new_tokens=3) for _ in range(2))
        assert first.tokens == second.tokens
    assert peer._child.process.returncode == 0


@pytest.mark.process
def test_serving_is_measured_by_real_clients(tmp_path: Path) -> None:
    """Streams, a batch and refusals of real processes give figures; greedy tokens are the peer's."""
    pytest.importorskip("transformers")
    settings = BenchSettings(
        model=str(tiny_llama(tmp_path / "tiny")),
        prompt_tokens=40,
        new_tokens=6,
        batch=2,
        runs=2,
        threads=1,
        kv_memory="4MiB",
        only=("single", "batch", "refusal"),
    )
    found = {figure.name: figure for figure in bench.run_bench(settings, progress=quiet).figures}
    assert set(found) == {"decode-single", "first-token", "decode-batch", "refusal"}
    assert found["decode-single"].notes["same_tokens_as_peer"] == 2
    assert found["refusal"].notes["entries_per_refusal"] == 1.0
    assert found["refusal"].notes["engine_steps"] == 0
    assert len(found["decode-batch"].ratios) == 2


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("measure", ["stores", "colocated", "loop"])
def test_deployments_are_compared_with_each_other(tmp_path: Path, measure: str) -> None:
    """Two kinds of deployment, or a loop in two states, take turns and give pairs."""
    settings = BenchSettings(
        model=str(tiny_llama(tmp_path / "tiny")),
        prompt_tokens=40,
        new_tokens=6,
        runs=1,
        threads=1,
        kv_memory="4MiB",
        peer="none",
        only=(measure,),
    )
    (found,) = bench.run_bench(settings, progress=quiet).figures
    assert len(found.ratios) == 1
    assert found.peer
