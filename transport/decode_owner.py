"""The owner of a decode engine's core: it exposes pages, checks what arrived, decodes.

Owns: how decode's effects are performed, and the tokens that are held until a request closes.
Must not know: streams, tasks, threads.
"""

from __future__ import annotations

from functools import partial

import attrs

from engine.dataplane import DataPlane, ObservedExit
from engine.dataplane_errors import DataPlaneError, GrantEnded
from engine.decode import DecodeCore, DecodeJob
from engine.effects import (
    DecodeSlice,
    EngineEffect,
    Expose,
    Fence,
    Retire,
    Step,
    VerifyPages,
)
from engine.runner import StepResult, grant_spans
from engine.runner_decode import DecodeRunner, Order
from engine.sampler import SamplingParams
from lifecycle.events import Failed, Finished, Verified
from lifecycle.ids import GrantId, Party, RequestId
from transport.engine_owner import (
    Continuation,
    Job,
    NewTokens,
    Note,
    Owner,
    Send,
    nothing,
)
from transport.process_ends import Watched


@attrs.define
class _Held:
    """The tokens of an attempt, kept so that they can be sent again."""

    attempt: int
    tokens: list[int] = attrs.Factory(list)
    texts: list[str] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    stop: str | int | None = None


class DecodeOwner(Owner[DecodeCore]):
    """Exposes pages, checks what arrived, decodes."""

    def __init__(
        self,
        core: DecodeCore,
        runner: DecodeRunner,
        *,
        plane: DataPlane,
        send: Send,
        note: Note,
    ) -> None:
        super().__init__(core, plane=plane, pool=runner.pool, send=send, note=note)
        self.runner = runner
        self._held: dict[RequestId, _Held] = {}
        self._fencing: dict[tuple[GrantId, Party], None] = {}
        self._writers: dict[Party, Watched] = {}

    def repeat(self) -> None:
        for request, held in self._held.items():
            self._send(
                NewTokens(
                    request,
                    held.attempt,
                    0,
                    tuple(held.tokens),
                    tuple(held.texts),
                    tuple(held.logprobs),
                    held.stop,
                )
            )
        super().repeat()

    def process(self, party: Party, process: str) -> None:
        for known in tuple(self._writers):
            self._see_end(known)
            earlier = known.engine == party.engine and known.incarnation < party.incarnation
            if earlier and known in self._writers and not self._awaited(known):
                # Its process has begun another life, and nothing waits for its end any more.
                self._writers.pop(known).close()
        if process and party not in self._writers:
            self._writers[party] = Watched(process)

    def _awaited(self, party: Party) -> bool:
        return any(fenced == party for _, fenced in self._fencing)

    def _see_end(self, party: Party) -> None:
        """Tell the plane once that a writer's process is gone, which may be its only proof."""
        watched = self._writers.get(party)
        if watched is None or not watched.ended():
            return
        del self._writers[party]
        observed = ObservedExit(party=str(party), pid=watched.process_id)
        self.plane.fence_party(str(party), observed)

    def exposed(self, grant: GrantId) -> bool:
        return any(grant in job.exposed for job in self.core.jobs.values())

    def poll(self) -> None:
        for grant, party in tuple(self._fencing):
            self._fence(grant, party)

    @property
    def restless(self) -> bool:
        return bool(self._fencing)

    def _perform_one(self, effect: EngineEffect) -> None:
        match effect:
            case Expose(reserved):
                spans = grant_spans(self.pool.layout, reserved.pages, pool_pages=self.pool.pages)
                parties = [str(party) for party in reserved.parties]
                try:
                    self.plane.expose(str(reserved.grant), spans=spans, parties=parties)
                except GrantEnded:
                    self.note("grant_not_exposed", grant=str(reserved.grant))
            case Retire(grant):
                self.plane.retire(str(grant))
            case Fence(grant, party):
                self._fencing[grant, party] = None
                self._fence(grant, party)
                if (grant, party) in self._fencing:
                    self.note("lost_writer_not_proven", party=str(party))
            case VerifyPages():
                grants = tuple(r.grant for r in self.core.jobs[effect.request].reserved)
                self._jobs.append(partial(self._verify_job, effect, grants))
            case _:
                pass

    def _fence(self, grant: GrantId, party: Party) -> None:
        """Ask for the proof that the party is shut out; without one its pages stay quarantined."""
        if grant not in self.core.holdings:
            self._fencing.pop((grant, party), None)
            return
        try:
            self._see_end(party)
            proof = self.plane.fence_party(str(party))
        except DataPlaneError as error:
            self.note("fence_refused", party=str(party), reason=str(error))
            proof = None
        if proof is not None:
            self._fencing.pop((grant, party), None)
            self.perform(self.core.fence_ended(grant, party))

    def _verify_job(self, effect: VerifyPages, grants: tuple[GrantId, ...]) -> Continuation:
        result = self.runner.verify(effect, grants)
        return partial(self._verified, effect, result)

    def _verified(self, effect: VerifyPages, result: Verified | Failed) -> None:
        self.perform(self.core.verify_ended(effect.request, effect.attempt, result))

    def _step_job(self) -> Job | None:
        step = self.core.plan_step()
        if step is None:
            return None
        orders = {
            part.request: self._order(part.request)
            for part in step.slices
            if isinstance(part, DecodeSlice)
        }
        return partial(self._run, step, orders)

    def _order(self, request: RequestId) -> Order:
        job = self.core.jobs[request]
        payload = job.payload
        admitted = self.core.log.state(request).admitted
        assert admitted is not None, "what is planned for a step is admitted"
        return Order(payload.tokens, payload.relayed, _sampling(job), admitted.new_tokens_max)

    def _run(self, step: Step, orders: dict[RequestId, Order]) -> Continuation:
        result = self.runner.run(step, orders)
        return partial(self._stepped, step, result)

    def _stepped(self, step: Step, result: StepResult) -> None:
        for part in step.slices:
            token = result.tokens.get(part.request)
            job = self.core.jobs.get(part.request)
            if token is None or job is None or job.attempt != part.attempt:
                continue
            held = self._held.get(part.request)
            if held is None or held.attempt != part.attempt:
                held = self._held[part.request] = _Held(part.attempt)
            held.tokens.append(token.token)
            held.texts.append(token.text)
            logprobs = () if token.logprob is None else (token.logprob,)
            held.logprobs += logprobs
            held.stop = token.stop
            self._send(
                NewTokens(
                    part.request,
                    part.attempt,
                    token.index,
                    (token.token,),
                    (token.text,),
                    logprobs,
                    token.stop,
                )
            )
        finished: dict[RequestId, Finished] = result.finished
        self.perform(self.core.step_ended(step, failed=result.failed, finished=finished))

    def _forget_job(self, request: RequestId) -> Continuation:
        self.runner.forget(request)
        return nothing

    def _forgotten(self, request: RequestId) -> None:
        self._held.pop(request, None)

    def _computed(self) -> tuple[int, int, int]:
        runner = self.runner
        return runner.prompt_tokens_computed, runner.tokens_sampled, runner.steps


def _sampling(job: DecodeJob) -> SamplingParams:
    """What came beside the admission; the cores carry it without looking."""
    sampling = job.payload.sampling
    return sampling if isinstance(sampling, SamplingParams) else SamplingParams()
