"""Scheduler, prefill, decode and an in-memory plane in one process and one thread, with real torch.

`Deployment` plays the shells: it carries effects in the order in which real shells perform them,
one message at a time, so that a test can look at, or break, anything between two messages.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import torch

from engine.allocator import PageRun
from engine.core import EngineCore
from engine.decode import DecodeCore
from engine.device_pool import DevicePool
from engine.digests import keyed_digest
from engine.effects import (
    Answer,
    Append,
    Payload,
    Publish,
    SchedulerEffect,
    Synced,
    TellOutcome,
    TellTokens,
)
from engine.model import Model
from engine.pool import KVPool
from engine.prefill import PrefillCore
from engine.runner_decode import DecodeRunner
from engine.runner_prefill import PrefillRunner
from engine.sampler import SamplingParams
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from kernels.layout import PageLayout, PageMemory
from lifecycle.decide import Limits
from lifecycle.events import (
    Aborted,
    Attached,
    Cause,
    Entry,
    FenceScope,
    Finished,
    LostCause,
    Rejected,
    Role,
)
from lifecycle.ids import EngineId, Party, RequestId
from lifecycle.replay import replay
from transport.decode_owner import DecodeOwner
from transport.engine_owner import NewTokens, Outgoing, Owner
from transport.engine_planes import page_layout
from transport.planes.naive import NaiveNetwork, NaivePlane
from transport.prefill_owner import PrefillOwner

PREFILL = Party(EngineId("prefill-0"), 1, 0)
DECODE = Party(EngineId("decode-0"), 1, 0)
FAR_NS = 10**15
MESSAGES_MAX = 200_000


@attrs.define
class Client:
    """What a client was told."""

    tokens: list[int] = attrs.Factory(list)
    texts: list[str] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    outcome: Finished | Aborted | Rejected | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finished(self) -> Finished:
        """The outcome, which must be one that ended by itself."""
        assert isinstance(self.outcome, Finished), self.outcome
        return self.outcome


class Deployment:
    """One prefill and one decode engine under one scheduler; a subclass may break its parts."""

    scheduler_kind: type[Scheduler] = Scheduler
    prefill_kind: type[PrefillCore] = PrefillCore
    decode_kind: type[DecodeCore] = DecodeCore
    decode_runner_kind: type[DecodeRunner] = DecodeRunner

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        prefill_pages: int = 32,
        decode_pages: int = 32,
        page_tokens: int = 8,
        staging: int = 4,
        chunk_tokens: int = 24,
        batch: int = 8,
        growth_tokens: int = 8,
        attempts_max: int = 4,
        context_tokens: int = 256,
        seed: int = 0,
        poison: Callable[[KVPool], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """device: compute as on a GPU, in memory of that device beside the host's."""
        random_tags = random.Random(seed)
        digest = keyed_digest(b"a life's key")
        self.layout: PageLayout = page_layout(model, page_tokens=page_tokens)
        self.scheduler = self.scheduler_kind(
            limits=Limits(
                context_tokens=context_tokens,
                growth_tokens=growth_tokens,
                attempts_max=attempts_max,
            ),
            epoch=1,
            digest=digest,
        )
        self.network = NaiveNetwork()
        self.log: list[tuple[int, Entry]] = []
        self.clients: dict[RequestId, Client] = {}
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.hold: Callable[[Publish], bool] = lambda _effect: False
        self._held_back: deque[Publish] = deque()
        self._todo: deque[Callable[[], None]] = deque()
        self._clock = itertools.count(1_000)

        def mint() -> int:
            return random_tags.randrange(1, 1 << 64)

        def note(sentence: str, **fields: Any) -> None:
            self.notes.append((sentence, fields))

        source: KVPool = KVPool.allocate(self.layout, prefill_pages)
        staged = PageMemory.allocate(self.layout, staging)
        target: KVPool = KVPool.allocate(self.layout, decode_pages)
        for pool in (source, target):
            if poison is not None:
                poison(pool)
        landing = target.memory
        if device is not None:
            source = DevicePool(self.layout, prefill_pages, device=device)
            target = DevicePool(self.layout, decode_pages, device=device, landing=landing)
        prefill_plane = NaivePlane(self.network, party=str(PREFILL), incarnation=str(PREFILL))
        prefill_plane.register(staged.octets.numpy().data)
        decode_plane = NaivePlane(self.network, party=str(DECODE), incarnation=str(DECODE))
        decode_plane.register(landing.octets.numpy().data)
        self.prefill = PrefillOwner(
            self.prefill_kind(
                PREFILL,
                pages=prefill_pages,
                page_tokens=page_tokens,
                mint=mint,
                staging=staging,
                chunk_tokens=chunk_tokens,
                digest=digest,
            ),
            PrefillRunner(model, source, staged),
            plane=prefill_plane,
            send=lambda item: self._todo.append(lambda: self._hear(PREFILL, item)),
            note=note,
        )
        self.decode = DecodeOwner(
            self.decode_kind(
                DECODE,
                pages=decode_pages,
                page_tokens=page_tokens,
                mint=mint,
                batch=batch,
                growth_tokens=growth_tokens,
                digest=digest,
            ),
            self.decode_runner_kind(
                model, target, tokenizer, clock=lambda: next(self._clock), digest=digest
            ),
            plane=decode_plane,
            send=lambda item: self._todo.append(lambda: self._hear(DECODE, item)),
            note=note,
        )
        self.owners: dict[Party, Owner[Any]] = {PREFILL: self.prefill, DECODE: self.decode}
        self.prefill.peer(DECODE, decode_plane.descriptor())
        self._join(prefill_pages, decode_pages, context_tokens)

    def _join(self, prefill_pages: int, decode_pages: int, context_tokens: int) -> None:
        self._perform(self.scheduler.resume([], self._now()))
        for party, role, pages in (
            (PREFILL, Role.PREFILL, prefill_pages),
            (DECODE, Role.DECODE, decode_pages),
        ):
            attached = Attached(
                engine=party.engine,
                incarnation=party.incarnation,
                role=role,
                ranks=1,
                pages=pages,
                page_tokens=self.layout.page_tokens,
                layers=self.layout.layers,
                slots=64,
                context_tokens=context_tokens,
                layout=self.layout.canonical(),
                endpoints=("",),
                plane="naive",
                fence_scope=FenceScope.GRANT,
            )
            self._perform(self.scheduler.attach(attached, self._now()))
        for party, owner in self.owners.items():
            owner.begin_sync(1, next_number=1)
            effects = self.scheduler.connect(
                party, epoch=0, position=0, next_number=1, now_ns=self._now()
            )
            self._perform(effects)

    # --- what a test does ---------------------------------------------------------------------

    def ask(
        self, prompt: list[int], sampling: SamplingParams | None = None, *, tenant: str = "t"
    ) -> Client:
        """Submit a request; it runs when the deployment does."""
        params = sampling or SamplingParams(max_new_tokens=8)
        request = self.scheduler.mint()
        client = self.clients[request] = Client()
        self._perform(
            self.scheduler.submit(
                request,
                tenant=tenant,
                payload=Payload(tuple(prompt), 0, params),
                new_tokens_max=params.max_new_tokens,
                deadline_ns=FAR_NS,
                now_ns=self._now(),
            )
        )
        return client

    def request_of(self, client: Client) -> RequestId:
        """The name of a client's request."""
        return next(name for name, known in self.clients.items() if known is client)

    def cancel(self, client: Client) -> None:
        """The client gives up."""
        request = self.request_of(client)
        self._perform(self.scheduler.cancel(request, Cause.CLIENT_CANCEL, "client", self._now()))

    def lose(self, party: Party) -> None:
        """The scheduler declares an engine lost; nothing reaches or leaves it any more."""
        self.owners.pop(party)
        self._perform(
            self.scheduler.lose(party.engine, party.incarnation, LostCause.LEASE, self._now())
        )

    def step(self) -> bool:
        """Carry one message, or let one engine do one job; False when nothing is left to do."""
        if self._todo:
            self._todo.popleft()()
            return True
        if self.network.messages:
            self.network.deliver()
            for owner in self.owners.values():
                owner.poll()
            return True
        for owner in self.owners.values():
            job = owner.next_job()
            if job is not None:
                job()()
                return True
        waiting = any(owner.restless for owner in self.owners.values())
        for owner in self.owners.values():
            owner.tick()
            # A plane without threads has its answer at once.
            owner.poll()
        return waiting and bool(self._todo or self.network.messages)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Go on until a condition holds, or nothing is left to do."""
        for _ in range(MESSAGES_MAX):
            if until is not None and until():
                return
            if not self.step():
                assert until is None, "nothing is left to do, and the condition does not hold"
                return
        raise AssertionError(f"not quiet after {MESSAGES_MAX} messages")

    def settle(self) -> None:
        """Run to the end, and see every page come home and every rule hold."""
        self.run()
        report = replay(self.log)
        assert not report.findings, report.findings
        assert all(client.outcome is not None for client in self.clients.values())
        for owner in self.owners.values():
            core: EngineCore[Any] = owner.core
            assert core.allocator.free == owner.pool.pages, (core.party, core.allocator.free)
            assert owner.idle
            assert owner.pool.counters.reads_unchecked == 0

    def pages_of(self, client: Client) -> tuple[PageRun, ...]:
        """The pages that decode holds for a client's request now, in logical order."""
        held = self.decode.core.held_for(self.request_of(client))
        return tuple((r.first, r.count) for h in held for r in h.reserved.pages)

    # --- what a shell does --------------------------------------------------------------------

    def _now(self) -> int:
        return next(self._clock)

    def _hear(self, party: Party, item: Outgoing) -> None:
        if party not in self.owners:
            return
        if isinstance(item, NewTokens):
            effects = self.scheduler.tokens(
                party,
                item.request,
                item.attempt,
                first=item.first,
                tokens=item.tokens,
                texts=item.texts,
                logprobs=item.logprobs,
            )
        else:
            effects = self.scheduler.propose(item, self._now())
        self._perform(effects)

    def _perform(self, effects: list[SchedulerEffect]) -> None:
        for effect in effects:
            match effect:
                case Append(position, entry):
                    self.log.append((position, entry))
                case Publish():
                    self._todo.append(lambda effect=effect: self._publish(effect))  # type: ignore[misc]
                case Answer() if effect.party in self.owners:
                    owner = self.owners[effect.party]
                    self._todo.append(
                        lambda owner=owner, it=effect: owner.answer(  # type: ignore[misc]
                            it.number, it.position, it.rule
                        )
                    )
                case Synced(party):
                    self._todo.append(self.owners[party].end_sync)
                case TellTokens():
                    client = self.clients[effect.request]
                    assert effect.first == len(client.tokens)
                    client.tokens += effect.tokens
                    client.texts += effect.texts
                    client.logprobs += effect.logprobs
                case TellOutcome(request, outcome):
                    self.clients[request].outcome = outcome
                case _:
                    pass

    def let_through(self) -> None:
        """Publish what `hold` kept back, in order."""
        self.hold = lambda _effect: False
        held, self._held_back = self._held_back, deque()
        for effect in held:
            self._publish(effect)

    def _publish(self, effect: Publish) -> None:
        if effect.party not in self.owners:
            return
        # A rank's publications keep their order, so one that waits holds back all that follow.
        waits = any(effect.party == before.party for before in self._held_back)
        if waits or self.hold(effect):
            self._held_back.append(effect)
            return
        owner = self.owners[effect.party]
        owner.receive(effect.position, effect.entry, effect.payload)
        self.scheduler.acknowledge(effect.party, owner.core.position)
