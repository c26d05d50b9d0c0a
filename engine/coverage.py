"""Search power: what a search has been in, and what it has not, with a reason for each.

Owns: the counts of (phase, event) pairs, of guards that refused and of dangerous situations; the
table of reasons for what no search reaches.
Must not know: how a log came to be.

A *legal* pair is reached when such an event was accepted in such a phase, an *illegal* one when it
was refused; a guard is reached when it refused something.
Walks reach what the cores do; changed logs reach what the cores would never do.
Changes are drawn towards what was not seen yet: where an event was never tried in a phase, one is
put there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import attrs

from engine.explorer import walk
from engine.log_changes import (
    Entries,
    Seen,
    changed,
    edited_base,
    edited_entries,
    places,
    put,
    renumbered,
)
from engine.trace import Worlds
from engine.world import World
from engine.world_values import FAULTS, Scenario
from lifecycle.crossguards import CROSS_GUARDS
from lifecycle.events import FLEET_EVENTS, REQUEST_EVENTS, Entry, Event
from lifecycle.guards import GUARDS, TABLE_PLACE
from lifecycle.history import History
from lifecycle.ids import FLEET
from lifecycle.phases import TABLE
from lifecycle.state import Phase

Pair = tuple[Phase, type[Event]]
SITUATIONS = (
    "landed-after-end",
    "landed-from-a-dead-writer",
    "step-outlived-its-request",
    "repeated-proposal-answered",
    "rejoined",
    "doubt-resolved",
    "isolation-detected",
    "waited-out",
)
"""Dangerous situations that a world counts, beside its faults and the events of its log."""

EDITED_BASES = 4
"""Logs a run in which an introduction or a grant is edited, as long as a guard is unseen."""

LEGAL: frozenset[Pair] = frozenset((phase, event) for phase in TABLE for event in TABLE[phase])
ILLEGAL: frozenset[Pair] = frozenset(
    (phase, event) for phase in TABLE for event in REQUEST_EVENTS if event not in TABLE[phase]
)
GUARD_NAMES: frozenset[str] = frozenset(
    {TABLE_PLACE, "unbroken-log/total"}
    | {guard.name for guard in GUARDS}
    | {guard.name for guard in CROSS_GUARDS}
)
SOMETIMES: frozenset[str] = frozenset(
    {*SITUATIONS, *FAULTS}
    | {event.__name__ for event in (*REQUEST_EVENTS, *FLEET_EVENTS)}
    | {f"lost-{event.__name__}" for event in REQUEST_EVENTS}
)

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "guard time-is-no-proof/scope": (
            "A proof by fence from an engine that joined without a scope is two faults in one log; "
            "a log by hand has them."
        ),
        "sometimes Draining": "An operator drains an engine; nobody in a world does.",
        "sometimes Recovered": "An operator recovers a grant; nobody in a world does.",
    }
)
"""What no search reaches, and why that says nothing against it."""


@attrs.define
class Coverage:
    """What was reached, and how often."""

    legal: Counter[Pair] = attrs.Factory(Counter)
    illegal: Counter[Pair] = attrs.Factory(Counter)
    guards: Counter[str] = attrs.Factory(Counter)
    sometimes: Counter[str] = attrs.Factory(Counter)
    samples: dict[type[Event], Entry] = attrs.Factory(dict)
    entries: int = 0

    def take(
        self,
        entries: Iterable[tuple[int, Entry]],
        *,
        renumber: bool = False,
        crossguards: bool = True,
    ) -> None:
        """Count what becomes of the entries of one log, one after the other.

        Without `crossguards` as an engine's copy takes them in.
        """
        history = History(crossguards=crossguards)
        for _, original in entries:
            entry = renumbered(history, original) if renumber else original
            self.entries += 1
            pair = (history.state(entry.request).phase, type(entry.event))
            violation = history.apply(entry)
            if violation is not None:
                self.guards[violation.guard] += 1
            if entry.request != FLEET:
                (self.legal if violation is None else self.illegal)[pair] += 1
                self.samples[type(entry.event)] = original

    def missing(self) -> tuple[str, ...]:
        """What was not reached, by name, in a fixed order."""
        pairs = [f"legal {name_pair(p)}" for p in LEGAL if not self.legal[p]]
        pairs += [f"illegal {name_pair(p)}" for p in ILLEGAL if not self.illegal[p]]
        guards = [f"guard {name}" for name in GUARD_NAMES if not self.guards[name]]
        others = [f"sometimes {name}" for name in SOMETIMES if not self.sometimes[name]]
        return (*sorted(pairs), *sorted(guards), *sorted(others))

    def unexplained(self) -> tuple[str, ...]:
        """What was not reached although nothing says why."""
        return tuple(name for name in self.missing() if name not in REASONS)

    def __str__(self) -> str:
        """The four figures in one line."""
        legal = sum(1 for pair in LEGAL if self.legal[pair])
        illegal = sum(1 for pair in ILLEGAL if self.illegal[pair])
        guards = sum(1 for name in GUARD_NAMES if self.guards[name])
        others = sum(1 for name in SOMETIMES if self.sometimes[name])
        return (
            f"legal pairs {legal} of {len(LEGAL)}, illegal pairs {illegal} of {len(ILLEGAL)}, "
            f"guards {guards} of {len(GUARD_NAMES)}, situations {others} of {len(SOMETIMES)}"
        )


def name_pair(pair: Pair) -> str:
    """A phase and an event in words."""
    phase, event = pair
    return f"{phase.value} {event.__name__}"


def aim(entries: Sequence[tuple[int, Entry]], coverage: Coverage) -> Entries | None:
    """The log with an event put where its kind was never tried; None when nothing is left here."""
    for place in places(entries):
        for kind, sample in coverage.samples.items():
            pair = (place.phase, kind)
            if not coverage.illegal[pair] and (pair in ILLEGAL or not coverage.legal[pair]):
                return put(entries, sample, place)
    return None


def edit_towards(entries: Sequence[tuple[int, Entry]], coverage: Coverage) -> None:
    """Try every edit of the entries that a guard looks at which has refused nothing yet."""
    unseen = [guard for guard in (*GUARDS, *CROSS_GUARDS) if not coverage.guards[guard.name]]
    wanted = {event for guard in unseen for event in guard.events}
    seen, history = Seen.of(entries), History()
    for _, entry in entries:
        if type(entry.event) in wanted:
            for _, edited in edited_entries(entry, seen):
                violation = history.check(renumbered(history, edited))
                if violation is not None:
                    coverage.guards[violation.guard] += 1
        history.apply(entry)


def measure(
    scenarios: Iterable[Scenario],
    *,
    runs: int,
    changes: int,
    first_seed: int = 0,
    coverage: Coverage | None = None,
    worlds: Worlds = World,
) -> Coverage:
    """Walk each scenario, and change each run's log a few times; counts what was reached.

    Raises AssertionError with the finding when a walk finds something: then that is the news.
    """
    coverage = Coverage() if coverage is None else coverage
    chance = random.Random(first_seed)
    for scenario in scenarios:
        for seed in range(first_seed, first_seed + runs):
            world, trace, _ = walk(scenario, seed, worlds=worlds)
            assert trace is None, str(trace)
            _observe(world, coverage, chance, changes)
    return coverage


def _observe(world: World, coverage: Coverage, chance: random.Random, changes: int) -> None:
    coverage.sometimes.update(world.sometimes)
    entries = world.stored
    coverage.take(entries)
    edit_towards(entries, coverage)
    for _ in range(EDITED_BASES if len(coverage.guards) < len(GUARD_NAMES) else 0):
        coverage.take(edited_base(entries, chance), renumber=True)
    for number in range(changes):
        aimed = aim(entries, coverage)
        other = changed(entries, chance) if aimed is None else aimed
        # Numbers are left as they are now and then, so that gaps are met as well.
        renumber = aimed is not None or number % 4 > 0
        coverage.take(other, renumber=renumber, crossguards=number % 8 != 0)
