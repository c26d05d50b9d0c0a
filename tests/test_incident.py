"""The published incident: what its log alone says is what the simulated memory saw.

The truth comes from tainted memory that the log's writer never looks at.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from examples.incident.__main__ import FIRST, GOLDEN, SECOND, told, verdict
from examples.incident.simulation import Setup, simulate
from lifecycle.events import RejectCode
from lifecycle.forensics_sums import exposures
from lifecycle.forensics_values import Exposures
from lifecycle.replay import Replayer, Report
from transport import cli

PUBLISHED = 155
PREFILL_POOL = 681_280


@cache
def judged(setup: Setup) -> tuple[Exposures, Report, dict[str, set[str]]]:
    """What the log says, by both verbs, and what the memory saw."""
    engine = simulate(setup)
    replayer = Replayer(foreign=True)
    for position, entry in engine.log.entries:
        replayer.take(position, entry)
    return exposures(engine.log.entries), replayer.report(), engine.truth.foreign


def named(found: Exposures) -> dict[str, set[str]]:
    """Each affected answer, and whose bytes it read."""
    return {r.request: {read.writer or "(before)" for read in r.reads} for r in found.certain}


def test_the_published_incident_is_read_off_its_log() -> None:
    """155 answers, all above the pool, HTTP 200 where 400 was due, first and last date."""
    found, report, truth = judged(FIRST)
    assert len(truth) == PUBLISHED
    assert found.affected.least == found.affected.most == PUBLISHED
    assert named(found) == truth
    assert min(r.prompt_tokens for r in found.certain) > PREFILL_POOL
    (threshold,) = found.thresholds
    assert threshold.below <= PREFILL_POOL < threshold.above
    assert threshold.pools == (("prefill-0", PREFILL_POOL),)
    assert {r.refused for r in found.certain} == {RejectCode.KV_POOL_CAPACITY_EXCEEDED}
    times = [r.time_ns for r in found.certain]
    assert (times[0], times[-1]) == (min(times), max(times))
    assert found.last_ns - found.first_ns < FIRST.days * 86_400 * 10**9
    assert report.by_rule == (("one-decision", PUBLISHED),)
    assert {f.violation.request for f in report.findings} == set(truth)


def test_both_symptoms_show_exactly_the_affected() -> None:
    """Without a look at any page, the outside shows the same 155."""
    found, _, truth = judged(FIRST)
    for kind in ("first_token_too_soon", "lengths_disagree"):
        assert {s.request for s in found.symptoms if s.kind == kind} == set(truth)


def rejected_walks(seed: int) -> Setup:
    """A smaller fortnight with a random number of affected answers, none among them."""
    draw = random.Random(seed)
    return Setup(
        seed=seed,
        affected=draw.choice([0, 0, 1, draw.randrange(40)]),
        sound=draw.randrange(50, 200),
        refused=draw.randrange(20),
    )


def late_writes(seed: int) -> Setup:
    """A crowded hour in which clients cancel while writes are on their way."""
    draw = random.Random(seed)
    return Setup(
        seed=seed,
        affected=0,
        sound=draw.randrange(50, 250),
        refused=draw.randrange(5),
        cancelled=draw.choice([0, 1, draw.randrange(40)]),
        days=draw.uniform(0.01, 0.05),
    )


def check_rejected_walks(seed: int) -> int:
    found, report, truth = judged(rejected_walks(seed))
    assert named(found) == truth, seed
    assert found.affected.most == len(truth), seed
    assert {f.violation.request for f in report.findings} == set(truth), seed
    return len(truth)


def check_late_writes(seed: int) -> int:
    found, _, truth = judged(late_writes(seed))
    # A late write may cover an earlier one, so not every writer is named; every reader is.
    assert set(named(found)) == set(truth), seed
    assert all(whose <= truth[reader] for reader, whose in named(found).items()), seed
    return len(truth)


def test_other_seeds_give_exactly_those_affected() -> None:
    """Whatever the number, 0 among them, exactly those are found, with the right owners."""
    counts = [check_rejected_walks(seed) for seed in range(6)]
    assert 0 in counts
    assert any(counts)


def test_late_writes_give_exactly_those_affected() -> None:
    """The second family: abort with writes in flight, page given on, late write."""
    counts = [check_late_writes(seed) for seed in range(6)]
    assert 0 in counts
    assert any(counts)


@pytest.mark.parametrize("setup", [rejected_walks(3), late_writes(3)])
def test_a_list_of_requests_shows_the_phases_of_the_replay(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a foreign engine did against a rule moves a request's phase in both verbs."""
    log = tmp_path / "log.jsonl"
    simulate(setup).log.write(log)
    assert cli.run(["log", "ls", "--log", str(log), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    listed = Counter(line["phase"].removeprefix("PHASE_").lower() for line in lines)
    _, report, _ = judged(setup)
    assert listed == dict(report.phases)
    assert listed["closed"]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("check", [check_rejected_walks, check_late_writes])
def test_a_hundred_other_seeds(check: object) -> None:
    """None missed and none false over a hundred seeds of each family."""
    assert callable(check)
    counts = [check(seed) for seed in range(100, 200)]
    assert 0 in counts
    assert sum(counts) > PUBLISHED


def test_a_gap_becomes_a_bound_that_holds_the_truth() -> None:
    """With a tenth of the log gone, the true number lies between both bounds."""
    from lifecycle.forensics_values import Missing

    setup = rejected_walks(3)
    engine = simulate(setup)
    entries = engine.log.entries
    first, last = len(entries) // 3, len(entries) // 3 + len(entries) // 10
    left = [*entries[: first - 1], *entries[last:]]
    found = exposures(left, missing=[Missing(first, last, "gone")], whole=False)
    answered = {e.request for _, e in left if type(e.event).__name__ == "Finished"}
    true = len(set(engine.truth.foreign) & answered)
    assert found.affected.least <= true <= found.affected.most
    assert found.affected.most > found.affected.least
    assert {r.request for r in found.certain} <= set(engine.truth.foreign)


def test_the_outputs_are_the_kept_ones(tmp_path: Path) -> None:
    """`make incident` regenerates exactly what is kept."""
    assert SECOND.cancelled
    for name, text in told(tmp_path).items():
        kept = (GOLDEN / name).read_text()
        assert text == kept, name


def test_the_last_line_says_whether_the_outputs_are_the_kept_ones(tmp_path: Path) -> None:
    """Equal and exit code 0, or which of them differ and 1; what was not made is not passed over."""
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(name)
    same = {"one.txt": "one.txt", "two.txt": "two.txt"}
    line, code = verdict(same, tmp_path)
    assert (line.startswith("EQUAL: 2 outputs as those kept in "), code) == (True, 0)
    line, code = verdict({"one.txt": "one.txt"}, tmp_path)
    assert (line.endswith("; not made and not compared: two.txt"), code) == (True, 0)
    line, code = verdict({**same, "two.txt": "changed", "new.txt": ""}, tmp_path)
    assert line.startswith("NOT EQUAL: 2 of 3 outputs differ from those kept in ")
    assert (line.endswith(": two.txt, new.txt"), code) == (True, 1)


def test_the_page_quotes_what_the_verb_says() -> None:
    """Every line of the page's first transcript stands in the kept output."""
    page = (Path(__file__).parent.parent / "docs" / "incident.md").read_text()
    transcript = page.split("$ custody exposures refused-walks-on.jsonl\n")[1].split("```")[0]
    kept = (GOLDEN / "refused-walks-on.exposures.txt").read_text().splitlines()
    lines = transcript.splitlines()
    assert lines
    assert [line for line in lines if line not in kept] == []
