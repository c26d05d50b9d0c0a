"""Claims about numbers in sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifecycle.wording import counted, form
from tools.house import ROOT

COUNTED = [
    "answers",
    "attempts",
    "batches",
    "digests",
    "entries",
    "engines",
    "grants",
    "headers",
    "logprobs",
    "messages",
    "pages",
    "problems",
    "proposals",
    "requests",
    "segments",
    "slots",
    "tokens",
    "trials",
    "violations",
]
"""What a person is told the number of."""

ATTRIBUTES = [
    "decode",
    "earlier",
    "free",
    "header",
    "late",
    "log",
    "more",
    "new",
    "open",
    "page",
    "prompt",
    "relayed",
    "token",
]
NOUN = re.compile(
    rf"[ ](?:(?:{'|'.join(ATTRIBUTES)}) )*({'|'.join(COUNTED)})\b(?!/s| a second| a CPU)"
)
NO_NUMBERS = {"purpose", "name", "kind"}
"""Words, not numbers, by the name that they have where a noun follows them."""


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "entry", "0 entries"),
        (1, "entry", "1 entry"),
        (2, "log entry", "2 log entries"),
        (1, "request", "1 request"),
        (2, "batch", "2 batches"),
        (3, "process", "3 processes"),
        (2, "day", "2 days"),
    ],
)
def test_a_number_and_its_noun_agree(number: int, noun: str, text: str) -> None:
    """One of a thing is named in the singular, any other number of it in the plural."""
    assert counted(number, noun) == text
    assert form(noun, number) == text.split(" ", 1)[1]


def test_a_large_number_may_be_grouped() -> None:
    """The number is written as it is asked for, and the noun follows the number."""
    assert counted(12345, "token", ",") == "12,345 tokens"
    assert counted(1, "token", ",") == "1 token"


def bare_plurals(source: str) -> Iterator[str]:
    """Places of an f-string where a plural stands right behind a value that may be 1."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            found = NOUN.match(str(text.value))
            name = ast.unparse(value.value)
            # Constants are known, and a figure with decimals is never "1".
            decimals = value.format_spec is not None and "." in ast.unparse(value.format_spec)
            if found and not name.isupper() and name not in NO_NUMBERS and not decimals:
                yield f"{value.lineno}: {{{name}}} {found[1]}"


def test_a_bare_plural_is_found() -> None:
    """The search below sees what it is there for."""
    assert list(bare_plurals('f"{left} open requests left"')) == ["1: {left} requests"]
    assert list(bare_plurals('f"{a:.1f} requests, {LIMIT} pages, {n} requests a second"')) == []


@pytest.mark.parametrize("folder", ["lifecycle", "transport"])
def test_nothing_that_is_counted_is_spelt_by_hand(folder: str) -> None:
    """What people are told never says "1 requests": numbers of things are said by `counted`."""
    # What is measured is printed with sizes that were chosen and are never 1.
    paths = [p for p in sorted((ROOT / folder).glob("*.py")) if not p.name.startswith("bench")]
    found = {path.name: list(bare_plurals(Path(path).read_text())) for path in paths}
    assert {name: places for name, places in found.items() if places} == {}
