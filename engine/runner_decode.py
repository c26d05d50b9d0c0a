"""Decode's torch work: it checks what arrived, runs one token a request, samples, writes text.

Owns: the tokens, text and stops of running attempts, and the opening of pages as they are reached.
Must not know: the log, the data plane, asynchrony; it is called from one thread at a time.

A page is opened when its first token is appended: pages of growth, pages of the destination grant
beyond the prompt, and the page of the last prompt token when that token begins a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import attrs
import torch
from torch import Tensor

from engine.decode_step import DecodeSteps, make_steps
from engine.detokenizer import Detokenizer, StopMatcher
from engine.digests import Keyed
from engine.effects import DecodeSlice, Step, VerifyPages
from engine.model import Model
from engine.paged import SequenceSlice
from engine.pool import KVPool
from engine.runner import Life, NewToken, StepResult, isolation_failure, page_runs
from engine.sampler import Draw, NonFiniteLogits, SamplingParams, sample
from engine.scrubber import Scrubber, weight_bytes
from engine.tokenizer import Tokenizer, UnknownToken
from kernels.digest import METHOD_WSUM32
from kernels.headers import HeaderMismatch
from lifecycle.events import Cause, Failed, Finished, FinishReason, Verified
from lifecycle.ids import GrantId, PageRange, RequestId, count_pages, slice_pages


@attrs.frozen
class Order:
    """What an attempt is to decode.

    prompt: its whole prompt; relayed: how many of the prompt's last tokens are answers of earlier
    attempts; new_tokens_max: new tokens that this attempt may give.
    """

    prompt: tuple[int, ...]
    relayed: int
    sampling: SamplingParams
    new_tokens_max: int


@attrs.define
class _Answer:
    """The answer of one attempt as it grows."""

    order: Order
    detokenizer: Detokenizer
    matcher: StopMatcher
    stop_tokens: frozenset[int]
    stopped_before: bool
    tokens: list[int] = attrs.Factory(list)
    first_token_ns: int = 0
    pages_read: int = 0
    reads_checked: int = 0
    reads_unchecked: int = 0


class DecodeRunner:
    """Reads and appends to one pool.

    clock: wall time in nanoseconds; digest: the keyed digest of the scheduler's life.
    `prompt_tokens_computed`, `tokens_sampled` and `steps` only grow.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], int],
        digest: Keyed,
    ) -> None:
        self.model = model
        self.pool = pool
        self.tokenizer = tokenizer
        self.prompt_tokens_computed = 0
        self.tokens_sampled = 0
        self.steps = 0
        self._clock = clock
        self._digest = digest
        self.scrubber = Scrubber(pool, step_bytes=weight_bytes(model))
        self._answers: dict[Life, _Answer] = {}

    @cached_property
    def compute(self) -> DecodeSteps:
        """How steps are computed: chosen at first use, since compiled code takes time to load."""
        return make_steps(self.model, self.pool, threads=torch.get_num_threads())

    # --- what arrived -------------------------------------------------------------------------

    def verify(self, effect: VerifyPages, grants: tuple[GrantId, ...]) -> Verified | Failed:
        """Check every byte of every page that the prompt covers.

        grants: the destination grants of the attempt; a prompt of one token has no writes.
        """
        pages = blocks = 0
        size = self.pool.layout.page_tokens
        for reserved, tokens, ranges, digest in effect.writes:
            first = tokens.start // size
            count = count_pages(ranges)
            within = slice_pages(reserved.pages, start=first, stop=first + count)
            if tokens.start % size or within != ranges:
                message = f"tokens {tokens.start} to {tokens.stop - 1} were written elsewhere"
                return Failed(Cause.TRANSFER_FAILED, message)
            report = self.pool.verify(
                page_runs(ranges), tag=reserved.tag, first_position=first, tokens=tokens.count
            )
            if report.mismatch is not None:
                return isolation_failure(self.pool, report.mismatch, expected_tag=reserved.tag)
            if report.digest != digest:
                message = f"the pages' digest is {report.digest:#x}, announced was {digest:#x}"
                return Failed(Cause.TRANSFER_FAILED, message)
            pages += count
            blocks += report.checked
        return Verified(grants, pages, blocks, blocks, METHOD_WSUM32)

    # --- steps --------------------------------------------------------------------------------

    def run(self, step: Step, orders: Mapping[RequestId, Order]) -> StepResult:
        """One token for each request of a step.

        orders: of each request of the step.
        A request whose pages are not its own gives no token; nor does one whose logits hold no
        distribution; all others go on.
        """
        parts = [part for part in step.slices if isinstance(part, DecodeSlice)]
        if not parts:
            return StepResult({}, {}, {})
        answers = [self._answer(part, orders[part.request]) for part in parts]
        for part in parts:
            self._open(part)
        sequences = [SequenceSlice(page_runs(p.pages), tuple(p.tags), p.position, 1) for p in parts]
        inputs = [_input(part, answer) for part, answer in zip(parts, answers, strict=True)]
        counters = self.pool.counters
        before = counters.reads_unchecked
        outcome = self.compute.run(inputs, sequences)
        for answer in answers:
            # The pool does not say whose reads went unchecked, so no request of the step is clean.
            answer.reads_unchecked += counters.reads_unchecked - before
        lives = [(part.request, part.attempt) for part in parts]
        mismatches = self.scrubber.after_step(lives, sequences, outcome.mismatches)
        self.steps += 1
        failed = {
            parts[n].request: self._isolated(parts[n], mismatch)
            for n, mismatch in mismatches.items()
        }
        sound = [n for n in range(len(parts)) if n not in mismatches]
        draws = _draw(outcome.logits[sound], [answers[n] for n in sound], [parts[n] for n in sound])
        result = StepResult({}, {}, failed)
        for row, number in enumerate(sound):
            if row in draws:
                self._take(parts[number], answers[number], draws[row], result)
            else:
                reason = "the model gave logits that hold no distribution"
                failed[parts[number].request] = Failed(Cause.ENGINE_FAILED, reason)
        return result

    def forget(self, request: RequestId) -> None:
        """Drop what is kept for a request."""
        for life in [life for life in self._answers if life[0] == request]:
            del self._answers[life]
            self.scrubber.forget(life)

    # --- one request --------------------------------------------------------------------------

    def _answer(self, part: DecodeSlice, order: Order) -> _Answer:
        life = (part.request, part.attempt)
        known = self._answers.get(life)
        if known is not None:
            return known
        self.forget(part.request)
        sampling = order.sampling
        own = frozenset(() if sampling.ignore_eos else self.model.config.eos_tokens)
        stops = own | frozenset(sampling.stop_tokens)
        relayed = order.prompt[len(order.prompt) - order.relayed :]
        answer = _Answer(
            order,
            Detokenizer(self.tokenizer),
            StopMatcher(sampling.stop),
            stops,
            # An earlier attempt's last token may have ended the answer before its engine was lost.
            stopped_before=bool(relayed) and relayed[-1] in stops,
        )
        for token in relayed:
            # The client has this text; what was held back of it is still held back.
            answer.matcher.push(self._spell(answer, token))
        self._answers[life] = answer
        return answer

    def _open(self, part: DecodeSlice) -> None:
        """Stamp the page that this step begins, if it begins one."""
        size = self.pool.layout.page_tokens
        if part.position % size:
            return
        logical = part.position // size
        page, tag = _page_of(part.pages, part.tags, logical)
        self.pool.open_pages(((page, 1),), tag=tag, first_position=logical)

    def _take(self, part: DecodeSlice, answer: _Answer, draw: Draw, result: StepResult) -> None:
        layout = self.pool.layout
        live = layout.pages_for_tokens(part.position + 1)
        answer.pages_read = live
        answer.reads_checked += live * layout.layers
        self.tokens_sampled += 1
        self.prompt_tokens_computed += part.position < len(answer.order.prompt)
        if not answer.tokens:
            answer.first_token_ns = self._clock()
        answer.tokens.append(draw.token)
        text, stop, ended = self._text(answer, draw.token)
        long = len(answer.tokens) >= answer.order.new_tokens_max
        if (ended or long) and not isinstance(stop, str):
            text += answer.matcher.push(answer.detokenizer.flush()).text + answer.matcher.flush()
        result.tokens[part.request] = NewToken(part.index, draw.token, text, draw.logprob, stop)
        if ended or long:
            result.finished[part.request] = Finished(
                FinishReason.STOP if ended else FinishReason.LENGTH,
                len(answer.tokens),
                answer.first_token_ns,
                self._digest(part.request, answer.tokens),
                answer.pages_read,
                answer.reads_checked,
                answer.reads_unchecked,
            )

    def _text(self, answer: _Answer, token: int) -> tuple[str, str | int | None, bool]:
        """The text to show with a token, what stopped the answer, and whether it is over."""
        if answer.stopped_before:
            return "", None, True
        if token in answer.stop_tokens:
            # The text of a stop token is not part of the answer.
            return "", token, True
        found = answer.matcher.push(self._spell(answer, token))
        return found.text, found.stop, found.stopped

    def _spell(self, answer: _Answer, token: int) -> str:
        try:
            return answer.detokenizer.push(token)
        except UnknownToken:
            # A model may have more rows in its head than its vocabulary has words.
            return ""

    def _isolated(self, part: DecodeSlice, mismatch: HeaderMismatch) -> Failed:
        for run, tag in zip(part.pages, part.tags, strict=True):
            if run.first <= mismatch.page < run.stop:
                return isolation_failure(self.pool, mismatch, expected_tag=tag)
        raise AssertionError("a mismatch names a page of its own sequence")


def _input(part: DecodeSlice, answer: _Answer) -> int:
    """The token at the slice's position: of the prompt, or an earlier answer of the attempt."""
    prompt = answer.order.prompt
    if part.position < len(prompt):
        return prompt[part.position]
    return answer.tokens[part.position - len(prompt)]


def _page_of(pages: Sequence[PageRange], tags: Sequence[int], logical: int) -> tuple[int, int]:
    """The page with this logical number, and the tag of the grant that it belongs to."""
    before = 0
    for run, tag in zip(pages, tags, strict=True):
        if logical < before + run.count:
            return run.first + logical - before, tag
        before += run.count
    raise IndexError(f"logical page {logical} of {before}")


def _draw(
    logits: Tensor, answers: Sequence[_Answer], parts: Sequence[DecodeSlice]
) -> dict[int, Draw]:
    """Draws by row of `logits`; rows that hold no distribution are missing."""
    rows = list(range(len(parts)))
    while rows:
        try:
            draws = sample(
                logits if len(rows) == len(parts) else logits[rows],
                [answers[row].order.sampling for row in rows],
                [parts[row].position + 1 for row in rows],
            )
        except NonFiniteLogits as error:
            rows = [row for place, row in enumerate(rows) if place not in error.rows]
        else:
            return dict(zip(rows, draws, strict=True))
    return {}
