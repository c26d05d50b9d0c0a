"""A trace of requests replayed through the real decision code, on a virtual clock.

Owns: the scheduler's side: the store, streams that take time, and when clients come.
Must not know: files, formats of traces, and what is printed.

Scheduler, prefill and decode cores are the classes that serve requests.
No fault is injected here; that is what worlds and fuzzed simulations are for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from engine.decode import DecodeCore
from engine.effects import (
    Answer,
    Append,
    DecodeSlice,
    Payload,
    Publish,
    SchedulerEffect,
    Synced,
    TellOutcome,
    TellTokens,
)
from engine.scheduler import Scheduler
from engine.simulator_clock import Clock, Wire
from engine.simulator_engines import (
    Down,
    SimulatedDecode,
    SimulatedEngine,
    SimulatedPrefill,
    Up,
)
from engine.simulator_memory import TracedMemory
from engine.simulator_report import Books, Summary
from engine.simulator_values import Cluster, Costs, Goals, TraceRequest
from engine.world_books import judge_home
from engine.world_values import CORE_ERRORS, Found, as_found
from lifecycle.decide import Limits
from lifecycle.events import Attached, Entry, FenceScope, Role
from lifecycle.ids import EngineId, Party, RequestId, party_of

BLANK = ("",)
"""The text of a token; traces hold no text."""

Keep = Callable[[int, Entry], None]
"""Whoever wants the log: called with each entry and its position."""


def length_digest(request: RequestId, tokens: Sequence[int]) -> bytes:
    """A digest of a length; traces hold no text, so all prompts of a length are the same."""
    return f"{request}/{len(tokens)}".encode()


class Simulation:
    """One cluster and one trace."""

    def __init__(self, cluster: Cluster, costs: Costs, *, keep: Keep | None = None) -> None:
        """Engines attached and connected; nothing has come yet."""
        self.cluster = cluster
        self.costs = costs
        self.clock = Clock(1)
        self.memory = TracedMemory(cluster.page_tokens)
        self.books = Books()
        self.scheduler = Scheduler(
            limits=Limits(
                context_tokens=cluster.context_tokens,
                growth_tokens=cluster.growth_tokens,
                attempts_max=cluster.attempts_max,
            ),
            epoch=1,
            digest=length_digest,
            queue_limit=cluster.queue_limit,
            queue_ns=cluster.queue_ns,
        )
        self._keep = keep
        self._down: dict[Party, Wire[Down]] = {}
        self._waiting: dict[Party, deque[Publish | Synced]] = {}
        self._outcomes: deque[TellOutcome] = deque()
        self._appended = 0
        self._durable = 0
        self._flushing = False
        self._coming = 0
        self._prompts: tuple[int, ...] = ()
        self.engines: dict[Party, SimulatedEngine] = {}
        self.perform(self.scheduler.resume((), self.clock.now_ns))
        for number in range(cluster.prefill_engines):
            self._join(EngineId(f"prefill-{number}"), Role.PREFILL)
        for number in range(cluster.decode_engines):
            self._join(EngineId(f"decode-{number}"), Role.DECODE)

    # --- the run ------------------------------------------------------------------------------

    def run(self, requests: Sequence[TraceRequest]) -> Books:
        """Serve the trace to its end. Raises Found when an oracle saw what must never be."""
        ordered = sorted(requests, key=lambda request: request.arrival_ns)
        longest = max((request.prompt_tokens for request in ordered), default=0)
        self._prompts = tuple(range(min(longest, self.cluster.context_tokens)))
        self._coming = len(ordered)
        start = self.clock.now_ns
        for request in ordered:
            self.clock.at(start + request.arrival_ns, partial(self._submit, request))
        self.clock.after(self.costs.tick_ns, self._tick)
        self.clock.after(self.costs.heartbeat_ns, self._heartbeat)
        # Whoever is not answered, or holds a page, after so long will be for ever.
        last_ns = max((request.arrival_ns for request in ordered), default=0)
        patience_ns = start + last_ns + 2 * self.cluster.deadline_ns
        try:
            while self._busy and self.clock.now_ns < patience_ns and self.clock.step():
                pass
            self.books.end_ns = self.clock.now_ns
            self._at_rest()
        except CORE_ERRORS as error:
            raise as_found(error) from error
        return self.books

    @property
    def _busy(self) -> bool:
        """Whether a client is still to come, or to be answered, or something to be settled."""
        if self._coming or self.books.open or self._outcomes or self.books.held:
            return True
        return any(engine.core.allocator.held for engine in self.engines.values())

    def summary(self, goals: Goals) -> Summary:
        """The run in numbers."""
        return self.books.summary(
            goals,
            pages_compared=self.memory.pages_compared,
            foreign_reads=self.memory.foreign_reads,
            rules_evaluated=self.scheduler.log.evaluated,
        )

    def _submit(self, asked: TraceRequest) -> None:
        self._coming -= 1
        name = self.scheduler.mint()
        self.books.came(name, asked, self.clock.now_ns)
        tokens = self._prompts[: asked.prompt_tokens]
        if len(tokens) < asked.prompt_tokens:
            # Longer than any context: it is refused by its length, which must be told truly.
            tokens = tuple(range(asked.prompt_tokens))
        self.perform(
            self.scheduler.submit(
                name,
                tenant="trace",
                payload=Payload(tokens),
                new_tokens_max=asked.new_tokens,
                deadline_ns=self.clock.now_ns + self.cluster.deadline_ns,
                now_ns=self.clock.now_ns,
            )
        )

    def _tick(self) -> None:
        self.perform(self.scheduler.tick(self.clock.now_ns))
        self.clock.after(self.costs.tick_ns, self._tick)

    def _heartbeat(self) -> None:
        for party, engine in self.engines.items():
            self.scheduler.acknowledge(party, engine.core.position)
        self.clock.after(self.costs.heartbeat_ns, self._heartbeat)

    def _at_rest(self) -> None:
        """Every client is answered, and every page is home, on both sides."""
        if self.books.open:
            raise Found("unanswered", f"{len(self.books.open)} clients wait after their deadline")
        for party, account in self.scheduler.log.ledger.items():
            if judge_home(self.engines[party].core, account):
                raise Found("leak", f"{party} ends with pages in quarantine, and nothing failed")

    # --- engines ------------------------------------------------------------------------------

    def _join(self, engine: EngineId, role: Role) -> None:
        cluster, prefill = self.cluster, role is Role.PREFILL
        tokens = cluster.prefill_pool_tokens if prefill else cluster.decode_pool_tokens
        party = party_of(engine, 1, 0)
        attached = Attached(
            engine=engine,
            incarnation=1,
            role=role,
            ranks=1,
            pages=tokens // cluster.page_tokens,
            page_tokens=cluster.page_tokens,
            layers=1,
            slots=cluster.slots,
            context_tokens=cluster.context_tokens,
            layout="simulated",
            endpoints=("",),
            plane="simulated",
            fence_scope=FenceScope.GRANT,
        )
        up: Wire[Up] = Wire(
            self.clock, delay_ns=self.costs.control_ns, deliver=partial(self._hear, party)
        )
        one: SimulatedEngine
        if prefill:
            one = SimulatedPrefill(
                party,
                cluster,
                self.costs,
                digest=length_digest,
                clock=self.clock,
                memory=self.memory,
                wire=up,
                owner=self._decode_core,
            )
        else:
            one = SimulatedDecode(
                party,
                cluster,
                self.costs,
                digest=length_digest,
                clock=self.clock,
                memory=self.memory,
                wire=up,
            )
        self.engines[party] = one
        self._down[party] = Wire(self.clock, delay_ns=self.costs.control_ns, deliver=one.hear)
        self._waiting[party] = deque()
        now = self.clock.now_ns
        self.perform(self.scheduler.attach(attached, now))
        one.core.begin_sync(1)
        effects = self.scheduler.connect(party, epoch=0, position=0, next_number=1, now_ns=now)
        self.perform(effects)

    def _decode_core(self, party: Party) -> DecodeCore:
        core = self.engines[party].core
        assert isinstance(core, DecodeCore), "destination pages are a decode engine's"
        return core

    def _hear(self, party: Party, items: list[Up]) -> None:
        now = self.clock.now_ns
        for item in items:
            if isinstance(item, DecodeSlice):
                for told in self.scheduler.tokens(
                    party,
                    item.request,
                    item.attempt,
                    first=item.index,
                    tokens=(item.position,),
                    texts=BLANK,
                    logprobs=(),
                ):
                    if isinstance(told, TellTokens):
                        self.books.tokens(told.request, len(told.tokens), now)
            else:
                self.perform(self.scheduler.propose(item, now))

    # --- effects ------------------------------------------------------------------------------

    def perform(self, effects: Iterable[SchedulerEffect]) -> None:
        """Append, publish when durable, answer and tell, in the order given."""
        for effect in effects:
            match effect:
                case Append(position=position, entry=entry):
                    self._append(position, entry)
                case Publish() | Synced():
                    self._publish(effect)
                case Answer(party=party):
                    self._down[party].send(effect)
                case TellOutcome():
                    self._outcomes.append(effect)
                    self._flush()
                case _:
                    pass

    def _append(self, position: int, entry: Entry) -> None:
        self._appended = position
        self.books.entry(entry)
        if self._keep is not None:
            self._keep(position, entry)

    def _publish(self, effect: Publish | Synced) -> None:
        waiting = self._waiting[effect.party]
        durable = effect.durable if isinstance(effect, Publish) else 0
        if waiting or durable > self._durable:
            waiting.append(effect)
            self._flush()
        else:
            self._down[effect.party].send(effect)

    def _flush(self) -> None:
        if not self._flushing:
            self._flushing = True
            self.clock.after(self.costs.flush_ns, partial(self._flushed, self._appended))

    def _flushed(self, position: int) -> None:
        self._flushing = False
        self._durable = position
        for party, waiting in self._waiting.items():
            while waiting:
                first = waiting[0]
                if isinstance(first, Publish) and first.durable > position:
                    break
                self._down[party].send(waiting.popleft())
        while self._outcomes and self._outcomes[0].durable <= position:
            told = self._outcomes.popleft()
            self.books.outcome(told.request, told.outcome, self.clock.now_ns)
        if self._outcomes or any(self._waiting.values()):
            self._flush()
