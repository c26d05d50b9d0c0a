"""Runners over tainted bytes: what they would compute is known, so what they read can be judged.

Owns: prefill's and decode's work on simulated regions, and the comparison of headers and words.
Must not know: the log, planes, and when anything runs.

The next token is one more than the one that was run, and it is read from the page: a foreign
word that passes every header would come out as somebody else's token, and is raised as `Found`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import attrs

from engine.effects import DecodeSlice, Post, PrefillSlice, Step, VerifyPages
from engine.runner import NewToken, Packed, StepResult, copy_plan
from engine.runner_decode import Order
from engine.world_memory import count_reads, numbers
from engine.world_values import Found
from lifecycle.events import Cause, Failed, Finished, FinishReason, Verified
from lifecycle.ids import GrantId, RequestId, pages_for, slice_pages
from transport.simulated_memory import Block, Region, seal, word_of, words_of

if TYPE_CHECKING:
    from kernels.layout import PageLayout


class SimulatedPrefillRunner:
    """Fills source pages, and packs them under a destination's tag."""

    def __init__(self, pool: Region, staging: Region) -> None:
        self.pool = pool
        self.staging = staging
        self.prompt_tokens_computed = 0
        self.steps = 0
        self.fails: Callable[[], bool] = lambda: False
        self._prompts: dict[tuple[RequestId, int], tuple[int, ...]] = {}

    def run(
        self, step: Step, prompts: Mapping[RequestId, tuple[int, ...]]
    ) -> dict[RequestId, Failed]:
        """Compute the slices of a pass."""
        self.steps += 1
        failed: dict[RequestId, Failed] = {}
        size = self.pool.layout.page_tokens
        for part in step.slices:
            assert isinstance(part, PrefillSlice), "a prefill step has prefill slices"
            if self.fails():
                failed[part.request] = Failed(Cause.ENGINE_FAILED, "injected")
                continue
            pages, prompt = numbers(part.pages), prompts[part.request]
            self._prompts[part.request, part.attempt] = prompt
            for token in range(part.start, part.start + part.count):
                page = pages[token // size]
                if token % size == 0:
                    self.pool.open(page, tag=part.tag, position=token // size)
                word = word_of(prompt[token], part.attempt)
                self.pool.append(page, place=token % size, word=word)
            self.prompt_tokens_computed += part.count
        return failed

    def pack(self, post: Post, *, target_pages: int) -> Packed | Failed:
        """Copy computed pages into staging; what is not the request's own is a finding."""
        size, first = self.pool.layout.page_tokens, post.tokens.start
        prompt = self._prompts.get((post.request, post.attempt), ())
        digest = 0
        places = zip(numbers(post.source_pages), numbers(post.staging), strict=True)
        for index, (source, slot) in enumerate(places):
            start = first + index * size
            stop = min(start + size, post.tokens.stop)
            want = words_of(prompt, post.attempt, start=start, stop=stop)
            block = self.pool.block(source)
            if block.words[: stop - start] != want:
                raise Found("computed-before-sent", f"{post.request}: page {source} is not ready")
            rest = (0,) * (size - len(want))
            staged = Block(post.tag, start // size, len(want), 0, want + rest, post.tag)
            staged = attrs.evolve(staged, digest=seal(staged))
            digest += staged.digest
            self.staging.put(slot, staged)
        writes = copy_plan(
            cast("PageLayout", self.pool.layout),
            staging=post.staging,
            staging_pages=self.staging.pages,
            target=post.target_pages,
            target_pages=target_pages,
        )
        return Packed(writes, sum(write.length for write in writes), digest)

    def forget(self, request: RequestId) -> None:
        """The request is over here."""
        for key in [key for key in self._prompts if key[0] == request]:
            del self._prompts[key]


@attrs.define
class _Answer:
    """One attempt's answer as it grows."""

    first_token_ns: int = 0
    reads: int = 0
    given: list[int] = attrs.Factory(list)


class SimulatedDecodeRunner:
    """Checks what arrived, runs one token a request, and reads what it must not miss."""

    def __init__(self, pool: Region, *, now: Callable[[], int]) -> None:
        self.pool = pool
        self.prompt_tokens_computed = 0
        self.tokens_sampled = 0
        self.steps = 0
        self.fails: Callable[[], bool] = lambda: False
        self._now = now
        self._answers: dict[tuple[RequestId, int], _Answer] = {}

    def verify(self, effect: VerifyPages, grants: tuple[GrantId, ...]) -> Verified | Failed:
        """Compare headers and digests of every page that the prompt covers."""
        size, total = self.pool.layout.page_tokens, 0
        for reserved, tokens, ranges, digest in effect.writes:
            first = tokens.start // size
            pages = numbers(ranges)
            within = slice_pages(reserved.pages, start=first, stop=first + len(pages))
            if within != ranges:
                return Failed(Cause.TRANSFER_FAILED, f"{tokens} were written elsewhere")
            found = 0
            for index, page in enumerate(pages):
                block, position = self.pool.block(page), first + index
                filled = min(size, tokens.stop - position * size)
                if not self._bears(block, tag=reserved.tag, position=position, filled=filled):
                    return self._violation(page, expected=reserved.tag, block=block)
                if block.filled != filled or seal(block) != block.digest:
                    return self._violation(page, expected=reserved.tag, block=block)
                found += block.digest
            if found != digest:
                return Failed(Cause.TRANSFER_FAILED, f"digest {found}, not {digest}")
            total += len(pages)
        return Verified(grants, total, total, total, "simulated")

    def run(self, step: Step, orders: Mapping[RequestId, Order]) -> StepResult:
        """One token for each request of the step."""
        self.steps += 1
        tokens: dict[RequestId, NewToken] = {}
        finished: dict[RequestId, Finished] = {}
        failed: dict[RequestId, Failed] = {}
        for part in step.slices:
            assert isinstance(part, DecodeSlice), "a decode step has decode slices"
            order = orders[part.request]
            if self.fails():
                failed[part.request] = Failed(Cause.ENGINE_FAILED, "injected")
                continue
            answer = self._answers.setdefault((part.request, part.attempt), _Answer())
            wrong = self._decode(part, order, answer)
            if wrong is not None:
                failed[part.request] = wrong
                continue
            self.tokens_sampled += 1
            answer.first_token_ns = answer.first_token_ns or self._now()
            token = answer.given[-1]
            tokens[part.request] = NewToken(part.index, token, f"{token} ", 0.0)
            if part.index + 1 >= order.new_tokens_max:
                finished[part.request] = Finished(
                    FinishReason.LENGTH,
                    part.index + 1,
                    answer.first_token_ns,
                    b"",
                    count_reads(part, self.pool.layout.page_tokens),
                    answer.reads,
                    0,
                )
        return StepResult(tokens, finished, failed)

    def _decode(self, part: DecodeSlice, order: Order, answer: _Answer) -> Failed | None:
        """Append the token that is run, then read everything up to it."""
        size = self.pool.layout.page_tokens
        table = [
            (page, tag)
            for run, tag in zip(part.pages, part.tags, strict=True)
            for page in numbers((run,))
        ]
        sequence = [*order.prompt, *answer.given]
        wrong = self._read(part, table, sequence, part.position)
        if wrong is not None:
            return wrong
        page, tag = table[part.position // size]
        if part.position % size == 0:
            self.pool.open(page, tag=tag, position=part.position // size)
        word = word_of(sequence[part.position], part.attempt)
        self.pool.append(page, place=part.position % size, word=word)
        wrong = self._read(part, table, sequence, part.position + 1)
        if wrong is not None:
            return wrong
        answer.reads += count_reads(part, size)
        last = self.pool.block(page).words[part.position % size]
        answer.given.append((last >> 8) + 1)
        return None

    def _read(
        self, part: DecodeSlice, table: list[tuple[int, int]], sequence: list[int], count: int
    ) -> Failed | None:
        """Compare the headers of every live page; words that pass them must be the attempt's."""
        size = self.pool.layout.page_tokens
        for position in range(pages_for(count, size)):
            page, tag = table[position]
            filled = min(size, count - position * size)
            block = self.pool.block(page)
            self.pool.counters.reads_checked += 1
            if not self._bears(block, tag=tag, position=position, filled=filled):
                return self._violation(page, expected=tag, block=block)
            start = position * size
            want = words_of(sequence, part.attempt, start=start, stop=start + filled)
            if block.words[:filled] != want:
                raise Found("observed-foreign", f"{part.request} reads {block.words}, not {want}")
        return None

    @staticmethod
    def _bears(block: Block, *, tag: int, position: int, filled: int) -> bool:
        mine = (block.tag, block.tail, block.position) == (tag, tag, position)
        return mine and block.filled >= filled

    def _violation(self, page: int, *, expected: int, block: Block) -> Failed:
        self.pool.counters.mismatches += 1
        found = block.tail if block.tag == expected else block.tag
        return Failed(
            Cause.ISOLATION_VIOLATION,
            f"page {page} bears {found:#x}, not {expected:#x}",
            page=page,
            tag_expected=expected,
            tag_found=found,
        )

    def forget(self, request: RequestId) -> None:
        """The request is over here."""
        for key in [key for key in self._answers if key[0] == request]:
            del self._answers[key]
