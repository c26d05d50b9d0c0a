"""What must hold of a world at every moment, and at its end; and its copies.

Owns: the oracles that look at books and logs together, `copy`, the calm end.
Must not know: which action led here.
"""

from __future__ import annotations

from typing import Self

from engine.world_books import judge_books, judge_home, judge_replayed
from engine.world_conduct import Conduct
from engine.world_memory import numbers
from engine.world_shells import PREFILLS
from engine.world_values import EYES, Action, Found
from lifecycle.events import Aborted, Finished, Rejected
from lifecycle.ids import Party, RequestId
from lifecycle.replay import replay
from lifecycle.state import LIVE, OPEN, TERMINAL, Settlement

CALM_STEPS_MAX = 2_000


class Checks(Conduct):
    """A world's oracles beside its memory."""

    def prefill_parties(self) -> tuple[Party, ...]:
        """Ranks of the present prefill lives."""
        return tuple(party for party in self.cores if party.engine in PREFILLS)

    def enabled(self) -> tuple[Action, ...]:
        """Everything that can happen now."""
        raise NotImplementedError

    def step(self, action: Action) -> None:
        """Do one thing."""
        raise NotImplementedError

    def next_deadline(self) -> int | None:
        """The first moment at which time alone changes something."""
        raise NotImplementedError

    # --- always -------------------------------------------------------------------------------

    def check(self) -> None:
        """Books agree: what the log says is held is never free, and nothing is held twice."""
        ledger = self.scheduler.log.ledger
        for party, core in self.cores.items():
            judge_books(core, ledger.get(party))

    def judge_log(self) -> None:
        """The log replays clean under every rule."""
        if not self.scenario.judged:
            return
        report = replay(self.stored)
        for finding in report.findings:
            if finding.violation.rule != "bounded":
                violation = finding.violation
                raise Found(
                    "replay", f"{violation.guard}: {violation.message}", rule=violation.rule
                )

    def noted(self, found: Found) -> Found:
        """The finding, whose oracle's rule is kept for a log that breaks none."""
        self.hint = self.hint or EYES.get(found.name, "")
        return found

    def broken_rule(self) -> str:
        """The first rule that the log breaks, or the one that the last oracle watches."""
        findings = replay(self.stored).findings
        return findings[0].violation.rule if findings else self.hint

    def logged_outcome(self, request: RequestId) -> object:
        """What the log says that the client was told."""
        for _, entry in self.stored:
            if entry.request == request and isinstance(entry.event, Finished | Aborted | Rejected):
                return entry.event
        return None

    # --- the end ------------------------------------------------------------------------------

    def calm(self) -> None:
        """No more faults: let everything come to rest, and see that nothing is left over."""
        try:
            self._calm()
        except Found as found:
            self.noted(found)
            raise

    def _calm(self) -> None:
        self.budget = dict.fromkeys(self.budget, 0)
        self.asked = len(self.scenario.asked)
        idle_rounds = 0
        for turn in range(CALM_STEPS_MAX):
            self.turns = turn
            actions = [a for a in self.enabled() if a[0] != "retransmit"]
            if actions:
                self.step(actions[turn % len(actions)])
                continue
            again = [a for a in self.enabled() if a[0] == "retransmit"]
            if again and idle_rounds < 2:
                idle_rounds += 1
                for action in again:
                    self.step(action)
                continue
            due = self.next_deadline()
            if due is None:
                self._at_rest()
                return
            idle_rounds = 0
            if due <= self.now:
                # A late timer fires: nobody has waited for it.
                self.step(("tick",))
            else:
                self._wait_out()
        raise Found("never-quiet", f"still moving after {CALM_STEPS_MAX} actions: {actions[:4]}")

    def _wait_out(self) -> None:
        """Time passes. In a calm world nobody should have to wait for a deadline, unless ..."""
        silent = any(w.silent for w in self.writes.values())
        if not self.scenario.placing:
            # Nobody can be shut out: what the dead may still write is waited for until then.
            silent = silent or any(w.orphan for w in self.writes.values())
            silent = silent or any(
                party not in self.cores
                for state in self.scheduler.log.requests.values()
                for grant in state.unsettled
                for party in grant.undrained
            )
        quarantined = any(a.quarantined for a in self.scheduler.log.ledger.values())
        open_states = [s for s in self.scheduler.log.requests.values() if s.phase in OPEN]
        waiting = bool(open_states) or bool(self.scheduler.queue.waiting())
        settling = any(
            state.phase not in LIVE or grant.attempt < state.attempt
            for state in self.scheduler.log.requests.values()
            for grant in state.unsettled
        )
        if waiting and not settling and not silent and not quarantined:
            names = [f"{s.request} {s.label()}" for s in open_states]
            raise Found("stuck", f"only a deadline ends {names or 'the queue'}", rule="bounded")
        if not waiting and not silent and settling:
            held = [str(g.id) for s in self.scheduler.log.requests.values() for g in s.unsettled]
            raise Found("stuck", f"only a deadline settles {held}", rule="bounded")
        self.sometimes["waited-out"] += 1
        self.step(("tick",))

    def _at_rest(self) -> None:
        self.judge_log()
        log = self.scheduler.log
        for state in log.requests.values():
            if state.phase not in TERMINAL:
                raise Found("not-closed", f"{state.request} rests in {state.phase.value}")
        if self.scheduler.queue.waiting():
            raise Found("not-closed", "somebody still waits in the queue")
        for request, client in self.clients.items():
            if client.told is None and not client.gone:
                raise Found("unanswered", f"{request} was never answered")
            if client.told is not None and self.logged_outcome(request) != client.told:
                raise Found("answer-before-durable", f"{request}: {client.told} is not in the log")
        self._answered_well()
        self._all_home()
        for party, core in self.cores.items():
            if core.plan_step() is not None:
                raise Found("never-quiet", f"{party} plans a step with nothing to do")
        if self.scenario.judged:
            self._same_as_replayed()

    def _answered_well(self) -> None:
        """In a world without faults every request that was admitted has its whole answer."""
        if self.scenario.faults:
            return
        for request, client in self.clients.items():
            if isinstance(client.told, Aborted):
                raise Found("failed-for-nothing", f"{request}: {client.told.cause.value}")

    def _all_home(self) -> None:
        for party, core in self.cores.items():
            judge_home(core, self.scheduler.log.ledger[party])
            if core.outstanding or core.jobs:
                raise Found("leak", f"{party} keeps {core.outstanding or core.jobs}")
            if party.engine in PREFILLS:
                staged = {
                    n
                    for w in self.writes.values()
                    if w.party == party and not w.ended
                    for n in numbers(w.post.staging)
                }
                if self.prefill(party).staging.held != len(staged):
                    raise Found("leak", f"{party} keeps staging", rule="conservation")
                left = self.prefill(party)
                if (left.reports or left.posted) and not staged:
                    raise Found("leak", f"{party} keeps {left.reports} {left.posted}")

    def _same_as_replayed(self) -> None:
        log = self.scheduler.log
        fresh = judge_replayed((entry for _, entry in self.stored), log)
        for request, state in fresh.requests.items():
            if request in log.requests:
                continue
            for grant in state.grants:
                lives = [
                    fresh.fleet.life(p.engine, p.incarnation)
                    for p in (grant.id.owner, *grant.undrained)
                ]
                # What only the dead could settle has ended with them.
                if grant.settlement is not Settlement.RELEASED and any(
                    life is not None and life.lost is None for life in lives
                ):
                    raise Found("forgotten", f"{request} was forgotten with pages in quarantine")

    # --- copies -------------------------------------------------------------------------------

    def copy(self) -> Self:
        """An independent copy."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.stored = list(self.stored)
        other.memory = self.memory.copy()
        other.mints = {party: mint.copy() for party, mint in self.mints.items()}
        other.cores = {p: core.copy(other.mints[p]) for p, core in self.cores.items()}
        other.scheduler = self.scheduler.copy()
        for name in (
            "incarnations",
            "up",
            "publishes",
            "down",
            "answers",
            "clients",
            "writes",
            "digests",
            "steps",
            "budget",
        ):
            setattr(other, name, dict(getattr(self, name)))
        other.sometimes = self.sometimes.copy()
        return other
