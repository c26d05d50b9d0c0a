"""Each event of a request's log, and an engine's failure, to protobuf and back.

Owns: the fields of the request events.
Must not know: how entries and proposals wrap them.
"""

from __future__ import annotations

from lifecycle.events import (
    Aborted,
    Admitted,
    Drained,
    Dropped,
    Failed,
    Finished,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from transport.codec_values import (
    CAUSES,
    FINISH_REASONS,
    PROOFS,
    PURPOSES,
    QUARANTINE_CAUSES,
    REJECT_CODES,
    decode_grant,
    decode_leg,
    decode_pages,
    decode_party,
    decode_tokens,
    encode_grant,
    encode_leg,
    encode_pages,
    encode_party,
    encode_tokens,
    require,
)
from transport.pb import lifecycle_pb2 as pb


def encode_admitted(event: Admitted) -> pb.Admitted:
    return pb.Admitted(
        prompt_tokens=event.prompt_tokens,
        prompt_digest=event.prompt_digest,
        new_tokens_max=event.new_tokens_max,
        context_tokens=event.context_tokens,
        prefill=encode_leg(event.prefill),
        decode=encode_leg(event.decode),
        tenant=event.tenant,
        deadline_ns=event.deadline_ns,
        settle_ns=event.settle_ns,
        attempts_max=event.attempts_max,
        fleet_position=event.fleet_position,
        kinds=event.kinds,
    )


def decode_admitted(message: pb.Admitted) -> Admitted:
    if not message.HasField("prefill"):
        require(message, "prefill")
    if not message.HasField("decode"):
        require(message, "decode")
    return Admitted(
        message.prompt_tokens,
        message.prompt_digest,
        message.new_tokens_max,
        message.context_tokens,
        decode_leg(message.prefill),
        decode_leg(message.decode),
        message.tenant,
        message.deadline_ns,
        message.settle_ns,
        message.attempts_max,
        message.fleet_position,
        tuple(message.kinds[:]),
    )


def encode_rejected(event: Rejected) -> pb.Rejected:
    return pb.Rejected(
        code=REJECT_CODES.encode(event.code),
        reason=event.reason,
        prompt_tokens=event.prompt_tokens,
        new_tokens_max=event.new_tokens_max,
        context_tokens=event.context_tokens,
        capacity_tokens=event.capacity_tokens,
        tenant=event.tenant,
        fleet_position=event.fleet_position,
    )


def decode_rejected(message: pb.Rejected) -> Rejected:
    return Rejected(
        code=REJECT_CODES.decode(message.code),
        reason=message.reason,
        prompt_tokens=message.prompt_tokens,
        new_tokens_max=message.new_tokens_max,
        context_tokens=message.context_tokens,
        capacity_tokens=message.capacity_tokens,
        tenant=message.tenant,
        fleet_position=message.fleet_position,
    )


def encode_reserved(event: Reserved) -> pb.Reserved:
    return pb.Reserved(
        grant=encode_grant(event.grant),
        purpose=PURPOSES.encode(event.purpose),
        pages=encode_pages(event.pages),
        tokens=encode_tokens(event.tokens),
        kind=event.kind,
        tag=event.tag,
        parties=[encode_party(party) for party in event.parties],
    )


def decode_reserved(message: pb.Reserved) -> Reserved:
    if not message.HasField("grant"):
        require(message, "grant")
    if not message.HasField("tokens"):
        require(message, "tokens")
    return Reserved(
        decode_grant(message.grant),
        PURPOSES.decode(message.purpose),
        decode_pages(message.pages),
        decode_tokens(message.tokens),
        message.kind,
        message.tag,
        tuple([decode_party(party) for party in message.parties[:]]),
    )


def encode_transferred(event: Transferred) -> pb.Transferred:
    return pb.Transferred(
        grant=encode_grant(event.grant),
        tokens=encode_tokens(event.tokens),
        pages=encode_pages(event.pages),
        size_bytes=event.size_bytes,
        digest=event.digest,
        step=event.step,
        steps_ended=event.steps_ended,
    )


def decode_transferred(message: pb.Transferred) -> Transferred:
    if not message.HasField("grant"):
        require(message, "grant")
    if not message.HasField("tokens"):
        require(message, "tokens")
    return Transferred(
        decode_grant(message.grant),
        decode_tokens(message.tokens),
        decode_pages(message.pages),
        message.size_bytes,
        message.digest,
        message.step,
        message.steps_ended,
    )


def encode_drained(event: Drained) -> pb.Drained:
    return pb.Drained(
        grant=encode_grant(event.grant),
        party=encode_party(event.party),
        proof=PROOFS.encode(event.proof),
    )


def decode_drained(message: pb.Drained) -> Drained:
    if not message.HasField("grant"):
        require(message, "grant")
    if not message.HasField("party"):
        require(message, "party")
    return Drained(
        decode_grant(message.grant), decode_party(message.party), PROOFS.decode(message.proof)
    )


def encode_verified(event: Verified) -> pb.Verified:
    return pb.Verified(
        grants=[encode_grant(grant) for grant in event.grants],
        pages=event.pages,
        headers_checked=event.headers_checked,
        digests_checked=event.digests_checked,
        method=event.method,
    )


def decode_verified(message: pb.Verified) -> Verified:
    return Verified(
        tuple([decode_grant(grant) for grant in message.grants[:]]),
        message.pages,
        message.headers_checked,
        message.digests_checked,
        message.method,
    )


def encode_finished(event: Finished) -> pb.Finished:
    return pb.Finished(
        reason=FINISH_REASONS.encode(event.reason),
        tokens=event.tokens,
        first_token_ns=event.first_token_ns,
        digest=event.digest,
        pages_read=event.pages_read,
        reads_checked=event.reads_checked,
        reads_unchecked=event.reads_unchecked,
    )


def decode_finished(message: pb.Finished) -> Finished:
    return Finished(
        FINISH_REASONS.decode(message.reason),
        message.tokens,
        message.first_token_ns,
        message.digest,
        message.pages_read,
        message.reads_checked,
        message.reads_unchecked,
    )


def encode_aborted(event: Aborted) -> pb.Aborted:
    return pb.Aborted(
        cause=CAUSES.encode(event.cause),
        reported_by=event.reported_by,
        message=event.message,
        page=event.page,
        tag_expected=event.tag_expected,
        tag_found=event.tag_found,
    )


def decode_aborted(message: pb.Aborted) -> Aborted:
    return Aborted(
        cause=CAUSES.decode(message.cause),
        reported_by=message.reported_by,
        message=message.message,
        page=message.page if message.HasField("page") else None,
        tag_expected=message.tag_expected if message.HasField("tag_expected") else None,
        tag_found=message.tag_found if message.HasField("tag_found") else None,
    )


def encode_requeued(event: Requeued) -> pb.Requeued:
    return pb.Requeued(
        cause=CAUSES.encode(event.cause),
        reported_by=event.reported_by,
        tokens_relayed=event.tokens_relayed,
    )


def decode_requeued(message: pb.Requeued) -> Requeued:
    return Requeued(
        cause=CAUSES.decode(message.cause),
        reported_by=message.reported_by,
        tokens_relayed=message.tokens_relayed,
    )


def encode_quarantined(event: Quarantined) -> pb.Quarantined:
    return pb.Quarantined(
        grant=encode_grant(event.grant),
        cause=QUARANTINE_CAUSES.encode(event.cause),
    )


def decode_quarantined(message: pb.Quarantined) -> Quarantined:
    if not message.HasField("grant"):
        require(message, "grant")
    return Quarantined(
        grant=decode_grant(message.grant),
        cause=QUARANTINE_CAUSES.decode(message.cause),
    )


def encode_released(event: Released) -> pb.Released:
    return pb.Released(
        grant=encode_grant(event.grant),
    )


def decode_released(message: pb.Released) -> Released:
    if not message.HasField("grant"):
        require(message, "grant")
    return Released(decode_grant(message.grant))


def encode_dropped(event: Dropped) -> pb.Dropped:
    return pb.Dropped(
        party=encode_party(event.party),
        number=event.number,
        kind=event.kind,
        rule=event.rule,
        grant=None if event.grant is None else encode_grant(event.grant),
        count=event.count,
    )


def decode_dropped(message: pb.Dropped) -> Dropped:
    if not message.HasField("party"):
        require(message, "party")
    return Dropped(
        party=decode_party(message.party),
        number=message.number,
        kind=message.kind,
        rule=message.rule,
        grant=decode_grant(message.grant) if message.HasField("grant") else None,
        count=message.count,
    )


def encode_failed(event: Failed) -> pb.Failed:
    return pb.Failed(
        cause=CAUSES.encode(event.cause),
        message=event.message,
        page=event.page,
        tag_expected=event.tag_expected,
        tag_found=event.tag_found,
    )


def decode_failed(message: pb.Failed) -> Failed:
    return Failed(
        cause=CAUSES.decode(message.cause),
        message=message.message,
        page=message.page if message.HasField("page") else None,
        tag_expected=message.tag_expected if message.HasField("tag_expected") else None,
        tag_found=message.tag_found if message.HasField("tag_found") else None,
    )
