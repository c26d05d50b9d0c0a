"""Matrices of weights in whole numbers of eight bits, and products with them.

Owns: how a matrix is rounded, and what a rounded matrix means.
Must not know: layers, files, requests.

Each row (an output channel) has one scale, the zero is 0, and nothing depends on the activations:
they stay float32, so that a row's result depends on no other row of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

LARGEST = 127
"""-128 is not used, so that a row and its negative are rounded alike."""

SLICE_ELEMENTS = 1 << 20
"""Weights that are widened at a time: 4 MiB of float32 stay in a cache until they are used."""


class WeightNotFiniteError(ValueError):
    """A row holds an infinity or what is no number, so it has no scale."""

    def __init__(self, *, row: int) -> None:
        super().__init__(f"row {row} holds a weight that is not finite")
        self.row = row


class MatrixShapeError(ValueError):
    """What is to be rounded is no matrix of floating-point numbers."""

    def __init__(self, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(f"a tensor {list(shape)} of {dtype} is no matrix of weights")
        self.shape = shape
        self.dtype = dtype


@dataclass(frozen=True, eq=False, slots=True)
class Int8Matrix:
    """`values` int8 [out, in] and `scales` float32 [out]: row r stands for scales[r] * values[r]."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """As of the matrix that it stands for: [out, in]."""
        return self.values.shape

    def dequantised(self) -> Tensor:
        """The matrix that this one stands for, float32 [out, in]."""
        return self.values.to(torch.float32).mul_(self.scales.unsqueeze(1))


Matrix = Tensor | Int8Matrix


def quantise(weight: Tensor) -> Int8Matrix:
    """The nearest multiples of each row's greatest magnitude by 127.

    No element moves by more than half its row's scale.
    Raises MatrixShapeError and WeightNotFiniteError.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise MatrixShapeError(shape=tuple(weight.shape), dtype=weight.dtype)
    wide = weight.detach().to(torch.float32)
    highest = wide.abs().amax(dim=1) if wide.numel() else wide.new_zeros(wide.shape[0])
    strange = torch.nonzero(~torch.isfinite(highest)).flatten()
    if len(strange):
        raise WeightNotFiniteError(row=int(strange[0]))
    # A row of zeros, or of numbers so small that a 127th of them is none, gets the least scale.
    scales = (highest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    values = (wide / scales.unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
    return Int8Matrix(values.to(torch.int8), scales)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x` [rows, in] times the transposed matrix, plus the bias: [rows, out] of the type of `x`.

    Rounded weights are widened slice by slice, which costs a hundredth of the product where there
    are many rows; the scales are applied to the sums.
    """
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    outputs, inputs = weight.shape
    step = max(1, SLICE_ELEMENTS // max(1, inputs))
    room = torch.empty(min(step, outputs), inputs, dtype=torch.float32)
    result = torch.empty(x.shape[0], outputs, dtype=torch.float32)
    for first in range(0, outputs, step):
        part = weight.values[first : first + step]
        wide = room[: part.shape[0]].copy_(part)
        torch.mm(x, wide.t(), out=result[:, first : first + step])
    result.mul_(weight.scales)
    return result if bias is None else result.add_(bias)


def tensors_of(weight: Matrix | None) -> tuple[Tensor, ...]:
    """What a matrix consists of, for whoever counts bytes or compares models."""
    if weight is None:
        return ()
    return (weight,) if isinstance(weight, Tensor) else (weight.values, weight.scales)
