"""Guards whose removal the search does not notice, each with the reason.

Owns: the list; a test says that each still exists.
Must not know: how guards are removed.

The key of a guard of the decision code is where it stands and how its condition begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TYPES = "equivalent: its callers have asked before, and it only tells the type checker"
NOTHING = "equivalent: without it the same follows, after more work"

RULES_BACKED_UP: Mapping[str, str] = MappingProxyType(
    {
        "unbroken-log/time": "backed up by unbroken-log/total, which looks at all requests",
        "settled-once/granted": "backed up by one-owner/serial and whole-before-read/reserved",
    }
)

CODE_SURVIVORS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("EngineCore.receive", "entry.request == FLEET"): "backed up by the entries that follow a "
        "change of the fleet for each request that it concerns",
        ("EngineCore.receive", "self.syncing"): "equivalent: `advance_all` asks the same again",
        ("EngineCore._known", "entry.request == FLEET"): "equivalent in streams without gaps: the "
        "position tells the same",
        ("EngineCore.propose", "len(self.outstanding)"): "a limit that no small world reaches",
        ("DecodeCore.plan_step", "not ready"): TYPES,
        ("PrefillCore.plan_step", "not slices"): TYPES,
        ("DecodeCore.step_ended", "job is None"): "backed up by `touched`: a job outlives its step",
        (
            "PrefillCore.step_ended",
            "job is None",
        ): "backed up by `touched`: a job outlives its step",
        ("DecodeCore._begin", "admitted is None"): TYPES,
        ("PrefillCore._begin", "admitted is None"): TYPES,
        ("DecodeCore._advance", "not self._same_prompt"): "backed up by coverage; both are removed "
        "in the mutant wrong-field",
        ("PrefillCore._advance", "not self._same_prompt"): "backed up by coverage; both are "
        "removed in the mutant wrong-field",
        ("DecodeCore._reserve", "admitted is None"): TYPES,
        ("DecodeCore._grow", "admitted is None"): "harmless: growth is asked for earlier",
        ("DecodeCore._grow", "room >= most"): "equivalent: no pages can be taken for no tokens",
        ("DecodeCore._fence_lost", "grant.id.owner != self.party"): "backed up by "
        "time-is-no-proof/proof",
        ("Judge._take", "first is not None"): "backed up by the answers that a line keeps",
        ("Judge._repeat", "same and isinstance"): "backed up by the answers that a line keeps",
        ("Judge._take_failure", "self.position > before"): "harmless: a failure is said once, and "
        "its answer changes nothing",
        ("PrefillCore.plan_step", "job.source is None"): "harmless: a pass may hold slices of no "
        "tokens",
        ("_fail", "other is None and whole"): "needs that a request's last token and another's "
        "need of pages meet; kept as the trace aborted-when-answered",
        ("_runs_on", "state.admitted is None"): "harmless: an ended request's pages are on their "
        "way home as well",
        ("DecodeCore._fence_lost", "life is None"): "harmless to isolation: a living writer is "
        "shut out, and its attempt fails",
        ("PrefillCore._post", "runs is None"): TYPES,
        ("PrefillCore._release_source", "source is None"): "backed up by `_release`, which asks "
        "whether a step runs",
        ("Scheduler.tokens", "state.admitted is None"): "needs an engine that sends tokens for a "
        "request of another; see the tests of hostile engines",
        ("Scheduler.tokens", "not fresh"): NOTHING,
        ("Scheduler._pump", "self.now_ns >= wanted.deadline_ns"): "backed up by `tick`, which "
        "rejects what is overdue before it pumps",
        ("Sequencer._requeue", "relay is None"): NOTHING,
        ("growth_booked", "wanted.attempt >= limits.attempts_max"): "harmless in these sizes: four "
        "times the step covers what the last attempt needs",
        ("_leg", "booked > free_after"): "a heuristic: newcomers leave room for growth",
        ("_end", "cause is Cause.OUT_OF_PAGES"): "the name of a cause; unit tests hold it",
        ("_fail", "decode is None"): TYPES,
        ("victim", "state.request in whole"): "needs that a request's last token and another's "
        "need of pages meet; kept as the trace aborted-when-answered",
        ("victim", "state.attempt < state.admitted.attempts_max"): "harmless: whoever asked gives "
        "way itself",
        ("_why", "life is None"): "backed up by incarnation-fences/owner, and a lost owner's "
        "grants are in quarantine before any deadline",
    }
)
EQUIVALENT = ("equivalent", "harmless", "backed up", "a heuristic", "the name of a cause")
"""How a reason begins where nothing is missed: what the guard keeps is kept without it."""


def reason(name: str) -> str:
    """The reason for a survivor of `guard_removal`, or nothing."""
    _, function, test = name.split(":", 2)
    for (where, begins), why in CODE_SURVIVORS.items():
        if where == function and test.removeprefix(" if ").startswith(begins):
            return why
    return ""
