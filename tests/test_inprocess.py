"""Requests through scheduler, prefill, plane and decode with real torch, one message at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model import Model
from engine.pool import KVPool
from engine.sampler import SamplingParams, sample
from engine.scrubber import Scrubber
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weights import load_model
from lifecycle.events import (
    Aborted,
    Cause,
    Drained,
    Finished,
    FinishReason,
    Proof,
    Purpose,
    Quarantined,
    Requeued,
    Reserved,
    Verified,
)
from lifecycle.replay import replay
from lifecycle.state import Phase
from tests.inprocess import DECODE, PREFILL, Deployment
from tests.test_model import ContiguousKV, some_tokens
from tests.tiny import tiny_llama
from transport import refusals

PAGE = 8
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1, 61]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(_directory(tmp_path_factory.mktemp("model")))


def _directory(path: Path) -> Path:
    return tiny_llama(path / "tiny", tied=False)


def poison(pool: KVPool) -> None:
    """Fill a pool with NaNs, which a read of a byte that nobody wrote would carry on."""
    pool.memory.octets.view(torch.float32).fill_(float("nan"))


def params(count: int = 20, **others: object) -> SamplingParams:
    return SamplingParams(
        **{"max_new_tokens": count, "ignore_eos": True, "logprobs": True, **others}  # type: ignore[arg-type]
    )


def alone(
    model: Model, prompt: list[int], sampling: SamplingParams
) -> tuple[list[int], list[float]]:
    """Tokens and log probabilities of a plain forward over contiguous KV, token by token."""
    kv = ContiguousKV([])
    tokens = list(prompt)
    kv.owners = [0] * len(prompt)
    logits = model.logits(model.forward(torch.tensor(prompt), torch.arange(len(prompt)), kv))[-1:]
    logprobs = []
    while True:
        draw = sample(logits, [sampling], [len(tokens)])[0]
        tokens.append(draw.token)
        logprobs.append(0.0 if draw.logprob is None else draw.logprob)
        if len(logprobs) == sampling.max_new_tokens:
            return tokens[len(prompt) :], logprobs
        kv.owners = [0]
        place = torch.tensor([len(tokens) - 1])
        logits = model.logits(model.forward(torch.tensor(tokens[-1:]), place, kv))


def prompt_of(length: int, model: Model) -> list[int]:
    return some_tokens(length, vocabulary=model.config.vocabulary, seed=length)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_request_gets_what_the_model_alone_would_say(
    model: Model, tokenizer: Tokenizer, length: int
) -> None:
    """Through both engines and over pages, tokens are those of one plain forward."""
    deployment = Deployment(model, tokenizer, poison=poison)
    client = deployment.ask(prompt_of(length, model), params())
    deployment.settle()
    tokens, logprobs = alone(model, prompt_of(length, model), params())
    assert client.tokens == tokens
    assert client.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert len(set(tokens)) > 3
    assert client.text == tokenizer.decode(tokens)
    assert client.finished.reason is FinishReason.LENGTH
    assert client.finished.tokens == 20


def test_requests_beside_each_other_change_nothing(model: Model, tokenizer: Tokenizer) -> None:
    """A request's log probabilities are the same to the bit, alone and in a batch of seven."""
    together = Deployment(model, tokenizer, decode_pages=80, prefill_pages=80, poison=poison)
    clients = [together.ask(prompt_of(n, model), params(seed=n, temperature=1.0)) for n in LENGTHS]
    together.settle()
    for length, client in zip(LENGTHS, clients, strict=True):
        single = Deployment(model, tokenizer, chunk_tokens=24, seed=9, poison=poison)
        only = single.ask(prompt_of(length, model), params(seed=length, temperature=1.0))
        single.settle()
        assert client.tokens == only.tokens
        if length <= PAGE:
            # Longer prompts are cut into chunks that depend on the company; chunks of other
            # sizes may differ in the last bits.
            assert client.logprobs == only.logprobs
        else:
            assert client.logprobs == pytest.approx(only.logprobs, abs=1e-4)


def test_decode_computes_one_prompt_token_a_request(model: Model, tokenizer: Tokenizer) -> None:
    """Prefill computes prompt tokens 0 to n-2, decode exactly the last one."""
    deployment = Deployment(model, tokenizer, decode_pages=80, prefill_pages=80)
    for length in LENGTHS:
        deployment.ask(prompt_of(length, model), params(3))
    deployment.settle()
    assert deployment.decode.runner.prompt_tokens_computed == len(LENGTHS)
    assert deployment.prefill.runner.prompt_tokens_computed == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize("place", ["row", "head tag", "tail tag", "padding"])
def test_a_byte_that_changes_on_the_way_ends_the_request(
    model: Model, tokenizer: Tokenizer, place: str
) -> None:
    """A flipped bit in an arrived page is an isolation violation before any token; others go on."""
    deployment = Deployment(model, tokenizer)
    client = deployment.ask(prompt_of(20, model), params())
    other = deployment.ask(prompt_of(21, model), params())
    request = deployment.request_of(client)

    def arrived() -> bool:
        grants = deployment.scheduler.log.state(request).current(Purpose.DESTINATION)
        job = deployment.decode.core.jobs.get(request)
        drained = bool(grants) and not grants[0].undrained
        return drained and job is not None and job.verified is None

    deployment.run(until=arrived)
    memory = deployment.decode.pool.memory
    page = deployment.pages_of(client)[0][0] + 1
    word = {"row": 40, "head tag": 0, "tail tag": -1, "padding": 5}[place]
    memory.words[1, page, word] ^= 1 << 17
    deployment.run()
    assert isinstance(client.outcome, Aborted)
    assert client.outcome.cause is Cause.ISOLATION_VIOLATION
    assert client.outcome.page == page
    expected, found = client.outcome.tag_expected, client.outcome.tag_found
    assert expected is not None
    assert found is not None
    assert (expected ^ found == 1 << 17) == ("tag" in place)
    said = [fields for name, fields in deployment.notes if name == "attempt_failed"]
    assert [(f["request_id"], f["cause"]) for f in said] == [(request, "isolation_violation")]
    assert client.outcome.message == said[0]["reason"]
    assert client.tokens == []
    assert other.tokens == alone(model, prompt_of(21, model), params())[0]
    assert any(isinstance(entry.event, Quarantined) for _, entry in deployment.log)


def test_a_page_that_changes_hands_while_decoding_gives_no_token(
    model: Model, tokenizer: Tokenizer
) -> None:
    """A foreign tag met in a step ends that request alone, and names the tag that was met."""
    deployment = Deployment(model, tokenizer)
    client = deployment.ask(prompt_of(20, model), params())
    other = deployment.ask(prompt_of(21, model), params())
    deployment.run(until=lambda: len(client.tokens) == 5)
    page = deployment.pages_of(client)[0][0]
    # Whatever is on its way to the client left before the page was taken.
    before = deployment.decode.runner.tokens_sampled
    deployment.decode.pool.open_pages(((page, 1),), tag=0xBAD, first_position=0)
    deployment.run()
    assert isinstance(client.outcome, Aborted)
    assert client.outcome.cause is Cause.ISOLATION_VIOLATION
    assert client.outcome.tag_found == 0xBAD
    assert client.tokens == alone(model, prompt_of(20, model), params())[0][: len(client.tokens)]
    assert len(client.tokens) <= 6
    assert other.tokens == alone(model, prompt_of(21, model), params())[0]
    assert deployment.decode.runner.tokens_sampled > before


def test_an_altered_page_ends_its_request(model: Model, tokenizer: Tokenizer) -> None:
    """A word that changes inside a live page, under a right header, ends that request alone."""
    deployment = Deployment(model, tokenizer, decode_pages=40)
    runner = deployment.decode.runner
    runner.scrubber = Scrubber(deployment.decode.pool, step_bytes=0, share=1.0)
    client = deployment.ask(prompt_of(40, model), params(60))
    other = deployment.ask(prompt_of(21, model), params())
    deployment.run(until=lambda: len(client.tokens) == 5)
    assert runner.scrubber.pages_looked_at > 0
    page = deployment.pages_of(client)[0][0]
    told = len(client.tokens)
    deployment.decode.pool.memory.data[1, page, 77] ^= 1 << 20
    deployment.run()
    assert isinstance(client.outcome, Aborted)
    assert client.outcome.cause is Cause.ISOLATION_VIOLATION
    assert client.outcome.page == page
    refusal = refusals.aborted(
        deployment.request_of(client), client.outcome, attempts=1, tokens=len(client.tokens)
    )
    assert refusal.reason == "KV_ISOLATION_VIOLATION"
    assert told <= len(client.tokens) < 60
    assert other.tokens == alone(model, prompt_of(21, model), params())[0]


def test_growth_over_several_grants_reads_as_one_sequence(
    model: Model, tokenizer: Tokenizer
) -> None:
    """A request that outgrows its first grants again and again keeps its text."""
    deployment = Deployment(model, tokenizer, growth_tokens=4, poison=poison)
    clients = [deployment.ask(prompt_of(n, model), params(90)) for n in (9, 16)]
    deployment.settle()
    grown = [
        entry
        for _, entry in deployment.log
        if isinstance(entry.event, Reserved) and entry.event.purpose is Purpose.GROWTH
    ]
    assert len(grown) >= 5
    for length, client in zip((9, 16), clients, strict=True):
        assert client.tokens == alone(model, prompt_of(length, model), params(90))[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_requeued_request_goes_on_where_it_was(
    model: Model, tokenizer: Tokenizer, temperature: float
) -> None:
    """After losing its pages mid-answer a request continues with the same tokens and text."""
    clients_asked = [(n, params(60, seed=n, temperature=temperature)) for n in (9, 10, 11, 12)]
    tight = Deployment(model, tokenizer, decode_pages=16, growth_tokens=8, poison=poison)
    clients = [tight.ask(prompt_of(n, model), asked) for n, asked in clients_asked]
    tight.settle()
    requeued = [e for _, e in tight.log if isinstance(e.event, Requeued)]
    assert any(e.event.tokens_relayed > 0 for e in requeued if isinstance(e.event, Requeued))
    assert "attempt_failed" not in [name for name, _ in tight.notes], "want of pages is no fault"
    for (length, asked), client in zip(clients_asked, clients, strict=True):
        undisturbed = Deployment(model, tokenizer)
        expected = undisturbed.ask(prompt_of(length, model), asked)
        undisturbed.settle()
        assert client.tokens == expected.tokens
        assert client.text == expected.text


def test_every_page_of_every_step_is_checked(model: Model, tokenizer: Tokenizer) -> None:
    """The count of checked headers is live pages times layers, summed over the steps."""
    deployment = Deployment(model, tokenizer, prefill_pages=80, decode_pages=80)
    clients = [deployment.ask(prompt_of(n, model), params(13)) for n in LENGTHS]
    deployment.settle()
    expected = 0
    for length, client in zip(LENGTHS, clients, strict=True):
        own = sum(-(-(length + i) // PAGE) for i in range(13)) * model.config.layers
        assert client.finished.reads_checked == own
        assert client.finished.pages_read == -(-(length + 12) // PAGE)
        assert client.finished.reads_unchecked == 0
        expected += own
    assert deployment.decode.counters().header_reads_checked == expected
    assert deployment.decode.counters().header_reads_unchecked == 0


def test_seeds_repeat_and_differ(model: Model, tokenizer: Tokenizer) -> None:
    """The same seed draws the same answer in another batch, another seed another answer."""
    answers = []
    for seeds in ((5, 6), (7, 5, 8)):
        deployment = Deployment(model, tokenizer)
        clients = {
            seed: deployment.ask(prompt_of(12, model), params(temperature=1.0, seed=seed))
            for seed in seeds
        }
        deployment.settle()
        answers.append({seed: client.tokens for seed, client in clients.items()})
    assert answers[0][5] == answers[1][5]
    assert answers[0][5] != answers[0][6]


def test_stops(model: Model, tokenizer: Tokenizer) -> None:
    """A stop string, a stop token, and the end token end the answer with their own reason."""
    prompt = prompt_of(14, model)
    tokens, _ = alone(model, prompt, params(30))
    text = tokenizer.decode(tokens)
    place = next(
        i for i in range(4, 20) if text.count(text[i : i + 2]) and text[i : i + 2].isascii()
    )
    stop = text[place : place + 2]
    before = text[: text.index(stop)]
    last = tokens[9]
    deployment = Deployment(model, tokenizer)
    by_string = deployment.ask(prompt, params(30, stop=(stop,)))
    by_token = deployment.ask(prompt, params(30, stop_tokens=(last,)))
    by_length = deployment.ask(prompt, params(7))
    deployment.settle()
    assert by_string.text == before
    assert by_string.finished.reason is FinishReason.STOP
    cut = tokens.index(last)
    assert by_token.tokens == tokens[: cut + 1]
    assert by_token.text == tokenizer.decode(tokens[:cut])
    assert by_token.finished.reason is FinishReason.STOP
    assert by_length.tokens == tokens[:7]
    assert by_length.finished.reason is FinishReason.LENGTH


def test_a_cancelled_request_gives_everything_back(model: Model, tokenizer: Tokenizer) -> None:
    """Cancelled in each state that it passes through, a request leaves no page behind."""
    seen = set()
    for moment in range(0, 120, 5):
        deployment = Deployment(model, tokenizer)
        client = deployment.ask(prompt_of(40, model), params())
        for _ in range(moment):
            deployment.step()
        seen.add(deployment.scheduler.log.state(deployment.request_of(client)).phase)
        deployment.cancel(client)
        deployment.settle()
        assert isinstance(client.outcome, (Aborted, Finished))
    assert {Phase.ADMITTED, Phase.DECODING} <= seen


def test_nothing_is_read_before_it_is_verified(model: Model, tokenizer: Tokenizer) -> None:
    """In the log each answer stands behind the proof of the pages that it came from."""
    deployment = Deployment(model, tokenizer)
    clients = [deployment.ask(prompt_of(n, model), params(5)) for n in LENGTHS]
    deployment.settle()
    for client in clients:
        mine = [e.event for _, e in deployment.log if e.request == deployment.request_of(client)]
        kinds = [type(event) for event in mine]
        assert kinds.index(Verified) < kinds.index(Finished)
        verified = next(event for event in mine if isinstance(event, Verified))
        assert verified.headers_checked == verified.pages * model.config.layers


# --- the data plane's answers ---------------------------------------------------------------------


def test_a_post_that_is_too_early_is_tried_again(model: Model, tokenizer: Tokenizer) -> None:
    """A writer that hears of a grant before its owner does is refused, and writes a little later."""
    deployment = Deployment(model, tokenizer)
    deployment.hold = lambda effect: (
        effect.party == DECODE and isinstance(effect.entry.event, Reserved)
    )
    client = deployment.ask(prompt_of(20, model), params())
    request = deployment.request_of(client)
    for _ in range(3):
        deployment.run(until=lambda: deployment.prefill.restless)
        deployment.step()
        assert deployment.network.messages
    assert deployment.scheduler.log.state(request).current(Purpose.DESTINATION)
    deployment.let_through()
    deployment.settle()
    assert client.tokens == alone(model, prompt_of(20, model), params())[0]
    assert not any(isinstance(entry.event, Requeued) for _, entry in deployment.log)


def test_a_cancelled_request_is_not_posted_again(model: Model, tokenizer: Tokenizer) -> None:
    """A post that waits for its exposure ends with its request, and its pages come home."""
    deployment = Deployment(model, tokenizer)
    deployment.hold = lambda effect: (
        effect.party == DECODE and isinstance(effect.entry.event, Reserved)
    )
    client = deployment.ask(prompt_of(20, model), params())
    deployment.run(until=lambda: deployment.prefill.restless)
    deployment.cancel(client)

    def ended() -> bool:
        assert not deployment.network.messages
        return not deployment.prefill.restless

    deployment.run(until=ended)
    deployment.let_through()
    deployment.settle()
    assert deployment.prefill.core.staging.free == 4


def test_a_write_in_doubt_ends_the_attempt_and_keeps_its_pages(
    model: Model, tokenizer: Tokenizer
) -> None:
    """After a broken stream the attempt is given up, and nothing is reused before the plane knows."""
    deployment = Deployment(model, tokenizer, poison=poison)
    client = deployment.ask(prompt_of(30, model), params())
    deployment.run(until=lambda: bool(deployment.network.messages))
    plane = deployment.network.owners[str(DECODE)]
    # While a copy is under way, the owner cannot say what became of the ticket.
    name = deployment.network.messages[0].name
    plane.table.admit(name, [])
    plane.table._placing.add(name)
    deployment.network.break_streams()
    staging = deployment.prefill.core.staging_held
    assert staging > 0
    deployment.prefill.poll()
    for _ in range(200):
        deployment.step()
    assert deployment.prefill.core.staging_held >= staging
    assert "write_in_doubt" in [name for name, _ in deployment.notes]
    assert deployment.scheduler.log.state(deployment.request_of(client)).unsettled
    assert client.outcome is None
    plane.table.end(name)
    deployment.settle()
    requeued = [e.event for _, e in deployment.log if isinstance(e.event, Requeued)]
    assert [event.cause for event in requeued] == [Cause.TRANSFER_FAILED]
    assert client.tokens == alone(model, prompt_of(30, model), params())[0]


def test_a_lost_owner_takes_no_staging_pages_with_it(model: Model, tokenizer: Tokenizer) -> None:
    """A write whose fate only a lost owner knew is over for the writer, and so is its request."""
    deployment = Deployment(model, tokenizer)
    client = deployment.ask(prompt_of(30, model), params())
    deployment.run(until=lambda: bool(deployment.network.messages))
    plane = deployment.network.owners[str(DECODE)]
    # While a copy is under way, the owner cannot say what became of the ticket.
    name = deployment.network.messages[0].name
    plane.table.admit(name, [])
    plane.table._placing.add(name)
    deployment.network.break_streams()
    deployment.prefill.poll()
    deployment.lose(DECODE)
    deployment.run()
    core = deployment.prefill.core
    assert core.staging.free == 4
    assert core.allocator.free == deployment.prefill.pool.pages
    assert not core.writings
    assert not deployment.prefill.restless
    assert deployment.scheduler.log.state(deployment.request_of(client)).phase is Phase.REQUEUED


def test_a_lost_writer_is_shut_out_and_its_requests_end(model: Model, tokenizer: Tokenizer) -> None:
    """When prefill is lost, decode proves by its own plane that nothing lands, and settles."""
    deployment = Deployment(model, tokenizer)
    client = deployment.ask(prompt_of(40, model), params())
    deployment.run(until=lambda: bool(deployment.network.messages))
    late = list(deployment.network.messages)
    deployment.network.messages.clear()
    deployment.lose(PREFILL)
    deployment.run()
    # What the lost writer had on its way arrives now, and is refused.
    before = deployment.decode.pool.memory.octets.clone()
    deployment.network.messages.extend(late)
    deployment.network.deliver()
    assert torch.equal(before, deployment.decode.pool.memory.octets)
    drained = [e.event for _, e in deployment.log if isinstance(e.event, Drained)]
    assert [event.proof for event in drained] == [Proof.FENCED]
    assert deployment.decode.core.allocator.free == deployment.decode.pool.pages
    assert client.outcome is None or isinstance(client.outcome, Aborted)
    assert any(isinstance(e.event, Requeued) for _, e in deployment.log)
    assert not replay(deployment.log).findings
