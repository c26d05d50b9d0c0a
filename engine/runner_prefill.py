"""Prefill's torch work: the KV of prompt tokens 0 to n-2, and sealed copies for the wire.

Owns: which pages of the pool a pass writes, and the copy into staging.
Must not know: the log, the data plane, asynchrony; it is called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.device_pool import ForeignSourceError
from engine.device_steps import make_batch
from engine.effects import Post, PrefillSlice, Step
from engine.model import Model
from engine.paged import SequenceSlice
from engine.pool import KVPool
from engine.runner import Life, Packed, copy_plan, isolation_failure, page_runs
from engine.scrubber import Scrubber, weight_bytes
from kernels.layout import PageMemory
from lifecycle.events import Failed
from lifecycle.ids import RequestId, count_pages


class PrefillRunner:
    """Computes into a pool and packs from it into staging.

    `prompt_tokens_computed` and `steps` only grow.
    """

    def __init__(self, model: Model, pool: KVPool, staging: PageMemory) -> None:
        self.model = model
        self.pool = pool
        self.staging = staging
        self.prompt_tokens_computed = 0
        self.steps = 0
        self.scrubber = Scrubber(pool, step_bytes=weight_bytes(model))
        self._tags: dict[Life, int] = {}

    def open(self, part: PrefillSlice) -> None:
        """Stamp the source grant's pages, once, before the first token of an attempt."""
        self.pool.open_pages(page_runs(part.pages), tag=part.tag, first_position=0)
        self._tags[part.request, part.attempt] = part.tag

    def run(
        self, step: Step, prompts: Mapping[RequestId, Sequence[int]]
    ) -> dict[RequestId, Failed]:
        """Compute every slice of a step in one pass; returns the requests that failed in it.

        prompts: the whole prompt of each request of the step.
        """
        parts = [part for part in step.slices if isinstance(part, PrefillSlice)]
        if not parts:
            return {}
        for part in parts:
            if part.start == 0:
                self.open(part)
        sequences = [
            SequenceSlice(page_runs(part.pages), part.tag, part.start, part.count) for part in parts
        ]
        batch = make_batch(self.pool, sequences)
        tokens: list[int] = []
        positions: list[int] = []
        for part in parts:
            tokens += prompts[part.request][part.start : part.start + part.count]
            positions += range(part.start, part.start + part.count)
        batch.begin_step()
        device = self.model.device
        self.model.fill(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), batch
        )
        lives = [(part.request, part.attempt) for part in parts]
        mismatches = self.scrubber.after_step(lives, sequences, batch.end_step())
        self.steps += 1
        self.prompt_tokens_computed += sum(
            part.count for number, part in enumerate(parts) if number not in mismatches
        )
        return {
            parts[number].request: isolation_failure(
                self.pool, mismatch, expected_tag=parts[number].tag
            )
            for number, mismatch in mismatches.items()
        }

    def pack(self, post: Post, *, target_pages: int) -> Packed | Failed:
        """Seal copies of source pages in staging under the destination's tag, and plan the writes.

        target_pages: how many pages the owner's pool has.
        Failed: a source page does not bear the source grant's tag any more.
        """
        layout = self.pool.layout
        source = page_runs(post.source_pages)
        first = post.tokens.start // layout.page_tokens
        tag = self._tags[post.request, post.attempt]
        report = self.pool.check(source, tag=tag, first_position=first, tokens=post.tokens.count)
        if report.first is not None:
            return isolation_failure(self.pool, report.first, expected_tag=tag)
        try:
            digest = self.pool.pack(
                source,
                self.staging,
                page_runs(post.staging),
                tag=post.tag,
                first_position=first,
                tokens=post.tokens.count,
                source_tag=tag,
            )
        except ForeignSourceError as error:
            return isolation_failure(self.pool, error.mismatch, expected_tag=tag)
        writes = copy_plan(
            layout,
            staging=post.staging,
            staging_pages=self.staging.pages,
            target=post.target_pages,
            target_pages=target_pages,
        )
        return Packed(writes, count_pages(post.staging) * layout.page_bytes, digest)

    def forget(self, request: RequestId) -> None:
        """Drop what is kept for a request."""
        for life in [life for life in self._tags if life[0] == request]:
            del self._tags[life]
            self.scrubber.forget(life)
