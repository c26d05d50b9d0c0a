"""How a log's requests ended, and which pages are in quarantine: the sum that a replay prints.

Owns: counting outcomes, and quarantine as a replay goes on.
Must not know: every other metric; `tally` counts them all, and these in the same way.
"""

from __future__ import annotations

from lifecycle.events import Aborted, Entry, Finished, Lost, Quarantined, Rejected, Released
from lifecycle.ids import GrantId, count_pages
from lifecycle.replay import Replayer
from lifecycle.tally import Kept, kept_in
from lifecycle.tally_metrics import REQUESTS

_COUNTED = frozenset({Finished, Aborted, Rejected, Released, Quarantined, Lost})


class Ends:
    """The counts of one replay; `note` takes each entry once the replay has taken it in."""

    def __init__(self, replayer: Replayer) -> None:
        """What happened before is not counted; what was in quarantine then is known."""
        self._replayer = replayer
        self.outcomes: dict[tuple[str, ...], int] = dict.fromkeys(REQUESTS.known, 0)
        self.quarantine: dict[GrantId, Kept] = dict(kept_in(replayer.history))

    def note(self, entry: Entry) -> None:
        """Count an entry that the replay took in."""
        event = entry.event
        if type(event) not in _COUNTED:
            return
        match event:
            case Finished():
                self._end("finished", event.reason.value)
            case Aborted():
                self._end("aborted", event.cause.value)
            case Rejected():
                self._end("rejected", event.code.value)
            case Released():
                self.quarantine.pop(event.grant, None)
            case Quarantined():
                self._quarantine(entry, event)
            case Lost():
                life = (event.engine, event.incarnation)
                gone = [g for g in self.quarantine if (g.owner.engine, g.owner.incarnation) == life]
                for name in gone:
                    del self.quarantine[name]

    def _end(self, outcome: str, reason: str) -> None:
        self.outcomes[outcome, reason] = self.outcomes.get((outcome, reason), 0) + 1

    def _quarantine(self, entry: Entry, event: Quarantined) -> None:
        state = self._replayer.state(entry.request)
        grant = None if state is None else state.grant(event.grant)
        if grant is not None and event.grant.owner in self._replayer.history.ledger:
            pages = count_pages(grant.reserved.pages)
            self.quarantine[event.grant] = Kept(entry.request, pages, event.cause)
