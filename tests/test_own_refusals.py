"""What an engine did and its own copy of the log refuses is said at once, never sat out."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from engine.effects import Propose
from lifecycle.events import Aborted, Cause, Failed, Finished
from tests.driver import DECODE, Driver


def _reads_too_much(driver: Driver) -> None:
    driver.counted = lambda good: attrs.evolve(good, pages_read=99)


def _reads_unchecked(driver: Driver) -> None:
    driver.counted = lambda good: attrs.evolve(good, reads_unchecked=3)


def _compares_too_little(driver: Driver) -> None:
    driver.compared = lambda _asked, good: attrs.evolve(good, pages=5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            _reads_too_much,
            "Finished breaks read-what-was-written/reads: 99 pages read of 5 granted",
        ),
        (
            _reads_unchecked,
            "Finished breaks read-what-was-written/reads: 3 reads went unchecked beside 1",
        ),
        (
            _compares_too_little,
            "Verified breaks read-what-was-written/verified: 5 pages verified of 2 written",
        ),
    ],
)
def test_a_result_that_the_own_log_refuses_ends_the_attempt_at_once(
    wrong: Callable[[Driver], None], message: str
) -> None:
    """The engine fails with the rule and the numbers, and everything comes home, before any time.

    Waiting would end it, too, but only at its deadline, with nothing said about the cause.
    """
    driver = Driver().pair()
    wrong(driver)
    request = driver.submit()
    driver.run()
    said = [e.proposal for p, e in driver.engine_effects if p == DECODE and isinstance(e, Propose)]
    failures = [one.body for one in said if isinstance(one.body, Failed)]
    assert failures == [Failed(Cause.ENGINE_FAILED, message)]
    outcome = driver.outcomes[request]
    assert isinstance(outcome, Aborted)
    assert (outcome.cause, outcome.message) == (Cause.ENGINE_FAILED, message)
    assert all(core.allocator.free == driver.sizes.pages for core in driver.cores.values())
    driver.counted, driver.compared = (lambda good: good), (lambda _asked, good: good)
    again = driver.submit()
    driver.run()
    assert isinstance(driver.outcomes[again], Finished)
