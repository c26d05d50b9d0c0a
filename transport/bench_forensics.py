"""How fast a log is judged: `custody bench forensics`.

Owns: a synthetic log as real traffic leaves one, and what is timed over it.
Must not know: how anything is judged.

The log is legal: four requests at a time on two engines, ten entries each.  A page event is one page
named by one entry, so that a grant of sixteen pages counts sixteen times.
"""

from __future__ import annotations

import io
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import attrs

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
from lifecycle.forensics_exposures import Inquiry
from lifecycle.forensics_sums import summed
from lifecycle.ids import (
    FLEET,
    EngineId,
    GrantId,
    PageRange,
    Party,
    RequestId,
    TokenRange,
    count_pages,
    request_id,
)
from lifecycle.replay import Replayer
from transport import codec
from transport.commands_replay import replay_file
from transport.commands_shared import EXIT_OK
from transport.forensics_read import Capture, open_capture
from transport.stores import frames, sealed, segment_files
from transport.uncollected import uncollected

PREFILL = Party(EngineId("prefill-0"), 1, 0)
DECODE = Party(EngineId("decode-0"), 1, 0)
PAGE_TOKENS = 16
POOL_PAGES = 8_192
PROMPT_PAGES = 64
OPEN = 4
BATCH_ENTRIES = 256
SECOND_NS = 1_000_000_000


class Traffic:
    """Entries without end, in the log's order."""

    def __init__(self) -> None:
        """Both engines have joined."""
        self._sequences: dict[RequestId, int] = {}
        self._numbers = {PREFILL: 0, DECODE: 0}
        self._serial = 0
        self._time_ns = 1_700_000_000 * SECOND_NS
        self._page = 0
        self._held = {PREFILL: 0, DECODE: 0}
        self.page_events = 0

    def _entry(self, request: RequestId, attempt: int, event: Event, by: Party | None) -> Entry:
        proposer: Proposer = ByScheduler(1)
        if by is not None:
            self._numbers[by] += 1
            proposer = ByEngine(by, self._numbers[by])
        sequence = self._sequences.get(request, 0)
        self._sequences[request] = sequence + 1
        self._time_ns += 100_000
        if isinstance(event, Reserved | Transferred):
            self.page_events += count_pages(event.pages)
        elif isinstance(event, Released):
            self.page_events += PROMPT_PAGES
            self._held[event.grant.owner] -= PROMPT_PAGES
        elif isinstance(event, Admitted):
            for party in self._held:
                self._held[party] += PROMPT_PAGES
        return Entry(request, sequence, attempt, proposer, self._time_ns, event)

    def fleet(self) -> Iterator[Entry]:
        """The beginning of the log."""
        yield self._entry(FLEET, 0, Resumed(1, 0), None)
        for party, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
            attached = Attached(
                engine=party.engine,
                incarnation=1,
                role=role,
                ranks=1,
                pages=POOL_PAGES,
                page_tokens=PAGE_TOKENS,
                layers=30,
                slots=64,
                context_tokens=8_192,
                layout="layout",
                endpoints=("redacted",),
                plane="shared-memory",
                fence_scope=FenceScope.GRANT,
            )
            yield self._entry(FLEET, 0, attached, None)

    def entries(self, most: int) -> Iterator[Entry]:
        """At least so many entries, ending when every request has closed."""
        count = 0
        for entry in self.fleet():
            yield entry
            count += 1
        running: deque[Iterator[tuple[Event, Party | None]]] = deque()
        names: dict[int, RequestId] = {}
        while count < most or running:
            if len(running) < OPEN and count < most:
                self._serial += 1
                one = self._request(self._serial)
                names[id(one)] = request_id(epoch=1, serial=self._serial)
                running.append(one)
            one = running.popleft()
            step = next(one, None)
            if step is None:
                continue
            running.append(one)
            yield self._entry(names[id(one)], 1, *step)
            count += 1

    def _request(self, serial: int) -> Iterator[tuple[Event, Party | None]]:
        first = self._page
        self._page = (self._page + PROMPT_PAGES) % POOL_PAGES
        tokens = PROMPT_PAGES * PAGE_TOKENS - 8
        pages = (PageRange(first, PROMPT_PAGES),)
        source, destination = (GrantId(p, serial) for p in (PREFILL, DECODE))
        yield (
            Admitted(
                prompt_tokens=tokens,
                prompt_digest=b"0123456789abcdef",
                new_tokens_max=4,
                context_tokens=8_192,
                prefill=_leg(PREFILL, POOL_PAGES - self._held[PREFILL]),
                decode=_leg(DECODE, POOL_PAGES - self._held[DECODE]),
                tenant=f"tenant-{serial % 50}",
                deadline_ns=self._time_ns + 600 * SECOND_NS,
                settle_ns=30 * SECOND_NS,
                attempts_max=4,
                fleet_position=3,
            ),
            None,
        )
        span = TokenRange(0, PROMPT_PAGES * PAGE_TOKENS)
        yield Reserved(source, Purpose.SOURCE, pages, span, KV, serial), PREFILL
        yield (
            Reserved(destination, Purpose.DESTINATION, pages, span, KV, serial, (PREFILL,)),
            DECODE,
        )
        half = PROMPT_PAGES // 2
        for start, stop, run in (
            (0, half * PAGE_TOKENS, PageRange(first, half)),
            (half * PAGE_TOKENS, tokens - 1, PageRange(first + half, half)),
        ):
            written = TokenRange(start, stop)
            yield Transferred(destination, written, (run,), 1 << 20, 7, 1, 1), PREFILL
        yield Drained(destination, PREFILL, Proof.ACKNOWLEDGED), PREFILL
        checked = PROMPT_PAGES
        yield Verified((destination,), checked, checked, checked, "wsum32"), DECODE
        yield Released(source), PREFILL
        yield (
            Finished(FinishReason.STOP, 4, self._time_ns, b"0123", checked, checked * 4, 0),
            DECODE,
        )
        yield Released(destination), DECODE


def _leg(party: Party, free: int) -> Leg:
    return Leg(
        engine=party.engine,
        incarnation=1,
        ranks=1,
        page_tokens=PAGE_TOKENS,
        pages_needed=PROMPT_PAGES,
        pages_booked=PROMPT_PAGES,
        pages_capacity=POOL_PAGES,
        pages_free=free,
        layout="layout",
    )


# --- Measuring --------------------------------------------------------------------------------


def write_log(folder: Path, traffic: Traffic, most: int) -> tuple[Path, int]:
    """The traffic as one segment; returns where, and how many entries it has."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / segment_files.segment_name(1)
    previous, position = frames.CHAIN_START, 1
    batch: list[Entry] = []
    with path.open("wb") as out:
        out.write(frames.pack_file_header(first_position=1, previous=previous))

        def flush() -> None:
            nonlocal previous, position
            frame = frames.pack_frame(
                first_position=position,
                count=len(batch),
                previous=previous,
                payload=codec.batch_to_bytes(batch),
            )
            out.write(frame)
            previous, position = frames.chain(frame), position + len(batch)
            batch.clear()

        for entry in traffic.entries(most):
            batch.append(entry)
            if len(batch) == BATCH_ENTRIES:
                flush()
        if batch:
            flush()
    return path, position - 1


@attrs.frozen
class Measured:
    """One thing that was timed, in seconds of this process on one core."""

    name: str
    seconds: float
    entries: int
    page_events: int

    def document(self) -> dict[str, Any]:
        """As JSON, with rates."""
        return {
            "name": self.name,
            "cpu_seconds": round(self.seconds, 3),
            "entries_per_second": round(self.entries / self.seconds),
            "page_events_per_second": round(self.page_events / self.seconds),
        }


@attrs.frozen
class Wanted:
    """What is measured: a log of so many entries, and what of Parquet.

    `rows` are those of a longer table, made of the log again and again; 0 for none.
    """

    entries: int
    parquet: bool = False
    rows: int = 0
    memory_limit: str | None = None
    temporary: Path | None = None


def measure(wanted: Wanted) -> dict[str, Any]:
    """Make a log in a temporary folder, judge it, and say how long that took."""
    entries = wanted.entries
    with tempfile.TemporaryDirectory(dir=wanted.temporary) as scratch:
        traffic = Traffic()
        folder = Path(scratch) / "log"
        path, count = write_log(folder, traffic, entries)
        plain = path.read_bytes()
        packed = sealed.pack(
            plain, first_position=1, last_position=count, last_frame_digest=bytes(32)
        )
        runs = [
            Measured(name, seconds, count, traffic.page_events)
            for name, seconds in (
                ("read", _timed(folder, _read)),
                ("replay", _timed(folder, _replay)),
                ("replay_verb", _timed_verb(folder)),
                ("exposures", _timed(folder, _exposures)),
            )
        ]
        table = _tables(wanted, Path(scratch), count) if wanted.parquet or wanted.rows else {}
    return {
        "entries": count,
        "page_events": traffic.page_events,
        "bytes_per_entry_hot": round(len(plain) / count, 1),
        "bytes_per_entry_sealed": round(len(packed) / count, 1),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "measured": [one.document() for one in runs],
        **table,
    }


def _tables(wanted: Wanted, scratch: Path, count: int) -> dict[str, Any]:
    """The same log as Parquet, and a longer one if that is wanted."""
    # Only here: without the extra everything else is measured all the same.
    from transport import bench_parquet
    from transport.parquet import Means

    means = Means(wanted.memory_limit, scratch / "more")
    table, long = scratch / "log.parquet", scratch / "long.parquet"
    runs = list(bench_parquet.measured(scratch / "log", table, count, means))
    found: dict[str, Any] = {"bytes_per_entry_parquet": round(table.stat().st_size / count, 1)}
    if wanted.rows > count:
        rows = bench_parquet.repeated(table, long, wanted.rows, means)
        found["bytes_per_entry_long"] = round(long.stat().st_size / rows, 1)
        runs.append(bench_parquet.asked(long, rows, means))
    return found | {"parquet": [one.document() for one in runs]}


def _timed(folder: Path, judge: Callable[[Capture], None]) -> float:
    with ExitStack() as stack, uncollected():
        began = time.process_time()
        judge(open_capture(folder, stack))
        return time.process_time() - began


def _timed_verb(folder: Path) -> float:
    """`custody replay LOG --json`, all of it but the program's start."""
    with redirect_stdout(io.StringIO()):
        began = time.process_time()
        code = replay_file(
            folder, request=None, at=None, first=None, to=None, index=None, whole=False, json=True
        )
        taken = time.process_time() - began
    assert code == EXIT_OK
    return taken


def _read(capture: Capture) -> None:
    for _ in capture:
        pass
    assert capture.whole


def _replay(capture: Capture) -> None:
    replayer = Replayer()
    for position, entry in capture:
        replayer.take(position, entry)
    assert replayer.report().clean


def _exposures(capture: Capture) -> None:
    inquiry = Inquiry()
    for position, entry in capture:
        inquiry.take(position, entry)
    assert summed(inquiry).affected.most == 0
