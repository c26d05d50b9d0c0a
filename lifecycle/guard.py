"""What a guard is: one small condition for each claim about one request's log.

Owns: the shape of a guard.
Must not know: any guard.

A guard returns None, or a sentence with the numbers that it compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from lifecycle.events import Entry, Event
from lifecycle.state import RequestState

Check = Callable[[RequestState, Entry, Any], str | None]


@attrs.frozen
class Guard:
    """One condition: its name is `rule/what`, and it is asked for these events."""

    name: str
    events: tuple[type[Event], ...]
    check: Check

    @property
    def rule(self) -> str:
        """The rule that this guard keeps."""
        return self.name.split("/", 1)[0]
