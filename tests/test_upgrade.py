"""Parts of different versions, one exchanged after the other."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from lifecycle.events import Role
from lifecycle.replay import replay
from tests.fake_engine import FakeEngine
from tests.serving import ask, deployment
from tests.tiny import tiny_llama
from transport.pb import fleet_pb2, generation_pb2
from transport.protocol_version import PROTOCOL_MAJOR, PROTOCOL_MINOR, protocol_refusal

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("engine", ["prefill", "decode"])
@pytest.mark.parametrize("said", [(0, 0), (PROTOCOL_MAJOR, PROTOCOL_MINOR - 1)])
async def test_an_engine_of_the_minor_version_before_works(
    model: Path, engine: str, said: tuple[int, int]
) -> None:
    """It need not even say its version, as those before the field did not."""
    async with deployment(model, engines=False) as here:
        getattr(here, engine).protocol = said
        for one in (here.prefill, here.decode):
            here.tasks.start_soon(one.run)
            await one.synced.wait()
        wanted = generation_pb2.CompleteRequest(generation=ask())
        answer = await here.generation.Complete(wanted)
        assert answer.outcome.usage.new_tokens == 4
        assert replay([(s.position, s.entry) for s in here.store.tail(1)]).clean


@pytest.mark.parametrize(
    "said", [(PROTOCOL_MAJOR, PROTOCOL_MINOR + 2), (PROTOCOL_MAJOR + 1, 0), (PROTOCOL_MAJOR + 1, 1)]
)
async def test_an_engine_of_a_version_further_away_is_refused(
    model: Path, said: tuple[int, int]
) -> None:
    """Both versions are named, and the fleet never hears of it."""
    async with deployment(model, engines=False) as here:
        here.decode.protocol = said
        await here.decode.run()
        assert here.decode.refused is not None
        assert here.decode.refused.reason == fleet_pb2.ATTACH_REFUSAL_PROTOCOL
        assert f"version {said[0]}.{said[1]}" in here.decode.refused.message
        assert f"this is {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}" in here.decode.refused.message
        kinds = [type(s.entry.event).__name__ for s in here.store.tail(1)]
        assert kinds == ["Resumed"]


async def test_pages_that_are_laid_out_otherwise_are_refused_by_their_fingerprint(
    model: Path,
) -> None:
    """A version that writes pages in another way has another layout, whatever it says of itself."""
    async with deployment(model) as here:
        newer = FakeEngine(Role.DECODE, here.address, name="newer", layout="layout-b")
        with anyio.fail_after(20):
            await newer.run()
        assert newer.refused is not None
        assert newer.refused.reason == fleet_pb2.ATTACH_REFUSAL_INCOMPATIBLE
        assert "layout-b" in newer.refused.message
        assert "layout-a" in newer.refused.message


@pytest.mark.parametrize("apart", [-1, 0, 1])
def test_neighbours_fit(apart: int) -> None:
    """Either side may be the newer one."""
    minor = max(0, PROTOCOL_MINOR + apart)
    assert protocol_refusal(PROTOCOL_MAJOR, minor) is None
