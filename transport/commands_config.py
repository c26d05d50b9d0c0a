"""The verb `config show`: each setting of a verb, its value, and where the value comes from.

Owns: how an origin is named.
Must not know: what a setting means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
from cyclopts import App, Parameter
from cyclopts.argument import Argument, ArgumentCollection

from transport import commands_run
from transport.commands_shared import DASH, EXIT_OK, Json, say, say_json
from transport.config_sources import sources
from transport.settings import flag_name

config_app = App(name="config", help="Look at settings.")

Verb = Literal["serve", "scheduler", "prefill", "decode"]
_VERBS: Mapping[str, Callable[..., int]] = {
    "serve": commands_run.serve,
    "scheduler": commands_run.scheduler,
    "prefill": commands_run.prefill,
    "decode": commands_run.decode,
}


@attrs.frozen(kw_only=True)
class Setting:
    """One setting as a verb would use it."""

    name: str
    value: Any
    origin: str
    """flag, environment, file or default."""
    source: str
    """The flag, the variable's name, or file and key."""


@config_app.command
def show(
    verb: Verb = "serve",
    /,
    *flags: Annotated[str, Parameter(allow_leading_hyphen=True)],
    json: Json = False,
) -> int:
    """Print each setting that a verb would use, and where its value comes from.

    Parameters
    ----------
    verb
        The verb whose settings are shown.
    flags
        Flags as the verb would be given, to see their effect.
    json
        Print one JSON document.
    """
    found = settings_of(verb, *("-" if flag == DASH else flag for flag in flags))
    if json:
        say_json({"verb": verb, "settings": [attrs.asdict(one) for one in found]})
        return EXIT_OK
    width = max(len(one.name) for one in found)
    for one in found:
        source = f" {one.source}" if one.source else ""
        value = "not set" if one.value is None else one.value
        say(f"{one.name:{width}} = {value}  ({one.origin}{source})")
    return EXIT_OK


def settings_of(verb: str, *flags: str) -> tuple[Setting, ...]:
    """What the verb would be called with. Raises CycloptsError, InvalidSetting, UsageError."""
    seen: list[Argument] = []

    def record(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        seen.extend(argument for argument in arguments if argument.show)

    app = App(
        name="custody",
        default_parameter=Parameter(name_transform=flag_name),
        config=(*sources(), record),
    )
    app.command(_VERBS[verb])
    _, bound, _ = app.parse_args([verb, *flags], exit_on_error=False, print_error=False)
    used = {argument.name: argument for argument in seen}
    return tuple(
        _setting(argument, bound.arguments)
        for name, argument in used.items()
        if name.startswith("--") and name != "--json"
    )


def _setting(argument: Argument, bound: Mapping[str, Any]) -> Setting:
    name = argument.name.removeprefix("--")
    value = _value(argument, bound)
    if not argument.tokens:
        return Setting(name=name, value=value, origin="default", source="")
    token = argument.tokens[0]
    match token.source:
        case "cli":
            origin, source = "flag", token.keyword or ""
        case "env":
            origin, source = "environment", token.keyword or ""
        case file:
            origin, source = "file", f"{file}: {token.keyword}"
    return Setting(name=name, value=value, origin=origin, source=source)


def _value(argument: Argument, bound: Mapping[str, Any]) -> Any:
    """The value as a verb gets it, checked and converted."""
    if not argument.keys:
        found = bound.get(argument.field_info.name, argument.field_info.default)
    else:
        (field,) = argument.keys
        holders = [value for value in bound.values() if hasattr(value, field)]
        found = getattr(holders[0], field) if holders else argument.field_info.default
    return str(found) if isinstance(found, Path) else found
