"""For whoever runs the deployment: what there is, and how to take parts out of service.

Owns: the status as a message.
Must not know: how anything is decided.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from lifecycle.events import Cause
from lifecycle.fleet import Life
from lifecycle.ids import EngineId, Party, RequestId
from lifecycle.ledger import Account
from lifecycle.state import OPEN, TERMINAL, Phase
from transport import refusals
from transport.access import caller
from transport.codec_values import FENCE_SCOPES, QUARANTINE_CAUSES, ROLES
from transport.log_index import PHASES
from transport.metrics import snapshot
from transport.metrics_text import exposition
from transport.pb import admin_pb2 as pb
from transport.pb import admin_pb2_grpc
from transport.scheduler_owner import SchedulerOwner

Context = grpc.aio.ServicerContext[Any, Any]


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Looks at the deployment and takes parts of it out of service."""

    def __init__(self, owner: SchedulerOwner) -> None:
        self._owner = owner

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """What there is and how full it is, at one moment."""
        return await self._owner.ask(partial(status, self._owner))

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: Context
    ) -> pb.GetMetricsResponse:
        """Every metric at one moment, in the text form of Prometheus."""
        families = await self._owner.ask(partial(snapshot, self._owner))
        return pb.GetMetricsResponse(exposition=exposition(families))

    async def DrainEngine(
        self, request: pb.DrainEngineRequest, context: Context
    ) -> pb.DrainEngineResponse:
        """The engine is given nothing new; NOT_FOUND when none of that name is attached."""
        incarnation = await self._owner.ask(
            partial(drain_engine, self._owner, EngineId(request.engine))
        )
        if incarnation is None:
            refusal = refusals.not_found("engine", request.engine)
            await context.abort_with_status(refusal.status())
        return pb.DrainEngineResponse(incarnation=incarnation)

    async def DrainScheduler(
        self, request: pb.DrainSchedulerRequest, context: Context
    ) -> pb.DrainSchedulerResponse:
        """New requests are refused from now on; the process goes on."""

        def drain() -> int:
            self._owner.stop_accepting()
            return self._owner.requests_open

        return pb.DrainSchedulerResponse(requests_open=await self._owner.ask(drain))

    async def CancelRequest(
        self, request: pb.CancelRequestRequest, context: Context
    ) -> pb.CancelRequestResponse:
        """End a request; NOT_FOUND when the caller's log knows none of that name."""
        name, who = RequestId(request.request_id), caller()
        tenant = None if who.sees_all else self._owner.clients.commit(who.tenant)
        question: Callable[[], bool | None]
        question = partial(cancel_request, self._owner, name, tenant=tenant)
        cancelled = await self._owner.ask(question)
        if cancelled is None:
            await context.abort_with_status(refusals.not_found("request", name).status())
        return pb.CancelRequestResponse(cancelled=bool(cancelled))


def drain_engine(owner: SchedulerOwner, engine: EngineId) -> int | None:
    """Give an engine nothing new; its incarnation, or None when it is not attached."""
    life = owner.core.log.fleet.current(engine)
    if life is None or life.lost is not None:
        return None
    owner.perform(owner.core.drain(engine, owner.now()))
    return life.attached.incarnation


def cancel_request(
    owner: SchedulerOwner, request: RequestId, *, tenant: str | None = None
) -> bool | None:
    """End a request; whether that changed anything, or None when it is not known.

    `tenant` is the commitment of the only tenant whose requests are known; None knows all.
    """
    core = owner.core
    pending, line = core.queue.find(request), owner.journal.index.find(request)
    waiting = pending is not None
    if pending is not None:
        found = pending.wanted.tenant
    elif line is not None:
        found = line.tenant
    else:
        return None
    if tenant not in {None, found}:
        return None
    ends = waiting or core.log.state(request).phase in OPEN
    reporter = "operator" if tenant is None else "client"
    owner.perform(core.cancel(request, Cause.CLIENT_CANCEL, reporter, owner.now()))
    return ends


def status(owner: SchedulerOwner) -> pb.GetStatusResponse:
    """The whole status, from the reduced log."""
    core = owner.core
    # Those that are over are soon forgotten here: how many are left says nothing.
    phases = Counter(s.phase for s in core.log.requests.values() if s.phase not in TERMINAL)
    newest = {life.attached.engine: life for _, life in core.log.fleet.lives}
    return pb.GetStatusResponse(
        epoch=core.epoch,
        log_position=owner.journal.appended,
        durable_position=owner.journal.durable,
        context_tokens=core.limits.context_tokens,
        queued=len(core.queue.waiting()),
        draining=not core.accepting,
        engines=[_engine(owner, newest[name]) for name in sorted(newest)],
        phases=[
            pb.PhaseCount(phase=PHASES[phase], count=phases[phase])
            for phase in Phase
            if phases[phase]
        ],
        model=owner.settings.model,
        process_id=os.getpid(),
        log_failure=owner.log_refusal or "",
        log_free_bytes=owner.journal.room_bytes or 0,
        log_free_bytes_min=owner.journal.room_bytes_min,
        log_first_position=owner.journal.store.first_position,
    )


def _engine(owner: SchedulerOwner, life: Life) -> pb.EngineStatus:
    attached = life.attached
    if life.lost is not None:
        state = pb.ENGINE_STATE_LOST
    elif life.draining:
        state = pb.ENGINE_STATE_DRAINING
    else:
        state = pb.ENGINE_STATE_ATTACHED
    return pb.EngineStatus(
        engine=attached.engine,
        incarnation=attached.incarnation,
        role=ROLES.encode(attached.role),
        state=state,
        page_tokens=attached.page_tokens,
        context_tokens=attached.context_tokens,
        slots=attached.slots,
        layout=attached.layout,
        plane=attached.plane,
        fence_scope=FENCE_SCOPES.encode(attached.fence_scope),
        ranks=[_rank(owner, life, rank) for rank in range(attached.ranks)],
        requests=len(owner.fleet.unsettled((attached.engine, attached.incarnation))),
    )


def _rank(owner: SchedulerOwner, life: Life, rank: int) -> pb.RankStatus:
    attached = life.attached
    party = Party(attached.engine, attached.incarnation, rank)
    account, known = owner.core.log.ledger.get(party), owner.fleet.streams.ranks.get(party)
    message = pb.RankStatus(
        rank=rank,
        connected=party in owner.fleet.streams.links,
        # The log's form: it bears no key.
        endpoint=attached.endpoints[rank],
    )
    if account is not None:
        message.pages.CopyFrom(_amounts(account, unit=1))
        message.tokens.CopyFrom(_amounts(account, unit=attached.page_tokens))
    for cause, pages in owner.journal.tally.quarantined(party).items():
        if pages:
            message.quarantined.add(cause=QUARANTINE_CAUSES.encode(cause), pages=pages)
    if known is not None:
        message.process_id = known.process_id
        message.counters.CopyFrom(known.counters)
    return message


def _amounts(account: Account, *, unit: int) -> pb.Amounts:
    return pb.Amounts(
        capacity=account.capacity * unit,
        free=account.free_pages * unit,
        held=account.held_pages * unit,
        booked=account.booked_pages * unit,
        quarantined=account.quarantined_pages * unit,
    )
