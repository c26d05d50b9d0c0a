"""A prompt that leaves several kinds of state behind: what a scenario adds to the cores.

Owns: a manifest with more than one kind, and a decode rank that reserves for each of them.
Must not know: who asks for several kinds; the models that are served have one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import attrs

from engine.decode import DecodeCore, DecodeJob
from engine.scheduler import Scheduler
from lifecycle.events import KV, Admitted, Event, Proposer, Purpose
from lifecycle.ids import RequestId, TokenRange, count_pages
from lifecycle.state import RequestState

Made = TypeVar("Made")


def kinds_of(count: int) -> tuple[str, ...]:
    """The names of so many kinds of state."""
    return (KV, *(f"state-{number}" for number in range(1, count)))


class Manifests(Scheduler):
    """Every admission says that there are several kinds, and books pages for each."""

    kinds = 2

    def _append(
        self, request: RequestId, attempt: int, event: Event, by: Proposer | None = None
    ) -> int:
        if isinstance(event, Admitted):
            booked = event.decode.pages_booked * self.kinds
            leg = attrs.evolve(event.decode, pages_booked=booked)
            event = attrs.evolve(event, decode=leg, kinds=kinds_of(self.kinds))
        return super()._append(request, attempt, event, by)


class Gathers(DecodeCore):
    """A decode rank that takes a grant for each kind, or none at all."""

    def _reserve(self, state: RequestState, job: DecodeJob) -> None:
        admitted = state.admitted
        if admitted is None:
            return
        each = admitted.decode.pages_booked // len(admitted.kinds)
        if self.allocator.free < each * len(admitted.kinds):
            self.waiting[state.request] = None
            return
        self.waiting.pop(state.request, None)
        for kind in admitted.kinds:
            pages = self.take(each)
            if pages is None:
                return
            covered = TokenRange(0, count_pages(pages) * self.page_tokens)
            writers = admitted.prefill.parties()
            held = self.hold(job, Purpose.DESTINATION, pages, covered, kind=kind, parties=writers)
            job.reserved = (*job.reserved, held)


def with_kinds(made: Callable[..., Made], addition: type, kinds: int) -> Callable[..., Made]:
    """The class with what several kinds need, below whatever else was changed in it."""
    if kinds == 1:
        return made
    if isinstance(made, partial):
        return partial(with_kinds(made.func, addition, kinds), *made.args, **made.keywords)
    cls = cast("type[Any]", made)
    bases = (addition,) if issubclass(addition, cls) else (cls, addition)
    return type(cls.__name__, bases, {"kinds": kinds})
