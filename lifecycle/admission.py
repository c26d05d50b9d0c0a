"""Admission and placement: refused for ever, admitted now, or not yet.

Owns: what a request needs, where it fits, how much is booked for its growth.
Must not know: queues and streams; nothing here remembers anything.
"""

from __future__ import annotations

import attrs

from lifecycle.events import Admitted, Leg, RejectCode, Rejected, Role
from lifecycle.fleet import Life
from lifecycle.history import History
from lifecycle.ids import RequestId, pages_for, prefill_pages, ranks_of
from lifecycle.wording import counted


@attrs.frozen
class Limits:
    """What a deployment allows, in tokens, attempts and nanoseconds."""

    context_tokens: int
    growth_tokens: int = 32
    attempts_max: int = 4
    settle_ns: int = 30_000_000_000


@attrs.frozen
class Submission:
    """A request that waits for its decision; `attempt` is the one that would begin."""

    request: RequestId
    tenant: str
    prompt_tokens: int
    prompt_digest: bytes
    new_tokens_max: int
    deadline_ns: int
    attempt: int = 1


def refuse(history: History, wanted: Submission, limits: Limits) -> Rejected | None:
    """Say why this request can never be served here, or None. No engine is asked."""
    total = wanted.prompt_tokens + wanted.new_tokens_max
    if wanted.prompt_tokens < 1 or wanted.new_tokens_max < 1:
        return rejected(
            history,
            wanted,
            limits,
            RejectCode.INVALID_REQUEST,
            f"{counted(wanted.prompt_tokens, 'prompt token')} and "
            f"{counted(wanted.new_tokens_max, 'new token')}: "
            "each must be at least one",
        )
    if total > limits.context_tokens:
        return rejected(
            history,
            wanted,
            limits,
            RejectCode.CONTEXT_LENGTH_EXCEEDED,
            f"{counted(wanted.prompt_tokens, 'prompt token')} and "
            f"{counted(wanted.new_tokens_max, 'new token')} "
            f"exceed the context of {counted(limits.context_tokens, 'token')}",
            limits.context_tokens,
        )
    prefills, decodes = _lives(history, Role.PREFILL), _lives(history, Role.DECODE)
    if not prefills or not decodes:
        return rejected(
            history,
            wanted,
            limits,
            RejectCode.NO_ENGINE,
            f"{len(prefills)} prefill and {counted(len(decodes), 'decode engine')} attached: "
            "one of each is needed",
        )
    for lives, tokens, leg in (
        (prefills, max(1, wanted.prompt_tokens - 1), "prefill"),
        (decodes, total, "decode"),
    ):
        pool = max(life.attached.pages * life.attached.page_tokens for life in lives)
        if all(
            pages_for(tokens, life.attached.page_tokens) > life.attached.pages for life in lives
        ):
            return rejected(
                history,
                wanted,
                limits,
                RejectCode.KV_POOL_CAPACITY_EXCEEDED,
                f"{counted(wanted.prompt_tokens, 'prompt token')} and "
                f"{counted(wanted.new_tokens_max, 'new token')} "
                f"need more than the {counted(pool, 'token')} that the largest pool of a {leg} "
                "engine holds",
                pool,
            )
    return None


def rejected(
    history: History,
    wanted: Submission,
    limits: Limits,
    code: RejectCode,
    reason: str,
    capacity_tokens: int = 0,
) -> Rejected:
    """A rejection with the numbers of this submission."""
    return Rejected(
        code=code,
        reason=reason,
        prompt_tokens=max(0, wanted.prompt_tokens),
        new_tokens_max=max(0, wanted.new_tokens_max),
        context_tokens=limits.context_tokens,
        capacity_tokens=capacity_tokens,
        tenant=wanted.tenant,
        fleet_position=history.fleet.sequence,
    )


def admit(history: History, wanted: Submission, limits: Limits) -> Admitted | None:
    """Place a request on two legs with both legs' pages booked in one step, or None for now."""
    pairs = [
        (p, d)
        for p in _placeable(history, Role.PREFILL)
        for d in _placeable(history, Role.DECODE)
        if p.attached.layout == d.attached.layout
    ]
    best: tuple[int, Leg, Leg] | None = None
    step, most = growth_booked(wanted, limits), wanted.prompt_tokens + wanted.new_tokens_max
    for p, d in pairs:
        # What could never come back once grown must never have to give way.
        returns = prefill_pages(most, p.attached.page_tokens) <= p.attached.pages
        growth = step if returns else wanted.new_tokens_max
        prefill = _leg(history, p, wanted, limits, growth)
        decode = _leg(history, d, wanted, limits, growth)
        if prefill is None or decode is None:
            continue
        room = prefill.pages_free - prefill.pages_booked + decode.pages_free - decode.pages_booked
        if best is None or room > best[0]:
            best = (room, prefill, decode)
    if best is None:
        return None
    return Admitted(
        prompt_tokens=wanted.prompt_tokens,
        prompt_digest=wanted.prompt_digest,
        new_tokens_max=wanted.new_tokens_max,
        context_tokens=limits.context_tokens,
        prefill=best[1],
        decode=best[2],
        tenant=wanted.tenant,
        deadline_ns=wanted.deadline_ns,
        settle_ns=limits.settle_ns,
        attempts_max=limits.attempts_max,
        fleet_position=history.fleet.sequence,
    )


def unplaceable(history: History, wanted: Submission) -> str | None:
    """Say why no pair of the engines that take requests could ever hold this one, or None.

    Pages count as they were attached, so that what others hold at the moment says nothing.
    """
    prefills, decodes = _placeable(history, Role.PREFILL), _placeable(history, Role.DECODE)
    source, total = wanted.prompt_tokens, wanted.prompt_tokens + wanted.new_tokens_max
    for p in (life.attached for life in prefills):
        for d in (life.attached for life in decodes):
            fits = prefill_pages(source, p.page_tokens) <= p.pages
            if p.layout == d.layout and fits and pages_for(total, d.page_tokens) <= d.pages:
                return None
    return (
        f"{counted(source, 'prompt token')} and {counted(wanted.new_tokens_max, 'new token')} "
        "fit no pair of the "
        f"{len(prefills)} prefill and {counted(len(decodes), 'decode engine')} that take requests"
    )


def outgrown(history: History, prompt_tokens: int) -> bool:
    """Whether a prompt that has grown by its answer fits no prefill pool that there is.

    Where no prefill engine lives nobody knows, and one may come.
    """
    lives = _lives(history, Role.PREFILL)
    return bool(lives) and all(
        prefill_pages(prompt_tokens, life.attached.page_tokens) > life.attached.pages
        for life in lives
    )


def _lives(history: History, role: Role) -> list[Life]:
    return [life for life in history.fleet.alive() if life.attached.role is role]


def _placeable(history: History, role: Role) -> list[Life]:
    return [life for life in _lives(history, role) if life.usable]


def growth_booked(wanted: Submission, limits: Limits) -> int:
    """How many tokens beyond the prompt are booked: a small step, four times more each attempt.

    The last attempt books all that the request may ever need, so it cannot run out of pages.
    """
    if wanted.attempt >= limits.attempts_max:
        return wanted.new_tokens_max
    step: int = limits.growth_tokens * 4 ** (wanted.attempt - 1)
    return min(wanted.new_tokens_max, step)


def _leg(
    history: History, life: Life, wanted: Submission, limits: Limits, growth: int
) -> Leg | None:
    attached = life.attached
    size = attached.page_tokens
    parties = ranks_of(attached.engine, attached.incarnation, attached.ranks)
    accounts = [history.ledger[party] for party in parties]
    if any(len(account.booked) >= account.slots for account in accounts):
        return None
    capacity = min(account.usable_pages for account in accounts)
    free = min(account.free_pages for account in accounts)
    if attached.role is Role.PREFILL:
        needed = booked = prefill_pages(wanted.prompt_tokens, size)
    else:
        needed = pages_for(wanted.prompt_tokens + wanted.new_tokens_max, size)
        booked = pages_for(wanted.prompt_tokens + growth, size)
        # Whoever decodes here may soon grow by a step: a newcomer must not take that room.
        running = max(len(account.booked) for account in accounts)
        free_after = free - running * pages_for(limits.growth_tokens, size)
        if booked > free_after:
            return None
    if needed > capacity or booked > free:
        return None
    return Leg(
        engine=attached.engine,
        incarnation=attached.incarnation,
        ranks=attached.ranks,
        page_tokens=size,
        pages_needed=needed,
        pages_booked=booked,
        pages_capacity=capacity,
        pages_free=free,
        layout=attached.layout,
    )
