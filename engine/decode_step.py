"""One token for each sequence of a batch: plain torch, one compiled walk, or a device's kernels.

Owns: which of them a model and a pool can use, and that all answer alike.
Must not know: requests, sampling.

`PlainSteps` is the definition. `CompiledSteps` is what runs on CPUs in float32, `DeviceSteps` what runs
on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from engine.model import LayerWeights, Model
from engine.paged import PagedBatch, SequenceSlice
from engine.pool import KVPool
from kernels.cpu import load_compiled
from kernels.headers import HeaderMismatch
from kernels.int8 import Matrix, tensors_of


@attrs.frozen(eq=False)
class Outcome:
    """What a step gave.

    logits: float32 [rows, vocabulary], one row for each sequence, valid until the next step.
    mismatches: the first mismatch of each failed sequence, by its number; its logits mean nothing.
    """

    logits: Tensor
    mismatches: dict[int, HeaderMismatch]


class DecodeSteps(Protocol):
    """A way of computing steps: `path` is its name, `reason` why it is not a faster one."""

    path: str
    reason: str | None

    def run(self, tokens: Sequence[int], sequences: Sequence[SequenceSlice]) -> Outcome:
        """Append one token to each sequence and give the logits behind it.

        Headers are compared before any of a page's rows is read and again behind the last read.
        A failed sequence gives no result and its headers stay as they are; all others go on.

        Raises:
            SliceOutOfBoundsError: pages outside the pool, or fewer than the tokens need, or a
                sequence that appends another number of tokens than one.
            TagZeroError: a tag is 0.
            RowCountError: another number of tokens than of sequences.
        """


class PlainSteps:
    """The definition, out of torch operations; any device and type."""

    path = "plain"

    def __init__(self, model: Model, pool: KVPool, *, reason: str | None = None) -> None:
        self.reason = reason
        self.batch = PagedBatch
        self._model = model
        self._pool = pool

    def run(self, tokens: Sequence[int], sequences: Sequence[SequenceSlice]) -> Outcome:
        batch = self.batch(self._pool, sequences)
        batch.begin_step()
        places = torch.tensor([sequence.start for sequence in sequences])
        hidden = self._model.forward(torch.tensor(tokens), places, batch)
        return Outcome(self._model.logits(hidden), batch.end_step())


def why_plain(model: Model, pool: KVPool) -> str | None:
    """What keeps a model and a pool from the compiled path; None if nothing does."""
    config, layout = model.config, pool.layout
    if model.device.type != "cpu" or pool.memory.octets.device.type != "cpu":
        return "not on a CPU"
    if model.dtype is not torch.float32 or layout.dtype is not torch.float32:
        return "not float32"
    sizes = {
        "head size": (config.head_dim, 16),
        "hidden size": (config.hidden, 16),
        "MLP size": (config.mlp, 32),
    }
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"{name} {size} is no multiple of {unit}"
    for layer in model.weights.layers:
        for field in attrs.fields(LayerWeights):
            if not _contiguous(getattr(layer, field.name)):
                return f"{field.name} is not contiguous"
    if not (_contiguous(model.weights.head) and _contiguous(model.weights.norm)):
        return "head or norm is not contiguous"
    return None


def _contiguous(weight: Matrix | None) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors_of(weight))


def make_steps(model: Model, pool: KVPool, *, threads: int) -> DecodeSteps:
    """The fastest steps that this model, this pool and this installation allow."""
    if pool.on_device:
        # Imported late, since its results are this module's.
        from engine.device_steps import DeviceSteps

        return DeviceSteps(model, pool)
    reason = why_plain(model, pool)
    if reason is None:
        code, reason = load_compiled()
        if code is not None:
            # Imported late, since it needs what not every installation has.
            from engine.compiled_step import CompiledSteps

            return CompiledSteps(model, pool, threads=threads)
    return PlainSteps(model, pool, reason=reason)
