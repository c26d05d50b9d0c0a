"""The operations on pages, one signature each, computed by what suits the memory's device.

It owns the check of operands and the choice between the plain-torch reference and Triton kernels.
It must not know how either computes.

Memory on a CUDA or HIP device goes to Triton, memory on a CPU to the reference. `backend` names one
explicitly, for tests and measures.

No operation waits for the device. What only the device can see raises bits of `tables.Fault` in
the caller's flags, and whoever lets tokens out reads them first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.layout import PageMemory
from kernels.tables import (
    LayerStep,
    OperandError,
    PageLabels,
    PageTables,
    require_heads,
    require_labels,
    require_vector,
)

Backend = Literal["reference", "triton"]


class BackendMissingError(RuntimeError):
    """A back end was asked for whose library is not installed; the operator installs it."""

    def __init__(self, *, backend: Backend, missing: str) -> None:
        super().__init__(f"kernel back end {backend!r} needs {missing}, which is not installed")
        self.backend = backend
        self.missing = missing


def default_backend(device: torch.device) -> Backend:
    """The back end for memory of a device; HIP devices are called `cuda` by torch."""
    return "triton" if device.type == "cuda" else "reference"


@lru_cache
def operations(backend: Backend) -> Any:
    """The module with the functions below that takes their operands unchecked.

    Raises:
        BackendMissingError: its library is not installed.
    """
    if backend == "reference":
        from kernels import reference

        return reference
    try:
        from kernels import triton_ops
    except ModuleNotFoundError as error:
        raise BackendMissingError(backend=backend, missing=error.name or "triton") from error
    return triton_ops


def _chosen(memory: PageMemory, backend: Backend | None) -> Any:
    return operations(backend or default_backend(memory.octets.device))


def decode_attention(
    memory: PageMemory,
    layer: int,
    queries: Tensor,
    tables: PageTables,
    flags: Tensor,
    output: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Attention of one query a sequence over all its tokens; `[S, heads, head_dim]` in and out.

    Row `s` is sequence `s` and sees its tokens 0 to `tables.tokens[s] - 1`; `rows` and `first_row`
    are not looked at. Query head `h` reads KV head `h // (heads / kv_heads)`; the scale is
    `head_dim ** -0.5`. Every live page's tags, layer, position and filled are compared in the loop
    that reads it; a page that differs raises bits in `flags[s]` and contributes nothing. A
    sequence that is flagged, before or by this call, or that has no tokens, comes out as zeros.
    A sequence's result does not depend on the others.

    queries: the memory's dtype, rows at any stride. flags: int32 `[S]`, bits are only added.

    Raises:
        OperandError: shapes, dtypes, devices or strides that do not fit.
    """
    step = LayerStep(memory, layer, tables, flags)
    require_heads("queries", queries, memory)
    if queries.shape[0] != tables.sequences:
        shape = tuple(queries.shape)
        wanted = f"[{tables.sequences}, heads, {memory.layout.head_dim}]"
        raise OperandError(operand="queries", quantity="shape", found=shape, required=wanted)
    output = _output(queries, output)
    if queries.shape[0]:
        _chosen(memory, backend).decode_attention(step, queries, output)
    return output


def prefill_attention(
    memory: PageMemory,
    layer: int,
    queries: Tensor,
    tables: PageTables,
    flags: Tensor,
    output: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Causal attention of chunks over the pages before them and themselves; `[R, heads, head_dim]`.

    Sequence `s` owns rows `first_row[s]` to `first_row[s] + rows[s] - 1`, its tokens from
    `tokens[s] - rows[s]` on, which are written already. Checks and flags are those of
    `decode_attention`. A sequence whose lengths do not fit is flagged and its rows are left alone;
    rows that belong to no sequence are left alone too, and are zeros in a fresh output.

    Raises:
        OperandError: shapes, dtypes, devices or strides that do not fit.
    """
    step = LayerStep(memory, layer, tables, flags)
    require_heads("queries", queries, memory)
    output = _output(queries, output)
    if queries.shape[0] and tables.sequences and tables.rows_max > 0:
        _chosen(memory, backend).prefill_attention(step, queries, output)
    return output


def write_tokens(
    memory: PageMemory,
    layer: int,
    keys: Tensor,
    values: Tensor,
    tables: PageTables,
    flags: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Store the step's K and V of one layer and note `filled`; pages become open, without digest.

    keys, values: `[R, kv_heads, head_dim]`, rows as in `prefill_attention`. Each page that is
    appended to must bear its tag at both ends, its layer and position, and hold at least the tokens
    before the step's. A sequence that is flagged, before or by this call, is not written at all.

    Raises:
        OperandError: shapes, dtypes, devices or strides that do not fit.
    """
    step = LayerStep(memory, layer, tables, flags)
    for name, rows in (("keys", keys), ("values", values)):
        require_heads(name, rows, memory, heads=memory.layout.kv_heads)
    if keys.shape != values.shape:
        found, required = tuple(values.shape), tuple(keys.shape)
        raise OperandError(operand="values", quantity="shape", found=found, required=required)
    if keys.shape[0] and tables.sequences and tables.rows_max > 0:
        _chosen(memory, backend).write_tokens(step, keys, values)


def check_headers(
    memory: PageMemory, labels: PageLabels, flags: Tensor, *, backend: Backend | None = None
) -> None:
    """Compare tags, layer, position and filled (at least `labels.filled`) in every layer.

    flags: int32 `[N]`, one for each page; bits are only added.

    Raises:
        OperandError: shapes, dtypes, devices or strides that do not fit.
    """
    device = memory.octets.device
    require_labels("labels", labels, flags, device=device)
    if labels.count:
        _chosen(memory, backend).check_headers(memory, labels, flags)


def digest_pages(
    memory: PageMemory, labels: PageLabels, flags: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """int64 `[layers, N]`: wsum32 of each block's filled rows, bound to its label.

    Headers are not looked at. A page outside the pool, or a count that no page holds, raises its
    flag and has the digest 0, which no block has.

    Raises:
        OperandError: shapes, dtypes, devices or strides that do not fit.
    """
    device = memory.octets.device
    require_labels("labels", labels, flags, device=device)
    if not labels.count:
        return torch.zeros((memory.layout.layers, 0), dtype=torch.int64, device=device)
    result: Tensor = _chosen(memory, backend).digest_pages(memory, labels, flags)
    return result


def copy_pages(
    source: PageMemory,
    destination: PageMemory,
    labels: PageLabels,
    flags: Tensor,
    *,
    target_pages: Tensor,
    target_tags: Tensor,
    sealed: bool,
    backend: Backend | None = None,
) -> Tensor:
    """Sealed copies of pages under the tags of another grant; int64 `[layers, N]` block digests.

    Packing copies a pool's pages into a transfer buffer (`sealed` False: the source may be open and
    hold more). Unpacking copies a transfer buffer's into a pool (`sealed` True: the source must be
    filled exactly as labelled and bear the digest of what it holds).
    Rows that are not filled come out as zeros. A block whose source is not what its label says
    raises its flag, and its target becomes an empty block under no tag, which nobody can read.
    A target outside the destination, or named twice, raises its flag and is not written.

    target_pages: int32 `[N]`; target_tags: int64 `[N]`, two's complement, not 0.

    Raises:
        OperandError: shapes, dtypes, devices, layouts or strides that do not fit.
    """
    device = source.octets.device
    require_labels("source", labels, flags, device=device)
    vector = (labels.count,)
    require_vector("target pages", target_pages, shape=vector, dtype=torch.int32, device=device)
    require_vector("target tags", target_tags, shape=vector, dtype=torch.int64, device=device)
    compares = (
        ("layout", destination.layout.canonical(), source.layout.canonical()),
        ("device", destination.octets.device, device),
    )
    for quantity, found, required in compares:
        if found != required:
            raise OperandError(
                operand="destination", quantity=quantity, found=found, required=required
            )
    if destination.octets.data_ptr() == source.octets.data_ptr():
        raise OperandError(
            operand="destination", quantity="memory", found="the source's", required="another"
        )
    if not labels.count:
        return torch.zeros((source.layout.layers, 0), dtype=torch.int64, device=device)
    result: Tensor = _chosen(source, backend).copy_pages(
        source,
        destination,
        labels,
        flags,
        target_pages=target_pages,
        target_tags=target_tags,
        sealed=sealed,
    )
    return result


def _output(queries: Tensor, output: Tensor | None) -> Tensor:
    if output is None:
        return torch.zeros(queries.shape, dtype=queries.dtype, device=queries.device)
    require_vector(
        "output", output, shape=tuple(queries.shape), dtype=queries.dtype, device=queries.device
    )
    return output
