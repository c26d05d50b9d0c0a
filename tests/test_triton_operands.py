"""Claims about what the operations on pages take, and which back end they choose."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch import Tensor

import kernels
from kernels import dispatch, reference
from kernels.dispatch import BackendMissingError
from kernels.tables import OperandError, PageLabels, PageTables, new_flags
from tests.paged_world import make_world
from tests.triton_claims import BACKEND, CPU, SMALL, labels_of


def test_operands_that_do_not_fit_are_named_with_both_sides() -> None:
    """Shapes, dtypes, strides, layers: a typed error before anything is read."""
    world = make_world(SMALL, [9])
    tables, flags = world.tables([1]), new_flags(1, CPU)
    queries = world.draw(1, 4)
    bad: list[tuple[str, Tensor, PageTables, Tensor, int]] = [
        (r"queries: shape is \(1, 4, 8\)", queries[:, :, :8], tables, flags, 1),
        (r"queries: shape is \(1, 3, 16\)", queries[:, :3], tables, flags, 1),
        (r"queries: shape is \(2, 4, 16\)", queries.repeat(2, 1, 1), tables, flags, 1),
        ("queries: dtype is torch.float16", queries.half(), tables, flags, 1),
        ("queries: strides is", queries.repeat(1, 1, 2)[:, :, ::2], tables, flags, 1),
        ("layer: value is 2, required is 0 to 1", queries, tables, flags, 2),
        ("flags: dtype is torch.int64", queries, tables, flags.long(), 1),
        (r"flags: shape is \(2,\), required is \(1,\)", queries, tables, flags.repeat(2), 1),
    ]
    for message, wrong, table, flag, layer in bad:
        with pytest.raises(OperandError, match=message):
            dispatch.decode_attention(world.memory, layer, wrong, table, flag, backend=BACKEND)
    wide = PageTables.of([[0, 1]], [[1, 1]], tokens=[9], rows=[1])
    narrow = PageTables(
        pages=wide.pages[:, ::2],
        tags=wide.tags,
        tokens=wide.tokens,
        rows=wide.rows,
        first_row=wide.first_row,
        rows_max=1,
    )
    with pytest.raises(OperandError, match="tags: shape"):
        dispatch.decode_attention(world.memory, 1, queries, narrow, flags, backend=BACKEND)
    keys = world.draw(1, 2)
    with pytest.raises(OperandError, match=r"values: shape is \(2, 2, 16\)"):
        dispatch.write_tokens(world.memory, 1, keys, keys.repeat(2, 1, 1), tables, flags)
    with pytest.raises(OperandError, match="destination: memory is the source's"):
        dispatch.copy_pages(
            world.memory,
            world.memory,
            labels_of(world),
            new_flags(2, CPU),
            target_pages=torch.zeros(2, dtype=torch.int32),
            target_tags=torch.ones(2, dtype=torch.int64),
            sealed=False,
        )


def test_nothing_to_do_is_done() -> None:
    """An empty batch, no rows, no pages: empty results and no error."""
    world = make_world(SMALL, [9])
    empty = PageTables.of([], [], tokens=[], rows=[])
    none = new_flags(0, CPU)
    args = (world.memory, 0, world.draw(0, 4), empty, none)
    assert dispatch.decode_attention(*args, backend=BACKEND).shape == (0, 4, 16)
    assert dispatch.prefill_attention(*args, backend=BACKEND).shape == (0, 4, 16)
    labels = PageLabels.of([], [], positions=[], filled=[])
    assert dispatch.digest_pages(world.memory, labels, none, backend=BACKEND).shape == (2, 0)


def test_the_back_ends_have_equal_signatures() -> None:
    """Whatever `dispatch` calls takes the same operands on every device."""
    from kernels import triton_ops

    names = ("decode_attention", "prefill_attention", "write_tokens", "check_headers")
    for name in (*names, "digest_pages", "copy_pages"):
        one, two = (inspect.signature(getattr(m, name)) for m in (reference, triton_ops))
        assert one == two, name


def test_the_device_chooses_the_back_end() -> None:
    """Memory of a CPU is never handed to a compiler for GPUs, and the other way round."""
    chosen = [dispatch.default_backend(torch.device(name)) for name in ("cpu", "cuda", "cuda:3")]
    assert chosen == ["reference", "triton", "triton"]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory on a GPU without Triton: the error says what to install."""
    for name in [name for name in sys.modules if name.startswith("kernels.triton_")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(kernels, name.removeprefix("kernels."))
    monkeypatch.setitem(sys.modules, "triton", None)
    dispatch.operations.cache_clear()
    with pytest.raises(BackendMissingError, match="'triton' needs triton, which is not installed"):
        dispatch.operations("triton")
