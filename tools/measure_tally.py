"""Measure what an entry costs the tally, beside the reduction that every entry costs anyway.

Owns: a log of whole requests, and the least processor time of several runs.
Must not know: what is counted.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator

from lifecycle.events import (
    KV,
    Admitted,
    Attached,
    ByEngine,
    ByScheduler,
    Drained,
    Entry,
    Event,
    FenceScope,
    Finished,
    FinishReason,
    Leg,
    Proof,
    Proposer,
    Purpose,
    Released,
    Reserved,
    Resumed,
    Role,
    Transferred,
    Verified,
)
from lifecycle.history import History
from lifecycle.ids import (
    FLEET,
    EngineId,
    GrantId,
    PageRange,
    Party,
    RequestId,
    TokenRange,
    request_id,
)
from lifecycle.tally import Tally
from transport.metrics_text import exposition

PREFILL, DECODE = Party(EngineId("prefill-0"), 1, 0), Party(EngineId("decode-0"), 1, 0)
REQUESTS, RUNS, PAGES = 1_500, 9, 64
SCHEDULER = ByScheduler(1)


def log() -> list[Entry]:
    """A fleet of two engines, and whole requests one after the other."""
    fleet: list[Event] = [Resumed(1, 0), _attached(PREFILL), _attached(DECODE)]
    entries = [Entry(FLEET, n, 0, SCHEDULER, 1, event) for n, event in enumerate(fleet)]
    for serial in range(1, REQUESTS + 1):
        request = request_id(epoch=1, serial=serial)
        entries += _request(request, serial)
    return entries


def _attached(party: Party) -> Attached:
    return Attached(
        engine=party.engine,
        incarnation=1,
        role=Role.PREFILL if party is PREFILL else Role.DECODE,
        ranks=1,
        pages=PAGES,
        page_tokens=32,
        layers=1,
        slots=16,
        context_tokens=1024,
        layout="",
        endpoints=("",),
        plane="",
        fence_scope=FenceScope.GRANT,
    )


def _leg(party: Party, pages: int) -> Leg:
    return Leg(party.engine, 1, 1, 32, pages, pages, PAGES, PAGES, "")


def _request(request: RequestId, serial: int) -> Iterator[Entry]:
    source, destination = GrantId(PREFILL, serial), GrantId(DECODE, serial)
    pages, tokens = (PageRange(0, 3),), TokenRange(0, 96)
    number = serial * 9
    prefill, decode = ByEngine(PREFILL, number), ByEngine(DECODE, number)
    admitted = Admitted(
        prompt_tokens=97,
        prompt_digest=b"",
        new_tokens_max=16,
        context_tokens=1024,
        prefill=_leg(PREFILL, 3),
        decode=_leg(DECODE, 4),
        tenant="",
        deadline_ns=1 << 60,
        settle_ns=1,
        attempts_max=2,
        fleet_position=3,
    )
    whole = TokenRange(0, 128)
    room = (PageRange(0, 4),)
    said: tuple[tuple[Proposer, Event], ...] = (
        (SCHEDULER, admitted),
        (prefill, Reserved(source, Purpose.SOURCE, pages, tokens, KV, 1)),
        (decode, Reserved(destination, Purpose.DESTINATION, room, whole, KV, 2, (PREFILL,))),
        (prefill, Transferred(destination, tokens, pages, 4096, 1, 1, 1)),
        (prefill, Drained(destination, PREFILL, Proof.ACKNOWLEDGED)),
        (decode, Verified((destination,), 3, 3, 3, "")),
        (prefill, Released(source)),
        (decode, Finished(FinishReason.STOP, 3, serial, b"", 3, 9, 0)),
        (decode, Released(destination)),
    )
    for sequence, (by, event) in enumerate(said):
        yield Entry(request, sequence, 1, by, serial, event)


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
    entries = log()

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
