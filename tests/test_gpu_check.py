"""Claims about the prepared GPU check that hold without a GPU."""

from __future__ import annotations

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_check import Row, Turns


def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    """No table and exit code 2: what has not run does not look as if it had."""
    assert not torch.cuda.is_available()
    assert gpu_check.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "no CUDA or HIP device" in said.err


def test_other_devices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line names what it takes."""
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--device", "tpu"])
    assert "cuda" in capsys.readouterr().err


def test_the_table_is_aligned_and_names_what_was_missed() -> None:
    """One line a row, columns below each other, a missed figure in capitals."""
    rows = [
        Row("decode", "time", 219.44, "us"),
        Row("decode", "share of the limit", 0.7, "", ">= 0.8", passed=False),
        Row("digest", "equal", 1.0, "", "equal", passed=True),
    ]
    assert gpu_check.table(rows).splitlines() == [
        "part    case                figure    wanted  met",
        "decode  time                219.4 us",
        "decode  share of the limit  0.7       >= 0.8  NO",
        "digest  equal               1         equal   yes",
    ]


def test_works_that_are_compared_take_turns() -> None:
    """Each turn launches every work equally often, and waits once for each."""
    called: list[str] = []
    turns = Turns(3, 2, lambda: called.append("|"))
    found = gpu_check.times([lambda: called.append("a"), lambda: called.append("b")], turns=turns)
    assert "".join(called) == "ab|" + "aa|bb|" * 3
    assert [len(each) for each in found] == [3, 3]


def test_a_lower_bound_lies_below_the_median() -> None:
    """Of a hundred ratios the 95 % bound is about the fortieth; equal times give one."""
    slower = [1.0] * 100
    faster = [0.9 + index / 1000 for index in range(100)]
    median, least = gpu_check.lower_bound_of_ratio(slower, faster)
    assert median == pytest.approx(0.9495)
    assert least == pytest.approx(0.940)
    assert gpu_check.lower_bound_of_ratio(slower, slower) == (1.0, 1.0)


def test_a_figure_is_met_or_missed() -> None:
    """What nothing is asked of has no verdict."""
    rows = list(
        gpu_check.rows_of("p", [("a", 0.9, "", 0.8), ("b", 0.7, "", 0.8), ("c", 1, "", None)])
    )
    assert [row.passed for row in rows] == [True, False, None]
    assert [row.wanted for row in rows] == [">= 0.8", ">= 0.8", ""]
