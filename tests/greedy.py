"""Greedy answers of the real model over pages that lie anywhere, kept and compared.

Run as `python -m tests.greedy` it records `tests/data/greedy_answers.json` with the code of the day;
the kept answers are compared with later code, so they are recorded once and not refreshed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import attrs
import torch

from engine.allocator import PageRun
from engine.decode_step import DecodeSteps, PlainSteps
from engine.model import Model
from engine.paged import PagedBatch, SequenceSlice
from engine.pool import KVPool
from engine.tokenizer import load_tokenizer
from engine.weights import load_model
from kernels.layout import PageLayout

KEPT = Path(__file__).parent / "data" / "greedy_answers.json"
NEW_TOKENS = 24
BATCH = 10
PAGES_EACH = 10
PAGE_TOKENS = 32

Make = Callable[[Model, KVPool], DecodeSteps]

SUBJECTS = (
    "the sea at night", "a clock that runs backwards", "the colour of copper", "bread and salt",
    "a letter from a lighthouse keeper", "why leaves fall", "the number seven", "a slow train",
    "how rain is made", "the oldest library in town",
)  # fmt: skip
FORMS = (
    "Write one sentence about {0}.",
    "The following is a short dictionary entry for '{0}':",
    "Q: What should a child know about {0}?\nA:",
    "List three facts about {0}: 1.",
    (
        "Translate into French: I have often thought about {0}, and about what my grandmother, who "
        "lived in a small house by the river with two cats and far too many books, would have said "
        "about it if anybody had ever asked her before the winter came. Translation:"
    ),
)


@attrs.frozen
class Answer:
    """A prompt's token ids and the tokens that greedy decoding gives after it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def prompts() -> list[str]:
    """Fifty prompts of 5 to 70 tokens."""
    return [form.format(subject) for form in FORMS for subject in SUBJECTS]


def shuffled_pages(count: int, *, pages_each: int, seed: int) -> list[tuple[PageRun, ...]]:
    """For each of `count` sequences, single pages in random order out of one pool."""
    numbers = list(range(count * pages_each))
    random.Random(seed).shuffle(numbers)
    return [
        tuple((page, 1) for page in numbers[first : first + pages_each])
        for first in range(0, len(numbers), pages_each)
    ]


def answers(model: Model, asked: list[list[int]], make: Make) -> list[Answer]:
    """The greedy answers, computed in batches over shuffled pages by the steps that `make` makes."""
    config = model.config
    layout = PageLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        page_tokens=PAGE_TOKENS,
    )
    found: list[Answer] = []
    for first in range(0, len(asked), BATCH):
        part = asked[first : first + BATCH]
        found += _batch(
            model, KVPool.allocate(layout, len(part) * PAGES_EACH), part, make, seed=first
        )
    return found


def _batch(
    model: Model, pool: KVPool, asked: list[list[int]], make: Make, *, seed: int
) -> list[Answer]:
    steps = make(model, pool)
    tables = shuffled_pages(len(asked), pages_each=PAGES_EACH, seed=seed)
    tags = [1000 + seed + number for number in range(len(asked))]
    given: list[list[int]] = [[] for _ in asked]
    for table, tag, prompt in zip(tables, tags, asked, strict=True):
        pool.open_pages(table, tag=tag, first_position=0)
        batch = PagedBatch(pool, [SequenceSlice(table, tag, 0, len(prompt) - 1)])
        assert batch.begin_step() == {}
        model.fill(torch.tensor(prompt[:-1]), torch.arange(len(prompt) - 1), batch)
        assert batch.end_step() == {}
    for _ in range(NEW_TOKENS):
        last = [(prompt + new)[-1] for prompt, new in zip(asked, given, strict=True)]
        places = [len(prompt) + len(new) - 1 for prompt, new in zip(asked, given, strict=True)]
        rows = zip(tables, tags, places, strict=True)
        outcome = steps.run(last, [SequenceSlice(*row, 1) for row in rows])
        assert outcome.mismatches == {}
        best = outcome.logits.argmax(-1).tolist()
        for new, token in zip(given, best, strict=True):
            new.append(token)
    return [Answer(tuple(p), tuple(n)) for p, n in zip(asked, given, strict=True)]


def kept() -> list[Answer]:
    """What was recorded."""
    rows = json.loads(KEPT.read_text(encoding="utf-8"))
    return [Answer(tuple(row["prompt"]), tuple(row["tokens"])) for row in rows]


def main() -> None:
    """Record the answers of this code."""
    source = next(Path(".cache/models").glob("*.gguf"))
    tokenizer = load_tokenizer(source)
    asked = [list(tokenizer.encode(prompt)) for prompt in prompts()]
    torch.set_num_threads(1)
    rows = [attrs.asdict(answer) for answer in answers(load_model(source), asked, PlainSteps)]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    KEPT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
