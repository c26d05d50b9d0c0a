"""The decoder computes what transformers computes, and no row of a batch touches another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.model import KVContext, Model
from engine.model_config import ModelFileError, UnsupportedArchitecture, UnsupportedFeature
from engine.tokenizer import Detokenizer, load_tokenizer
from engine.weights import FUSED_FILE, load_config, load_model
from tests.tiny import tiny_gguf, tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tied": False},
    "one-kv-head": {"heads": 4, "kv_heads": 1, "head_dim": 32},
    "no-grouping": {"heads": 4, "kv_heads": 4},
    "wide-heads": {"heads": 2, "kv_heads": 2, "head_dim": 48},
    "biases": {"bias": True},
    "linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3-rope": {"rope_scaling": LLAMA3},
    "rope-parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 5000.0}},
    "three-shards": {"shards": 3},
}


class ContiguousKV:
    """The plainest KV context: one sequence of rows for each entry of `owners`."""

    def __init__(self, owners: list[int]) -> None:
        self.owners = owners
        self._keys: dict[tuple[int, int], Tensor] = {}
        self._values: dict[tuple[int, int], Tensor] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        for row, owner in enumerate(self.owners):
            for store, new in ((self._keys, k), (self._values, v)):
                place = (layer, owner)
                held = [store[place]] if place in store else []
                store[place] = torch.cat([*held, new[row : row + 1]])

    def attend(self, layer: int, q: Tensor) -> Tensor:
        seen = {owner: self._keys[layer, owner].shape[0] for owner in set(self.owners)}
        for owner in self.owners:
            seen[owner] -= 1
        rows = []
        for row, owner in enumerate(self.owners):
            seen[owner] += 1
            keys, values = (s[layer, owner][: seen[owner]] for s in (self._keys, self._values))
            mine, keys, values = (x.transpose(0, 1)[None] for x in (q[row : row + 1], keys, values))
            mixed = F.scaled_dot_product_attention(mine, keys, values, enable_gqa=True)
            rows.append(mixed[0].transpose(0, 1))
        return torch.cat(rows)


def logits_of(model: Model, tokens: list[int], *, kv: KVContext | None = None) -> Tensor:
    context = kv or ContiguousKV([0] * len(tokens))
    positions = torch.arange(len(tokens))
    return model.logits(model.forward(torch.tensor(tokens), positions, context))


def some_tokens(count: int, *, vocabulary: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (count,), generator=generator).tolist()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_agree_with_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Every supported shape of a Llama gives transformers' logits within 1e-4."""
    transformers = pytest.importorskip("transformers")
    directory = tiny_llama(tmp_path / "tiny", **shape)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = load_model(directory)
    tokens = some_tokens(200, vocabulary=model.config.vocabulary)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(model, tokens), expected, atol=1e-4, rtol=0)


def test_a_shape_matters(tmp_path: Path) -> None:
    """The comparison above can fail: each rope variant moves the logits by far more than 1e-4."""
    tokens = some_tokens(200, vocabulary=260)
    plain = logits_of(load_model(tiny_llama(tmp_path / "plain")), tokens)
    for name in ("linear-rope", "llama3-rope", "rope-parameters"):
        other = logits_of(load_model(tiny_llama(tmp_path / name, **SHAPES[name])), tokens)
        assert (other - plain).abs().max() > 0.1


def test_chunks_and_steps_continue_a_sequence(tmp_path: Path) -> None:
    """Chunked fills and single steps give the logits of one pass over the whole."""
    model = load_model(tiny_llama(tmp_path / "tiny"))
    tokens = some_tokens(20, vocabulary=model.config.vocabulary)
    whole = logits_of(model, tokens)
    kv = ContiguousKV([])
    for start, end in ((0, 7), (7, 16), (16, 17), (17, 19)):
        kv.owners = [0] * (end - start)
        model.fill(torch.tensor(tokens[start:end]), torch.arange(start, end), kv)
    kv.owners = [0]
    last = model.logits(model.forward(torch.tensor(tokens[19:]), torch.tensor([19]), kv))
    torch.testing.assert_close(last[0], whole[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_depends_on_its_neighbours(tmp_path: Path, rows: int, dtype: torch.dtype) -> None:
    """Changing every other row of a decode step leaves a row's logits equal to the last bit."""
    model = load_model(tiny_llama(tmp_path / "tiny"), dtype=dtype)
    past = [some_tokens(9, vocabulary=260, seed=seed) for seed in range(rows)]

    def step(changed: int) -> Tensor:
        """Logits of all rows when those other than row 0 have other pasts and tokens."""
        kv = ContiguousKV([])
        news = []
        for row in range(rows):
            shift = changed if row else 0
            tokens = [(token + shift) % 260 for token in past[row]]
            kv.owners = [row] * 8
            model.fill(torch.tensor(tokens[:8]), torch.arange(8), kv)
            news.append(tokens[8])
        kv.owners = list(range(rows))
        return model.logits(model.forward(torch.tensor(news), torch.full((rows,), 8), kv))

    first, second = step(0), step(77)
    assert torch.equal(first[0], second[0])
    assert rows == 1 or not torch.equal(first[1:], second[1:])


def test_a_decode_row_is_the_same_alone_and_in_company(tmp_path: Path) -> None:
    """One to eight rows give row 0 the same bits, because a step never has fewer than four."""
    model = load_model(tiny_llama(tmp_path / "tiny", hidden=192, mlp=512))
    tokens = some_tokens(8, vocabulary=260)
    results = []
    for rows in (1, 2, 3, 4, 8):
        kv = ContiguousKV(list(range(rows)))
        positions = torch.zeros(rows, dtype=torch.int64)
        results.append(model.logits(model.forward(torch.tensor(tokens[:rows]), positions, kv))[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_nothing_to_compute(tmp_path: Path) -> None:
    """A pass over no tokens is legal and empty."""
    model = load_model(tiny_llama(tmp_path / "tiny"))
    none = torch.zeros(0, dtype=torch.int64)

    class Nothing:
        def append(self, layer: int, k: Tensor, v: Tensor) -> None:
            pass

        def attend(self, layer: int, q: Tensor) -> Tensor:
            return q

    hidden = model.forward(none, none, Nothing())
    assert hidden.shape == (0, model.config.hidden)
    assert model.logits(hidden).shape == (0, model.config.vocabulary)


def test_gguf_is_converted_once_and_equals_its_directory(tmp_path: Path) -> None:
    """A GGUF gives the bits of the directory it came from, converts once, and is then mapped."""
    directory = tiny_llama(tmp_path / "tiny", tied=False)
    file = tiny_gguf(tmp_path / "tiny.gguf", directory)
    stages: list[tuple[str, float]] = []
    model = load_model(file, cache=tmp_path / "cache", progress=lambda *stage: stages.append(stage))
    expected = load_model(directory)
    tokens = some_tokens(30, vocabulary=260)
    assert torch.equal(logits_of(model, tokens), logits_of(expected, tokens))
    assert ("convert", 1.0) in stages
    assert stages[-1] == ("load", 1.0)
    stages.clear()
    again = load_model(file, cache=tmp_path / "cache", progress=lambda *it: stages.append(it))
    assert {stage for stage, _ in stages} == {"load"}
    assert again.identity == model.identity
    (converted,) = (tmp_path / "cache").glob(f"*/{FUSED_FILE}")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(converted) in maps
    assert load_tokenizer(file, cache=tmp_path / "cache").encode("in the 12") == load_tokenizer(
        directory
    ).encode("in the 12")


def test_a_changed_gguf_is_converted_again(tmp_path: Path) -> None:
    """A file replaced under the same name is not answered from the old conversion."""
    cache = tmp_path / "cache"
    file = tiny_gguf(tmp_path / "it.gguf", tiny_llama(tmp_path / "a", layers=1))
    assert load_model(file, cache=cache).config.layers == 1
    tiny_gguf(file, tiny_llama(tmp_path / "b", layers=2))
    assert load_model(file, cache=cache).config.layers == 2


def test_a_cache_holds_one_conversion_of_each_file(tmp_path: Path) -> None:
    """That of its present content; who has mapped an earlier one keeps it, other files' stay."""
    cache = tmp_path / "cache"
    other = tiny_gguf(tmp_path / "other.gguf", tiny_llama(tmp_path / "c", layers=3))
    load_model(other, cache=cache)
    file = tiny_gguf(tmp_path / "it.gguf", tiny_llama(tmp_path / "a", layers=1))
    first = load_model(file, cache=cache)
    tokens = some_tokens(9, vocabulary=260)
    before = logits_of(first, tokens)
    (cache / ".building-of-a-process-that-was-killed").mkdir()
    (cache / "somebody's own").mkdir()
    tiny_gguf(file, tiny_llama(tmp_path / "b", layers=2))
    load_model(file, cache=cache)
    assert sorted(one.name.split("-")[0] for one in cache.iterdir() if one.is_dir()) == [
        *("it", "other", "somebody's own"),
    ]
    assert torch.equal(logits_of(first, tokens), before)
    assert load_model(other, cache=cache).config.layers == 3


def test_a_model_may_have_any_name(tmp_path: Path) -> None:
    """Also one that is no text, as file systems allow, beside conversions of files of such names."""
    cache = tmp_path / "cache"
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.mkdir()
    file = tiny_gguf(folder / "it.gguf", tiny_llama(tmp_path / "a", layers=1))
    assert load_model(file, cache=cache).config.layers == 1
    tiny_gguf(file, tiny_llama(tmp_path / "b", layers=2))
    assert load_model(file, cache=cache).config.layers == 2
    assert len([one for one in cache.iterdir() if one.is_dir()]) == 1


def test_identity_tells_models_apart(tmp_path: Path) -> None:
    """Another weight, another number or another type is another fingerprint; a copy is not."""
    one = load_model(tiny_llama(tmp_path / "one"))
    assert load_model(tiny_llama(tmp_path / "copy")).identity == one.identity
    others = [
        load_model(tiny_llama(tmp_path / "seed", seed=1)),
        load_model(tiny_llama(tmp_path / "base", rope_base=9999.0)),
        load_model(tmp_path / "one", dtype=torch.bfloat16),
    ]
    down = one.weights.layers[1].down
    assert isinstance(down, Tensor)
    down[3, 4] += 1e-3
    models = [one, Model(one.config, one.weights), *others]
    assert len({model.identity.fingerprint for model in models}) == len(models)


def test_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    """What is not a Llama is refused with the name that its file gives."""
    directory = tiny_llama(tmp_path / "tiny")
    with pytest.raises(UnsupportedArchitecture, match="Qwen3ForCausalLM") as refused:
        load_model(tiny_llama(tmp_path / "q", architectures=["Qwen3ForCausalLM"]))
    assert refused.value.name == "Qwen3ForCausalLM"
    with pytest.raises(UnsupportedArchitecture, match="mamba"):
        load_model(tiny_llama(tmp_path / "m", architectures=None, model_type="mamba"))
    other = tiny_gguf(tmp_path / "other.gguf", directory, architecture="gemma3")
    with pytest.raises(UnsupportedArchitecture, match="gemma3"):
        load_model(other, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("[!.]*"))


@pytest.mark.parametrize(
    ("feature", "extra"),
    [
        ("rope scaling = 'yarn'", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("rope scaling = 'dynamic'", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("sliding_window = 128", {"sliding_window": 128}),
        ("quantization_config = 'awq'", {"quantization_config": {"quant_method": "awq"}}),
        ("hidden_act = 'gelu'", {"hidden_act": "gelu"}),
        ("partial_rotary_factor = 0.5", {"partial_rotary_factor": 0.5}),
    ],
)
def test_unknown_features_are_refused_by_name(
    tmp_path: Path, feature: str, extra: dict[str, Any]
) -> None:
    """A known architecture with a feature that would change the numbers is refused."""
    with pytest.raises(UnsupportedFeature) as refused:
        load_model(tiny_llama(tmp_path / "tiny", **extra))
    assert feature in str(refused.value)


@pytest.mark.parametrize(
    ("reason", "extra"),
    [
        ("num_hidden_layers is 'two'", {"num_hidden_layers": "two"}),
        ("num_hidden_layers is True", {"num_hidden_layers": True}),
        ("rms_norm_eps is -1", {"rms_norm_eps": -1}),
        ("4 heads are not a multiple of 3 KV heads", {"num_key_value_heads": 3}),
        ("tensor model.layers.2", {"num_hidden_layers": 3}),
        ("unknown tensor model.layers.1", {"num_hidden_layers": 1}),
        (
            "gate_up has shape [256, 64], the configuration says [200, 64]",
            {"intermediate_size": 100},
        ),
        ("eos token 999 is outside the vocabulary of 264", {"eos_token_id": [2, 999]}),
        ("names no factor", {"rope_scaling": {"rope_type": "linear"}}),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, reason: str, extra: dict[str, Any]) -> None:
    """A configuration that its weights do not bear out is named, with both numbers."""
    directory = tiny_llama(tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text()) | extra
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError) as refused:
        load_model(directory)
    assert reason in str(refused.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Truncated, absent and misleading files give one typed error that names the file."""
    directory = tiny_llama(tmp_path / "tiny")
    file = tiny_gguf(tmp_path / "tiny.gguf", directory)
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    for length in (0, 4, 100, len(content) // 2, len(content) - 1):
        weights.write_bytes(content[:length])
        with pytest.raises(ModelFileError) as refused:
            load_model(directory)
        assert refused.value.path == weights
    weights.unlink()
    with pytest.raises(ModelFileError):
        load_model(directory)
    (directory / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_config(directory)
    content = file.read_bytes()
    for length in (4, 30, 200, len(content) // 2, len(content) - 40):
        file.write_bytes(content[:length])
        with pytest.raises(ModelFileError, match=r"tiny\.gguf"):
            load_model(file, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("[!.]*")), "a failed conversion left something"
    assert not list((tmp_path / "cache").glob(".building*"))
    with pytest.raises(ModelFileError, match="no such file"):
        load_model(tmp_path / "absent")


def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    """A shard index that names a file elsewhere is refused."""
    directory = tiny_llama(tmp_path / "tiny", shards=2)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    with pytest.raises(ModelFileError, match="foreign file"):
        load_model(directory)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    """Several end tokens are kept, those of generation_config.json included."""
    directory = tiny_llama(tmp_path / "tiny", eos_token_id=[2, 5])
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_config(directory).eos_tokens == (2, 5, 7)


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_agrees_with_transformers(model_path: Path, tmp_path: Path) -> None:
    """The small instruct model has transformers' logits and answers Paris."""
    transformers = pytest.importorskip("transformers")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = load_model(model_path, cache=tmp_path)
    tokenizer = load_tokenizer(model_path, cache=tmp_path)
    where = {"pretrained_model_name_or_path": model_path.parent, "gguf_file": model_path.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    for text in ("Hello, world!", " 12 345 naïve ☕ 東京\n\n\tdef f(x):", "<|im_start|>user\n"):
        assert tokenizer.encode(text) == their_tokenizer.encode(text)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat(messages)
    assert prompt == their_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer.encode_chat(messages)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    kv = ContiguousKV([0] * len(tokens))
    logits = logits_of(model, tokens, kv=kv)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)

    detokenizer = Detokenizer(tokenizer)
    text = ""
    kv.owners = [0]
    for position in range(len(tokens), len(tokens) + 20):
        token = int(logits[-1].argmax())
        if token in model.config.eos_tokens:
            break
        text += detokenizer.push(token)
        hidden = model.forward(torch.tensor([token]), torch.tensor([position]), kv)
        logits = model.logits(hidden)
    assert text + detokenizer.flush() == "The capital of France is Paris."
