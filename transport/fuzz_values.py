"""What a search is told and what it reports: plain values that travel between processes.

Owns: the settings, findings and reports of `custody fuzz`, and loading code by its name.
Must not know: how anything is searched or printed.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from engine.trace import TraceFile
from engine.world import World
from engine.world_values import Scenario
from transport.commands_shared import UsageError

if TYPE_CHECKING:
    from engine.trace import Worlds

REGISTRY = "property_tests.mutants"
PROFILES = {"quick": 10.0, "ci": 60.0, "nightly": 3_600.0}
"""Seconds of each profile."""


class NoCheckout(UsageError):
    """Mutants are no part of the product; they stand beside the tests."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs the mutants, which live in property_tests/ of a checkout and are not "
            "installed: run this in the root of a checkout of the repository"
        )


class UnknownMutant(UsageError):
    """No mutant has this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no mutant is called {name!r}; there are {', '.join(known)}")
        self.name = name


class BadAdapter(UsageError):
    """The name of an adapter leads to nothing that can be called."""


@attrs.frozen
class Settings:
    """One search: where it starts, when it ends, how many processes share it."""

    seed: int
    seconds: float | None = None
    runs: int | None = None
    jobs: int = 1
    adapter: str = ""


@attrs.frozen
class Finding:
    """What was found: a sentence, the reduced trace, the whole one, and the log at that moment.

    `where` is the scenario's name; `pages` says who held which page.
    """

    where: str
    seed: int
    name: str
    message: str
    rule: str
    pages: str
    small: TraceFile
    whole: TraceFile
    minimise_s: float = 0.0
    optimum: int | None = None
    """The fewest actions that could show it, where that was asked for and is known."""


@attrs.define
class Report:
    """What a search did and saw."""

    settings: Settings
    runs: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    sometimes: Counter[str] = attrs.Factory(Counter)
    finding: Finding | None = None
    kept: list[tuple[TraceFile, frozenset[str]]] = attrs.Factory(list)

    @property
    def steps_per_s(self) -> float:
        """Steps of a CPU second, over all processes."""
        return self.steps / self.cpu_s if self.cpu_s else 0.0


def registry(what: str) -> Any:
    """The module of the mutants. Raises NoCheckout."""
    here = str(Path.cwd())
    if Path("property_tests/mutants.py").is_file() and here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(REGISTRY)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "property_tests":
            raise NoCheckout(what) from error
        raise


def mutant(name: str, what: str) -> Any:
    """One mutant by its name. Raises NoCheckout, UnknownMutant."""
    by_name = registry(what).BY_NAME
    if name not in by_name:
        raise UnknownMutant(name, tuple(by_name))
    return by_name[name]


def adapter_worlds(name: str) -> Worlds:
    """Worlds of somebody else's engine, named as `module:factory`. Raises BadAdapter."""
    from engine.foreign import ForeignWorld

    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadAdapter(f"--adapter {name}: {error}; it is written as module:factory") from error
    return lambda _scenario: ForeignWorld(factory())


def code_of(file: TraceFile) -> tuple[Scenario, Worlds]:
    """The scenario with the code that the trace was made with, and its worlds.

    Raises NoCheckout, UnknownMutant, BadAdapter.
    """
    if file.adapter:
        return file.scenario, adapter_worlds(file.adapter)
    if not file.mutant:
        return file.scenario, World
    one = mutant(file.mutant, f"this trace was made with the mutant {file.mutant}, and so")
    return one.put_into(file.scenario), one.worlds
