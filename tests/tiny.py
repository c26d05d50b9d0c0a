"""A tiny random Llama in Hugging Face's format, made on the fly; and the same as a GGUF.

The weights are large enough that its logits have wide gaps: greedy text is then stable.
Its tokenizer is byte-level with a few merges, so every text has tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.tokenizer import byte_level_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
MERGES = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("e", "r"))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokens() -> list[str]:
    """The vocabulary in order of ids: special tokens, 256 bytes, merged tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    characters = [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(others)]
    return [*SPECIAL, *characters, *(left + right for left, right in MERGES)]


def tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    mlp: int = 128,
    context: int = 512,
    tied: bool = True,
    bias: bool = False,
    rope_base: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    shards: int = 1,
    **extra: Any,
) -> Path:
    """Write the model into `path` (made if absent) and return it.

    `extra` goes into `config.json` as it is, to make a configuration that must be refused.
    """
    if kv_heads * head_dim * 4 < 128:
        raise ValueError(f"{kv_heads} KV heads of {head_dim} are less than 128 bytes a token")
    path.mkdir(parents=True, exist_ok=True)
    tokens = tiny_tokens()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "vocab_size": len(tokens),
        "max_position_embeddings": context,
        "rope_theta": rope_base,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_bias": bias,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
        **extra,
    }
    _write_json(path / "config.json", config)
    _write_weights(path, tiny_weights(config, seed=seed), shards=shards)
    tokenizer = byte_level_tokenizer(
        tokens=tokens, merges=MERGES, special=SPECIAL, digits_alone=True
    )
    (path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", described)
    return path


def tiny_weights(config: dict[str, Any], *, seed: int) -> dict[str, Tensor]:
    """Random weights under their Hugging Face names, a pure function of the arguments."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul(columns**-0.5)

    def vector(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * hidden**0.5}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        for name, (rows, columns) in shapes.items():
            weights[f"{layer}{name}.weight"] = matrix(rows, columns)
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                weights[f"{layer}{name}.bias"] = vector(rows) - 1
        weights[f"{layer}input_layernorm.weight"] = vector(hidden)
        weights[f"{layer}post_attention_layernorm.weight"] = vector(hidden)
    weights["model.norm.weight"] = vector(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return weights


def tiny_gguf(path: Path, directory: Path, *, architecture: str = "llama") -> Path:
    """The tiny model of `directory` as an unquantised GGUF file."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = tiny_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in tiny_weights(config, seed=0).items():
        writer.add_tensor(_gguf_name(name), _gguf_order(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    replacements = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for ours, theirs in replacements.items():
        name = name.replace(ours, theirs)
    return name


def _gguf_order(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for projection, count in heads.items():
        if projection in name:
            halves = tensor.reshape(count, 2, config["head_dim"] // 2, *tensor.shape[1:])
            return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
    return tensor


def _write_weights(path: Path, weights: dict[str, Tensor], *, shards: int) -> None:
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
