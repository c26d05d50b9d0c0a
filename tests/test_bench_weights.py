"""The comparison of int8 weights with the model's own: what it says of equal and of unequal models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.model import Model
from engine.weights import load_model
from kernels.int8 import Int8Matrix
from tests.test_model import logits_of, some_tokens
from tests.tiny import tiny_llama
from transport import cli
from transport.bench_weights import (
    NEW_TOKENS,
    Recorded,
    UnusableText,
    WeightSettings,
    _common,
    _compare,
    greedy_answers,
    run_weights,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


def test_a_model_is_no_distance_from_itself(model: Model) -> None:
    """Perplexity is that of a plain forward, the divergence 0, and every place agrees."""
    tokens = some_tokens(90, vocabulary=model.config.vocabulary)
    logs = logits_of(model, tokens).log_softmax(-1)
    losses = [-float(logs[place, token]) for place, token in enumerate(tokens[1:])]
    found = _compare(model, model, tokens)
    assert found.plain_perplexity == found.rounded_perplexity
    assert found.plain_perplexity == pytest.approx(
        float(torch.tensor(losses).mean().exp()), rel=1e-4
    )
    assert (found.divergence, found.agreement) == (0.0, 1.0)


def test_a_wrong_scale_is_far_away(folder: Path, model: Model) -> None:
    """Rounding moves distributions a little; the scales of one matrix in another order, a lot."""
    tokens = some_tokens(90, vocabulary=model.config.vocabulary)
    rounded = load_model(folder, precision="int8")
    little = _compare(model, rounded, tokens)
    matrix = rounded.weights.layers[0].gate_up
    assert isinstance(matrix, Int8Matrix)
    matrix.scales.copy_(matrix.scales.flip(0))
    much = _compare(model, rounded, tokens)
    assert 0 < little.divergence < 0.01
    assert much.divergence > 10 * little.divergence
    assert much.agreement < little.agreement <= 1


def test_greedy_answers_are_those_of_a_plain_forward(model: Model) -> None:
    """Prompts of any length in one batch, by compiled steps, say what the model alone would say."""
    prompts = [tuple(some_tokens(n, vocabulary=model.config.vocabulary, seed=n)) for n in (1, 40)]
    found = greedy_answers(model, [Recorded(prompt) for prompt in prompts], threads=1)
    for prompt, tokens in zip(prompts, found, strict=True):
        row = list(prompt)
        for _ in range(NEW_TOKENS):
            row.append(int(logits_of(model, row)[-1].argmax()))
        assert tokens == tuple(row[len(prompt) :])


def test_answers_are_the_same_up_to_the_first_that_differs() -> None:
    """What comes after it does not count again."""
    assert _common([1, 2, 3], [1, 5, 3]) == 1
    assert _common([1, 2], [1, 2]) == 2
    assert _common([4], [1]) == 0


def test_the_report_holds_every_comparison(folder: Path, tmp_path: Path) -> None:
    """Over a text of one's own and recorded answers, which are compared with the model's own."""
    text, answers = tmp_path / "text", tmp_path / "answers.json"
    text.write_text("One sentence, and another that is a little longer. " * 20, encoding="utf-8")
    own = greedy_answers(load_model(folder), [Recorded((70, 71, 72))], threads=1)[0]
    rows = [{"prompt": [70, 71, 72], "tokens": own}, {"prompt": [5], "tokens": [7]}]
    answers.write_text(json.dumps(rows), encoding="utf-8")
    settings = WeightSettings(model=str(folder), threads=1, text=text, answers=answers)
    said: list[str] = []
    report = run_weights(settings, progress=said.append)
    figures = {figure.name: figure for figure in report.figures}
    assert list(figures) == ["perplexity", "divergence", "most-likely-token", "greedy"]
    assert len(figures["perplexity"].ratios) == len(figures["divergence"].ours) == 2
    assert figures["greedy"].notes["prompts"] == 2
    assert figures["greedy"].notes["own_weights_equal_recorded"] >= 1
    assert said[-1] == "greedy answers to 2 prompts"
    json.dumps(report.to_object())


BAD_ANSWERS = (
    "", "{}", "[]", "[1]", '[{"prompt": [1]}]', '[{"prompt": [], "tokens": []}]',
    '[{"prompt": [-1], "tokens": []}]', '[{"prompt": [1], "tokens": [99999]}]',
    '[{"prompt": ["1"], "tokens": []}]', '[{"prompt": [true], "tokens": []}]',
    json.dumps([{"prompt": [1], "tokens": [1] * (NEW_TOKENS + 1)}]),
    json.dumps([{"prompt": [1] * 600, "tokens": []}]),
)  # fmt: skip


@pytest.mark.parametrize("content", BAD_ANSWERS)
def test_answers_that_are_none_are_refused(folder: Path, tmp_path: Path, content: str) -> None:
    """Whatever the file holds, the error names it before a model is loaded."""
    text, answers = tmp_path / "text", tmp_path / "answers.json"
    text.write_text("ab", encoding="utf-8")
    answers.write_text(content, encoding="utf-8")
    settings = WeightSettings(model=str(folder), threads=1, text=text, answers=answers)
    with pytest.raises(UnusableText, match=r"answers\.json"):
        run_weights(settings, progress=lambda _: None)


@pytest.mark.parametrize("content", [None, b"", b"a", b"\xff\xfe\xff"])
def test_a_text_that_is_none_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    """Absent, empty, a single token, or no UTF-8: exit code 2, and the file's name."""
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    flags = ["--model", str(folder), "--threads", "1", "--text", str(text)]
    assert cli.run(["bench", "weights", *flags]) == 2
    assert str(text) in capsys.readouterr().err
