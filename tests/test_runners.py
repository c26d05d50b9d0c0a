"""What prefill and decode compute, pack and check, one runner at a time."""

from __future__ import annotations

import itertools
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import decode_step
from engine.allocator import runs_of
from engine.dataplane import Write
from engine.digests import keyed_digest
from engine.effects import DecodeSlice, Post, PrefillSlice, Step, VerifyPages
from engine.model import Model
from engine.pool import KVPool
from engine.runner import (
    GeometryMismatchError,
    Packed,
    StepResult,
    copy_plan,
    grant_spans,
)
from engine.runner_decode import DecodeRunner, Order
from engine.runner_prefill import PrefillRunner
from engine.sampler import SamplingParams
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weights import load_model
from kernels.layout import PageLayout, PageMemory
from lifecycle.events import Cause, Failed, FinishReason, Purpose, Reserved, Verified
from lifecycle.ids import (
    EngineId,
    GrantId,
    PageRange,
    Party,
    RequestId,
    TokenRange,
    pages_for,
    slice_pages,
)
from tests.test_model import some_tokens
from tests.tiny import EOS, tiny_llama
from transport.bench_inside import unchecked

PAGE = 8
LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=16, page_tokens=PAGE)
WRITER = Party(EngineId("p"), 1, 0)
OWNER = Party(EngineId("d"), 1, 0)
GRANT = GrantId(OWNER, 1)
SOURCE_TAG, TARGET_TAG, GROWTH_TAG = 0x51, 0x7A, 0x6B
SOURCE = (PageRange(9, 2), PageRange(3, 1), PageRange(0, 2))
TARGET = (PageRange(4, 1), PageRange(10, 4))
STAGING = (PageRange(1, 3), PageRange(5, 2))
DIGEST = keyed_digest(b"key")
ONE = RequestId("one")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", tied=False)


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load_model(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


class Pair:
    """A prefill and a decode runner, and the copy between them."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model = model
        self.prefill = PrefillRunner(
            model, KVPool.allocate(LAYOUT, 12), PageMemory.allocate(LAYOUT, 8)
        )
        clock = itertools.count(700)
        self.decode = DecodeRunner(
            model,
            KVPool.allocate(LAYOUT, 20),
            tokenizer,
            clock=lambda: next(clock),
            digest=DIGEST,
        )
        self.reserved = Reserved(
            GRANT,
            Purpose.DESTINATION,
            TARGET,
            TokenRange(0, 5 * PAGE),
            "kv",
            TARGET_TAG,
            (WRITER,),
        )

    def fill(self, prompt: list[int], *chunks: int) -> None:
        """Compute a prompt but its last token, in chunks of these sizes."""
        start = 0
        for number, count in enumerate(chunks or (len(prompt) - 1,), start=1):
            part = PrefillSlice(ONE, 1, start, count, SOURCE, SOURCE_TAG)
            assert self.prefill.run(Step(number, (part,)), {ONE: prompt}) == {}
            start += count
        assert start == len(prompt) - 1

    def post(self, *, first: int, tokens: int) -> Post:
        """The write of the pages from logical page `first` on that hold these tokens."""
        stop = first + pages_for(tokens, PAGE)
        start = first * PAGE
        return Post(
            ticket=1,
            request=ONE,
            attempt=1,
            grant=GRANT,
            tokens=TokenRange(start, start + tokens),
            source_pages=slice_pages(SOURCE, start=first, stop=stop),
            target_pages=slice_pages(TARGET, start=first, stop=stop),
            staging=slice_pages(STAGING, start=0, stop=stop - first),
            tag=TARGET_TAG,
            step=1,
            steps_ended=1,
        )

    def move(self, post: Post) -> VerifyPages:
        """Pack and copy, as a data plane would; what decode is to check then."""
        packed = self.prefill.pack(post, target_pages=self.decode.pool.pages)
        assert isinstance(packed, Packed)
        assert packed.size_bytes == sum(write.length for write in packed.writes)
        carry(packed.writes, self.prefill.staging, self.decode.pool.memory)
        write = (self.reserved, post.tokens, post.target_pages, packed.digest)
        return VerifyPages(ONE, 1, (write,))

    def step(self, position: int, index: int, order: Order) -> StepResult:
        """One decode step; pages of growth follow those of the destination."""
        pages, tags = (*TARGET, PageRange(15, 5)), (TARGET_TAG, TARGET_TAG, GROWTH_TAG)
        part = DecodeSlice(ONE, 1, position, index, pages, tags)
        return self.decode.run(Step(1, (part,)), {ONE: order})


def carry(writes: tuple[Write, ...], staging: PageMemory, pool: PageMemory) -> None:
    for write in writes:
        source = staging.octets[write.source_offset : write.source_offset + write.length]
        pool.octets[write.target_offset : write.target_offset + write.length] = source


@pytest.fixture
def pair(model: Model, tokenizer: Tokenizer) -> Pair:
    return Pair(model, tokenizer)


def prompt_of(length: int) -> list[int]:
    return some_tokens(length, vocabulary=250, seed=length)


def order_of(prompt: list[int], *, most: int = 30, relayed: int = 0, **sampling: object) -> Order:
    params = SamplingParams(**{"ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Order(tuple(prompt), relayed, params, most)


# --- from prefill to decode -----------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(33,), (8, 16, 9), (1, 1, 31)])
def test_what_prefill_packs_decode_verifies(pair: Pair, chunks: tuple[int, ...]) -> None:
    """Pages that went through staging bear the destination's tag, and every byte agrees."""
    prompt = prompt_of(34)
    pair.fill(prompt, *chunks)
    verified = pair.decode.verify(pair.move(pair.post(first=0, tokens=33)), (GRANT,))
    assert verified == Verified((GRANT,), 5, 10, 10, "wsum32")
    assert pair.prefill.prompt_tokens_computed == 33
    source = pair.prefill.pool.memory.rows
    target = pair.decode.pool.memory.rows
    for layer in range(LAYOUT.layers):
        for token in range(33):
            rows = [
                slice_pages(pages, start=token // PAGE, stop=token // PAGE + 1)[0].first
                * LAYOUT.block_rows
                + token % PAGE
                for pages in (SOURCE, TARGET)
            ]
            assert torch.equal(source[layer, rows[0]], target[layer, rows[1]])


def test_pages_may_be_written_in_parts(pair: Pair) -> None:
    """Each write is verified with the logical pages that it covers."""
    pair.fill(prompt_of(34))
    first = pair.move(pair.post(first=0, tokens=2 * PAGE))
    second = pair.move(pair.post(first=2, tokens=17))
    both = VerifyPages(ONE, 1, first.writes + second.writes)
    assert pair.decode.verify(both, (GRANT,)) == Verified((GRANT,), 5, 10, 10, "wsum32")


def test_a_prompt_of_one_token_has_nothing_to_verify(pair: Pair) -> None:
    """Its grants are named all the same."""
    nothing = VerifyPages(ONE, 1, ())
    assert pair.decode.verify(nothing, (GRANT,)) == Verified((GRANT,), 0, 0, 0, "wsum32")


def test_another_digest_than_announced_is_a_failed_transfer(pair: Pair) -> None:
    """Pages that agree with themselves but not with the announcement are not what was sent."""
    pair.fill(prompt_of(34))
    effect = pair.move(pair.post(first=0, tokens=33))
    reserved, tokens, pages, digest = effect.writes[0]
    wrong = attrs.evolve(effect, writes=((reserved, tokens, pages, digest ^ 1),))
    failed = pair.decode.verify(wrong, (GRANT,))
    assert isinstance(failed, Failed)
    assert failed.cause is Cause.TRANSFER_FAILED


def test_pages_of_another_place_are_a_failed_transfer(pair: Pair) -> None:
    """A write that names other pages than its tokens have in the grant is not read at all."""
    pair.fill(prompt_of(34))
    effect = pair.move(pair.post(first=0, tokens=33))
    reserved, tokens, pages, digest = effect.writes[0]
    wrong = attrs.evolve(effect, writes=((reserved, tokens, pages[1:], digest),))
    failed = pair.decode.verify(wrong, (GRANT,))
    assert isinstance(failed, Failed)
    assert failed.cause is Cause.TRANSFER_FAILED


def test_a_page_that_never_arrived_is_an_isolation_violation(pair: Pair) -> None:
    """The memory under an absent page still bears an earlier owner's tag, which is reported."""
    pair.fill(prompt_of(34))
    effect = pair.move(pair.post(first=0, tokens=33))
    pair.decode.pool.open_pages(((12, 1),), tag=0xF00, first_position=3)
    failed = pair.decode.verify(effect, (GRANT,))
    assert isinstance(failed, Failed)
    assert (failed.cause, failed.page) == (Cause.ISOLATION_VIOLATION, 12)
    assert (failed.tag_expected, failed.tag_found) == (TARGET_TAG, 0xF00)


def test_a_source_page_that_changed_hands_is_not_packed(pair: Pair) -> None:
    """What prefill sends bears the source grant's tag until the moment at which it is packed."""
    pair.fill(prompt_of(34))
    pair.prefill.pool.open_pages(((3, 1),), tag=0xF00, first_position=2)
    failed = pair.prefill.pack(pair.post(first=0, tokens=33), target_pages=20)
    assert isinstance(failed, Failed)
    assert (failed.cause, failed.page) == (Cause.ISOLATION_VIOLATION, 3)


def test_a_source_page_that_changed_hands_ends_its_request_in_a_step(pair: Pair) -> None:
    """The next chunk of one request fails; the other request of the step goes on."""
    prompt, two = prompt_of(34), RequestId("two")
    part = PrefillSlice(ONE, 1, 0, PAGE, SOURCE, SOURCE_TAG)
    pair.prefill.run(Step(1, (part,)), {ONE: prompt})
    pair.prefill.pool.open_pages(((9, 1),), tag=0xF00, first_position=0)
    parts = (
        PrefillSlice(ONE, 1, PAGE, PAGE, SOURCE, SOURCE_TAG),
        PrefillSlice(two, 1, 0, 5, (PageRange(6, 1),), 0x22),
    )
    failed = pair.prefill.run(Step(2, parts), {ONE: prompt, two: prompt})
    assert list(failed) == [ONE]
    assert failed[ONE].tag_found == 0xF00
    assert pair.prefill.prompt_tokens_computed == PAGE + 5


# --- addresses ------------------------------------------------------------------------------------

PAGES = st.lists(st.integers(0, 15), unique=True, min_size=1, max_size=10)


@given(st.data())
def test_every_block_goes_to_its_own_place(data: st.DataObject) -> None:
    """The planned writes move each logical page of each layer to the target's page, and no more."""
    source = data.draw(PAGES)
    target = data.draw(
        st.lists(st.integers(0, 15), unique=True, min_size=len(source), max_size=len(source))
    )
    small = PageLayout(layers=2, kv_heads=1, head_dim=32, page_tokens=2)
    memories = [PageMemory.allocate(small, 16) for _ in range(2)]
    for memory in memories:
        memory.words.zero_()
    for logical, page in enumerate(source):
        for layer in range(2):
            memories[0].words[layer, page] = 1 + 10 * logical + layer
    plan = copy_plan(
        small,
        staging=ranges(source),
        staging_pages=16,
        target=ranges(target),
        target_pages=16,
    )
    carry(plan, *memories)
    expected = torch.zeros_like(memories[1].words)
    for logical, page in enumerate(target):
        for layer in range(2):
            expected[layer, page] = 1 + 10 * logical + layer
    assert torch.equal(memories[1].words, expected)
    spans = grant_spans(small, ranges(target), pool_pages=16)
    assert sum(span.length for span in spans) == sum(write.length for write in plan)
    assert all(
        any(s.offset <= w.target_offset and w.target_offset + w.length <= s.end for s in spans)
        for w in plan
    )


def ranges(pages: list[int]) -> tuple[PageRange, ...]:
    """Pages in this order, as ranges that never cross a break in the order."""
    out: list[PageRange] = []
    for page in pages:
        if out and out[-1].stop == page:
            out[-1] = PageRange(out[-1].first, out[-1].count + 1)
        else:
            out.append(PageRange(page, 1))
    assert runs_of(pages) is not None
    return tuple(out)


def test_unequal_page_counts_are_refused() -> None:
    """A plan never drops a page."""
    with pytest.raises(GeometryMismatchError) as caught:
        copy_plan(
            LAYOUT,
            staging=(PageRange(0, 2),),
            staging_pages=4,
            target=(PageRange(0, 3),),
            target_pages=4,
        )
    assert (caught.value.source_pages, caught.value.target_pages) == (2, 3)


# --- decode ---------------------------------------------------------------------------------------


def decode_all(pair: Pair, order: Order) -> tuple[list[StepResult], str]:
    """Steps until the request is finished or failed, and the text."""
    results = []
    text = ""
    for index in range(order.new_tokens_max):
        result = pair.step(len(order.prompt) - 1 + index, index, order)
        results.append(result)
        text += result.tokens[ONE].text if ONE in result.tokens else ""
        if ONE not in result.tokens or ONE in result.finished:
            break
    return results, text


def arrive(pair: Pair, prompt: list[int]) -> None:
    """Bring a prompt's pages to decode."""
    if len(prompt) > 1:
        pair.fill(prompt)
        pair.move(pair.post(first=0, tokens=len(prompt) - 1))


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 34])
def test_finished_counts_what_was_done(pair: Pair, length: int) -> None:
    """Tokens, time of the first one, keyed digest, and reads are those of this attempt."""
    prompt = prompt_of(length)
    arrive(pair, prompt)
    results, _ = decode_all(pair, order_of(prompt, most=12))
    finished = results[-1].finished[ONE]
    tokens = [result.tokens[ONE].token for result in results]
    live = [pages_for(length + i, PAGE) for i in range(12)]
    assert finished.tokens == 12
    assert finished.reason is FinishReason.LENGTH
    assert finished.first_token_ns == 700
    assert finished.digest == DIGEST(ONE, tokens)
    assert finished.pages_read == live[-1]
    assert finished.reads_checked == sum(live) * LAYOUT.layers
    assert finished.reads_checked == pair.decode.pool.counters.reads_checked
    assert finished.reads_unchecked == pair.decode.pool.counters.reads_unchecked == 0
    assert pair.decode.prompt_tokens_computed == 1
    assert pair.decode.tokens_sampled == pair.decode.steps == 12


@pytest.mark.parametrize("path", ["plain", "compiled"])
def test_a_compare_left_out_is_in_the_answer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """One step without its compares, on either path: its reads are in `Finished` as unchecked."""
    prompt = prompt_of(PAGE)
    arrive(pair, prompt)
    sound = pair.decode.compute
    with monkeypatch.context() as patch:
        if path == "plain":
            patch.setattr(decode_step, "why_plain", lambda _model, _pool: "for a test")
        bare = unchecked(pair.model, pair.decode.pool, threads=1)
    assert bare.path == path
    pair.decode.compute = bare
    order = order_of(prompt, most=2)
    assert pair.step(PAGE - 1, 0, order).failed == {}
    pair.decode.compute = sound
    finished = pair.step(PAGE, 1, order).finished[ONE]
    assert finished.reads_unchecked == pair.decode.pool.counters.reads_unchecked == LAYOUT.layers


def test_a_step_needs_the_pages_that_prefill_wrote(pair: Pair) -> None:
    """Without the prompt's pages there is no token, and an attempt ends at its first step."""
    pair.decode.pool.memory.words.zero_()
    results, text = decode_all(pair, order_of(prompt_of(5)))
    assert text == ""
    assert results[0].tokens == {}
    assert results[0].failed[ONE].cause is Cause.ISOLATION_VIOLATION
    assert results[0].failed[ONE].tag_expected == TARGET_TAG
    assert results[0].failed[ONE].tag_found == 0


def test_a_growth_page_bears_the_tag_of_its_own_grant(pair: Pair) -> None:
    """A page is opened at its first token under the grant that holds it, and read under it."""
    prompt = prompt_of(38)
    arrive(pair, prompt)
    results, _ = decode_all(pair, order_of(prompt, most=8))
    assert results[-1].finished[ONE].tokens == 8
    words = pair.decode.pool.memory.words
    assert int(words[0, 15, 0]) == GROWTH_TAG
    assert int(words[0, 13, 0]) == TARGET_TAG
    pair.decode.pool.open_pages(((15, 1),), tag=TARGET_TAG, first_position=5)
    failed = pair.step(45, 8, order_of(prompt)).failed[ONE]
    assert (failed.page, failed.tag_expected, failed.tag_found) == (15, GROWTH_TAG, TARGET_TAG)


def test_rows_without_a_distribution_fail_alone(pair: Pair) -> None:
    """NaN in one request's own KV ends that request; its neighbour's draw is the same to the bit."""
    prompt, two = prompt_of(5), RequestId("two")
    arrive(pair, prompt)
    twin = (PageRange(17, 1),)
    words, rows = pair.decode.pool.memory.words, pair.decode.pool.memory.rows
    pair.decode.pool.memory.octets.view(LAYOUT.layers, 20, -1)[:, 17] = (
        pair.decode.pool.memory.octets.view(LAYOUT.layers, 20, -1)[:, 4]
    )
    assert int(words[0, 17, 0]) == TARGET_TAG
    slices = (
        DecodeSlice(ONE, 1, 4, 0, TARGET, (TARGET_TAG, TARGET_TAG)),
        DecodeSlice(two, 1, 4, 0, twin, (TARGET_TAG,)),
    )
    orders = {ONE: order_of(prompt), two: order_of(prompt)}
    sound = pair.decode.run(Step(1, slices), orders)
    assert sound.tokens[ONE].token == sound.tokens[two].token
    pair.decode.forget(ONE)
    pair.decode.forget(two)
    rows[0, 17 * LAYOUT.block_rows] = float("nan")
    result = pair.decode.run(Step(2, slices), orders)
    assert list(result.tokens) == [ONE]
    assert result.tokens[ONE] == sound.tokens[ONE]
    assert result.failed[two].cause is Cause.ENGINE_FAILED


# --- text and stops -------------------------------------------------------------------------------


def test_the_end_token_ends_the_answer_unless_it_is_ignored(
    model: Model, tokenizer: Tokenizer, pair: Pair
) -> None:
    """The model's own end token counts as a token, shows no text, and can be ignored."""
    prompt = prompt_of(12)
    arrive(pair, prompt)
    results, _ = decode_all(pair, order_of(prompt))
    tokens = [result.tokens[ONE].token for result in results]
    chosen = tokens[3]
    assert EOS in model.config.eos_tokens
    ending = Model(attrs.evolve(model.config, eos_tokens=(chosen,)), model.weights)
    for ignore in (False, True):
        again = Pair(ending, tokenizer)
        arrive(again, prompt)
        results, text = decode_all(again, order_of(prompt, ignore_eos=ignore))
        heard = [result.tokens[ONE].token for result in results]
        if ignore:
            assert heard == tokens
            continue
        cut = tokens.index(chosen)
        assert heard == tokens[: cut + 1]
        assert results[-1].finished[ONE].reason is FinishReason.STOP
        assert results[-1].tokens[ONE].stop == chosen
        assert text == tokenizer.decode(tokens[:cut])


def test_an_attempt_continues_the_text_of_the_one_before(
    model: Model, tokenizer: Tokenizer
) -> None:
    """Cut after any token, the texts of both attempts are the text of one, stop strings too."""
    prompt = prompt_of(12)
    whole = Pair(model, tokenizer)
    arrive(whole, prompt)
    results, text = decode_all(whole, order_of(prompt, most=20))
    tokens = [result.tokens[ONE].token for result in results]
    stop = next(text[i : i + 3] for i in range(8, 20))
    stopped = Pair(model, tokenizer)
    arrive(stopped, prompt)
    results, text = decode_all(stopped, order_of(prompt, most=20, stop=(stop,)))
    assert results[-1].finished[ONE].reason is FinishReason.STOP
    for cut in range(1, len(results)):
        second = Pair(model, tokenizer)
        longer = prompt + tokens[:cut]
        arrive(second, longer)
        order = order_of(longer, most=20 - cut, relayed=cut, stop=(stop,))
        rest, more = decode_all(second, order)
        relayed_text = "".join(result.tokens[ONE].text for result in results[:cut])
        assert relayed_text + more == text
        assert [r.tokens[ONE].token for r in rest] == tokens[cut : len(results)]
        assert rest[-1].tokens[ONE].stop == stop


def test_an_answer_that_had_ended_ends_again_at_once(pair: Pair) -> None:
    """A stop that an earlier attempt relayed before its engine was lost is not decoded past."""
    prompt = prompt_of(12)
    arrive(pair, prompt)
    order = order_of(prompt, relayed=3, stop_tokens=(prompt[-1],))
    results, text = decode_all(pair, order)
    assert len(results) == 1
    assert text == ""
    assert results[0].finished[ONE].reason is FinishReason.STOP


def test_a_new_attempt_begins_anew(pair: Pair) -> None:
    """State belongs to a request and an attempt; forgetting it frees both."""
    prompt = prompt_of(5)
    arrive(pair, prompt)
    pair.step(4, 0, order_of(prompt))
    part = DecodeSlice(ONE, 2, 4, 0, TARGET, (TARGET_TAG, TARGET_TAG))
    again = pair.decode.run(Step(2, (part,)), {ONE: order_of(prompt, most=1)})
    assert again.finished[ONE].tokens == 1
    pair.decode.forget(ONE)
    assert pair.decode._answers == {}
