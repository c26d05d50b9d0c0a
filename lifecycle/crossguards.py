"""What the log may not hold across requests: owners, capacities, incarnations, pairings.

Owns: every condition that needs the fleet or the ledger beside one request's state.
Must not know: how states change.

As in `guards`, a guard returns None or a sentence with the numbers that it compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from lifecycle.events import (
    REQUEST_EVENTS,
    Admitted,
    ByEngine,
    ByScheduler,
    Drained,
    Entry,
    Event,
    Finished,
    Leg,
    Proof,
    QuarantineCause,
    Quarantined,
    Rejected,
    Released,
    Reserved,
    Role,
    Transferred,
    Verified,
)
from lifecycle.fleet import FleetState, may_fence
from lifecycle.ids import PAGES_MAX, count_pages, mask_of
from lifecycle.ledger import Ledger
from lifecycle.state import QUARANTINED, RequestState
from lifecycle.wording import counted

CrossCheck = Callable[["View", RequestState, Entry, Any], str | None]


@attrs.frozen
class View:
    """What a cross guard may look at: the fleet and the pages, as they are before the entry."""

    fleet: FleetState
    ledger: Ledger


@attrs.frozen
class CrossGuard:
    """One condition across requests: its name is `rule/what`."""

    name: str
    events: tuple[type[Event], ...]
    check: CrossCheck

    @property
    def rule(self) -> str:
        """The rule that this guard keeps."""
        return self.name.split("/", 1)[0]


def _epoch(view: View, _state: RequestState, entry: Entry, _event: Event) -> str | None:
    if isinstance(entry.proposer, ByScheduler) and entry.proposer.epoch != view.fleet.epoch:
        return f"epoch {entry.proposer.epoch} speaks in epoch {view.fleet.epoch}"
    return None


def _proposer_lives(view: View, _state: RequestState, entry: Entry, _event: Event) -> str | None:
    if not isinstance(entry.proposer, ByEngine):
        return None
    party = entry.proposer.party
    life = view.fleet.life(party.engine, party.incarnation)
    if life is None or party.rank >= life.attached.ranks:
        return f"{party} never joined"
    if life.lost is not None:
        return f"{party} was lost ({life.lost.value})"
    return None


def _legs_live(view: View, _state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    for leg, role in ((event.prefill, Role.PREFILL), (event.decode, Role.DECODE)):
        life = view.fleet.current(leg.engine)
        if life is None or life.attached.incarnation != leg.incarnation or life.lost:
            return f"{leg.engine}/{leg.incarnation} is no current life"
        if life.draining:
            return f"{leg.engine}/{leg.incarnation} is draining"
        if life.attached.role is not role or life.attached.ranks != leg.ranks:
            return (
                f"{leg.engine} does {life.attached.role.value} with "
                f"{counted(life.attached.ranks, 'rank')}"
            )
    return None


def _legs_compatible(view: View, _state: RequestState, _e: Entry, event: Admitted) -> str | None:
    for leg in (event.prefill, event.decode):
        life = view.fleet.life(leg.engine, leg.incarnation)
        if life is None:
            continue
        joined = life.attached
        if joined.layout != leg.layout or joined.page_tokens != leg.page_tokens:
            told = (joined.layout, joined.page_tokens)
            return f"{leg.engine} joined with layout {told}, not {leg.layout}"
    return None


def _numbers(ledger: Ledger, leg: Leg) -> tuple[int, int]:
    capacity = free = PAGES_MAX
    for party in leg.parties():
        account = ledger.get(party)
        if account is None:
            return 0, 0
        capacity = min(capacity, account.usable_pages)
        free = min(free, account.free_pages)
    return capacity, free


def _legs_counted(view: View, _state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    for leg in (event.prefill, event.decode):
        capacity, free = _numbers(view.ledger, leg)
        if leg.pages_capacity != capacity or leg.pages_free != free:
            return (
                f"{leg.engine} has {counted(free, 'page')} free of {capacity}, "
                f"not {leg.pages_free} of {leg.pages_capacity}"
            )
    return None


def _judged_at(
    view: View, _state: RequestState, _e: Entry, event: Admitted | Rejected
) -> str | None:
    if event.fleet_position != view.fleet.sequence:
        return f"judged at fleet entry {event.fleet_position}, now is {view.fleet.sequence}"
    return None


def _slots(view: View, _state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    for leg in (event.prefill, event.decode):
        for party in leg.parties():
            account = view.ledger.get(party)
            if account is not None and len(account.booked) >= account.slots:
                return f"{party} runs {counted(len(account.booked), 'request')} of {account.slots}"
    return None


def _in_pool(view: View, _state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    account = view.ledger.get(event.grant.owner)
    if account is None:
        return f"{event.grant.owner} has no pool"
    top = 0
    for r in event.pages:
        top = max(top, r.first + r.count)
    if top > account.capacity:
        return f"page {top - 1} is outside a pool of {account.capacity}"
    # A single range names no page twice.
    if len(event.pages) > 1 and mask_of(event.pages).bit_count() != count_pages(event.pages):
        return "a page is granted twice in one grant"
    return None


def _one_owner(view: View, _state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    account = view.ledger.get(event.grant.owner)
    if account is None:
        return None
    mask = mask_of(event.pages)
    taken = mask & account.held
    if account.quarantined:
        taken |= mask & account.quarantined
    if taken:
        page = (taken & -taken).bit_length() - 1
        return f"page {page} of {event.grant.owner} is held or in quarantine"
    return None


def _serial_grows(view: View, _state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    account = view.ledger.get(event.grant.owner)
    if account is not None and event.grant.serial <= account.serial:
        return f"serial {event.grant.serial} follows {account.serial}"
    return None


def _promised(view: View, state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    account = view.ledger.get(event.grant.owner)
    if account is None:
        return None
    count = count_pages(event.pages)
    room = account.promised(state.request) + account.free_pages
    if count > room:
        return f"{counted(count, 'page')} reserved of {room} booked or free"
    return None


def _fence_scope(view: View, _state: RequestState, _entry: Entry, event: Drained) -> str | None:
    if event.proof is not Proof.FENCED:
        return None
    owner = event.grant.owner
    if not may_fence(view.fleet.life(owner.engine, owner.incarnation)):
        return f"{owner} cannot fence: its data plane has no scope for it"
    return None


def _recovered(view: View, state: RequestState, _entry: Entry, event: Released) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or grant.settlement is not QUARANTINED or not grant.undrained:
        return None
    if event.grant in view.fleet.recovered:
        return None
    return f"{', '.join(str(p) for p in grant.undrained)} may still write into {event.grant}"


def _owner_lost(view: View, _state: RequestState, _entry: Entry, event: Quarantined) -> str | None:
    owner = event.grant.owner
    life = view.fleet.life(owner.engine, owner.incarnation)
    gone = life is None or life.lost is not None
    if gone != (event.cause is QuarantineCause.OWNER_LOST):
        return f"{event.cause.value} is said of {owner}, which {'is' if gone else 'is not'} lost"
    return None


_HEARD_WHILE_ALIVE = (Reserved, Transferred, Verified, Finished, Released)

CROSS_GUARDS = (
    CrossGuard("unbroken-log/epoch", REQUEST_EVENTS, _epoch),
    CrossGuard("incarnation-fences/proposer", _HEARD_WHILE_ALIVE, _proposer_lives),
    CrossGuard("incarnation-fences/legs", (Admitted,), _legs_live),
    CrossGuard("compatible-legs/joined", (Admitted,), _legs_compatible),
    CrossGuard("capacity-proved/counted", (Admitted,), _legs_counted),
    CrossGuard("capacity-proved/judged-at", (Admitted, Rejected), _judged_at),
    CrossGuard("conservation/slots", (Admitted,), _slots),
    CrossGuard("one-owner/pool", (Reserved,), _in_pool),
    CrossGuard("one-owner/pages", (Reserved,), _one_owner),
    CrossGuard("one-owner/serial", (Reserved,), _serial_grows),
    CrossGuard("conservation/promised", (Reserved,), _promised),
    CrossGuard("time-is-no-proof/scope", (Drained,), _fence_scope),
    CrossGuard("drained-before-released/recovered", (Released,), _recovered),
    CrossGuard("incarnation-fences/owner", (Quarantined,), _owner_lost),
)
