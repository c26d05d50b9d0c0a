"""Whole deployments of the real shells on a virtual clock: clean, reproducible, and able to fail."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from engine.effects import Publish
from engine.log_changes import changed, edited_base, renumbered
from engine.scenarios import ONE
from lifecycle.events import (
    Aborted,
    ByScheduler,
    Cause,
    Drained,
    Entry,
    Lost,
    LostCause,
    Proof,
    Reserved,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, Party
from lifecycle.replay import replay
from lifecycle.rules import RULES
from property_tests.mutants import BY_NAME
from property_tests.mutants_decode import KeepsOne, OneByOne
from tests.handmade import DECODE
from transport import cli, simulate_search
from transport.client_desk import ClientDesk
from transport.fleet_streams import Ahead, FleetStreams, Held, Link
from transport.journal import Journal
from transport.scheduler_owner import SchedulerOwner
from transport.simulate_search import Outcome, run_plan
from transport.simulated_control import MILLISECOND
from transport.simulated_engine import Parts
from transport.simulated_faults import KINDS, Fault, Plan, draw_plan
from transport.simulated_wires import Weather
from transport.simulated_world import STORMS

RUNS = 40
"""Seeds that the fast claims look at; `custody fuzz --simulate` goes on from there."""

KEPT = (0, 16, 18, 60, 63, 81, 155, 160, 3016523, 4024731)
"""Seeds that once found something, in the simulation's own parts or in what it runs."""

RARE = (43, 378)
"""Seeds in which a receiver refuses a piece, and a write lands after its writer's end."""

DIGESTS = """
from transport.simulate_search import run_plan
from transport.simulated_faults import draw_plan
for seed in (3, 9, 11, 16, 26):
    print(seed, run_plan(draw_plan(seed)).digest())
"""


@cache
def run_seed(seed: int) -> Outcome:
    """One run, made once for all the claims about it."""
    return run_plan(draw_plan(seed))


@pytest.mark.parametrize("seed", sorted({*range(RUNS), *KEPT}))
def test_a_run_ends_clean(seed: int) -> None:
    """Whatever the faults were: every request closes, every page is home or has a cause.

    No client sees a token that is not its own, no answer is forgotten, and the log replays clean.
    """
    outcome = run_seed(seed)
    assert (outcome.name, outcome.message) == ("", "")
    assert replay((one.position, one.entry) for one in outcome.log).clean


def test_the_runs_reach_what_is_dangerous() -> None:
    """Silence of a search that was nowhere says nothing: every fault came, and its consequences."""
    reached: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for seed in (*range(RUNS), *RARE):
        outcome = run_seed(seed)
        reached += outcome.sometimes
        events.update(type(one.entry.event).__name__ for one in outcome.log)
    assert set(KINDS) <= set(reached)
    wanted = {"engine-ended", "scheduler-died", "client-finished", "client-gone", "client-broken"}
    assert wanted <= set(reached)
    landings = {"landed-after-death", "landed-in-doubt", "refused-by-the-receiver"}
    reports = {"lied", "doubted", "torn", "corrupted", "pages-left-in-quarantine", "began-again"}
    assert landings | reports <= set(reached)
    assert {"Requeued", "Quarantined", "Aborted", "Lost", "Resumed", "Dropped"} <= set(events)


def test_without_faults_every_answer_is_whole() -> None:
    """Nobody is refused, aborted or cut short in a run in which nothing goes wrong."""
    for seed in range(12):
        outcome = run_plan(draw_plan(seed, faults=False))
        assert (outcome.name, outcome.message) == ("", "")
        ends = {name for name in outcome.sometimes if name.startswith("client-")}
        assert ends <= {"client-finished", "client-REQUEST_ID_REUSED"}


@pytest.mark.process
def test_the_same_seed_gives_the_same_bytes_under_any_hash_seed() -> None:
    """Two processes whose sets and dictionaries hash differently write the same logs."""
    said = []
    for hash_seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout)
    assert said[0] == said[1]
    assert said[0].count("\n") == 5


def test_another_seed_gives_another_run() -> None:
    """The seed is not merely printed."""
    assert run_seed(3).digest() != run_seed(9).digest()


def given_up(seed: int, *, placing: bool) -> Plan:
    """A plan in which a writer is cut off, or hangs, for longer than its lease."""
    plan = attrs.evolve(draw_plan(seed, faults=False), placing=placing, observed=0.0)
    kinds = ("hang", "part")
    times = range(300 * MILLISECOND, plan.heals_ns, 500 * MILLISECOND)
    faults = tuple(
        Fault(time, kinds[n % 2], "p0", 2_500 * MILLISECOND) for n, time in enumerate(times)
    )
    return attrs.evolve(plan, faults=faults, wire_ns=50 * MILLISECOND)


@pytest.mark.parametrize("placing", [False, True])
def test_who_was_given_up_begins_another_life_and_leaves_nothing_behind(*, placing: bool) -> None:
    """Its process never ends, so only its own word brings home what it could write.

    Where writers place bytes no fence and no exit could prove it: without the word, pages stay out.
    """
    reached: Counter[str] = Counter()
    proofs: Counter[tuple[Proof, bool]] = Counter()
    for seed in range(6):
        outcome = run_plan(given_up(seed, placing=placing))
        assert (outcome.name, outcome.message) == ("", "")
        reached += outcome.sometimes
        lost: set[tuple[str, int]] = set()
        for entry in (one.entry for one in outcome.log):
            if isinstance(entry.event, Lost):
                lost.add((entry.event.engine, entry.event.incarnation))
            elif isinstance(entry.event, Drained):
                party = entry.event.party
                proofs[entry.event.proof, (party.engine, party.incarnation) in lost] += 1
    assert reached["began-again"] >= 6
    assert reached["engine-ended"] == 0
    assert proofs[Proof.FENCED if placing else Proof.ACKNOWLEDGED, True] > 0
    assert reached["pages-left-in-quarantine"] == 0


def echoing(seed: int, *, placing: bool) -> Plan:
    """A plan in which every write lands once more after its end; some clients give up early."""
    plan = attrs.evolve(draw_plan(seed, faults=False), placing=placing)
    wishes = tuple(
        attrs.evolve(wish, leaves_ns=wish.comes_ns + 50 * MILLISECOND) if number % 3 == 0 else wish
        for number, wish in enumerate(plan.wishes)
    )
    return attrs.evolve(plan, wishes=wishes, faults=(Fault(1, "lie", "p0", plan.heals_ns),))


@pytest.mark.parametrize("placing", [False, True])
def test_a_writer_caught_after_its_drained_is_lost(
    monkeypatch: pytest.MonkeyPatch, *, placing: bool
) -> None:
    """The header of somebody's page shows the tag, the tag shows whom it let in, and its life ends.

    A receiver that places bytes refuses such a write, so nobody is caught there, and nobody harmed.
    """
    monkeypatch.setitem(STORMS, "lie", Weather(echo=1.0))
    reached: Counter[str] = Counter()
    caught = 0
    for seed in (2, 6, 7, 8):
        outcome = run_plan(echoing(seed, placing=placing))
        assert (outcome.name, outcome.message) == ("", "")
        reached += outcome.sometimes
        writers: dict[int, Party] = {}
        met: set[tuple[str, int]] = set()
        for entry in (one.entry for one in outcome.log):
            match entry.event:
                case Reserved(tag=tag, parties=(party,)):
                    writers[tag] = party
                case Aborted(cause=Cause.ISOLATION_VIOLATION, tag_found=tag) if tag in writers:
                    met.add((writers[tag].engine, writers[tag].incarnation))
                case Lost(engine, incarnation, LostCause.RULE_BROKEN):
                    assert (engine, incarnation) in met
                    caught += 1
                case _:
                    pass
    if placing:
        assert (caught, reached["landed-again"]) == (0, 0)
        assert reached["refused-by-the-receiver"] > 0
        return
    assert caught >= 4
    # Its word is no proof any more, so its process has to end.
    assert reached["engine-ended"] == caught
    assert reached["began-again"] == 0


# --- logs with one change ---------------------------------------------------------------------


def first_rule(entries: list[tuple[int, Entry]], *, numbered: bool) -> str:
    """The rule that the log breaks first; `numbered` hides the gap that a change left."""
    history = History()
    for _, entry in entries:
        violation = history.apply(renumbered(history, entry) if numbered else entry)
        if violation is not None:
            return violation.rule
    return ""


def test_a_changed_log_turns_red_by_every_rule() -> None:
    """One change in a log of a run is refused, and for each rule a change that it refuses."""
    logs = [[(one.position, one.entry) for one in run_seed(seed).log] for seed in range(RUNS)]
    small = [log for log in logs if 20 < len(log) < 400]
    chance, seen = random.Random(1), set[str]()
    for _ in range(12_000):
        log = chance.choice(small)
        change = edited_base if chance.random() < 0.2 else changed
        seen.add(first_rule(change(log, chance), numbered=chance.random() < 0.9))
        if set(RULES) <= seen:
            return
    assert set(RULES) - seen == set()


# --- mutants ----------------------------------------------------------------------------------


def find(parts: Parts, *, seeds: range) -> Outcome:
    """The first run that finds something."""
    for seed in seeds:
        outcome = run_plan(draw_plan(seed), parts)
        if outcome.name:
            return outcome
    raise AssertionError(f"{len(seeds)} runs found nothing")


def parts_of(name: str) -> Parts:
    """A registered mutant's cores, without the guards that would stop it."""
    scenario = BY_NAME[name].put_into(ONE)
    return Parts(scenario.scheduler, scenario.prefill, scenario.decode)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("wrong-field", {"replay", "sequencer"}),
        ("short-handoff", {"replay", "sequencer"}),
        ("free-on-abort", {"replay", "sequencer", "late-write"}),
        ("retire-owner", {"replay", "sequencer"}),
        ("aborted-requeued", {"never-quiet"}),
        ("silent-reject", {"never-quiet"}),
    ],
)
def test_a_mutant_of_the_cores_is_found(name: str, names: set[str]) -> None:
    """Known defects, put into the decision code, show in whole deployments too."""
    assert find(parts_of(name), seeds=range(40)).name in names


def test_a_harmless_change_stays_green() -> None:
    """A run finds nothing in decision code that is merely slower."""
    for seed in range(8):
        outcome = run_plan(draw_plan(seed), Parts(decode=OneByOne))
        assert (outcome.name, outcome.message) == ("", "")


def test_a_page_that_nobody_asked_for_is_found_in_every_run() -> None:
    """The canary: an engine that keeps a page for itself never passes."""
    for seed in range(3):
        assert run_plan(draw_plan(seed), Parts(decode=KeepsOne)).name == "conservation"


def changed_method(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, body: Callable[..., Any]
) -> None:
    """Put a defect into a part of the shells."""
    monkeypatch.setattr(owner, name, body)


def crashing(seed: int) -> Plan:
    """A plan whose disk is slow and whose machine dies again and again: what waits for it shows."""
    plan = draw_plan(seed, faults=False)
    slow = Fault(50 * MILLISECOND, "disk-slow", "p0", 10_000 * MILLISECOND)
    times = range(300 * MILLISECOND, plan.heals_ns, 150 * MILLISECOND)
    crashes = (Fault(time, "machine-crash", "p0", 50 * MILLISECOND) for time in times)
    return attrs.evolve(plan, faults=(slow, *crashes))


def test_what_waits_for_the_disk_survives_every_crash() -> None:
    """The product finds nothing there, in which each of the two defects below is found."""
    for seed in range(6):
        outcome = run_plan(crashing(seed))
        assert (outcome.name, outcome.message) == ("", "")


@pytest.mark.parametrize("seed", [13, 14, 15])
@pytest.mark.parametrize("early_ns", range(0, 3 * MILLISECOND + 1, MILLISECOND // 2))
def test_a_stream_that_breaks_as_the_disk_takes_again_leaves_no_gap(
    seed: int, early_ns: int
) -> None:
    """What waited for a full disk is sent and lost with the stream, and what overtook it was not.

    The engine has taken in the later position alone, and is shown the earlier ones all the same.
    """
    plan = draw_plan(seed, faults=False)
    full = Fault(180 * MILLISECOND, "disk-full", "d0", 60 * MILLISECOND)
    # The scheduler tries again every 50 ms, and so at 250.
    cut = Fault(250 * MILLISECOND - early_ns, "break", "p0", 1)
    wishes = tuple(
        attrs.evolve(
            wish, comes_ns=(100 + 7 * number) * MILLISECOND, new_tokens=max(8, wish.new_tokens)
        )
        for number, wish in enumerate(plan.wishes)
    )
    outcome = run_plan(
        attrs.evolve(plan, wishes=wishes, faults=(full, cut), pass_ns=2 * MILLISECOND)
    )
    assert (outcome.name, outcome.message) == ("", "")


def test_only_a_higher_position_proves_that_nothing_is_lacking() -> None:
    """A rank that was shown 77 before 74 and says 77 may lack 74; one that says 78 does not."""
    streams = FleetStreams(cast("SchedulerOwner", None), on_gone=lambda _party: None)
    streams.ahead[DECODE] = Ahead(74, 77)
    assert [streams.cursor(DECODE, position) for position in (60, 76, 77)] == [60, 73, 73]
    assert streams.cursor(DECODE, 78) == 78
    assert streams.cursor(DECODE, 77) == 77


def test_a_rank_that_was_shown_less_ahead_the_second_time_may_still_lack_it() -> None:
    """Shown 80 before 74 and then, on its next stream, only 78: one that says 80 may lack 74."""
    streams = FleetStreams(cast("SchedulerOwner", None), on_gone=lambda _party: None)
    link = Link(party=DECODE, live=True)
    link.held.append(Held(74, 74, ()))
    lost = Entry(FLEET, 0, 0, ByScheduler(1), 1, Lost(DECODE.engine, 1, LostCause.LEASE))
    for position in (78, 80, 78):
        streams._note_ahead(link, Publish(DECODE, position, lost, None, 0))
    assert [streams.cursor(DECODE, position) for position in (79, 80)] == [73, 73]
    assert streams.cursor(DECODE, 81) == 81


def test_entries_shown_before_they_are_durable_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that waits for no disk lets engines act on what the log then forgets."""
    real = FleetStreams._hold

    def hold(
        self: FleetStreams, link: Link, at: int, _durable: int, *items: Any, **how: Any
    ) -> None:
        real(self, link, at, 0, *items, **how)

    changed_method(monkeypatch, FleetStreams, "_hold", hold)
    assert {run_plan(crashing(seed)).name for seed in range(6)} - {""}


def test_an_answer_told_before_it_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was told a success which the log forgot is noticed at the end."""
    changed_method(monkeypatch, ClientDesk, "release", told_at_once(ClientDesk.release))
    assert "answer-before-durable" in {run_plan(crashing(seed)).name for seed in range(6)}


def told_at_once(real: Callable[[ClientDesk], None]) -> Callable[[ClientDesk], None]:
    """Release outcomes as if everything that is appended were durable."""

    def release(self: ClientDesk) -> None:
        journal: Journal = self.owner.journal
        durable, journal.durable = journal.durable, journal.appended
        try:
            real(self)
        finally:
            journal.durable = durable

    return release


# --- the command ------------------------------------------------------------------------------


def test_the_command_prints_its_seed_and_how_much_it_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A clean search exits 0; the same seed does the same."""
    counts = []
    for _ in range(2):
        assert cli.run(["fuzz", "--simulate", "--seed=3", "--runs=3", "--json"]) == 0
        value = json.loads(capsys.readouterr().out)
        counts.append((value["seed"], value["runs"], value["requests"], value["entries"]))
    assert counts[0] == counts[1]
    assert counts[0][:2] == (3, 3)
    assert cli.run(["fuzz", "--simulate", "--seed=3", "--runs=1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("seed 3: 1 run, ")
    assert said.endswith("nothing found\n")
    for other in ("--exhaustive", "--junit=report.xml", "--corpus=kept"):
        assert cli.run(["fuzz", "--simulate", other]) == 2


@pytest.mark.slow
def test_a_finding_is_reduced_and_its_log_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was found is printed with what is left of its plan, and exits 1."""
    monkeypatch.chdir(tmp_path)
    changed_method(monkeypatch, ClientDesk, "release", told_at_once(ClientDesk.release))
    monkeypatch.setattr(simulate_search, "draw_plan", crashing)
    assert cli.run(["fuzz", "--simulate", "--seed=2", "--runs=1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("answer-before-durable: ")
    assert "again:  custody fuzz --simulate --seed 2 --runs 1" in said
    assert (tmp_path / "fuzz-findings" / "simulated-2.jsonl").is_file()
    assert said.count("fault: ") < len(crashing(2).faults)
