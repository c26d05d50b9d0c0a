"""Every cause has its status, and every status says the numbers."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from lifecycle.events import Aborted, Cause, RejectCode, Rejected
from lifecycle.ids import request_id
from tests.bad_input import unrepeated
from transport import refusals

REQUEST = request_id(epoch=1, serial=1)
Code = grpc.StatusCode


def rejection(code: RejectCode, *, capacity_tokens: int = 0) -> Rejected:
    return Rejected(code, "9 exceed 8", 9, 1, 8, capacity_tokens, "tenant", 3)


def test_every_rejection_and_every_cause_has_a_status() -> None:
    """Nothing is left to become UNKNOWN."""
    assert refusals.REJECTIONS.keys() == set(RejectCode)
    assert refusals.ABORTS.keys() == set(Cause)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (RejectCode.INVALID_REQUEST, Code.INVALID_ARGUMENT),
        (RejectCode.CONTEXT_LENGTH_EXCEEDED, Code.INVALID_ARGUMENT),
        (RejectCode.KV_POOL_CAPACITY_EXCEEDED, Code.OUT_OF_RANGE),
        (RejectCode.QUEUE_FULL, Code.RESOURCE_EXHAUSTED),
        (RejectCode.QUEUE_TIMEOUT, Code.RESOURCE_EXHAUSTED),
        (RejectCode.TENANT_QUOTA_EXCEEDED, Code.RESOURCE_EXHAUSTED),
        (RejectCode.DRAINING, Code.UNAVAILABLE),
        (RejectCode.NOT_READY, Code.UNAVAILABLE),
        (RejectCode.NO_ENGINE, Code.UNAVAILABLE),
        (RejectCode.DEADLINE, Code.DEADLINE_EXCEEDED),
        (RejectCode.CANCELLED, Code.CANCELLED),
    ],
)
def test_a_rejection_keeps_its_reason_and_numbers(code: RejectCode, status: Code) -> None:
    """The reason is the rejection's name; the numbers compared are metadata."""
    refusal = refusals.rejected(REQUEST, rejection(code, capacity_tokens=8))
    assert (refusal.code, refusal.reason) == (status, code.name)
    assert refusal.message == "9 exceed 8"
    assert refusal.metadata == {
        "request_id": REQUEST,
        "prompt_tokens": "9",
        "new_tokens_max": "1",
        "context_tokens": "8",
        "capacity_tokens": "8",
    }


@pytest.mark.parametrize(
    ("cause", "status", "reason"),
    [
        (Cause.ENGINE_LOST, Code.UNAVAILABLE, "ENGINE_LOST"),
        (Cause.TRANSFER_FAILED, Code.UNAVAILABLE, "TRANSFER_FAILED"),
        (Cause.ATTEMPTS_EXHAUSTED, Code.UNAVAILABLE, "ATTEMPTS_EXHAUSTED"),
        (Cause.SCHEDULER_RESTARTED, Code.UNAVAILABLE, "SCHEDULER_RESTARTED"),
        (Cause.DEADLINE, Code.DEADLINE_EXCEEDED, "DEADLINE"),
        (Cause.CLIENT_CANCEL, Code.CANCELLED, "CANCELLED"),
        (Cause.SLOW_READER, Code.RESOURCE_EXHAUSTED, "SLOW_READER"),
        (Cause.ISOLATION_VIOLATION, Code.INTERNAL, "KV_ISOLATION_VIOLATION"),
    ],
)
def test_an_aborted_request_says_why(cause: Cause, status: Code, reason: str) -> None:
    """Code and reason follow from the cause alone."""
    refusal = refusals.aborted(REQUEST, Aborted(cause, "p/1/0"), attempts=2, tokens=5)
    assert (refusal.code, refusal.reason) == (status, reason)
    assert refusal.metadata.items() >= {"attempts": "2", "tokens": "5"}.items()


def test_only_a_broken_isolation_rule_is_internal() -> None:
    """INTERNAL is the one failure that gateways do not retry."""
    internal = [c for c, (code, _) in refusals.ABORTS.items() if code is Code.INTERNAL]
    assert internal == [Cause.ISOLATION_VIOLATION]
    assert Code.INTERNAL not in refusals.REJECTIONS.values()


def test_an_isolation_violation_names_page_and_tags() -> None:
    """What was expected and what was found can be looked up in the log."""
    event = Aborted(Cause.ISOLATION_VIOLATION, "d/1/0", "foreign tag", 7, 0xA, 0xB)
    refusal = refusals.aborted(REQUEST, event, attempts=1, tokens=0)
    numbers = {"page": "7", "tag_expected": "0xa", "tag_found": "0xb"}
    assert refusal.metadata.items() >= numbers.items()
    assert refusal.message.endswith("foreign tag")


def test_each_detail_type_stands_once() -> None:
    """ErrorInfo always; BadRequest, RetryInfo and QuotaFailure where they fit."""
    full = refusals.Refusal(
        code=Code.RESOURCE_EXHAUSTED,
        reason="TENANT_QUOTA_EXCEEDED",
        message="m",
        field="f",
        retry_seconds=3,
        quota="t",
    )
    status = full.proto()
    names = [d.type_url.rsplit(".", 1)[-1] for d in status.details]
    assert names == ["ErrorInfo", "BadRequest", "RetryInfo", "QuotaFailure"]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("custody", "TENANT_QUOTA_EXCEEDED")
    retry = error_details_pb2.RetryInfo()
    assert status.details[2].Unpack(retry)
    assert retry.retry_delay.seconds == 3
    plain = refusals.log_unavailable("disk full").proto()
    assert [d.type_url.rsplit(".", 1)[-1] for d in plain.details] == ["ErrorInfo"]


def test_a_full_queue_says_when_to_come_again() -> None:
    """RetryInfo goes with a queue that was full or too slow, and with nothing final."""
    retried = {
        code
        for code in RejectCode
        if refusals.rejected(REQUEST, rejection(code)).retry_seconds is not None
    }
    assert retried == {RejectCode.QUEUE_FULL, RejectCode.QUEUE_TIMEOUT}


def test_reasons_are_short_and_upper_case() -> None:
    """What clients compare is at most 63 characters of capitals and underscores."""
    reasons = [code.name for code in RejectCode] + [r for _, r in refusals.ABORTS.values()]
    for reason in reasons:
        assert len(reason) <= 63
        assert reason == reason.upper()
        assert reason.replace("_", "").isalpha()


def test_every_rejection_repeats_its_numbers() -> None:
    """Each code, with the very message that the core gives it, and whatever it compares."""
    numbers = {
        "waiting": 17,
        "queue_limit": 18,
        "queue_ns": 19,
        "prefill_engines": 20,
        "decode_engines": 21,
        "deadline_ns": 22,
        "index": 23,
    }
    messages = {
        RejectCode.INVALID_REQUEST: "the id at index 23",
        RejectCode.CONTEXT_LENGTH_EXCEEDED: "9 prompt tokens and 1 new token exceed 8",
        RejectCode.KV_POOL_CAPACITY_EXCEEDED: "9 prompt tokens and 1 new token, pool of 7",
        RejectCode.QUEUE_FULL: "the queue of 18 is full: 17 requests waiting",
        RejectCode.QUEUE_TIMEOUT: "longer than the 19 ns",
        RejectCode.NO_ENGINE: "20 prefill and 21 decode engines",
        RejectCode.DEADLINE: "the deadline 22 ns has passed",
    }
    for code in RejectCode:
        message = messages.get(code, "no number")
        event = Rejected(code, message, 9, 1, 8, 7, "tenant", 3)
        refusal = refusals.rejected(REQUEST, event, numbers=numbers)
        assert not unrepeated(message, refusal.metadata), code
        assert len({d.type_url for d in refusal.proto().details}) == len(refusal.proto().details)


def test_every_abort_repeats_its_numbers_and_stands_alone() -> None:
    """Whatever the cause: a sentence that says when, and numbers that are in the metadata too."""
    for cause in Cause:
        event = Aborted(cause, "p/1/0", "after 71 of 72 bytes", 7, 0xA, 0xB)
        refusal = refusals.aborted(REQUEST, event, attempts=2, tokens=5)
        assert not unrepeated(refusal.message, refusal.metadata), cause
        assert "in attempt 2, after 5 tokens" in refusal.message
        assert len({d.type_url for d in refusal.proto().details}) == len(refusal.proto().details)


def test_the_table_of_answers() -> None:
    """Code and reason of everything that a client can be told, as clients are promised."""
    promised = {
        "INVALID_REQUEST": Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED": Code.INVALID_ARGUMENT,
        "KV_POOL_CAPACITY_EXCEEDED": Code.OUT_OF_RANGE,
        "QUEUE_FULL": Code.RESOURCE_EXHAUSTED,
        "QUEUE_TIMEOUT": Code.RESOURCE_EXHAUSTED,
        "TENANT_QUOTA_EXCEEDED": Code.RESOURCE_EXHAUSTED,
        "SLOW_READER": Code.RESOURCE_EXHAUSTED,
        "DRAINING": Code.UNAVAILABLE,
        "NOT_READY": Code.UNAVAILABLE,
        "NO_ENGINE": Code.UNAVAILABLE,
        "ENGINE_LOST": Code.UNAVAILABLE,
        "ENGINE_FAILED": Code.UNAVAILABLE,
        "PROMPT_MISMATCH": Code.UNAVAILABLE,
        "TRANSFER_FAILED": Code.UNAVAILABLE,
        "ATTEMPTS_EXHAUSTED": Code.UNAVAILABLE,
        "SCHEDULER_RESTARTED": Code.UNAVAILABLE,
        "SHUTDOWN": Code.UNAVAILABLE,
        "LOG_UNAVAILABLE": Code.UNAVAILABLE,
        "DEADLINE": Code.DEADLINE_EXCEEDED,
        "CANCELLED": Code.CANCELLED,
        "CLIENT_GONE": Code.CANCELLED,
        "UNAUTHENTICATED": Code.UNAUTHENTICATED,
        "PERMISSION_DENIED": Code.PERMISSION_DENIED,
        "NOT_FOUND": Code.NOT_FOUND,
        "REQUEST_ID_REUSED": Code.ALREADY_EXISTS,
        "POSITION_OUT_OF_RANGE": Code.OUT_OF_RANGE,
        "KV_ISOLATION_VIOLATION": Code.INTERNAL,
    }
    told = {code.name: status for code, status in refusals.REJECTIONS.items()}
    told |= {reason: status for status, reason in refusals.ABORTS.values()}
    for refusal in (
        refusals.log_unavailable("full"),
        refusals.slow_reader(REQUEST, waiting=2, limit=1),
        refusals.unauthenticated("no"),
        refusals.permission_denied("no"),
        refusals.not_found("request", "r"),
        refusals.key_reused("k", REQUEST, answered=False),
        refusals.position_out_of_range(9, first=1, last=3),
        refusals.bad_argument("f", "m"),
        refusals.malformed("/m", size_bytes=3),
    ):
        told[refusal.reason] = refusal.code
        assert not unrepeated(refusal.message, refusal.metadata)
    assert told == promised
    page = Path("docs/clients.md").read_text(encoding="utf-8")
    for reason, code in promised.items():
        assert f"| `{code.name}` | `{reason}` |" in page


def test_what_is_endless_is_cut() -> None:
    """A status of the longest message and metadata fits into 8 KiB of headers."""
    refusal = refusals.Refusal(
        code=Code.INVALID_ARGUMENT,
        reason="INVALID_REQUEST",
        message="m" * 100_000,
        metadata=dict.fromkeys("abcdef", "v" * 100000),
        field="f",
    )
    assert len(refusal.proto().SerializeToString()) < 4096
