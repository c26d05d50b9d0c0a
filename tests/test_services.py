"""What clients, operators and engines see of a scheduler, over loopback gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_engine import FIRST_TOKEN
from tests.serving import ask, deployment
from tests.tiny import tiny_llama

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


async def test_a_stream_is_admission_chunks_outcome(model: Path) -> None:
    """The first message is the admission, then tokens in order without gaps, then the outcome."""
    async with deployment(model) as here:
        steps = [step async for step in here.generation.Generate(ask(new=9))]
        assert [s.WhichOneof("step") for s in (steps[0], steps[-1])] == ["admission", "outcome"]
        chunks = [s.chunk for s in steps[1:-1]]
        assert [t for c in chunks for t in c.token_ids] == [FIRST_TOKEN + i for i in range(9)]
        assert [c.first_index for c in chunks] == list(range(9))
        outcome = steps[-1].outcome
        assert outcome.finish_reason == 2, outcome
        assert (outcome.usage.prompt_tokens, outcome.usage.new_tokens) == (7, 9)
