"""What can happen next in a small world.

Owns: the list of enabled actions, in an order that depends on the world alone.
Must not know: what an action does.
"""

from __future__ import annotations

from engine.effects import Publish
from engine.world_key import Keyed
from engine.world_memory import Write
from engine.world_values import FAULTS, Action
from lifecycle.ids import Party, RequestId
from lifecycle.state import LIVE, OPEN, Phase

Key = tuple[Party, int]
"""A write: its writer and its ticket."""


IDLE = frozenset({*FAULTS, "retransmit"})
"""What nobody waits for before something slow happens."""


class Options(Keyed):
    """A world that can say what may happen."""

    # --- what can happen ----------------------------------------------------------------------

    def enabled(self) -> tuple[Action, ...]:
        """Everything that can happen now, in an order that depends on the world alone."""
        out: list[Action] = []
        if self.asked < len(self.scenario.asked):
            out.append(("submit",))
        for party in self.cores:
            self._enabled_stream(party, out)
            self._enabled_steps(party, out)
        out.extend(
            ("rejoin", engine)
            for engine in sorted(self.must_leave)
            if not any(party in self.steps for party in self.parties(engine))
        )
        out.extend(("verify", index) for index in range(len(self.verifies)))
        out.extend(("fenced", index) for index in range(len(self.fences)))
        for key, write in self.writes.items():
            self._enabled_write(key, write, out)
        if self.durable < len(self.stored):
            out.append(("flush",))
        if self.scenario.slow:
            out = self._in_haste(out)
        self._enabled_faults(out)
        return tuple(out)

    def _in_haste(self, actions: list[Action]) -> list[Action]:
        """Without what is slow, as long as anything else can happen."""
        slow = self.scenario.slow
        if all(action[0] in slow or action[0] in IDLE for action in actions):
            return actions
        return [action for action in actions if action[0] not in slow]

    def _may(self, fault: str) -> bool:
        return self.budget.get(fault, 0) > 0

    def _enabled_stream(self, party: Party, out: list[Action]) -> None:
        if party not in self.connected:
            if party.engine not in self.must_leave:
                out.append(("connect", party))
            return
        waiting = self.up[party]
        if waiting:
            out.append(("up", party))
            out.extend((f, party) for f in ("lose", "repeat") if self._may(f))
            if len(waiting) > 1 and self._may("swap"):
                out.append(("swap", party))
        if self.down[party]:
            out.append(("down", party))
            item = self.down[party][0]
            if isinstance(item, Publish) and self._may("echo"):
                out.append(("echo", party))
            if isinstance(item, Publish) and item.payload is not None and self._may("garble"):
                out.append(("garble", party))
        if self.answers[party]:
            out.append(("answer", party))
        elif not waiting and self.cores[party].outstanding:
            out.append(("retransmit", party))
        if self._may("break"):
            out.append(("break", party))

    def _enabled_steps(self, party: Party, out: list[Action]) -> None:
        if party in self.steps:
            out.append(("step-end", party))
            if self._may("step-fails"):
                out.append(("step-fails", party))
        elif party.engine not in self.must_leave and self.cores[party].can_step():
            out.append(("step", party))

    def _enabled_write(self, key: Key, write: Write, out: list[Action]) -> None:
        owner = write.post.grant.owner in self.cores
        lands = owner and self._lets_in(write)
        if write.ended:
            if lands and self._may("lie"):
                out.append(("lie", *key))
            return
        if lands and not write.landed:
            out.append(("land", *key))
        if lands and write.landed and self._may("reland"):
            out.append(("reland", *key))
        if write.orphan or write.silent:
            return
        if write.landed:
            out.append(("done", *key))
        elif not owner or (not lands and self._given_up(write)):
            out.append(("failed", *key))
        if self._may("fail"):
            out.append(("fail", *key))
        if not write.doubted:
            out.extend((f, *key) for f in ("doubt", "hang") if self._may(f))

    def _lets_in(self, write: Write) -> bool:
        if not self.scenario.placing:
            return True
        grant = write.post.grant
        return grant in self.exposed and (grant, write.party) not in self.refused

    def _given_up(self, write: Write) -> bool:
        """Whether the writer's shell tries a refused post no longer: its attempt is over."""
        post = write.post
        state = self.cores[write.party].log.state(post.request)
        over = state.phase not in LIVE or state.attempt != post.attempt
        return over or (post.grant, write.party) in self.refused

    def _enabled_faults(self, out: list[Action]) -> None:
        if self._may("cancel"):
            out.extend(
                ("cancel", request)
                for request, client in self.clients.items()
                if not client.gone and (self.scenario.late_cancels or not client.ended)
            )
        if self.next_deadline() is not None:
            out.extend((f,) for f in ("tick", "late") if self._may(f))
        if self._may("overdue") and self.settle_times():
            out.append(("overdue",))
        out.extend((f,) for f in ("crash", "process-crash") if self._may(f))
        if self._may("torn") and len(self.stored) - self.durable > 1:
            out.append(("torn",))
        if self._may("forge"):
            out.extend(("forge", *whom) for whom in self._forgeries())
        for engine in self.incarnations:
            out.extend((f, engine) for f in ("restart", "declare-lost") if self._may(f))

    def _forgeries(self) -> list[tuple[Party, RequestId]]:
        """Who may claim a token of a request that is not its, or that has them all."""
        claims = []
        for request, relay in self.scheduler.relays.items():
            state = self.scheduler.log.state(request)
            if state.phase is not Phase.DECODING or state.admitted is None:
                continue
            whole = relay.held >= state.admitted.new_tokens_max
            claims += [
                (party, request)
                for party in self.cores
                if whole or party not in state.admitted.decode.parties()
            ]
        return claims

    def next_deadline(self) -> int | None:
        """The first moment at which time alone changes something."""
        times = [p.wanted.deadline_ns for p in self.scheduler.queue.waiting()]
        states = self.scheduler.log.requests.values()
        times.extend(state.deadline_ns for state in states if state.phase in OPEN)
        return min(times + self.settle_times(), default=None)

    def settle_times(self) -> list[int]:
        """When the pages of attempts that are over must be home."""
        return [
            state.settle_by_ns
            for state in self.scheduler.log.requests.values()
            if state.settle_by_ns
            and any(state.phase not in LIVE or g.attempt < state.attempt for g in state.unsettled)
        ]
