"""The simulated store is a store like any other, and its disk fails as it is told to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.store import EventStore, StoreUnavailable
from tests.store_contract import A, StoreContract, entries
from transport.simulated_store import SimulatedStore


class TestSimulatedStore(StoreContract):
    """The contract that every store keeps."""

    def open(self, folder: Path) -> EventStore:
        return SimulatedStore()

    def after_crash(self, store: EventStore) -> EventStore:
        assert isinstance(store, SimulatedStore)
        return store.survivor()


def filled(durable: int, more: int) -> SimulatedStore:
    """A store with some entries that are durable, and some that are not."""
    store = SimulatedStore()
    store.append(A, 0, entries(A, 0, durable))
    store.flush()
    store.append(A, durable, entries(A, durable, more))
    return store


def test_a_machine_takes_any_part_of_the_unflushed_tail_along() -> None:
    """What was durable stays, the rest is cut anywhere; a process's end takes nothing."""
    lasts = {
        filled(2, 3).after_crash(random.Random(seed), machine=True).last_position
        for seed in range(60)
    }
    assert lasts == {2, 3, 4, 5}
    assert filled(2, 3).after_crash(random.Random(0), machine=False).last_position == 5


def test_what_follows_a_crash_goes_on_where_the_log_was_cut() -> None:
    """Sequences count what is left, and epochs are never taken twice."""
    store = filled(2, 3)
    epoch = store.take_epoch()
    found = store.after_crash(random.Random(1), machine=True)
    rest = found.last_position
    assert found.append(A, rest, entries(A, rest, 1)) == rest + 1
    assert found.take_epoch() == epoch + 1


def test_a_full_disk_refuses_until_there_is_room() -> None:
    """Nothing of a refused append is there."""
    store = filled(1, 0)
    store.full = True
    with pytest.raises(StoreUnavailable) as raised:
        store.append(A, 1, entries(A, 1, 1))
    assert not raised.value.lasting
    store.full = False
    assert store.append(A, 1, entries(A, 1, 1)) == 2


def test_after_a_failed_flush_only_a_reopened_store_takes_more() -> None:
    """What was not durable is cut off by reopening, and is to be appended again."""
    store = filled(1, 2)
    store.sick = True
    for attempt in (store.flush, store.flush, lambda: store.append(A, 3, entries(A, 3, 1))):
        with pytest.raises(StoreUnavailable) as raised:
            attempt()
        assert raised.value.lasting
    store.reopen()
    assert (store.last_position, store.flush()) == (1, 1)
    assert store.append(A, 1, entries(A, 1, 1)) == 2
