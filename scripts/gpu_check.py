"""Check and measure every kernel on a GPU, and print one table: `python -m scripts.gpu_check`.

Owns: which cases are run, what is measured, and what a figure must reach.
Must not know: how the kernels work, save that one compile-time flag switches the compare of
headers off for the measure of what it costs.

`--device cpu` runs the same code on tiny shapes in Triton's interpreter, where times mean nothing.
Times are medians of launches after a warm-up; kernels that are compared with each other take
turns. The limit of memory is measured, as the rate of a large copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs


@attrs.frozen
class Row:
    """One line of the table. wanted: what the figure must reach, if anything."""

    part: str
    case: str
    figure: float
    unit: str
    wanted: str = ""
    passed: bool | None = None

    def cells(self) -> tuple[str, ...]:
        verdict = {None: "", True: "yes", False: "NO"}[self.passed]
        return self.part, self.case, f"{self.figure:.4g} {self.unit}".strip(), self.wanted, verdict


@attrs.frozen
class Sizes:
    """How large the measured cases are.

    layers, hidden: of the model whose step is measured. repeats: launches of each measure.
    """

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    layers: int
    hidden: int
    copy_bytes: int
    repeats: int


FULL = Sizes(
    batch=32,
    context=8192,
    heads=32,
    kv_heads=8,
    head_dim=128,
    page_tokens=32,
    layers=16,
    hidden=2048,
    copy_bytes=1 << 31,
    repeats=50,
)
TINY = Sizes(
    batch=2,
    context=24,
    heads=8,
    kv_heads=4,
    head_dim=16,
    page_tokens=8,
    layers=2,
    hidden=64,
    copy_bytes=1 << 16,
    repeats=2,
)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    return parser.parse_args(given)


def table(rows: Sequence[Row]) -> str:
    """All rows with aligned columns."""
    head = ("part", "case", "figure", "wanted", "met")
    lines = [head, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(given: Sequence[str] | None = None) -> int:
    """Run everything; 0 if all that was wanted was met, 1 if not, 2 without such a device."""
    options = arguments(sys.argv[1:] if given is None else given)
    if options.device == "cpu":
        # Triton reads this when it is imported, which happens below.
        os.environ["TRITON_INTERPRET"] = "1"
    from scripts.gpu_check_cases import all_rows, device_named

    device = device_named(options.device)
    if device is None:
        sys.stderr.write("gpu_check: torch sees no CUDA or HIP device here\n")
        return 2
    sizes = TINY if options.device == "cpu" else FULL
    rows: list[Row] = []
    for row in all_rows(device, sizes):
        rows.append(row)
        sys.stderr.write("  ".join(row.cells()) + "\n")
    told = json.dumps([attrs.asdict(row) for row in rows]) if options.json else table(rows)
    sys.stdout.write(told + "\n")
    return 1 if any(row.passed is False for row in rows) else 0


@attrs.frozen
class Turns:
    """How a time is measured. finish: waits until the device has done what it was given."""

    repeats: int
    launches: int
    finish: Callable[[], object]


def times(works: Sequence[Callable[[], object]], *, turns: Turns) -> list[list[float]]:
    """Seconds of a launch of each work, one for each turn; the works take turns."""
    for work in works:
        work()
    turns.finish()
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(turns.repeats):
        for work, found in zip(works, seconds, strict=True):
            begin = time.perf_counter()
            for _ in range(turns.launches):
                work()
            turns.finish()
            found.append((time.perf_counter() - begin) / turns.launches)
    return seconds


def lower_bound_of_ratio(slower: Sequence[float], faster: Sequence[float]) -> tuple[float, float]:
    """Median of faster/slower over the turns, and its 95 % lower bound by the order of turns."""
    ratios = sorted(fast / slow for slow, fast in zip(slower, faster, strict=True))
    # The distribution-free bound of a median: the k-th smallest, k by the normal approximation.
    count = len(ratios)
    index = max(0, int(count / 2 - 0.98 * count**0.5))
    return statistics.median(ratios), ratios[index]


def rows_of(part: str, figures: Iterable[tuple[str, float, str, float | None]]) -> Iterator[Row]:
    """Rows of one part from (case, figure, unit, least wanted)."""
    for case, figure, unit, least in figures:
        wanted = "" if least is None else f">= {least:g}"
        yield Row(part, case, figure, unit, wanted, None if least is None else figure >= least)


if __name__ == "__main__":
    sys.exit(main())
