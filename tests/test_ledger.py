"""The ledger counts pages as a naive model with sets does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lifecycle.events import Released
from lifecycle.ids import PageRange, RequestId, TokenRange, count_pages, mask_of, request_id
from lifecycle.ledger import Account
from tests import handmade as hand
from tests.handmade import DECODE, ONE, PREFILL, TWO, Log

CAPACITY = 24
NAMES = tuple(request_id(epoch=1, serial=serial) for serial in range(1, 4))


def ranges_of(pages: set[int]) -> tuple[PageRange, ...]:
    """Pages as ranges of one page each."""
    return tuple(PageRange(page, 1) for page in sorted(pages))


class LedgerMachine(RuleBasedStateMachine):
    """An account beside sets of page numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.account = Account(CAPACITY, slots=4)
        self.held: dict[int, set[int]] = {}
        self.quarantined: dict[int, set[int]] = {}
        self.booked: dict[RequestId, int] = {}
        self.serial = 0

    @property
    def taken(self) -> set[int]:
        return set().union(*self.held.values(), *self.quarantined.values())

    @property
    def free(self) -> int:
        return CAPACITY - len(self.taken) - sum(self.booked.values())

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def book(self, name: RequestId, data: st.DataObject) -> None:
        if name in self.booked or self.free < 1:
            return
        pages = data.draw(st.integers(1, self.free))
        self.account = self.account.book(name, pages)
        self.booked[name] = pages

    @rule(name=st.sampled_from(NAMES))
    def unbook(self, name: RequestId) -> None:
        self.account = self.account.unbook(name)
        self.booked.pop(name, None)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def hold(self, name: RequestId, data: st.DataObject) -> None:
        room = self.booked.get(name, 0) + self.free
        choices = sorted(set(range(CAPACITY)) - self.taken)
        if not choices or room < 1:
            return
        pages = data.draw(st.sets(st.sampled_from(choices), min_size=1, max_size=room))
        self.serial += 1
        self.account = self.account.hold(name, ranges_of(pages), self.serial)
        self.held[self.serial] = pages
        if name in self.booked:
            self.booked[name] = max(0, self.booked[name] - len(pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_held(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.held)))
        self.account = self.account.free(ranges_of(self.held.pop(serial)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.held)))
        self.quarantined[serial] = self.held.pop(serial)
        self.account = self.account.quarantine(ranges_of(self.quarantined[serial]))

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.account = self.account.free(ranges_of(self.quarantined.pop(serial)))

    @invariant()
    def counts_agree(self) -> None:
        """Free, booked, held and quarantined agree with the sets, and add up to the capacity."""
        account = self.account
        held = set().union(*self.held.values())
        quarantined = set().union(*self.quarantined.values())
        assert account.held == mask_of(ranges_of(held))
        assert account.quarantined == mask_of(ranges_of(quarantined))
        assert dict(account.booked) == self.booked
        assert account.free_pages == self.free >= 0
        assert account.usable_pages == CAPACITY - len(quarantined)
        assert account.serial == self.serial
        total = account.free_pages + account.booked_pages
        assert total + account.held_pages + account.quarantined_pages == CAPACITY
        for name in NAMES:
            assert account.promised(name) == self.booked.get(name, 0)


TestLedger = LedgerMachine.TestCase


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_mask_has_one_bit_for_each_page(pages: set[int]) -> None:
    """Ranges as a mask count what the set counts."""
    mask = mask_of(ranges_of(pages))
    assert mask.bit_count() == len(pages) == count_pages(ranges_of(pages))
    assert {bit for bit in range(mask.bit_length()) if mask >> bit & 1} == pages


def test_an_attempts_pages_come_home() -> None:
    """Booked at Admitted, held at Reserved, unbooked at the end, free at Released."""
    log = Log()
    whole = dict(log.history.ledger)
    hand.new_admitted(log)
    assert log.history.ledger[DECODE].booked == ((ONE, 3),)
    log.add(hand.source(), hand.destination())
    assert log.history.ledger[DECODE].booked == ((ONE, 0),)
    assert log.history.ledger[DECODE].held_pages == 3
    log.add(hand.ABORTED)
    assert log.history.ledger[DECODE].booked == ()
    log.add(hand.drained(), Released(hand.SOURCE), Released(hand.DESTINATION))
    for party in (PREFILL, DECODE):
        after = log.history.ledger[party]
        assert after.free_pages == whole[party].free_pages
        assert after.serial == 1


def test_what_was_booked_and_not_reserved_is_free_after_the_end() -> None:
    """An attempt that ends before it reserves gives its promise back on both legs."""
    log = hand.new_admitted(Log()).add(hand.ABORTED)
    assert {account.free_pages for account in log.history.ledger.values()} == {hand.PAGES}


@pytest.mark.parametrize("pages", [1, 2])
def test_growth_takes_from_what_is_free_when_nothing_is_promised(pages: int) -> None:
    """Growth beyond the booking comes out of the free pages, never out of another's promise."""
    log = hand.decoding(Log())
    other = hand.admitted(
        prefill=hand.leg(PREFILL, needed=2, booked=2, free=14),
        decode=hand.leg(DECODE, needed=5, booked=3, free=13),
    )
    log.add(other, request=TWO)
    run = PageRange(3, pages)
    log.add(hand.growth(pages=(run,), tokens=TokenRange(12, 12 + 4 * pages)))
    account = log.history.ledger[DECODE]
    assert account.promised(TWO) == 3
    assert account.free_pages == 13 - 3 - pages
