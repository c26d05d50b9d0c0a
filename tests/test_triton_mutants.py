"""Broken kernels are noticed: each mutant is one changed line of device code, run and found out.

In the ordinary process the text of each mutant is only looked for; the mutants themselves run where
`test_triton_interpreter` runs this file, in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from kernels import dispatch
from kernels.layout import PageLayout
from kernels.tables import new_flags
from tests.paged_world import TOLERANCES, make_world
from tests.triton_claims import BACKEND, CPU, FIELDS, labels_of
from tools import house

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=16, page_tokens=8)
ATTENTION, PAGES, COMMON = "triton_attention", "triton_pages", "triton_common"


@attrs.frozen
class Mutant:
    """One change of a module's text."""

    module: str
    old: str
    new: str


ARITHMETIC = {
    "sees one token less": Mutant(ATTENTION, "<= seen[:, None]", "< seen[:, None]"),
    "sees the future": Mutant(
        ATTENTION, "(token[None, :] <= seen[:, None])", "(seen[:, None] >= 0)"
    ),
    "reads keys as values": Mutant(ATTENTION, "place + shape.row_elements // 2", "place"),
    "forgets to shrink the result": Mutant(
        ATTENTION, "result * shrink[:, None] + added", "result + added"
    ),
    "forgets to shrink the sum": Mutant(
        ATTENTION, "total * shrink + tl.sum(weights, axis=1)", "total + tl.sum(weights, axis=1)"
    ),
    "takes the neighbour's query head": Mutant(
        ATTENTION, "query_stride + head * shape", "query_stride + (head ^ 1) * shape"
    ),
    "takes another KV head": Mutant(
        ATTENTION, "offset + kv_head * shape.head_dim", "offset + (1 - kv_head) * shape.head_dim"
    ),
    "joins splits unweighed": Mutant(ATTENTION, "values * grow", "values"),
    "leaves a split out": Mutant(
        ATTENTION, "for part in range(parts)", "for part in range(1, parts)"
    ),
    "scales a little too much": Mutant(ATTENTION, "scale * LOG2_E", "scale * LOG2_E * 1.001"),
    "writes a row too far": Mutant(PAGES, "(token - mine * ", "(token + 1 - mine * "),
    "forgets to note what is filled": Mutant(
        PAGES, "own_block + 2, filled", "own_block + 2, filled * 0"
    ),
}
CHECKS = {
    "head tag": Mutant(COMMON, "(head != tag) | (tag == 0)", "tag == 0"),
    "tail tag": Mutant(COMMON, "tail != tag", "tail != tail"),
    "layer": Mutant(COMMON, "found_layer != layer", "found_layer != found_layer"),
    "position": Mutant(COMMON, "found_position != position", "position != position"),
    "filled": Mutant(COMMON, "(filled < needed) | (filled > shape.page_tokens)", "filled < 0"),
    "faults of one tile": Mutant(
        ATTENTION, "faults |= fault\n    if not", "faults = fault\n    if not"
    ),
    "checks switched off": Mutant(ATTENTION, "if shape.checked", "if not shape.checked"),
}
DIGESTS = {
    "weights from 0": Mutant(
        PAGES, "(index + 1).to(tl.int64)\n    found", "index.to(tl.int64)\n    found"
    ),
    "counts what is not filled": Mutant(
        PAGES, "valid = tl.where(sound, filled * ", "valid = tl.where(sound, shape.page_tokens * "
    ),
    "shifts one bit less": Mutant(COMMON, "value >> 27", "value >> 26"),
}


_NUMBERS = itertools.count()


def text_of(module: str) -> str:
    return (house.ROOT / "kernels" / f"{module}.py").read_text()


@pytest.mark.parametrize("mutant", [*ARITHMETIC.values(), *CHECKS.values(), *DIGESTS.values()])
def test_a_mutant_still_applies(mutant: Mutant) -> None:
    """The text that a mutant changes is there."""
    assert mutant.old in text_of(mutant.module)


def mutated(mutant: Mutant, folder: Path) -> dict[str, Any]:
    """The kernels with one line changed, by their names; every module is made anew."""
    number = next(_NUMBERS)
    names = {name: f"mutant_{name}_{number}" for name in (COMMON, ATTENTION, PAGES)}
    kernels: dict[str, Any] = {}
    for name, new_name in names.items():
        text = text_of(name)
        if name == mutant.module:
            text = text.replace(mutant.old, mutant.new)
        text = text.replace(f"kernels.{COMMON}", names[COMMON])
        path = folder / f"{new_name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(new_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[new_name] = module
        spec.loader.exec_module(module)
        kernels |= {key: value for key, value in vars(module).items() if key.endswith("_kernel")}
    return kernels


@pytest.fixture
def mutate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> ModuleType:
    """`kernels.triton_ops` with the kernels of the test's mutant."""
    from kernels import triton_ops

    mutant = request.getfixturevalue("mutant")
    for name, kernel in mutated(mutant, tmp_path).items():
        monkeypatch.setattr(triton_ops, name, kernel)
    return triton_ops


def differences() -> float:
    """How far a write, a prefill and a decode with splits are from float64 at most."""
    world = make_world(LAYOUT, [560, 20], room=[600, 32])
    world.stored = [563, 25]
    tables = world.tables([3, 5])
    keys, values = (
        torch.cat([part[0][1, 560:563], part[1][1, 20:25]]) for part in (world.keys, world.values)
    )
    flags = new_flags(2, CPU)
    dispatch.write_tokens(world.memory, 1, keys, values, tables, flags, backend=BACKEND)
    queries = world.draw(8, 4)
    chunk = dispatch.prefill_attention(world.memory, 1, queries, tables, flags, backend=BACKEND)
    one = dispatch.decode_attention(world.memory, 1, queries[:2], tables, flags, backend=BACKEND)
    assert flags.eq(0).all()
    wanted = [
        world.expected(0, 1, queries[:3], tokens=563),
        world.expected(1, 1, queries[3:], tokens=25),
        world.expected(0, 1, queries[:1], tokens=563),
        world.expected(1, 1, queries[1:2], tokens=25),
    ]
    return float((torch.cat([chunk, one]).double() - torch.cat(wanted)).abs().nan_to_num(9).max())


def unnoticed_faults() -> list[object]:
    """Which faults in the first or the last page of a long table raise no flag."""
    unnoticed: list[object] = []
    for fault, logical in itertools.product(FIELDS, (0, 11)):
        world = make_world(LAYOUT, [96])
        world.corrupt(1, world.pages[0][logical], *FIELDS[fault])
        flags = new_flags(1, CPU)
        tables = world.tables([1])
        dispatch.decode_attention(world.memory, 1, world.draw(1, 4), tables, flags, backend=BACKEND)
        if flags.item() != int(fault):
            unnoticed.append((fault, logical))
    return unnoticed


def equal_digests() -> bool:
    """Whether the digests of two pages are those of the reference."""
    world = make_world(LAYOUT, [13])
    found = [
        dispatch.digest_pages(world.memory, labels_of(world), new_flags(2, CPU), backend=backend)
        for backend in (BACKEND, "reference")
    ]
    return torch.equal(*found)


if BACKEND == "triton":

    @pytest.mark.parametrize("mutant", ARITHMETIC.values(), ids=ARITHMETIC)
    @pytest.mark.usefixtures("mutate")
    def test_wrong_arithmetic_is_outside_the_tolerance(mutant: Mutant) -> None:
        """What the tests allow is less than what any of these mistakes makes."""
        try:
            found = differences()
        except AssertionError:
            return
        assert found > TOLERANCES[torch.float32]

    @pytest.mark.parametrize("mutant", CHECKS.values(), ids=CHECKS)
    @pytest.mark.usefixtures("mutate")
    def test_a_check_left_out_is_noticed(mutant: Mutant) -> None:
        """Each compare of a header is missed by a test when it is not there."""
        assert unnoticed_faults()

    @pytest.mark.parametrize("mutant", DIGESTS.values(), ids=DIGESTS)
    @pytest.mark.usefixtures("mutate")
    def test_a_wrong_digest_is_noticed(mutant: Mutant) -> None:
        """Digests are compared to the bit."""
        assert not equal_digests()


def test_the_kernels_themselves_are_sound() -> None:
    """What finds the mutants finds nothing in the kernels."""
    assert differences() <= TOLERANCES[torch.float32]
    assert unnoticed_faults() == []
    assert equal_digests()
