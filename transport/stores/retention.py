"""Which beginning of a log may go, and the snapshot that stands for it.

Owns: the arithmetic of limits, and the fold of what is dropped.
Must not know: files, locks, who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.store import Stored
from lifecycle.events import Entry
from lifecycle.history import History
from lifecycle.ids import FLEET, RequestId
from lifecycle.snapshot import Snapshot, UnfoldableSnapshot, is_over, restore, take


def count_to_drop(
    sizes: Sequence[int],
    begins_ns: Callable[[int], int | None],
    *,
    bytes_max: int | None,
    before_ns: int | None,
) -> int:
    """How many of the oldest segments go; the last, which is written, never does.

    sizes: bytes of each segment; begins_ns: the time of a segment's first entry, if it has one.
    """
    count, total = 0, sum(sizes)
    while count < len(sizes) - 1:
        too_large = bytes_max is not None and total > bytes_max
        # All of a segment is older than what follows it.
        ends_ns = begins_ns(count + 1) if before_ns is not None and not too_large else None
        too_old = ends_ns is not None and before_ns is not None and ends_ns < before_ns
        if not too_large and not too_old:
            break
        total -= sizes[count]
        count += 1
    return count


def fold(
    before: Snapshot | None,
    entries: Iterable[Stored],
    *,
    border: int,
    is_last: Callable[[RequestId, int], bool],
) -> Snapshot:
    """The snapshot at the border: the one before it and the entries up to there.

    is_last: whether no entry of the request follows this position, or ever will.
    Raises UnfoldableSnapshot.
    """
    start = before or Snapshot(0, 0)
    history = restore(start, judging=False)
    kept: dict[RequestId, list[tuple[int, Entry]]] = {}
    for position, entry in start.entries:
        kept.setdefault(entry.request, []).append((position, entry))
    for one in entries:
        violation = history.apply(one.entry)
        if violation is not None:
            raise UnfoldableSnapshot(one.position, violation)
        request = one.entry.request
        kept.setdefault(request, []).append((one.position, one.entry))
        if request != FLEET and is_last(request, one.position):
            _forget(history, kept, request)
    # What was held back by an owner that was alive may be over by now.
    for request in tuple(kept):
        if request != FLEET and is_last(request, kept[request][-1][0]):
            _forget(history, kept, request)
    return take(border, history, (pair for pairs in kept.values() for pair in pairs))


def _forget(
    history: History, kept: dict[RequestId, list[tuple[int, Entry]]], request: RequestId
) -> None:
    if is_over(history.state(request), history.ledger):
        del history.requests[request]
        del kept[request]
