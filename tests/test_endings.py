"""Claims about every ending: whatever strikes, the answer is truthful and every page comes home.

The whole matrix is `make faults`; these cells stand for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.bench import Bench
from tests.faults.cell import Cell, all_cells, run_cell
from tests.process_harness import tiny_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PLANE = "shared-memory"
CELLS = tuple(
    Cell(fault, moment, PLANE)
    for fault, moment in (
        ("log store full", "mid-decode"),
        ("log store slow", "first token"),
        ("client cancels", "between chunks"),
        ("client lost", "admitted"),
        ("a transfer fails", "both reserved"),
        ("a transfer in doubt lands later", "between chunks"),
        ("bytes corrupted in flight", "both reserved"),
        ("scheduler killed and restarted", "before Verified"),
        ("decode killed", "mid-decode"),
        ("prefill hung, resumed when given up", "between chunks"),
        ("decode hung, resumed when given up", "mid-decode"),
    )
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("shared") / "bench", tiny, plane=PLANE) as bench:
        yield bench
    # The same log with one event changed is red, by every rule.
    assert bench.rules_without_place == []


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_of_the_matrix(shared: Bench, cell: Cell) -> None:
    """The fault fires at its moment; log, pools, answers and canaries hold."""
    assert cell in all_cells()
    result = run_cell(shared, cell, 1 + CELLS.index(cell))
    print(f"{cell}: {result.status}, {result.entries} entries, {result.evaluations} evaluations")
