"""The published incident as a log, and what the verbs say about it.

Owns: which verbs are run, where their output lies, and the comparison with what is kept.
Must not know: how a verb finds anything.

`python -m examples.incident` writes the log and the outputs, and exits with 1 when they are not
what is kept in `golden`; `--update` keeps them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

from examples.incident.simulation import Engine, Setup, simulate
from transport import cli

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
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


def main() -> int:
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.incident", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".cache/incident"))
    parser.add_argument("--update", action="store_true", help="keep the outputs as golden")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    outputs = told(given.folder)
    different = []
    for name, text in outputs.items():
        (given.folder / name).write_text(text)
        kept = GOLDEN / name
        if given.update:
            GOLDEN.mkdir(exist_ok=True)
            kept.write_text(text)
        elif not kept.exists() or kept.read_text() != text:
            different.append(name)
    sys.stdout.write(outputs["refused-walks-on.exposures.txt"])
    sys.stdout.write(f"written to {given.folder}\n")
    for name in different:
        sys.stderr.write(f"{given.folder / name} differs from {GOLDEN / name}\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
