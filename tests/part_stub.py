"""A part that only speaks the supervisor's protocol: announces itself, waits for SIGTERM, ends.

Usage: part_stub FOLDER VERB [NAME] FLAGS...  Each part appends lines to FOLDER/story.
FOLDER/<name>.script may hold: `die CODE` (after readiness), `deaf` (ignores SIGTERM),
`fail` (exit code 3 at the end), `mute` (never ready).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


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
    tell("ends")
    sys.exit(3 if script == "fail" else 0)


main()
