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
from engine.tokenizer import ChatTemplateError, InvalidText, TextError, Tokenizer
from lifecycle.wording import counted
from transport.pb import generation_pb2 as pb

WORKERS = 2
NEW_TOKENS_DEFAULT = 256
KEY_BYTES_MAX = 256
NAME_CHARACTERS_MAX = 64

_SAMPLING_FIELDS = {
    "max_new_tokens": "sampling.new_tokens_max",
    "stop": "sampling.stop_strings",
    "stop_tokens": "sampling.stop_token_ids",
}


class UnusableRequest(Exception):
    """A field of the request cannot be used; the client changes it.

    The text may stand in the log, so it holds nothing of a prompt; `told` is for the client alone.
    `numbers` are those that the text compares.
    """

    def __init__(self, *, field: str, reason: str, more: str = "", **numbers: object) -> None:
        """`more` is what only the client may be told."""
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.told = f"{field}: {reason}: {more}" if more else ""
        self.numbers = numbers


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
            wanted = request.model[:NAME_CHARACTERS_MAX]
            reason = f"{wanted!r} is not served here, {self.model!r} is"
            raise UnusableRequest(field="model", reason=reason, model=wanted, served=self.model)
        if request.HasField("n") and request.n != 1:
            raise UnusableRequest(
                field="n",
                reason=f"{counted(request.n, 'answer')} asked for, one is given",
                n=request.n,
            )
        key_bytes = len(request.idempotency_key.encode())
        if key_bytes > KEY_BYTES_MAX:
            raise _too_large("idempotency_key", key_bytes, limit_bytes=KEY_BYTES_MAX)
        params = sampling_params(request.sampling)
        tokens = await self._tokens(request)
        if not tokens:
            reason = "0 prompt tokens: at least one is needed"
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
                    raise UnusableRequest(field=kind, reason="0 messages: at least one is needed")
                size_bytes = sum(
                    len(m.role.encode()) + len(m.content.encode()) for m in request.chat.messages
                )
            case None:
                reason = "a text, token ids or a chat is needed"
                raise UnusableRequest(field="input", reason=reason)
        if size_bytes > self._prompt_bytes_max:
            raise _too_large(kind, size_bytes, limit_bytes=self._prompt_bytes_max)
        try:
            return await anyio.to_thread.run_sync(self._encode, request, limiter=self._limiter)
        except ChatTemplateError as error:
            # A template may put words of the conversation into what it complains about.
            reason = "the model's chat template refuses these messages"
            raise UnusableRequest(field=kind, reason=reason, more=error.reason) from error
        except InvalidText as error:
            raise UnusableRequest(field=kind, reason=str(error), index=error.index) from error
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
                # Where, and not which: an id is a word of the prompt.
                index = next((i for i, token in enumerate(ids) if token >= self._vocabulary), None)
                if index is not None:
                    reason = f"the id at index {index} is not in the vocabulary of "
                    reason += str(self._vocabulary)
                    raise UnusableRequest(
                        field="token_ids", reason=reason, index=index, vocabulary=self._vocabulary
                    )
                return ids


def _too_large(field: str, size_bytes: int, *, limit_bytes: int) -> UnusableRequest:
    return UnusableRequest(
        field=field,
        reason=f"{size_bytes} bytes exceed the limit of {limit_bytes}",
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )


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
        value: object = error.value
        if isinstance(value, str):
            value = f"a string of {counted(len(value.encode()), 'byte')}"
        reason = f"{value} is not {error.limit}"
        raise UnusableRequest(field=field, reason=reason, value=value, limit=error.limit) from error


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
