"""The verbs that turn a log's forms into one another: `log import`, and `log schema` of a form.

Owns: which form is written where.
Must not know: the forms.
"""

from __future__ import annotations

from pathlib import Path

from transport.commands_forensics import opened
from transport.commands_log import log_app
from transport.commands_shared import (
    EXIT_OK,
    EXIT_UNREADABLE,
    Json,
    Switch,
    UsageError,
    say,
    say_json,
)

__all__ = ["import_log", "log_app", "schema"]


@log_app.command
def schema(*, json: Switch = False) -> int:  # noqa: ARG001 - accepted everywhere; a schema is JSON
    """Print the JSON Schema of a line of JSON Lines.

    Parameters
    ----------
    json
        Accepted everywhere; a schema is JSON in any case.
    """
    import json as json_module

    from transport.json_schema import line_schema

    for line in json_module.dumps(line_schema(), indent=1).splitlines():
        say(line)
    return EXIT_OK


@log_app.command(name="import")
def import_log(file: Path, /, *, output: Path, json: Json = False) -> int:
    """Write a log as segment files, with check sums and a chain of hashes made anew.

    Parameters
    ----------
    file
        JSON Lines of our own, whole; "-" reads standard input.
    output
        The folder for the segments, which must be absent or empty.
    json
        Print one JSON document.
    """
    from transport.convert import import_entries

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output}: is there already, and is no empty folder")
    with opened(file) as capture:
        if capture.foreign:
            raise UsageError(f"{file} is a foreign log; segments would pass it off as our own")
        count, head = import_entries(capture, output)
        if json:
            written = {
                "output": str(output),
                "entries": count,
                "head": head.hex(),
                "complete": capture.whole,
            }
            say_json(written)
        else:
            say(f"{count} entries written to {output}; the chain ends with {head.hex()}")
            for one in capture.unknown:
                say(f"left out: line {one.line}: {one.reason}")
        return EXIT_OK if capture.whole else EXIT_UNREADABLE
