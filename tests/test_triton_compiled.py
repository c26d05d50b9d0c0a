"""Every Triton kernel compiles for NVIDIA and AMD GPUs without one, and what it takes is written down.

Kernels are compiled once for both claims; Triton keeps what it compiled in its cache.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from kernels.layout import PageLayout
from tools import kernel_reports
from tools.kernel_reports import TARGETS

pytestmark = pytest.mark.slow

LAUNCHES = kernel_reports.launches()
REPORTED = {
    tuple(line.split(" | ")[:2]): line
    for line in (
        text.strip("| ")
        for text in kernel_reports.kept_lines(kernel_reports.DOCUMENT.read_text())[2:]
    )
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", LAUNCHES)
def test_a_kernel_compiles_and_takes_what_is_written(kernel: str, target: str) -> None:
    """A binary comes out, no register is spilled, and the table in the document is true."""
    built = kernel_reports.compiled(LAUNCHES[kernel], TARGETS[target])
    assert len(built.asm["hsaco" if target.startswith("gfx") else "cubin"]) > 1000
    found = kernel_reports.report(kernel, target, built)
    assert found.spilled == 0
    assert found.line().strip("| ") == REPORTED[kernel, target]
    if target == "sm_80":
        assert_wide_loads(kernel, built)


def assert_wide_loads(kernel: str, built: Any) -> None:
    """What moves bytes moves 16 at a time: lost alignment once made every load two bytes wide."""
    wide = r"cp\.async\.cg\.shared\.global|ld\.global\.v[24]\.b(64|32)"
    if kernel not in ("decode attention, join", "check"):
        assert re.search(wide, built.asm["ptx"])


def test_nothing_is_written_down_that_is_not_compiled() -> None:
    """The table has one row for each kernel and target."""
    assert set(REPORTED) == {(kernel, target) for kernel in LAUNCHES for target in TARGETS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_attention_compiles_for_other_types(dtype: torch.dtype) -> None:
    """float32 keeps its precision in products, and float16 is a type of its own."""
    layout = PageLayout(layers=30, kv_heads=3, head_dim=64, page_tokens=32, dtype=dtype)
    launch = kernel_reports.launches(layout, heads=9)["decode attention, split"]
    built = kernel_reports.compiled(launch, TARGETS["sm_90"])
    assert ("tf32" in built.asm["ptx"]) is False


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_arguments_of_one_are_no_trouble(kernel: str) -> None:
    """A launch turns an argument of 1 into a constant: layer 1, one page, one row, one sequence."""
    launch = LAUNCHES[kernel]
    ones = tuple(1 if isinstance(value, int) else value for value in launch.arguments)
    built = kernel_reports.compiled(dataclasses.replace(launch, arguments=ones), TARGETS["sm_90"])
    assert built.asm["cubin"]
