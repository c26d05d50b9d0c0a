"""What a simulated run is to go through: sizes, clients and faults, all drawn from one seed.

Owns: the plan of a run as values, and the kinds of faults.
Must not know: how a fault is carried out.
"""

from __future__ import annotations

from random import Random

import attrs

from lifecycle.events import Cause
from transport.simulated_clients import Wish
from transport.simulated_control import MILLISECOND
from transport.simulated_engine import Sizes
from transport.simulated_scheduler import SECOND, Terms

ENGINE_FAULTS = ("break", "part", "hang", "kill", "slow", "step-fails")
SCHEDULER_FAULTS = ("crash", "machine-crash", "scheduler-hang")
DISK_FAULTS = ("disk-full", "disk-sick", "disk-slow")
WIRE_FAULTS = ("doubt", "fail", "corrupt", "lie", "slow-wire")
NET_FAULTS = ("repeat", "slow-net")
KINDS = (*ENGINE_FAULTS, *SCHEDULER_FAULTS, *DISK_FAULTS, *WIRE_FAULTS, *NET_FAULTS)
"""Every kind of fault, in a fixed order."""


JOINED_NS = 100 * MILLISECOND
"""When every engine has joined, unless a fault came first."""


@attrs.frozen
class Fault:
    """One fault: when it begins, what it is, whom it meets, and how long it lasts."""

    time_ns: int
    kind: str
    target: str
    length_ns: int


@attrs.frozen(kw_only=True)
class Plan:
    """A whole run before it begins."""

    seed: int
    placing: bool
    prefills: int
    decodes: int
    sizes: Sizes
    terms: Terms
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...]
    heals_ns: int
    pass_ns: int
    """The longest time of an engine's pass, copy or comparison, if it is not slow."""
    wire_ns: int
    """The longest time of a write's piece on its way, if the wire is not slow."""
    observed: float
    """The chance that the end of a process is observed before everything is healed."""

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong, so that every answer has to be whole."""
        return not self.faults and not any(wish.leaves_ns for wish in self.wishes)


def draw_plan(seed: int, *, faults: bool = True) -> Plan:
    """The plan of that seed; half of the kinds of faults are off in most runs."""
    chance = Random(seed)
    placing = chance.random() < 0.5
    page_tokens = chance.choice((2, 4))
    sizes = Sizes(
        prefill_pages=chance.choice((8, 16, 32)),
        decode_pages=chance.choice((10, 16, 32)),
        page_tokens=page_tokens,
        staging=chance.choice((2, 4, 8)),
        chunk_tokens=chance.choice((4, 8, 64)),
        growth_tokens=chance.choice((2, 4)),
        batch=chance.choice((2, 8)),
        slots=chance.choice((4, 16)),
        context_tokens=64,
    )
    terms = Terms(
        context_tokens=64,
        growth_tokens=sizes.growth_tokens,
        attempts_max=chance.choice((1, 2, 3)),
        digest_key=chance.randbytes(32),
        tenant_salt=chance.randbytes(32),
    )
    prefills, decodes = chance.choice(((1, 1), (1, 2), (2, 1), (2, 2)))
    heals_ns = chance.randrange(1, 6) * SECOND
    quiet = not faults or chance.random() < 0.1
    planned = () if quiet else _faults(chance, heals_ns, prefills, decodes)
    leaving = 0.0 if quiet else chance.choice((0.0, 0.1, 0.4))
    moments = [fault.time_ns for fault in planned]
    wishes = _wishes(chance, sizes, heals_ns, moments, leaving=leaving, patient=quiet)
    return Plan(
        seed=seed,
        placing=placing,
        prefills=prefills,
        decodes=decodes,
        sizes=sizes,
        terms=attrs.evolve(terms, queue_ns=60 * SECOND) if quiet else terms,
        wishes=wishes,
        faults=planned,
        heals_ns=heals_ns,
        pass_ns=chance.choice((2, 20, 60)) * MILLISECOND,
        wire_ns=chance.choice((200_000, 5 * MILLISECOND, 50 * MILLISECOND)),
        observed=chance.choice((0.0, 0.5, 1.0)),
    )


def _faults(chance: Random, heals_ns: int, prefills: int, decodes: int) -> tuple[Fault, ...]:
    kinds = [kind for kind in KINDS if chance.random() < 0.5] or list(KINDS)
    names = [f"p{number}" for number in range(prefills)]
    names += [f"d{number}" for number in range(decodes)]
    lengths = (20 * MILLISECOND, 300 * MILLISECOND, 1_500 * MILLISECOND, 3 * SECOND)
    drawn = [
        Fault(
            time_ns=chance.randrange(heals_ns),
            kind=chance.choice(kinds),
            target=chance.choice(names),
            length_ns=chance.randrange(1, chance.choice(lengths)),
        )
        for _ in range(chance.choice((1, 2, 4, 8, 16)))
    ]
    return tuple(sorted(drawn, key=lambda fault: fault.time_ns))


def _wishes(
    chance: Random,
    sizes: Sizes,
    heals_ns: int,
    moments: list[int],
    *,
    leaving: float,
    patient: bool,
) -> tuple[Wish, ...]:
    """Half of the clients come just before a fault, so that it meets somebody."""
    room = min(sizes.prefill_pages, sizes.decode_pages) * sizes.page_tokens
    wishes: list[Wish] = []
    for number in range(chance.choice((5, 15, 40))):
        comes = chance.randrange(heals_ns)
        if moments and chance.random() < 0.5:
            comes = chance.choice(moments) - chance.randrange(200 * MILLISECOND)
        comes = max(JOINED_NS, comes)
        large = chance.random() < 0.05
        most = sizes.context_tokens + 8 if large and not patient else min(room // 2, 24)
        wish = Wish(
            number=number,
            comes_ns=comes,
            prompt_tokens=chance.randrange(1, max(2, most)),
            new_tokens=chance.randrange(1, max(2, min(room // 3, 16))),
            deadline_ns=(60 if patient else chance.choice((1, 3, 10))) * SECOND,
            key=f"key-{number}" if chance.random() < 0.2 else "",
            cause=chance.choice((Cause.CLIENT_CANCEL, Cause.CLIENT_GONE)),
        )
        if chance.random() < leaving:
            wish = attrs.evolve(wish, leaves_ns=comes + chance.randrange(1, 400 * MILLISECOND))
        wishes.append(wish)
        if wish.key and chance.random() < 0.5:
            again = wish.comes_ns + chance.randrange(1, SECOND)
            wishes.append(attrs.evolve(wish, comes_ns=again, leaves_ns=0))
    return tuple(wishes)
