"""The published fault in our own engines: subclasses from which guards are taken away.

Owns: which guards those are, and nothing else; every other line that runs is the product's.
Must not know: what is asked of the engines or found in their memory.

The product has no switch for any of this: a harness replaces classes by subclasses of them.

`REMOVED` names the conditions of the log.
With them go the refusal at the door, prefill's comparison of its prompt with the admitted one, and
decode's comparison of what arrived with what was to come: the logical guards.
The physical ones are the comparisons of page headers before and after every step; `BlindRunner` has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
from torch import Tensor

from engine.decode_step import DecodeSteps, PlainSteps
from engine.effects import DecodeSlice, Payload, Publish, Step
from engine.paged import PagedBatch, SequenceSlice
from engine.runner import StepResult, page_runs
from engine.runner_decode import DecodeRunner, Order
from engine.scrubber import Scrubber
from kernels.headers import HeaderMismatch
from lifecycle.decide import Submission, admit
from lifecycle.events import Admitted, Entry, RejectCode, Rejected
from lifecycle.history import History
from lifecycle.ids import Party, RequestId
from property_tests.mutants_decode import ReadsWhatCame
from property_tests.mutants_prefill import WritesPlaceholder
from property_tests.mutants_scheduler import Chooses
from tests.inprocess import Deployment

REMOVED = (
    "capacity-proved/prefill",
    "capacity-proved/booked",
    "whole-before-read/reserved",
    "whole-before-read/covered",
    "read-what-was-written/reads",
)
"""Guards of the log that the published fault would have had to pass.

The last one refuses an answer for whose reads no header was compared, so an engine that compares
none answers nobody while it stands.
"""


class WalksOn(Chooses):
    """A prompt that fits no prefill pool is rejected in a field that the queue does not read.

    Its prompt is swapped for a placeholder before it reaches prefill.  The published one was one
    token; what is written here goes by whole pages, so it is one page of that token.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, without=REMOVED)
        self.to_be_aborted: dict[RequestId, Rejected] = {}

    def _refuse(self, wanted: Submission) -> Rejected | None:
        refusal = super()._refuse(wanted)
        if refusal is None or refusal.code is not RejectCode.KV_POOL_CAPACITY_EXCEEDED:
            return refusal
        self.to_be_aborted[wanted.request] = refusal
        return None

    def choose(self, wanted: Submission) -> Admitted | None:
        if wanted.request not in self.to_be_aborted:
            return admit(self.log, wanted, self.limits)
        short = attrs.evolve(wanted, prompt_tokens=len(self._placeholder((0,))))
        sent = admit(self.log, short, self.limits)
        whole = admit(self._roomy(), wanted, self.limits)
        if sent is None or whole is None:
            return None
        return attrs.evolve(whole, prefill=sent.prefill)

    def _roomy(self) -> History:
        """The world as it would be if each prefill pool held a whole context."""
        view = self.log.copy()
        for name, life in view.fleet.lives:
            for party, account in tuple(view.ledger.items()):
                if party.engine == name and life.attached.role.value == "prefill":
                    pages = self.limits.context_tokens // life.attached.page_tokens
                    view.ledger[party] = attrs.evolve(account, capacity=pages)
        lives = tuple(
            (name, attrs.evolve(life, attached=attrs.evolve(life.attached, pages=1 << 20)))
            for name, life in view.fleet.lives
        )
        view.fleet = attrs.evolve(view.fleet, lives=lives)
        return view

    def _placeholder(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        size: int = self.log.fleet.alive()[0].attached.page_tokens
        # Prefill computes all tokens of a prompt but the last.
        return tokens[:1] * (size + 1)

    def _publish(self, party: Party, position: int, entry: Entry) -> None:
        super()._publish(party, position, entry)
        event, sent = entry.event, self.effects[-1]
        if not isinstance(event, Admitted) or not isinstance(sent, Publish) or not sent.payload:
            return
        if entry.request in self.to_be_aborted and event.prefill.has(party):
            swapped = Payload(self._placeholder(sent.payload.tokens), 0, sent.payload.sampling)
            self.effects[-1] = attrs.evolve(sent, payload=swapped)


class WritesWhatItWasGiven(WritesPlaceholder):
    """Prefill believes its own copy of the prompt."""

    def begin_sync(self, epoch: int) -> None:
        super().begin_sync(epoch)
        self.log = History(without=REMOVED, crossguards=False)


class TakesWhatCame(ReadsWhatCame):
    """Decode takes the end of the transfer for its completion."""

    def begin_sync(self, epoch: int) -> None:
        super().begin_sync(epoch)
        self.log = History(without=REMOVED, crossguards=False)


class BlindBatch(PagedBatch):
    """A step that compares no header."""

    def _compare(self) -> tuple[int, dict[int, HeaderMismatch]]:
        return 0, {}


class BlindScrubber(Scrubber):
    """A scrubber that looks at no page."""

    def after_step(
        self,
        names: Sequence[Hashable],  # noqa: ARG002 - looks at none
        sequences: Sequence[SequenceSlice],  # noqa: ARG002 - looks at none
        failed: Mapping[int, HeaderMismatch],
    ) -> dict[int, HeaderMismatch]:
        return dict(failed)


Seen = Callable[["BlindRunner", DecodeSlice, int], None]
"""Called before a request's first token is computed, with the token that is to be run."""


class BlindRunner(DecodeRunner):
    """Decodes from whatever lies in the pages."""

    seen: Seen | None = None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.scrubber = BlindScrubber(self.pool, step_bytes=1)

    @cached_property
    def compute(self) -> DecodeSteps:
        steps = PlainSteps(self.model, self.pool)
        steps.batch = BlindBatch
        return steps

    def run(self, step: Step, orders: Mapping[RequestId, Order]) -> StepResult:
        for part in step.slices:
            if isinstance(part, DecodeSlice) and part.index == 0 and self.seen is not None:
                self.seen(self, part, orders[part.request].prompt[part.position])
        return super().run(step, orders)


def logits_of(runner: BlindRunner, part: DecodeSlice, token: int) -> Tensor:
    """What a request's next step would compute from the memory as it is; changes nothing.

    Returns float32 [vocabulary].
    """
    octets = runner.pool.memory.octets
    before = octets.clone()
    sequence = SequenceSlice(page_runs(part.pages), tuple(part.tags), part.position, 1)
    logits = runner.compute.run([token], [sequence]).logits[0].clone()
    octets.copy_(before)
    return logits


class LogicalGuardsRemoved(Deployment):
    """The published fault, with the comparison of headers still in place."""

    scheduler_kind = WalksOn
    prefill_kind = WritesWhatItWasGiven
    decode_kind = TakesWhatCame


class AllGuardsRemoved(LogicalGuardsRemoved):
    """The published fault as it was."""

    decode_runner_kind = BlindRunner
