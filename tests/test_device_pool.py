"""Claims about engines whose pools lie on a device: the device is this CPU, the ways are a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.device_pool import DevicePool, ForeignSourceError
from engine.model import Model
from engine.scrubber import Scrubber
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weights import load_model
from kernels.layout import PageLayout, PageMemory
from lifecycle.events import Aborted, Cause, Purpose, Role
from tests.inprocess import Deployment
from tests.test_inprocess import params, prompt_of
from tests.tiny import tiny_llama
from transport.engine_parts import device_of
from transport.settings import EngineSettings, InvalidSetting

CPU = torch.device("cpu")
LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=8)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    path: Path = tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_model(path), load_tokenizer(path)


@pytest.mark.parametrize("length", [1, 9, 40])
def test_answers_are_those_of_engines_on_a_cpu(made: tuple[Model, Tokenizer], length: int) -> None:
    """Prefilled, packed, landed, unpacked and decoded by the device's ways: the same tokens."""
    answers = []
    for device in (None, CPU):
        deployment = Deployment(*made, device=device)
        client = deployment.ask(prompt_of(length, made[0]), params(12))
        deployment.settle()
        answers.append(client.tokens)
    assert answers[0] == answers[1]
    assert len(answers[1]) == 12
    counters = deployment.decode.pool.counters
    assert counters.reads_checked > 0
    assert counters.reads_unchecked == counters.mismatches == 0


def landed(deployment: Deployment) -> PageMemory:
    pool = deployment.decode.pool
    assert isinstance(pool, DevicePool)
    assert pool.landing is not None
    return pool.landing


@pytest.mark.parametrize("word", [40, 0, -1, 5])
def test_a_byte_that_changes_on_the_way_ends_the_request(
    made: tuple[Model, Tokenizer], word: int
) -> None:
    """A bit that flips in the landing memory, row, tag or padding: no token, and others go on."""
    deployment = Deployment(*made, device=CPU)
    client = deployment.ask(prompt_of(20, made[0]), params(12))
    other = deployment.ask(prompt_of(21, made[0]), params(12))
    request = deployment.request_of(client)

    def arrived() -> bool:
        grants = deployment.scheduler.log.state(request).current(Purpose.DESTINATION)
        job = deployment.decode.core.jobs.get(request)
        drained = bool(grants) and not grants[0].undrained
        return drained and job is not None and job.verified is None

    deployment.run(until=arrived)
    page = deployment.pages_of(client)[0][0] + 1
    landed(deployment).words[1, page, word] ^= 1 << 17
    deployment.run()
    assert isinstance(client.outcome, Aborted)
    assert client.outcome.cause is Cause.ISOLATION_VIOLATION
    assert client.outcome.page == page
    assert client.tokens == []
    assert len(other.tokens) == 12


def test_what_lands_after_the_check_changes_nothing(made: tuple[Model, Tokenizer]) -> None:
    """Decode reads its own copy: a late write into the landing memory meets nobody."""
    answers = []
    for late in (False, True):
        deployment = Deployment(*made, device=CPU)
        client = deployment.ask(prompt_of(20, made[0]), params(12))
        deployment.run(until=lambda client=client: len(client.tokens) == 2)  # type: ignore[misc]
        if late:
            landed(deployment).octets.fill_(0xFF)
        deployment.settle()
        answers.append(client.tokens)
    assert answers[0] == answers[1]


def test_a_page_of_the_device_that_is_altered_ends_its_request(
    made: tuple[Model, Tokenizer],
) -> None:
    """Headers by the steps, rows by the scrubber: each ends that request alone."""
    for alters_header in (True, False):
        deployment = Deployment(*made, device=CPU, decode_pages=40)
        runner = deployment.decode.runner
        runner.scrubber = Scrubber(deployment.decode.pool, step_bytes=0, share=1.0)
        client = deployment.ask(prompt_of(40, made[0]), params(40))
        other = deployment.ask(prompt_of(21, made[0]), params(12))
        deployment.run(until=lambda client=client: len(client.tokens) == 4)  # type: ignore[misc]
        page = deployment.pages_of(client)[0][0]
        memory = deployment.decode.pool.memory
        if alters_header:
            memory.words[1, page, 0] ^= 1
        else:
            memory.data[1, page, 70] ^= 1
        deployment.run()
        assert isinstance(client.outcome, Aborted)
        assert client.outcome.cause is Cause.ISOLATION_VIOLATION
        assert len(client.tokens) < 40
        assert len(other.tokens) == 12


@pytest.mark.parametrize("device", [None, CPU])
def test_a_scrubber_that_reads_all_it_may_ends_no_request(
    made: tuple[Model, Tokenizer], device: torch.device | None
) -> None:
    """Pages that go from request to request, grow, and are given up halfway bear what they must."""
    deployment = Deployment(*made, device=device, decode_pages=24, prefill_pages=16)
    owners = (deployment.prefill, deployment.decode)
    for owner in owners:
        owner.runner.scrubber = Scrubber(owner.pool, step_bytes=1 << 30, share=1.0)
    clients = [deployment.ask(prompt_of(9 + 5 * n, made[0]), params(30)) for n in range(12)]
    deployment.run(until=lambda: len(clients[3].tokens) > 4)
    deployment.cancel(clients[3])
    deployment.settle()
    assert [n for n, client in enumerate(clients) if len(client.tokens) < 30] == [3]
    for owner in owners:
        assert owner.runner.scrubber.pages_looked_at > 50
        assert owner.pool.counters.mismatches == 0


def test_a_page_that_changes_hands_before_its_copy_is_not_shipped() -> None:
    """The copy compares again: an error that names the page, and slots that stay as they were."""
    pool = DevicePool(LAYOUT, 4, device=CPU)
    pool.open_pages(((1, 2),), tag=7, first_position=0)
    pool.memory.words[:, 1:3, 2] = 8
    pool.memory.words[1, 2, 0] = 9
    staging = PageMemory.allocate(LAYOUT, 2)
    staging.octets.fill_(0xAA)
    with pytest.raises(ForeignSourceError, match="page 2"):
        pool.pack(((1, 2),), staging, ((0, 2),), tag=8, first_position=0, tokens=16, source_tag=7)
    assert staging.octets.eq(0xAA).all()


@pytest.mark.parametrize("name", ["cuda", "cuda:7"])
def test_a_device_that_is_not_there_is_told_at_start(name: str) -> None:
    """Before a model is read, with the number of devices that torch sees."""
    settings = EngineSettings(role=Role.DECODE, engine="d", device=name)
    with pytest.raises(InvalidSetting, match=f"device = '{name}': torch .* sees 0 such devices"):
        device_of(settings)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cpu:0", "meta", ""])
def test_names_that_are_no_device_are_refused(name: str) -> None:
    """The message says which there are."""
    with pytest.raises(InvalidSetting, match="a device is cpu, cuda or cuda:0"):
        EngineSettings(role=Role.DECODE, engine="d", device=name)
