"""Traces: what a search found, and the one file format in which it is kept.

Owns: the format (TOML, version 1), recording a trace by names, and replaying one.
Must not know: who searched, and where files lie.

A file holds the scenario, the actions by name, and what is expected of them. It is read again by
everything that replays: the walk, the exhaustion, the minimiser, `custody replay`, the tests.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from engine.trace_names import describe, find_action, label, name_action
from engine.world import World
from engine.world_values import Action, Asked, Found, Scenario
from lifecycle.ids import Party

FORMAT = "custody.trace"
VERSION = 1
MAGIC = f'format = "{FORMAT}"'
SUFFIX = ".trace.toml"
EAGER_STEPS_MAX = 300
CODE_FIELDS = ("scheduler", "prefill", "decode")
"""Fields of a scenario that hold code; a mutant's name stands for them in a file."""

Worlds = Callable[[Scenario], Any]


class TraceError(Exception):
    """This is no trace that can be read; `place` says where the fault is."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


@attrs.frozen
class Trace:
    """One run that found something: its seed, the scenario, the actions, and the finding."""

    seed: int
    scenario: Scenario
    actions: tuple[Action, ...]
    calm: bool
    found: Found
    rule: str = ""
    worlds: Worlds = World
    eager: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """The seed, the finding, and one action a line."""
        lines = [f"seed {self.seed}: {self.found} (rule {self.rule or 'none in the log'})"]
        lines += [f"  {name} {' '.join(str(w) for w in whom)}" for name, *whom in self.actions]
        return "\n".join(lines)


@attrs.frozen
class TraceFile:
    """A trace as it is kept.

    `finding` and `rule` are what is expected; both are empty where nothing may be found.
    `mutant` names the changed code with which it was made; empty is the product's own.
    `adapter` names the code (`module:factory`) that drives somebody else's engine.
    `eager` names kinds of actions that happen by themselves, as soon as they can, after each;
    `down p1` is those of one rank.
    """

    scenario: Scenario
    actions: tuple[str, ...]
    calm: bool = False
    finding: str = ""
    rule: str = ""
    mutant: str = ""
    seed: int = 0
    title: str = ""
    eager: frozenset[str] = frozenset()
    adapter: str = ""


@attrs.frozen
class Row:
    """One action of a replay: its name, what it says, and what the log gained by it."""

    name: str
    sentence: str
    logged: tuple[str, ...] = ()


@attrs.frozen
class Replayed:
    """What a replay did: each action that could happen, those that could not, and the finding."""

    rows: tuple[Row, ...]
    skipped: tuple[str, ...]
    found: Found | None
    rule: str
    world: Any


# --- replaying --------------------------------------------------------------------------------


def is_eager(action: Action, eager: frozenset[str]) -> bool:
    """Whether the action happens by itself: its kind does (`down`), or this actor's (`down p1`)."""
    kind, *whom = action
    if kind in eager:
        return True
    return bool(whom) and isinstance(whom[0], Party) and f"{kind} {label(whom[0])}" in eager


def advance(world: Any, action: Action, eager: frozenset[str]) -> int:
    """One step, then what happens by itself; returns how many. Raises Found.

    It is bounded, because broken code may keep itself busy for ever.
    """
    world.step(action)
    for count in range(1, EAGER_STEPS_MAX):
        due = next((a for a in world.enabled() if is_eager(a, eager)), None) if eager else None
        if due is None:
            return count
        world.step(due)
    return EAGER_STEPS_MAX


def replay_names(
    scenario: Scenario,
    names: Iterable[str],
    *,
    calm: bool,
    eager: frozenset[str] = frozenset(),
    worlds: Worlds = World,
) -> Replayed:
    """Do what the names say, as far as each can happen, through the same `step` as any search."""
    world = worlds(scenario)
    rows: list[Row] = []
    skipped: list[str] = []
    found: Found | None = None
    before = _logged(world)
    try:
        for name in names:
            action = find_action(world, name)
            if action is None:
                skipped.append(name)
                continue
            row = Row(name, describe(world, action)[0])
            rows.append(row)
            advance(world, action, eager)
            after = _logged(world)
            # A crash may shorten the log: then nothing was gained.
            rows[-1] = attrs.evolve(row, logged=tuple(after[len(before) :]))
            before = after
        if calm:
            world.calm()
    except Found as error:
        found = error
    rule = "" if found is None else found.rule or world.broken_rule()
    return Replayed(tuple(rows), tuple(skipped), found, rule, world)


def _logged(world: Any) -> list[str]:
    if not isinstance(world, World):
        return []
    numbers = {request: f"r{n}" for n, request in enumerate(world.clients, start=1)}
    return [
        f"{type(entry.event).__name__} {numbers.get(entry.request, '')}".strip()
        for _, entry in world.stored
    ]


def name_actions(
    scenario: Scenario,
    actions: Iterable[Action],
    *,
    eager: frozenset[str] = frozenset(),
    worlds: Worlds = World,
) -> tuple[str, ...]:
    """The names of actions that lead to a finding, or to nothing, in that order."""
    world = worlds(scenario)
    names: list[str] = []
    try:
        for action in actions:
            names.append(name_action(world, action))
            advance(world, action, eager)
    except Found:
        pass
    return tuple(names)


def record(trace: Trace, *, mutant: str = "", adapter: str = "", title: str = "") -> TraceFile:
    """The trace as a file; `mutant` names the code in its scenario, if it is not the product's."""
    return TraceFile(
        scenario=trace.scenario,
        actions=name_actions(trace.scenario, trace.actions, eager=trace.eager, worlds=trace.worlds),
        eager=trace.eager,
        calm=trace.calm,
        finding=trace.found.name,
        rule=trace.rule,
        mutant=mutant,
        adapter=adapter,
        seed=trace.seed,
        title=title or trace.found.message,
    )


# --- writing ----------------------------------------------------------------------------------


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            # A JSON string is a TOML string, but for this one character.
            return json.dumps(value).replace("\x7f", "\\u007f")
        case Asked():
            fields = attrs.asdict(value).items()
            return "{ " + ", ".join(f"{name} = {_value(v)}" for name, v in fields) + " }"
        case frozenset():
            return "[" + ", ".join(_value(v) for v in sorted(value)) + "]"
        case tuple():
            return "[" + ", ".join(_value(v) for v in value) + "]"
        case _:
            raise TypeError(f"a trace file cannot hold {value!r}")


def dumps(file: TraceFile) -> str:
    """The file's text; the same trace is the same text. What a scenario leaves as usual is not
    written, so that a file outlives the settings that are added after it.
    """
    usual = Scenario()
    scenario = {
        field.name: getattr(file.scenario, field.name)
        for field in attrs.fields(Scenario)
        if field.name not in CODE_FIELDS
    }
    faults = scenario.pop("faults")
    scenario = {k: v for k, v in scenario.items() if k == "asked" or v != getattr(usual, k)}
    lines = [MAGIC, f"version = {VERSION}", f"title = {_value(file.title)}"]
    lines += [f"seed = {file.seed}", f"mutant = {_value(file.mutant)}"]
    lines += [f"adapter = {_value(file.adapter)}", ""]
    lines += ["[expected]", f"finding = {_value(file.finding)}", f"rule = {_value(file.rule)}", ""]
    lines += ["[scenario]", *(f"{name} = {_value(value)}" for name, value in scenario.items())]
    lines += ["", "[scenario.faults]", *(f"{_value(k)} = {v}" for k, v in faults.items() if v)]
    lines += ["", "[trace]", f"calm = {_value(file.calm)}"]
    lines += [f"eager = {_value(file.eager)}", "actions = ["]
    lines += [f"    {_value(name)}," for name in file.actions]
    return "\n".join([*lines, "]", ""])


# --- reading ----------------------------------------------------------------------------------


def loads(text: str) -> TraceFile:
    """Read a file's text. Raises TraceError."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TraceError("file", f"is no TOML: {error}") from error
    if data.get("format") != FORMAT:
        raise TraceError("format", f"must be {FORMAT!r}, not {data.get('format')!r}")
    if data.get("version") != VERSION:
        raise TraceError("version", f"must be {VERSION}, not {data.get('version')!r}")
    known = {"format", "version", "title", "seed", "mutant", "adapter"}
    known |= {"expected", "scenario", "trace"}
    _refuse_unknown("file", data, known)
    expected, trace = _table(data, "expected"), _table(data, "trace")
    _refuse_unknown("expected", expected, {"finding", "rule"})
    _refuse_unknown("trace", trace, {"calm", "eager", "actions"})
    return TraceFile(
        scenario=_scenario(_table(data, "scenario")),
        actions=tuple(_strings(trace, "trace", "actions")),
        eager=frozenset(_strings(trace, "trace", "eager")),
        calm=_get(trace, "trace", "calm", bool, False),
        finding=_get(expected, "expected", "finding", str, ""),
        rule=_get(expected, "expected", "rule", str, ""),
        mutant=_get(data, "file", "mutant", str, ""),
        adapter=_get(data, "file", "adapter", str, ""),
        seed=_get(data, "file", "seed", int, 0),
        title=_get(data, "file", "title", str, ""),
    )


def _get(table: Mapping[str, Any], place: str, name: str, kind: type, default: Any) -> Any:
    value = table.get(name, default)
    if type(value) is not kind:
        raise TraceError(f"{place}.{name}", f"must be {kind.__name__}, not {value!r}")
    return value


def _strings(table: Mapping[str, Any], place: str, name: str) -> list[str]:
    values: list[str] = _get(table, place, name, list, [])
    if not all(isinstance(value, str) for value in values):
        raise TraceError(f"{place}.{name}", "must hold strings")
    return values


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value: dict[str, Any] = _get(data, "file", name, dict, {})
    return value


def _refuse_unknown(place: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    strange = sorted(set(table) - set(known))
    if strange:
        raise TraceError(place, f"does not know {', '.join(strange)}")


def _numbers(place: str, table: Mapping[str, Any]) -> dict[str, int]:
    for name, value in table.items():
        if type(value) is not int or value < 0:
            raise TraceError(f"{place}.{name}", f"must be a whole number >= 0, not {value!r}")
    return dict(table)


def _scenario(table: dict[str, Any]) -> Scenario:
    fields = {f.name: f for f in attrs.fields(Scenario) if f.name not in CODE_FIELDS}
    _refuse_unknown("scenario", table, fields)
    given: dict[str, Any] = {}
    for name in table:
        place = f"scenario.{name}"
        default = getattr(Scenario(), name)
        if name == "asked":
            given[name] = tuple(_asked(one) for one in _get(table, "scenario", name, list, []))
        elif isinstance(default, Mapping):
            given[name] = _numbers(place, _get(table, "scenario", name, dict, {}))
        elif isinstance(default, frozenset):
            given[name] = frozenset(_strings(table, "scenario", name))
        else:
            given[name] = _get(table, "scenario", name, type(default), default)
    return Scenario(**given)


def _asked(value: object) -> Asked:
    if not isinstance(value, dict):
        raise TraceError("scenario.asked", f"must hold tables, not {value!r}")
    _refuse_unknown("scenario.asked", value, {f.name for f in attrs.fields(Asked)})
    numbers = _numbers("scenario.asked", value)
    if not {"prompt_tokens", "new_tokens"} <= set(numbers):
        raise TraceError("scenario.asked", f"needs prompt_tokens and new_tokens, has {value!r}")
    return Asked(**numbers)
