"""A part that only speaks the supervisor's protocol: announces itself, waits for SIGTERM, ends.

A scheduler says that it has settled, and ends when the others are gone.

Usage: part_stub FOLDER VERB [NAME] FLAGS...  Each part appends lines to FOLDER/story.
FOLDER/<name>.script may hold: `die CODE` (after readiness; with `once` in its first life only),
`deaf` (ignores SIGTERM), `fail` (exit code 3 at the end), `mute` (never ready),
`give-up NAME` (a scheduler: that engine is lost), `stuck` (its first life listens to nothing),
`busy` (a scheduler: it settles at the second SIGTERM).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path


def wait_for_others(story: Path) -> None:
    """Wait until every other part that has started is gone, as a scheduler waits for engines."""
    starts = [line.split() for line in story.read_text().splitlines()]
    others = [words[2] for words in starts if words[0] == "starts" and words[2] != str(os.getpid())]
    pace = threading.Event()
    while any(Path("/proc", one).exists() for one in others):
        pace.wait(0.005)


def say(what: dict[str, object]) -> None:
    """Announce something."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def give_up(story: Path, engine: str) -> None:
    """Wait for an engine, and announce that its first life is lost."""
    pace = threading.Event()
    while True:
        for line in story.read_text().splitlines():
            what, name, process_id = line.split()
            if (what, name) == ("starts", engine):
                return say(
                    {
                        "event": "lost",
                        "engine": engine,
                        "process_id": int(process_id),
                        "cause": "lease",
                    }
                )
        pace.wait(0.005)


def main() -> None:
    """Play the part."""
    folder, verb, *rest = sys.argv[1:]
    name = verb if verb == "scheduler" else rest[0]
    script_path = Path(folder, f"{name}.script")
    script = script_path.read_text() if script_path.exists() else ""
    story = os.open(Path(folder, "story"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(what: str) -> None:
        os.write(story, f"{what} {name} {os.getpid()}\n".encode())

    ended = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)
    tell("starts")
    joined = rest[rest.index("--scheduler") + 1] if "--scheduler" in rest else ""
    tell(f"joins:{joined}")
    if script != "mute":
        say({"event": "ready", "address": "127.0.0.1:4321" if verb == "scheduler" else ""})
    lives = Path(folder, "story").read_text().splitlines()
    first_life = sum(line.startswith(f"starts {name} ") for line in lives) == 1
    if script.startswith("die") and (first_life or "once" not in script):
        sys.exit(int(script.split()[1]))
    if script.startswith("give-up"):
        give_up(Path(folder, "story"), script.split()[1])
    if script == "stuck" and first_life:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.sigwait(ended)
    if script == "deaf":
        signal.sigwait({signal.SIGINT})
    if script == "busy":
        tell("hears")
        signal.sigwait(ended)
    if verb == "scheduler":
        tell("settles")
        say({"event": "settled"})
        wait_for_others(Path(folder, "story"))
    tell("ends")
    sys.exit(3 if script == "fail" else 0)


main()
