"""What the operations on pages are given: tables and labels as tensors, faults, operand errors.

It owns the shapes, the checks of everything that the host can see, and the bits of a fault.
It must not know how an operation is computed.

What lies in device memory cannot be looked at without waiting for the device, so page numbers,
lengths and headers are judged by the operations themselves: a fault raises bits in a *flag*, one
int32 for each sequence or page, and nothing is read or written for its sake.
Shapes, types, devices and strides are known to the host and raise `OperandError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor

from kernels.digest import to_signed
from kernels.layout import PageMemory

HEAD_DIM_MULTIPLE = 16


class Fault(IntFlag):
    """Why a page or a sequence was not served; several may be true at once.

    PAGE: a page number outside the pool, or a page that one call would write twice.
    LENGTH: more tokens than the table has room for, or rows outside the tensors that were passed.
    FILLED: fewer valid tokens than are to be read, more than a page holds, or, where a sealed page
        is expected, another number than announced.
    """

    HEAD_TAG = 1
    TAIL_TAG = 2
    LAYER = 4
    POSITION = 8
    FILLED = 16
    PAGE = 32
    LENGTH = 64
    DIGEST = 128


class OperandError(ValueError):
    """An operand has a shape, type, device or stride that an operation does not take."""

    def __init__(self, *, operand: str, quantity: str, found: object, required: object) -> None:
        super().__init__(f"{operand}: {quantity} is {found}, required is {required}")
        self.operand = operand
        self.quantity = quantity
        self.found = found
        self.required = required


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageTables:
    """Which pages S sequences read and write in one step, in tables of W pages.

    pages: int32 `[S, W]`, page numbers in logical order; what lies behind a sequence's last live
        page is never looked at.
    tags: int64 `[S, W]`, the tag that each page must bear, in two's complement.
    tokens: int32 `[S]`, tokens of each sequence once this step's are written; 0 takes no part.
    rows: int32 `[S]`, how many of them, the last ones, this step writes and queries.
    first_row: int32 `[S]`, where they begin in the step's queries, keys and values.
    rows_max: the largest of `rows`, known to the host.
    """

    pages: Tensor
    tags: Tensor
    tokens: Tensor
    rows: Tensor
    first_row: Tensor
    rows_max: int

    @property
    def sequences(self) -> int:
        return self.pages.shape[0]

    @property
    def width(self) -> int:
        return self.pages.shape[1]

    @classmethod
    def of(
        cls,
        pages: Sequence[Sequence[int]],
        tags: Sequence[Sequence[int]],
        *,
        tokens: Sequence[int],
        rows: Sequence[int],
        device: torch.device | None = None,
    ) -> PageTables:
        """Tables from lists, rows following each other in the order of sequences; tags of either sign."""
        width = max((len(table) for table in pages), default=0)
        padded = [[*table, *[-1] * (width - len(table))] for table in pages]
        signed = [[*(to_signed(tag) for tag in each), *[0] * (width - len(each))] for each in tags]
        first, total = [], 0
        for count in rows:
            first.append(total)
            total += count

        def whole(values: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        shape = (len(pages), width)
        return cls(
            pages=whole(padded, torch.int32).reshape(shape),
            tags=whole(signed, torch.int64).reshape(shape),
            tokens=whole(list(tokens), torch.int32),
            rows=whole(list(rows), torch.int32),
            first_row=whole(first, torch.int32),
            rows_max=max(rows, default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageLabels:
    """What N pages are called and hold, the same in every layer.

    pages, positions, filled: int32 `[N]`; tags: int64 `[N]` in two's complement.
    """

    pages: Tensor
    tags: Tensor
    positions: Tensor
    filled: Tensor

    @property
    def count(self) -> int:
        return self.pages.shape[0]

    @classmethod
    def of(
        cls,
        pages: Sequence[int],
        tags: Sequence[int],
        *,
        positions: Sequence[int],
        filled: Sequence[int],
        device: torch.device | None = None,
    ) -> PageLabels:
        """Labels from lists; tags unsigned or in two's complement."""
        return cls(
            pages=torch.tensor(list(pages), dtype=torch.int32, device=device),
            tags=torch.tensor([to_signed(t) for t in tags], dtype=torch.int64, device=device),
            positions=torch.tensor(list(positions), dtype=torch.int32, device=device),
            filled=torch.tensor(list(filled), dtype=torch.int32, device=device),
        )


def new_flags(count: int, device: torch.device) -> Tensor:
    """int32 `[count]`, nothing raised."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def require_vector(
    name: str, vector: Tensor, *, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises OperandError unless the tensor is contiguous and exactly this."""
    compares = (
        ("shape", tuple(vector.shape), shape),
        ("dtype", vector.dtype, dtype),
        ("device", vector.device, device),
        ("contiguous", vector.is_contiguous(), True),
    )
    for quantity, found, required in compares:
        if found != required:
            raise OperandError(operand=name, quantity=quantity, found=found, required=required)


def require_labels(name: str, labels: PageLabels, flags: Tensor, *, device: torch.device) -> None:
    """Raises OperandError unless labels and flags agree."""
    vector = (labels.pages.numel(),)
    require_vector(f"{name} pages", labels.pages, shape=vector, dtype=torch.int32, device=device)
    require_vector(f"{name} tags", labels.tags, shape=vector, dtype=torch.int64, device=device)
    for field in ("positions", "filled"):
        value = getattr(labels, field)
        require_vector(f"{name} {field}", value, shape=vector, dtype=torch.int32, device=device)
    require_vector("flags", flags, shape=vector, dtype=torch.int32, device=device)


def require_heads(name: str, rows: Tensor, memory: PageMemory, *, heads: int | None = None) -> None:
    """Raises OperandError unless `rows` is `[R, heads, head_dim]` with packed heads.

    Rows may lie at any distance from each other. heads: exactly that many; otherwise a multiple of
    the KV heads.
    """
    layout = memory.layout
    wanted = f"[rows, {heads or f'a multiple of {layout.kv_heads}'}, {layout.head_dim}]"
    fits = rows.dim() == 3 and rows.shape[2] == layout.head_dim and rows.shape[1] > 0
    if fits:
        count = rows.shape[1]
        fits = count == heads if heads is not None else count % layout.kv_heads == 0
    if not fits:
        found = tuple(rows.shape)
        raise OperandError(operand=name, quantity="shape", found=found, required=wanted)
    if rows.dtype != layout.dtype:
        found_type = rows.dtype
        raise OperandError(operand=name, quantity="dtype", found=found_type, required=layout.dtype)
    if rows.device != memory.octets.device:
        raise OperandError(
            operand=name, quantity="device", found=rows.device, required=memory.octets.device
        )
    if layout.head_dim % HEAD_DIM_MULTIPLE:
        raise OperandError(
            operand=name,
            quantity="head size",
            found=layout.head_dim,
            required=f"a multiple of {HEAD_DIM_MULTIPLE}",
        )
    packed = rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == layout.head_dim)
    if not packed:
        required = f"(any, {layout.head_dim}, 1)"
        raise OperandError(operand=name, quantity="strides", found=rows.stride(), required=required)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStep:
    """One layer of a step over a pool, whose parts fit each other once this is made.

    flags: int32 `[S]`, one for each sequence of the tables; bits are only added.

    Raises:
        OperandError: a shape, dtype, device or stride does not fit, or there is no such layer.
    """

    memory: PageMemory
    layer: int
    tables: PageTables
    flags: Tensor

    def __post_init__(self) -> None:
        tables, layers = self.tables, self.memory.layout.layers
        if tables.pages.dim() != 2:
            raise OperandError(
                operand="pages",
                quantity="shape",
                found=tuple(tables.pages.shape),
                required="[sequences, table width]",
            )
        device = self.memory.octets.device
        table, vector = tuple(tables.pages.shape), (tables.sequences,)
        require_vector("pages", tables.pages, shape=table, dtype=torch.int32, device=device)
        require_vector("tags", tables.tags, shape=table, dtype=torch.int64, device=device)
        for name in ("tokens", "rows", "first_row"):
            value = getattr(tables, name)
            require_vector(name, value, shape=vector, dtype=torch.int32, device=device)
        require_vector("flags", self.flags, shape=vector, dtype=torch.int32, device=device)
        if not 0 <= self.layer < layers:
            required = f"0 to {layers - 1}"
            raise OperandError(
                operand="layer", quantity="value", found=self.layer, required=required
            )
