"""Replaying one trace: what `custody replay TRACE` prints, and how it ends.

Owns: the verdict and its exit code.
Must not know: who made the trace.

A trace of the product's own code ends with 0 when nothing is found, and with 1 when something is,
whatever the file expects: so the file of a defect turns green with its repair and is kept as it is.
A trace of a mutant, or of an adapted engine, ends with 0 when exactly what it expects is found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from engine.trace import Replayed, TraceFile, replay_names
from transport.commands_shared import EXIT_FAILED, EXIT_OK, say, say_json
from transport.fuzz_files import read_trace
from transport.fuzz_report import by_itself, rule_lines, table_lines
from transport.fuzz_search import pages_held
from transport.fuzz_values import code_of


@attrs.frozen
class Verdict:
    """Whether a replay was as it has to be, and one sentence that says so."""

    good: bool
    sentence: str


def replay_file(file: TraceFile) -> Replayed:
    """Replay with the code that the file names. Raises NoCheckout, UnknownMutant, BadAdapter."""
    scenario, worlds = code_of(file)
    return replay_names(scenario, file.actions, calm=file.calm, eager=file.eager, worlds=worlds)


def judge(file: TraceFile, replayed: Replayed) -> Verdict:
    """What the replay means for this file."""
    found = replayed.found
    said = "nothing" if found is None else found.name
    rule = f" (rule {replayed.rule})" if replayed.rule else ""
    if not file.mutant and not file.adapter:
        if found is not None:
            return Verdict(False, f"violation: {found}{rule}")
        once = f"; it once showed {file.finding}" if file.finding else ""
        return Verdict(True, f"clean: nothing is found{once}")
    whose = f"mutant {file.mutant}" if file.mutant else f"adapter {file.adapter}"
    same = said == (file.finding or "nothing") and replayed.rule == file.rule
    if same:
        return Verdict(True, f"as expected of {whose}: {found or said}{rule}")
    expected = f"{file.finding or 'nothing'}" + (f" (rule {file.rule})" if file.rule else "")
    return Verdict(False, f"expected {expected} of {whose}, found {found or said}{rule}")


def replay_trace(path: Path, *, json: bool) -> int:
    """Replay a file and print what it shows; the exit code is the verdict's.

    Raises `UnreadableTrace`.
    """
    file = read_trace(path)
    replayed = replay_file(file)
    verdict = judge(file, replayed)
    if json:
        say_json(trace_object(path, file, replayed, verdict))
    else:
        _print(path, file, replayed, verdict)
    return EXIT_OK if verdict.good else EXIT_FAILED


def _print(path: Path, file: TraceFile, replayed: Replayed, verdict: Verdict) -> None:
    say(f"{path}: {file.title}" if file.title else str(path))
    if file.mutant:
        say(f"made with the mutant {file.mutant}, not with the product's own code")
    for line in table_lines(replayed):
        say(line)
    if extra := by_itself(file):
        say(extra)
    if replayed.skipped:
        say(f"left out, for it could not happen: {', '.join(replayed.skipped)}")
    if replayed.found is not None:
        if held := pages_held(replayed.world):
            say(f"pages at that moment: {held}")
        for line in rule_lines(replayed.rule):
            say(line)
    say(verdict.sentence)


def trace_object(
    path: Path, file: TraceFile, replayed: Replayed, verdict: Verdict
) -> dict[str, Any]:
    """The same as one JSON document."""
    found = replayed.found
    return {
        "file": str(path),
        "title": file.title,
        "mutant": file.mutant,
        "adapter": file.adapter,
        "as_it_should_be": verdict.good,
        "verdict": verdict.sentence,
        "expected": {"finding": file.finding, "rule": file.rule},
        "found": None
        if found is None
        else {"oracle": found.name, "message": found.message, "rule": replayed.rule},
        "eager": sorted(file.eager | file.scenario.eager),
        "calm": file.calm,
        "actions": [
            {"number": number, "name": row.name, "says": row.sentence, "logged": list(row.logged)}
            for number, row in enumerate(replayed.rows, start=1)
        ],
        "skipped": list(replayed.skipped),
    }
