"""The published incident in our own engines with a real model: what each layer of guards does.

Guards are taken away by subclasses; what is compared are bytes of the decode engine's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.incident.__main__ import BEGIN, END, GOLDEN, PAGE, ROUNDS, put
from examples.incident.memory import Round, Stage, facts, talk, write_log
from transport import cli

SEEDS = (0, 3)


@pytest.fixture(scope="module")
def stage(model_path: Path) -> Iterator[Stage]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Stage(model_path)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rounds(stage: Stage) -> list[Round]:
    return [stage.round(seed) for seed in SEEDS]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
class TestInMemory:
    def test_guards_in_place_refuse_at_the_door(self, rounds: list[Round]) -> None:
        """With all guards the second request is one event, and no engine hears of it."""
        assert [(one.refused, one.refused_events) for one in rounds] == [(True, 1)] * len(SEEDS)

    def test_headers_alone_stop_it_before_the_first_token(self, rounds: list[Round]) -> None:
        """With only the logical guards gone, the first customer's tag stops the second's read."""
        assert all(one.stopped and one.stopped_by_first_tag for one in rounds)
        assert [one.stopped_tokens for one in rounds] == [0] * len(SEEDS)

    def test_without_guards_the_bytes_are_the_first_customers(self, rounds: list[Round]) -> None:
        """Status OK, and each foreign page is what the first customer left, byte for byte."""
        for walk in (one.walk for one in rounds):
            assert walk.answered
            assert walk.tokens
            assert (walk.reserved, walk.sent, walk.foreign, walk.equal) == (8, 1, 7, 7)

    def test_the_answer_is_made_of_those_bytes(self, rounds: list[Round]) -> None:
        """Replacing them changes the logits; replacing what is not read changes no bit."""
        for walk in (one.walk for one in rounds):
            assert walk.change > 1
            assert walk.idle_change == 0

    def test_the_log_alone_says_so(
        self, rounds: list[Round], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The verbs name reader and tenants from the log of such a run, and the broken rule."""
        log = tmp_path / "walk.jsonl"
        write_log(rounds[0].walk.log, log)
        assert cli.run(["exposures", str(log)]) == 1
        assert "tenant second read bytes of first: 1 answer" in capsys.readouterr().out
        assert cli.run(["replay", str(log)]) == 1
        assert "capacity-proved/prefill" in capsys.readouterr().out
        assert all(one.walk.named for one in rounds)

    def test_other_rounds_say_what_is_kept(self, rounds: list[Round]) -> None:
        """Every line of the kept facts holds for any number of rounds."""
        kept = (GOLDEN / "in-memory.txt").read_text().splitlines()
        assert [_rated(line) for line in facts(rounds)] == [_rated(line) for line in kept]

    def test_the_secret_is_in_the_first_prompt_alone(self, stage: Stage) -> None:
        """Nothing of the secret, nor of its owner, is in what the second customer sends."""
        for seed in range(ROUNDS):
            traffic = talk(stage.tokenizer, seed)
            assert traffic.secret in stage.tokenizer.decode(traffic.first)
            second = stage.tokenizer.decode(traffic.second)
            assert not any(part in second for part in traffic.secret.split("-"))
            assert "account" not in second


def _rated(line: str) -> str:
    """The line with "n of n" and "0 of n" as words, whatever n is."""
    head, _, numbers = line.rpartition(": ")
    count, _, total = numbers.partition(" of ")
    if not total.isdigit():
        return head if head == "rounds" else line
    return f"{head}: {'none' if count == '0' else 'all' if count == total else 'some'}"


def test_the_page_holds_what_is_kept() -> None:
    """Every line that is the same everywhere stands on the page."""
    block = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    kept = (GOLDEN / "in-memory.txt").read_text().splitlines()
    assert kept
    assert [line for line in kept if line not in block] == []


def test_only_the_block_is_replaced(tmp_path: Path) -> None:
    """Writing what was measured leaves the rest of the page alone, and can be repeated."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        put(["new"], page)
        assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
