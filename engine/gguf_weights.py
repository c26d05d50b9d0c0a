"""Turning a GGUF file of the llama architecture into a directory that can be mapped.

Owns the reading of GGUF and the cache of converted models.
It must not know how tensors are used: it writes the same files that a Hugging Face directory has,
with one file of fused float32 tensors instead of the separate ones.

A converted model lies in `CACHE/STEM-KEY/`, the key made of size, time and head of the source.
It is built beside and renamed into place, so a reader sees a whole model or none, and takes the
place of what an earlier content of the same file was converted to.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import numpy.typing as npt

from engine.model_config import (
    ModelConfig,
    ModelError,
    ModelFileError,
    UnsupportedArchitecture,
    UnsupportedFeature,
    parse_config,
)
from engine.tokenizer import byte_level_tokenizer
from engine.weights import FUSED_FILE, Progress, fused_shapes, hugging_face_parts

Array = npt.NDArray[np.float32]

# Raised whenever the converted form changes, so that old conversions are not reused.
CONVERSION = "1"
HEAD_BYTES = 1 << 20
SOURCE_FILE = "converted_from"
BUILDING = ".building-"
# A multiple of a memory page: mapped tensors then begin on cache lines.
ALIGNMENT_BYTES = 4096
SPECIAL_TOKEN = 3
PRE_TOKENIZERS = ("smollm", "gpt-2", "default")

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def converted(path: Path, *, cache: Path, progress: Progress | None = None) -> Path:
    """The directory of the converted model, made now if it is not in the cache.

    Raises UnsupportedArchitecture, UnsupportedFeature or ModelFileError.
    Several processes may ask at once: one converts, the others wait for it.
    """
    target = cache / f"{path.stem}-{_key(path)}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / ".convert.lock"):
            if not target.is_dir():
                _convert(path, target, progress)
                _remove_stale(target, path)
    except OSError as error:
        raise ModelFileError(path=target, reason=str(error)) from error
    return target


def _key(path: Path) -> str:
    try:
        status = path.stat()
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise ModelFileError(path=path, reason=str(error)) from error
    digest = hashlib.sha256(f"{CONVERSION} {status.st_size} {status.st_mtime_ns} ".encode())
    digest.update(head)
    return digest.hexdigest()[:16]


def _remove_stale(target: Path, path: Path) -> None:
    """Remove what earlier contents of this file were converted to, and what was never finished.

    Whoever has mapped one keeps it; a cache that others may not change stays as it is.
    """
    source = os.fsencode(path.resolve())
    for folder in target.parent.iterdir():
        try:
            stale = folder.name.startswith(BUILDING) or (
                folder != target and (folder / SOURCE_FILE).read_bytes() == source
            )
        except OSError:
            continue
        if stale:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(path: Path, target: Path, progress: Progress | None) -> None:
    building = Path(tempfile.mkdtemp(prefix=BUILDING, dir=target.parent))
    try:
        source = _Source.open(path)
        raw = source.config()
        config = parse_config(raw, path=path)
        source.refuse_unknown_tensors(config)
        _write_json(building / "config.json", raw)
        tokenizer, described = source.tokenizer(config)
        (building / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        _write_json(building / "tokenizer_config.json", described)
        _write_fused(building / FUSED_FILE, config, source.fused, progress)
        (building / SOURCE_FILE).write_bytes(os.fsencode(path.resolve()))
        # Readers of other users may share the cache; mkdtemp made it private.
        building.chmod(0o755)
        building.rename(target)
    except (ModelError, OSError):
        raise
    except Exception as error:  # a damaged file makes the reader fail in ways it does not name
        raise ModelFileError(path=path, reason=f"{type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


@attrs.frozen(eq=False)
class _Source:
    """An open GGUF file."""

    path: Path
    reader: gguf.GGUFReader
    tensors: dict[str, gguf.ReaderTensor]

    @classmethod
    def open(cls, path: Path) -> _Source:
        reader = gguf.GGUFReader(path)
        source = cls(path, reader, {tensor.name: tensor for tensor in reader.tensors})
        architecture = source.value("general.architecture", "unnamed")
        if architecture != "llama":
            raise UnsupportedArchitecture(name=str(architecture))
        return source

    def value(self, name: str, default: Any = None) -> Any:
        field = self.reader.get_field(name)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """The metadata in the words of a Hugging Face `config.json`."""
        heads = self.value("llama.attention.head_count")
        hidden = self.value("llama.embedding_length")
        head_dim = self.value("llama.attention.key_length", hidden // heads)
        if self.value("llama.rope.dimension_count", head_dim) != head_dim:
            value = self.value("llama.rope.dimension_count")
            raise UnsupportedFeature(feature="llama.rope.dimension_count", value=value)
        if self.value("llama.expert_count", 0):
            value = self.value("llama.expert_count")
            raise UnsupportedFeature(feature="llama.expert_count", value=value)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.value("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.value("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_size": hidden,
            "intermediate_size": self.value("llama.feed_forward_length"),
            "vocab_size": len(self.value("tokenizer.ggml.tokens", ())),
            "max_position_embeddings": self.value("llama.context_length"),
            "rope_theta": self.value("llama.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "rms_norm_eps": self.value("llama.attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self.tensors,
            "eos_token_id": self._eos_tokens(),
        }

    def refuse_unknown_tensors(self, config: ModelConfig) -> None:
        known = {
            _gguf_name(part) for name in fused_shapes(config) for part in hugging_face_parts(name)
        }
        unknown = self.tensors.keys() - known
        if unknown:
            raise UnsupportedFeature(feature="tensor", value=min(unknown))

    def fused(self, name: str, config: ModelConfig) -> Array:
        """One fused tensor, dequantised and in Hugging Face's order of rows."""
        parts = [self._tensor(part, config) for part in hugging_face_parts(name)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _tensor(self, name: str, config: ModelConfig) -> Array:
        stored = self.tensors.get(_gguf_name(name))
        if stored is None:
            raise ModelFileError(path=self.path, reason=f"tensor {_gguf_name(name)} is missing")
        weights = np.asarray(gguf.dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        rotated_heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
        for projection, heads in rotated_heads.items():
            if f".{projection}." in name:
                # GGUF interleaves the two halves of each rotated head.
                pairs = weights.reshape(heads, config.head_dim // 2, 2, *weights.shape[1:])
                weights = pairs.swapaxes(1, 2).reshape(weights.shape)
        return weights

    def tokenizer(self, config: ModelConfig) -> tuple[str, dict[str, Any]]:
        """`tokenizer.json` and what `tokenizer_config.json` says."""
        model = self.value("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedFeature(feature="tokenizer.ggml.model", value=model)
        pre = self.value("tokenizer.ggml.pre", "default")
        if pre not in PRE_TOKENIZERS:
            raise UnsupportedFeature(feature="tokenizer.ggml.pre", value=pre)
        tokens: list[str] = self.value("tokenizer.ggml.tokens")
        types = self.value("tokenizer.ggml.token_type", [1] * len(tokens))
        beginning = self.value("tokenizer.ggml.bos_token_id")
        begins = self.value("tokenizer.ggml.add_bos_token", False)
        tokenizer = byte_level_tokenizer(
            tokens=tokens,
            merges=[tuple(merge.split(" ", 1)) for merge in self.value("tokenizer.ggml.merges")],
            special=[
                token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN
            ],
            digits_alone=pre == "smollm",
            first=tokens[beginning] if begins and beginning is not None else None,
        )
        described = {
            "bos_token": tokens[beginning] if beginning is not None else None,
            "eos_token": tokens[config.eos_tokens[0]] if config.eos_tokens else None,
            "chat_template": self.value("tokenizer.chat_template"),
        }
        return tokenizer, described

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.value("llama.rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self.value("llama.rope.scaling.factor")}

    def _eos_tokens(self) -> list[int]:
        names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = (self.value(name) for name in names)
        return list(dict.fromkeys(int(token) for token in found if token is not None))


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{_LAYER_NAMES[module]}.{kind}"


def _write_fused(
    path: Path,
    config: ModelConfig,
    fused: Callable[[str, ModelConfig], Array],
    progress: Progress | None,
) -> None:
    """A safetensors file, tensor by tensor, so that no second copy of the model is in memory."""
    header: dict[str, Any] = {}
    offset = 0
    shapes = fused_shapes(config)
    for name, shape in shapes.items():
        end = offset + int(np.prod(shape)) * 4
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    padding = -(8 + len(encoded)) % ALIGNMENT_BYTES
    with path.open("wb") as file:
        file.write((len(encoded) + padding).to_bytes(8, "little"))
        file.write(encoded + b" " * padding)
        for done, (name, shape) in enumerate(shapes.items()):
            tensor = fused(name, config)
            if tensor.shape != shape:
                reason = f"{name} has shape {tensor.shape}, the metadata says {shape}"
                raise ModelFileError(path=path, reason=reason)
            file.write(np.ascontiguousarray(tensor).data)
            if progress is not None:
                progress("convert", (done + 1) / len(shapes))
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
