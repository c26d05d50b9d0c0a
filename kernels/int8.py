"""Matrices of weights in whole numbers of eight bits, and products with them.

Owns: how a matrix is rounded, and what a rounded matrix means.
Must not know: layers, files, requests.

Each GROUP neighbours of a row have one scale, the zero is 0, and nothing depends on the activations:
they stay float32, so that a row's result depends on no other row of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

LARGEST = 127
"""-128 is not used, so that a row and its negative are rounded alike."""

GROUP = 32
"""Neighbours that share a scale, as in llama.cpp's Q8_0; the last group of a row may be shorter."""

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
    """`values` int8 [out, in] and `scales` float32 [out, groups]: a weight is the product, in float32,
    of its value and its group's scale.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """As of the matrix that it stands for: [out, in]."""
        return self.values.shape

    def dequantised(self) -> Tensor:
        """The matrix that this one stands for, float32 [out, in]."""
        return _scaled(self.values.to(torch.float32), self.scales)


Matrix = Tensor | Int8Matrix


def quantise(weight: Tensor) -> Int8Matrix:
    """The nearest multiples of each group's greatest magnitude by 127.

    No element moves by more than half its group's scale.
    Raises MatrixShapeError and WeightNotFiniteError.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise MatrixShapeError(shape=tuple(weight.shape), dtype=weight.dtype)
    outputs, inputs = weight.shape
    groups = -(-inputs // GROUP)
    wide = F.pad(weight.detach().to(torch.float32), (0, groups * GROUP - inputs))
    wide = wide.view(outputs, groups, GROUP)
    highest = wide.abs().amax(dim=2)
    strange = torch.nonzero(~torch.isfinite(highest))
    if len(strange):
        raise WeightNotFiniteError(row=int(strange[0, 0]))
    # A group of zeros, or of numbers so small that a 127th of them is none, gets the least scale.
    scales = (highest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    values = (wide / scales.unsqueeze(2)).round_().clamp_(-LARGEST, LARGEST)
    values = values.to(torch.int8).view(outputs, groups * GROUP)[:, :inputs]
    return Int8Matrix(values.contiguous(), scales)


def _scaled(wide: Tensor, scales: Tensor) -> Tensor:
    """Each group of `wide` [rows, in] times its scale, in place."""
    rows, inputs = wide.shape
    if inputs % GROUP == 0:
        wide.view(rows, -1, GROUP).mul_(scales.unsqueeze(2))
        return wide
    return wide.mul_(scales.repeat_interleave(GROUP, dim=1)[:, :inputs])


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x` [rows, in] times the transposed matrix, plus the bias: [rows, out] of the type of `x`.

    Rounded weights are widened slice by slice, which costs a twentieth of the product where there
    are many rows.
    """
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    outputs, inputs = weight.shape
    step = max(1, SLICE_ELEMENTS // max(1, inputs))
    room = torch.empty(min(step, outputs), inputs, dtype=torch.float32)
    result = torch.empty(x.shape[0], outputs, dtype=torch.float32)
    for first in range(0, outputs, step):
        part = weight.values[first : first + step]
        wide = _scaled(room[: part.shape[0]].copy_(part), weight.scales[first : first + step])
        torch.mm(x, wide.t(), out=result[:, first : first + step])
    return result if bias is None else result.add_(bias)


def tensors_of(weight: Matrix | None) -> tuple[Tensor, ...]:
    """What a matrix consists of, for whoever counts bytes or compares models."""
    if weight is None:
        return ()
    return (weight,) if isinstance(weight, Tensor) else (weight.values, weight.scales)
