"""Run the matrix, or the cells whose name contains a text, and say what came of each.

`python -m tests.faults [--json FILE] [--again] [TEXT ...]`; the exit code is 1 when a cell failed.
With `--again` the kept results of cells that are not run now stay in the file.
A failed cell leaves its deployment in doubt, so the next one gets a new deployment.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from lifecycle.rules import RULES
from tests.faults.bench import Bench
from tests.faults.cell import Cell, Result, all_cells, run_cell
from tests.faults.kept import keep, load
from tests.process_harness import tiny_model


@attrs.define
class Run:
    """What a run of cells has seen."""

    folder: Path
    model: Path
    results: list[Result] = attrs.Factory(list)
    failures: list[tuple[Cell, str]] = attrs.Factory(list)
    benches: int = 0
    rules_shown: set[str] = attrs.Factory(set)

    def run(self, cells: Sequence[Cell]) -> None:
        """Run them in order, each plane's in one deployment for as long as none fails."""
        waiting = list(cells)
        while waiting:
            plane = waiting[0].plane
            self.benches += 1
            done: list[Cell] = []
            try:
                with Bench(self.folder / f"bench-{self.benches}", self.model, plane=plane) as bench:
                    while waiting and waiting[0].plane == plane:
                        done.append(waiting.pop(0))
                        self._run_one(bench, done[-1])
                self.rules_shown |= set(RULES) - set(bench.rules_without_place)
            except Exception as error:  # noqa: BLE001 - whatever it was, the other cells are run
                # What fails when the bench ends belongs to whichever of its cells.
                cell = done[-1] if done else waiting.pop(0)
                said = str(error) or repr(error)
                self.failures.append((cell, said))
                print(f"FAILED  {cell}: {said}", flush=True)
                traceback.print_exc()

    def _run_one(self, bench: Bench, cell: Cell) -> None:
        begun = time.monotonic()
        seed = len(self.results) + len(self.failures) + 1
        result = run_cell(bench, cell, seed)
        self.results.append(result)
        print(
            f"passed  {cell}: {result.status}, answered in {result.answer_seconds:.2f} s, settled "
            f"in {result.settle_seconds:.2f} s, whole in {result.whole_seconds:.2f} s; "
            f"{time.monotonic() - begun:.1f} s in all",
            flush=True,
        )


def report(run: Run, seconds: float, kept: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run, in the order of the table; what is run again is replaced."""
    failures = [{"cell": attrs.asdict(cell), "message": said} for cell, said in run.failures]
    results = [attrs.asdict(result) for result in run.results]
    again = [one["cell"] for one in (*results, *failures)]
    order = [attrs.asdict(cell) for cell in all_cells()]

    def merged(name: str, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
        old = [one for one in kept.get(name, ()) if one["cell"] not in again]
        known = [one for one in (*old, *new) if one["cell"] in order]
        return sorted(known, key=lambda one: order.index(one["cell"]))

    return {
        "seconds": kept.get("seconds", 0) + round(seconds),
        "runs": kept.get("runs", 0) + 1,
        "cells": merged("cells", results),
        "failures": merged("failures", failures),
        "rules_shown": sorted({*kept.get("rules_shown", ()), *run.rules_shown}),
    }


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--json", type=Path, help="where to keep the results")
    parser.add_argument("--again", action="store_true", help="keep what is not run now")
    parser.add_argument("text", nargs="*", help="only cells whose name contains one of these")
    asked = parser.parse_args()
    cells = [c for c in all_cells() if not asked.text or any(t in str(c) for t in asked.text)]
    # Whoever ends this run ends its parts with it.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    begun = time.monotonic()
    kept = load(asked.json).get("matrix", {}) if asked.json is not None and asked.again else {}
    with tempfile.TemporaryDirectory(prefix="custody-matrix-") as name:
        run = Run(Path(name), tiny_model(Path(name)))
        try:
            run.run(cells)
        finally:
            # What was seen before somebody ended the run is kept as well.
            seconds = time.monotonic() - begun
            if asked.json is not None:
                keep(asked.json, "matrix", report(run, seconds, kept))
    entries = sum(result.entries for result in run.results)
    evaluations = sum(result.evaluations for result in run.results)
    print(
        f"{len(run.results)} of {len(cells)} cells passed in {seconds:.0f} s; {entries} entries "
        f"replayed clean, {evaluations} guard evaluations; {len(run.rules_shown)} of {len(RULES)} "
        "rules turned the same logs red when one event was changed"
    )
    return 1 if run.failures or not cells else 0


if __name__ == "__main__":
    sys.exit(main())
