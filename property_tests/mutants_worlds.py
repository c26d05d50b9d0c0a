"""Worlds whose planes or lives break a promise that the cores rely on.

Owns: what memory and addresses do instead.
Must not know: what finds them; the registry says so.
"""

from __future__ import annotations

import attrs

from engine.world import World
from engine.world_memory import Write
from engine.world_options import Key
from engine.world_values import Action
from lifecycle.ids import Party


class SameMemory(World):
    """A new incarnation lives in the memory of the old one, whose addresses still work."""

    def _do_land(self, party: Party, ticket: int) -> None:
        write = self.writes[(party, ticket)]
        owner = write.post.grant.owner
        if owner in self.cores:
            super()._do_land(party, ticket)
            return
        self.hint = self._late(write)
        current = self.cores[attrs.evolve(owner, incarnation=self.incarnations[owner.engine])]
        self.memory.land(current, write)

    def _enabled_write(self, key: Key, write: Write, out: list[Action]) -> None:
        super()._enabled_write(key, write, out)
        if write.post.grant.owner not in self.cores and not write.landed:
            out.append(("land", *key))


class OneShotFence(World):
    """A fence refuses what it meets at that moment, and nothing that comes later."""

    def _lets_in(self, write: Write) -> bool:
        grant = write.post.grant
        if (grant, write.party) in self.refused:
            return True
        return super()._lets_in(write)
