"""The registry of mutants: the product's cores with one guard removed or one proof forged.

Owns: the list, and finding a mutant by its name.
Must not know: how one is made or hunted; families, stories and the hunt stand beside it.

Each is the real decision code with a method replaced; the product has no hooks for this.
"""

from __future__ import annotations

from collections.abc import Mapping

from property_tests.mutants_base import CROWDED, WORLDS, Hunt, Mutant, focus, hunt
from property_tests.mutants_design import CANARY, DESIGN, HARMLESS
from property_tests.mutants_historical import HISTORICAL

__all__ = [
    "BY_NAME",
    "CANARY",
    "CROWDED",
    "HARMLESS",
    "MUTANTS",
    "WORLDS",
    "Hunt",
    "Mutant",
    "focus",
    "hunt",
]

MUTANTS: tuple[Mutant, ...] = (*HISTORICAL, *DESIGN)
"""Everything that must be found; `HARMLESS` and `CANARY` test the search itself."""

BY_NAME: Mapping[str, Mutant] = {one.name: one for one in (*MUTANTS, HARMLESS, CANARY)}
