"""Figures about endings: how fast memory comes home, what a crash costs, what cancelling costs.

`python -m tests.faults.figures [--json FILE] [--only NAME ...] [--quick]`; the exit code is 1 when
a figure misses its target.

Owns: what is measured, and how a figure is formed of requests and logs.
Must not know: single faults of the matrix.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from lifecycle.events import Aborted, Drained, Quarantined, Released, Reserved
from tests.faults.bench import ENGINES, Bench
from tests.faults.kept import keep
from tests.faults.load import NS, Done, Load, Shape, answers_doubted, rate
from tests.process_harness import tiny_model

CLIENTS = 32
USEFUL_TARGET = 0.9
SLOWER = 1.5
"""A request that takes this many times the longest of before the crash is not yet normal."""


@attrs.frozen
class Sizes:
    """How much is asked."""

    cancels: int = 400
    before: int = 64
    after: int = 128
    rounds: int = 5
    round_requests: int = 160


QUICK = Sizes(cancels=40, before=32, after=40, rounds=1, round_requests=40)


# --- from a cancel to the last release ------------------------------------------------------------


def cancels(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    """Seconds from a client's cancel to the last release, by whether writes were in flight.

    The clocks are the client's and the log's, of one machine.
    """
    shape = Shape(prompt_tokens=600, new_tokens=64, cancelled_share=1.0, cancel_seconds_max=0.4)
    with Load(bench, 4, shape, seed=1) as load:
        load.wait(sizes.cancels, seconds=600)
    bench.wait_settled()
    times: dict[str, list[float]] = {"with_writes_in_flight": [], "without": []}
    left = [one for one in load.done if one.cancelled_wall_ns and one.asking.request]
    for one in left:
        entries = [stored.entry for stored in bench.client.request_log(one.asking.request)]
        at = next((n for n, e in enumerate(entries) if isinstance(e.event, Aborted)), None)
        if at is None:
            continue
        granted = {
            (e.event.grant, party)
            for e in entries[:at]
            if isinstance(e.event, Reserved)
            for party in e.event.parties
        }
        drained = {
            (e.event.grant, e.event.party) for e in entries[:at] if isinstance(e.event, Drained)
        }
        kind = "with_writes_in_flight" if granted - drained else "without"
        ends = [e.time_ns for e in entries if isinstance(e.event, Released | Quarantined)]
        if ends:
            times[kind].append(max(0.0, (max(ends) - one.cancelled_wall_ns) / NS))
    doubts = answers_doubted(bench, load.done, references=20)
    return {
        **{kind: _spread(values) for kind, values in times.items()},
        "requests": len(load.done),
        "answers_doubted": len(doubts),
        "doubts": doubts[:5],
        "passes": not doubts,
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median_ms": round(1000 * statistics.median(ordered), 1),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
        "longest_ms": round(1000 * ordered[-1], 1),
    }


# --- kill -9 under load ---------------------------------------------------------------------------


def crashes(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    """Each kind of part killed under load and started again at once, as a supervisor does."""
    out = {part: _crash(bench, part, sizes) for part in (*ENGINES[:2], "scheduler")}
    return {**out, "passes": all(one["untruthful"] == 0 for one in out.values())}


def _crash(bench: Bench, part: str, sizes: Sizes) -> dict[str, Any]:
    seed = sum(map(ord, part))
    with Load(bench, CLIENTS, Shape(), seed=seed) as load:
        load.wait(sizes.before)
        killed_ns = time.monotonic_ns()
        bench.children[part].kill()
        if part == "scheduler":
            bench.start_scheduler()
        else:
            bench.start_engines(part)
        load.wait(sizes.after)
    bench.wait_settled()
    before = [d for d in load.done if d.asking.answered_ns < killed_ns]
    after = [d for d in load.done if d.asking.answered_ns >= killed_ns]
    longest = SLOWER * max(d.seconds for d in before)
    odd = [d for d in after if d.status != "OK" or d.seconds > longest]
    doubts = answers_doubted(bench, load.done, references=40)
    return {
        "requests": len(load.done),
        "open_at_the_kill": CLIENTS,
        "untruthful": len(doubts),
        "doubts": doubts[:5],
        "refused_or_broken": sum(d.status != "OK" for d in after),
        "normal_after_seconds": round(
            max((d.asking.answered_ns - killed_ns for d in odd), default=0) / NS, 2
        ),
        "longest_before_seconds": round(longest / SLOWER, 2),
    }


# --- what cancelling costs ------------------------------------------------------------------------


def useful(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    """Tokens of whole answers a second: a tenth cancelled at random moments, against none.

    Rounds take turns; the ratio is formed of neighbours.
    """
    ratios: list[float] = []
    for number in range(sizes.rounds):
        none = _round(bench, 0.0, sizes, seed=2 * number)
        some = _round(bench, 0.1, sizes, seed=2 * number + 1)
        ratios.append(some / none)
    middle = statistics.median(ratios)
    return {
        "ratio": round(middle, 3),
        "ratios": [round(one, 3) for one in ratios],
        "target": USEFUL_TARGET,
        "passes": middle >= USEFUL_TARGET,
    }


def _round(bench: Bench, share: float, sizes: Sizes, *, seed: int) -> float:
    shape = Shape(cancelled_share=share, cancel_seconds_max=2.0)
    with Load(bench, 16, shape, seed=100 + seed) as load:
        load.wait(32)
        begun_ns = time.monotonic_ns()
        load.wait(sizes.round_requests)
        ended_ns = time.monotonic_ns()

    def whole(one: Done) -> int:
        return len(one.asking.tokens) if one.status == "OK" else 0

    bench.wait_settled()
    return rate(load.done, begun_ns, ended_ns, whole)


FIGURES: dict[str, Callable[[Bench, Sizes], dict[str, Any]]] = {
    "cancels": cancels,
    "crashes": crashes,
    "useful": useful,
}


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.figures")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--only", action="append", choices=tuple(FIGURES))
    parser.add_argument("--quick", action="store_true", help="few requests: shows that it runs")
    asked = parser.parse_args()
    sizes = QUICK if asked.quick else Sizes()
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="custody-figures-") as name:
        model = tiny_model(Path(name))
        with Bench(Path(name) / "bench", model, plane="shared-memory") as bench:
            for figure in asked.only or FIGURES:
                out[figure] = FIGURES[figure](bench, sizes)
                print(f"{figure}: {json.dumps(out[figure])}", flush=True)
    if asked.json is not None:
        keep(asked.json, "figures", out)
    return 0 if all(figure["passes"] for figure in out.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
