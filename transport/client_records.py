"""One request and those who read its answer, and the messages that they are sent.

Owns: what is remembered of a request for its clients, and how effects look to them.
Must not know: who decides, and when anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from engine.effects import Publish, TellAdmitted, TellTokens
from lifecycle.events import Aborted, Admitted, Finished, Rejected
from lifecycle.ids import RequestId
from transport import refusals
from transport.codec_values import FINISH_REASONS
from transport.mailbox import Mailbox
from transport.pb import fleet_pb2, generation_pb2
from transport.refusals import Refusal

Step = generation_pb2.GenerateResponse | Refusal
Reader = Mailbox[Step]
Key = tuple[str, str]


@attrs.frozen(kw_only=True)
class Asked:
    """A request that can be decided on: tokenised, its sampling validated and filled in."""

    tokens: tuple[int, ...]
    sampling: generation_pb2.Sampling
    new_tokens_max: int
    deadline_ns: int
    asked_ns: int
    tenant: str
    key: str = ""
    body: bytes = b""


@attrs.define(eq=False)
class Record:
    """One request and those who read its answer."""

    request: RequestId
    asked_ns: int
    deadline_ns: int
    key: Key | None = None
    field: str = ""
    told: str = ""
    numbers: Mapping[str, object] = attrs.Factory(dict)
    prompt_tokens: int = 0
    readers: list[Reader] = attrs.Factory(list)
    admission: generation_pb2.GenerateResponse | None = None
    chunks: list[generation_pb2.GenerateResponse] = attrs.Factory(list)
    tokens: int = 0
    attempts: int = 0
    first_token_ns: int = 0
    stop_string: str = ""
    stop_token: int | None = None
    end: Step | None = None
    closed: bool = False


def admission_step(effect: TellAdmitted, *, queued_ns: int) -> generation_pb2.GenerateResponse:
    """The first message of a stream."""
    event = effect.admitted
    admission = generation_pb2.Admission(
        request_id=effect.request,
        attempt=effect.attempt,
        prompt_tokens=event.prompt_tokens,
        new_tokens_max=event.new_tokens_max,
        context_tokens=event.context_tokens,
        prefill_engine=event.prefill.engine,
        decode_engine=event.decode.engine,
        queued_ns=queued_ns,
    )
    return generation_pb2.GenerateResponse(admission=admission)


def chunk_step(effect: TellTokens) -> generation_pb2.GenerateResponse:
    """The next tokens; their index counts from the request's first new token."""
    chunk = generation_pb2.Chunk(
        first_index=effect.first,
        token_ids=effect.tokens,
        text="".join(effect.texts),
        logprobs=effect.logprobs,
    )
    return generation_pb2.GenerateResponse(chunk=chunk)


def note_stop(record: Record, batch: fleet_pb2.TokenBatch) -> None:
    """Remember what made the answer stop, which no event says."""
    match batch.WhichOneof("matched_stop"):
        case "stop_string":
            record.stop_string = batch.stop_string
        case "stop_token_id":
            record.stop_token = batch.stop_token_id
        case None:
            pass


def end_step(record: Record, outcome: Finished | Aborted | Rejected) -> Step:
    """The last message of a stream, or the status that ends it."""
    match outcome:
        case Rejected():
            return refusals.rejected(
                record.request,
                outcome,
                field=record.field,
                told=record.told,
                numbers=record.numbers,
            )
        case Aborted():
            return refusals.aborted(
                record.request, outcome, attempts=record.attempts, tokens=record.tokens
            )
        case Finished():
            message = generation_pb2.Outcome(
                finish_reason=FINISH_REASONS.encode(outcome.reason),
                usage=generation_pb2.Usage(
                    prompt_tokens=record.prompt_tokens, new_tokens=record.tokens
                ),
                attempts=record.attempts,
                time_to_first_token_ns=max(0, record.first_token_ns - record.asked_ns),
            )
            if record.stop_string:
                message.stop_string = record.stop_string
            elif record.stop_token is not None:
                message.stop_token_id = record.stop_token
            return generation_pb2.GenerateResponse(outcome=message)


def payload_message(effect: Publish, *, digest_key: bytes) -> fleet_pb2.Payload:
    """What travels beside an admission, never in it."""
    payload, event = effect.payload, effect.entry.event
    message = fleet_pb2.Payload(digest_key=digest_key)
    if payload is None or not isinstance(event, Admitted):
        return message
    message.prompt_token_ids.extend(payload.tokens)
    message.relayed_tokens = payload.relayed
    if isinstance(payload.sampling, generation_pb2.Sampling):
        message.sampling.CopyFrom(payload.sampling)
    # A later attempt has fewer tokens left than the request began with.
    message.sampling.new_tokens_max = event.new_tokens_max
    return message
