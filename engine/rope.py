"""Rotary position embedding: inverse frequencies, their scalings, and the rotation itself.

Owns the meaning of a position.
It must not know pages, requests or weights.
The two halves of a head rotate together (Hugging Face's order, not the interleaved one of GGUF).
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

ROPE_SCALINGS = ("linear", "llama3")


@attrs.frozen
class RopeScaling:
    """How frequencies are stretched beyond the context that the model was first trained on.

    `kind` is one of ROPE_SCALINGS.
    The last three fields matter to `llama3` only; `original_context` is in tokens.
    Source: `rope_scaling` (or `rope_parameters`) of a Hugging Face `config.json`.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


def inverse_frequencies(*, head_dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each rotated pair: float32[head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (base**exponents)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_context / scaling.high_frequency_factor
    shortest_stretched = scaling.original_context / scaling.low_frequency_factor
    spread = scaling.high_frequency_factor - scaling.low_frequency_factor
    share_kept = (scaling.original_context / wavelengths - scaling.low_frequency_factor) / spread
    stretched = frequencies / scaling.factor
    between = (1 - share_kept) * stretched + share_kept * frequencies
    result = torch.where(wavelengths > shortest_stretched, stretched, between)
    return torch.where(wavelengths < longest_kept, frequencies, result)


def angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `positions` int64[T]: two tensors [T, 1, head_dim / 2] of `dtype`.

    They are computed in float32 whatever `dtype` is: a position above 256 has no exact bf16 value.
    """
    phase = positions.to(torch.float32)[:, None] * frequencies[None, :]
    return phase.cos().to(dtype)[:, None, :], phase.sin().to(dtype)[:, None, :]


def rotate(x: Tensor, *, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `x` [T, heads, head_dim] by the angles of each row; a new contiguous tensor."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
