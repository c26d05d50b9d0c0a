"""Simulated engines: a real core each, and passes, writes and comparisons that take time.

Owns: how an engine's effects are performed on simulated memory, and when each ends.
Must not know: the scheduler, the store, and what anything costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

from engine.decode import DecodeCore
from engine.digests import Keyed
from engine.effects import (
    Answer,
    DecodeSlice,
    EngineEffect,
    Post,
    PrefillSlice,
    Propose,
    Publish,
    Step,
    Synced,
    VerifyPages,
)
from engine.prefill import Posted, PrefillCore
from engine.simulator_clock import Clock, Wire
from engine.simulator_memory import TracedMemory
from engine.simulator_values import Cluster, Costs
from engine.world_memory import count_reads
from lifecycle.events import Finished, FinishReason, Proposal, Verified
from lifecycle.ids import Party, RequestId, count_pages

Up = Proposal | DecodeSlice
"""What an engine says; a slice that was run says that its token is there."""

Down = Publish | Synced | Answer


class SimulatedEngine:
    """What both roles share: hearing the scheduler, and one pass at a time."""

    core: PrefillCore | DecodeCore

    def __init__(self, *, clock: Clock, memory: TracedMemory, wire: Wire[Up]) -> None:
        self.clock = clock
        self.memory = memory
        self._wire = wire
        self._computing = False

    def hear(self, items: list[Down]) -> None:
        """Take in what came from the scheduler, in order."""
        for item in items:
            match item:
                case Publish(position=position, entry=entry, payload=payload):
                    self.act(self.core.receive(position, entry, payload))
                case Answer(number=number, position=position, rule=rule):
                    self.act(self.core.answer(number, position, rule))
                case Synced():
                    self.act(self.core.end_sync())
        self._feed()

    def act(self, effects: Iterable[EngineEffect]) -> None:
        """Perform effects in their order."""
        for effect in effects:
            if isinstance(effect, Propose):
                self._wire.send(effect.proposal)
            else:
                self._do(effect)

    def _feed(self) -> None:
        """Begin the next pass as soon as none runs."""
        if self._computing:
            return
        step = self.core.plan_step()
        if step is not None:
            self._computing = True
            self.clock.after(self._cost(step), partial(self._ended, step))

    def _ended(self, step: Step) -> None:
        self._computing = False
        self._step_ended(step)
        self._feed()

    def _cost(self, step: Step) -> int:
        raise NotImplementedError

    def _step_ended(self, step: Step) -> None:
        raise NotImplementedError

    def _do(self, effect: EngineEffect) -> None:
        """Perform an effect of this role; those of revocable access cost nothing here."""


class SimulatedPrefill(SimulatedEngine):
    """A prefill engine with one link that carries its writes one after the other."""

    core: PrefillCore

    def __init__(
        self,
        party: Party,
        cluster: Cluster,
        costs: Costs,
        *,
        digest: Keyed,
        clock: Clock,
        memory: TracedMemory,
        wire: Wire[Up],
        owner: Callable[[Party], DecodeCore],
    ) -> None:
        """`owner` finds the core whose pages a write targets."""
        super().__init__(clock=clock, memory=memory, wire=wire)
        pages = cluster.prefill_pool_tokens // cluster.page_tokens
        self.core = PrefillCore(
            party,
            pages=pages,
            page_tokens=cluster.page_tokens,
            mint=partial(next, count(1)),
            staging=cluster.staging_tokens // cluster.page_tokens,
            chunk_tokens=cluster.chunk_tokens,
            digest=digest,
        )
        self._costs = costs
        self._owner = owner
        self._link_free_ns = 0
        memory.add(party, pages)

    def _cost(self, step: Step) -> int:
        return self._costs.prefill_ns(step)

    def _step_ended(self, step: Step) -> None:
        for part in step.slices:
            if isinstance(part, PrefillSlice):
                self.memory.compute(self.core, part)
        self.act(self.core.step_ended(step))

    def _do(self, effect: EngineEffect) -> None:
        if isinstance(effect, Post):
            self.memory.pack(self.core, effect)
            begins = max(self.clock.now_ns, self._link_free_ns)
            self._link_free_ns = begins + self._costs.transfer_ns(effect.tokens.count)
            lands = self._link_free_ns + self._costs.link_latency_ns
            self.clock.at(lands, partial(self._landed, effect))

    def _landed(self, post: Post) -> None:
        self.memory.land(self._owner(post.grant.owner), post)
        size = post.tokens.count * self._costs.kv_token_bytes
        self.act(self.core.post_ended(post.ticket, Posted.DONE, size_bytes=size))
        self._feed()


class SimulatedDecode(SimulatedEngine):
    """A decode engine that answers every request with as many tokens as it may."""

    core: DecodeCore

    def __init__(
        self,
        party: Party,
        cluster: Cluster,
        costs: Costs,
        *,
        digest: Keyed,
        clock: Clock,
        memory: TracedMemory,
        wire: Wire[Up],
    ) -> None:
        super().__init__(clock=clock, memory=memory, wire=wire)
        pages = cluster.decode_pool_tokens // cluster.page_tokens
        self.core = DecodeCore(
            party,
            pages=pages,
            page_tokens=cluster.page_tokens,
            mint=partial(next, count(1)),
            batch=cluster.batch,
            growth_tokens=cluster.growth_tokens,
            digest=digest,
        )
        self._costs = costs
        memory.add(party, pages)

    def _cost(self, step: Step) -> int:
        for part in step.slices:
            if isinstance(part, DecodeSlice) and part.index == 0:
                self.memory.read(self.core, part, part.position)
        return self._costs.decode_ns(step)

    def _step_ended(self, step: Step) -> None:
        finished: dict[RequestId, Finished] = {}
        ran: list[Up] = []
        now, requests = self.clock.now_ns, self.core.log.requests
        for part in step.slices:
            assert isinstance(part, DecodeSlice), "a decode step has decode slices"
            self.memory.append(self.core, part)
            ran.append(part)
            admitted = requests[part.request].admitted
            if admitted is not None and part.index + 1 >= admitted.new_tokens_max:
                self.memory.read(self.core, part, part.position + 1)
                pages = count_reads(part, self.memory.page_tokens)
                finished[part.request] = Finished(
                    FinishReason.LENGTH, part.index + 1, now, b"", pages, pages, 0
                )
        self._wire.send_all(ran)
        self.act(self.core.step_ended(step, finished=finished))

    def _do(self, effect: EngineEffect) -> None:
        if isinstance(effect, VerifyPages):
            pages = sum(count_pages(pages) for _, _, pages, _ in effect.writes)
            self.clock.after(pages * self._costs.verify_page_ns, partial(self._verified, effect))

    def _verified(self, asked: VerifyPages) -> None:
        job = self.core.jobs.get(asked.request)
        if job is None:
            return
        pages = sum(count_pages(pages) for _, _, pages, _ in asked.writes)
        grants = tuple(reserved.grant for reserved in job.reserved)
        verified = Verified(grants, pages, pages, pages, "simulated")
        self.act(self.core.verify_ended(asked.request, asked.attempt, verified))
        self._feed()
