"""The queue before the decision: bounded, first come first served, in turn over tenants.

Owns: who is next.
Must not know: capacity, engines, the log.

Requests that ran before and were requeued go first, oldest first: they have waited longest, and
their tokens are already with a client.
"""

from __future__ import annotations

from collections import deque

import attrs

from engine.effects import Payload
from lifecycle.decide import Submission
from lifecycle.ids import RequestId


@attrs.frozen
class Pending:
    """A submission with its payload, in the queue from `since_ns` to `expires_ns` at most."""

    wanted: Submission
    payload: Payload
    expires_ns: int
    since_ns: int = 0


class FairQueue:
    """Tenants take turns; within a tenant the order of arrival holds."""

    def __init__(self, limit: int) -> None:
        """At most `limit` new requests wait; requeued ones are not counted, they were admitted."""
        self.limit = limit
        self._tenants: dict[str, deque[Pending]] = {}
        self._again: dict[RequestId, Pending] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._tenants.values())

    @property
    def full(self) -> bool:
        """Whether another new request would exceed the limit."""
        return len(self) >= self.limit

    def copy(self) -> FairQueue:
        """An independent copy."""
        other = FairQueue(self.limit)
        other._tenants = {name: deque(line) for name, line in self._tenants.items()}
        other._again = dict(self._again)
        return other

    def push(self, pending: Pending) -> None:
        """Add a new request behind its tenant's others."""
        self._tenants.setdefault(pending.wanted.tenant, deque()).append(pending)

    def push_again(self, pending: Pending) -> None:
        """Add a requeued request before all new ones."""
        self._again[pending.wanted.request] = pending

    def head(self) -> Pending | None:
        """Who is next; nobody overtakes the head, so that a large request is never starved."""
        if self._again:
            return self._again[min(self._again)]
        for line in self._tenants.values():
            return line[0]
        return None

    def pop(self, pending: Pending) -> None:
        """Take a request out; its tenant goes to the back of the round."""
        request, tenant = pending.wanted.request, pending.wanted.tenant
        if self._again.pop(request, None) is not None:
            return
        line = self._tenants.pop(tenant)
        line.remove(pending)
        if line:
            self._tenants[tenant] = line

    def find(self, request: RequestId) -> Pending | None:
        """The waiting request of that name."""
        return next((p for p in self.waiting() if p.wanted.request == request), None)

    def waiting(self) -> tuple[Pending, ...]:
        """Everybody who waits, requeued ones first."""
        lines = [p for line in self._tenants.values() for p in line]
        return (*self._again.values(), *lines)

    def expired(self, now_ns: int) -> tuple[Pending, ...]:
        """New requests that have waited past their limit or their deadline."""
        return tuple(
            p
            for line in self._tenants.values()
            for p in line
            if now_ns >= min(p.expires_ns, p.wanted.deadline_ns)
        )
