"""Guards on an attempt's beginning: `Admitted` proves its numbers, `Requeued` is bounded.

Owns: context, capacity, booking, pairing, what the next attempt continues.
Must not know: what engines really have free; `crossguards` compares with the ledger.
"""

from __future__ import annotations

from lifecycle.events import Admitted, Entry, Requeued
from lifecycle.ids import pages_for, prefill_pages
from lifecycle.state import RequestState
from lifecycle.wording import counted


def context_fits(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    total = event.prompt_tokens + event.new_tokens_max
    if total > event.context_tokens:
        return f"{counted(total, 'token')} in a context of {event.context_tokens}"
    return None


def prefill_capacity(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    leg = event.prefill
    needed = prefill_pages(event.prompt_tokens, leg.page_tokens)
    if leg.pages_needed != needed or needed > leg.pages_capacity:
        return (
            f"prefill needs {counted(needed, 'page')} ({leg.pages_needed} said) of "
            f"{leg.pages_capacity}"
        )
    return None


def decode_capacity(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    leg = event.decode
    needed = pages_for(event.prompt_tokens + event.new_tokens_max, leg.page_tokens)
    if leg.pages_needed != needed or needed > leg.pages_capacity:
        return (
            f"decode needs {counted(needed, 'page')} ({leg.pages_needed} said) of "
            f"{leg.pages_capacity}"
        )
    return None


def pages_booked(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    least_prefill = prefill_pages(event.prompt_tokens, event.prefill.page_tokens)
    least_decode = pages_for(event.prompt_tokens, event.decode.page_tokens)
    for leg, least in ((event.prefill, least_prefill), (event.decode, least_decode)):
        if leg.pages_booked < least:
            return (
                f"{counted(leg.pages_booked, 'page')} booked on {leg.engine}, the prompt needs "
                f"{least}"
            )
        if leg.pages_booked > leg.pages_free:
            return f"{counted(leg.pages_booked, 'page')} booked out of {leg.pages_free} free"
    return None


def layouts_equal(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    one, two = event.prefill, event.decode
    if one.layout != two.layout or one.page_tokens != two.page_tokens:
        return f"layout {one.layout} is paired with {two.layout}"
    return None


def nothing_owned(state: RequestState, _entry: Entry, _event: Admitted) -> str | None:
    if state.unsettled:
        names = ", ".join(str(g.id) for g in state.unsettled)
        return f"the next attempt begins while {names} is unsettled"
    return None


def continues(state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    if state.first is None:
        return None
    prompt = state.first.prompt_tokens + state.relayed
    room = state.first.new_tokens_max - state.relayed
    if (event.prompt_tokens, event.new_tokens_max) != (prompt, room):
        return (
            f"the attempt continues with {event.prompt_tokens} + "
            f"{counted(event.new_tokens_max, 'token')}, "
            f"not {prompt} + {room}"
        )
    return None


def deadline_ahead(_state: RequestState, entry: Entry, event: Admitted) -> str | None:
    if event.deadline_ns <= entry.time_ns:
        return f"the deadline {event.deadline_ns} ns is not after {entry.time_ns} ns"
    return None


def attempts_left(state: RequestState, _entry: Entry, _event: Requeued) -> str | None:
    if state.admitted is not None and state.attempt >= state.admitted.attempts_max:
        return f"attempt {state.attempt} of {state.admitted.attempts_max} is requeued"
    return None


def relayed_counts_on(state: RequestState, _entry: Entry, event: Requeued) -> str | None:
    if state.first is None:
        return None
    most = state.first.new_tokens_max
    if not state.relayed <= event.tokens_relayed < most:
        return (
            f"{counted(event.tokens_relayed, 'token')} relayed after {state.relayed}, "
            f"and at least one of {most} must be left"
        )
    return None
