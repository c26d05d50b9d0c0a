"""`docs/endings.md` from the kept results: the matrix, cell by cell, and the figures.

`python -m tests.faults.page [--check]` writes the generated parts of the page; with `--check` it
writes nothing, and fails when page, results and table of cells do not belong together.

Owns: how results look as Markdown, and whether every cell has one.
Must not know: how a cell is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lifecycle.rules import RULES
from tests.faults.cell import Cell, all_cells
from tests.faults.kept import load
from tests.faults.moments import MOMENTS
from tests.faults.table import FAULTS, PLANES, Fault, why_impossible
from tools.generate_docs import MarkerError, begin, end

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "endings.md"
RESULTS = ROOT / "docs" / "endings.json"
COMMAND = "python -m tests.faults.page"

Kept = Mapping[str, Any]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _results(kept: Kept) -> dict[Cell, Kept]:
    return {Cell(**one["cell"]): one for one in kept["matrix"]["cells"]}


def missing(kept: Kept) -> list[str]:
    """Cells without a result, results without a cell, and cells that failed."""
    known, wanted = set(_results(kept)), set(all_cells())
    return [
        *(f"no result: {cell}" for cell in sorted(wanted - known, key=str)),
        *(f"no such cell: {cell}" for cell in sorted(known - wanted, key=str)),
        *(f"failed: {one['cell']}" for one in kept["matrix"]["failures"]),
    ]


def overview(kept: Kept) -> str:
    """Fault by moment: what the client was told; a dash is a cell that cannot be."""
    results = _results(kept)
    lines = [_row(["fault", *MOMENTS]), _row(["---"] * (1 + len(MOMENTS)))]
    for fault in FAULTS.values():
        told = []
        for moment in MOMENTS:
            each = {
                _short(results[Cell(fault.name, moment, plane)]["status"])
                for plane in PLANES
                if Cell(fault.name, moment, plane) in results
            }
            told.append(" or ".join(sorted(each)) or "–")
        lines.append(_row([fault.name, *told]))
    return "\n".join(lines)


def _short(status: str) -> str:
    return f"`{status.rsplit(maxsplit=1)[-1]}`"


def _folded(names: Sequence[str]) -> str:
    """Events in order; neighbours of one name are counted."""
    groups = [(name, len(list(same))) for name, same in groupby(names)]
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in groups)


def details(kept: Kept) -> str:
    """Every fault's cells: answer, times and events, or why the cell cannot be."""
    results = _results(kept)
    lines: list[str] = []
    for fault in FAULTS.values():
        head = ["moment", "plane", "client", "answered (s)", "settled (s)", "whole (s)", "events"]
        lines += [f"### {fault.name}", "", _row(head), _row(["---"] * len(head))]
        lines += list(_fault_rows(fault, results))
        lines.append("")
    return "\n".join(lines).rstrip()


def _fault_rows(fault: Fault, results: Mapping[Cell, Kept]) -> Iterator[str]:
    for moment in MOMENTS:
        why = why_impossible(fault, moment)
        if why:
            yield _row([moment, "–", "impossible", "", "", "", why])
            continue
        for plane in fault.planes:
            one = results[Cell(fault.name, moment, plane)]
            times = [f"{one[name]:.2f}" for name in ("answer_seconds", "settle_seconds")]
            whole = f"{one['whole_seconds']:.2f}"
            events = _folded(one["after"]) or "nothing more"
            yield _row([moment, plane, f"`{one['status']}`", *times, whole, events])


def totals(kept: Kept) -> str:
    """What the run came to."""
    matrix = kept["matrix"]
    cells = matrix["cells"]
    pairs = len(FAULTS) * len(MOMENTS)
    impossible = sum(bool(why_impossible(f, m)) for f in FAULTS.values() for m in MOMENTS)
    entries, evaluations = (sum(c[n] for c in cells) for n in ("entries", "evaluations"))
    ran = f"{matrix['seconds'] / 60:.0f} minutes"
    if matrix["runs"] > 1:
        # Cells that were run again, for whatever reason, stand with their last result.
        ran += f" of {matrix['runs']} runs"
    red = f"{len(matrix['rules_shown'])} of {len(RULES)} rules"
    lines = (
        f"* {len(cells)} of {len(all_cells())} cells passed, in {ran}.",
        f"* {pairs} pairs of fault and moment; {impossible} of them cannot be, and say why.",
        f"* {entries} log entries replayed without a violation, {evaluations} guard evaluations.",
        f"* The same logs with one event changed turned red by {red}, each by a change of its own.",
    )
    return "\n".join(lines)


def figures(kept: Kept) -> str:
    """The figures, as they were measured."""
    found = kept.get("figures", {})
    lines: list[str] = []
    if "cancels" in found:
        it = found["cancels"]
        lines += [_row(["from a client's cancel to the last release", "median", "p99", "requests"])]
        lines.append(_row(["---"] * 4))
        for kind in ("with_writes_in_flight", "without"):
            one = it[kind]
            spread = [f"{one[name]} ms" for name in ("median_ms", "p99_ms")]
            lines.append(_row([kind.replace("_", " "), *spread, str(one["count"])]))
        lines.append("")
    if "crashes" in found:
        head = ["killed with 32 requests open", "requests", "without a truthful answer"]
        lines += [_row([*head, "refused or broken", "normal after"]), _row(["---"] * 5)]
        for part, one in found["crashes"].items():
            if part == "passes":
                continue
            counts = [str(one[n]) for n in ("requests", "untruthful", "refused_or_broken")]
            lines.append(_row([part, *counts, f"{one['normal_after_seconds']} s"]))
        lines.append("")
    if "useful" in found:
        it = found["useful"]
        lines.append(
            f"Useful throughput with a tenth of the requests cancelled, against none: "
            f"{it['ratio']} (rounds: {', '.join(map(str, it['ratios']))}; at least {it['target']})."
        )
    if "soak" in kept:
        lines += ["", *_soaked(kept["soak"])]
    return "\n".join(lines).strip()


def _soaked(it: Kept) -> Iterator[str]:
    yield (
        f"Random faults under load for {it['seconds']:.0f} seconds (seed {it['seed']}): "
        f"{sum(it['faults'].values())} faults, {it['requests']} requests, {it['entries']} entries, "
        f"{it['violations']} violations, {it['untruthful']} answers without truth, "
        f"{it['pages_missing']} pages missing at the end."
    )
    yield ""
    head = ["largest resident size", "in the first third", "in the last"]
    yield _row(head)
    yield _row(["---"] * len(head))
    for part, size in it["memory"].items():
        yield _row([part, f"{size['first_mib']} MiB", f"{size['last_mib']} MiB"])


PARTS: Mapping[str, Callable[[Kept], str]] = {
    "totals": totals,
    "overview": overview,
    "figures": figures,
    "cells": details,
}


def filled(text: str, kept: Kept) -> str:
    """The page with its generated parts made anew. Raises MarkerError."""
    for name, make in PARTS.items():
        before, opened, rest = text.partition(begin(name))
        _, closed, after = rest.partition(end(name))
        if not (opened and closed):
            raise MarkerError(name=name)
        text = f"{before}{opened}\n{make(kept)}\n{closed}{after}"
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the page, or say whether it is what the results say."""
    kept = load(RESULTS)
    lacking = missing(kept)
    for line in lacking:
        print(f"{RESULTS.name}: {line}", file=sys.stderr)
    if lacking:
        return 1
    text = PAGE.read_text(encoding="utf-8")
    fresh = filled(text, kept)
    if fresh == text:
        print(f"{PAGE.name} is up to date.")
        return 0
    if "--check" in arguments:
        print(f"{PAGE.name} is not what {RESULTS.name} says: {COMMAND}", file=sys.stderr)
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    print(f"Wrote {PAGE.name}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
