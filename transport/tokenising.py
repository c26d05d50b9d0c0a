"""From a client's request to token ids and complete sampling parameters.

Owns: limits and checks of a request's own fields, and the defaults of what is not set.
Must not know: queues, engines, the log.

Tokenising takes time, so it happens in worker threads, a few at once, after the byte limit.
"""

from __future__ import annotations

import secrets

import anyio
import anyio.to_thread
import attrs

from engine.sampler import InvalidSampling, SamplingParams
from engine.tokenizer import TextError, Tokenizer
from transport.pb import generation_pb2 as pb

WORKERS = 2
NEW_TOKENS_DEFAULT = 256
KEY_BYTES_MAX = 256

_SAMPLING_FIELDS = {
    "max_new_tokens": "sampling.new_tokens_max",
    "stop": "sampling.stop_strings",
    "stop_tokens": "sampling.stop_token_ids",
}


class UnusableRequest(Exception):
    """A field of the request cannot be used; the client changes it."""

    def __init__(self, *, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@attrs.frozen
class Prepared:
    """Token ids, and sampling parameters with every field set."""

    tokens: tuple[int, ...]
    sampling: pb.Sampling
    new_tokens_max: int


class Tokenising:
    """Prepares requests for one model."""

    def __init__(
        self, tokenizer: Tokenizer, *, model: str, vocabulary: int, prompt_bytes_max: int
    ) -> None:
        """`vocabulary` counts the model's token ids; `prompt_bytes_max` bounds every prompt."""
        self.model = model
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._prompt_bytes_max = prompt_bytes_max
        self._limiter = anyio.CapacityLimiter(WORKERS)

    async def prepare(self, request: pb.GenerateRequest, *, context_tokens: int) -> Prepared:
        """Check everything that needs no engine. Raises UnusableRequest."""
        if request.HasField("model") and request.model != self.model:
            reason = f"{request.model!r} is not served here, {self.model!r} is"
            raise UnusableRequest(field="model", reason=reason)
        if request.HasField("n") and request.n != 1:
            raise UnusableRequest(
                field="n", reason=f"{request.n} answers are asked for, 1 is given"
            )
        key_bytes = len(request.idempotency_key.encode())
        if key_bytes > KEY_BYTES_MAX:
            reason = f"{key_bytes} bytes exceed the limit of {KEY_BYTES_MAX}"
            raise UnusableRequest(field="idempotency_key", reason=reason)
        params = sampling_params(request.sampling)
        tokens = await self._tokens(request)
        if not tokens:
            reason = "0 prompt tokens: at least 1 is needed"
            raise UnusableRequest(field=str(request.WhichOneof("input")), reason=reason)
        new_tokens_max = params.max_new_tokens
        if not request.sampling.HasField("new_tokens_max"):
            room = max(1, context_tokens - len(tokens))
            new_tokens_max = min(NEW_TOKENS_DEFAULT, room)
        return Prepared(tokens, whole_sampling(params, new_tokens_max), new_tokens_max)

    async def _tokens(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        kind = request.WhichOneof("input")
        match kind:
            case "text":
                size_bytes = len(request.text.encode())
            case "token_ids":
                size_bytes = 4 * len(request.token_ids.ids)
            case "chat":
                if not request.chat.messages:
                    # A template would make a prompt of nothing but its own words.
                    raise UnusableRequest(field=kind, reason="0 messages: at least 1 is needed")
                size_bytes = sum(
                    len(m.role.encode()) + len(m.content.encode()) for m in request.chat.messages
                )
            case None:
                reason = "a text, token ids or a chat is needed"
                raise UnusableRequest(field="input", reason=reason)
        if size_bytes > self._prompt_bytes_max:
            reason = f"{size_bytes} bytes exceed the limit of {self._prompt_bytes_max}"
            raise UnusableRequest(field=kind, reason=reason)
        try:
            return await anyio.to_thread.run_sync(self._encode, request, limiter=self._limiter)
        except TextError as error:
            raise UnusableRequest(field=kind, reason=str(error)) from error

    def _encode(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        match request.WhichOneof("input"):
            case "text":
                return tuple(self._tokenizer.encode(request.text))
            case "chat":
                messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
                return tuple(self._tokenizer.encode_chat(messages))
            case _:
                ids = tuple(request.token_ids.ids)
                highest = max(ids, default=0)
                if highest >= self._vocabulary:
                    reason = f"token {highest} is not in the vocabulary of {self._vocabulary}"
                    raise UnusableRequest(field="token_ids", reason=reason)
                return ids


def sampling_params(message: pb.Sampling) -> SamplingParams:
    """The sampler's own parameters, validated there. Raises UnusableRequest."""
    values: dict[str, object] = {
        name: getattr(message, name)
        for name in ("temperature", "top_p", "top_k", "logprobs", "ignore_eos")
        if message.HasField(name)
    }
    if message.HasField("new_tokens_max"):
        values["max_new_tokens"] = message.new_tokens_max
    # Without a seed each request has its own, and repeats its draws when it is requeued.
    values["seed"] = message.seed if message.HasField("seed") else secrets.randbits(64)
    values["stop"] = tuple(message.stop_strings)
    values["stop_tokens"] = tuple(message.stop_token_ids)
    try:
        return SamplingParams(**values)  # type: ignore[arg-type]  # validated by the class
    except InvalidSampling as error:
        field = _SAMPLING_FIELDS.get(error.field, f"sampling.{error.field}")
        reason = f"{error.value!r} is not {error.limit}"
        raise UnusableRequest(field=field, reason=reason) from error


def whole_sampling(params: SamplingParams, new_tokens_max: int) -> pb.Sampling:
    """The message with every field set, so that an engine needs no defaults."""
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        new_tokens_max=new_tokens_max,
        stop_strings=params.stop,
        stop_token_ids=params.stop_tokens,
        logprobs=params.logprobs,
        ignore_eos=params.ignore_eos,
    )
