"""The owner of a prefill engine's core: it computes, packs and posts.

Owns: how prefill's effects are performed.
Must not know: streams, tasks, threads.
"""

from __future__ import annotations

from functools import partial

from engine.dataplane import DataPlane
from engine.effects import (
    EngineEffect,
    Post,
    PrefillSlice,
    Step,
)
from engine.prefill import PrefillCore
from engine.runner_prefill import PrefillRunner
from lifecycle.ids import GrantId, Party, RequestId
from transport.engine_owner import (
    Continuation,
    Job,
    Note,
    Owner,
    Send,
    nothing,
)
from transport.engine_posts import Posts


class PrefillOwner(Owner[PrefillCore]):
    """Computes prompts, packs and posts."""

    def __init__(
        self,
        core: PrefillCore,
        runner: PrefillRunner,
        *,
        plane: DataPlane,
        send: Send,
        note: Note,
    ) -> None:
        super().__init__(core, plane=plane, pool=runner.pool, send=send, note=note)
        self.runner = runner
        self.posts = Posts(core, plane, perform=self.perform, note=note)

    def peer(self, party: Party, descriptor: str) -> None:
        self.posts.peer(party, descriptor)

    def poll(self) -> None:
        self.posts.poll()

    def tick(self) -> None:
        self.posts.tick()

    @property
    def restless(self) -> bool:
        return self.posts.waiting

    @property
    def idle(self) -> bool:
        return super().idle and not self.posts.in_flight

    def wind_up(self) -> bool:
        return self.posts.wind_up()

    def writable(self) -> tuple[GrantId, ...]:
        return self.posts.writable()

    def _perform_one(self, effect: EngineEffect) -> None:
        if isinstance(effect, Post):
            pages = self._pool_pages(effect.grant.owner)
            self._jobs.append(partial(self._pack_job, effect, pages))

    def _pack_job(self, post: Post, target_pages: int) -> Continuation:
        packed = self.runner.pack(post, target_pages=target_pages)
        return partial(self.posts.packed, post, packed)

    def _pool_pages(self, party: Party) -> int:
        life = self.core.log.fleet.life(party.engine, party.incarnation)
        assert life is not None, "a logged grant has an owner that attached"
        return life.attached.pages

    def _step_job(self) -> Job | None:
        step = self.core.plan_step()
        if step is None:
            return None
        prompts = {
            part.request: self.core.jobs[part.request].payload.tokens
            for part in step.slices
            if isinstance(part, PrefillSlice)
        }
        return partial(self._run, step, prompts)

    def _run(self, step: Step, prompts: dict[RequestId, tuple[int, ...]]) -> Continuation:
        failed = self.runner.run(step, prompts)
        return lambda: self.perform(self.core.step_ended(step, failed))

    def _forget_job(self, request: RequestId) -> Continuation:
        self.runner.forget(request)
        return nothing

    def _computed(self) -> tuple[int, int, int]:
        return self.runner.prompt_tokens_computed, 0, self.runner.steps

    def _bytes_posted(self) -> int:
        return self.posts.bytes_posted
