"""The verb that searches: `fuzz`.

Owns: its flags, what is printed in which order, and the exit code.
Must not know: how anything is searched, reduced or replayed.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from lifecycle.wording import counted
from transport.commands_shared import (
    EXIT_FAILED,
    EXIT_OK,
    Json,
    Switch,
    UsageError,
    note,
    say,
    say_json,
)
from transport.progress import Searching, on_terminal

if TYPE_CHECKING:
    from engine.exhaust import Exhausted
    from transport.fuzz_report import Case
    from transport.fuzz_values import Finding, Report

Profile = Literal["quick", "ci", "nightly"]
SEED_BITS = 32


def fuzz(
    *names: Annotated[str, Parameter(name="MUTANT")],
    seed: int | None = None,
    seconds: float | None = None,
    runs: int | None = None,
    jobs: int = 1,
    profile: Profile | None = None,
    mutants: Switch = False,
    trials: int = 20,
    exhaustive: Switch = False,
    simulate: Switch = False,
    replay: Path | None = None,
    corpus: Path | None = None,
    adapter: str = "",
    junit: Path | None = None,
    json: Json = False,
) -> int:
    """Search small worlds of the real decision code for a broken rule; exits 0 nothing, 1 found.

    Parameters
    ----------
    names
        With --mutants: only these.
    seed
        The first run's seed; each run has the next one. Drawn and printed if absent.
    seconds
        When to stop; the profile's if absent.
    runs
        How many runs, or, with --mutants, most runs of one trial.
    jobs
        Processes that share the work.
    profile
        quick takes 10 seconds, ci 60, nightly an hour; quick if nothing says when to stop.
    mutants
        Hunt the known defects, each of which must be found; needs a checkout.
    trials
        With --mutants: from how many seeds each is hunted.
    exhaustive
        Visit every state of some smaller worlds instead.
    simulate
        Run whole deployments of the real shells on a virtual clock, under faults, instead.
    replay
        Replay this trace, as `custody replay` does.
    corpus
        Folder of traces, which is made if absent: all in it are replayed first, and what is found
        or reached anew is added.
        With --mutants: the shortest trace of each is written there under its name.
    adapter
        Search somebody else's engine, named as module:factory.
    junit
        Also write a JUnit report to this file.
    json
        Print one JSON document.
    """
    _check(names, seconds, runs, jobs, trials, mutants=mutants)
    if sum((mutants, exhaustive, simulate, replay is not None, bool(adapter))) > 1:
        raise UsageError("only one of --mutants, --exhaustive, --simulate, --replay and --adapter")
    if corpus is not None and corpus.exists() and not corpus.is_dir():
        raise UsageError(f"--corpus {corpus}: is no folder")
    if replay is not None:
        from transport.fuzz_replay import replay_trace

        return replay_trace(replay, json=json)
    first = secrets.randbits(SEED_BITS) if seed is None else seed
    if mutants:
        return _hunt(names, trials, seed or 0, runs, jobs, corpus, junit, json=json)
    if exhaustive:
        return _exhaust(corpus, junit, json=json)
    from transport.fuzz_values import PROFILES, Settings

    if seconds is None and runs is None:
        seconds = PROFILES[profile or "quick"]
    if simulate:
        from transport.commands_simulate import fuzz_simulated

        if corpus is not None or junit is not None:
            raise UsageError("--simulate keeps no corpus and writes no JUnit report")
        return fuzz_simulated(first, seconds=seconds, runs=runs, jobs=jobs, json=json)
    settings = Settings(first, seconds, runs, jobs, adapter)
    return _search(settings, corpus, junit, json=json)


def _check(
    names: tuple[str, ...],
    seconds: float | None,
    runs: int | None,
    jobs: int,
    trials: int,
    *,
    mutants: bool,
) -> None:
    if names and not mutants:
        raise UsageError(f"{names[0]}: names are those of mutants, after --mutants")
    if seconds is not None and not seconds > 0:
        raise UsageError(f"--seconds {seconds}: must be above 0")
    for flag, value in (("runs", runs), ("jobs", jobs), ("trials", trials)):
        if value is not None and value < 1:
            raise UsageError(f"--{flag} {value}: must be at least 1")


# --- random -----------------------------------------------------------------------------------


def _search(settings: Any, corpus: Path | None, junit: Path | None, *, json: bool) -> int:
    from transport.fuzz_corpus import Corpus
    from transport.fuzz_report import report_object, summary
    from transport.fuzz_search import search

    kept = Corpus(corpus)
    with Searching("replaying the corpus", shown=not json) as searching:
        broken = kept.replay()
        searching.say(f"seed {settings.seed}")
        report = search(
            settings,
            known=kept.features,
            progress=lambda so_far: searching.say(summary(so_far)),
        )
    paths = kept.add(report)
    if junit is not None:
        from transport.fuzz_report import write_junit

        write_junit(junit, _cases(report, broken))
    if json:
        value = report_object(report, paths)
        value["corpus"] = {
            "replayed": kept.replayed,
            "kept": kept.kept,
            "broken": [{"file": str(path), "verdict": said} for path, said in broken],
        }
        say_json(value)
    else:
        for path, said in broken:
            say(f"{path}: {said}")
            say(f"replay: custody replay {path}")
        if report.finding is not None:
            _print_finding(report.finding, paths)
        say(summary(report))
        if corpus is not None:
            say(f"corpus {corpus}: {kept.replayed} replayed, {kept.kept} added")
        say("found" if broken or report.finding is not None else "nothing found")
    return EXIT_FAILED if broken or report.finding is not None else EXIT_OK


def _print_finding(finding: Finding, paths: list[Path]) -> None:
    from transport.fuzz_replay import replay_file
    from transport.fuzz_report import by_itself, finding_sentence, rule_lines, table_lines

    say(finding_sentence(finding))
    for line in table_lines(replay_file(finding.small)):
        say(line)
    if extra := by_itself(finding.small):
        say(extra)
    for line in rule_lines(finding.rule):
        say(line)
    before, after = len(finding.whole.actions), len(finding.small.actions)
    say(
        f"seed {finding.seed} of {finding.where}; {counted(before, 'action')} reduced to {after} "
        f"in {finding.minimise_s:.2f} s"
    )
    say(f"replay: custody replay {paths[0]}")
    again = f" --adapter {finding.small.adapter}" if finding.small.adapter else ""
    say(f"again:  custody fuzz --seed {finding.seed} --runs 1{again}")
    for path in paths:
        say(f"file:   {path}")


def _cases(report: Report, broken: list[tuple[Path, str]]) -> list[Case]:
    from transport.fuzz_report import Case, finding_sentence

    finding = report.finding
    failure = "" if finding is None else finding_sentence(finding)
    details = "" if finding is None else "\n".join(finding.small.actions)
    name = f"walk from seed {report.settings.seed}"
    return [
        *(Case(f"corpus {path.name}", 0.0, said, said) for path, said in broken),
        Case(name, report.wall_s, failure, details),
    ]


# --- exhaustive -------------------------------------------------------------------------------


def _exhaust(corpus: Path | None, junit: Path | None, *, json: bool) -> int:
    from engine.exhaust import exhaust
    from engine.scenarios import SMALL
    from transport.fuzz_report import Case, write_junit

    cases, values = [], []
    findings: list[tuple[Finding, list[Path]]] = []
    for name, scenario in SMALL.items():
        with Searching(f"exhausting: {name}", shown=not json):
            result = exhaust(scenario)
        seconds, said = result.seconds, str(result)
        failure = "" if result.complete or result.found else "more states than allowed"
        if result.found is not None:
            finding, paths = _exhausted(name, result, corpus)
            findings.append((finding, paths))
            failure = f"{result.found}"
        if not json:
            say(f"{name}: {said}{': ' + failure if failure else ', nothing found'}")
        cases.append(Case(name, seconds, failure, said))
        values.append(
            {
                "world": name,
                "states": result.states,
                "depth": result.depth,
                "ends": result.ends,
                "complete": result.complete,
                "seconds": round(seconds, 3),
                "found": failure,
            }
        )
    if junit is not None:
        write_junit(junit, cases)
    if json:
        say_json({"worlds": values})
    for finding, paths in () if json else findings:
        _print_finding(finding, paths)
    return EXIT_FAILED if any(case.failure for case in cases) else EXIT_OK


def _exhausted(name: str, result: Exhausted, corpus: Path | None) -> tuple[Finding, list[Path]]:
    """A nearest finding as a file; there is nothing left to reduce."""
    from engine.scenarios import SMALL
    from engine.trace import Trace, record
    from transport.fuzz_files import FINDINGS, FOUND, write_trace
    from transport.fuzz_values import Finding

    assert result.found is not None
    scenario = SMALL[name]
    trace = Trace(0, scenario, result.trace, calm=True, found=result.found, rule=result.found.rule)
    file = record(trace)
    path = write_trace(corpus or FINDINGS, FOUND, file)
    found = result.found
    finding = Finding(name, 0, found.name, found.message, found.rule, "", file, file)
    return finding, [path]


# --- mutants ----------------------------------------------------------------------------------


def _hunt(
    names: tuple[str, ...],
    trials: int,
    seed: int,
    runs: int | None,
    jobs: int,
    corpus: Path | None,
    junit: Path | None,
    *,
    json: bool,
) -> int:
    from transport.fuzz_files import write_named
    from transport.fuzz_mutants import HEAD, RUNS_MAX, cells, hunts, row_object
    from transport.fuzz_report import Case, write_junit

    rows = []
    with Searching("hunting", shown=not json) as searching:
        for row in hunts(
            names,
            trials=trials,
            seed=seed,
            runs=runs or RUNS_MAX,
            jobs=jobs,
            progress=lambda name: searching.say(f"hunting {name}"),
        ):
            rows.append(row)
            if corpus is not None and row.shortest is not None:
                write_named(corpus, row.name, row.shortest.small)
            if not on_terminal():
                note(f"{row.name}: {row.found} of {len(row.trials)}")
    if json:
        say_json({"seed": seed, "trials": trials, "mutants": [row_object(row) for row in rows]})
    else:
        table = [HEAD, *(cells(row) for row in rows)]
        widths = [max(len(line[at]) for line in table) for at in range(len(HEAD))]
        for line in table:
            say(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(line, widths, strict=True)
                ).rstrip()
            )
        wrong = [row.name for row in rows if not row.good]
        say(f"not as it should be: {', '.join(wrong)}" if wrong else "all as it should be")
    if junit is not None:
        failures = [
            Case(
                f"mutant {row.name}",
                sum(trial.cpu_s for trial in row.trials),
                "" if row.good else f"found in {row.found} of {counted(len(row.trials), 'trial')}",
                ", ".join(row.rules),
            )
            for row in rows
        ]
        write_junit(junit, failures)
    return EXIT_OK if all(row.good for row in rows) else EXIT_FAILED
