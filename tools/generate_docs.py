"""Write what documents repeat from the code: the state diagram, the table, the rules.

Generated text stands between marker comments; the prose around it is written by people.
With `--check` nothing is written, and a stale document is an error that says what to do.

Owns: how table and rules look as Markdown.
Must not know: what a phase or a rule means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lifecycle.crossguards import CROSS_GUARDS
from lifecycle.events import REQUEST_EVENTS
from lifecycle.guards import GUARDS, TABLE_PLACE
from lifecycle.phases import TABLE
from lifecycle.rules import RULES
from lifecycle.state import Phase

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "lifecycle.md"
COMMAND = "make docs"
# Guards that are no entry of a list: the table, and what is asked over a whole log.
ELSEWHERE = (TABLE_PLACE, "bounded/closed", "unbroken-log/total")
TERMINAL = (Phase.REJECTED, Phase.CLOSED)


class MarkerError(Exception):
    """A document lacks the comments between which generated text stands."""

    def __init__(self, *, name: str) -> None:
        super().__init__(f"the document has no `{begin(name)}` before a `{end(name)}`")
        self.name = name


def begin(name: str) -> str:
    """The comment before a generated part."""
    return f"<!-- generated: {name} -->"


def end(name: str) -> str:
    """The comment behind a generated part."""
    return f"<!-- end: {name} -->"


def diagram() -> str:
    """The phases and what leads from one to another, as a Mermaid state diagram."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for phase, row in TABLE.items():
        for kind, phases in row.items():
            for after in phases:
                if after is not phase:
                    arrows.setdefault((phase, after), []).append(kind.__name__)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.NEW.name}"]
    for (phase, after), kinds in arrows.items():
        lines.append(f"    {phase.name} --> {after.name}: {', '.join(kinds)}")
    lines += [f"    {phase.name} --> [*]" for phase in TERMINAL]
    return "\n".join([*lines, "```"])


def table() -> str:
    """Phase by event: the phases that may follow; an empty cell is an illegal pair."""
    head = ["phase", *(f"`{kind.__name__}`" for kind in REQUEST_EVENTS)]
    lines = [_row(head), _row(["---"] * len(head))]
    for phase, row in TABLE.items():
        cells = [" or ".join(p.name for p in row.get(kind, ())) for kind in REQUEST_EVENTS]
        lines.append(_row([f"**{phase.name}**", *cells]))
    return "\n".join(lines)


def rules() -> str:
    """Every rule: its sentence, its guards, and the reports that it would have stopped."""
    names = [*(g.name for g in GUARDS), *(g.name for g in CROSS_GUARDS), *ELSEWHERE]
    lines = [_row(["rule", "sentence", "guards", "public reports"]), _row(["---"] * 4)]
    for rule in RULES.values():
        guards = [name.split("/", 1)[1] for name in names if name.split("/", 1)[0] == rule.name]
        shown = ", ".join(f"`{guard}`" for guard in guards)
        lines.append(_row([f"`{rule.name}`", rule.sentence, shown, ", ".join(rule.reports)]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


PARTS: Mapping[str, Callable[[], str]] = {"diagram": diagram, "table": table, "rules": rules}


def filled(text: str) -> str:
    """The document with every generated part made anew. Raises MarkerError."""
    for name, make in PARTS.items():
        before, opened, rest = text.partition(begin(name))
        _, closed, after = rest.partition(end(name))
        if not (opened and closed):
            raise MarkerError(name=name)
        text = f"{before}{opened}\n{make()}\n{closed}{after}"
    return text


def main(arguments: list[str]) -> int:
    """Write the document, or with `--check` say whether it is up to date."""
    text = DOCUMENT.read_text()
    name = DOCUMENT.relative_to(ROOT)
    try:
        fresh = filled(text)
    except MarkerError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    if fresh == text:
        print(f"{name} is up to date.")
        return 0
    if "--check" in arguments:
        message = f"{name} does not say what the code says. Regenerate it: {COMMAND}"
        print(message, file=sys.stderr)
        return 1
    DOCUMENT.write_text(fresh)
    print(f"Wrote {name}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
