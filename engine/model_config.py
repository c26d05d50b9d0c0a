"""What a Llama-family model is: its numbers, read strictly from a Hugging Face `config.json`.

Owns the frozen `ModelConfig` and the errors that every loader raises.
It must not know tensors or files: it is handed parsed JSON and the path to name in errors.
What is not understood is refused by name, because a model that is nearly right answers fluently and wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from engine.rope import ROPE_SCALINGS, RopeScaling

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
# Above these a config is damaged, not ambitious; they bound what a hostile file can make us allocate.
COUNT_MAX = 1 << 24
CONTEXT_MAX = 1 << 27


class ModelError(Exception):
    """A model cannot be used. Catch this to refuse to start."""


class UnsupportedArchitecture(ModelError):
    """The weights are for another kind of model; `name` is what the file calls it."""

    def __init__(self, *, name: str) -> None:
        super().__init__(f"architecture {name!r} is not one of {', '.join(ARCHITECTURES)}")
        self.name = name


class UnsupportedFeature(ModelError):
    """The architecture is known but asks for `feature` = `value`, which this engine lacks."""

    def __init__(self, *, feature: str, value: object) -> None:
        super().__init__(f"{feature} = {value!r} is not supported")
        self.feature = feature
        self.value = value


class ModelFileError(ModelError):
    """A file of the model is absent, truncated, corrupt or contradicts another one."""

    def __init__(self, *, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ModelNotFound(ModelFileError):
    """Nothing is there, and it is no hub id; whoever named it names another."""

    def __init__(self, *, path: Path) -> None:
        super().__init__(path=path, reason="no such file or directory")


@attrs.frozen
class ModelConfig:
    """The numbers of a decoder. All counts are positive; `context` is in tokens."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocabulary: int
    context: int
    rope_base: float
    rope_scaling: RopeScaling | None
    norm_epsilon: float
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_tokens: tuple[int, ...]

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token over all layers, headers not included."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def parse_config(
    raw: Mapping[str, Any], *, path: Path, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read `config.json` (and the stop tokens of `generation_config.json`).

    Raises UnsupportedArchitecture, UnsupportedFeature, ModelFileError.
    """
    architecture = _architecture(raw)
    fields = _Fields(raw, path)
    _refuse_features(raw)
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", default=heads),
        head_dim=fields.count("head_dim", default=hidden // heads),
        hidden=hidden,
        mlp=fields.count("intermediate_size"),
        vocabulary=fields.count("vocab_size"),
        context=fields.count("max_position_embeddings", limit=CONTEXT_MAX),
        rope_base=_rope_base(raw, fields),
        rope_scaling=_rope_scaling(raw, path),
        norm_epsilon=fields.number("rms_norm_eps", default=1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        eos_tokens=_eos_tokens(raw, generation or {}, path),
    )
    if config.heads % config.kv_heads != 0:
        reason = f"{config.heads} heads are not a multiple of {config.kv_heads} KV heads"
        raise ModelFileError(path=path, reason=reason)
    if config.head_dim % 2 != 0:
        raise ModelFileError(path=path, reason=f"head_dim {config.head_dim} is odd")
    outside = [token for token in config.eos_tokens if token >= config.vocabulary]
    if outside:
        reason = f"eos token {outside[0]} is outside the vocabulary of {config.vocabulary}"
        raise ModelFileError(path=path, reason=reason)
    return config


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        named = ", ".join(map(str, names)) if isinstance(names, list) and names else None
        raise UnsupportedArchitecture(name=named or str(raw.get("model_type", "unnamed")))
    return str(names[0])


def _refuse_features(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedFeature(feature="hidden_act", value=raw["hidden_act"])
    for feature in ("quantization_config", "sliding_window"):
        if raw.get(feature) is not None:
            value = raw[feature]
            named = value.get("quant_method", "unnamed") if isinstance(value, dict) else value
            raise UnsupportedFeature(feature=feature, value=named)
    rope = raw.get("rope_parameters") or {}
    partial = raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if partial not in (1, None):
        raise UnsupportedFeature(feature="partial_rotary_factor", value=partial)


@attrs.frozen
class _Fields:
    """Typed reads out of parsed JSON; a wrong type names the file and the field."""

    raw: Mapping[str, Any]
    path: Path

    def count(self, name: str, *, default: int | None = None, limit: int = COUNT_MAX) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            reason = f"{name} is {value!r}, not a whole number from 1 to {limit}"
            raise ModelFileError(path=self.path, reason=reason)
        return value

    def number(self, name: str, *, default: float) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFileError(path=self.path, reason=f"{name} is {value!r}, not a number")
        if not math.isfinite(value) or value <= 0:
            raise ModelFileError(path=self.path, reason=f"{name} is {value!r}, not positive")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name, False)
        if not isinstance(value, bool):
            raise ModelFileError(path=self.path, reason=f"{name} is {value!r}, not true or false")
        return value


def _rope_base(raw: Mapping[str, Any], fields: _Fields) -> float:
    # Newer configurations keep the base beside the scaling, older ones at the top.
    nested = raw.get("rope_parameters")
    if isinstance(nested, dict) and "rope_theta" in nested:
        return _Fields(nested, fields.path).number("rope_theta", default=10000.0)
    return fields.number("rope_theta", default=10000.0)


def _rope_scaling(raw: Mapping[str, Any], path: Path) -> RopeScaling | None:
    nested = raw.get("rope_parameters") or raw.get("rope_scaling")
    if nested is None:
        return None
    if not isinstance(nested, dict):
        raise ModelFileError(path=path, reason=f"rope scaling is {nested!r}, not an object")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ROPE_SCALINGS:
        raise UnsupportedFeature(feature="rope scaling", value=kind)
    fields = _Fields(nested, path)
    if "factor" not in nested:
        raise ModelFileError(path=path, reason=f"rope scaling {kind} names no factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number("factor", default=1.0))
    scaling = RopeScaling(
        kind="llama3",
        factor=fields.number("factor", default=1.0),
        low_frequency_factor=fields.number("low_freq_factor", default=1.0),
        high_frequency_factor=fields.number("high_freq_factor", default=4.0),
        original_context=fields.count("original_max_position_embeddings", limit=CONTEXT_MAX),
    )
    if scaling.high_frequency_factor <= scaling.low_frequency_factor:
        reason = (
            f"high_freq_factor {scaling.high_frequency_factor} is not above "
            f"low_freq_factor {scaling.low_frequency_factor}"
        )
        raise ModelFileError(path=path, reason=reason)
    return scaling


def _eos_tokens(
    raw: Mapping[str, Any], generation: Mapping[str, Any], path: Path
) -> tuple[int, ...]:
    found: list[int] = []
    for source in (raw, generation):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ModelFileError(path=path, reason=f"eos_token_id {token!r} is no token")
            if token not in found:
                found.append(token)
    return tuple(found)
