"""The beginning of a log folded: what must be known of it to go on, or to judge the rest.

Owns: which entries still matter behind a border, and the history that they make.
Must not know: files, and when a log's beginning is dropped.

A snapshot is made of entries, so that the state comes out of the same reducer as ever.  Kept are
the fleet's, and those of every request that is not over; of all others nothing is left but the
highest serial of each rank's grants, which only grow.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from lifecycle.events import Entry
from lifecycle.history import History
from lifecycle.ids import Party
from lifecycle.ledger import Ledger
from lifecycle.state import TERMINAL, RequestState, Settlement, Violation


class UnfoldableSnapshot(ValueError):
    """The entries of a snapshot do not follow from one another."""

    def __init__(self, position: int, violation: Violation) -> None:
        super().__init__(f"position {position}: {violation.guard}: {violation.message}")
        self.position = position
        self.violation = violation


@attrs.frozen
class Snapshot:
    """What the entries up to and including `position` come to.

    `entries` are some of them, with their positions and in their order.
    """

    position: int
    time_ns: int
    entries: tuple[tuple[int, Entry], ...] = ()
    serials: tuple[tuple[Party, int], ...] = ()


def is_over(state: RequestState, ledger: Ledger) -> bool:
    """Whether nothing of a request is left in any account: it may be forgotten."""
    if state.phase not in TERMINAL:
        return False
    quarantined = [g for g in state.grants if g.settlement is Settlement.QUARANTINED]
    return not any(grant.id.owner in ledger for grant in quarantined)


def take(position: int, history: History, entries: Iterable[tuple[int, Entry]]) -> Snapshot:
    """Fold a history up to a position into a snapshot; `entries` are those that are kept."""
    serials = ((party, account.serial) for party, account in history.ledger.items())
    return Snapshot(
        position=position,
        time_ns=history.time_ns,
        entries=tuple(sorted(entries, key=lambda pair: pair[0])),
        serials=tuple(serials),
    )


def restore(snapshot: Snapshot, *, without: Iterable[str] = (), judging: bool = True) -> History:
    """The history at the snapshot's position, without what was over.

    What is left of a ledger's past proves no admission, so the guards across requests were asked
    when the entries were appended and are asked again from here on, if `judging`.
    Raises UnfoldableSnapshot.
    """
    history = History(without=without, crossguards=False)
    for position, entry in snapshot.entries:
        violation = history.apply(entry)
        if violation is not None:
            raise UnfoldableSnapshot(position, violation)
    _go_on(history, snapshot)
    history.crossguards = judging
    return history


def refold(snapshot: Snapshot, *, evaluated: int = 0) -> History:
    """The history at the snapshot's position, of entries that were judged and taken in before.

    Nothing is asked again; whoever made the snapshot left out what was illegal.
    """
    history = History()
    for _, entry in snapshot.entries:
        history.take(entry)
    _go_on(history, snapshot)
    history.evaluated = evaluated
    return history


def _go_on(history: History, snapshot: Snapshot) -> None:
    """Serials and time never go back, though the entries that brought them so far are gone."""
    for party, serial in snapshot.serials:
        account = history.ledger.get(party)
        if account is not None:
            history.ledger[party] = attrs.evolve(account, serial=max(account.serial, serial))
    history.time_ns = max(history.time_ns, snapshot.time_ns)
