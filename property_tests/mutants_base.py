"""What a mutant is, and how all of them are hunted in one set of worlds with one set of settings.

Owns: how a mutant's code gets into one, the hunt.
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
from engine.scenarios import CROWDED, WORLDS, focus
from engine.scheduler import Scheduler
from engine.world import World
from engine.world_values import Found, Scenario
from lifecycle.history import History

__all__ = ["CROWDED", "WORLDS", "Hunt", "Mutant", "blinded", "focus", "hunt", "mutant"]

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
    one: Mutant,
    *,
    runs: int = RUNS_MAX,
    first_seed: int = 0,
    cpu_s_max: float = 60.0,
    scenarios: Mapping[str, Scenario] = WORLDS,
) -> Hunt:
    """Walk the worlds in turn until something is found, or runs or seconds are used up."""
    made = {name: one.put_into(scenario) for name, scenario in scenarios.items()}
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
