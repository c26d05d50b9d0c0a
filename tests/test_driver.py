"""The driver of the cores is trusted by many tests, so it has some of its own."""

from __future__ import annotations

import pytest

from engine.prefill import Posted
from lifecycle.events import Aborted, Cause, Finished
from tests.driver import DECODE, PREFILL, Driver, Sizes, first_come


def test_the_same_picks_give_the_same_log() -> None:
    """Nothing but the picks decides what happens, so a failing world can be run again."""

    def run(step: int) -> Driver:
        numbers = iter(range(0, 10_000, step))
        driver = Driver(Sizes(pages=8), pick=lambda n: next(numbers) % n).pair()
        for _ in range(4):
            driver.submit(7, 16)
        return driver.run()

    assert run(3).log == run(3).log
    assert run(3).log != run(1).log


def test_each_channel_keeps_its_order() -> None:
    """Entries reach an engine in the order of their positions, whoever is served first."""
    driver = Driver(pick=lambda n: n - 1).pair()
    driver.submit()
    seen: dict[object, int] = {}
    while driver.advance():
        for party, core in driver.cores.items():
            assert core.position >= seen.get(party, 0)
            seen[party] = core.position
    assert set(seen) == {PREFILL, DECODE}
    assert first_come(5) == 0


def test_a_world_that_never_rests_is_an_error() -> None:
    """Both ways of going on have a limit, and reaching it fails the test."""
    driver = Driver().pair()
    driver.submit()
    with pytest.raises(AssertionError, match="not at rest after 3 steps"):
        driver.run(most=3)
    with pytest.raises(AssertionError, match="not so after 2 steps"):
        driver.run_until(lambda: False, most=2)
    with pytest.raises(AssertionError, match="at rest before it was so"):
        driver.run_until(lambda: False)


def test_a_failed_write_is_felt() -> None:
    """What a test says of the ends of writes reaches the cores."""
    driver = Driver(Sizes(attempts_max=1)).pair()
    driver.posted = lambda _post: Posted.FAILED
    request = driver.submit()
    driver.run()
    outcome = driver.outcomes[request]
    assert isinstance(outcome, Aborted)
    assert outcome.cause is Cause.TRANSFER_FAILED
    driver.posted = lambda _post: Posted.DONE
    again = driver.submit()
    driver.run()
    assert isinstance(driver.outcomes[again], Finished)
