"""What stands between the cores in a world: store, streams, clients and shells of effects.

Owns: how effects are performed, in the documented order, on simulated things.
Must not know: what may happen next; that is the `world`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from engine.decode import DecodeCore
from engine.effects import (
    Answer,
    Append,
    EngineEffect,
    Expose,
    Fence,
    Forget,
    Post,
    Propose,
    Publish,
    Retire,
    SchedulerEffect,
    Step,
    Synced,
    TellAdmitted,
    TellClosed,
    TellOutcome,
    TellTokens,
    VerifyPages,
)
from engine.prefill import PrefillCore
from engine.scheduler import RefusedEngineError, Scheduler
from engine.world_kinds import Gathers, Manifests, with_kinds
from engine.world_memory import Memory, Write
from engine.world_values import Client, Core, Found, Mint, Scenario, Tokens
from lifecycle.decide import Limits
from lifecycle.events import (
    Attached,
    Cause,
    Entry,
    Finished,
    Proposal,
    RejectCode,
    Role,
    Verified,
)
from lifecycle.ids import EngineId, GrantId, Party, RequestId

PREFILLS = (EngineId("p"), EngineId("q"))
DECODES = (EngineId("d"), EngineId("e"))
"""Names of engines; a scenario says how many there are."""
Down = Publish | Synced
Up = Proposal | Tokens


def cheap_digest(request: RequestId, tokens: Iterable[int]) -> bytes:
    """A digest that costs nothing; nobody forges in a world."""
    return f"{request}{tokens}".encode()


class Shells:
    """The simulated things, and how effects change them."""

    def __init__(self, scenario: Scenario) -> None:
        """Engines attached and connected, nothing asked yet."""
        self.scenario = scenario
        self.now = 1
        self.epoch = 0
        self.stored: list[tuple[int, Entry]] = []
        self.durable = 0
        self.memory = Memory(scenario.page_tokens)
        self.cores: dict[Party, Core] = {}
        self.mints: dict[Party, Mint] = {}
        engines = PREFILLS[: scenario.prefills] + DECODES[: scenario.decodes]
        self.incarnations: dict[EngineId, int] = dict.fromkeys(engines, 0)
        self.connected: frozenset[Party] = frozenset()
        self.up: dict[Party, tuple[Up, ...]] = {}
        self.publishes: dict[Party, tuple[Down, ...]] = {}
        self.down: dict[Party, tuple[Down, ...]] = {}
        self.answers: dict[Party, tuple[Answer, ...]] = {}
        self.outcomes: tuple[TellOutcome, ...] = ()
        self.clients: dict[RequestId, Client] = {}
        self.verified: frozenset[tuple[RequestId, int]] = frozenset()
        self.writes: dict[tuple[Party, int], Write] = {}
        self.digests: dict[tuple[Party, int], int] = {}
        self.steps: dict[Party, tuple[Step, dict[RequestId, int]]] = {}
        self.verifies: tuple[tuple[Party, VerifyPages], ...] = ()
        self.fences: tuple[tuple[Party, Fence], ...] = ()
        self.exposed: frozenset[GrantId] = frozenset()
        self.refused: frozenset[tuple[GrantId, Party]] = frozenset()
        self.must_leave: frozenset[EngineId] = frozenset()
        self.budget = dict(scenario.faults)
        self.asked = 0
        self.hint = ""
        self.turns = 0
        self.sometimes: Counter[str] = Counter()
        self.scheduler = self._new_scheduler()
        self.perform(self.scheduler.resume((), self.now))
        for engine in engines:
            self.new_life(engine)

    # --- lives --------------------------------------------------------------------------------

    def _new_scheduler(self) -> Scheduler:
        if not (self.scenario.epochs_repeat and self.epoch):
            self.epoch += 1
        limits = Limits(
            context_tokens=64,
            growth_tokens=self.scenario.growth_tokens,
            attempts_max=self.scenario.attempts_max,
            settle_ns=10,
        )
        made = with_kinds(self.scenario.scheduler, Manifests, self.scenario.kinds)
        return made(
            limits=limits,
            epoch=self.epoch,
            digest=cheap_digest,
            engine_wait_ns=self.scenario.engine_wait_ns,
        )

    def attached(self, engine: EngineId) -> Attached:
        """How this life of the engine introduces itself."""
        scenario, prefill = self.scenario, engine in PREFILLS
        ranks = scenario.ranks if prefill else 1
        return Attached(
            engine=engine,
            incarnation=self.incarnations[engine],
            role=Role.PREFILL if prefill else Role.DECODE,
            ranks=ranks,
            pages=scenario.prefill_pages if prefill else scenario.decode_pages,
            page_tokens=scenario.page_tokens,
            layers=1,
            slots=scenario.slots,
            context_tokens=64,
            layout=self.layout(self.parties(engine)[0]),
            endpoints=("x",) * ranks,
            plane="world",
            fence_scope=scenario.fence_scope,
        )

    def layout(self, party: Party) -> str:
        """How that life lays out its pages."""
        misfit = self.scenario.misfit_life
        return "M" if (party.engine, party.incarnation) == (DECODES[0], misfit) else "L"

    def parties(self, engine: EngineId) -> tuple[Party, ...]:
        """The ranks of the engine's present life."""
        ranks = self.scenario.ranks if engine in PREFILLS else 1
        return tuple(Party(engine, self.incarnations[engine], rank) for rank in range(ranks))

    def new_life(self, engine: EngineId) -> None:
        """A new incarnation with new memory; the old one's memory and streams are gone."""
        for party in [p for p in self.cores if p.engine == engine]:
            self._bury(party)
        self.incarnations[engine] += 1
        self.must_leave -= {engine}
        for party in self.parties(engine):
            self.mints[party] = Mint(party)
            self.cores[party] = self._core(party)
            pages = self.cores[party].allocator.capacity
            self.memory.pools[party] = (None,) * pages
            self.memory.staging[party] = (None,) * self.scenario.staging
            for channel in (self.up, self.publishes, self.down, self.answers):
                channel[party] = ()
            self.connect(party)

    def _core(self, party: Party) -> Core:
        core = self._new_core(party)
        core.outstanding_max = self.scenario.outstanding_max
        return core

    def _new_core(self, party: Party) -> Core:
        scenario, mint = self.scenario, self.mints[party]
        if party.engine in PREFILLS:
            return scenario.prefill(
                party,
                pages=scenario.prefill_pages,
                page_tokens=scenario.page_tokens,
                mint=mint,
                staging=scenario.staging,
                chunk_tokens=scenario.chunk_tokens,
                digest=cheap_digest,
            )
        return with_kinds(scenario.decode, Gathers, scenario.kinds)(
            party,
            pages=scenario.decode_pages,
            page_tokens=scenario.page_tokens,
            mint=mint,
            batch=4,
            growth_tokens=scenario.growth_tokens,
            digest=cheap_digest,
        )

    def _bury(self, party: Party) -> None:
        if party not in self.cores:
            return
        for name, write in tuple(self.writes.items()):
            if name[0] == party:
                content = self.memory.content(write)
                self.writes[name] = attrs.evolve(write, orphan=True, content=content)
        for table in (self.cores, self.mints, self.up, self.publishes, self.down, self.answers):
            del table[party]
        del self.memory.pools[party], self.memory.staging[party]
        self.steps.pop(party, None)
        self.connected -= {party}
        self.verifies = tuple(v for v in self.verifies if v[0] != party)
        self.fences = tuple(f for f in self.fences if f[0] != party)

    # --- streams ------------------------------------------------------------------------------

    def connect(self, party: Party) -> None:
        """Introduce the engine, learn what was missed, repeat what was not answered."""
        core = self.cores[party]
        try:
            self.perform(self.scheduler.attach(self.attached(party.engine), self.now))
        except RefusedEngineError:
            self.must_leave |= {party.engine}
            return
        self.connected |= {party}
        epoch, position = core.epoch, core.position
        if epoch != self.scheduler.epoch:
            core.begin_sync(self.scheduler.epoch)
        self.perform(
            self.scheduler.connect(
                party,
                epoch=epoch,
                position=position,
                next_number=core.next_number,
                now_ns=self.now,
            )
        )
        self.repeat(party)

    def repeat(self, party: Party) -> None:
        """Send every token held and every unanswered proposal again."""
        core = self.cores[party]
        held: list[Up] = []
        if isinstance(core, DecodeCore):
            for job in core.jobs.values():
                start = len(job.payload.tokens) - 1
                if job.given:
                    values = tuple(range(start, start + job.given))
                    held.append(Tokens(job.request, job.attempt, 0, values))
        self.up[party] = (*held, *core.retransmit())

    def cut(self, party: Party) -> None:
        """The stream is gone with all that was on it."""
        self.connected -= {party}
        self.up[party] = ()
        self.publishes[party] = ()
        self.down[party] = ()
        self.answers[party] = ()

    # --- effects of the scheduler -------------------------------------------------------------

    def perform(self, effects: Iterable[SchedulerEffect]) -> None:
        """Append, publish, answer and tell, in the order given."""
        for effect in effects:
            match effect:
                case Append(position, entry):
                    self._append(position, entry)
                case Publish(party=party) | Synced(party):
                    if party in self.connected:
                        self.publishes[party] = (*self.publishes[party], effect)
                case Answer(party=party):
                    if party in self.connected:
                        self.answers[party] = (*self.answers[party], effect)
                case TellTokens():
                    self._tell_tokens(effect)
                case TellOutcome(request=request):
                    self.outcomes = (*self.outcomes, effect)
                    client = self.clients[request]
                    if client.ended and not client.gone:
                        raise Found("answered-twice", f"{request} got a second answer")
                    self.clients[request] = attrs.evolve(client, ended=True)
                case TellAdmitted() | TellClosed():
                    pass
        self.settle_durable()

    def _append(self, position: int, entry: Entry) -> None:
        if position != len(self.stored) + 1:
            raise Found("position-gap", f"position {position} follows {len(self.stored)}")
        self.stored.append((position, entry))
        self.sometimes[type(entry.event).__name__] += 1
        self._judge_end(entry)
        if isinstance(entry.event, Verified):
            self.verified |= {(entry.request, entry.attempt)}

    def _judge_end(self, entry: Entry) -> None:
        """Nobody is ended for want of an engine while there is one of each, or at once."""
        event = entry.event
        code = getattr(event, "code", None) or getattr(event, "cause", None)
        if code not in {RejectCode.NO_ENGINE, Cause.NO_ENGINE} or self.scenario.misfit_life:
            return
        fleet, client = self.scheduler.log.fleet, self.clients[entry.request]
        if len({life.attached.role for life in fleet.alive()}) > 1:
            raise Found("failed-for-nothing", f"{entry.request}: no engine, though they are there")
        waited = self.now - max(client.since_ns, fleet.time_ns)
        limit = self.scenario.engine_wait_ns
        if self.now > client.since_ns and (not limit or waited < limit):
            raise Found("failed-for-nothing", f"{entry.request} waited {waited} ns for an engine")

    def settle_durable(self) -> None:
        """Let go of whatever waited for the store, in order."""
        for party, waiting in self.publishes.items():
            ready = 0
            for item in waiting:
                if isinstance(item, Publish) and item.durable > self.durable:
                    break
                ready += 1
            if ready:
                self.down[party] = (*self.down[party], *waiting[:ready])
                self.publishes[party] = waiting[ready:]
        rest = []
        for told in self.outcomes:
            if told.durable > self.durable:
                rest.append(told)
            else:
                self._tell_outcome(told)
        self.outcomes = tuple(rest)

    def _tell_outcome(self, told: TellOutcome) -> None:
        client = self.clients[told.request]
        if client.gone:
            return
        self.clients[told.request] = attrs.evolve(client, told=told.outcome)
        if isinstance(told.outcome, Finished) and client.got != client.asked.new_tokens:
            raise Found(
                "truncated", f"{told.request}: success, {client.got} of {client.asked.new_tokens}"
            )

    def _tell_tokens(self, told: TellTokens) -> None:
        client = self.clients[told.request]
        if client.gone:
            return
        if not told.tokens:
            raise Found("ill-formed", f"{told.request} is told that there is nothing new")
        if client.ended:
            raise Found("token-after-end", f"{told.request} has ended", rule="quiet-after-end")
        start = client.asked.prompt_tokens - 1 + client.got
        wanted = tuple(range(start, start + len(told.tokens)))
        if told.first != client.got or told.tokens != wanted:
            raise Found("token-order", f"{told.request}: {told.tokens} at {told.first}")
        attempts = [a for r, a in self.verified if r == told.request]
        if self.scheduler.log.state(told.request).attempt not in attempts:
            raise Found("token-before-verified", f"{told.request} was not verified")
        self.clients[told.request] = attrs.evolve(client, got=client.got + len(told.tokens))

    # --- effects of engines -------------------------------------------------------------------

    def act(self, party: Party, effects: Iterable[EngineEffect]) -> None:
        """Do what an engine's core asks for."""
        core = self.cores[party]
        for effect in effects:
            match effect:
                case Propose(proposal):
                    if party in self.connected:
                        self.up[party] = (*self.up[party], proposal)
                case Post(ticket=ticket):
                    self.digests[(party, ticket)] = self.memory.pack(core, effect)
                    self.writes[(party, ticket)] = Write(party, effect)
                case Expose(reserved):
                    self.exposed |= {reserved.grant}
                case Retire(grant):
                    self.exposed -= {grant}
                case Fence():
                    self._judge_fence(party, effect)
                    self.fences = (*self.fences, (party, effect))
                case VerifyPages():
                    self.verifies = (*self.verifies, (party, effect))
                case Forget():
                    pass

    def _judge_fence(self, party: Party, fence: Fence) -> None:
        """Owners shut others out of their own grants, and only those that are lost."""
        life = self.cores[party].log.fleet.life(fence.party.engine, fence.party.incarnation)
        if fence.grant.owner != party or life is None or life.lost is None:
            raise Found("fenced-the-living", f"{party} fences {fence.party} off {fence.grant}")

    def prefill(self, party: Party) -> PrefillCore:
        """The prefill core of that rank."""
        core = self.cores[party]
        assert isinstance(core, PrefillCore)
        return core

    def decode(self, party: Party) -> DecodeCore:
        """The decode core of that rank."""
        core = self.cores[party]
        assert isinstance(core, DecodeCore)
        return core
