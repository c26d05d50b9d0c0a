"""A small world: the real cores between simulated streams, store, memory and time.

Owns: what can happen next, and what happens then.
Must not know: who chooses. A search calls `enabled`, `step`, `copy` and `key`; a finding is
raised as `Found` by whatever oracle saw it.

Every action is a name and whom it concerns; equal worlds enable equal actions in equal order.
"""

from __future__ import annotations

import attrs

from engine.allocator import AllocatorError
from engine.core import LogDivergedError
from engine.effects import DecodeSlice, Payload, Post, PrefillSlice, Publish, Step
from engine.prefill import Posted
from engine.sequencer import SequencerError
from engine.world_kinds import kinds_of
from engine.world_memory import Write, count_reads
from engine.world_options import Key, Options
from engine.world_values import EYES, Action, Client, Found, Tokens
from lifecycle.events import (
    Cause,
    Drained,
    Failed,
    Finished,
    FinishReason,
    LostCause,
    Proposal,
    Verified,
)
from lifecycle.ids import EngineId, Party, RequestId
from lifecycle.state import LIVE

EAGER_STEPS_MAX = 1_000
"""What may happen by itself after one action; broken code can keep itself busy for ever."""


class World(Options):
    """The real cores, and everything around them that may go wrong."""

    # --- what happens -------------------------------------------------------------------------

    def step(self, action: Action) -> None:
        """Do one thing, then whatever happens by itself. Raises Found."""
        self._step(action)
        if self.scenario.eager:
            self._let_happen()

    def _let_happen(self) -> None:
        for _ in range(EAGER_STEPS_MAX):
            due = next((a for a in self.enabled() if a[0] in self.scenario.eager), None)
            if due is None:
                return
            self._step(due)
        self.hint = EYES["never-quiet"]
        raise Found("never-quiet", f"{EAGER_STEPS_MAX} actions by themselves, and no end")

    def _step(self, action: Action) -> None:
        name, *whom = action
        if name in self.budget:
            self.budget[name] -= 1
            self.sometimes[name] += 1
        try:
            getattr(self, "_do_" + name.replace("-", "_"))(*whom)
            self.check()
        except Found as found:
            self.hint = self.hint or EYES.get(found.name, "")
            raise
        except SequencerError as error:
            rule = error.violation.rule
            raise Found("sequencer", str(error), rule=rule) from error
        except LogDivergedError as error:
            raise Found("log-diverged", str(error), rule=error.rule) from error
        except AllocatorError as error:
            self.hint = EYES["allocator"]
            raise Found("allocator", str(error)) from error
        except ValueError as error:
            self.hint = EYES["ill-formed"]
            raise Found("ill-formed", str(error)) from error

    def _do_submit(self) -> None:
        asked = self.scenario.asked[self.asked]
        self.asked += 1
        request = self.scheduler.mint()
        if request in self.clients:
            raise Found("id-minted-twice", f"{request} has two clients")
        self.clients[request] = Client(asked, self.epoch)
        self.perform(
            self.scheduler.submit(
                request,
                tenant="t",
                payload=Payload(tuple(range(asked.prompt_tokens))),
                new_tokens_max=asked.new_tokens,
                deadline_ns=self.now + asked.deadline_ns,
                now_ns=self.now,
            )
        )

    def _do_cancel(self, request: RequestId) -> None:
        self.perform(self.scheduler.cancel(request, Cause.CLIENT_CANCEL, "client", self.now))

    def _do_tick(self) -> None:
        self.now = max(self.now + 1, self.next_deadline() or 0)
        self.perform(self.scheduler.tick(self.now))

    # --- streams ------------------------------------------------------------------------------

    def _do_up(self, party: Party) -> None:
        message, self.up[party] = self.up[party][0], self.up[party][1:]
        self._hear(party, message)

    def _do_repeat(self, party: Party) -> None:
        self._hear(party, self.up[party][0])

    def _do_lose(self, party: Party) -> None:
        self.up[party] = self.up[party][1:]

    def _do_swap(self, party: Party) -> None:
        first, second, *rest = self.up[party]
        self.up[party] = (second, first, *rest)

    def _hear(self, party: Party, message: Proposal | Tokens) -> None:
        if isinstance(message, Proposal):
            line = self.scheduler.lines.get(party)
            if line is not None and message.number < line.expected:
                self.sometimes["repeated-proposal-answered"] += 1
            self.perform(self.scheduler.propose(message, self.now))
            return
        blank = ("",) * len(message.tokens)
        self.perform(
            self.scheduler.tokens(
                party,
                message.request,
                message.attempt,
                first=message.first,
                tokens=message.tokens,
                texts=blank,
                logprobs=(0.0,) * len(message.tokens),
            )
        )

    def _do_down(self, party: Party) -> None:
        item, self.down[party] = self.down[party][0], self.down[party][1:]
        core = self.cores[party]
        if isinstance(item, Publish):
            self.act(party, core.receive(item.position, item.entry, item.payload))
            self.scheduler.acknowledge(party, core.position)
            life = core.log.fleet.life(party.engine, party.incarnation)
            if life is not None and life.lost is not None:
                self.must_leave |= {party.engine}
        else:
            self.act(party, core.end_sync())

    def _do_answer(self, party: Party) -> None:
        item, self.answers[party] = self.answers[party][0], self.answers[party][1:]
        core = self.cores[party]
        self.act(party, core.answer(item.number, item.position, item.rule))

    def _do_retransmit(self, party: Party) -> None:
        self.repeat(party)

    def _do_break(self, party: Party) -> None:
        self.cut(party)

    def _do_connect(self, party: Party) -> None:
        self.connect(party)

    def _do_flush(self) -> None:
        self.durable = len(self.stored)
        self.settle_durable()

    # --- lives --------------------------------------------------------------------------------

    def _do_crash(self) -> None:
        lost = [entry for _, entry in self.stored[self.durable :]]
        for entry in lost:
            self.sometimes["lost-" + type(entry.event).__name__] += 1
        self.judge_log()
        del self.stored[self.durable :]
        self._do_process_crash()

    def _do_process_crash(self) -> None:
        if self.scenario.flush_at_start:
            # What a new life shows as its log must not be forgotten by the next crash.
            self.durable = len(self.stored)
        self.outcomes = ()
        for party in self.cores:
            self.cut(party)
        for request, client in self.clients.items():
            if client.told is None:
                self.clients[request] = attrs.evolve(client, gone=True, ended=True)
            elif self.logged_outcome(request) != client.told:
                raise Found("answer-before-durable", f"{request} was told what the log forgot")
        self.scheduler = self._new_scheduler()
        self.perform(self.scheduler.resume(tuple(self.stored), self.now))

    def _do_restart(self, engine: EngineId) -> None:
        self.new_life(engine)

    def _do_rejoin(self, engine: EngineId) -> None:
        self.sometimes["rejoined"] += 1
        self.new_life(engine)

    def _do_declare_lost(self, engine: EngineId) -> None:
        incarnation = self.incarnations[engine]
        self.perform(self.scheduler.lose(engine, incarnation, LostCause.LEASE, self.now))

    # --- steps --------------------------------------------------------------------------------

    def _do_step(self, party: Party) -> None:
        core = self.cores[party]
        step = core.plan_step()
        if step is None:
            return
        wrong: dict[RequestId, int] = {}
        for part in step.slices:
            if isinstance(part, DecodeSlice):
                self._read(party, part, part.position, wrong)
        self.steps[party] = (step, wrong)

    def _read(
        self, party: Party, part: DecodeSlice, count: int, wrong: dict[RequestId, int]
    ) -> None:
        core = self.cores[party]
        admitted = core.log.state(part.request).admitted
        if self.scenario.kinds > 1 and admitted is not None:
            kinds = kinds_of(self.scenario.kinds)[1:]
            self.memory.read_kinds(core, part, admitted.prompt_tokens - 1, kinds)
        page = self.memory.read(core, part, count)
        if page is not None:
            if not self.scenario.faults.get("lie"):
                raise Found("isolation", f"{part.request}: page {page} bears a foreign header")
            self.sometimes["isolation-detected"] += 1
            wrong[part.request] = page

    def _do_step_end(self, party: Party) -> None:
        step, wrong = self.steps.pop(party)
        if any(self._over(party, part.request, part.attempt) for part in step.slices):
            self.sometimes["step-outlived-its-request"] += 1
        if party in self.prefill_parties():
            for part in step.slices:
                if isinstance(part, PrefillSlice):
                    self.memory.compute(self.cores[party], part)
            self.act(party, self.prefill(party).step_ended(step))
            return
        self._decoded(party, step, wrong)

    def _decoded(self, party: Party, step: Step, wrong: dict[RequestId, int]) -> None:
        core = self.decode(party)
        finished: dict[RequestId, Finished] = {}
        failed: dict[RequestId, Failed] = {}
        for part in step.slices:
            assert isinstance(part, DecodeSlice)
            self.memory.append(core, part)
            self._read(party, part, part.position + 1, wrong)
            if part.request in wrong:
                page = wrong[part.request]
                failed[part.request] = Failed(Cause.ISOLATION_VIOLATION, "header", page)
                continue
            message = Tokens(part.request, part.attempt, part.index, (part.position,))
            if party in self.connected:
                self.up[party] = (*self.up[party], message)
            admitted = core.log.state(part.request).admitted
            if admitted is not None and part.index + 1 >= admitted.new_tokens_max:
                reads = count_reads(part, self.scenario.page_tokens)
                finished[part.request] = Finished(
                    FinishReason.LENGTH, part.index + 1, 1, b"", reads, reads, 0
                )
        self.act(party, core.step_ended(step, failed=failed, finished=finished))

    def _do_step_fails(self, party: Party) -> None:
        step, _ = self.steps.pop(party)
        failed = {s.request: Failed(Cause.ENGINE_FAILED, "injected") for s in step.slices}
        if party in self.prefill_parties():
            self.act(party, self.prefill(party).step_ended(step, failed))
        else:
            self.act(party, self.decode(party).step_ended(step, failed=failed))

    def _over(self, party: Party, request: RequestId, attempt: int) -> bool:
        state = self.cores[party].log.state(request)
        return state.phase not in LIVE or state.attempt != attempt

    # --- memory -------------------------------------------------------------------------------

    def _do_verify(self, index: int) -> None:
        party, asked = self.verifies[index]
        self.verifies = self.verifies[:index] + self.verifies[index + 1 :]
        core = self.decode(party)
        total, result = 0, None
        for reserved, tokens, _, digest in asked.writes:
            pages, wrong = self.memory.verify(core, reserved, tokens, digest)
            total += pages
            if wrong is not None:
                if not self.scenario.faults.get("lie"):
                    raise Found("isolation", f"{asked.request}: page {wrong} fails its check")
                result = Failed(Cause.ISOLATION_VIOLATION, "verify", wrong)
        if result is None:
            job = core.jobs.get(asked.request)
            grants = tuple(r.grant for r in job.reserved) if job is not None else ()
            named = tuple(dict.fromkeys(w[0].grant for w in asked.writes)) or grants
            if not named:
                result = Failed(Cause.ENGINE_FAILED, "nothing to verify")
            else:
                verified = Verified(named, total, total, total, "world")
                self.act(party, core.verify_ended(asked.request, asked.attempt, verified))
                return
        self.act(party, core.verify_ended(asked.request, asked.attempt, result))

    def _do_fenced(self, index: int) -> None:
        party, fence = self.fences[index]
        self.fences = self.fences[:index] + self.fences[index + 1 :]
        self.refused |= {(fence.grant, fence.party)}
        self.act(party, self.decode(party).fence_ended(fence.grant, fence.party))

    def _do_land(self, party: Party, ticket: int) -> None:
        write = self.writes[(party, ticket)]
        post = write.post
        owner = self.cores[post.grant.owner]
        if self.scheduler.log.state(post.request).phase not in LIVE:
            self.sometimes["landed-after-end"] += 1
        if write.orphan:
            self.sometimes["landed-from-a-dead-writer"] += 1
        if self.layout(write.party) != self.layout(post.grant.owner):
            raise Found("wrong-offset", f"ticket {ticket} is laid out as {self.layout(party)}")
        try:
            self.memory.land(owner, write)
        except Found as found:
            if found.name == "late-write":
                self.hint = self._late(write)
            raise
        self.writes[(party, ticket)] = attrs.evolve(write, landed=write.landed + 1)

    def _late(self, write: Write) -> str:
        """The rule that a write breaks which lands too late, where the log itself is clean."""
        grant, party = write.post.grant, write.party
        if grant.owner not in self.cores:
            return "incarnation-fences"
        said = [e.event for _, e in self.stored if getattr(e.event, "grant", None) == grant]
        if not said:
            return "acted-after-logged"
        drained = any(isinstance(event, Drained) and event.party == party for event in said)
        return "drained-is-final" if drained else "quiet-after-end"

    def _do_reland(self, party: Party, ticket: int) -> None:
        self._do_land(party, ticket)

    def _do_lie(self, party: Party, ticket: int) -> None:
        self._do_land(party, ticket)

    def _end(self, key: Key, how: Posted) -> None:
        write = self.writes.pop(key)
        if write.doubted:
            self.sometimes["doubt-resolved"] += 1
        if how is Posted.DONE and self._may("lie"):
            content = self.memory.content(write)
            self.writes[key] = attrs.evolve(write, ended=True, content=content)
        size, digest = self._count(write.post), self.digests.pop(key)
        core = self.prefill(key[0])
        self.act(key[0], core.post_ended(key[1], how, size_bytes=size, digest=digest))

    @staticmethod
    def _count(post: Post) -> int:
        return max(1, post.tokens.count)

    def _do_done(self, party: Party, ticket: int) -> None:
        self._end((party, ticket), Posted.DONE)

    def _do_failed(self, party: Party, ticket: int) -> None:
        self._end((party, ticket), Posted.FAILED)

    def _do_fail(self, party: Party, ticket: int) -> None:
        self._end((party, ticket), Posted.FAILED)

    def _do_doubt(self, party: Party, ticket: int) -> None:
        self.writes[(party, ticket)] = attrs.evolve(self.writes[(party, ticket)], doubted=True)
        self.act(party, self.prefill(party).post_ended(ticket, Posted.IN_DOUBT))

    def _do_hang(self, party: Party, ticket: int) -> None:
        self._do_doubt(party, ticket)
        self.writes[(party, ticket)] = attrs.evolve(self.writes[(party, ticket)], silent=True)
