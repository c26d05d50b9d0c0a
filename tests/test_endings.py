"""Claims about every ending: whatever strikes, the answer is truthful and every page comes home.

The whole matrix is `make faults`; these cells stand for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.bench import Bench
from tests.faults.cell import Cell, run_cell
from tests.process_harness import tiny_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

CELLS = (Cell("decode killed", "mid-decode", "shared-memory"),)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("shared") / "bench", tiny, plane="shared-memory") as bench:
        yield bench


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_of_the_matrix(shared: Bench, cell: Cell) -> None:
    """The fault fires at its moment; log, pools, answers and canaries hold."""
    run_cell(shared, cell, CELLS.index(cell))
