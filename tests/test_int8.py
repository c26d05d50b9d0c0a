"""Weights of eight bits: how far rounding moves them, and that all ways of computing mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.compiled_step import CompiledSteps
from engine.decode_step import DecodeSteps, PlainSteps, make_steps
from engine.model import LayerWeights, Model, ModelFileError, ModelWeights, UnsupportedFeature
from engine.scrubber import weight_bytes
from engine.tokenizer import load_tokenizer
from engine.weights import load_model
from kernels import int8
from kernels.int8 import (
    GROUP,
    Int8Matrix,
    MatrixShapeError,
    WeightNotFiniteError,
    linear,
    quantise,
)
from tests import greedy
from tests.inprocess import Deployment
from tests.test_decode_step import LENGTHS, Room
from tests.test_inprocess import alone, params, poison, prompt_of
from tests.test_model import SHAPES
from tests.tiny import tiny_llama
from transport.engine_planes import fingerprint, page_layout
from transport.settings import InvalidSetting, PoolSettings

TOLERANCE = 3e-4
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", heads=6, tied=False)


@pytest.fixture(scope="module")
def rounded(folder: Path) -> Model:
    return load_model(folder, precision="int8")


def widened(model: Model) -> Model:
    """A float32 model of the numbers that a rounded one stands for."""

    def wide(weight: Any) -> Any:
        return weight.dequantised() if isinstance(weight, Int8Matrix) else weight

    layers = tuple(
        LayerWeights(**{f.name: wide(getattr(layer, f.name)) for f in attrs.fields(LayerWeights)})
        for layer in model.weights.layers
    )
    weights = model.weights
    return Model(
        model.config, ModelWeights(weights.embedding, layers, weights.norm, wide(weights.head))
    )


# --- Rounding -------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 99),
    exponent=st.integers(-45, 37),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=150, deadline=None)
def test_no_weight_moves_by_more_than_half_a_step(
    rows: int, columns: int, exponent: int, seed: int
) -> None:
    """Whatever the magnitudes, subnormal ones included, and however short the last group is; -128 is
    not used, and a group's greatest keeps its magnitude.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 10.0**exponent
    found = quantise(weight)
    assert found.values.dtype is torch.int8
    assert int(found.values.min()) >= -127
    scales = found.scales.double().repeat_interleave(GROUP, dim=1)[:, :columns]
    moved = (found.values.double() * scales - weight.double()).abs()
    assert bool((moved <= scales / 2 * (1 + 1e-5)).all())
    for first in range(0, columns, GROUP):
        usual = weight[:, first : first + GROUP].abs().amax(dim=1) > 1e-30
        most = found.values[:, first : first + GROUP].abs().amax(dim=1)
        assert most[usual].tolist() == [127] * int(usual.sum())


def test_rounding_is_odd_and_each_group_has_its_own_scale() -> None:
    """A negative is the negative, zeros stay zeros, and a small row, or a small group of a row, keeps
    its digits beside a big one.
    """
    small, nothing = [1e-3, -5e-4, 2.5e-4], [0.0] * (GROUP - 3)
    weight = torch.tensor(
        [[1000.0, -1.0, 0.0, *nothing, *small], [*small, *nothing, 0.0, 0.0, 0.0]]
    )
    one, other = quantise(weight), quantise(-weight)
    assert torch.equal(one.values, -other.values)
    assert torch.equal(one.scales, other.scales)
    assert one.values[0, :3].tolist() == [127, 0, 0]
    assert one.values[0, GROUP:].tolist() == one.values[1, :3].tolist() == [127, -64, 32]
    assert one.dequantised()[1, GROUP:].tolist() == [0.0, 0.0, 0.0]
    assert (one.shape, one.scales.shape) == ((2, GROUP + 3), (2, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_has_no_scale(value: float) -> None:
    """Such a weight is refused with its row; rounding would make numbers of it."""
    weight = torch.ones(4, 3)
    weight[2, 1] = value
    with pytest.raises(WeightNotFiniteError, match="row 2"):
        quantise(weight)


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(2, 2, dtype=torch.int32)])
def test_what_is_no_matrix_of_weights_is_refused(weight: Tensor) -> None:
    """A vector, or whole numbers: the shape and the type are named."""
    with pytest.raises(MatrixShapeError, match=r"no matrix"):
        quantise(weight)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [20, 64, 80])
@pytest.mark.parametrize("elements", [1, 100, 1 << 20])
def test_a_product_is_that_of_the_matrix_it_stands_for(
    monkeypatch: pytest.MonkeyPatch, elements: int, inputs: int, *, bias: bool
) -> None:
    """However many rows are widened at a time."""
    monkeypatch.setattr(int8, "SLICE_ELEMENTS", elements)
    matrix = quantise(torch.randn(37, inputs))
    x, added = torch.randn(5, inputs), torch.randn(37) if bias else None
    expected = torch.nn.functional.linear(
        x.double(), matrix.dequantised().double(), None if added is None else added.double()
    )
    torch.testing.assert_close(linear(x, matrix, added).double(), expected, atol=1e-5, rtol=1e-5)


# --- Steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_compiled_steps_are_those_of_the_dequantised_model(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    """Compiled over bytes, plain over bytes, and plain over the float32 numbers they stand for agree
    within 3e-4; compiled over bytes has the very bits of compiled over those numbers.
    """
    model = load_model(tiny_llama(tmp_path / "tiny", **shape), precision="int8")
    wide = widened(model)
    rooms = [Room(of, LENGTHS[:6]) for of in (wide, model, model, model)]
    steps: list[DecodeSteps] = [
        PlainSteps(wide, rooms[0].pool),
        PlainSteps(model, rooms[1].pool),
        make_steps(model, rooms[2].pool, threads=2),
        make_steps(wide, rooms[3].pool, threads=1),
    ]
    assert [type(way) for way in steps[2:]] == [CompiledSteps] * 2
    for done in range(3):
        expected, *found = (
            room.run(way, list(range(6)), done=done) for room, way in zip(rooms, steps, strict=True)
        )
        assert expected.std() > 0.5
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("field", ["qkv", "output", "gate_up", "down", "head"])
@pytest.mark.parametrize("part", ["values", "scales"])
def test_the_tolerance_sees_one_wrong_byte_and_one_wrong_scale(
    rounded: Model, field: str, part: str
) -> None:
    """The comparison above can fail: in each matrix one byte off, or one row's scales in another order."""
    rooms = [Room(rounded, LENGTHS[:6]), Room(rounded, LENGTHS[:6])]
    everyone = list(range(6))
    expected = rooms[0].run(make_steps(rounded, rooms[0].pool, threads=1), everyone)
    weights = rounded.weights
    matrix = weights.head if field == "head" else getattr(weights.layers[1], field)
    assert isinstance(matrix, Int8Matrix)
    kept = getattr(matrix, part).clone()
    if part == "values":
        matrix.values[5, 3] = -matrix.values[5, 3] if matrix.values[5, 3].abs() > 30 else 100
    else:
        matrix.scales[5] = matrix.scales[5].flip(0)
    found = rooms[1].run(make_steps(rounded, rooms[1].pool, threads=1), everyone)
    getattr(matrix, part).copy_(kept)
    assert (found - expected).abs().max() > 2 * TOLERANCE


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_its_company(rounded: Model, threads: int) -> None:
    """Alone, and in batches of any size up to 16: the same bits."""
    everyone = list(range(len(LENGTHS)))
    room = Room(rounded, LENGTHS)
    one = make_steps(rounded, room.pool, threads=1)
    expected = torch.cat([room.run(one, [number]) for number in everyone])
    for count in (2, 3, 4, 7, 16):
        room = Room(rounded, LENGTHS)
        steps = make_steps(rounded, room.pool, threads=threads)
        numbers = everyone[-count:]
        assert torch.equal(room.run(steps, numbers), expected[numbers])


@pytest.mark.parametrize("length", [1, 8, 61])
def test_both_engines_say_what_the_rounded_model_alone_would_say(
    folder: Path, rounded: Model, length: int
) -> None:
    """Through prefill, transfer and compiled decode: the tokens of one plain forward over the
    dequantised numbers, which are not those of the model that was not rounded.
    """
    deployment = Deployment(rounded, load_tokenizer(folder), poison=poison)
    runner = deployment.decode.runner
    assert isinstance(runner.compute, CompiledSteps)
    client = deployment.ask(prompt_of(length, rounded), params(count=40))
    deployment.settle()
    tokens, logprobs = alone(widened(rounded), prompt_of(length, rounded), params(count=40))
    assert client.tokens == tokens
    assert client.logprobs == pytest.approx(logprobs, abs=2e-4)
    _, others = alone(load_model(folder), prompt_of(length, rounded), params(count=40))
    assert client.logprobs != pytest.approx(others, abs=2e-3)


# --- Models and settings --------------------------------------------------------------------------


def test_engines_of_different_weights_are_never_paired(folder: Path, rounded: Model) -> None:
    """KV of rounded weights is not KV of the others: identity and layout fingerprint differ."""
    model = load_model(folder)
    assert load_model(folder, precision="int8").identity == rounded.identity
    assert rounded.identity != model.identity
    layout = page_layout(model, page_tokens=8)
    assert page_layout(rounded, page_tokens=8) == layout
    assert fingerprint(rounded, layout) != fingerprint(model, layout)


@pytest.mark.parametrize("part", ["values", "scales"])
def test_the_identity_sees_one_changed_number(folder: Path, part: str) -> None:
    """A byte or a scale of one matrix."""
    models = [load_model(folder, precision="int8") for _ in range(2)]
    down = models[1].weights.layers[1].down
    assert isinstance(down, Int8Matrix)
    getattr(down, part)[3] += 1
    assert models[0].identity != models[1].identity


def test_an_embedding_that_is_also_the_head_is_rounded_as_the_head_alone(tmp_path: Path) -> None:
    """Rows that are looked up keep their float32: no step reads them all."""
    directory = tiny_llama(tmp_path / "tied", tied=True)
    model, plain = load_model(directory, precision="int8"), load_model(directory)
    assert torch.equal(model.weights.embedding, plain.weights.embedding)
    assert isinstance(model.weights.head, Int8Matrix)
    assert all(isinstance(matrix, Int8Matrix) for matrix in model.weights.matrices)
    assert weight_bytes(model) < weight_bytes(plain) / 3


@pytest.mark.parametrize(
    "others", [{"dtype": torch.bfloat16}, {"device": "meta"}], ids=["bfloat16", "device"]
)
def test_int8_is_computed_in_float32_on_cpus(folder: Path, others: dict[str, Any]) -> None:
    """Other types and places are refused by name before anything is read."""
    with pytest.raises(UnsupportedFeature, match="weights = 'int8 with"):
        load_model(folder, precision="int8", **others)


def test_a_model_with_an_infinite_weight_is_refused(tmp_path: Path) -> None:
    """The tensor and the row are named; in float32 the same file loads."""
    from safetensors.torch import load_file, save_file

    directory = tiny_llama(tmp_path / "tiny")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][7, 1] = float("inf")
    save_file(tensors, path)
    load_model(directory)
    with pytest.raises(ModelFileError, match=r"layers\.1\.down: row 7"):
        load_model(directory, precision="int8")


@pytest.mark.parametrize("weights", ["int4", "INT8", "", "q8_0"])
def test_other_weights_are_refused_with_what_there_is(weights: str) -> None:
    """A misspelt word never means float32."""
    with pytest.raises(InvalidSetting, match="float, int8"):
        PoolSettings(weights=weights)


def test_int8_on_a_device_is_refused() -> None:
    """Before an engine starts."""
    with pytest.raises(InvalidSetting, match="int8 is for CPUs"):
        PoolSettings(weights="int8", device="cuda")


@pytest.mark.model
def test_greedy_answers_of_the_real_model_are_those_of_plain_torch(model_path: Path) -> None:
    """Ten prompts over shuffled pages, compiled over bytes and plain over the same bytes."""
    model = load_model(model_path, precision="int8")
    asked = [list(answer.prompt) for answer in greedy.kept()[::5]]
    expected = greedy.answers(widened(model), asked, PlainSteps)
    found = greedy.answers(model, asked, lambda m, pool: make_steps(m, pool, threads=1))
    assert found == expected
