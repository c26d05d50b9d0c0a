"""What must hold of a simulated run at every moment and at its end.

Owns: the oracles that compare the log, the engines' books, real bytes' holders and clients.
Must not know: which fault led here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.prefill import PrefillCore
from engine.world_books import judge_books, judge_home, judge_replayed
from engine.world_values import Found
from lifecycle.events import Finished
from lifecycle.ids import mask_of
from lifecycle.replay import replay
from lifecycle.state import TERMINAL, Settlement

if TYPE_CHECKING:
    from lifecycle.history import History
    from lifecycle.ids import Party
    from transport.simulated_world import Deployment


def books_agree(run: Deployment) -> None:
    """What the log says is held is never free, and nothing is held twice."""
    owner = run.scheduler.owner
    for engine in run.engines.values():
        core = engine.core
        if core is None:
            continue
        account = None
        if owner is not None and engine.shell is not None and not engine.shell.hung:
            account = owner.core.log.ledger.get(core.party)
        judge_books(core, account)


def resting(run: Deployment) -> bool:
    """Whether nobody waits for anything, everybody is connected, and nothing is on its way."""
    owner = run.scheduler.owner
    if owner is None or not owner.settled or owner.journal.waiting:
        return False
    if owner.journal.durable < owner.journal.appended:
        return False
    if any(client.end is None for client in run.clients):
        return False
    for engine in run.engines.values():
        shell = engine.shell
        # Who is idle may yet have to hear that its last proposal was logged.
        if shell is None or not shell.owner.idle or not shell.control.quiet:
            return False
        if shell.owner.core.position < owner.core.position and shell.owner.core.syncing:
            return False
    return not any(flight.pieces for flight in run.wires.flights)


def at_rest(run: Deployment) -> None:
    """The end: the log is clean, pages are home or quarantined with a cause, answers are true."""
    owner = run.scheduler.owner
    assert owner is not None, "a run rests under a living scheduler"
    stored = [(one.position, one.entry) for one in run.scheduler.store.tail(1)]
    report = replay(stored)
    for finding in report.findings:
        violation = finding.violation
        raise Found("replay", f"{violation.guard}: {violation.message}", rule=violation.rule)
    fresh = judge_replayed((entry for _, entry in stored), owner.core.log)
    for state in fresh.requests.values():
        if state.phase not in TERMINAL:
            raise Found("not-closed", f"{state.request} rests in {state.phase.value}")
    _all_home(run, fresh)
    _answered(run, fresh)


def _all_home(run: Deployment, fresh: History) -> None:
    quarantined: dict[Party, int] = {}
    for state in fresh.requests.values():
        for grant in state.grants:
            if grant.settlement is Settlement.QUARANTINED:
                if grant.quarantine is None:
                    raise Found("leak", f"{grant.id} is in quarantine without a cause")
                owner = grant.id.owner
                mask = mask_of(grant.reserved.pages)
                quarantined[owner] = quarantined.get(owner, 0) | mask
    for engine in run.engines.values():
        core = engine.core
        assert core is not None, "a run rests with every engine alive"
        held = judge_home(core, fresh.ledger[core.party])
        if held & ~quarantined.get(core.party, 0):
            raise Found("leak", f"{core.party} keeps {held:b} that no grant in quarantine has")
        run.sometimes["pages-left-in-quarantine"] += bool(held)
        if core.outstanding or core.jobs:
            raise Found("leak", f"{core.party} keeps {core.outstanding or core.jobs}")
        if isinstance(core, PrefillCore) and core.staging.held != core.staging_held:
            raise Found("leak", f"{core.party} keeps staging")


def _answered(run: Deployment, fresh: History) -> None:
    for client in run.clients:
        run.sometimes["client-" + str(client.end)] += 1
        if client.end != "finished" or client.request is None:
            continue
        state = fresh.requests.get(client.request)
        if state is None or not isinstance(state.outcome, Finished):
            raise Found(
                "answer-before-durable", f"{client.request} was told a success that is not logged"
            )
    if run.plan.calm:
        for client in run.clients:
            # A retry that comes after the answer is told that the key has been used.
            if client.end not in {"finished", "REQUEST_ID_REUSED"}:
                raise Found(
                    "failed-for-nothing", f"client {client.wish.number} ended with {client.end}"
                )
