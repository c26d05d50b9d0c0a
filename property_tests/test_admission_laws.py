"""Admission never promises what is not there, and nobody is passed over for ever."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.effects import Payload
from engine.queue import FairQueue, Pending
from lifecycle.admission import Limits, Submission, admit, refuse
from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    ByScheduler,
    Cause,
    Entry,
    Event,
    FenceScope,
    Rejected,
    Resumed,
    Role,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, EngineId, Party, RequestId, request_id

PAGE_TOKENS = 4
DEADLINE_NS = 10**9


def append(history: History, request: RequestId, event: Event, attempt: int = 0) -> None:
    """Take an entry in, as the scheduler would; the guards must agree."""
    sequence = history.fleet.sequence if request == FLEET else history.state(request).sequence
    entry = Entry(request, sequence, attempt, ByScheduler(1), history.time_ns + 1, event)
    assert history.apply(entry) is None


@st.composite
def fleets(draw: st.DrawFn) -> History:
    """One to two engines of each role, with one or two ranks, small pools, and few slots."""
    history = History()
    append(history, FLEET, Resumed(1, 0))
    for role in (Role.PREFILL, Role.DECODE):
        for number in range(draw(st.integers(1, 2))):
            ranks = draw(st.integers(1, 2))
            life = Attached(
                engine=EngineId(f"{role.value}{number}"),
                incarnation=1,
                role=role,
                ranks=ranks,
                pages=draw(st.integers(1, 12)),
                page_tokens=PAGE_TOKENS,
                layers=1,
                slots=draw(st.integers(1, 4)),
                context_tokens=64,
                layout=draw(st.sampled_from("LLLM")),
                endpoints=("e",) * ranks,
                plane="naive",
                fence_scope=FenceScope.NONE,
            )
            append(history, FLEET, life)
    return history


limits = st.builds(
    Limits,
    context_tokens=st.sampled_from([16, 48]),
    growth_tokens=st.integers(1, 8),
    attempts_max=st.integers(1, 4),
)
asked = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 24), st.booleans()),
    min_size=1,
    max_size=14,
)


def capacities(history: History) -> dict[Party, tuple[int, int]]:
    """Pages and slots of every rank, from the fleet alone."""
    return {
        Party(a.engine, a.incarnation, rank): (a.pages, a.slots)
        for a in (life.attached for life in history.fleet.alive())
        for rank in range(a.ranks)
    }


@given(fleets(), limits, asked)
def test_what_is_admitted_together_fits_together(
    history: History, allowed: Limits, wishes: list[tuple[str, int, int, bool]]
) -> None:
    """Over any pools, lengths and tenants: booked pages and slots never exceed what a rank has.

    Counted beside the ledger, from the admissions alone; some requests end on the way.
    """
    room = capacities(history)
    open_: dict[RequestId, Admitted] = {}
    for serial, (tenant, prompt, new, leaves) in enumerate(wishes, start=1):
        request = request_id(epoch=1, serial=serial)
        wanted = Submission(request, tenant, prompt, b"d", new, DEADLINE_NS)
        refused = refuse(history, wanted, allowed)
        if refused is not None:
            append(history, request, refused)
            continue
        admitted = admit(history, wanted, allowed)
        if admitted is None:
            continue
        append(history, request, admitted, attempt=1)
        open_[request] = admitted
        booked: Counter[Party] = Counter()
        running: Counter[Party] = Counter()
        for event in open_.values():
            assert event.prompt_tokens + event.new_tokens_max <= allowed.context_tokens
            assert event.prefill.layout == event.decode.layout
            for leg in (event.prefill, event.decode):
                for party in leg.parties():
                    booked[party] += leg.pages_booked
                    running[party] += 1
        for party, (pages, slots) in room.items():
            assert booked[party] <= pages
            assert running[party] <= slots
        if leaves:
            oldest = next(iter(open_))
            del open_[oldest]
            append(history, oldest, Aborted(Cause.CLIENT_CANCEL, "client"), attempt=1)


@given(fleets(), limits, st.integers(1, 40), st.integers(1, 24), st.integers(1, 4))
def test_what_is_not_refused_is_served_where_nothing_runs(
    history: History, allowed: Limits, prompt: int, new: int, attempt: int
) -> None:
    """A request waits only for others: an empty fleet of one layout admits it or refuses it."""
    request = request_id(epoch=1, serial=1)
    wanted = Submission(request, "a", prompt, b"d", new, DEADLINE_NS, attempt)
    layouts = {life.attached.layout for life in history.fleet.alive()}
    refused = refuse(history, wanted, allowed)
    admitted = admit(history, wanted, allowed)
    if refused is not None:
        assert isinstance(refused, Rejected)
        assert refused.reason
    elif len(layouts) == 1:
        assert admitted is not None
    if admitted is not None:
        needed = -(-(prompt + new) // PAGE_TOKENS)
        assert admitted.decode.pages_needed == needed
        assert admitted.decode.pages_booked <= needed <= admitted.decode.pages_capacity


# --- the queue --------------------------------------------------------------------------------


def pending(serial: int, tenant: str) -> Pending:
    """A waiting request."""
    request = request_id(epoch=1, serial=serial)
    wanted = Submission(request, tenant, 1, b"d", 1, DEADLINE_NS)
    return Pending(wanted, Payload((1,)), DEADLINE_NS)


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None, None, None]), max_size=60))
def test_no_tenant_is_served_twice_while_another_waits(ops: list[str | None]) -> None:
    """Letters arrive, None is served: tenants take turns, each in the order of its arrivals.

    Whoever waits is served after at most as many others as there are other tenants waiting.
    """
    queue = FairQueue(limit=100)
    waiting: dict[str, list[RequestId]] = {}
    passed: dict[str, Counter[str]] = {}
    for serial, tenant in enumerate(ops, start=1):
        if tenant is not None:
            one = pending(serial, tenant)
            queue.push(one)
            if not waiting.get(tenant):
                passed[tenant] = Counter()
            waiting.setdefault(tenant, []).append(one.wanted.request)
            continue
        head = queue.head()
        assert (head is None) == (not any(waiting.values()))
        if head is None:
            continue
        queue.pop(head)
        served = head.wanted.tenant
        assert waiting[served].pop(0) == head.wanted.request
        for other, left in waiting.items():
            if left and other != served:
                passed[other][served] += 1
                assert passed[other][served] <= 1
        passed[served] = Counter()
        assert len(queue) == sum(map(len, waiting.values()))
