"""The scrubber: full live pages are looked at again between steps, a few at a time.

Owns: which page is next, how much may be read, and what each page held when it was first seen.
Must not know: requests beyond a name, the log, time; it reads only when it is called.

The compares around a step look at headers alone. A write that lands inside the rows of a page
leaves its header as it was; only the digest shows it. A page that arrived bears its digest; of a
page that the owner filled itself, the first look notes the digest and later looks compare.

Its share is of bytes: for each byte that the steps read, `share` bytes are looked at.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from engine.model import LayerWeights, Model
from engine.pool import KVPool
from engine.step_plan import SequenceSlice, live_table
from kernels import dispatch, headers, pack
from kernels.digest import ALGORITHM_WSUM32, range_digest, to_unsigned
from kernels.headers import HeaderMismatch
from kernels.int8 import Matrix, tensors_of
from kernels.tables import PageLabels, new_flags

SHARE = 1 / 1000
"""Of the bytes that steps read; a round over all live pages then takes about a thousand steps."""

BACKLOG_PAGES = 4
"""What may be saved up: a long step does not make the next one wait."""


def weight_bytes(model: Model) -> int:
    """What a step reads of a model: all its weights once, an untied embedding hardly at all."""
    weights = model.weights
    found: list[Matrix | None] = [weights.norm, weights.head]
    for layer in weights.layers:
        found += [getattr(layer, field.name) for field in attrs.fields(LayerWeights)]
    return sum(part.nbytes for weight in found for part in tensors_of(weight))


class ShareOutOfRangeError(ValueError):
    """A share that would switch the scrubber off, or let it read more than the steps do."""

    def __init__(self, share: float) -> None:
        super().__init__(f"the scrubber's share is {share}, required is more than 0 and at most 1")
        self.share = share


@attrs.define
class _Known:
    """What is known of one sequence: the next page to look at, and digests over all layers by page."""

    turn: int = 0
    digests: dict[int, int] = attrs.Factory(dict)


@attrs.frozen
class _Place:
    """A full page of a sequence."""

    page: int
    tag: int
    logical: int


class Scrubber:
    """Looks at full pages of one pool in turn.

    step_bytes: what a step reads besides pages (the weights). `pages_looked_at` and `mismatches`
    only grow.

    Raises:
        ShareOutOfRangeError: the share is not above 0 or is above 1.
    """

    def __init__(self, pool: KVPool, *, step_bytes: int, share: float = SHARE) -> None:
        if not 0 < share <= 1:
            raise ShareOutOfRangeError(share)
        self.share = share
        self.pages_looked_at = 0
        self.mismatches = 0
        self._pool = pool
        self._step_bytes = step_bytes
        self._credit_bytes = 0.0
        self._turn = 0
        self._known: dict[Hashable, _Known] = {}

    def after_step(
        self,
        names: Sequence[Hashable],
        sequences: Sequence[SequenceSlice],
        failed: Mapping[int, HeaderMismatch],
    ) -> dict[int, HeaderMismatch]:
        """Look at as many pages as the step's bytes allow.

        Called when the step's writes have ended and before its tokens leave.
        names: what each sequence is known by from step to step, its attempt included.
        failed: sequences that failed already, by number; the result has what was found as well.
        """
        layout = self._pool.layout
        live = sum(layout.pages_for_tokens(s.start + s.count) for s in sequences)
        read = self._step_bytes + live * layout.page_bytes
        most = BACKLOG_PAGES * layout.page_bytes
        self._credit_bytes = min(self._credit_bytes + self.share * read, most)
        found = dict(failed)
        passed = 0
        while sequences and self._credit_bytes >= layout.page_bytes and passed < len(sequences):
            number = self._turn % len(sequences)
            self._turn += 1
            place = (
                None if number in found else self._next(number, names[number], sequences[number])
            )
            if place is None:
                passed += 1
                continue
            passed = 0
            self._credit_bytes -= layout.page_bytes
            mismatch = self._look(place, self._known[names[number]])
            if mismatch is not None:
                found[number] = mismatch
        return found

    def forget(self, name: Hashable) -> None:
        """The sequence is over; its pages may be another's soon."""
        self._known.pop(name, None)

    def _next(self, number: int, name: Hashable, sequence: SequenceSlice) -> _Place | None:
        """The sequence's next full page, round and round; None while it has none."""
        full = (sequence.start + sequence.count) // self._pool.layout.page_tokens
        if full == 0:
            return None
        known = self._known.setdefault(name, _Known())
        logical = known.turn % full
        known.turn = logical + 1
        pages, tags = live_table(self._pool, number, sequence)
        return _Place(pages[logical], to_unsigned(tags[logical]), logical)

    def _look(self, place: _Place, known: _Known) -> HeaderMismatch | None:
        """Compare one page with what it bears and bore, or seal it."""
        self.pages_looked_at += 1
        marks = self._pool.memory.words[:, place.page, 2] >> 32
        if place.logical in known.digests or bool(marks.any()):
            mismatch = self._compare(place, known)
        else:
            mismatch = self._header(place)
            if mismatch is None:
                self._seal(place, known)
        self.mismatches += mismatch is not None
        self._pool.counters.mismatches += mismatch is not None
        return mismatch

    def _compare(self, place: _Place, known: _Known) -> HeaderMismatch | None:
        memory = self._pool.memory
        if self._pool.on_device:
            mismatch, digest = self._compare_on_device(place)
        else:
            report = pack.verify(
                memory,
                torch.tensor([place.page]),
                tag=place.tag,
                positions=torch.tensor([place.logical]),
                filled=torch.tensor([memory.layout.page_tokens]),
            )
            mismatch, digest = report.mismatch, report.digest
        if mismatch is not None:
            return mismatch
        # A page that bore this digest once must bear it still, whatever its header says by now.
        before = known.digests.setdefault(place.logical, digest)
        if before == digest:
            return None
        return HeaderMismatch(
            page=place.page, layer=0, field="digest", expected=before, found=digest
        )

    def _compare_on_device(self, place: _Place) -> tuple[HeaderMismatch | None, int]:
        mismatch = self._header(place)
        if mismatch is not None:
            return mismatch, 0
        words = self._pool.memory.words[:, place.page]
        found = self._digests(place)
        unsealed = words[:, 2] >> 32 != ALGORITHM_WSUM32
        bad = torch.nonzero((found != words[:, 3]) | unsealed).flatten()
        if bad.numel():
            layer = int(bad[0])
            return HeaderMismatch(
                page=place.page,
                layer=layer,
                field="digest",
                expected=to_unsigned(int(words[layer, 3])),
                found=to_unsigned(int(found[layer])),
            ), 0
        return None, range_digest(found)

    def _seal(self, place: _Place, known: _Known) -> None:
        """Let a page that has become full bear its digest."""
        digests = self._digests(place)
        words = self._pool.memory.words[:, place.page]
        words[:, 3] = digests
        words[:, 2] |= ALGORITHM_WSUM32 << 32
        known.digests[place.logical] = range_digest(digests)

    def _digests(self, place: _Place) -> Tensor:
        """int64 `[layers]`: the digests of what the page holds."""
        memory = self._pool.memory
        flags = new_flags(1, memory.octets.device)
        return dispatch.digest_pages(memory, self._labels(place), flags)[:, 0]

    def _header(self, place: _Place) -> HeaderMismatch | None:
        labels = self._labels(place)
        return headers.check(
            self._pool.memory,
            labels.pages.long(),
            labels.tags,
            labels.positions.long(),
            labels.filled.long(),
        ).first

    def _labels(self, place: _Place) -> PageLabels:
        return PageLabels.of(
            [place.page],
            [place.tag],
            positions=[place.logical],
            filled=[self._pool.layout.page_tokens],
            device=self._pool.memory.octets.device,
        )
