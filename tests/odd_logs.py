"""Logs of many kinds out of a seed: legal ones, and ones that nobody should have written.

They come from the cores, from walks through small worlds, from the published incident, and from
those after entries were taken out, repeated, swapped, or said something else.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from engine.explorer import walk
from engine.scenarios import SCENARIOS
from engine.store import Stored
from examples.incident.simulation import Setup, simulate
from lifecycle.events import (
    Admitted,
    Attached,
    Drained,
    Entry,
    Event,
    Finished,
    QuarantineCause,
    Quarantined,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import FLEET, GrantId, PageRange, RequestId, TokenRange
from tests.driver import Driver, Sizes
from tests.test_replay import MUTATED
from tests.test_retention import eventful
from transport.jsonlines import write_jsonlines

Entries = list[tuple[int, Entry]]


# --- Where they come from ---------------------------------------------------------------------


def _driven(draw: random.Random) -> Entries:
    driver = Driver(Sizes(pages=draw.choice([8, 12, 30]))).pair()
    for _ in range(draw.randrange(1, 8)):
        driver.submit(draw.randrange(1, 12), draw.randrange(1, 12))
        if draw.random() < 0.3:
            driver.run()
    driver.run()
    return list(driver.log)


def _walked(draw: random.Random) -> Entries:
    scenario = draw.choice(list(SCENARIOS.values()))
    world, _, _ = walk(scenario, draw.randrange(10**6), steps=draw.randrange(50, 400))
    return list(world.stored)


def _of_several(draw: random.Random) -> Entries:
    """Three walks one after another on the same pages."""
    scenario = draw.choice(list(SCENARIOS.values()))
    entries: list[Entry] = []
    for number in range(3):
        world, _, _ = walk(scenario, draw.randrange(10**6), steps=300)
        for _, entry in world.stored:
            if entry.request != FLEET:
                name = RequestId(f"{number}{entry.request[1:]}")
                entries.append(attrs.evolve(entry, request=name))
            elif number == 0:
                entries.append(entry)
    return list(enumerate(entries, start=1))


def _incident(draw: random.Random) -> Entries:
    setup = Setup(
        seed=draw.randrange(10**6),
        affected=draw.randrange(4),
        sound=draw.randrange(5, 30),
        refused=draw.randrange(3),
        cancelled=draw.choice([0, draw.randrange(6)]),
        days=draw.uniform(0.001, 0.01),
    )
    return list(simulate(setup).log.entries)


SOURCES: tuple[Callable[[random.Random], Entries], ...] = (
    _driven,
    _walked,
    _of_several,
    _incident,
    lambda draw: list(MUTATED[draw.choice(list(MUTATED))]()),
    lambda _: list(eventful().log),
)


# --- What is done to them ---------------------------------------------------------------------


def _said_otherwise(draw: random.Random, event: Event) -> Event:
    changes: list[dict[str, Any]]
    match event:
        case Transferred(grant=grant, tokens=tokens, pages=pages):
            first = pages[0]
            changes = [
                {"tokens": TokenRange(tokens.start, max(tokens.start, tokens.stop - 1))},
                {"tokens": TokenRange(tokens.start, tokens.stop + draw.randrange(5))},
                {"pages": (PageRange(first.first + 1, first.count), *pages[1:])},
                {"grant": GrantId(grant.owner, grant.serial + draw.choice([1, 50]))},
            ]
        case Reserved(tokens=tokens, pages=pages):
            first = pages[0]
            singles = tuple(PageRange(p, 1) for run in pages for p in range(run.first, run.stop))
            changes = [
                {"tokens": TokenRange(tokens.start, tokens.stop + draw.randrange(9))},
                {"pages": (PageRange(first.first + 1, first.count), *pages[1:])},
                {"pages": (*pages, first)},
                {"pages": singles},
            ]
        case Verified():
            changes = [{"headers_checked": 0}]
        case Finished(tokens=count):
            changes = [{"reads_unchecked": 1}, {"tokens": count + draw.randrange(9)}]
        case Admitted(prompt_tokens=count):
            changes = [{"prompt_tokens": count + draw.choice([1, 5])}]
        case Requeued(tokens_relayed=count):
            changes = [{"tokens_relayed": count + 1}]
        case Drained(grant=grant):
            return Released(grant)
        case Released(grant=grant):
            return Quarantined(grant, QuarantineCause.NO_PROOF)
        case _:
            return event
    return attrs.evolve(event, **draw.choice(changes))


def _renumbered(entries: Entries) -> Entries:
    """As if it had been logged like this: no numbers are missing."""
    seen: Counter[str] = Counter()
    found: Entries = []
    for position, (_, entry) in enumerate(entries, start=1):
        found.append((position, attrs.evolve(entry, sequence=seen[entry.request])))
        seen[entry.request] += 1
    return found


def _holes(draw: random.Random, entries: Entries) -> Entries:
    start = draw.randrange(len(entries))
    length = draw.choice([1, draw.randrange(1, 20)])
    return entries[:start] + entries[start + length :]


def _moved(draw: random.Random, entries: Entries) -> Entries:
    left = list(entries)
    one = left.pop(draw.randrange(len(left)))
    left.insert(draw.randrange(len(left) + 1), one)
    return left if draw.random() < 0.4 else _renumbered(left)


def _repeated(draw: random.Random, entries: Entries) -> Entries:
    more = list(entries)
    more.insert(draw.randrange(len(more)), draw.choice(entries))
    return more if draw.random() < 0.5 else _renumbered(more)


def _without(draw: random.Random, entries: Entries) -> Entries:
    """Some or all events of a kind were never logged."""
    kinds = [Drained, Released, Transferred, Verified, Reserved, Attached, Admitted]
    kind, share = draw.choice(kinds), draw.choice([0.2, 1])
    return _renumbered(
        [one for one in entries if not isinstance(one[1].event, kind) or draw.random() >= share]
    )


def _changed(draw: random.Random, entries: Entries) -> Entries:
    changed = list(entries)
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(changed))
        position, entry = changed[at]
        event = _said_otherwise(draw, entry.event)
        changed[at] = position, attrs.evolve(entry, event=event)
    return changed


def _uncompared(draw: random.Random, entries: Entries) -> Entries:
    return [
        (n, attrs.evolve(e, event=attrs.evolve(e.event, headers_checked=0)))
        if isinstance(e.event, Verified) and draw.random() < 0.8
        else (n, e)
        for n, e in entries
    ]


CHANGES = (_holes, _moved, _repeated, _without, _changed, _changed, _uncompared)


def odd_log(seed: int, path: Path) -> Path:
    """One log as JSON Lines, ours or foreign, perhaps with a line that nobody understands."""
    draw = random.Random(seed)
    entries = draw.choice(SOURCES)(draw)
    for _ in range(draw.choice([0, 1, 1, 2])):
        entries = draw.choice(CHANGES)(draw, entries) if entries else entries
    foreign = draw.random() < 0.4
    about: dict[str, Any] = {"source": "other", "foreign": True} if foreign else {}
    with path.open("w", encoding="utf-8") as stream:
        stored = [Stored(position, entry) for position, entry in entries]
        write_jsonlines(stream, stored, complete=draw.random() < 0.8, **about)
    lines = path.read_text().splitlines(keepends=True)
    if len(lines) > 1 and draw.random() < 0.2:
        at = draw.randrange(1, len(lines))
        lines[at] = lines[at].replace('"event":"', '"event":"Later')
        path.write_text("".join(lines))
    return path
