"""Taking one engine out of service while its siblings take over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from lifecycle.events import Admitted, Role
from lifecycle.ids import RequestId
from lifecycle.replay import replay
from tests.fake_engine import FakeEngine
from tests.serving import Deployment, ask, deployment
from tests.test_services import begin, last
from tests.tiny import tiny_llama
from transport import cli
from transport.pb import admin_pb2

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


class Verb:
    """A command line that runs in a thread beside the deployment."""

    def __init__(self, here: Deployment, *words: str) -> None:
        self.code: int | None = None
        self.ended = anyio.Event()
        self._words: Sequence[str] = (*words, "--scheduler", here.address)
        here.tasks.start_soon(self._run)

    async def _run(self) -> None:
        self.code = await anyio.to_thread.run_sync(partial(cli.run, self._words))
        self.ended.set()


async def draining(here: Deployment, engine: str) -> None:
    """The status says that the engine drains."""
    while True:
        status = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        if (engine, admin_pb2.ENGINE_STATE_DRAINING) in [
            (e.engine, e.state) for e in status.engines
        ]:
            return


def decoded_by(here: Deployment, request: str) -> str:
    """The decode engine of a request's last attempt."""
    events = [s.entry.event for s in here.store.read(RequestId(request))]
    return [str(e.decode.engine) for e in events if isinstance(e, Admitted)][-1]


async def test_siblings_take_over_and_no_client_notices(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What runs on the engine ends there, what comes goes elsewhere; the verb waits for the first."""
    async with deployment(model, pause_at=2) as here:
        sibling = FakeEngine(Role.DECODE, here.address, name="decode-b")
        call, request = await begin(here, ask(new=6))
        await here.decode.paused.wait()
        here.tasks.start_soon(sibling.run)
        await sibling.synced.wait()
        verb = Verb(here, "drain", "decode", "--wait", "--json")
        await draining(here, "decode")
        for _ in range(3):
            other, name = await begin(here, ask(new=3))
            assert await last(other) == "outcome"
            assert decoded_by(here, name) == "decode-b"
        assert not verb.ended.is_set()
        here.decode.go_on()
        assert await last(call) == "outcome"
        assert decoded_by(here, request) == "decode"
        await verb.ended.wait()
        assert verb.code == 0
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert said == {"engine": "decode", "incarnation": 1, "siblings": 1, "drained": True}
        here.decode.leave()
        await here.decode.gone.wait()
        assert replay([(s.position, s.entry) for s in here.store.tail(1)]).clean


async def test_whoever_drains_the_last_is_told_what_follows(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a sibling that takes requests the verb warns, with the numbers; with one it does not."""
    async with deployment(model) as here:
        sibling = FakeEngine(Role.DECODE, here.address, name="decode-b")
        here.tasks.start_soon(sibling.run)
        await sibling.synced.wait()
        verb = Verb(here, "drain", "decode")
        await verb.ended.wait()
        said = capsys.readouterr()
        assert (verb.code, said.out) == (0, "decode is draining\n")
        assert "warning: " not in said.err
        verb = Verb(here, "drain", "decode-b")
        await verb.ended.wait()
        said = capsys.readouterr()
        assert (verb.code, said.out) == (0, "decode-b is draining\n")
        assert "warning: no decode engine takes requests now (0 of 2), 0 requests" in said.err
        assert "NO_ENGINE" in said.err
        verb = Verb(here, "drain", "prefill", "--json")
        await verb.ended.wait()
        said = capsys.readouterr()
        document = json.loads(said.out)
        assert (document["siblings"], "warning: " in said.err) == (0, False)
        assert "no prefill engine takes requests now (0 of 1)" in document["warning"]


async def test_a_wait_has_an_end(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the given time the verb exits with 1 and says what is left; the engine drains on."""
    async with deployment(model, pause_at=2) as here:
        call, _ = await begin(here, ask(new=6))
        await here.decode.paused.wait()
        verb = Verb(here, "drain", "decode", "--wait", "--timeout", "0.1")
        await verb.ended.wait()
        assert verb.code == 1
        assert "decode still has 1 request after 0.1 s" in capsys.readouterr().err
        here.decode.go_on()
        assert await last(call) == "outcome"


async def test_an_engine_that_is_lost_was_not_drained(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb exits with 1, for nobody knows what its memory held at the end."""
    async with deployment(model, pause_at=2, lease_seconds=0.5, engine_wait_seconds=0.1) as here:
        await begin(here, ask(new=6))
        await here.decode.paused.wait()
        verb = Verb(here, "drain", "decode", "--wait")
        await draining(here, "decode")
        here.decode.hush = True
        await verb.ended.wait()
        assert verb.code == 1
        assert "decode/1 was lost before it was drained" in capsys.readouterr().err
