"""What every store of the event log must do; `test_stores` runs it on each.

A subclass says how a store is opened, and what a crash leaves of it.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from engine.store import (
    Append,
    EventStore,
    MisfiledEntry,
    PositionOutOfRange,
    Stored,
    StoreUnavailable,
    WrongSequence,
)
from lifecycle.events import ByScheduler, Cause, Entry, Requeued, Resumed
from lifecycle.ids import FLEET, RequestId, request_id

A = request_id(epoch=1, serial=1)
B = request_id(epoch=1, serial=2)
C = request_id(epoch=1, serial=3)


def entries(request: RequestId, start: int, count: int) -> tuple[Entry, ...]:
    """Entries that a store takes; it does not ask whether they make sense."""
    return tuple(
        Entry(request, n, 1, ByScheduler(1), 100 + n, Requeued(Cause.DEADLINE, "test", n))
        for n in range(start, start + count)
    )


def numbered(position: int, found: tuple[Entry, ...]) -> list[Stored]:
    return [Stored(p, entry) for p, entry in enumerate(found, start=position)]


class StoreContract(abc.ABC):
    """The claims; `store` is closed after each."""

    @abc.abstractmethod
    def open(self, folder: Path) -> EventStore:
        """A new, empty store."""

    @abc.abstractmethod
    def after_crash(self, store: EventStore) -> EventStore:
        """What a crash of the machine at this moment leaves at the least."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[EventStore]:
        store = self.open(tmp_path / "log")
        yield store
        store.close()

    def test_a_new_store_is_empty(self, store: EventStore) -> None:
        """Nothing is there: no position, no epoch, no entry."""
        assert (store.first_position, store.last_position, store.durable_position) == (1, 0, 0)
        assert store.epoch == 0
        assert store.read(A) == ()
        assert list(store.tail(1)) == []

    def test_positions_count_all_entries_from_one(self, store: EventStore) -> None:
        """Appends for any requests get consecutive positions, and reads give them back."""
        assert store.append(A, 0, entries(A, 0, 2)) == 1
        assert store.append(B, 0, entries(B, 0, 1)) == 3
        assert store.append(A, 2, entries(A, 2, 1)) == 4
        assert store.last_position == 4
        assert list(store.read(A)) == numbered(1, entries(A, 0, 2)) + numbered(4, entries(A, 2, 1))
        assert list(store.read(B)) == numbered(3, entries(B, 0, 1))
        assert (store.last_of(A), store.last_of(B), store.last_of(C)) == (4, 3, 0)

    def test_tail_gives_the_log_in_order_from_any_position(self, store: EventStore) -> None:
        """From each position on, tail is the rest of the log; after the last it is empty."""
        store.append(A, 0, entries(A, 0, 2))
        store.append(FLEET, 0, [Entry(FLEET, 0, 0, ByScheduler(1), 1, Resumed(1, 0))])
        store.append(B, 0, entries(B, 0, 3))
        whole = list(store.tail(1))
        assert [stored.position for stored in whole] == [1, 2, 3, 4, 5, 6]
        for position in range(1, 8):
            assert list(store.tail(position)) == whole[position - 1 :]

    @pytest.mark.parametrize("position", [0, -1, 4])
    def test_tail_refuses_positions_outside(self, store: EventStore, position: int) -> None:
        """A position before the first, or beyond one after the last, is refused with both."""
        store.append(A, 0, entries(A, 0, 2))
        with pytest.raises(PositionOutOfRange) as caught:
            store.tail(position)
        error = caught.value
        assert (error.position, error.first, error.last) == (position, 1, 2)

    def test_tail_ends_where_the_log_ended_at_the_call(self, store: EventStore) -> None:
        """What is appended during a tail is for the next one."""
        store.append(A, 0, entries(A, 0, 2))
        tail = store.tail(1)
        store.append(A, 2, entries(A, 2, 2))
        assert [stored.position for stored in tail] == [1, 2]

    @pytest.mark.parametrize("expected", [0, 1, 3])
    def test_only_the_next_sequence_is_taken(self, store: EventStore, expected: int) -> None:
        """Of two writers with the same copy of a request, the second is refused."""
        store.append(A, 0, entries(A, 0, 2))
        other = [attrs.evolve(entry, time_ns=7) for entry in entries(A, expected, 1)]
        with pytest.raises(WrongSequence) as caught:
            store.append(A, expected, other)
        assert (caught.value.request, caught.value.expected, caught.value.found) == (A, expected, 2)
        assert store.last_position == 2

    def test_a_batch_is_appended_whole_or_not_at_all(self, store: EventStore) -> None:
        """One wrong part refuses all parts, those before it included."""
        with pytest.raises(WrongSequence):
            store.append_batch([Append(A, 0, entries(A, 0, 2)), Append(B, 1, entries(B, 1, 1))])
        assert (store.last_position, store.read(A), store.read(B)) == (0, (), ())
        parts = [
            Append(A, 0, entries(A, 0, 1)),
            Append(B, 0, entries(B, 0, 1)),
            Append(A, 1, entries(A, 1, 1)),
        ]
        assert store.append_batch(parts) == 1
        assert [s.position for s in store.read(A)] == [1, 3]

    def test_a_part_counts_the_parts_before_it(self, store: EventStore) -> None:
        """Two parts of one batch for one request may not both be its first."""
        with pytest.raises(WrongSequence) as caught:
            store.append_batch([Append(A, 0, entries(A, 0, 1)), Append(A, 0, entries(A, 0, 1))])
        assert caught.value.found == 1
        assert store.last_position == 0

    def test_a_repeated_append_is_answered_and_not_appended(self, store: EventStore) -> None:
        """Who asks again for the same entries in the same place learns where they stand."""
        store.append(B, 0, entries(B, 0, 1))
        assert store.append(A, 0, entries(A, 0, 2)) == 2
        store.append(A, 2, entries(A, 2, 2))
        store.append(B, 1, entries(B, 1, 1))
        assert store.append(A, 0, entries(A, 0, 2)) == 2
        assert store.append(A, 2, entries(A, 2, 2)) == 4
        assert store.append(A, 3, entries(A, 3, 1)) == 5
        assert store.last_position == 6
        assert list(store.read(A)) == numbered(2, entries(A, 0, 4))
        assert store.append(A, 4, entries(A, 4, 1)) == 7

    def test_a_repeat_survives_a_crash(self, store: EventStore) -> None:
        """What was durable is recognised in the next life too."""
        store.append(A, 0, entries(A, 0, 2))
        store.flush()
        after = self.after_crash(store)
        try:
            assert after.append(A, 0, entries(A, 0, 2)) == 1
            assert after.last_position == 2
        finally:
            after.close()

    def test_a_repeated_batch_is_answered_whole(self, store: EventStore) -> None:
        """Its parts stand where one append put them; a batch with anything new is refused."""
        batch = [
            Append(A, 0, entries(A, 0, 2)),
            Append(B, 0, entries(B, 0, 1)),
            Append(B, 1, ()),
            Append(A, 2, entries(A, 2, 1)),
        ]
        assert store.append_batch(batch) == 1
        assert store.append_batch(batch) == 1
        assert store.append_batch(batch[1:]) == 3
        for wrong in (
            [*batch, Append(A, 3, entries(A, 3, 1))],
            [batch[0], batch[3]],
            [batch[3], batch[0]],
            [Append(A, 1, entries(A, 1, 3))],
            [Append(A, -1, entries(A, 2, 1))],
        ):
            with pytest.raises(WrongSequence):
                store.append_batch(wrong)
        assert store.last_position == 4

    def test_entries_that_others_came_between_are_no_repeat(self, store: EventStore) -> None:
        """The answer promises consecutive positions, so scattered entries are refused."""
        store.append(A, 0, entries(A, 0, 1))
        store.append(B, 0, entries(B, 0, 1))
        store.append(A, 1, entries(A, 1, 1))
        with pytest.raises(WrongSequence):
            store.append(A, 0, entries(A, 0, 2))
        assert store.last_position == 3

    def test_an_append_of_nothing_names_the_next_position(self, store: EventStore) -> None:
        """It is legal, changes nothing, and still checks what the caller expects."""
        store.append(A, 0, entries(A, 0, 2))
        assert store.append(A, 2, ()) == 3
        assert store.append_batch([]) == 3
        assert store.last_position == 2
        with pytest.raises(WrongSequence):
            store.append(A, 1, ())

    def test_an_entry_stands_where_it_says(self, store: EventStore) -> None:
        """An entry of another request, or with another number, is not taken."""
        with pytest.raises(MisfiledEntry):
            store.append(A, 0, entries(B, 0, 1))
        with pytest.raises(MisfiledEntry):
            store.append(A, 0, entries(A, 1, 1))
        assert store.last_position == 0

    def test_flush_makes_all_before_it_durable(self, store: EventStore) -> None:
        """An append alone is not durable; a flush covers every request."""
        store.append(A, 0, entries(A, 0, 2))
        assert store.durable_position == 0
        store.append(B, 0, entries(B, 0, 1))
        assert store.flush() == 3
        assert store.durable_position == 3
        assert store.flush() == 3

    def test_a_crash_leaves_what_was_durable(self, store: EventStore) -> None:
        """After a crash, the durable entries are there, and the log goes on behind them."""
        store.append(A, 0, entries(A, 0, 2))
        store.flush()
        store.append(A, 2, entries(A, 2, 1))
        after = self.after_crash(store)
        try:
            found = list(after.tail(1))
            assert found[:2] == numbered(1, entries(A, 0, 2))
            assert after.durable_position == after.last_position == len(found)
            follows = entries(A, len(found), 1)
            assert after.append(A, len(found), follows) == len(found) + 1
        finally:
            after.close()

    def test_an_epoch_is_never_taken_twice(self, store: EventStore) -> None:
        """Epochs count up by one, and a crash right after taking one does not give it again."""
        assert [store.take_epoch(), store.take_epoch()] == [1, 2]
        after = self.after_crash(store)
        try:
            assert after.epoch == 2
            assert after.take_epoch() == 3
        finally:
            after.close()

    def test_flush_and_append_may_meet(self, store: EventStore) -> None:
        """A flush in another thread never claims an entry that was appended after it began."""
        done = threading.Event()
        wrong: list[tuple[int, int]] = []

        def flush() -> None:
            while not done.is_set():
                before = store.last_position
                durable = store.flush()
                after = store.last_position
                if not before <= durable <= after:
                    wrong.append((before, durable))

        thread = threading.Thread(target=flush)
        thread.start()
        for n in range(200):
            store.append(A, n, entries(A, n, 1))
        done.set()
        thread.join()
        assert wrong == []
        assert store.flush() == 200
        assert [s.entry.sequence for s in store.read(A)] == list(range(200))

    def test_sealing_changes_nothing_that_is_read(self, store: EventStore) -> None:
        """All entries are read as before, more can be appended, and a crash finds them too."""
        for n in range(6):
            store.append(A, n, entries(A, n, 1))
        store.append(B, 0, entries(B, 0, 3))
        whole = list(store.tail(1))
        assert store.seal() >= 0
        assert store.seal() == 0
        assert list(store.tail(1)) == whole
        assert store.append(A, 6, entries(A, 6, 1)) == 10
        store.flush()
        after = self.after_crash(store)
        try:
            assert list(after.tail(1)) == [*whole, Stored(10, entries(A, 6, 1)[0])]
            assert after.read(B) == tuple(numbered(7, entries(B, 0, 3)))
        finally:
            after.close()

    def test_a_closed_store_takes_nothing(self, store: EventStore) -> None:
        """After close, every write is refused by the same typed error; closing again is nothing."""
        store.append(A, 0, entries(A, 0, 1))
        store.close()
        store.close()
        assert store.durable_position == 1
        with pytest.raises(StoreUnavailable):
            store.append(A, 1, entries(A, 1, 1))
        with pytest.raises(StoreUnavailable):
            store.flush()
        with pytest.raises(StoreUnavailable):
            store.take_epoch()
        with pytest.raises(StoreUnavailable):
            store.seal()
