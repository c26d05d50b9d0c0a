"""Bad requests as data, and the proof that none of them cost anything.

Owns: what is sent, what must be answered, and what "nothing was lost" means.
Must not know: how a request is refused.
"""

from __future__ import annotations

import math
import random
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.lowlevel
import attrs
import grpc

from lifecycle.history import History
from lifecycle.ids import FLEET, RequestId
from lifecycle.replay import replay
from lifecycle.state import Phase
from tests.fake_engine import FakeEngine
from tests.serving import Deployment, ask, deployment, details
from transport.credentials import token_digest
from transport.pb import fleet_pb2
from transport.pb import generation_pb2 as pb
from transport.tls import Dial, Token

GENERATE = "/custody.v1.GenerationService/Generate"
COMPLETE = "/custody.v1.GenerationService/Complete"
PAGE_TOKENS = 4
POOL_PAGES = 16
POOL_TOKENS = POOL_PAGES * PAGE_TOKENS
CONTEXT_TOKENS = 40
DONE = frozenset({Phase.CLOSED, Phase.REJECTED})

Code = grpc.StatusCode
Metadata = tuple[tuple[str, str], ...]


@attrs.frozen
class Row:
    """One bad request: its bytes, and the status that it must get.

    field: what BadRequest names, if anything; numbers: what the message and the metadata say.
    context: the deployment's explicit context, or None for what the pools allow.
    """

    name: str
    body: bytes
    code: grpc.StatusCode
    reason: str
    field: str = ""
    numbers: tuple[tuple[str, int], ...] = ()
    context: int | None = None


def _invalid(name: str, request: pb.GenerateRequest, field: str) -> Row:
    body = request.SerializeToString()
    return Row(name, body, Code.INVALID_ARGUMENT, "INVALID_REQUEST", field)


def _too_long(name: str, *, prompt: int, new: int, context: int | None) -> Row:
    numbers = (
        ("prompt_tokens", prompt),
        ("new_tokens_max", new),
        ("context_tokens", context or POOL_TOKENS),
    )
    return Row(
        name,
        ask(tokens=prompt, new=new).SerializeToString(),
        Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        numbers=numbers,
        context=context,
    )


def _sampled(name: str, value: float) -> Row:
    request = ask()
    setattr(request.sampling, name, value)
    return _invalid(f"{name} {value}", request, f"sampling.{name}")


def _ids(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


def _chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=turns))


def field(number: int, data: bytes) -> bytes:
    """A length-delimited field as it stands on the wire."""
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


REQUESTS: tuple[Row, ...] = (
    _invalid("no input", pb.GenerateRequest(), "input"),
    _invalid("empty text", pb.GenerateRequest(text=""), "text"),
    _invalid("no token ids", _ids(), "token_ids"),
    _invalid("no messages", _chat(), "chat"),
    _too_long("prompt at the context", prompt=CONTEXT_TOKENS, new=1, context=CONTEXT_TOKENS),
    _too_long("prompt over the context", prompt=CONTEXT_TOKENS + 1, new=1, context=CONTEXT_TOKENS),
    _too_long(
        "new tokens over the context", prompt=CONTEXT_TOKENS - 3, new=4, context=CONTEXT_TOKENS
    ),
    _too_long("prompt at the pool", prompt=POOL_TOKENS, new=1, context=None),
    _too_long("prompt over the pool", prompt=POOL_TOKENS + 1, new=1, context=None),
    _too_long("new tokens over the pool", prompt=POOL_TOKENS - 3, new=4, context=None),
    _invalid("no new tokens", ask(new=0), "sampling.new_tokens_max"),
    _invalid("all new tokens", ask(new=(1 << 64) - 1), "sampling.new_tokens_max"),
    _sampled("temperature", -0.5),
    _sampled("temperature", math.nan),
    _sampled("temperature", math.inf),
    _sampled("top_p", -0.5),
    _sampled("top_p", 0.0),
    _sampled("top_p", math.nan),
    _sampled("top_p", 1.5),
    _sampled("top_k", (1 << 32) - 1),
    _invalid("two answers", ask(n=2), "n"),
    _invalid("no answers", ask(n=0), "n"),
    _invalid("unknown model", ask(model="gpt-17"), "model"),
    _invalid("id after the vocabulary", _ids(264), "token_ids"),
    _invalid("greatest id", _ids(5, (1 << 32) - 1), "token_ids"),
    _invalid("unknown chat role", _chat(("nobody", "hello")), "chat"),
    _invalid("endless key", ask(key="k" * 257), "idempotency_key"),
    Row("text that is no UTF-8", field(1, b"\xff\xfe"), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    Row(
        "surrogates in a model's name",
        ask().SerializeToString() + field(4, b"\xed\xa0\x80"),
        Code.INVALID_ARGUMENT,
        "INVALID_REQUEST",
    ),
    Row("a field without its end", b"\x0a\x7fabc", Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
)


# --- calls ----------------------------------------------------------------------------------------


def raw_stream(here: Deployment, body: bytes) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    """Generate, with these very bytes as the request."""
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
    method = here.channel.unary_stream(GENERATE, request_serializer=_as_they_are)
    return method(body)


async def sent(
    channel: grpc.aio.Channel, path: str, body: bytes, *, metadata: Metadata = ()
) -> grpc.aio.AioRpcError:
    """The error that any call ends with after these very bytes, before any message.

    On the wire a single message is a stream of one.  It goes out with the call: a write of its own
    may come after the end, and the library then calls that INTERNAL, whatever it was.
    """
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
    method = channel.unary_stream(path, request_serializer=_as_they_are)
    return await refusal_of(method(body, metadata=metadata))


def _as_they_are(body: bytes) -> bytes:
    return body


async def refusal_of(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> grpc.aio.AioRpcError:
    """The error that a call ends with, before any message."""
    try:
        async for step in call:
            raise AssertionError(f"an answer came: {step!r}")
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


# --- the proof ------------------------------------------------------------------------------------


async def settled(here: Deployment) -> History:
    """The log, reduced, once every request in it has closed and both engines know."""
    known = -1
    while True:
        position = here.store.last_position
        if position != known:
            known = position
            history = History()
            for stored in here.store.tail(1):
                assert history.apply(stored.entry) is None
            if {state.phase for state in history.requests.values()} <= DONE and whole(here):
                return history
        elif whole(here):
            known = -1
        await anyio.lowlevel.checkpoint()


def whole(here: Deployment) -> bool:
    """Whether each engine's own list has all pages free."""
    engines = (here.prefill, here.decode)
    return all(e.core.allocator.free == e.core.allocator.capacity for e in engines)


async def nothing_lost(here: Deployment, metadata: Metadata = ()) -> None:
    """A good request is answered, every page is home by everybody's word, the log is clean."""
    good = pb.CompleteRequest(generation=ask(tokens=7, new=4))
    answer = await here.generation.Complete(good, metadata=metadata)
    assert answer.outcome.usage.new_tokens == 4
    history = await settled(here)
    for account in history.ledger.values():
        assert account.free_pages == account.capacity
    assert replay([(s.position, s.entry) for s in here.store.tail(1)]).clean


def events_of(here: Deployment, request: str) -> list[str]:
    """The names of a request's events."""
    return [type(s.entry.event).__name__ for s in here.store.read(RequestId(request))]


def admissions(here: Deployment) -> int:
    """How many requests were ever given resources."""
    return sum(type(s.entry.event).__name__ == "Admitted" for s in here.store.tail(1))


def told_engines(here: Deployment) -> list[str]:
    """The requests that any engine has heard of."""
    told = (*here.prefill.published, *here.decode.published)
    return [p.entry.request for p in told if p.entry.request != FLEET]


def unrepeated(message: str, metadata: Mapping[str, str]) -> set[str]:
    """Numbers in a message that its metadata do not repeat; quoted names are no numbers."""
    number = re.compile(r"(?<![\w'])-?\d+(?:\.\d+)?")
    return set(number.findall(message)) - set(number.findall(" ".join(metadata.values())))


def says(error: grpc.aio.AioRpcError, row: Row) -> str:
    """Hold a status to a row; the request's id, if the log knows the request."""
    info, found = details(error)
    assert error.code() is row.code, error
    assert (info.domain, info.reason) == ("custody", row.reason)
    assert error.details()
    assert not unrepeated(str(error.details()), info.metadata)
    if row.field:
        assert row.field in str(found["BadRequest"])
    for name, number in row.numbers:
        assert info.metadata[name] == str(number)
        assert str(number) in str(error.details())
    return str(info.metadata["request_id"]) if "request_id" in info.metadata else ""


def junk(seed: int, lengths: Iterable[int]) -> list[bytes]:
    """Bytes without a meaning, the same for the same seed."""
    source = random.Random(seed)
    return [source.randbytes(length) for length in lengths]


# --- credentials ----------------------------------------------------------------------------------

ROLES = {
    "alice": "client",
    "bob": "client",
    "engine": "engine",
    "bound": "engine",
    "op": "operator",
}
"""Names of callers and their roles; a client's tenant is its name."""


def bearer(token: str) -> Metadata:
    """What a call with this token carries."""
    return (("authorization", f"Bearer {token}"),)


def credentials_file(path: Path) -> tuple[Path, dict[str, str]]:
    """A file with one credential for each of `ROLES`, and their tokens by name."""
    tokens = {name: f"custody_{secrets.token_urlsafe(32)}" for name in ROLES}
    lines: list[str] = []
    for name, role in ROLES.items():
        lines += ["[[credential]]", f'name = "{name}"', f'role = "{role}"']
        if role == "client":
            lines.append(f'tenant = "{name}"')
        if name == "bound":
            lines.append('engine = "somebody"')
        lines += [f'token_sha256 = "{token_digest(tokens[name])}"', ""]
    path.write_text("\n".join(lines))
    return path, tokens


class Impostor(FakeEngine):
    """An engine that is another process than the one whose incarnation it claims."""

    def hello(self) -> fleet_pb2.Hello:
        hello = super().hello()
        hello.process_id += 1
        return hello


@asynccontextmanager
async def guarded(
    model: Path, path: Path, **settings: object
) -> AsyncIterator[tuple[Deployment, dict[str, str]]]:
    """A deployment that knows its callers, with engines that it lets in, and all tokens."""
    credentials, tokens = credentials_file(path)
    secret = path.with_name("engine.token")
    secret.write_text(tokens["engine"])
    dial = Dial(token=Token(secret))
    async with deployment(model, credentials=credentials, engine_dial=dial, **settings) as here:  # type: ignore[arg-type]
        yield here, tokens
