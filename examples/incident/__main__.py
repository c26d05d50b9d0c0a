"""The published incident as a log and as bytes, and what the verbs say about it.

Owns: which verbs are run, where their output lies, and the comparison with what is kept.
Must not know: how a verb finds anything, or what a round in memory does.

`python -m examples.incident` writes the log and the outputs, and exits with 1 when they are not
what is kept in `golden`; `--update` keeps them, and writes what was measured into the page.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

from examples.incident.simulation import Engine, Setup, simulate
from lifecycle.wording import counted
from transport import cli

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
PAGE = HERE.parent.parent / "docs" / "incident.md"
BEGIN, END = "<!-- in memory: begin -->", "<!-- in memory: end -->"
ROUNDS = 20
MODEL = Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
FIRST = Setup()
SECOND = Setup(seed=2027, affected=0, sound=400, refused=5, cancelled=60, days=0.05)
"""Fewer requests, closer together: a late write needs a next owner."""


def said(*tokens: str) -> str:
    """What a verb prints, and its exit code."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = cli.run(tokens)
    # How many guards there are is no part of the story.
    kept = [line for line in out.getvalue().splitlines() if "guard evaluations" not in line]
    return "\n".join([*kept, f"exit code {code}"]) + "\n"


def truth(engine: Engine) -> str:
    """What the memory saw, in the order of the requests."""
    lines = [f"answers: {engine.truth.answers}", f"affected: {len(engine.truth.foreign)}"]
    for name, whose in sorted(engine.truth.foreign.items()):
        lines.append(f"{name} read bytes of {len(whose)}: {' '.join(sorted(whose))}")
    return "\n".join(lines) + "\n"


def told(folder: Path) -> dict[str, str]:
    """Write both logs into the folder, and return every output by its name."""
    outputs: dict[str, str] = {}
    for name, setup in (("refused-walks-on", FIRST), ("late-write", SECOND)):
        engine = simulate(setup)
        log = folder / f"{name}.jsonl"
        engine.log.write(log)
        digest = hashlib.sha256(log.read_bytes()).hexdigest()
        outputs[f"{name}.log.sha256"] = f"{digest}\n"
        outputs[f"{name}.truth.txt"] = truth(engine)
        outputs[f"{name}.exposures.txt"] = said("exposures", str(log))
        outputs[f"{name}.replay.txt"] = said("replay", str(log))
    return outputs


def in_memory(folder: Path, model: Path, rounds: int) -> tuple[str, list[str]]:
    """What is the same everywhere, and the page's lines with what was measured here."""
    import torch

    from examples.incident import memory

    torch.set_num_threads(1)
    stage = memory.Stage(model)
    seen = [stage.round(seed) for seed in range(rounds)]
    memory.write_log(seen[0].walk.log, folder / "in-memory.jsonl")
    facts = memory.facts(seen)
    shown = [one.walk for one in seen if one.walk.shown][:3]
    lines = ["", "```", *facts, *memory.measured(seen), "```", ""]
    lines += [f"* `{walk.secret}`: {json.dumps(walk.answer)}" for walk in shown]
    return "\n".join(facts) + "\n", [*lines, ""]


def put(lines: list[str], page: Path) -> None:
    """Replace what stands between the marks."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)


def verdict(outputs: Mapping[str, str], golden: Path) -> tuple[str, int]:
    """One line that says whether these outputs are the kept ones, and the exit code."""
    kept = {path.name: path.read_text() for path in golden.iterdir()}
    where = f"those kept in {os.path.relpath(golden)}"
    unequal = [name for name, text in outputs.items() if kept.get(name) != text]
    if unequal:
        several = counted(len(outputs), "output")
        return (
            f"NOT EQUAL: {len(unequal)} of {several} differ from {where}: {', '.join(unequal)}",
            1,
        )
    missing = kept.keys() - outputs.keys()
    left = f"; not made and not compared: {', '.join(sorted(missing))}" if missing else ""
    return f"EQUAL: {counted(len(outputs), 'output')} as {where}{left}", 0


def main() -> int:
    """Run everything; returns the exit code."""
    about = "Write the published incident's logs, and what the verbs say about them, into a folder."
    parser = argparse.ArgumentParser(prog="python -m examples.incident", description=about)
    where = Path(".cache/incident")
    parser.add_argument("--folder", type=Path, default=where, help=f"where to; {where} if absent")
    parser.add_argument("--update", action="store_true", help="keep the outputs as golden")
    model = Path(os.environ.get("CUSTODY_MODEL", MODEL))
    parser.add_argument("--model", type=Path, default=model, help="of the rounds in memory")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds in memory; 0 for none")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    outputs = told(given.folder)
    measured: list[str] = []
    if given.rounds:
        facts, measured = in_memory(given.folder, given.model, given.rounds)
        if given.rounds == ROUNDS:
            outputs["in-memory.txt"] = facts
            if given.update:
                put(measured, PAGE)
    for name, text in outputs.items():
        (given.folder / name).write_text(text)
    if given.update:
        GOLDEN.mkdir(exist_ok=True)
        for name, text in outputs.items():
            (GOLDEN / name).write_text(text)
    sys.stdout.write(outputs["refused-walks-on.exposures.txt"])
    sys.stdout.write("\n".join(measured))
    sys.stdout.write(f"written to {given.folder}\n")
    line, code = verdict(outputs, GOLDEN)
    sys.stdout.write(f"{line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
