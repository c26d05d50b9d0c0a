"""Loading a model: a local directory in Hugging Face's format, a GGUF file, or a hub id.

Owns where tensors come from and their fusion into `ModelWeights`.
It must not know requests or pages.
A GGUF is turned once into a directory of fused tensors (see `engine.gguf_weights`), which is then
mapped, so that all processes of a host share one copy in memory.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model import LayerWeights, Model, ModelConfig, ModelWeights
from engine.model_config import (
    ModelFileError,
    ModelNotFound,
    UnsupportedFeature,
    parse_config,
)
from kernels.int8 import Matrix, WeightNotFiniteError, quantise

FUSED_FILE = "fused.safetensors"
GGUF_MAGIC = b"GGUF"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
JSON_BYTES_MAX = 1 << 28

Precision = Literal["float", "int8"]
"""What matrices are kept in: the model's own type, or eight bits a weight."""

# Stage ("convert", "load") and the share of it that is done, from 0 to 1.
Progress = Callable[[str, float], None]


def default_cache() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/custody`, else `~/.cache/custody`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "custody"


def resolve_model(
    source: str | Path, *, cache: Path | None = None, progress: Progress | None = None
) -> Path:
    """The local directory that holds `source`: itself, its converted GGUF, or a hub snapshot.

    Raises ModelError's subclasses. Blocks for seconds when a GGUF is converted.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_file():
        if _starts_with(path, GGUF_MAGIC):
            from engine.gguf_weights import converted  # imported late: it is slow and rarely needed

            return converted(path, cache=cache or default_cache(), progress=progress)
        raise ModelFileError(path=path, reason="is neither a directory nor a GGUF file")
    if HUB_ID.fullmatch(str(source)):
        return _from_hub(str(source), cache)
    raise ModelNotFound(path=path)


def load_config(source: str | Path, *, cache: Path | None = None) -> ModelConfig:
    """The numbers of a model without its weights. Raises as `load_model`."""
    directory = resolve_model(source, cache=cache)
    generation = directory / "generation_config.json"
    path = directory / "config.json"
    return parse_config(
        read_json(path),
        path=path,
        generation=read_json(generation) if generation.is_file() else None,
    )


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    precision: Precision = "float",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a Llama-family model.

    precision: int8 rounds every matrix but the embedding's rows as they are looked up; it computes
    in float32 on CPUs.
    Raises UnsupportedArchitecture, UnsupportedFeature or ModelFileError (all ModelError).
    """
    if precision == "int8" and (dtype is not torch.float32 or torch.device(device).type != "cpu"):
        value = f"int8 with {str(dtype).removeprefix('torch.')} on {device}"
        raise UnsupportedFeature(feature="weights", value=value)
    directory = resolve_model(source, cache=cache, progress=progress)
    config = load_config(directory)
    fused = (directory / FUSED_FILE).is_file()
    read = _Fused(directory / FUSED_FILE) if fused else _HuggingFace(directory, config)
    weights = _assemble(
        config, read, dtype=dtype, device=device, precision=precision, progress=progress
    )
    return Model(config, weights)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object out of a file of bounded size. Raises ModelFileError."""
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ModelFileError(path=path, reason=f"is larger than {JSON_BYTES_MAX} bytes")
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(path=path, reason=str(error)) from error
    if not isinstance(parsed, dict):
        raise ModelFileError(path=path, reason="is not a JSON object")
    return parsed


def fused_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all fused tensors, in the order in which they are used."""
    query = config.heads * config.head_dim
    qkv = query + 2 * config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocabulary, config.hidden)}
    for index in range(config.layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_norm": (config.hidden,),
            "qkv": (qkv, config.hidden),
            "output": (config.hidden, query),
            "mlp_norm": (config.hidden,),
            "gate_up": (2 * config.mlp, config.hidden),
            "down": (config.hidden, config.mlp),
        }
        if config.attention_bias:
            layer |= {"qkv_bias": (qkv,), "output_bias": (config.hidden,)}
        if config.mlp_bias:
            layer |= {"gate_up_bias": (2 * config.mlp,), "down_bias": (config.hidden,)}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["norm"] = (config.hidden,)
    if not config.tied_embeddings:
        shapes["head"] = (config.vocabulary, config.hidden)
    return shapes


_ATTENTION, _MLP = "self_attn", "mlp"
# Fused name -> the tensors of a Hugging Face layer that make it, in order of their rows.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "qkv": tuple(f"{_ATTENTION}.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"{_ATTENTION}.{part}_proj.bias" for part in "qkv"),
    "output": (f"{_ATTENTION}.o_proj.weight",),
    "output_bias": (f"{_ATTENTION}.o_proj.bias",),
    "gate_up": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "gate_up_bias": (f"{_MLP}.gate_proj.bias", f"{_MLP}.up_proj.bias"),
    "down": (f"{_MLP}.down_proj.weight",),
    "down_bias": (f"{_MLP}.down_proj.bias",),
}
_WHOLE = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def hugging_face_parts(fused_name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that a fused tensor consists of, in order of their rows."""
    if fused_name in _WHOLE:
        return (_WHOLE[fused_name],)
    _, index, field = fused_name.split(".")
    return tuple(f"model.layers.{index}.{part}" for part in _PARTS[field])


class _Tensors:
    """Named tensors out of one or several mapped safetensors files."""

    def __init__(self, files: list[Path]) -> None:
        self._where: dict[str, tuple[Path, Any]] = {}
        for path in files:
            try:
                opened: Any = safe_open(path, framework="pt", device="cpu")
                names = list(map(str, opened.keys()))
            except (OSError, SafetensorError, ValueError) as error:
                raise ModelFileError(path=path, reason=str(error)) from error
            for name in names:
                if name in self._where:
                    raise ModelFileError(path=path, reason=f"tensor {name} is there twice")
                self._where[name] = (path, opened)
        self.names = frozenset(self._where)

    def get(self, name: str, *, default: Path) -> Tensor:
        if name not in self._where:
            raise ModelFileError(path=default, reason=f"tensor {name} is missing")
        path, opened = self._where[name]
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise ModelFileError(path=path, reason=f"tensor {name}: {error}") from error
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelFileError(path=path, reason=f"tensor {name} has type {tensor.dtype}")
        return tensor


class _Fused:
    """Fused tensors as `engine.gguf_weights` wrote them: views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = _Tensors([path])

    def get(self, name: str) -> Tensor:
        return self._tensors.get(name, default=self.path)


class _HuggingFace:
    """Tensors of a Hugging Face directory, fused on the way (which copies them)."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self.path = directory
        self._tensors = _Tensors(_shards(directory))
        known = {part for name in fused_shapes(config) for part in hugging_face_parts(name)}
        # Older exports keep the tied head and the rotary frequencies; both can be derived.
        unknown = {
            name
            for name in self._tensors.names - known
            if name != _WHOLE["head"] and not name.endswith(".rotary_emb.inv_freq")
        }
        if unknown:
            raise ModelFileError(path=directory, reason=f"unknown tensor {min(unknown)}")

    def get(self, name: str) -> Tensor:
        parts = [self._tensors.get(part, default=self.path) for part in hugging_face_parts(name)]
        if len(parts) == 1:
            return parts[0]
        try:
            return torch.cat(parts)
        except RuntimeError as error:
            raise ModelFileError(path=self.path, reason=f"{name}: {error}") from error


def _assemble(
    config: ModelConfig,
    tensors: _Fused | _HuggingFace,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    precision: Precision,
    progress: Progress | None,
) -> ModelWeights:
    shapes = fused_shapes(config)
    loaded: dict[str, Any] = {}
    for done, (name, shape) in enumerate(shapes.items()):
        tensor = tensors.get(name)
        if tuple(tensor.shape) != shape:
            reason = f"{name} has shape {list(tensor.shape)}, the configuration says {list(shape)}"
            raise ModelFileError(path=tensors.path, reason=reason)
        loaded[name] = tensor.to(dtype=dtype, device=device).detach()
        if precision == "int8" and tensor.dim() == 2 and name != "embedding":
            loaded[name] = _rounded(name, loaded[name], path=tensors.path)
        if progress is not None:
            progress("load", (done + 1) / len(shapes))
    layers = tuple(
        LayerWeights(
            **{
                field: loaded[f"layers.{index}.{field}"]
                for field in _PARTS
                if f"layers.{index}.{field}" in loaded
            }
        )
        for index in range(config.layers)
    )
    embedding: Tensor = loaded["embedding"]
    head: Matrix = loaded.get("head", embedding)
    if precision == "int8" and head is embedding:
        head = _rounded("embedding", embedding, path=tensors.path)
    return ModelWeights(embedding=embedding, layers=layers, norm=loaded["norm"], head=head)


def _rounded(name: str, weight: Tensor, *, path: Path) -> Matrix:
    try:
        return quantise(weight)
    except WeightNotFiniteError as error:
        raise ModelFileError(path=path, reason=f"tensor {name}: {error}") from error


def _shards(directory: Path) -> list[Path]:
    index_path = directory / "model.safetensors.index.json"
    if not index_path.is_file():
        return [directory / "model.safetensors"]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(path=index_path, reason="names no tensors")
    names = {str(name) for name in weight_map.values()}
    # An index may not lead out of its directory.
    outside = [name for name in names if name != Path(name).name or name in ("", "..")]
    if outside:
        raise ModelFileError(path=index_path, reason=f"names the foreign file {min(outside)!r}")
    return [directory / name for name in sorted(names)]


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise ModelFileError(path=path, reason=str(error)) from error


def _from_hub(name: str, cache: Path | None) -> Path:
    path = Path(name)
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        reason = "no such directory, and hub ids need the package huggingface_hub"
        raise ModelFileError(path=path, reason=reason) from error
    try:
        found = hub.snapshot_download(
            name, cache_dir=cache, allow_patterns=["*.json", "*.safetensors", "*.jinja"]
        )
    except Exception as error:  # the package's own errors have no common root of ours
        raise ModelFileError(path=path, reason=f"the hub did not deliver it: {error}") from error
    return Path(found)
