"""The verb that replays a real request trace on a virtual clock: `simulate`.

Owns: its flags, what is printed, and the exit code.
Must not know: how a trace is read or a cluster simulated.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lifecycle.wording import counted
from transport.commands_shared import (
    EXIT_FAILED,
    EXIT_OK,
    Json,
    UsageError,
    note,
    say,
    say_json,
)
from transport.progress import Searching, Waiting, on_terminal

if TYPE_CHECKING:
    from engine.simulator_report import Spread, Summary
    from engine.simulator_values import Cluster
    from transport.simulate_search import Outcome, Report

Preset = Literal[
    "incident-8k",
    "incident-64k",
    "incident-128k",
    "incident-192k",
    "sound-8k",
    "sound-64k",
    "sound-128k",
    "sound-192k",
]


def simulate(
    *,
    trace: Path,
    preset: Preset,
    requests: int | None = None,
    rate: float = 1.0,
    prefill_engines: int | None = None,
    decode_engines: int | None = None,
    first_token_goal: float = 30.0,
    token_goal: float = 0.1,
    log: Path | None = None,
    json: Json = False,
) -> int:
    """Replay a real request trace through the real decision code, on a virtual clock.

    Exits 0 when nothing was wrong, 5 when the trace cannot be read, and 1 when a request read what
    was not its own, when a rejected one went on, when pages stayed behind, or when the log broke a
    rule.

    Parameters
    ----------
    trace
        A Mooncake (JSON Lines) or Azure (CSV) trace: a path, or a name in the folder that
        CUSTODY_TRACES names.
    preset
        The cluster: incident-* offers a context that its prefill pool cannot hold, sound-* does
        not.
    requests
        Replay only so many requests, the first ones.
    rate
        Let them come so many times as fast.
    prefill_engines
        How many prefill engines; the preset's if absent.
    decode_engines
        How many decode engines; the preset's if absent.
    first_token_goal
        Seconds to the first token within which an answer counts as good.
    token_goal
        Seconds for each further token within which an answer counts as good.
    log
        Write the log there as JSON Lines, for `custody replay`.
    json
        Print one JSON document.
    """
    from engine.simulator_presets import PRESETS

    cluster = _cluster(PRESETS[preset], prefill_engines, decode_engines)
    _check(requests, rate, first_token_goal, token_goal)
    from transport.simulate_run import Replayed, replay_trace
    from transport.simulate_traces import find_trace

    found = find_trace(trace)
    with Waiting(f"simulating {found}", shown=on_terminal() and not json):
        replayed: Replayed = replay_trace(
            found,
            cluster,
            limit=requests,
            rate=rate,
            goals_s=(first_token_goal, token_goal),
            log=log,
            clock=time.process_time,
        )
    if replayed.found:
        note(f"custody: {replayed.found}")
    if replayed.summary is not None:
        value = _value(preset, cluster, replayed.summary)
        value["cpu_s"] = round(replayed.cpu_s, 3)
        value["requests_per_cpu_s"] = round(replayed.requests_per_cpu_s, 1)
        if json:
            say_json(value)
        else:
            _print(preset, cluster, replayed.summary)
            say(
                f"{replayed.cpu_s:.1f} CPU seconds, "
                f"{replayed.requests_per_cpu_s:.0f} requests a CPU second"
            )
    bad = replayed.found or (replayed.summary is not None and replayed.summary.handed_off)
    return EXIT_FAILED if bad else EXIT_OK


def _cluster(cluster: Cluster, prefill: int | None, decode: int | None) -> Cluster:
    import attrs

    for flag, value in (("prefill-engines", prefill), ("decode-engines", decode)):
        if value is not None and not 1 <= value <= 64:
            raise UsageError(f"--{flag} {value}: 1 to 64 are simulated")
    return attrs.evolve(
        cluster,
        prefill_engines=prefill or cluster.prefill_engines,
        decode_engines=decode or cluster.decode_engines,
    )


def _check(requests: int | None, rate: float, *goals: float) -> None:
    if requests is not None and requests < 1:
        raise UsageError(f"--requests {requests}: must be at least 1")
    for flag, value in zip(("rate", "first-token-goal", "token-goal"), (rate, *goals), strict=True):
        if not 0 < value < float("inf"):
            raise UsageError(f"--{flag} {value}: must be above 0")


# --- printing ---------------------------------------------------------------------------------


def _value(preset: str, cluster: Cluster, summary: Summary) -> dict[str, Any]:
    import attrs

    value: dict[str, Any] = {
        "preset": preset,
        "context_tokens": cluster.context_tokens,
        "prefill_pool_tokens": cluster.prefill_pool_tokens,
        "decode_pool_tokens": cluster.decode_pool_tokens,
        **attrs.asdict(summary),
        "goodput_per_s": summary.goodput_per_s,
    }
    return value


def _print(preset: str, cluster: Cluster, summary: Summary) -> None:
    say(
        f"{preset}: context {cluster.context_tokens:,}, "
        f"{cluster.prefill_engines} prefill of "
        f"{counted(cluster.prefill_pool_tokens, 'token', ',')}, "
        f"{cluster.decode_engines} decode of {cluster.decode_pool_tokens:,}"
    )
    say(
        f"{counted(summary.requests, 'request', ',')} in {summary.virtual_s:,.1f} virtual seconds: "
        f"{summary.finished:,} finished with {counted(summary.tokens, 'token', ',')}, "
        f"{sum(summary.rejected.values()):,} rejected, {sum(summary.aborted.values()):,} aborted, "
        f"{summary.requeued:,} requeued"
    )
    for code, number in summary.rejected.items():
        say(f"  rejected {code}: {number:,}")
    for cause, number in summary.aborted.items():
        say(f"  aborted {cause}: {number:,}")
    say(f"  rejected and went on: {summary.handed_off}")
    say(f"  pages compared: {summary.pages_compared:,}, foreign: {summary.foreign_reads}")
    say(f"  rules evaluated: {summary.rules_evaluated:,}")
    say("seconds                   median        90 %        99 %       count")
    rows = {"to the first token": summary.first_token_s, "for each token": summary.token_s}
    rows |= {f"{purpose} pages held": spread for purpose, spread in summary.held_s.items()}
    for name, spread in rows.items():
        say(_row(name, spread))
    say(
        f"goodput: {summary.goodput_per_s:.3f} requests a second within both goals "
        f"({summary.good:,} of {summary.requests:,})"
    )


def _row(name: str, spread: Spread) -> str:
    return (
        f"  {name:<22}{spread.median:>10.4f}  {spread.p90:>10.4f}  {spread.p99:>10.4f}  "
        f"{spread.count:>10,}"
    )


# --- searching --------------------------------------------------------------------------------


def fuzz_simulated(
    seed: int, *, seconds: float | None, runs: int | None, jobs: int, json: bool
) -> int:
    """Run simulated deployments from that seed on; exits 0 nothing, 1 found."""
    from transport.simulate_search import reduce_plan, search

    with Searching(f"seed {seed}", shown=not json) as searching:

        def told(so_far: Report) -> None:
            runs, requests = counted(so_far.runs, "run"), counted(so_far.requests, "request", ",")
            searching.say(f"seed {seed}: {runs}, {requests}")

        report = search(seed, runs=runs, seconds=seconds, jobs=jobs, progress=told)
        if report.found is not None:
            searching.say(f"reducing what was found with seed {report.found.plan.seed}")
        small = None if report.found is None else reduce_plan(report.found)
    if json:
        say_json(_search_value(report, small))
        return EXIT_OK if small is None else EXIT_FAILED
    if small is not None:
        say(f"{small.name}: {small.message}")
        if small.rule:
            say(f"rule: {small.rule}")
        for fault in small.plan.faults:
            say(
                f"fault: {fault.kind} {fault.target} at {fault.time_ns / 1e9:.4f} s "
                f"for {fault.length_ns / 1e9:.4f} s"
            )
        say(f"clients: {', '.join(str(wish.number) for wish in small.plan.wishes)}")
        say(f"again:  custody fuzz --simulate --seed {small.plan.seed} --runs 1")
        say(f"file:   {_write_log(small)}")
    say(
        f"seed {seed}: {counted(report.runs, 'run')}, {counted(report.requests, 'request', ',')}, "
        f"{counted(report.entries, 'log entry', ',')}, {report.virtual_s:,.0f} virtual seconds, "
        f"{report.cpu_s:.1f} CPU seconds, {report.requests_per_cpu_s:.0f} requests a CPU second"
    )
    say("found" if small is not None else "nothing found")
    return EXIT_OK if small is None else EXIT_FAILED


def _write_log(small: Outcome) -> Path:
    folder = Path("fuzz-findings")
    folder.mkdir(exist_ok=True)
    path = folder / f"simulated-{small.plan.seed}.jsonl"
    path.write_text(small.text(), encoding="utf-8")
    return path


def _search_value(report: Report, small: Outcome | None) -> dict[str, Any]:
    import attrs

    value: dict[str, Any] = {
        "seed": report.seed,
        "runs": report.runs,
        "requests": report.requests,
        "entries": report.entries,
        "virtual_s": round(report.virtual_s, 3),
        "cpu_s": round(report.cpu_s, 3),
        "requests_per_cpu_s": round(report.requests_per_cpu_s, 1),
        "reached": dict(sorted(report.sometimes.items())),
        "found": None,
    }
    if small is not None:
        value["found"] = {
            "seed": small.plan.seed,
            "name": small.name,
            "message": small.message,
            "rule": small.rule,
            "faults": [attrs.asdict(fault) for fault in small.plan.faults],
            "clients": [wish.number for wish in small.plan.wishes],
            "log": str(_write_log(small)),
        }
    return value
