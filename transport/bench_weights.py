"""How far weights of eight bits move a model's answers: the same tokens through both models.

Owns: the texts, and what is compared at each of their tokens.
Must not know: how weights are rounded, or how fast anything is.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from engine.decode_step import make_steps
from engine.model import Model
from engine.paged import PagedBatch, SequenceSlice
from engine.pool import KVPool
from engine.tokenizer import load_tokenizer
from engine.weights import load_config, load_model
from kernels.layout import PageLayout
from transport.bench_context import PAGE_TOKENS, machine
from transport.bench_stats import Figure, Report, Target

WINDOW_TOKENS = 512
PROMPTS = 50
PROMPT_TOKENS = 24
NEW_TOKENS = 24
BATCH = 10


class UnusableText(ValueError):
    """A file that says what to compare over cannot be used."""

    def __init__(self, *, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason


@attrs.frozen(kw_only=True)
class WeightSettings:
    """What is compared.

    text: a file to compare over, else the pages of prose that lie beside this module.
    answers: a file of recorded greedy answers, whose prompts are then taken; else the prompts are
    pieces of the text.
    """

    model: str
    threads: int = 2
    text: Path | None = None
    answers: Path | None = None


@attrs.frozen
class Recorded:
    """Token ids of a prompt, and of the greedy answer that was recorded, if one was."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...] = ()


@attrs.frozen
class Window:
    """What was found over one piece of text."""

    rounded_perplexity: float
    plain_perplexity: float
    divergence: float
    agreement: float


def run_weights(settings: WeightSettings, *, progress: Callable[[str], None]) -> Report:
    """Compare int8 to the model's own weights. Raises ModelError and UnusableText."""
    date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    tokens = _tokens(settings)
    asked = _asked(settings, tokens, vocabulary=load_config(settings.model).vocabulary)
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        plain, rounded = load_model(settings.model), load_model(settings.model, precision="int8")
        pieces = [tokens[n : n + WINDOW_TOKENS] for n in range(0, len(tokens), WINDOW_TOKENS)]
        found = []
        for number, piece in enumerate(piece for piece in pieces if len(piece) > 1):
            progress(f"text, piece {number + 1} of {len(pieces)}")
            found.append(_compare(plain, rounded, piece))
        progress(f"greedy answers to {len(asked)} prompts")
        given = [greedy_answers(m, asked, threads=settings.threads) for m in (plain, rounded)]
    finally:
        torch.set_num_threads(before)
    return Report(
        date=date,
        machine=machine(),
        settings={**attrs.asdict(settings), "text": str(settings.text or "built in"),
                  "answers": None if settings.answers is None else str(settings.answers)},
        versions={name: version(name) for name in ("kv-custody", "torch")}
        | {"python": platform.python_version()},
        figures=(*_text_figures(found, tokens=len(tokens)), *_greedy_figures(asked, *given)),
    )  # fmt: skip


def _text_figures(found: Sequence[Window], *, tokens: int) -> tuple[Figure, ...]:
    notes = {"tokens": tokens, "window_tokens": WINDOW_TOKENS}
    return (
        Figure(
            name="perplexity",
            says="perplexity of the text with int8 weights, for each window",
            unit="",
            ours=tuple(window.rounded_perplexity for window in found),
            theirs=tuple(window.plain_perplexity for window in found),
            peer="the model's own weights",
            target=Target(value=1.01, better="lower"),
            notes=notes,
        ),
        Figure(
            name="divergence",
            says="mean Kullback-Leibler divergence of the next token's distribution from that of "
            "the model's own weights, for each window",
            unit="nats",
            ours=tuple(window.divergence for window in found),
            target=Target(value=0.01, better="lower"),
            notes=notes,
        ),
        Figure(
            name="most-likely-token",
            says="share of places where the most likely next token is that of the model's own "
            "weights, for each window",
            unit="",
            ours=tuple(window.agreement for window in found),
            target=Target(value=0.97, better="higher"),
            notes=notes,
        ),
    )


def _greedy_figures(
    asked: Sequence[Recorded], plain: Sequence[Sequence[int]], rounded: Sequence[Sequence[int]]
) -> tuple[Figure, ...]:
    pairs = list(zip(plain, rounded, strict=True))
    notes: dict[str, Any] = {
        "prompts": len(asked),
        "new_tokens": NEW_TOKENS,
        "same_answers": sum(list(a) == list(b) for a, b in pairs),
    }
    if any(one.tokens for one in asked):
        notes["own_weights_equal_recorded"] = sum(
            list(one.tokens) == list(tokens[: len(one.tokens)])
            for one, tokens in zip(asked, plain, strict=True)
        )
    return (
        Figure(
            name="greedy",
            says="tokens of each greedy answer before the first that differs from the answer of "
            "the model's own weights",
            unit="tokens",
            ours=tuple(float(_common(a, b)) for a, b in pairs),
            notes=notes,
        ),
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How long two answers are the same."""
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return number
    return len(one)


# --- Texts ----------------------------------------------------------------------------------------


def _tokens(settings: WeightSettings) -> tuple[int, ...]:
    try:
        text = (
            (files("transport") / "assets" / "prose.txt").read_text(encoding="utf-8")
            if settings.text is None
            else settings.text.read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableText(source=str(settings.text), reason=str(error)) from error
    tokens = tuple(load_tokenizer(settings.model).encode(text))
    if len(tokens) < 2:
        reason = f"it has {len(tokens)} tokens, and at least 2 are needed"
        raise UnusableText(source=str(settings.text), reason=reason)
    return tokens


def _asked(
    settings: WeightSettings, tokens: Sequence[int], *, vocabulary: int
) -> tuple[Recorded, ...]:
    if settings.answers is None:
        count = min(PROMPTS, max(1, len(tokens) // PROMPT_TOKENS))
        step = len(tokens) // count
        starts = range(0, count * step, step)
        return tuple(Recorded(tuple(tokens[n : n + PROMPT_TOKENS])) for n in starts)
    source = str(settings.answers)
    try:
        rows = json.loads(settings.answers.read_text(encoding="utf-8"))
        asked = tuple(Recorded(tuple(row["prompt"]), tuple(row["tokens"])) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"it is no list of objects with prompt and tokens ({error!r})"
        raise UnusableText(source=source, reason=reason) from error
    if not asked:
        raise UnusableText(source=source, reason="it holds no answer")
    for number, one in enumerate(asked):
        ids = (*one.prompt, *one.tokens)
        known = all(type(token) is int and 0 <= token < vocabulary for token in ids)
        if not known or not 0 < len(one.prompt) <= WINDOW_TOKENS or len(one.tokens) > NEW_TOKENS:
            reason = (
                f"answer {number} is not 1 to {WINDOW_TOKENS} ids of a prompt and up to "
                f"{NEW_TOKENS} of an answer, each from 0 to {vocabulary - 1}"
            )
            raise UnusableText(source=source, reason=reason)
    return asked


# --- Computing ------------------------------------------------------------------------------------


def _compare(plain: Model, rounded: Model, tokens: Sequence[int]) -> Window:
    """Both models over one piece of text, each token from those before it in the piece."""
    own, other = (_log_probabilities(model, tokens) for model in (plain, rounded))
    seen = torch.tensor(tokens[1:]).unsqueeze(1)
    perplexities = [(-logs[:-1].gather(1, seen).mean()).exp().item() for logs in (other, own)]
    divergence = (own.exp() * (own - other)).sum(-1).mean().item()
    agreement = (own.argmax(-1) == other.argmax(-1)).double().mean().item()
    return Window(perplexities[0], perplexities[1], divergence, agreement)


def _log_probabilities(model: Model, tokens: Sequence[int]) -> Tensor:
    """float32 [tokens, vocabulary]: as prefill computes, over pages."""
    pool = _pool(model, sequences=1, tokens=len(tokens))
    runs = ((0, pool.pages),)
    pool.open_pages(runs, tag=1, first_position=0)
    batch = PagedBatch(pool, [SequenceSlice(runs, 1, 0, len(tokens))])
    batch.begin_step()
    hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), batch)
    batch.end_step()
    return functional.log_softmax(model.logits(hidden), dim=-1)


def greedy_answers(
    model: Model, asked: Sequence[Recorded], *, threads: int
) -> list[tuple[int, ...]]:
    """The most likely tokens after each prompt, by prefill and decode steps as engines take them."""
    found: list[tuple[int, ...]] = []
    for first in range(0, len(asked), BATCH):
        prompts = [one.prompt for one in asked[first : first + BATCH]]
        found += _greedy_batch(model, prompts, threads=threads)
    return found


def _greedy_batch(
    model: Model, prompts: Sequence[tuple[int, ...]], *, threads: int
) -> list[tuple[int, ...]]:
    longest = max(map(len, prompts)) + NEW_TOKENS
    pool = _pool(model, sequences=len(prompts), tokens=longest)
    each = pool.pages // len(prompts)
    tables = [((number * each, each),) for number in range(len(prompts))]
    for number, (table, prompt) in enumerate(zip(tables, prompts, strict=True)):
        pool.open_pages(table, tag=number + 1, first_position=0)
        count = len(prompt) - 1
        if count:
            batch = PagedBatch(pool, [SequenceSlice(table, number + 1, 0, count)])
            batch.begin_step()
            model.fill(torch.tensor(prompt[:-1]), torch.arange(count), batch)
            batch.end_step()
    steps = make_steps(model, pool, threads=threads)
    tokens = [list(prompt) for prompt in prompts]
    for _ in range(NEW_TOKENS):
        slices = [
            SequenceSlice(table, number + 1, len(tokens[number]) - 1, 1)
            for number, table in enumerate(tables)
        ]
        logits = steps.run([row[-1] for row in tokens], slices).logits
        for row, token in zip(tokens, logits.argmax(-1).tolist(), strict=True):
            row.append(token)
    return [tuple(row[len(p) :]) for row, p in zip(tokens, prompts, strict=True)]


def _pool(model: Model, *, sequences: int, tokens: int) -> KVPool:
    config = model.config
    layout = PageLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        page_tokens=PAGE_TOKENS,
        dtype=model.dtype,
    )
    return KVPool.allocate(layout, sequences * layout.pages_for_tokens(tokens))
