"""An engine without memory and model, which speaks the fleet protocol with the real cores.

Its "model" answers the token `FIRST_TOKEN + position`; writes and comparisons succeed at once.
It does nothing by timers: every act follows a message or a call of the test.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import anyio
import grpc

from engine.decode import DecodeCore
from engine.digests import keyed_digest
from engine.effects import (
    DecodeSlice,
    EngineEffect,
    Fence,
    Payload,
    Post,
    Propose,
    Step,
    VerifyPages,
)
from engine.prefill import Posted, PrefillCore
from lifecycle.events import FenceScope, Finished, FinishReason, Role, Verified
from lifecycle.ids import EngineId, Party, RequestId, count_pages
from transport import codec
from transport.codec_values import FENCE_SCOPES, ROLES
from transport.fleet_client import is_being_cancelled
from transport.pb import fleet_pb2 as pb
from transport.pb import fleet_pb2_grpc
from transport.protocol_version import PROTOCOL_MAJOR, PROTOCOL_MINOR
from transport.tls import PLAIN, Dial

FIRST_TOKEN = 10
PAGE_TOKENS = 4


class FakeEngine:
    """One rank; `run` connects, and again when its stream breaks, until it is refused or left.

    pause_at: decode makes no step for a request that has given that many tokens.
    """

    def __init__(
        self,
        role: Role,
        address: str,
        *,
        name: str | None = None,
        incarnation: int = 1,
        pages: int = 64,
        layout: str = "layout-a",
        tokenizer: str = "",
        text: str = "x",
        pause_at: int | None = None,
        dial: Dial = PLAIN,
    ) -> None:
        self.role = role
        self.party = Party(EngineId(name or role.value), incarnation, 0)
        self.address = address
        self.pages, self.layout, self.tokenizer = pages, layout, tokenizer
        self.text, self.pause_at = text, pause_at
        self.dial = dial
        self.key = b""
        self.given: dict[RequestId, dict[int, list[pb.TokenBatch]]] = {}
        self.synced = anyio.Event()
        self.paused = anyio.Event()
        self.refused: pb.AttachRefused | None = None
        self.welcomes: list[pb.Welcome] = []
        self.peers: list[pb.PeerEndpoint] = []
        self.published: list[pb.Publication] = []
        self.order: list[str] = []
        self.endpoint = ""
        self.protocol = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
        self.hush = False
        self.gone = anyio.Event()
        self.beat = anyio.Event()
        self.core: PrefillCore | DecodeCore = self._core()
        self._out: list[pb.EngineItem] = []
        self._kick = anyio.Event()
        self._writing = anyio.Lock()
        self._call: grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse] | None = None

    def _core(self) -> PrefillCore | DecodeCore:
        tags = itertools.count(1)

        def digest(request: RequestId, tokens: Iterable[int]) -> bytes:
            return keyed_digest(self.key)(request, tuple(tokens))

        if self.role is Role.PREFILL:
            return PrefillCore(
                self.party,
                pages=self.pages,
                page_tokens=PAGE_TOKENS,
                mint=lambda: next(tags),
                staging=8,
                chunk_tokens=64,
                digest=digest,
            )
        return DecodeCore(
            self.party,
            pages=self.pages,
            page_tokens=PAGE_TOKENS,
            mint=lambda: next(tags),
            batch=4,
            growth_tokens=8,
            digest=digest,
        )

    # --- what tests do ------------------------------------------------------------------------

    def go_on(self) -> None:
        """Give what `pause_at` held back."""
        self.pause_at = None
        self._kick.set()

    def leave(self) -> None:
        """Ask to leave."""
        self._out.append(pb.EngineItem(leaving=pb.Leaving()))
        self._kick.set()

    def break_stream(self) -> None:
        """Cut the stream under the engine; it connects again."""
        self.synced = anyio.Event()
        if self._call is not None:
            self._call.cancel()

    # --- the protocol -------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the scheduler ends the stream with a reason."""
        async with self.dial.aio_channel(self.address, ()) as channel:
            stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
            while self.refused is None:
                call = self._call = stub.Connect(wait_for_ready=True, metadata=self.dial.metadata())
                try:
                    await self._stream(call)
                except (grpc.aio.AioRpcError, EOFError):
                    continue
                except BaseException:
                    call.cancel()
                    raise

    async def _stream(
        self, call: grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]
    ) -> None:
        await call.write(pb.ConnectRequest(items=[pb.EngineItem(hello=self.hello())]))
        send, receive = anyio.create_memory_object_stream[pb.ConnectResponse | None](1)
        self._out.clear()
        ended = False
        try:
            async with anyio.create_task_group() as tasks:

                async def read() -> None:
                    try:
                        async for message in call:
                            await send.send(message)
                    except (grpc.aio.AioRpcError, anyio.get_cancelled_exc_class()):
                        if not call.done():
                            raise
                    await send.send(None)

                async def kicked() -> None:
                    while True:
                        await self._kick.wait()
                        self._kick = anyio.Event()
                        self._steps()
                        await self._flush(call)

                tasks.start_soon(read)
                tasks.start_soon(kicked)
                async for message in receive:
                    if message is None:
                        ended = True
                        break
                    for item in message.items:
                        self._item(item)
                    self._steps()
                    if self.core.epoch and not self.hush:
                        beat = pb.Heartbeat(cursor=self._cursor())
                        self._out.append(pb.EngineItem(heartbeat=beat))
                    await self._flush(call)
                tasks.cancel_scope.cancel()
        finally:
            call.cancel()
            send.close()
            receive.close()
        if ended and self.refused is None:
            raise EOFError

    async def _flush(
        self, call: grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]
    ) -> None:
        # One write at a time is what a call allows.
        async with self._writing:
            items, self._out = self._out, []
            if not items or self.hush or self.refused is not None:
                return
            try:
                await call.write(pb.ConnectRequest(items=items))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reader sees the same end.
                return
            except asyncio.CancelledError:
                # So the library says that the stream was broken.
                if is_being_cancelled():
                    raise

    def hello(self) -> pb.Hello:
        """What this engine says of itself."""
        hello = pb.Hello(
            party=codec.encode_party(self.party),
            role=ROLES.encode(self.role),
            ranks=1,
            pages=self.pages,
            page_tokens=PAGE_TOKENS,
            layers=1,
            slots=16,
            context_tokens=512,
            layout=self.layout,
            endpoint=self.endpoint,
            plane="naive",
            fence_scope=FENCE_SCOPES.encode(FenceScope.GRANT),
            process_id=1,
            highest_proposal=self.core.next_number - 1,
            tokenizer=self.tokenizer,
            protocol_major=self.protocol[0],
            protocol_minor=self.protocol[1],
        )
        if self.core.epoch:
            hello.cursor.CopyFrom(self._cursor())
        return hello

    def _cursor(self) -> pb.Cursor:
        return pb.Cursor(epoch=self.core.epoch, position=self.core.position)

    def _item(self, item: pb.SchedulerItem) -> None:
        payload = item.publication.HasField("payload")
        self.order.append("payload" if payload else str(item.WhichOneof("item")))
        match item.WhichOneof("item"):
            case "welcome":
                self._welcome(item.welcome)
            case "publication":
                self._publication(item.publication)
            case "answer":
                answer = item.answer
                self._perform(
                    self.core.answer(answer.number, answer.accepted_position, answer.dropped_rule)
                )
            case "synced":
                self._perform(self.core.end_sync())
                self.synced.set()
            case "refused":
                self.refused = item.refused
                self.gone.set()
                self.beat.set()
            case "heartbeat":
                self.beat.set()
                self.beat = anyio.Event()
            case "peer":
                self.peers.append(item.peer)
            case _:
                pass

    def _welcome(self, welcome: pb.Welcome) -> None:
        self.welcomes.append(welcome)
        if welcome.inventory_wanted:
            self.core.begin_sync(welcome.epoch)
            held, highest = self.core.inventory()
            inventory = pb.Inventory(
                epoch=welcome.epoch,
                held=[pb.HeldGrant(grant=codec.encode_grant(g)) for g in held],
                highest_proposal=highest,
            )
            self._out.append(pb.EngineItem(inventory=inventory))
            return
        for proposal in self.core.retransmit():
            self._out.append(pb.EngineItem(proposal=codec.encode_proposal(proposal)))
        for request, attempts in self.given.items():
            if request in self.core.jobs:
                for batch in attempts.get(self.core.jobs[request].attempt, []):
                    self._out.append(pb.EngineItem(tokens=batch))

    def _publication(self, publication: pb.Publication) -> None:
        self.published.append(publication)
        payload = None
        if publication.HasField("payload"):
            message = publication.payload
            self.key = message.digest_key
            payload = Payload(
                tuple(message.prompt_token_ids), message.relayed_tokens, message.sampling
            )
        entry = codec.decode_entry(publication.entry)
        self._perform(self.core.receive(publication.position, entry, payload))

    # --- the cores ----------------------------------------------------------------------------

    def _perform(self, effects: list[EngineEffect]) -> None:
        for effect in effects:
            match effect:
                case Propose():
                    proposal = codec.encode_proposal(effect.proposal)
                    self._out.append(pb.EngineItem(proposal=proposal))
                case Post():
                    assert isinstance(self.core, PrefillCore)
                    done = self.core.post_ended(effect.ticket, Posted.DONE, size_bytes=1, digest=0)
                    self._perform(done)
                case VerifyPages():
                    self._verify(effect)
                case Fence():
                    assert isinstance(self.core, DecodeCore)
                    self._perform(self.core.fence_ended(effect.grant, effect.party))
                case _:
                    pass

    def _verify(self, effect: VerifyPages) -> None:
        assert isinstance(self.core, DecodeCore)
        pages = sum(count_pages(write[2]) for write in effect.writes)
        reserved = self.core.jobs[effect.request].reserved
        grants = tuple(r.grant for r in reserved)
        result = Verified(grants, pages, pages, pages, "none")
        self._perform(self.core.verify_ended(effect.request, effect.attempt, result))

    def _steps(self) -> None:
        while (step := self._plan()) is not None:
            if isinstance(self.core, PrefillCore):
                self._perform(self.core.step_ended(step))
                continue
            finished: dict[RequestId, Finished] = {}
            for part in step.slices:
                assert isinstance(part, DecodeSlice)
                self._give(part, finished)
            self._perform(self.core.step_ended(step, finished=finished))

    def _plan(self) -> Step | None:
        core = self.core
        if isinstance(core, DecodeCore) and self.pause_at is not None:
            at = self.pause_at
            if any(job.given >= at for job in core.jobs.values()):
                self.paused.set()
                return None
        return core.plan_step()

    def _give(self, part: DecodeSlice, finished: dict[RequestId, Finished]) -> None:
        batch = pb.TokenBatch(
            request=part.request,
            attempt=part.attempt,
            first_index=part.index,
            token_ids=[FIRST_TOKEN + part.index],
            texts=[self.text],
            logprobs=[-0.5],
        )
        self.given.setdefault(part.request, {}).setdefault(part.attempt, []).append(batch)
        admitted = self.core.log.state(part.request).admitted
        assert admitted is not None
        if part.index + 1 == admitted.new_tokens_max:
            finished[part.request] = Finished(
                FinishReason.LENGTH, admitted.new_tokens_max, 1, b"", 1, 1, 0
            )
        self._out.append(pb.EngineItem(tokens=batch))
