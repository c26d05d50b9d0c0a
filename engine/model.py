"""A Llama-family decoder in plain torch: tokens and positions in, hidden states and logits out.

Owns the arithmetic of the layers.
It must not know pages, requests, files or sampling: K and V go to a `KVContext`, which alone knows
which rows belong to which sequence and where their past lies.

Two rules keep one row's result free of the others.
Nothing is computed across rows (no shared scales), and no matrix product has fewer than ROWS_MIN
rows, because libraries take another path, with other last bits, for one row than for several.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from functools import cached_property
from typing import Protocol

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.model_config import (
    ModelConfig,
    ModelError,
    ModelFileError,
    UnsupportedArchitecture,
    UnsupportedFeature,
)
from engine.rope import angles, inverse_frequencies, rotate
from kernels.int8 import Int8Matrix, Matrix, linear

__all__ = [
    "ROWS_MIN",
    "KVContext",
    "LayerWeights",
    "Model",
    "ModelConfig",
    "ModelError",
    "ModelFileError",
    "ModelIdentity",
    "ModelWeights",
    "UnsupportedArchitecture",
    "UnsupportedFeature",
]

ROWS_MIN = 4
# A digest of every weight would cost seconds for a large model; sums see any single changed word,
# samples see what a sum cannot: words that changed places.
SAMPLES_PER_TENSOR = 256


class KVContext(Protocol):
    """The past of the sequences whose tokens are in one forward pass.

    Each layer calls `append` once and then `attend` once, layers in order.
    The T rows may belong to several sequences, and a sequence may own several rows (a chunk).
    """

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store K (rotated) and V of the new tokens, each [T, kv_heads, head_dim].

        Both are views that are overwritten by nobody but not contiguous over T.
        """

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of `q` [T, heads, head_dim] (rotated, not yet scaled); same shape out.

        A row sees its own sequence up to and including its own position.
        Query head h reads KV head h // (heads / kv_heads); scale is head_dim ** -0.5.
        """


@attrs.frozen(eq=False)
class LayerWeights:
    """One layer. Matrices are [out, in]; q, k and v are fused by rows, and so are gate and up."""

    input_norm: Tensor
    qkv: Matrix
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@attrs.frozen(eq=False)
class ModelWeights:
    """All weights. `head` is the embedding itself when the two are tied and neither is rounded."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All that a step multiplies by."""
        layers = [(w.qkv, w.output, w.gate_up, w.down) for w in self.layers]
        return (*itertools.chain.from_iterable(layers), self.head)


@attrs.frozen
class ModelIdentity:
    """Which model this is, for comparing two engines: equal identities compute alike.

    `weights` covers names, shapes, types, sums and samples of every tensor.
    It tells models apart; it does not resist a forger.
    """

    config: ModelConfig
    dtype: str
    weights: str

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits; the same for a GGUF and for a directory of the same weights."""
        described = json.dumps(attrs.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(described.encode()).hexdigest()


class Model:
    """A loaded decoder. Stateless between calls; safe to call from one worker thread at a time."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._frequencies = inverse_frequencies(
            head_dim=config.head_dim, base=config.rope_base, scaling=config.rope_scaling
        ).to(self.device)

    @cached_property
    def identity(self) -> ModelIdentity:
        """Computed at first use: it reads every weight once."""
        return ModelIdentity(
            config=self.config,
            dtype=str(self.dtype).removeprefix("torch."),
            weights=_weights_digest(self.weights),
        )

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, kv: KVContext) -> Tensor:
        """Hidden states after the final norm, [T, hidden], of `tokens` int64[T].

        `positions` int64[T] are places in each row's own sequence, from 0.
        """
        hidden = self._layers(tokens, positions, kv, states_wanted=True)
        return self._normalise(hidden[: tokens.shape[0]], self.weights.norm)

    @torch.inference_mode()
    def fill(self, tokens: Tensor, positions: Tensor, kv: KVContext) -> None:
        """As `forward`, for the KV only: what lies behind the last layer's K and V is skipped."""
        self._layers(tokens, positions, kv, states_wanted=False)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32[M, vocabulary] for `hidden` [M, hidden] out of `forward`."""
        rows = hidden.shape[0]
        return linear(_padded(hidden, rows), self.weights.head)[:rows].to(torch.float32)

    def _layers(
        self, tokens: Tensor, positions: Tensor, kv: KVContext, *, states_wanted: bool
    ) -> Tensor:
        config = self.config
        rows = tokens.shape[0]
        rotated_heads = config.heads + config.kv_heads
        all_heads = rotated_heads + config.kv_heads
        query_size = config.heads * config.head_dim
        cosines, sines = angles(positions, self._frequencies, self.dtype)
        # The rows added here are computed beside the others and thrown away.
        hidden = _padded(F.embedding(tokens, self.weights.embedding), rows)
        for index, layer in enumerate(self.weights.layers):
            normed = self._normalise(hidden, layer.input_norm)
            qkv = linear(normed, layer.qkv, layer.qkv_bias)[:rows]
            qkv = qkv.view(rows, all_heads, config.head_dim)
            rotated = rotate(qkv[:, :rotated_heads], cosines=cosines, sines=sines)
            kv.append(index, rotated[:, config.heads :], qkv[:, rotated_heads:])
            if index == config.layers - 1 and not states_wanted:
                break
            attended = kv.attend(index, rotated[:, : config.heads]).reshape(rows, query_size)
            # In place where nobody else holds the tensor: fresh memory costs as much as the sum.
            hidden += linear(_padded(attended, rows), layer.output, layer.output_bias)
            hidden += self._mlp(hidden, layer)
        return hidden

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        normed = self._normalise(hidden, layer.mlp_norm)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(F.silu(gate, inplace=True).mul_(up), layer.down, layer.down_bias)

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        # The mean is taken in float32 and rounded before the weight, as the models were trained.
        wide = hidden.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_epsilon)
        return (wide * scale).to(self.dtype).mul_(weight)


def _padded(x: Tensor, rows: int) -> Tensor:
    """`x` [rows, n] with rows of zeros up to ROWS_MIN."""
    return x if rows >= ROWS_MIN else F.pad(x, (0, 0, 0, ROWS_MIN - rows))


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _named(name: str, weight: Matrix | None) -> dict[str, Tensor]:
    """A weight's tensors by name; a rounded one never has the name of one that is not."""
    if isinstance(weight, Int8Matrix):
        return {f"{name}.values": weight.values, f"{name}.scales": weight.scales}
    return {} if weight is None else {name: weight}


def _weights_digest(weights: ModelWeights) -> str:
    tensors: dict[str, Tensor] = {"embedding": weights.embedding, "norm": weights.norm}
    if weights.head is not weights.embedding:
        tensors |= _named("head", weights.head)
    for index, layer in enumerate(weights.layers):
        for field in attrs.fields(LayerWeights):
            tensors |= _named(f"{index}.{field.name}", getattr(layer, field.name))
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        words = tensor.detach().reshape(-1).view(_WORDS[tensor.itemsize])
        step = max(1, words.numel() // SAMPLES_PER_TENSOR)
        described = [
            name,
            str(tensor.dtype),
            list(tensor.shape),
            int(words.sum(dtype=torch.int64)),
            words[::step].tolist(),
        ]
        digest.update(json.dumps(described).encode())
    return digest.hexdigest()
