"""The indexes that stores keep in memory and can rebuild, and the checks before an append.

Owns: positions by request, optimistic concurrency, repeats, frames by position.
Must not know: files and encodings.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence

from engine.store import Append, MisfiledEntry, WrongSequence
from lifecycle.events import Entry
from lifecycle.ids import RequestId


class Sequences:
    """Positions of each request's entries; the count of them is the next sequence number."""

    def __init__(self) -> None:
        self._positions: dict[RequestId, array[int]] = {}

    def next_sequence(self, request: RequestId) -> int:
        found = self._positions.get(request)
        return 0 if found is None else len(found)

    def positions(self, request: RequestId) -> Sequence[int]:
        """A copy, so that a reader in another thread is not surprised."""
        return tuple(self._positions.get(request, ()))

    def note(self, request: RequestId, position: int) -> None:
        found = self._positions.get(request)
        if found is None:
            found = self._positions[request] = array("Q")
        found.append(position)

    def last(self, request: RequestId) -> int:
        """The position of the request's last entry, 0 when there is none."""
        found = self._positions.get(request)
        return found[-1] if found else 0

    def forget_until(self, position: int, *, keep: Collection[RequestId]) -> None:
        """Forget the requests that end up to there, except some of them."""
        for request in [r for r, found in self._positions.items() if found[-1] <= position]:
            if request not in keep:
                del self._positions[request]

    def forget_after(self, position: int) -> None:
        """Take back every note of a later position."""
        for request, found in tuple(self._positions.items()):
            while found and found[-1] > position:
                found.pop()
            if not found:
                del self._positions[request]

    def check(self, batch: Sequence[Append]) -> tuple[Entry, ...]:
        """The batch's entries in order, none of them noted yet.

        Raises `WrongSequence` or `MisfiledEntry` when any of them cannot be appended.
        """
        ahead: dict[RequestId, int] = {}
        entries: list[Entry] = []
        for part in batch:
            found = ahead.get(part.request)
            if found is None:
                found = self.next_sequence(part.request)
            if part.expected_sequence != found:
                raise WrongSequence(part.request, expected=part.expected_sequence, found=found)
            for sequence, entry in enumerate(part.entries, start=found):
                if entry.request != part.request or entry.sequence != sequence:
                    raise MisfiledEntry(entry, request=part.request, sequence=sequence)
            ahead[part.request] = found + len(part.entries)
            entries += part.entries
        return tuple(entries)

    def repeated(self, batch: Sequence[Append], entry_at: Callable[[int], Entry]) -> int | None:
        """Where this very batch stands already, as if one append had put it there.

        A caller that has not learned what became of its append may ask again: the same entries in
        the same places are no second writer's.  None when any part is new or different.
        """
        first: int | None = None
        position = 0
        for part in batch:
            if not part.entries:
                continue
            held = self._positions.get(part.request, ())
            start = part.expected_sequence
            stop = start + len(part.entries)
            if first is None:
                if not 0 <= start < len(held):
                    return None
                first = position = held[start]
            if start < 0 or tuple(held[start:stop]) != (
                *range(position, position + len(part.entries)),
            ):
                return None
            for entry in part.entries:
                if entry_at(position) != entry:
                    return None
                position += 1
        return first


class FrameIndex:
    """Where each frame stands: its segment's number, its offset and size, by first position."""

    def __init__(self) -> None:
        self._firsts, self._numbers = array("Q"), array("Q")
        self._offsets, self._sizes = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._firsts)

    def note(self, first: int, *, number: int, offset: int, size: int) -> None:
        """Add the frame after the last."""
        self._firsts.append(first)
        self._numbers.append(number)
        self._offsets.append(offset)
        self._sizes.append(size)

    def forget_after(self, position: int) -> None:
        """Take back every frame that begins later."""
        while self._firsts and self._firsts[-1] > position:
            for column in (self._firsts, self._numbers, self._offsets, self._sizes):
                column.pop()

    def forget_until(self, position: int) -> None:
        """Forget every frame that begins up to there."""
        count = bisect_right(self._firsts, position)
        for column in (self._firsts, self._numbers, self._offsets, self._sizes):
            del column[:count]

    def find(self, position: int) -> int:
        """The index of the frame that holds this position, which the caller knows to exist."""
        return bisect_right(self._firsts, position) - 1

    def first(self, index: int) -> int:
        return self._firsts[index]

    def place(self, index: int) -> tuple[int, int, int]:
        """Segment number, offset and size."""
        return self._numbers[index], self._offsets[index], self._sizes[index]
