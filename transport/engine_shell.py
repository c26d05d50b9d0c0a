"""One life of an engine: it joins the scheduler, and drives the core.

Owns: the owner task, the compute thread, timers, joining, leaving, and the exit code.
Must not know: other lives, what is legal, how effects are performed, what stands in a stream's items beyond
their kind.

One task owns the core. The stream, the compute thread, the data plane's wake-ups and the timer
only put messages on its inbox, which is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import anyio.to_thread
import attrs
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from engine.core import LogDivergedError
from engine.sampler import InvalidSampling
from lifecycle.ids import Party
from transport.codec import CodecError, decode_entry, decode_party, encode_party
from transport.codec_values import FENCE_SCOPES, ROLES
from transport.engine_hooks import NO_HOOKS, EngineHooks
from transport.engine_owner import Continuation, Job, Outgoing
from transport.engine_parts import (
    LifeDigest,
    Loaded,
    MakeOwner,
    make_owner,
)
from transport.engine_planes import EngineMemory
from transport.fleet_client import (
    BACKOFF_SECONDS_MAX,
    Broken,
    FleetClient,
    Heard,
    PreviousLife,
    decode_payload,
    encode_cursor,
    encode_heartbeat,
    encode_inventory,
    encode_outgoing,
    encode_previous,
)
from transport.pb import fleet_pb2 as pb
from transport.protocol_version import about_this_part
from transport.settings import EngineSettings
from transport.waker import Waker

EXIT_DONE = 0
EXIT_BROKEN = 1
EXIT_REFUSED = 4
"""The scheduler does not want this life of the engine, and its process cannot begin another."""

INBOX_MESSAGES_MAX = 256
TICK_SECONDS = 0.02
REPEAT_SECONDS = 1.0
LEAVE_SECONDS_MAX = 60.0
ALONE_SECONDS_MAX = 3.0
"""How long a leaving engine that holds something waits for a scheduler out of reach."""

_log = structlog.get_logger("custody.engine")


@attrs.frozen
class _Done:
    """A job of the compute thread has ended; its continuation belongs to the owner."""

    continuation: Continuation


@attrs.frozen
class _Woken:
    """The data plane may have something to say."""


@attrs.frozen
class _Tick:
    """A little time has passed."""


@attrs.frozen
class _Leave:
    """The process was asked to stop."""


_Message = Heard | Broken | _Done | _Woken | _Tick | _Leave


class EngineShell:
    """One life of an engine; `make` puts its owner together, `monotonic` counts nanoseconds.

    `lost` says, once `run` has returned, whether the scheduler gave this life up.
    """

    def __init__(
        self,
        settings: EngineSettings,
        loaded: Loaded,
        memory: EngineMemory,
        *,
        party: Party,
        waker: Waker,
        hooks: EngineHooks = NO_HOOKS,
        make: MakeOwner = make_owner,
        monotonic: Callable[[], int] = time.monotonic_ns,
        previous: PreviousLife | None = None,
    ) -> None:
        self.party = party
        self.lost = False
        self.memory = memory
        self.digest = LifeDigest()
        self.owner = make(settings, loaded, memory, party=party, digest=self.digest, send=self._say)
        self._settings = settings
        self._loaded = loaded
        self._waker = waker
        self._hooks = hooks
        self._monotonic = monotonic
        self._previous = previous
        self._send: MemoryObjectSendStream[_Message]
        self._receive: MemoryObjectReceiveStream[_Message]
        self._send, self._receive = anyio.create_memory_object_stream(INBOX_MESSAGES_MAX)
        self._jobs: MemoryObjectSendStream[Job]
        self._work: MemoryObjectReceiveStream[Job]
        self._jobs, self._work = anyio.create_memory_object_stream(1)
        self._client = FleetClient(settings, hello=self._hello, deliver=self._send.send)
        self._computing = False
        self._ready: Callable[[], None] | None = None
        self._hello_next_number = 1
        self._heartbeat_ns = 1_000_000_000
        self._heartbeat_at_ns = 0
        self._answered_at_ns = 0
        self._leaving_since_ns = 0
        self._alone_since_ns = 0

    # --- tasks --------------------------------------------------------------------------------

    async def run(self, *, ready: Callable[[], None], stop: anyio.Event) -> int:
        """Join, work, leave; returns the exit code."""
        self._ready = ready
        code = EXIT_BROKEN
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._client.run)
                tasks.start_soon(self._compute)
                tasks.start_soon(self._tick)
                tasks.start_soon(self._wake)
                tasks.start_soon(self._watch, stop)
                code = await self._own()
                tasks.cancel_scope.cancel()
        finally:
            self._close()
        return code

    def _close(self) -> None:
        for stream in (self._send, self._receive, self._jobs, self._work):
            stream.close()

    def end_as(self, *, quiet: bool) -> PreviousLife:
        """Let go of everything that this life could read or write, and say how it ended."""
        ended = PreviousLife(self.party.incarnation, self.owner.core.next_number - 1, quiet)
        self._close()
        del self.owner, self.memory, self._waker, self._client
        del self._send, self._receive, self._jobs, self._work
        return ended

    def break_stream(self) -> None:
        """Give up the stream to the scheduler; the next one resumes where this one ended."""
        self._client.drop()

    async def _compute(self) -> None:
        """Run jobs one at a time in a worker thread, so that the loop never waits for torch."""
        alone = anyio.CapacityLimiter(1)
        async for job in self._work:
            continuation = await anyio.to_thread.run_sync(job, limiter=alone)
            await self._send.send(_Done(continuation))

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(TICK_SECONDS)
            await self._send.send(_Tick())

    async def _wake(self) -> None:
        while True:
            await self._waker.wait()
            await self._send.send(_Woken())

    async def _watch(self, stop: anyio.Event) -> None:
        await stop.wait()
        await self._send.send(_Leave())

    # --- the owner ----------------------------------------------------------------------------

    async def _own(self) -> int:
        """Take messages in, one after the other, until there is an exit code."""
        try:
            async for message in self._receive:
                code = self._take(message)
                if code is not None:
                    return code
                self._feed()
        except LogDivergedError as error:
            _log.error("log_diverged", party=str(self.party), rule=error.rule, message=str(error))
        except (CodecError, InvalidSampling) as error:
            _log.error("scheduler_not_understood", party=str(self.party), message=str(error))
        return EXIT_BROKEN

    def _feed(self) -> None:
        """Give the compute thread its next job as soon as it has none."""
        if self._computing:
            return
        job = self.owner.next_job()
        if job is not None:
            self._computing = True
            self._jobs.send_nowait(job)

    def _take(self, message: _Message) -> int | None:
        match message:
            case Heard(items):
                for item in items:
                    code = self._hear(item)
                    if code is not None:
                        return code
            case Broken(reason, denied):
                self._client.welcomed = False
                if denied and not self.owner.core.epoch:
                    # A credential may come back to who has joined before, never to who has not.
                    _log.error("denied_by_scheduler", party=str(self.party), reason=reason)
                    return EXIT_REFUSED
                self._alone_since_ns = self._alone_since_ns or self._monotonic()
                _log.info("scheduler_stream_ended", party=str(self.party), reason=reason)
            case _Done(continuation):
                self._computing = False
                continuation()
            case _Woken():
                self.owner.poll()
            case _Tick():
                return self._pass_time()
            case _Leave():
                self._leaving_since_ns = self._monotonic()
                self._client.send(pb.EngineItem(leaving=pb.Leaving()))
        return None

    def _pass_time(self) -> int | None:
        now = self._monotonic()
        if self.owner.restless:
            self.owner.tick()
        if self._client.welcomed:
            self._alone_since_ns = 0
            if now - self._heartbeat_at_ns >= self._heartbeat_ns:
                self._heartbeat_at_ns = now
                self._client.send(encode_heartbeat(self.owner))
            if not self.owner.core.outstanding:
                self._answered_at_ns = now
            elif now - self._answered_at_ns >= REPEAT_SECONDS * 1e9:
                self._answered_at_ns = now
                self.owner.repeat()
        if not self._leaving_since_ns:
            return None
        alone_ns = now - self._alone_since_ns if self._alone_since_ns else 0
        given_up = self.owner.idle or alone_ns >= ALONE_SECONDS_MAX * 1e9
        if given_up and not self._client.welcomed:
            _log.info("left_without_scheduler", party=str(self.party), idle=self.owner.idle)
            return EXIT_DONE
        if now - self._leaving_since_ns >= LEAVE_SECONDS_MAX * 1e9:
            _log.warning("left_with_work", party=str(self.party), idle=self.owner.idle)
            return EXIT_BROKEN
        return None

    def _hear(self, item: pb.SchedulerItem) -> int | None:
        match item.WhichOneof("item"):
            case "welcome":
                self._welcome(item.welcome)
            case "publication":
                self._publication(item.publication)
            case "answer":
                self._answered_at_ns = self._monotonic()
                answer = item.answer
                self.owner.answer(answer.number, answer.accepted_position, answer.dropped_rule)
            case "peer":
                party = decode_party(item.peer.party)
                self.owner.peer(party, item.peer.endpoint)
                self.owner.process(party, item.peer.process)
            case "synced":
                self.owner.end_sync()
                if self._ready is not None:
                    self._ready()
                    self._ready = None
            case "refused":
                return self._refused(item.refused)
            case _:
                # Signs of life, and counts of tokens that a full repeat makes needless.
                pass
        return None

    def _welcome(self, welcome: pb.Welcome) -> None:
        core = self.owner.core
        if welcome.epoch < core.epoch:
            _log.warning("older_scheduler", epoch=welcome.epoch, known=core.epoch)
            self._client.drop()
            return
        self._client.welcomed = True
        self._heartbeat_ns = welcome.heartbeat_ns or self._heartbeat_ns
        self._client.backoff_seconds_max = min(BACKOFF_SECONDS_MAX, self._heartbeat_ns / 1e9)
        self._answered_at_ns = self._monotonic()
        if welcome.inventory_wanted:
            self.owner.begin_sync(welcome.epoch, next_number=self._hello_next_number)
            self._client.send(encode_inventory(self.owner, epoch=welcome.epoch))
        else:
            self.owner.repeat()
        if self._leaving_since_ns:
            self._client.send(pb.EngineItem(leaving=pb.Leaving()))

    def _publication(self, publication: pb.Publication) -> None:
        payload = None
        if publication.HasField("payload"):
            payload, self.digest.key = decode_payload(publication.payload)
        entry = decode_entry(publication.entry)
        self.owner.receive(publication.position, entry, payload)

    def _refused(self, refused: pb.AttachRefused) -> int | None:
        reason = pb.AttachRefusal.Name(refused.reason)
        level = _log.info if self._leaving_since_ns else _log.error
        level("refused_by_scheduler", party=str(self.party), reason=reason, message=refused.message)
        match refused.reason:
            case pb.ATTACH_REFUSAL_LEFT:
                return EXIT_DONE
            case pb.ATTACH_REFUSAL_SHUTDOWN:
                # Without a scheduler nothing can be settled; another one may come.
                return EXIT_DONE if self._leaving_since_ns else None
            case pb.ATTACH_REFUSAL_LOST:
                self.lost = True
                return EXIT_REFUSED
            case pb.ATTACH_REFUSAL_SUPERSEDED | pb.ATTACH_REFUSAL_RULE_BROKEN:
                return EXIT_REFUSED
            case pb.ATTACH_REFUSAL_INCOMPATIBLE:
                return EXIT_REFUSED
            case _:
                return EXIT_BROKEN

    # --- what is sent -------------------------------------------------------------------------

    def _say(self, item: Outgoing) -> None:
        self._hooks.saying(item, self._put)

    def _put(self, item: Outgoing) -> None:
        if self.lost:
            # A harness may hold on to what a life wanted to say until long after it.
            return
        for message in encode_outgoing(item, self.owner):
            self._client.send(message)

    def _hello(self) -> pb.Hello:
        """Who this is and where it stands, as the first item of a stream."""
        core, memory, loaded = self.owner.core, self.memory, self._loaded
        self._hello_next_number = core.next_number
        return pb.Hello(
            party=encode_party(self.party),
            role=ROLES.encode(self._settings.role),
            ranks=1,
            pages=memory.pool.pages,
            page_tokens=loaded.layout.page_tokens,
            layers=loaded.layout.layers,
            slots=self._settings.slots,
            context_tokens=loaded.model.config.context,
            layout=loaded.fingerprint,
            endpoint=memory.descriptor,
            plane=memory.plane.capabilities.name,
            fence_scope=FENCE_SCOPES.encode(memory.fence_scope),
            **about_this_part(),
            cursor=encode_cursor(self.owner) if core.epoch else None,
            highest_proposal=core.next_number - 1,
            model=self._settings.model,
            tokenizer=loaded.tokenizer.fingerprint,
            previous=encode_previous(self._previous),
        )
