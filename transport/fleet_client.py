"""The engine's end of the stream to its scheduler: items to protobuf and back, and reconnecting.

Owns: the stream, its outbox, the backoff, and what each item looks like on the wire.
Must not know: what an engine does with what it hears.

The client only relays: everything that comes is put on the owner's inbox in order, and what the
owner sends while no stream is welcomed is dropped, because the owner repeats it at the next welcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import attrs
import grpc

from engine.effects import Payload
from engine.sampler import SamplingParams
from lifecycle.events import Drained, Finished, Proposal
from transport.codec import encode_grant, encode_pages, encode_proposal
from transport.engine_owner import Counters, NewTokens, Outgoing, Owner
from transport.mailbox import Mailbox
from transport.pb import fleet_pb2 as pb
from transport.pb import fleet_pb2_grpc, generation_pb2
from transport.settings import JoinSettings
from transport.tls import Dial

ITEMS_PER_MESSAGE_MAX = 256
OUTBOX_ITEMS_MAX = 65_536
BACKOFF_SECONDS_FIRST = 0.05
BACKOFF_SECONDS_MAX = 2.0
"""Less where leases are short: a rank must come back to a new scheduler before its lease ends."""
MESSAGE_BYTES_MAX = 64 << 20
_COUNTED = tuple(field.name for field in attrs.fields(Counters))

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A scheduler that stopped without a word ends the stream only through these.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # While a probe of the bandwidth is out no other ping is sent, and it may wait for a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    # The backoff is this module's alone.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
)


@attrs.frozen
class Heard:
    """Items of the scheduler, in order."""

    items: tuple[pb.SchedulerItem, ...]


@attrs.frozen
class Broken:
    """The stream has ended; another will begin."""

    reason: str
    denied: bool = False
    """Whether the scheduler does not let this credential in."""


@attrs.frozen
class PreviousLife:
    """A life that the scheduler gave up, as the next one of the same process tells of it.

    quiet: everything that it posted has ended, and nothing of it is ever posted again.
    """

    incarnation: int
    highest_proposal: int
    quiet: bool


DENIALS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


class FleetClient:
    """Keeps one stream to the scheduler open for as long as its task runs.

    hello: the first item of each stream, made when it begins;
    deliver: waits until the owner has room for a message.
    """

    def __init__(
        self,
        settings: JoinSettings,
        *,
        hello: Callable[[], pb.Hello],
        deliver: Callable[[Heard | Broken], Awaitable[None]],
    ) -> None:
        """Raises InvalidSetting when certificates or token cannot be used."""
        self.welcomed = False
        self.backoff_seconds = BACKOFF_SECONDS_FIRST
        self.backoff_seconds_max = BACKOFF_SECONDS_MAX
        self._target = settings.scheduler
        self._dial = Dial.of(settings, token_file=settings.token_file)
        self._hello = hello
        self._deliver = deliver
        self._outbox: Mailbox[pb.EngineItem] = Mailbox(OUTBOX_ITEMS_MAX)

    def send(self, item: pb.EngineItem) -> None:
        """Put an item on the welcomed stream; without one it is dropped.

        The owner never waits for a slow scheduler: an outbox that is full ends the stream.
        """
        if self.welcomed and not self._outbox.put(item):
            self.drop()

    def drop(self) -> None:
        """End the stream; the next one begins after the backoff."""
        self.welcomed = False
        self._outbox.cut()

    async def run(self) -> None:
        """Open streams until cancelled."""
        async with self._dial.aio_channel(self._target, CHANNEL_OPTIONS) as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            while True:
                taken, broken = await self._one_stream(stub)
                self.drop()
                await self._deliver(broken)
                # A scheduler that speaks and is not obeyed, or refuses, is no reason for haste.
                wanted = BACKOFF_SECONDS_FIRST if taken else 2 * self.backoff_seconds
                self.backoff_seconds = min(wanted, self.backoff_seconds_max)
                await anyio.sleep(self.backoff_seconds)

    async def _one_stream(self, stub: Any) -> tuple[bool, Broken]:
        """One stream from hello to end; whether the owner welcomed it, and why it ended."""
        outbox = self._outbox = Mailbox(OUTBOX_ITEMS_MAX)
        call = stub.Connect(metadata=self._dial.metadata())
        taken, denied, reason = False, False, "the outbox was full, or the stream was given up"
        try:
            async with anyio.create_task_group() as tasks:
                hello = pb.EngineItem(hello=self._hello())
                tasks.start_soon(self._write, call, hello, outbox, tasks.cancel_scope)
                try:
                    while (response := await call.read()) is not grpc.aio.EOF:
                        await self._deliver(Heard(tuple(response.items)))
                        taken = taken or self.welcomed
                    reason = "the scheduler ended the stream"
                except grpc.aio.AioRpcError as error:
                    denied = error.code() in DENIALS
                    reason = f"{error.code().name}: {error.details()}"
                except asyncio.CancelledError:
                    if not is_being_cancelled():
                        reason = "CANCELLED: the other side gave the stream up"
                    elif not tasks.cancel_scope.cancel_called:
                        raise
                tasks.cancel_scope.cancel()
        finally:
            call.cancel()
        return taken or self.welcomed, Broken(reason, denied)

    async def _write(
        self,
        call: Any,
        hello: pb.EngineItem,
        outbox: Mailbox[pb.EngineItem],
        scope: anyio.CancelScope,
    ) -> None:
        try:
            items = [hello]
            while items:
                await call.write(pb.ConnectRequest(items=items))
                items = await outbox.take(ITEMS_PER_MESSAGE_MAX)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream is over, and the reader hears why.
            return
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            return
        scope.cancel()


def is_being_cancelled() -> bool:
    """Whether this task was cancelled, and not merely a call whose status is CANCELLED.

    The gRPC library raises a bare exception of the same class for both. No cancel scope takes that
    for its own, so a task that let it pass would end the task group around it without a word.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# --- engine to scheduler --------------------------------------------------------------------------


def encode_outgoing(item: Outgoing, owner: Owner[Any]) -> Iterator[pb.EngineItem]:
    """A proposal or new tokens; whoever hears of the end of work finds counted what it did."""
    if not isinstance(item, Proposal):
        yield pb.EngineItem(tokens=encode_tokens(item))
        return
    if isinstance(item.body, Drained | Finished):
        yield encode_heartbeat(owner)
    yield pb.EngineItem(proposal=encode_proposal(item))


def encode_tokens(item: NewTokens) -> pb.TokenBatch:
    """One piece of text and one log probability for each token."""
    message = pb.TokenBatch(
        request=item.request,
        attempt=item.attempt,
        first_index=item.first,
        token_ids=item.tokens,
        texts=item.texts,
        logprobs=item.logprobs,
    )
    if isinstance(item.stop, str):
        message.stop_string = item.stop
    elif item.stop is not None:
        message.stop_token_id = item.stop
    return message


def encode_heartbeat(owner: Owner[Any]) -> pb.EngineItem:
    """A sign of life; its cursor lets the scheduler forget what this engine has taken in."""
    counters = owner.counters()
    counted = pb.EngineCounters(**{name: getattr(counters, name) for name in _COUNTED})
    return pb.EngineItem(heartbeat=pb.Heartbeat(cursor=encode_cursor(owner), counters=counted))


def encode_cursor(owner: Owner[Any]) -> pb.Cursor:
    """Up to where the engine has taken in the log of its epoch."""
    return pb.Cursor(epoch=owner.core.epoch, position=owner.core.position)


def encode_inventory(owner: Owner[Any], *, epoch: int) -> pb.EngineItem:
    """What the engine has in its hands, for a scheduler life that does not know it."""
    core = owner.core
    held = [
        pb.HeldGrant(
            grant=encode_grant(grant),
            request=holding.request,
            attempt=holding.attempt,
            pages=encode_pages(holding.reserved.pages),
            exposed=owner.exposed(grant),
        )
        for grant, holding in core.holdings.items()
    ]
    writable = [encode_grant(grant) for grant in owner.writable()]
    inventory = pb.Inventory(
        epoch=epoch, held=held, writable=writable, highest_proposal=core.next_number - 1
    )
    return pb.EngineItem(inventory=inventory)


def encode_previous(life: PreviousLife | None) -> pb.PreviousLife | None:
    """What a hello says of the life before."""
    return None if life is None else pb.PreviousLife(**attrs.asdict(life))


# --- scheduler to engine --------------------------------------------------------------------------


def decode_payload(message: pb.Payload) -> tuple[Payload, bytes]:
    """A payload and the key of the prompt's digest. Raises InvalidSampling."""
    sampling = decode_sampling(message.sampling)
    tokens = tuple(message.prompt_token_ids)
    return Payload(tokens, message.relayed_tokens, sampling), message.digest_key


def decode_sampling(message: generation_pb2.Sampling) -> SamplingParams:
    """Fields that are not set take the sampler's defaults. Raises InvalidSampling."""
    default = SamplingParams()

    def given(name: Any, otherwise: Any) -> Any:
        return getattr(message, name) if message.HasField(name) else otherwise

    return SamplingParams(
        max_new_tokens=given("new_tokens_max", default.max_new_tokens),
        temperature=given("temperature", default.temperature),
        top_p=given("top_p", default.top_p),
        top_k=given("top_k", default.top_k),
        seed=given("seed", default.seed),
        stop=tuple(message.stop_strings),
        stop_tokens=tuple(message.stop_token_ids),
        logprobs=given("logprobs", default.logprobs),
        ignore_eos=given("ignore_eos", default.ignore_eos),
    )
