"""Work of a search in order, shared between processes.

Owns: the chunks of seeds, when no more of them begin, and the processes.
Must not know: what a chunk does.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def chunks(
    seed: int, *, runs: int | None, seconds: float | None, size: int
) -> Iterator[tuple[int, int]]:
    """First seed and number of runs of each chunk, until runs or seconds are used up."""
    done, began = 0, time.monotonic()
    while runs is None or done < runs:
        if seconds is not None and time.monotonic() - began >= seconds:
            return
        count = size if runs is None else min(size, runs - done)
        yield seed + done, count
        done += count


def shared(calls: Iterator[Callable[[], T]], jobs: int) -> Iterator[T]:
    """What the calls return, in their order; a call is asked for when a process is free for it."""
    if jobs == 1:
        for call in calls:
            yield call()
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running: deque[Future[T]] = deque()
        for call in calls:
            running.append(pool.submit(call))
            if len(running) > jobs:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
