"""The three sans-IO cores driven in one thread: no sockets, no store, no memory, no clock.

Owns: channels between scheduler and engines, each in order, and who is served next.
Must not know: what the cores decide; every write succeeds and every comparison agrees, unless a
test says otherwise.

Whatever can happen next is the head of some channel; `pick` chooses among the heads, oldest
first, so that `lambda n: 0` is first come first served and a drawn number is an interleaving.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from engine.decode import DecodeCore
from engine.digests import keyed_digest
from engine.effects import (
    Answer,
    Append,
    EngineEffect,
    Fence,
    Payload,
    Post,
    Propose,
    Publish,
    SchedulerEffect,
    Step,
    Synced,
    TellClosed,
    TellOutcome,
    TellTokens,
    VerifyPages,
)
from engine.prefill import Posted, PrefillCore
from engine.scheduler import Scheduler
from lifecycle.decide import Limits
from lifecycle.events import (
    Aborted,
    Attached,
    Cause,
    Entry,
    Failed,
    FenceScope,
    Finished,
    FinishReason,
    LostCause,
    Rejected,
    Role,
    Verified,
)
from lifecycle.ids import EngineId, Party, RequestId, count_pages
from lifecycle.state import Phase

DIGEST = keyed_digest(b"key")
PAGE_TOKENS = 4
FOREVER_NS = 10**15
PREFILL = Party(EngineId("p0"), 1, 0)
DECODE = Party(EngineId("d0"), 1, 0)

Core = PrefillCore | DecodeCore
Action = Callable[[], None]
Pick = Callable[[int], int]


def first_come(_enabled: int) -> int:
    """Serve the oldest."""
    return 0


@attrs.frozen
class Sizes:
    """How large the small world is."""

    pages: int = 8
    staging: int = 2
    slots: int = 8
    chunk_tokens: int = 8
    growth_tokens: int = 4
    context_tokens: int = 64
    attempts_max: int = 4
    settle_ns: int = 1_000_000
    queue_limit: int = 64
    queue_ns: int = FOREVER_NS
    engine_wait_ns: int = 0
    fence_scope: FenceScope = FenceScope.GRANT


class Driver:
    """One scheduler life at a time, and its engines."""

    def __init__(self, sizes: Sizes | None = None, *, pick: Pick = first_come) -> None:
        """Begin with an empty store and no engine."""
        self.sizes = Sizes() if sizes is None else sizes
        self.pick = pick
        self.now_ns = 1
        self.log: list[tuple[int, Entry]] = []
        self.effects: list[SchedulerEffect] = []
        self.engine_effects: list[tuple[Party, EngineEffect]] = []
        self.outcomes: dict[RequestId, Finished | Aborted | Rejected] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.closed: list[RequestId] = []
        self.cores: dict[Party, Core] = {}
        self.attached: dict[Party, Attached] = {}
        self.channels: dict[tuple[str, Party], deque[tuple[int, Action]]] = {}
        self.posted: Callable[[Post], Posted] = lambda _post: Posted.DONE
        self.compared: Callable[[VerifyPages, Verified], Verified | Failed] = lambda _v, good: good
        self.counted: Callable[[Finished], Finished] = lambda good: good
        self._tags = itertools.count(1)
        self._age = itertools.count()
        self.scheduler = self._scheduler(epoch=1)
        self.perform(self.scheduler.resume([], self.now_ns))

    def _scheduler(self, epoch: int) -> Scheduler:
        sizes = self.sizes
        limits = Limits(
            context_tokens=sizes.context_tokens,
            growth_tokens=sizes.growth_tokens,
            attempts_max=sizes.attempts_max,
            settle_ns=sizes.settle_ns,
        )
        return Scheduler(
            limits=limits,
            epoch=epoch,
            digest=DIGEST,
            queue_limit=sizes.queue_limit,
            queue_ns=sizes.queue_ns,
            engine_wait_ns=sizes.engine_wait_ns,
        )

    # --- engines ------------------------------------------------------------------------------

    def join(self, role: Role, party: Party, **changes: Any) -> Core:
        """Attach a new life of an engine, with one rank, and bring it up to date."""
        sizes = self.sizes
        attached = Attached(
            engine=party.engine,
            incarnation=party.incarnation,
            role=role,
            ranks=1,
            pages=sizes.pages,
            page_tokens=PAGE_TOKENS,
            layers=2,
            slots=sizes.slots,
            context_tokens=sizes.context_tokens,
            layout="layout",
            endpoints=("endpoint",),
            plane="naive",
            fence_scope=sizes.fence_scope,
        )
        attached = attrs.evolve(attached, **changes)
        core: Core
        if role is Role.PREFILL:
            core = PrefillCore(
                party,
                pages=attached.pages,
                page_tokens=PAGE_TOKENS,
                mint=lambda: next(self._tags),
                staging=sizes.staging,
                chunk_tokens=sizes.chunk_tokens,
                digest=DIGEST,
            )
        else:
            core = DecodeCore(
                party,
                pages=attached.pages,
                page_tokens=PAGE_TOKENS,
                mint=lambda: next(self._tags),
                batch=4,
                growth_tokens=sizes.growth_tokens,
                digest=DIGEST,
            )
        self.perform(self.scheduler.attach(attached, self.now_ns))
        self.cores[party], self.attached[party] = core, attached
        self._connect(party)
        return core

    def pair(self) -> Driver:
        """Join one prefill and one decode engine."""
        self.join(Role.PREFILL, PREFILL)
        self.join(Role.DECODE, DECODE)
        return self

    def _connect(self, party: Party) -> None:
        core = self.cores[party]
        epoch, position = core.epoch, core.position
        if epoch != self.scheduler.epoch:
            core.begin_sync(self.scheduler.epoch)
        self.perform(
            self.scheduler.connect(
                party,
                epoch=epoch,
                position=position,
                next_number=core.next_number,
                now_ns=self.now_ns,
            )
        )

    def kill(self, party: Party, cause: LostCause = LostCause.LEASE) -> None:
        """The engine is gone with all that it had in flight, and the scheduler knows it."""
        self._forget(party)
        self.perform(self.scheduler.lose(party.engine, party.incarnation, cause, self.now_ns))

    def _forget(self, party: Party) -> None:
        del self.cores[party]
        for key in [key for key in self.channels if key[1] == party]:
            del self.channels[key]

    def restart(self) -> None:
        """The scheduler dies; its next life resumes from the store, and the engines come back."""
        for key in [key for key in self.channels if key[0] in {"in", "out"}]:
            del self.channels[key]
        self.scheduler = self._scheduler(epoch=self.scheduler.epoch + 1)
        lasts = {entry.request: position for position, entry in self.log}
        self.perform(self.scheduler.resume(tuple(self.log), self.now_ns, last_of=lasts.get))
        for party in self.cores:
            self.perform(self.scheduler.attach(self.attached[party], self.now_ns))
            self._connect(party)

    # --- clients ------------------------------------------------------------------------------

    def submit(
        self,
        prompt: int = 7,
        new: int = 10,
        *,
        tenant: str = "tenant",
        deadline_ns: int = FOREVER_NS,
    ) -> RequestId:
        """A client asks for `new` tokens after a prompt of that length."""
        request = self.scheduler.mint()
        self.perform(
            self.scheduler.submit(
                request,
                tenant=tenant,
                payload=Payload(tuple(range(prompt))),
                new_tokens_max=new,
                deadline_ns=deadline_ns,
                now_ns=self.now_ns,
            )
        )
        return request

    def cancel(self, request: RequestId, cause: Cause = Cause.CLIENT_CANCEL) -> None:
        """A client, or its deadline, ends a request."""
        self.perform(self.scheduler.cancel(request, cause, "client", self.now_ns))

    def tick(self, now_ns: int | None = None) -> None:
        """Let the scheduler look at the time."""
        self.now_ns = self.now_ns if now_ns is None else now_ns
        self.perform(self.scheduler.tick(self.now_ns))

    # --- effects ------------------------------------------------------------------------------

    def _queue(self, channel: str, party: Party, action: Action) -> None:
        if party in self.cores:
            line = self.channels.setdefault((channel, party), deque())
            line.append((next(self._age), action))

    def perform(self, effects: list[SchedulerEffect]) -> None:
        """Do what the scheduler asks."""
        self.effects += effects
        for effect in effects:
            match effect:
                case Append():
                    self.log.append((effect.position, effect.entry))
                case Publish():
                    self._queue("in", effect.party, partial(self._receive, effect))
                case Answer():
                    self._queue("in", effect.party, partial(self._answered, effect))
                case Synced():
                    self._queue("in", effect.party, partial(self._synced, effect))
                case TellOutcome():
                    assert effect.request not in self.outcomes, "a client is answered once"
                    self.outcomes[effect.request] = effect.outcome
                case TellTokens():
                    have = self.tokens.setdefault(effect.request, [])
                    assert effect.first == len(have), "tokens come in order, without gaps"
                    have.extend(effect.tokens)
                case TellClosed():
                    self.closed.append(effect.request)
                case _:
                    pass

    def _receive(self, effect: Publish) -> None:
        core = self.cores[effect.party]
        self._obey(effect.party, core.receive(effect.position, effect.entry, effect.payload))
        self.scheduler.acknowledge(effect.party, core.position)

    def _answered(self, effect: Answer) -> None:
        core = self.cores[effect.party]
        self._obey(effect.party, core.answer(effect.number, effect.position, effect.rule))

    def _synced(self, effect: Synced) -> None:
        self._obey(effect.party, self.cores[effect.party].end_sync())

    def _obey(self, party: Party, effects: list[EngineEffect]) -> None:
        self.engine_effects += [(party, effect) for effect in effects]
        for effect in effects:
            match effect:
                case Propose():
                    self._queue("out", party, partial(self._propose, effect))
                case Post():
                    self._queue("posts", party, partial(self._post, party, effect))
                case VerifyPages():
                    self._queue("checks", party, partial(self._compare, party, effect))
                case Fence():
                    self._queue("checks", party, partial(self._fenced, party, effect))
                case _:
                    pass

    def _propose(self, effect: Propose) -> None:
        self.perform(self.scheduler.propose(effect.proposal, self.now_ns))

    def _post(self, party: Party, post: Post) -> None:
        core = self.cores[party]
        assert isinstance(core, PrefillCore)
        self._obey(party, core.post_ended(post.ticket, self.posted(post), size_bytes=64, digest=7))

    def _compare(self, party: Party, asked: VerifyPages) -> None:
        core = self.cores[party]
        assert isinstance(core, DecodeCore)
        pages = sum(count_pages(write[2]) for write in asked.writes)
        grants = tuple(r.grant for r in core.jobs[asked.request].reserved)
        good = Verified(grants, pages, pages, pages, "wsum32")
        result = self.compared(asked, good)
        self._obey(party, core.verify_ended(asked.request, asked.attempt, result))

    def _fenced(self, party: Party, fence: Fence) -> None:
        core = self.cores[party]
        assert isinstance(core, DecodeCore)
        self._obey(party, core.fence_ended(fence.grant, fence.party))

    # --- steps --------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Whoever has no pass in flight begins one, if there is anything to compute."""
        for party, core in self.cores.items():
            if not core.running and not core.syncing:
                step = core.plan_step()
                if step is not None:
                    self._queue("steps", party, partial(self._stepped, party, step))

    def _stepped(self, party: Party, step: Step) -> None:
        core = self.cores[party]
        if isinstance(core, PrefillCore):
            self._obey(party, core.step_ended(step))
            return
        ended: dict[RequestId, Finished] = {}
        for part in step.slices:
            state = core.log.state(part.request)
            token = getattr(part, "position", 0)
            index = getattr(part, "index", 0)
            self._queue(
                "out",
                party,
                partial(
                    self.relay, party, part.request, part.attempt, first=index, tokens=(token,)
                ),
            )
            most = state.admitted.new_tokens_max if state.admitted else 0
            if index + 1 == most and state.phase is Phase.DECODING:
                good = Finished(FinishReason.LENGTH, most, 1, b"", 1, 1, 0)
                ended[part.request] = self.counted(good)
        self._obey(party, core.step_ended(step, finished=ended))

    def relay(
        self,
        party: Party,
        request: RequestId,
        attempt: int,
        *,
        first: int,
        tokens: tuple[int, ...],
    ) -> None:
        """Tokens from a decode engine arrive at the scheduler."""
        self.perform(
            self.scheduler.tokens(
                party,
                request,
                attempt,
                first=first,
                tokens=tokens,
                texts=("x",) * len(tokens),
                logprobs=(0.0,) * len(tokens),
            )
        )

    # --- time ---------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Let one thing happen; False when nothing can."""
        self._plan()
        heads = sorted((line[0][0], key) for key, line in self.channels.items() if line)
        if not heads:
            return False
        _, key = heads[self.pick(len(heads)) % len(heads)]
        _, action = self.channels[key].popleft()
        self.now_ns += 1
        action()
        return True

    def run(self, most: int = 20_000) -> Driver:
        """Go on until nothing can happen; a world that never comes to rest is an error."""
        for _ in range(most):
            if not self.advance():
                return self
        msg = f"not at rest after {most} steps"
        raise AssertionError(msg)

    def run_until(self, done: Callable[[], bool], most: int = 20_000) -> Driver:
        """Go on until something is so."""
        for _ in range(most):
            if done():
                return self
            assert self.advance(), "at rest before it was so"
        msg = f"not so after {most} steps"
        raise AssertionError(msg)

    def events(self, request: RequestId) -> list[str]:
        """The names of a request's events, in order."""
        return [type(e.event).__name__ for _, e in self.log if e.request == request]

    def phase(self, request: RequestId) -> Phase:
        """The request's phase; a closed request that was forgotten is NEW to the scheduler."""
        return self.scheduler.log.state(request).phase
