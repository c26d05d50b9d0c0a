"""An engine with the published faults, run over two weeks on a simulated clock.

Owns: when requests come, what the faulty engine does with them, and what really happened.
Must not know: how anybody will look for it.

The published numbers are taken as they are: a prefill pool of 681,280 tokens, a context of
1,048,576, fourteen days, 155 affected answers.  Everything else is assumed, and stands in `Setup`.

First fault: a prompt that does not fit the prefill pool is marked as rejected in a field that the
queue does not read.  It walks on with a placeholder of one token: one page is handed over, the
transfer is signalled complete, and decode reads all the pages that it had reserved.
Second fault, which is off unless it is asked for: on a cancel decode gives its pages back although
a write is still on its way to them.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

import attrs

from examples.incident.machine import BEFORE, Memory, Pages
from examples.incident.recorder import Recorder
from lifecycle.events import (
    KV,
    Aborted,
    Admitted,
    Attached,
    Cause,
    Drained,
    FenceScope,
    Finished,
    FinishReason,
    Leg,
    Proof,
    Purpose,
    RejectCode,
    Rejected,
    Released,
    Reserved,
    Resumed,
    Role,
    Transferred,
    Verified,
)
from lifecycle.ids import (
    FLEET,
    EngineId,
    GrantId,
    PageRange,
    Party,
    TokenRange,
    pages_for,
    prefill_pages,
    slice_pages,
)

PREFILL = Party(EngineId("prefill-0"), 1, 0)
DECODE = Party(EngineId("decode-0"), 1, 0)
SECOND_NS = 1_000_000_000
LAYOUT = "simulated"


@attrs.frozen
class Setup:
    """What is simulated; rates and sizes that were not published are assumptions."""

    seed: int = 2026
    affected: int = 155
    sound: int = 2_400
    refused: int = 60
    cancelled: int = 0
    """Cancels with a write on its way; 0 leaves the second fault out."""

    days: float = 14
    context_tokens: int = 1_048_576
    prefill_tokens: int = 681_280
    decode_tokens: int = 2_097_152
    """Assumed: the decode pool was larger than the prefill pool, how much is not known."""
    page_tokens: int = 64
    chunk_tokens: int = 65_536
    prefill_tokens_per_second: int = 12_000
    decode_tokens_per_second: int = 50
    tenants: int = 60
    begins: str = "2026-09-01T00:00:00+00:00"

    @property
    def begins_ns(self) -> int:
        """When the log begins."""
        moment = datetime.fromisoformat(self.begins).astimezone(UTC)
        return int(moment.timestamp()) * SECOND_NS


@attrs.define
class Request:
    """One customer's request, as the simulation sees it."""

    number: int
    tenant: str
    prompt: int
    new: int
    cancel: bool = False
    walks: bool = False
    source: Reserved | None = None
    destination: Reserved | None = None
    computed: int = 0
    first_token_ns: int = 0

    @property
    def name(self) -> str:
        """Its id in the log."""
        return f"req-{self.number:06d}"


@attrs.define
class Truth:
    """What the memory saw: for each answered request whose bytes it read beside its own.

    A request of whom only its own bytes were read is not in here; `BEFORE` stands for bytes that
    were there before the engine began.
    """

    foreign: dict[str, set[str]] = attrs.Factory(dict)
    answers: int = 0


class Engine:
    """The faulty engine, its two pools, and the log that it writes."""

    def __init__(self, setup: Setup) -> None:
        """Both engines have just joined."""
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.truth = Truth()
        self.log = Recorder(prefill=PREFILL, decode=DECODE)
        pages = setup.decode_tokens // setup.page_tokens
        self.memory = Memory(pages=pages, page_tokens=setup.page_tokens)
        latest = setup.cancelled > 0
        self.decode_pages = Pages(pages, latest_first=latest)
        count = setup.prefill_tokens // setup.page_tokens
        self.prefill_pages = Pages(count, latest_first=latest)
        self.names: dict[int, str] = {BEFORE: "(before)"}
        self.waiting: deque[Request] = deque()
        self.computing: Request | None = None
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self.now_ns = setup.begins_ns
        self._join()

    # --- The clock ----------------------------------------------------------------------------

    def at(self, time_ns: int, what: Callable[[], None]) -> None:
        """Let it happen then."""
        self._serial += 1
        heapq.heappush(self._agenda, (time_ns, self._serial, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Let it happen so much later."""
        self.at(self.now_ns + int(seconds * SECOND_NS), what)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._agenda:
            self.now_ns, _, what = heapq.heappop(self._agenda)
            what()

    # --- The log ------------------------------------------------------------------------------

    def _join(self) -> None:
        self.log.add(self.now_ns, FLEET, 0, Resumed(1, 0))
        pools = ((PREFILL, Role.PREFILL, self.prefill_pages), (DECODE, Role.DECODE, None))
        for party, role, pool in pools:
            attached = Attached(
                engine=party.engine,
                incarnation=1,
                role=role,
                ranks=1,
                pages=(pool or self.decode_pages).count,
                page_tokens=self.setup.page_tokens,
                layers=64,
                slots=1 << 20,
                context_tokens=self.setup.context_tokens,
                layout=LAYOUT,
                endpoints=("redacted",),
                plane="simulated",
                fence_scope=FenceScope.NONE,
            )
            self.log.add(self.now_ns, FLEET, 0, attached)

    def _grant(self, owner: Party) -> GrantId:
        self._serial += 1
        return GrantId(owner, self._serial)

    def _reserved(
        self, owner: Party, purpose: Purpose, pages: tuple[PageRange, ...], tokens: int
    ) -> Reserved:
        parties = (PREFILL,) if purpose is Purpose.DESTINATION else ()
        tag = self.random.getrandbits(63) + 1
        span = TokenRange(0, tokens)
        return Reserved(self._grant(owner), purpose, pages, span, KV, tag, parties)

    # --- A request's life ---------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """The door: what fits the context is let in; nobody compares with the prefill pool yet."""
        self.names[request.number] = request.name
        setup = self.setup
        if request.prompt + request.new > setup.context_tokens:
            self._reject(request, RejectCode.CONTEXT_LENGTH_EXCEEDED, setup.context_tokens)
        elif request.prompt > setup.prefill_tokens:
            self._reject(request, RejectCode.KV_POOL_CAPACITY_EXCEEDED, setup.prefill_tokens)
            if request.walks:
                # The mark was written to a field that the queue does not read.
                self._walk_on(request)
        else:
            self.waiting.append(request)
            self._start_next()

    def _reject(self, request: Request, code: RejectCode, limit: int) -> None:
        event = Rejected(
            code=code,
            reason=f"{request.prompt} tokens, limit {limit}",
            prompt_tokens=request.prompt,
            new_tokens_max=request.new,
            context_tokens=self.setup.context_tokens,
            capacity_tokens=limit,
            tenant=request.tenant,
            fleet_position=self.log.fleet,
        )
        self.log.add(self.now_ns, request.name, 0, event)

    def _walk_on(self, request: Request) -> None:
        pages = self.decode_pages.take(pages_for(request.prompt, self.setup.page_tokens))
        placeholder = self.prefill_pages.take(1)
        if pages is None or placeholder is None:
            # The pool is too full for it just now: the engine tries again, as it does for all.
            if placeholder is not None:
                self.prefill_pages.give(placeholder)
            self.after(5, lambda: self._walk_on(request))
            return
        request.destination = self._reserved(DECODE, Purpose.DESTINATION, pages, request.prompt)
        request.source = self._reserved(PREFILL, Purpose.SOURCE, placeholder, 1)
        self.log.add(self.now_ns, request.name, 1, request.destination)
        self.log.add(self.now_ns, request.name, 1, request.source)
        self.after(0.2, lambda: self._land(request, 0, 1, last=True))

    def _start_next(self) -> None:
        if self.computing is not None or not self.waiting:
            return
        request = self.waiting[0]
        size = self.setup.page_tokens
        source_count = prefill_pages(request.prompt, size)
        total = request.prompt + request.new
        free_prefill, free_decode = self.prefill_pages.free, self.decode_pages.free
        pages = self.decode_pages.take(pages_for(total, size))
        source = self.prefill_pages.take(source_count)
        if pages is None or source is None:
            for pool, got in ((self.decode_pages, pages), (self.prefill_pages, source)):
                if got is not None:
                    pool.give(got)
            self.after(2, self._start_next)
            return
        self.waiting.popleft()
        self.computing = request
        admitted = Admitted(
            prompt_tokens=request.prompt,
            prompt_digest=b"",
            new_tokens_max=request.new,
            context_tokens=self.setup.context_tokens,
            prefill=self._leg(PREFILL, self.prefill_pages.count, free_prefill, source_count),
            decode=self._leg(DECODE, self.decode_pages.count, free_decode, pages_for(total, size)),
            tenant=request.tenant,
            deadline_ns=self.now_ns + 7_200 * SECOND_NS,
            settle_ns=600 * SECOND_NS,
            attempts_max=1,
            fleet_position=self.log.fleet,
        )
        self.log.add(self.now_ns, request.name, 1, admitted)
        request.source = self._reserved(PREFILL, Purpose.SOURCE, source, max(1, request.prompt - 1))
        request.destination = self._reserved(DECODE, Purpose.DESTINATION, pages, total)
        self.log.add(self.now_ns, request.name, 1, request.source)
        self.log.add(self.now_ns, request.name, 1, request.destination)
        self._compute(request)

    def _leg(self, party: Party, capacity: int, free: int, needed: int) -> Leg:
        return Leg(
            engine=party.engine,
            incarnation=1,
            ranks=1,
            page_tokens=self.setup.page_tokens,
            pages_needed=needed,
            pages_booked=needed,
            pages_capacity=capacity,
            pages_free=free,
            layout=LAYOUT,
        )

    def _compute(self, request: Request) -> None:
        start = request.computed
        stop = min(request.prompt - 1, start + self.setup.chunk_tokens)
        request.computed = stop
        seconds = (stop - start) / self.setup.prefill_tokens_per_second
        last = stop == request.prompt - 1
        self.after(seconds, lambda: self._post(request, start, stop, last=last))

    def _post(self, request: Request, start: int, stop: int, *, last: bool) -> None:
        if request.cancel and (last or self.random.random() < 0.5):
            late = self.random.uniform(1, 60)
            self.after(late, lambda: self._land_late(request, start, stop))
            self._cancel(request)
            return
        self.after(0.05, lambda: self._land(request, start, stop, last=last))
        if not last:
            self._compute(request)

    def _write(self, request: Request, start: int, stop: int) -> None:
        destination = request.destination
        assert destination is not None
        size = self.setup.page_tokens
        self.memory.write(destination.pages, start=start, stop=stop, who=request.number)
        event = Transferred(
            grant=destination.grant,
            tokens=TokenRange(start, stop),
            pages=slice_pages(destination.pages, start=start // size, stop=pages_for(stop, size)),
            size_bytes=(stop - start) * 1024,
            digest=0,
            step=1,
            steps_ended=1,
        )
        self.log.add(self.now_ns, request.name, 1, event)

    def _land(self, request: Request, start: int, stop: int, *, last: bool) -> None:
        destination, source = request.destination, request.source
        assert destination is not None
        assert source is not None
        if start < stop:
            self._write(request, start, stop)
        if not last:
            return
        drained = Drained(destination.grant, PREFILL, Proof.ACKNOWLEDGED)
        self.log.add(self.now_ns, request.name, 1, drained)
        written = pages_for(stop, self.setup.page_tokens)
        # The signal is all that this engine has; it compares nothing.
        signal = Verified((destination.grant,), written, 0, 0, "transfer-complete")
        self.log.add(self.now_ns, request.name, 1, signal)
        self.log.add(self.now_ns, request.name, 1, Released(source.grant))
        self.prefill_pages.give(source.pages)
        if self.computing is request:
            self.computing = None
            self._start_next()
        self.after(0.15, lambda: self._first_token(request))

    def _first_token(self, request: Request) -> None:
        request.first_token_ns = self.now_ns
        self._read(request)
        seconds = request.new / self.setup.decode_tokens_per_second
        self.after(seconds, lambda: self._finish(request))

    def _read(self, request: Request) -> None:
        assert request.destination is not None
        seen = self.memory.read(request.destination.pages, start=0, stop=request.prompt - 1)
        seen.discard(request.number)
        if seen:
            whose = self.truth.foreign.setdefault(request.name, set())
            whose.update(self.names[number] for number in seen)

    def _finish(self, request: Request) -> None:
        destination = request.destination
        assert destination is not None
        self._read(request)
        self.truth.answers += 1
        # What it decoded lies behind the prompt, as far as there was room.
        room = sum(run.count for run in destination.pages) * self.setup.page_tokens
        stop = min(room, request.prompt - 1 + request.new)
        first = request.prompt - 1
        self.memory.write(destination.pages, start=first, stop=stop, who=request.number)
        pages = sum(run.count for run in destination.pages)
        event = Finished(
            reason=FinishReason.STOP,
            tokens=request.new,
            first_token_ns=request.first_token_ns,
            digest=b"",
            pages_read=pages,
            reads_checked=0,
            reads_unchecked=pages,
        )
        self.log.add(self.now_ns, request.name, 1, event)
        self.log.add(self.now_ns, request.name, 1, Released(destination.grant))
        self.decode_pages.give(destination.pages)

    # --- The second fault ---------------------------------------------------------------------

    def _cancel(self, request: Request) -> None:
        destination, source = request.destination, request.source
        assert destination is not None
        assert source is not None
        event = Aborted(Cause.CLIENT_CANCEL, "client", "cancelled")
        self.log.add(self.now_ns, request.name, 1, event)
        # Nobody asks whether a write is on its way.
        self.log.add(self.now_ns, request.name, 1, Released(destination.grant))
        self.log.add(self.now_ns, request.name, 1, Released(source.grant))
        self.decode_pages.give(destination.pages)
        self.prefill_pages.give(source.pages)
        self.computing = None
        self._start_next()

    def _land_late(self, request: Request, start: int, stop: int) -> None:
        assert request.destination is not None
        if start < stop:
            self._write(request, start, stop)
        drained = Drained(request.destination.grant, PREFILL, Proof.ACKNOWLEDGED)
        self.log.add(self.now_ns, request.name, 1, drained)


def simulate(setup: Setup) -> Engine:
    """Two weeks of traffic; the engine holds the log and the truth."""
    engine = Engine(setup)
    draw = engine.random
    kinds = (
        ["sound"] * setup.sound
        + ["walks"] * setup.affected
        + ["refused"] * setup.refused
        + ["cancelled"] * setup.cancelled
    )
    draw.shuffle(kinds)
    window_ns = int(setup.days * 86_400) * SECOND_NS
    times = sorted(draw.randrange(window_ns) for _ in kinds)
    for number, (kind, offset) in enumerate(zip(kinds, times, strict=True), start=1):
        request = _drawn(engine, kind, number)
        engine.at(setup.begins_ns + offset, lambda request=request: engine.arrive(request))  # type: ignore[misc]
    engine.run()
    return engine


def _drawn(engine: Engine, kind: str, number: int) -> Request:
    setup, draw = engine.setup, engine.random
    tenant = f"tenant-{draw.randrange(setup.tenants):03d}"
    new = draw.randrange(20, 800)
    if kind in ("sound", "cancelled"):
        # Most prompts are short, and a few nearly fill the pool.
        tokens = int(2 ** draw.uniform(6, 19.37)) if draw.random() < 0.95 else 0
        tokens = min(tokens or setup.prefill_tokens - draw.randrange(30_000), setup.prefill_tokens)
        return Request(number, tenant, tokens, new, cancel=kind == "cancelled")
    over = setup.context_tokens - setup.prefill_tokens - 800
    tokens = setup.prefill_tokens + 2 + draw.randrange(over)
    if kind == "refused" and draw.random() < 0.3:
        tokens = setup.context_tokens + draw.randrange(1, 200_000)
    return Request(number, tenant, tokens, new, walks=kind == "walks")
