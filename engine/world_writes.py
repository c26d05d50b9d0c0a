"""What happens to memory in a small world: writes land and end, pages are compared, writers fenced.

Owns: the actions that concern a write in flight or a comparison.
Must not know: streams, lives and steps; the `world` has them.
"""

from __future__ import annotations

import attrs

from engine.effects import Post
from engine.prefill import Posted
from engine.world_memory import Write
from engine.world_options import Key, Options
from engine.world_values import Found
from lifecycle.events import Cause, Drained, Failed, Verified
from lifecycle.ids import Party
from lifecycle.state import LIVE


class Writes(Options):
    """A world whose memory moves."""

    # --- memory -------------------------------------------------------------------------------

    def _do_verify(self, index: int) -> None:
        party, asked = self.verifies[index]
        self.verifies = self.verifies[:index] + self.verifies[index + 1 :]
        core = self.decode(party)
        total, result = 0, None
        for reserved, tokens, _, digest in asked.writes:
            pages, wrong = self.memory.verify(core, reserved, tokens, digest)
            total += pages
            if wrong is not None:
                if not self.scenario.faults.get("lie"):
                    raise Found("isolation", f"{asked.request}: page {wrong} fails its check")
                result = Failed(Cause.ISOLATION_VIOLATION, "verify", wrong)
        if result is None:
            job = core.jobs.get(asked.request)
            grants = tuple(r.grant for r in job.reserved) if job is not None else ()
            named = tuple(dict.fromkeys(w[0].grant for w in asked.writes)) or grants
            if not named:
                result = Failed(Cause.ENGINE_FAILED, "nothing to verify")
            else:
                verified = Verified(named, total, total, total, "world")
                self.act(party, core.verify_ended(asked.request, asked.attempt, verified))
                return
        self.act(party, core.verify_ended(asked.request, asked.attempt, result))

    def _do_fenced(self, index: int) -> None:
        party, fence = self.fences[index]
        self.fences = self.fences[:index] + self.fences[index + 1 :]
        self.refused |= {(fence.grant, fence.party)}
        self.act(party, self.decode(party).fence_ended(fence.grant, fence.party))

    def _do_land(self, party: Party, ticket: int) -> None:
        write = self.writes[(party, ticket)]
        post = write.post
        owner = self.cores[post.grant.owner]
        if self.scheduler.log.state(post.request).phase not in LIVE:
            self.sometimes["landed-after-end"] += 1
        if write.orphan:
            self.sometimes["landed-from-a-dead-writer"] += 1
        if self.layout(write.party) != self.layout(post.grant.owner):
            raise Found("wrong-offset", f"ticket {ticket} is laid out as {self.layout(party)}")
        try:
            self.memory.land(owner, write)
        except Found as found:
            if found.name == "late-write":
                self.hint = self._late(write)
            raise
        self.writes[(party, ticket)] = attrs.evolve(write, landed=write.landed + 1)

    def _late(self, write: Write) -> str:
        """The rule that a write breaks which lands too late, where the log itself is clean."""
        grant, party = write.post.grant, write.party
        if grant.owner not in self.cores:
            return "incarnation-fences"
        said = [e.event for _, e in self.stored if getattr(e.event, "grant", None) == grant]
        if not said:
            return "acted-after-logged"
        drained = any(isinstance(event, Drained) and event.party == party for event in said)
        return "drained-is-final" if drained else "quiet-after-end"

    def _do_reland(self, party: Party, ticket: int) -> None:
        self._do_land(party, ticket)

    def _do_lie(self, party: Party, ticket: int) -> None:
        self._do_land(party, ticket)

    def _end(self, key: Key, how: Posted) -> None:
        write = self.writes.pop(key)
        if write.doubted:
            self.sometimes["doubt-resolved"] += 1
        if how is Posted.DONE and self._may("lie"):
            content = self.memory.content(write)
            self.writes[key] = attrs.evolve(write, ended=True, content=content)
        size, digest = self._count(write.post), self.digests.pop(key)
        core = self.prefill(key[0])
        self.act(key[0], core.post_ended(key[1], how, size_bytes=size, digest=digest))

    @staticmethod
    def _count(post: Post) -> int:
        return max(1, post.tokens.count)

    def _do_done(self, party: Party, ticket: int) -> None:
        self._end((party, ticket), Posted.DONE)

    def _do_failed(self, party: Party, ticket: int) -> None:
        self._end((party, ticket), Posted.FAILED)

    def _do_fail(self, party: Party, ticket: int) -> None:
        self._end((party, ticket), Posted.FAILED)

    def _do_doubt(self, party: Party, ticket: int) -> None:
        self.writes[(party, ticket)] = attrs.evolve(self.writes[(party, ticket)], doubted=True)
        self.act(party, self.prefill(party).post_ended(ticket, Posted.IN_DOUBT))

    def _do_hang(self, party: Party, ticket: int) -> None:
        self._do_doubt(party, ticket)
        self.writes[(party, ticket)] = attrs.evolve(self.writes[(party, ticket)], silent=True)
