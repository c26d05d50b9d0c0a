"""Named points of an engine's shell at which a harness may watch, hold or spoil what passes.

Owns: the points, and that by themselves they do nothing.
Must not know: who watches, and why.

No setting, flag or variable leads here: whoever starts a shell from code hands its hooks over,
and the program hands over none.
"""

from __future__ import annotations

from engine.dataplane import DataPlane
from transport.engine_owner import Outgoing, Send


class EngineHooks:
    """The points of one engine; a harness overrides them."""

    def saying(self, item: Outgoing, say: Send) -> None:
        """A proposal or new tokens are about to be put on the stream, in this order."""
        say(item)

    def plane(self, plane: DataPlane) -> DataPlane:
        """The plane that the engine is about to use."""
        return plane


NO_HOOKS = EngineHooks()
