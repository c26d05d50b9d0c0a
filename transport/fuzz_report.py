"""What a search says: one sentence, the numbered table, JSON and JUnit.

Owns: the wording and the shapes.
Must not know: how anything is searched, and where files lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs

from engine.trace import Replayed, TraceFile
from lifecycle.rules import RULES
from lifecycle.wording import counted
from transport.fuzz_values import Finding, Report


def finding_sentence(finding: Finding) -> str:
    """What was found, in one sentence: oracle, pages, requests, rule."""
    asked = finding.small.scenario.asked
    sizes = ", ".join(
        f"r{n} {one.prompt_tokens} + {counted(one.new_tokens, 'token')}"
        for n, one in enumerate(asked, 1)
    )
    pages = f"; {finding.pages}" if finding.pages else ""
    requests = "" if finding.small.adapter else f"; requests: {sizes}"
    rule = f" (rule {finding.rule})" if finding.rule else ""
    return f"Found {finding.name}{rule}: {finding.message}{pages}{requests}."


def table_lines(replayed: Replayed) -> Iterator[str]:
    """The actions, numbered, with what each says and what the log gained by it."""
    width = max((len(row.name) for row in replayed.rows), default=0)
    digits = len(str(len(replayed.rows)))
    for number, row in enumerate(replayed.rows, start=1):
        says = row.sentence or row.name
        logged = f"  [logged: {', '.join(row.logged)}]" if row.logged else ""
        yield f"  {number:>{digits}}  {row.name:<{width}}  {says}{logged}".rstrip()


def by_itself(file: TraceFile) -> str:
    """What the table does not number."""
    eager = sorted(file.eager | file.scenario.eager)
    after = f"after each action, as soon as it can: {', '.join(eager)}" if eager else ""
    calm = "at the end everything comes to rest without faults" if file.calm else ""
    return "; ".join(part for part in (after, calm) if part)


def rule_lines(name: str) -> Iterator[str]:
    """What a rule claims, and where its absence was reported."""
    rule = RULES.get(name)
    if rule is not None:
        yield f"rule {rule.name}: {rule.sentence}"
        if rule.reports:
            yield f"reported in public as: {', '.join(rule.reports)}"


def summary(report: Report) -> str:
    """How much was searched."""
    return (
        f"{counted(report.runs, 'run')}, {counted(report.steps, 'step')} in {report.wall_s:.1f} s "
        f"({report.steps_per_s:,.0f} steps a CPU second, "
        f"{counted(report.settings.jobs, 'process')}), "
        f"seed {report.settings.seed}"
    )


def finding_object(finding: Finding, paths: Sequence[Path]) -> dict[str, Any]:
    """A finding as JSON."""
    return {
        "scenario": finding.where,
        "seed": finding.seed,
        "oracle": finding.name,
        "rule": finding.rule,
        "message": finding.message,
        "pages": finding.pages,
        "actions": list(finding.small.actions),
        "eager": sorted(finding.small.eager),
        "calm": finding.small.calm,
        "actions_before": len(finding.whole.actions),
        "minimise_s": round(finding.minimise_s, 3),
        "replay": f"custody replay {paths[0]}" if paths else "",
        "files": [str(path) for path in paths],
    }


def report_object(report: Report, paths: Sequence[Path]) -> dict[str, Any]:
    """A search as one JSON document."""
    return {
        "seed": report.settings.seed,
        "jobs": report.settings.jobs,
        "runs": report.runs,
        "steps": report.steps,
        "wall_s": round(report.wall_s, 3),
        "cpu_s": round(report.cpu_s, 3),
        "steps_per_cpu_s": round(report.steps_per_s),
        "reached": dict(sorted(report.sometimes.items())),
        "finding": None if report.finding is None else finding_object(report.finding, paths),
    }


@attrs.frozen
class Case:
    """One line of a JUnit report; a `failure` is a sentence and its details."""

    name: str
    seconds: float
    failure: str = ""
    details: str = ""


def write_junit(path: Path, cases: Sequence[Case]) -> None:
    """Write what continuous integration systems show."""
    failures = sum(bool(case.failure) for case in cases)
    seconds = sum(case.seconds for case in cases)
    suite = ET.Element(
        "testsuite",
        name="custody fuzz",
        tests=str(len(cases)),
        failures=str(failures),
        errors="0",
        time=f"{seconds:.3f}",
    )
    for case in cases:
        node = ET.SubElement(
            suite, "testcase", classname="custody.fuzz", name=case.name, time=f"{case.seconds:.3f}"
        )
        if case.failure:
            ET.SubElement(node, "failure", message=case.failure).text = case.details
    root = ET.Element("testsuites")
    root.append(suite)
    path.write_bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))
