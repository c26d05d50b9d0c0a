"""Claims about a status for human eyes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import ask, deployment
from tests.test_services import begin, last
from tests.tiny import tiny_llama
from transport.pb import admin_pb2, fleet_pb2, lifecycle_pb2, log_pb2
from transport.status_text import COLUMNS, status_lines

pytestmark = pytest.mark.anyio

LARGE = 9_999_999
"""More pages, and more digits, than a deployment has."""


def crowded() -> admin_pb2.GetStatusResponse:
    """A status in which every number is large, and everything that is said at times is said."""
    pages = admin_pb2.Amounts(
        capacity=LARGE, free=LARGE, held=LARGE, booked=LARGE, quarantined=LARGE
    )
    counters = fleet_pb2.EngineCounters(
        header_reads_checked=LARGE**2, header_mismatches=LARGE, header_reads_unchecked=LARGE
    )
    causes = [
        admin_pb2.QuarantinedPages(cause=cause, pages=LARGE)
        for cause in lifecycle_pb2.QuarantineCause.values()
        if cause
    ]
    rank = admin_pb2.RankStatus(
        process_id=LARGE, pages=pages, counters=counters, quarantined=causes
    )
    engine = admin_pb2.EngineStatus(
        engine="decode-engine-123",
        role=lifecycle_pb2.ROLE_DECODE,
        state=admin_pb2.ENGINE_STATE_DRAINING,
        page_tokens=LARGE,
        requests=LARGE,
        ranks=[rank],
    )
    phases = [log_pb2.PHASE_ADMITTED, log_pb2.PHASE_DECODING, log_pb2.PHASE_ENDED]
    return admin_pb2.GetStatusResponse(
        model="SmolLM2-135M-Instruct.Q4_1",
        context_tokens=LARGE,
        process_id=LARGE,
        epoch=LARGE,
        draining=True,
        log_position=LARGE**2,
        durable_position=LARGE**2,
        log_first_position=LARGE,
        log_failure="the disk is full and says so at some length, as disks do " * 3,
        queued=LARGE,
        phases=[admin_pb2.PhaseCount(phase=phase, count=LARGE) for phase in phases],
        engines=[engine],
    )


async def test_a_status_fits_a_terminal() -> None:
    """No line is longer than the usual width, however large the numbers are."""
    lines = list(status_lines(crowded()))
    assert max(len(line) for line in lines) <= COLUMNS
    text = " ".join(" ".join(lines).split())
    for said in ("draining, process 9999999", "ended but not settled", "as disks do", "no_proof"):
        assert said in text


async def test_one_of_a_thing_is_one() -> None:
    """An engine with one page and one request says so in the singular."""
    rank = admin_pb2.RankStatus(pages=admin_pb2.Amounts(capacity=1, free=1))
    engine = admin_pb2.EngineStatus(engine="d", page_tokens=16, requests=1, ranks=[rank])
    text = "\n".join(status_lines(admin_pb2.GetStatusResponse(engines=[engine])))
    assert "1 request\n" in text
    assert "1 page of 16 tokens: 16 tokens" in text


async def test_requests_that_are_over_are_not_counted(tmp_path: Path) -> None:
    """Closed requests are forgotten some time later, so their number would say nothing."""
    model = tiny_llama(tmp_path / "tiny")
    async with deployment(model, pause_at=2) as here:
        call, _ = await begin(here, ask(new=6))
        await here.decode.paused.wait()
        status = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert "requests: 0 queued, 1 decoding" in list(status_lines(status))
        here.decode.go_on()
        assert await last(call) == "outcome"
        while (status := await here.admin.GetStatus(admin_pb2.GetStatusRequest())).phases:
            pass
        assert "requests: 0 queued, none open" in list(status_lines(status))
