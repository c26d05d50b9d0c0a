"""What becomes of requests when nobody is left who could serve them, and of lives that are over."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from engine.judge import ANSWERS_OF_LOST
from lifecycle.events import Aborted, Cause, Finished, LostCause, RejectCode, Rejected, Role
from lifecycle.replay import replay
from lifecycle.state import Phase
from tests.driver import DECODE, FOREVER_NS, PREFILL, Driver, Sizes

WAIT_NS = 1_000_000


def _pair(**sizes: Any) -> Driver:
    return Driver(Sizes(engine_wait_ns=WAIT_NS, **sizes)).pair().run()


def _decoding(driver: Driver) -> Any:
    request = driver.submit()
    driver.run_until(lambda: len(driver.tokens.get(request, ())) > 2)
    return request


def test_a_requeued_request_without_an_engine_ends_by_that_name() -> None:
    """It waits for the stated time, no shorter and no longer, and its end names what is missing."""
    driver = _pair()
    request = _decoding(driver)
    driver.kill(DECODE)
    driver.run()
    lost_ns = driver.scheduler.log.fleet.time_ns
    assert driver.phase(request) is Phase.REQUEUED
    driver.tick(lost_ns + WAIT_NS - 1)
    assert request not in driver.outcomes
    driver.now_ns = driver.scheduler.queue.waiting()[0].since_ns + WAIT_NS
    driver.tick()
    outcome = driver.outcomes[request]
    assert isinstance(outcome, Aborted)
    assert outcome.cause is Cause.NO_ENGINE
    assert "1 prefill and 0 decode engines that take requests" in outcome.message
    driver.run()
    assert driver.scheduler.idle
    assert replay(driver.log).clean


def test_a_queued_request_without_an_engine_is_rejected_by_that_name() -> None:
    """It was never admitted, so it owns nothing."""
    driver = _pair(pages=5)
    driver.submit()
    waiting = driver.submit()
    driver.kill(PREFILL)
    driver.run()
    driver.tick(driver.now_ns + 2 * WAIT_NS)
    outcome = driver.outcomes[waiting]
    assert isinstance(outcome, Rejected)
    assert outcome.code is RejectCode.NO_ENGINE
    assert driver.events(waiting) == ["Rejected"]


def test_an_engine_that_comes_in_time_serves_who_waited() -> None:
    """Whoever joins within the time takes the request up where its client is."""
    driver = _pair()
    request = _decoding(driver)
    driver.kill(DECODE)
    driver.run()
    driver.tick(driver.scheduler.log.fleet.time_ns + WAIT_NS - 1)
    driver.join(Role.DECODE, attrs.evolve(DECODE, incarnation=2))
    driver.tick(driver.now_ns + WAIT_NS)
    driver.run()
    assert isinstance(driver.outcomes[request], Finished)
    assert driver.tokens[request] == list(range(6, 16))


def test_an_engine_that_is_too_small_is_none() -> None:
    """A request that fits none of those that are left ends, and holds up nobody behind it."""
    driver = _pair(pages=16)
    request = driver.submit(40, 10)
    driver.run_until(lambda: len(driver.tokens.get(request, ())) > 2)
    driver.kill(DECODE)
    driver.join(Role.DECODE, attrs.evolve(DECODE, incarnation=2), pages=8)
    behind = driver.submit(7, 3)
    driver.run()
    assert behind not in driver.outcomes
    driver.tick(driver.now_ns + 2 * WAIT_NS)
    driver.run()
    ended = driver.outcomes[request]
    assert isinstance(ended, Aborted)
    assert ended.cause is Cause.NO_ENGINE
    assert "fit no pair" in ended.message
    assert isinstance(driver.outcomes[behind], Finished)


def test_without_a_limit_the_deadline_ends_the_wait() -> None:
    """0 waits as long as the request may."""
    driver = Driver(Sizes()).pair().run()
    request = _decoding(driver)
    driver.kill(DECODE)
    driver.run()
    driver.tick(FOREVER_NS - 1)
    assert request not in driver.outcomes
    driver.tick(FOREVER_NS)
    outcome = driver.outcomes[request]
    assert isinstance(outcome, Aborted)
    assert outcome.cause is Cause.DEADLINE


@pytest.mark.parametrize("lives", [2, 5])
def test_lives_that_are_over_are_not_remembered_for_ever(lives: int) -> None:
    """Of each engine's lost lives the last is known, with few answers."""
    driver = _pair()
    for life in range(1, lives + 1):
        party = attrs.evolve(DECODE, incarnation=life)
        if life > 1:
            driver.join(Role.DECODE, party)
        for _ in range(20):
            driver.submit(7, 10)
        driver.run()
        driver.kill(party, LostCause.LEASE)
    lines = {p: line for p, line in driver.scheduler.lines.items() if p.engine == DECODE.engine}
    assert [p.incarnation for p in lines] == [lives]
    assert all(len(line.answers) <= ANSWERS_OF_LOST for line in lines.values())
