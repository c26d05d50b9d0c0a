"""The rules by name: one sentence each, and the public reports that it would have stopped.

Owns: the names and what they mean.
Must not know: how a rule is checked; `guards` (one request) and `crossguards` (all of them)
observe the events, `bounded` is closed by `replay`, and the physical rules are also checked by
the engines on real memory.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Rule:
    """A claim about every log: its name, the claim, and where its absence was reported."""

    name: str
    sentence: str
    reports: tuple[str, ...] = ()


_RULES = (
    Rule(
        "one-decision",
        "The first event is Admitted or Rejected, and after Rejected there is only Dropped.",
        ("sglang #30233", "sglang #34208", "sglang #40125", "sglang #26486"),
    ),
    Rule(
        "capacity-proved",
        "Admitted shows that prompt and new tokens fit the context and both legs, "
        "and books the prompt's pages out of what is free.",
        ("sglang #30326",),
    ),
    Rule(
        "current-attempt",
        "Attempts count up by one, and only the current attempt's own parties are heard.",
        ("sglang #27374",),
    ),
    Rule(
        "written-within-grant",
        "Transferred names a held destination grant, comes from one of its parties, "
        "and stays inside it without overlap.",
        ("sglang #36988",),
    ),
    Rule(
        "whole-before-read",
        "Verified needs prompt tokens 0 to n-2 written exactly once into every destination grant.",
        ("sglang #38704", "sglang #30057", "sglang #32995", "sglang #30233"),
    ),
    Rule(
        "exclusive-before-read",
        "Verified needs Drained from every party of each grant that it covers.",
    ),
    Rule(
        "first-cause-wins",
        "There is at most one of Finished and Aborted, and success needs Verified and Finished.",
        ("sglang #33507",),
    ),
    Rule(
        "quiet-after-end",
        "After an attempt's end there is no new grant, no transfer and no token for it.",
        ("sglang #36988", "sglang #34149", "sglang #36333"),
    ),
    Rule(
        "drained-before-released",
        "A grant is released only when every party has drained.",
        (
            "sglang #24527",
            "sglang #32564",
            "sglang #35049",
            "sglang #38961",
            "sglang #41402",
            "sglang #41404",
            "vllm #46240",
            "vllm #43226",
        ),
    ),
    Rule(
        "drained-is-final",
        "After a party's Drained nothing of that party may land: its incarnation counts as lost.",
    ),
    Rule(
        "time-is-no-proof",
        "A deadline may abort, requeue or quarantine; it never drains, releases or recovers.",
        ("sglang default release timer",),
    ),
    Rule(
        "settled-once",
        "Each grant is granted once and settled once.",
        ("sglang #30937", "sglang #25805"),
    ),
    Rule(
        "requeue-keeps-resources-honest",
        "The next attempt begins only when everything of the last is settled, "
        "and continues exactly after the tokens that were relayed.",
        ("sglang #38935",),
    ),
    Rule(
        "bounded",
        "Every phase that is not terminal has a deadline, and every request closes.",
        ("sglang #38935", "sglang #40645", "sglang #38961"),
    ),
    Rule(
        "one-owner",
        "At every prefix of the log a page has at most one holder, and grant serials only grow.",
        ("sglang #23346", "sglang #17259"),
    ),
    Rule(
        "conservation",
        "Free, booked, held and quarantined pages make up the capacity of each live incarnation.",
        ("sglang #16067", "sglang #38935"),
    ),
    Rule(
        "incarnation-fences",
        "A lost or replaced incarnation is heard only for Drained of its own operations.",
        ("sglang #16903",),
    ),
    Rule(
        "compatible-legs",
        "Legs are paired only with equal layout fingerprints.",
        ("sglang #14439", "sglang #19398"),
    ),
    Rule(
        "unbroken-log",
        "Sequence numbers have no gap, times never decrease, and epochs only grow.",
    ),
    Rule(
        "computed-before-sent",
        "A range is written only after the forward pass that produced it has ended.",
        ("sglang #33970", "sglang #31368"),
    ),
    Rule(
        "read-what-was-written",
        "Decode reads only pages whose headers it compared; no read goes unchecked.",
        ("sglang #30233", "sglang #38704"),
    ),
    Rule(
        "acted-after-logged",
        "Engines expose, post, read and reuse only after the event that allows it came back.",
    ),
)

RULES: dict[str, Rule] = {rule.name: rule for rule in _RULES}
