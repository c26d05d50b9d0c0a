"""Guards whose removal alone the search does not notice.

Owns: the lists; tests say that each entry exists, and that what it says is so.
Must not know: how guards are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RULES_BACKED_UP: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "unbroken-log/time": ("unbroken-log/total",),
        "settled-once/granted": ("one-owner/serial", "whole-before-read/reserved"),
    }
)
"""Guards of the rules, each with those that back it up: all together they are missed."""

CODE_UNREACHED: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("DecodeCore.step_ended", "job is None"): "a later attempt would have to be admitted here "
        "while a pass of the earlier one still runs, which only a quarantine by time allows",
        ("_end", "cause is Cause.OUT_OF_PAGES"): "a last attempt books everything and never asks",
    }
)
"""Guards of the decision code that never leave in any walk, by function and condition's beginning."""

CODE_HARMLESS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("Sequencer._requeue", "relay is None"): "the same request waits, counted from later",
        ("DecodeCore._check_arrived", "len(grants) < len(job.reserved)"): "prefill posts nothing "
        "before every destination is in the log, so no writer has drained while one is missing, and "
        "whole-before-read/grants refuses a Verified that leaves one out",
    }
)
"""Guards of the decision code without which the walk goes on as well, with the reason."""


def _key(name: str) -> tuple[str, str]:
    _, function, test = name.split(":", 2)
    return function, test.removeprefix(" if ")


def _explained(name: str, table: Mapping[tuple[str, str], str]) -> str:
    function, test = _key(name)
    for (where, begins), why in table.items():
        if where == function and test.startswith(begins):
            return why
    return ""


def unreached(name: str) -> str:
    """Why no walk comes to where this guard leaves, or nothing."""
    return _explained(name, CODE_UNREACHED)


def harmless(name: str) -> str:
    """Why nothing is missed without this guard, or nothing."""
    return _explained(name, CODE_HARMLESS)
