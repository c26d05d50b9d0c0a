"""The queue before the decision: bounded, fair over tenants, requeued requests first."""

from __future__ import annotations

from engine.effects import Payload
from engine.queue import FairQueue, Pending
from lifecycle.decide import Submission
from lifecycle.ids import request_id


def pending(
    serial: int, tenant: str = "a", *, deadline_ns: int = 100, expires_ns: int = 50
) -> Pending:
    """A request that waits."""
    request = request_id(epoch=1, serial=serial)
    wanted = Submission(request, tenant, 7, b"digest", 10, deadline_ns)
    return Pending(wanted, Payload(()), expires_ns)


def drained(queue: FairQueue) -> list[int]:
    """The serials in the order in which they leave."""
    order = []
    while (head := queue.head()) is not None:
        queue.pop(head)
        order.append(int(head.wanted.request[-4:], 16))
    return order


def test_tenants_take_turns_and_keep_their_own_order() -> None:
    """A tenant that sent many waits behind one that sent one; within a tenant order holds."""
    queue = FairQueue(10)
    for serial, tenant in enumerate(["a", "a", "a", "b", "b", "c"], start=1):
        queue.push(pending(serial, tenant))
    assert drained(queue) == [1, 4, 6, 2, 5, 3]


def test_the_head_stays_the_head_until_it_is_taken() -> None:
    """Looking does not turn the round, so a large request is never overtaken."""
    queue = FairQueue(10)
    queue.push(pending(1, "a"))
    queue.push(pending(2, "b"))
    assert queue.head() == queue.head() == pending(1, "a")


def test_requeued_requests_go_first_and_oldest_first() -> None:
    """They have waited longest, and their tokens are already with a client."""
    queue = FairQueue(10)
    queue.push(pending(1, "a"))
    queue.push_again(pending(3, "a"))
    queue.push_again(pending(2, "b"))
    assert drained(queue) == [2, 3, 1]


def test_the_limit_counts_new_requests_only() -> None:
    """A requeued request was admitted before: it is never refused for want of room in the queue."""
    queue = FairQueue(2)
    queue.push(pending(1))
    queue.push_again(pending(9))
    assert (len(queue), queue.full) == (1, False)
    queue.push(pending(2, "b"))
    assert (len(queue), queue.full) == (2, True)


def test_expired_are_those_past_their_limit_or_their_deadline() -> None:
    """Either time ends the waiting of a new request; a requeued one ends by its deadline alone."""
    queue = FairQueue(10)
    early, late, due = pending(1), pending(2, expires_ns=90), pending(3, "b", deadline_ns=40)
    for each in (early, late, due):
        queue.push(each)
    queue.push_again(pending(4, expires_ns=1))
    assert queue.expired(39) == ()
    assert queue.expired(40) == (due,)
    assert queue.expired(50) == (early, due)
    assert set(queue.expired(90)) == {early, late, due}


def test_whoever_waits_is_found_and_taken_out_by_name() -> None:
    """A request can leave from anywhere in the queue."""
    queue = FairQueue(10)
    for serial in (1, 2, 3):
        queue.push(pending(serial))
    assert queue.find(request_id(epoch=1, serial=2)) == pending(2)
    queue.pop(pending(2))
    assert queue.find(request_id(epoch=1, serial=2)) is None
    assert queue.waiting() == (pending(1), pending(3))


def test_a_copy_is_independent() -> None:
    """What is taken from a copy stays in the original."""
    queue = FairQueue(10)
    queue.push(pending(1))
    queue.push_again(pending(2))
    copy = queue.copy()
    assert drained(copy) == [2, 1]
    assert len(queue.waiting()) == 2
