"""Measure what an entry costs the tally, beside the reduction that every entry costs anyway.

Owns: the least processor time of several runs over a log of whole requests.
Must not know: what is counted.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

from lifecycle.history import History
from lifecycle.tally import Tally
from transport.bench_forensics import Traffic
from transport.metrics_text import exposition

ENTRIES, RUNS = 13_500, 9


def least(work: Callable[[], object]) -> float:
    """Processor seconds of the quickest of several runs."""
    found = float("inf")
    for _ in range(RUNS):
        gc.collect()
        start = time.process_time()
        work()
        found = min(found, time.process_time() - start)
    return found


def main() -> int:
    """Print microseconds an entry, and milliseconds a scrape."""
    entries = list(Traffic().entries(ENTRIES))

    def judged() -> None:
        history = History()
        for entry in entries:
            if (violation := history.apply(entry)) is not None:
                raise AssertionError(violation)

    def reduced() -> None:
        history = History()
        for entry in entries:
            history.take(entry)

    def counted() -> None:
        tally = Tally()
        for entry in entries:
            tally.note(entry)

    works = {"with every guard": judged, "reduced alone": reduced, "counted (tally)": counted}
    for name, work in works.items():
        print(f"{name}: {least(work) / len(entries) * 1e6:.1f} µs an entry")
    tally = Tally()
    for entry in entries:
        tally.note(entry)
    print(f"values of a scrape: {least(tally.families) * 1e3:.2f} ms")
    families = tally.families()
    print(f"text of a scrape: {least(lambda: exposition(families)) * 1e3:.2f} ms")
    print(f"{len(entries)} entries, least of {RUNS} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
