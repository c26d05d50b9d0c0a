"""A part that only speaks the supervisor's protocol: announces itself, waits for SIGTERM, ends.

A scheduler says that it has settled, and ends when the others are gone.

Usage: part_stub FOLDER VERB [NAME] FLAGS...  Each part appends lines to FOLDER/story.
FOLDER/<name>.script may hold: `die CODE` (after readiness), `deaf` (ignores SIGTERM),
`fail` (exit code 3 at the end), `mute` (never ready).
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
        address = "127.0.0.1:4321" if verb == "scheduler" else ""
        sys.stdout.write(json.dumps({"event": "ready", "address": address}) + "\n")
        sys.stdout.flush()
    if script.startswith("die"):
        sys.exit(int(script.split()[1]))
    signal.sigwait(ended)
    if script == "deaf":
        signal.sigwait({signal.SIGINT})
    if verb == "scheduler":
        sys.stdout.write(json.dumps({"event": "settled"}) + "\n")
        sys.stdout.flush()
        tell("settles")
        wait_for_others(Path(folder, "story"))
    tell("ends")
    sys.exit(3 if script == "fail" else 0)


main()
