"""Write `docs/bugs`: one page a mutant, from the registry and the kept traces.

Owns: how a page looks, and hunting the trace that it shows.
Must not know: what a mutant does.

    python -m property_tests.bug_pages            write the pages from the registry and the traces
    python -m property_tests.bug_pages --check    say whether they are up to date; nothing is hunted
    python -m property_tests.bug_pages --hunt     first find a trace for each mutant that has none
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import attrs

from engine.minimiser import minimise
from engine.trace import CODE_FIELDS, SUFFIX, Row, Trace, TraceFile, dumps, loads, record
from engine.world_values import Scenario
from lifecycle.rules import RULES
from property_tests.mutants import MUTANTS, Mutant, hunt
from transport.fuzz_replay import replay_file

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "bugs"
TRACES = ROOT / "tests" / "traces"
COMMAND = "python -m property_tests.bug_pages"
HUNTS = 6
"""From how many seeds a trace is hunted; the shortest is kept."""
PROJECTS = {"sglang": "sgl-project/sglang", "vllm": "vllm-project/vllm"}
SETTINGS = {field.name: getattr(Scenario(), field.name) for field in attrs.fields(Scenario)}


def link(report: str) -> str:
    """A public report as a link, where it is the number of an issue or a change."""
    project, _, number = report.partition(" #")
    if project in PROJECTS and number.isdecimal():
        return f"[{report}](https://github.com/{PROJECTS[project]}/issues/{number})"
    return report


def trace_path(mutant: Mutant) -> Path:
    """Where that mutant's trace is kept."""
    return TRACES / f"{mutant.name}{SUFFIX}"


def shortest(mutant: Mutant) -> Trace | None:
    """The shortest reduced trace of a few hunts, of those that say what was foretold."""
    best: Trace | None = None
    for number in range(HUNTS):
        trace = hunt(mutant, first_seed=number * 10_000, cpu_s_max=20.0).outcome.trace
        if trace is None or not mutant.expects(trace.found, trace.rule):
            continue
        small = minimise(trace)
        if best is None or len(small.actions) < len(best.actions):
            best = small
    return best


def keep(mutant: Mutant) -> bool:
    """Hunt a trace and keep it; False when none was found."""
    trace = shortest(mutant)
    if trace is None:
        return False
    file = record(trace, mutant=mutant.name)
    usual = {name: SETTINGS[name] for name in (*mutant.settings, *CODE_FIELDS)}
    file = attrs.evolve(file, scenario=attrs.evolve(file.scenario, **usual))
    trace_path(mutant).write_text(dumps(file))
    return True


# --- pages ------------------------------------------------------------------------------------


def _table(rows: tuple[Row, ...]) -> list[str]:
    lines = ["| | action | what happens | the log gains |", "| --- | --- | --- | --- |"]
    for number, row in enumerate(rows, start=1):
        logged = ", ".join(row.logged)
        lines.append(f"| {number} | `{row.name}` | {row.sentence} | {logged} |")
    return lines


def page(mutant: Mutant, file: TraceFile) -> str:
    """One page: where it was reported, what happened, the trace, the guard, the rule."""
    replayed = replay_file(file)
    found = replayed.found
    reports = ", ".join(link(report) for report in mutant.reports)
    where = f"Reported in public: {reports}." if reports else "Found by attacking this design."
    story = re.sub(r"(?<=[.?!]) (?=[A-Z])", "\n", mutant.story)
    lines = [f"# {mutant.name}", "", where, "", story, ""]
    lines += [f"What is missing: {mutant.guard}."]
    others = [name for name in mutant.without if name not in mutant.guard]
    if others:
        taken = ", ".join(f"`{name}`" for name in others)
        lines += [f"Taken away with it, because they back it up: {taken}."]
    lines += ["", "## The shortest trace that is kept", "", *_table(replayed.rows), ""]
    if file.eager or file.scenario.eager:
        names = ", ".join(f"`{name}`" for name in sorted(file.eager | file.scenario.eager))
        lines += [f"Between these actions, {names} happen by themselves."]
    if file.calm:
        lines += ["Then faults stop, and everything that can happen happens."]
    said = "nothing" if found is None else f"`{found.name}`: {found.message}"
    lines += ["", f"Seen by {said}.", "", "## The rule", ""]
    rule = RULES.get(replayed.rule)
    lines += ["none" if rule is None else f"`{rule.name}`: {rule.sentence}", ""]
    command = f"custody replay {trace_path(mutant).relative_to(ROOT)}"
    return "\n".join([*lines, "Replay it:", "", "```", command, "```", ""])


def index(pages: dict[str, str]) -> str:
    """All bugs in one table."""
    lines = [
        "# Bugs",
        "",
        "Each page tells of a defect that the search must find again when its guard is removed.",
        f"The pages are made from the registry and the kept traces by `{COMMAND}`.",
        "",
        "| mutant | public reports | rules |",
        "| --- | --- | --- |",
    ]
    for mutant in MUTANTS:
        if f"{mutant.name}.md" in pages:
            reports = ", ".join(mutant.reports)
            rules = ", ".join(f"`{rule}`" for rule in sorted(mutant.rules))
            lines.append(f"| [{mutant.name}]({mutant.name}.md) | {reports} | {rules} |")
    return "\n".join([*lines, ""])


def pages() -> dict[str, str]:
    """Every page by its file's name."""
    made = {
        f"{mutant.name}.md": page(mutant, loads(trace_path(mutant).read_text()))
        for mutant in MUTANTS
        if trace_path(mutant).exists()
    }
    return {**made, "README.md": index(made)}


def stale() -> list[str]:
    """Pages that do not say what registry and traces say, and pages of nothing."""
    made = pages()
    there = {path.name: path.read_text() for path in PAGES.glob("*.md")}
    return sorted(name for name in {*made, *there} if made.get(name) != there.get(name))


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` say whether they are up to date."""
    if "--check" in arguments:
        if names := stale():
            print(f"docs/bugs: {', '.join(names)} are stale. Regenerate: {COMMAND}")
            return 1
        print("docs/bugs is up to date.")
        return 0
    if "--hunt" in arguments:
        for mutant in MUTANTS:
            if not trace_path(mutant).exists():
                print(mutant.name, "kept" if keep(mutant) else "NOT FOUND", flush=True)
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
