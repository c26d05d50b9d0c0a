"""The Triton kernels keep every claim about the operations on pages, in Triton's interpreter.

The interpreter is chosen when Triton is imported, and kernels that are interpreted cannot be
compiled, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tools import house

FILES = [f"tests/test_triton_{name}.py" for name in ("attention", "pages", "operands", "mutants")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_keep_every_claim(record_property: Callable[[str, object], None]) -> None:
    """Every claim about the operations passes with the kernels, and none is left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "HYPOTHESIS_PROFILE": "ci",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        command, cwd=house.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    told = run.stdout.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", told)
    assert passed is not None
    assert not re.search("skipped|xfailed|deselected", told), told
    assert int(passed[1]) >= 100
    record_property("summary", f"Triton kernels in the interpreter: {passed[1]} claims")


@pytest.mark.slow
def test_the_gpu_check_runs_without_a_gpu() -> None:
    """The prepared script goes through all of its cases on tiny shapes, and finds them right."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--device", "cpu", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=house.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-10_000:]
    rows = json.loads(run.stdout)
    assert [row for row in rows if row["passed"] is False] == []
    parts = {row["part"].split(" ")[0].strip(",") for row in rows}
    assert parts == {"decode", "prefill", "digest", "pack", "write", "check", "pages", "step"}
    # Times mean nothing here, so nothing is asked of them.
    assert sum(row["passed"] is True for row in rows) == 19
