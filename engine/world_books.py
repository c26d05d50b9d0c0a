"""What an engine's own books, the log's ledger and the log replayed have to agree on.

Owns: the oracles that every simulation asks, whatever its memory and its time are.
Must not know: worlds, shells, and which action led here.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.world_values import Core, Found
from lifecycle.events import Entry
from lifecycle.history import History
from lifecycle.ids import mask_of
from lifecycle.ledger import Account


def held_pages(core: Core) -> int:
    """The pages that a core's holdings name, as a mask. Raises Found."""
    held = 0
    for holding in core.holdings.values():
        pages = mask_of(holding.reserved.pages)
        if held & pages:
            raise Found("two-owners", f"{core.party} granted a page twice")
        held |= pages
    if held.bit_count() != core.allocator.held:
        raise Found("conservation", f"{core.party} holds {held:b}, {core.allocator.free} free")
    return held


def judge_books(core: Core, account: Account | None) -> None:
    """Nothing is held twice, and what the log says is held is never free. Raises Found."""
    held = held_pages(core)
    if account is not None and (account.held | account.quarantined) & ~held:
        raise Found("freed-but-held", f"{core.party} gave pages back that the log says are held")


def judge_home(core: Core, account: Account) -> int:
    """At rest a core holds what is in quarantine, which is returned as a mask. Raises Found."""
    held = held_pages(core)
    if account.held or account.booked or account.quarantined != held:
        raise Found(
            "leak",
            f"{core.party}: log {account.held:b} held, {account.quarantined:b} quarantined, "
            f"{account.booked} booked; engine {held:b}",
            rule="conservation",
        )
    return held


def judge_replayed(entries: Iterable[Entry], log: History) -> History:
    """The state to which the whole log replays, which is the live one. Raises Found.

    The live one has forgotten requests whose end every engine knows.
    """
    fresh = History()
    for entry in entries:
        fresh.apply(entry)
    live = {name: state for name, state in fresh.requests.items() if name in log.requests}
    if live != log.requests or fresh.ledger != log.ledger or fresh.fleet != log.fleet:
        raise Found("replay-differs", "the replayed log is not the live state")
    return fresh
