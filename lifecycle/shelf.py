"""Where a pass over a long log puts what is over, so that it needs no more memory.

Owns: what a shelf promises.
Must not know: what is put there, and where that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from lifecycle.ids import RequestId


class Named(Protocol):
    """Whatever is kept of one request."""

    @property
    def request(self) -> RequestId:
        """Whose it is."""


N = TypeVar("N", bound=Named)


class Shelf(Protocol[N]):
    """What was put comes back as it was, however late its request is named again."""

    def put(self, one: N) -> None:
        """Keep this; it takes the place of what was kept of the same request before."""

    def find(self, request: RequestId) -> N | None:
        """What was put last, or None; it may be put again."""

    def names(self) -> Iterator[RequestId]:
        """Every request of which something was put, once."""


class Library(Shelf[N], Protocol[N]):
    """A shelf that can be read from end to end."""

    def values(self) -> Iterator[N]:
        """What was put last of every request, once; a second time in the same order."""
