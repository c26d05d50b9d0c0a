"""How much memory a log takes that is longer than any machine's memory: `python -m tools.measure_long_log`.

Owns: writing a long synthetic log in segments of the usual size, asking each verb about it in a
process of its own whose memory is limited, and how long it takes to be at a position.
Must not know: how a verb keeps its memory small.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transport import codec
from transport.bench_forensics import BATCH_ENTRIES, Traffic
from transport.convert import SEGMENT_BYTES
from transport.replaying import taken
from transport.seeking import begun
from transport.stores import frames, segment_files

VERBS = ("replay", "exposures", "explain", "diff", "verify", "index", "at")
SEEKS = 100
ENTRIES = 10_000_000
LIMIT_MIB = 512
EARLY = "00000001-000000000001"
"""A request at the log's beginning."""
CHILD = """
import resource, sys
from transport.cli import main
try:
    main()
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def write(folder: Path, entries: int, *, segment_bytes: int = SEGMENT_BYTES) -> int:
    """A log of at least so many entries; returns how many."""
    folder.mkdir(parents=True)
    position, previous = 1, frames.CHAIN_START
    source = Traffic().entries(entries)
    batch = list(islice(source, BATCH_ENTRIES))
    while batch:
        with (folder / segment_files.segment_name(position)).open("wb") as out:
            out.write(frames.pack_file_header(first_position=position, previous=previous))
            while batch and out.tell() < segment_bytes:
                frame = frames.pack_frame(
                    first_position=position,
                    count=len(batch),
                    previous=previous,
                    payload=codec.batch_to_bytes(batch),
                )
                out.write(frame)
                previous, position = frames.chain(frame), position + len(batch)
                batch = list(islice(source, BATCH_ENTRIES))
    return position - 1


def command(verb: str, log: Path, entries: int) -> list[str]:
    """The command line of a verb over this log."""
    text = str(log)
    return {
        "replay": ["replay", text],
        "exposures": ["exposures", text],
        "explain": ["explain", EARLY, "--log", text],
        "diff": ["diff", text, text],
        "verify": ["log", "verify", text],
        "index": ["log", "index", text],
        "at": ["replay", text, "--at", str(entries * 7 // 10)],
    }[verb]


def limited(arguments: Sequence[str], *, limit_bytes: int) -> dict[str, Any]:
    """Run a command with so much memory of its own, and say what it took."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    peaks = [line for line in done.stderr.splitlines() if line.startswith("peak ")]
    return {
        "exit_code": done.returncode,
        "cpu_seconds": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "wall_seconds": round(time.monotonic() - began, 1),
        "peak_mib": int(peaks[-1].split()[1]) // 1024 if peaks else None,
        "last_line": (done.stdout.splitlines() or done.stderr.splitlines() or [""])[-1],
    }


def sought(log: Path, entries: int, *, seeks: int = SEEKS, seed: int = 1) -> dict[str, Any]:
    """How long it takes in this process until the state behind a random position is there."""
    chance = random.Random(seed)
    took_ms, began_cpu = [], time.process_time()
    for position in [chance.randrange(1, entries + 1) for _ in range(seeks)]:
        began = time.monotonic()
        with begun(log, behind=position) as here:
            if here.refused:
                raise SystemExit(here.refused)
            for _ in taken(here.capture, here.replayer, at=position):
                pass
        took_ms.append((time.monotonic() - began) * 1000)
    return {
        "seeks": seeks,
        "median_ms": round(statistics.median(took_ms), 1),
        "slowest_ms": round(max(took_ms), 1),
        "cpu_ms_each": round((time.process_time() - began_cpu) * 1000 / seeks, 1),
    }


def main() -> int:
    """Print a JSON line for each verb; exits 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the log is, or is written")
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--limit-mib", type=int, default=LIMIT_MIB)
    parser.add_argument("--verb", choices=VERBS, action="append")
    given = parser.parse_args()
    count = given.entries
    if not given.folder.exists():
        count = write(given.folder, given.entries)
    failed = False
    for verb in given.verb or VERBS:
        said = limited(command(verb, given.folder, count), limit_bytes=given.limit_mib << 20)
        failed = failed or said["exit_code"] != 0
        print(json.dumps({"verb": verb, "entries": count, "limit_mib": given.limit_mib, **said}))
        sys.stdout.flush()
    if given.verb is None or "index" in given.verb:
        print(json.dumps({"verb": "seek", "entries": count, **sought(given.folder, count)}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
