"""Guards whose removal the search does not notice, each with the reason.

Owns: the list; a test says that each still exists.
Must not know: how guards are removed.

The key of a guard of the decision code is where it stands and how its condition begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RULES_BACKED_UP: Mapping[str, str] = MappingProxyType(
    {
        "unbroken-log/time": "backed up by unbroken-log/total, which looks at all requests",
        "settled-once/granted": "backed up by one-owner/serial and whole-before-read/reserved",
    }
)

NEVER = "unreachable: no walk comes here, "
CODE_SURVIVORS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("EngineCore.receive", "entry.request == FLEET"): "backed up by the entries that follow a "
        "change of the fleet for each request that it concerns",
        ("EngineCore.propose", "len(self.outstanding)"): NEVER + "a limit beyond small worlds",
        ("DecodeCore.step_ended", "len(self.outstanding)"): NEVER + "a limit beyond small worlds",
        ("DecodeCore.step_ended", "job is None"): NEVER + "since a job outlives its step",
        ("PrefillCore.step_ended", "job is None"): "harmless unless the pass fails: what an old "
        "attempt computed counts as nothing in the new one",
        ("PrefillCore._begin", "admitted is None"): "backed up by capacity: the job of a rank that "
        "is no party waits for pages or proposes what its own copy refuses",
        ("DecodeCore._advance", "not self._same_prompt"): "backed up by coverage; both are removed "
        "in the mutant wrong-field",
        ("DecodeCore._grow", "admitted is None"): "harmless: growth is asked for earlier",
        ("Judge._take", "first is not None"): "backed up by settled-once/drained",
        ("Judge._repeat", "same and isinstance"): "backed up by settled-once/drained",
        ("_fail", "other is None and"): "needs that a repeated want of pages meets a last token; "
        "kept as the trace aborted-when-answered",
        ("_runs_on", "state.admitted is None"): "harmless: an ended request's pages are on their "
        "way home as well",
        ("Scheduler.tokens", "not fresh"): NEVER + "since `known` is compared before",
        ("Scheduler._end_unplaceable", "not self.engine_wait_ns"): "needs a world without a limit "
        "in which an engine stays away; see tests/test_no_engine.py",
        ("unplaceable", "not prefills or not decodes"): "equivalent: no pair fits, and only the "
        "words differ",
        ("Sequencer._requeue", "relay is None"): "equivalent: the same waits, counted from later",
        ("_leg", "booked > free_after"): "a heuristic: newcomers leave room for growth",
        ("_end", "cause is Cause.OUT_OF_PAGES"): NEVER + "since a last attempt books everything",
        ("victim", "state.attempt < state.admitted.attempts_max"): "needs that the youngest is in "
        "its last attempt and an older one asks; unit tests hold it",
    }
)
EQUIVALENT = ("equivalent", "harmless", "backed up", "a heuristic", "unreachable")
"""How a reason begins where nothing is missed: what the guard keeps is kept without it."""


def reason(name: str) -> str:
    """The reason for a survivor of `guard_removal`, or nothing."""
    _, function, test = name.split(":", 2)
    for (where, begins), why in CODE_SURVIVORS.items():
        if where == function and test.removeprefix(" if ").startswith(begins):
            return why
    return ""
