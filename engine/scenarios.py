"""The worlds that are searched when nobody names others.

Owns: the scenarios, by name; large ones for the walk and small ones to be exhausted.
Must not know: what is looked for in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from engine.world_values import Asked, Scenario

FAULTS = MappingProxyType(
    {
        "lose": 2,
        "repeat": 2,
        "swap": 2,
        "break": 1,
        "crash": 2,
        "process-crash": 1,
        "cancel": 2,
        "tick": 2,
        "doubt": 1,
        "hang": 1,
        "fail": 1,
        "reland": 2,
        "restart": 1,
        "declare-lost": 1,
        "step-fails": 1,
    }
)
CROWDED = Scenario(
    asked=(Asked(4, 2), Asked(5, 2), Asked(5, 1), Asked(1, 3), Asked(4, 2)),
    decode_pages=6,
    faults=dict(FAULTS),
)
"""More than fits at once, so that pages change hands: two writer ranks, one decode engine."""


def focus(**faults: int) -> Scenario:
    """The scenario with these faults only; `breaks` are breaks of a stream."""
    named = {name.replace("_", "-"): count for name, count in faults.items()}
    if "breaks" in named:
        named["break"] = named.pop("breaks")
    return attrs.evolve(CROWDED, faults=named)


ODD = (Asked(5, 2), Asked(5, 1), Asked(5, 2))
LIMITS = (Asked(8, 1), Asked(9, 3), Asked(10, 1), Asked(9, 4), Asked(2, 1), Asked(3, 2))
"""Lengths at a page and at either pool, one below and one above."""

WORLDS: Mapping[str, Scenario] = MappingProxyType(
    {
        "crowded": CROWDED,
        "cancels": attrs.evolve(focus(cancel=3, lose=1, repeat=1), judged=False),
        "deadlines": attrs.evolve(focus(cancel=3, tick=3, doubt=1, hang=1), judged=False),
        "streams": focus(breaks=4, lose=1, repeat=1, swap=1, cancel=1),
        "lost engines": focus(restart=1, declare_lost=2, breaks=2),
        "slow store": attrs.evolve(
            focus(crash=6),
            asked=(Asked(3, 1),) * 6,
            ranks=1,
            slow=frozenset({"flush", "land", "submit"}),
        ),
        "placing": attrs.evolve(CROWDED, placing=True, judged=False),
        "tight": attrs.evolve(focus(cancel=4), asked=(*ODD, Asked(3, 2)), decode_pages=4),
        "lying plane": attrs.evolve(
            focus(lie=8), asked=(Asked(3, 4),) * 6, decode_pages=4, ranks=1
        ),
        "limits": attrs.evolve(focus(cancel=2, tick=1, reland=2), asked=LIMITS, ranks=1, staging=3),
        "failures": attrs.evolve(
            focus(declare_lost=2, fail=3, doubt=1, hang=1),
            asked=(Asked(5, 2),) * 3,
            attempts_max=4,
            judged=False,
            slow=frozenset({"land"}),
        ),
        "two kinds": attrs.evolve(
            focus(cancel=1, fail=1, lose=1), kinds=2, decode_pages=40, attempts_max=1
        ),
        "misfit": attrs.evolve(focus(restart=3, cancel=1, breaks=1), misfit_life=2),
        "fences": attrs.evolve(
            focus(restart=2, declare_lost=1),
            asked=(Asked(3, 1),) * 3,
            placing=True,
            judged=False,
            slow=frozenset({"land"}),
        ),
        "late joiners": attrs.evolve(
            focus(restart=1, declare_lost=2, breaks=6, repeat=2),
            asked=(Asked(3, 3),) * 2,
            ranks=1,
            attempts_max=4,
        ),
        "nothing wrong": attrs.evolve(
            focus(), asked=(Asked(2, 5),) * 4, decode_pages=5, growth_tokens=2
        ),
        "slow answers": attrs.evolve(
            focus(process_crash=3, breaks=2, cancel=1),
            asked=(Asked(3, 2),) * 4,
            slow=frozenset({"answer"}),
        ),
        "losses": attrs.evolve(
            focus(lose=6, cancel=3), asked=(Asked(3, 3),) * 3, ranks=1, late_cancels=True
        ),
        "roomy": attrs.evolve(
            focus(),
            asked=(Asked(60, 5), Asked(0, 1), *(Asked(2, 5),) * 4),
            prefill_pages=40,
            decode_pages=40,
            slots=2,
            placing=True,
        ),
    }
)
"""Each danger in a world of its own: the worlds in which mutants are hunted."""

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        **{name: attrs.evolve(world, judged=True) for name, world in WORLDS.items()},
        "four pages": attrs.evolve(CROWDED, decode_pages=4),
        "one rank": attrs.evolve(CROWDED, ranks=1, staging=1),
        "narrow": attrs.evolve(CROWDED, placing=True, decode_pages=3, chunk_tokens=8),
        "growing": attrs.evolve(
            CROWDED,
            asked=(Asked(2, 5),) * 3,
            decode_pages=5,
            growth_tokens=2,
            attempts_max=3,
        ),
        "everything and lies": attrs.evolve(CROWDED, faults={**FAULTS, "lie": 2}),
        "growing by fences": attrs.evolve(
            CROWDED,
            asked=(Asked(2, 5),) * 3,
            decode_pages=5,
            growth_tokens=2,
            placing=True,
        ),
        "two of each": attrs.evolve(
            CROWDED,
            prefills=2,
            decodes=2,
            decode_pages=4,
            faults={**FAULTS, "echo": 2, "garble": 3, "forge": 2},
        ),
        "two of each, placing": attrs.evolve(
            focus(declare_lost=2, restart=2, breaks=2, forge=2, fail=1, tick=2),
            prefills=2,
            decodes=2,
            placing=True,
            attempts_max=4,
        ),
        "large pages": attrs.evolve(
            focus(cancel=2, echo=3, reland=1),
            asked=(Asked(9, 7), Asked(5, 3), Asked(8, 4), Asked(3, 9)),
            page_tokens=4,
            chunk_tokens=4,
        ),
        "long answers": attrs.evolve(
            focus(), asked=(Asked(2, 12),) * 3, prefill_pages=8, decode_pages=9, ranks=1
        ),
        "last tokens": attrs.evolve(
            focus(), asked=(Asked(2, 9), Asked(3, 4), Asked(2, 9)), decode_pages=7, growth_tokens=2
        ),
        "forgeries": attrs.evolve(
            focus(forge=30),
            asked=(Asked(2, 9), Asked(3, 4), Asked(2, 9)),
            decode_pages=7,
            growth_tokens=2,
        ),
        "large and small": attrs.evolve(
            focus(),
            asked=(Asked(2, 9), Asked(2, 9), Asked(3, 14)),
            prefill_pages=6,
            decode_pages=15,
            growth_tokens=2,
        ),
        "slow growth": attrs.evolve(
            focus(overdue=6, step_fails=3),
            asked=(Asked(2, 9),) * 3,
            page_tokens=1,
            prefill_pages=20,
            decode_pages=13,
            growth_tokens=1,
            attempts_max=4,
            slow=frozenset({"step-end"}),
        ),
        "left writers": attrs.evolve(
            focus(cancel=3, declare_lost=2, restart=2),
            asked=(Asked(4, 1),) * 2,
            placing=True,
            slow=frozenset({"land", "up"}),
        ),
        "few proposals": attrs.evolve(
            CROWDED, outstanding_max=2, faults={**FAULTS, "garble": 2}, attempts_max=4
        ),
        "strangers": attrs.evolve(
            focus(fail=2, declare_lost=2, restart=1, garble=2),
            asked=(Asked(3, 2),) * 4,
            prefills=2,
            decodes=2,
            ranks=1,
            attempts_max=4,
        ),
        "torn logs": attrs.evolve(
            focus(torn=6, restart=3, declare_lost=3, late=2, tick=2, cancel=2, echo=2),
            asked=(Asked(3, 2),) * 5,
            slow=frozenset({"flush"}),
        ),
        "slow steps": attrs.evolve(
            focus(overdue=8, step_fails=6, fail=6, declare_lost=2),
            asked=(Asked(3, 3),) * 3,
            attempts_max=4,
            slow=frozenset({"step-end"}),
        ),
        "waits": attrs.evolve(
            focus(declare_lost=4, tick=6, late=2, garble=1, restart=1),
            asked=(Asked(3, 2, 100),) * 4,
            attempts_max=4,
            engine_wait_ns=5,
            slow=frozenset({"rejoin", "connect"}),
        ),
    }
)
"""What a walk visits in turn; their number is odd, so that each meets every mode of a seed."""

EAGER = frozenset({"connect", "answer", "down", "step", "retransmit"})
"""Streams to engines are instant, and idle engines compute at once."""
AT_ONCE = EAGER | {"up"}
"""Streams from engines, too."""
ONE = Scenario(
    asked=(Asked(5, 1),), prefill_pages=2, decode_pages=3, chunk_tokens=4, eager=EAGER | {"flush"}
)
"""One request over two writer ranks, each with a page to write."""
TURNS = attrs.evolve(ONE, asked=(Asked(3, 1), Asked(3, 1)), prefill_pages=1, decode_pages=2)
"""Two requests that fit one after the other, so that pages change hands."""
PAIR = Scenario(asked=(Asked(3, 1), Asked(3, 1)), ranks=1, staging=2, eager=EAGER)
"""Two requests beside each other on one prefill and one decode engine with four pages."""
NARROW = attrs.evolve(PAIR, prefill_pages=2, staging=1)

SMALL: Mapping[str, Scenario] = MappingProxyType(
    {
        "no fault": ONE,
        "two requests, four pages, abort": attrs.evolve(PAIR, faults={"cancel": 1}),
        "two writers, two attempts; lost, repeated, overtaken proposals": attrs.evolve(
            ONE, faults={"lose": 1, "repeat": 1, "swap": 1, "step-fails": 1}
        ),
        "two requests, the scheduler crashes and loses its log's tail": attrs.evolve(
            NARROW, faults={"crash": 1}
        ),
        "two requests, an engine restarts": attrs.evolve(
            NARROW, eager=EAGER | {"flush"}, faults={"restart": 1}
        ),
        "two requests, the scheduler crashes and an engine restarts": attrs.evolve(
            NARROW, eager=AT_ONCE, faults={"crash": 1, "restart": 1}
        ),
        "two requests in turn over two writers, abort": attrs.evolve(TURNS, faults={"cancel": 1}),
        "abort, doubt, late writes, deadlines": attrs.evolve(
            ONE,
            faults={"cancel": 1, "doubt": 1, "reland": 1, "tick": 2},
            eager=AT_ONCE | {"flush"},
        ),
    }
)
"""Small enough to visit every state within a minute each."""


def of_seed(seed: int) -> tuple[str, Scenario]:
    """The scenario of a run: a function of its seed alone."""
    names = tuple(SCENARIOS)
    name = names[seed % len(names)]
    return name, SCENARIOS[name]
