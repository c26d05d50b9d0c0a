"""Parts that cannot take part: what their processes say, how they end, and that the rest goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process_harness import READY_SECONDS, Deployment, text_request, tiny_model
from tests.tiny import tiny_gguf, tiny_llama

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

FLAGS = ("--kv-memory=4MiB", "--page-tokens=16")
FAILED, USAGE, REFUSED = 1, 2, 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("shared") / "it", tiny, engine=FLAGS) as here:
        here.start_engines("prefill-0", "decode-0")
        yield here


@pytest.fixture(autouse=True)
def unharmed(shared: Deployment) -> Iterator[None]:
    """After each test a good request is answered, every page is home, and the log is clean."""
    yield
    shared.ask(text_request("and now?", 4))
    shared.wait_whole()
    assert shared.replayed_live().clean


def ended(here: Deployment, name: str, *arguments: str) -> tuple[int, str]:
    """Exit code and last words of a part that is expected to end by itself."""
    child = here._start(name, arguments)
    here.lost.add(name)
    return child.wait(timeout=READY_SECONDS), child.said_errors()


def joining(
    here: Deployment, model: str | Path = "", *, flags: tuple[str, ...] = FLAGS
) -> tuple[str, ...]:
    """Arguments of a second decode engine."""
    at = ("--scheduler", here.address, "--model", str(model or here.model))
    return ("decode", "decode-1", *at, *flags)


def test_an_engine_of_another_model_ends(shared: Deployment, tmp_path: Path) -> None:
    """Exit code 4, and both fingerprints."""
    other = tiny_llama(tmp_path / "other", seed=99, context=2048)
    code, said = ended(shared, "other-model", *joining(shared, other))
    assert code == REFUSED, said
    assert shared.engine_status("decode-0").layout in said
    assert said.count("model=") >= 2


def test_an_engine_of_another_page_size_ends(shared: Deployment) -> None:
    """Exit code 4, and both fingerprints."""
    code, said = ended(
        shared, "other-pages", *joining(shared, flags=(FLAGS[0], "--page-tokens=32"))
    )
    assert code == REFUSED, said
    ours = shared.engine_status("decode-0").layout
    assert "page_tokens=16" in ours
    assert ours in said
    assert ours.replace("page_tokens=16", "page_tokens=32") in said


def test_an_engine_of_a_model_cut_short_ends(shared: Deployment, tmp_path: Path) -> None:
    """Exit code 2, and the name of the file; the scheduler never hears of it."""
    whole = tiny_gguf(tmp_path / "whole.gguf", Path(shared.model)).read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(whole[:-4096])
    position = shared.client.status().log_position
    code, said = ended(shared, "short", *joining(shared, short))
    assert code == USAGE, said
    assert "short.gguf" in said
    assert shared.client.status().log_position == position


def test_a_scheduler_on_a_port_in_use_ends(shared: Deployment, tmp_path: Path) -> None:
    """Exit code 2, and the port."""
    port = shared.address.rpartition(":")[2]
    arguments = ("scheduler", "--model", shared.model, "--port", port)
    code, said = ended(shared, "second", *arguments, "--log", str(tmp_path / "log"))
    assert code == USAGE, said
    assert port in said
    assert "cannot be bound" in said


def test_a_scheduler_on_a_log_in_use_ends(shared: Deployment) -> None:
    """Two schedulers never share a log: the second ends and says whose it is."""
    arguments = ("scheduler", "--model", shared.model, "--port=0", "--log", str(shared.log))
    code, said = ended(shared, "sharing", *arguments)
    assert code == FAILED, said
    assert str(shared.log) in said


def test_the_older_of_two_engines_of_one_id_ends(tmp_path: Path, tiny: Path) -> None:
    """The newer takes over, the older ends with 4 and says why, and requests are answered."""
    with Deployment(tmp_path / "twice", tiny, engine=FLAGS) as here:
        here.start_engines("prefill-0", "decode-0")
        older = here.children["decode-0"]
        here.start_engines("decode-0")
        assert older.wait(timeout=READY_SECONDS) == REFUSED
        assert "SUPERSEDED" in older.said_errors()
        here.ask(text_request("who are you?", 4))
        here.wait_closed()
