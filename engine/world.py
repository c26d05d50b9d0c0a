"""A small world: the real cores between simulated streams, store, memory and time.

Owns: what can happen next, and what happens then.
Must not know: who chooses. A search calls `enabled`, `step`, `copy` and `key`; a finding is
raised as `Found` by whatever oracle saw it.

Every action is a name and whom it concerns; equal worlds enable equal actions in equal order.
"""

from __future__ import annotations

import attrs

from engine.core import LogDivergedError
from engine.effects import (
    Answer,
    Append,
    DecodeSlice,
    Payload,
    PrefillSlice,
    Publish,
    Step,
    Synced,
)
from engine.sequencer import SequencerError
from engine.world_kinds import kinds_of
from engine.world_memory import count_reads
from engine.world_values import Action, Client, Found, Tokens, as_found
from engine.world_writes import Writes
from lifecycle.events import (
    Aborted,
    Cause,
    Failed,
    Finished,
    FinishReason,
    LostCause,
    Proposal,
    Requeued,
)
from lifecycle.ids import EngineId, Party, RequestId
from lifecycle.state import LIVE

FORGED = 9_000
"""Tokens from here on are nobody's."""
EAGER_STEPS_MAX = 1_000
"""What may happen by itself after one action; broken code can keep itself busy for ever."""


class World(Writes):
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
        raise self.noted(
            Found("never-quiet", f"{EAGER_STEPS_MAX} actions by themselves, and no end")
        )

    def _step(self, action: Action) -> None:
        name, *whom = action
        if name in self.budget:
            self.budget[name] -= 1
            self.sometimes[name] += 1
        try:
            getattr(self, "_do_" + name.replace("-", "_"))(*whom)
            self.check()
        except Found as found:
            self.noted(found)
            raise
        except (SequencerError, LogDivergedError, ValueError) as error:
            raise self.noted(as_found(error)) from error

    def _do_submit(self) -> None:
        asked = self.scenario.asked[self.asked]
        self.asked += 1
        request = self.scheduler.mint()
        if request in self.clients:
            raise Found("id-minted-twice", f"{request} has two clients")
        self.clients[request] = Client(asked, self.epoch, since_ns=self.now)
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

    def _do_overdue(self) -> None:
        self.now = max(self.now + 1, min(self.settle_times()))
        self.perform(self.scheduler.tick(self.now))

    def _do_late(self) -> None:
        """Time passes, and the timer that should say so is late."""
        self.now = max(self.now + 1, self.next_deadline() or 0)

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
        if isinstance(message, Tokens):
            self._tokens(party, message)
            return
        line = self.scheduler.lines.get(party)
        if line is not None and message.number < line.expected:
            self.sometimes["repeated-proposal-answered"] += 1
        fresh = line is not None and message.number == line.expected
        known, before = fresh and self.holds(message), dict(self.scheduler.log.requests)
        effects = self.scheduler.propose(message, self.now)
        self.judge_repeat(message, known, effects)
        dropped = Answer(party, message.number, 0, "quiet-after-end") in effects
        said = [e.entry for e in effects if isinstance(e, Append)]
        ended = any(isinstance(entry.event, Aborted | Requeued) for entry in said)
        if isinstance(message.body, Failed) and dropped and ended:
            raise Found("dropped-though-taken", f"{message.request}: a failure that ended it")
        if isinstance(message.body, Failed) and message.body.cause is Cause.OUT_OF_PAGES:
            self.judge_yielding(before, message.request, said)
        self.perform(effects)

    def _tokens(self, party: Party, message: Tokens) -> None:
        count = len(message.tokens)
        self.perform(
            self.scheduler.tokens(
                party,
                message.request,
                message.attempt,
                first=message.first,
                tokens=message.tokens,
                texts=("",) * count,
                logprobs=(0.0,) * count,
            )
        )

    def _do_forge(self, party: Party, request: RequestId) -> None:
        attempt, held = (
            self.scheduler.log.state(request).attempt,
            self.scheduler.relays[request].held,
        )
        self._tokens(party, Tokens(request, attempt, held, (FORGED,)))

    def _do_down(self, party: Party) -> None:
        item, self.down[party] = self.down[party][0], self.down[party][1:]
        self._show(party, item)

    def _do_echo(self, party: Party) -> None:
        self._show(party, self.down[party][0])

    def _do_garble(self, party: Party) -> None:
        item, self.down[party] = self.down[party][0], self.down[party][1:]
        assert isinstance(item, Publish)
        assert item.payload is not None
        other = tuple(token + FORGED for token in item.payload.tokens)
        payload = attrs.evolve(item.payload, tokens=other)
        self._show(party, attrs.evolve(item, payload=payload))

    def _show(self, party: Party, item: Publish | Synced) -> None:
        core = self.cores[party]
        if isinstance(item, Publish):
            self.act(party, core.receive(item.position, item.entry, item.payload))
            self.judge_guest(party, item.entry)
            self.judge_loss(party, item.entry)
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

    def _do_torn(self) -> None:
        """The machine stops while it writes: of what was not durable a part is there."""
        self.durable += (len(self.stored) - self.durable) // 2
        self._do_crash()

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
        lasts = {entry.request: position for position, entry in self.stored}
        self.perform(self.scheduler.resume(self.stored, self.now, last_of=lasts.get))

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
            self._judge_slice(party, part)
            if isinstance(part, DecodeSlice):
                self._read(party, part, part.position, wrong)
        self.steps[party] = (step, wrong)

    def _judge_slice(self, party: Party, part: DecodeSlice | PrefillSlice) -> None:
        """A step computes for those whose attempt runs, and with the prompt that was asked."""
        if isinstance(part, PrefillSlice) and part.count < 1:
            raise Found("ill-formed", f"{party} computes nothing for {part.request}")
        if self._over(party, part.request, part.attempt):
            raise Found("stepped-after-end", f"{party} computes for {part.request}, which is over")
        tokens = self.cores[party].jobs[part.request].payload.tokens
        if max(tokens) >= FORGED:
            raise Found("wrong-prompt", f"{party} computes {tokens} for {part.request}")

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
        effects = self.cores[party].step_ended(step, failed=failed)
        self.judge_failures(party, step, effects)
        self.act(party, effects)

    def _over(self, party: Party, request: RequestId, attempt: int) -> bool:
        state = self.cores[party].log.state(request)
        return state.phase not in LIVE or state.attempt != attempt
