"""What a mutant is, and the one set of worlds and settings with which all of them are hunted.

Owns: the worlds, how a mutant's code gets into one, the hunt.
Must not know: any mutant; the families and the registry stand beside it.

Run number n walks the n-th world of the set, in turn, with n as its seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs

from engine.decode import DecodeCore
from engine.explorer import Outcome, walk
from engine.prefill import PrefillCore
from engine.scheduler import Scheduler
from engine.world import World
from engine.world_values import Asked, Found, Scenario
from lifecycle.history import History

FAULTS = {
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
CROWDED = Scenario(
    asked=(Asked(4, 2), Asked(5, 2), Asked(5, 1), Asked(1, 3), Asked(4, 2)),
    decode_pages=6,
    faults=FAULTS,
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
"""Every mutant is hunted in all of these; their number shares no factor with the seeds' modes."""

RUNS_MAX = 5_000
STEPS_MAX = 250
"""Steps of a run before it calms; more of them find no more in the same time."""


def blinded(made: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """An engine core whose copy of the log is reduced without these guards."""
    gone = tuple(names)

    class Blinded(made):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.log = History(without=gone, crossguards=False)

        def begin_sync(self, epoch: int) -> None:
            super().begin_sync(epoch)
            self.log = History(without=gone, crossguards=False)

    return Blinded


@attrs.frozen
class Mutant:
    """The product's decision code with a hole, what may find it, and the rules that it breaks.

    `oracles` are the findings that count, `rules` what the log, or the oracle where the log is
    clean, says first; `without` are guards that would back the removed one up.
    """

    name: str
    reports: tuple[str, ...]
    story: str
    guard: str
    rules: frozenset[str]
    oracles: frozenset[str]
    without: tuple[str, ...] = ()
    scheduler: type[Scheduler] = Scheduler
    prefill: type[PrefillCore] = PrefillCore
    decode: type[DecodeCore] = DecodeCore
    worlds: type[World] = World
    settings: Mapping[str, Any] = MappingProxyType({})
    green: bool = False

    def put_into(self, scenario: Scenario) -> Scenario:
        """That scenario with this mutant's code in place of the product's."""
        gone = self.without
        return attrs.evolve(
            scenario,
            scheduler=partial(self.scheduler, without=gone) if gone else self.scheduler,
            prefill=blinded(self.prefill, gone) if gone else self.prefill,
            decode=blinded(self.decode, gone) if gone else self.decode,
            **self.settings,
        )

    def expects(self, found: Found, rule: str) -> bool:
        """Whether this finding names the fault: an oracle and a rule that were foretold."""
        return found.name in self.oracles and (not self.rules or rule in self.rules)


def mutant(
    name: str,
    reports: str,
    *,
    story: str,
    guard: str,
    rules: str,
    oracles: str,
    without: Iterable[str] = (),
    **more: Any,
) -> Mutant:
    """A mutant; several reports, rules or oracles stand in one string."""
    listed = tuple(part.strip() for part in reports.split(",") if part.strip())
    return Mutant(
        name,
        listed,
        story,
        guard,
        frozenset(rules.split()),
        frozenset(oracles.split()),
        tuple(without),
        **more,
    )


@attrs.frozen
class Hunt:
    """What a hunt did: runs and CPU seconds until it found, or until it gave up."""

    outcome: Outcome
    cpu_s: float
    world: str = ""

    @property
    def found(self) -> bool:
        """Whether there was any finding."""
        return self.outcome.trace is not None


def hunt(
    one: Mutant, *, runs: int = RUNS_MAX, first_seed: int = 0, cpu_s_max: float = 60.0
) -> Hunt:
    """Walk the worlds in turn until something is found, or runs or seconds are used up."""
    made = {name: one.put_into(scenario) for name, scenario in WORLDS.items()}
    names = tuple(made)
    total = Outcome()
    start = time.process_time()
    for seed in range(first_seed, first_seed + runs):
        name = names[seed % len(names)]
        world, trace, steps = walk(made[name], seed, steps=STEPS_MAX, worlds=one.worlds)
        total.runs += 1
        total.steps += steps
        total.sometimes.update(world.sometimes)
        spent = time.process_time() - start
        if trace is not None:
            total.trace = trace
            return Hunt(total, spent, name)
        if spent > cpu_s_max:
            break
    return Hunt(total, time.process_time() - start)
