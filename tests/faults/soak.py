"""Random faults under load, for as long as asked; everything must be truthful and whole at the end.

`python -m tests.faults.soak --seconds 1800 [--seed N] [--plane PLANE] [--json FILE]`; the exit code
is 1 when a rule was broken, an answer was not truthful, or a page is missing.

Owns: which fault comes next, how parts are replaced, what is counted at the end.
Must not know: moments; here faults meet whatever is going on.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from tests.faults.bench import LEASE_SECONDS, Bench
from tests.faults.kept import keep
from tests.faults.load import Load, Shape, answers_doubted
from tests.process_harness import tiny_model

CLIENTS = 8
PAUSE_SECONDS_MAX = 3.0
EXIT_REFUSED = 4
REFERENCES = 300
PAGE_BYTES = 4096


@attrs.define
class Soak:
    """A deployment, a load, and one fault after the other."""

    bench: Bench
    chance: random.Random
    struck: Counter[str] = attrs.Factory(Counter)
    sizes: list[tuple[float, str, int]] = attrs.Factory(list)
    _pace: threading.Event = attrs.Factory(threading.Event)

    def run(self, seconds: float) -> None:
        """Strike until the time is over."""
        begun = time.monotonic()
        faults: dict[str, Callable[[], None]] = {
            "engine killed": self.kill,
            "engine stopped for a while": lambda: self.stand_still(0.4),
            "engine stopped beyond its lease": lambda: self.stand_still(1.5),
            "engine cut off for a while": lambda: self.cut(0.4),
            "engine cut off beyond its lease": lambda: self.cut(1.5),
            "scheduler killed": self.kill_scheduler,
            "write fails": lambda: self.spoil("fail"),
            "write lands late": lambda: self.spoil("late"),
            "write corrupted": lambda: self.spoil("corrupt"),
            "log store full": lambda: self.disk("full"),
            "log store slow": lambda: self.disk("slow"),
        }
        while time.monotonic() - begun < seconds:
            name = self.chance.choice(list(faults))
            faults[name]()
            self.struck[name] += 1
            self.replace_ended()
            self._wait(self.chance.random() * PAUSE_SECONDS_MAX)
            self._measure(time.monotonic() - begun)
        self.mend()

    def _wait(self, seconds: float) -> None:
        self._pace.wait(seconds)

    def _engine(self, role: str = "") -> str:
        return self.chance.choice([n for n in self.bench.names if n.startswith(role)])

    # --- faults -------------------------------------------------------------------------------

    def kill(self) -> None:
        """An engine dies, and another life of it begins at once."""
        name = self._engine()
        self.bench.children[name].kill()
        self.bench.start_engines(name)

    def kill_scheduler(self) -> None:
        """The scheduler dies, and another life of it begins at once."""
        self.bench.children["scheduler"].kill()
        self.bench.start_scheduler()

    def stand_still(self, leases: float) -> None:
        """An engine gets no time for a while."""
        child = self.bench.children[self._engine()]
        child.signal(signal.SIGSTOP)
        self._wait(leases * LEASE_SECONDS)
        child.signal(signal.SIGCONT)

    def cut(self, leases: float) -> None:
        """An engine and the scheduler do not reach each other."""
        relay = self.bench.relays[self._engine()]
        relay.stall()
        self._wait(leases * LEASE_SECONDS)
        relay.heal(broken=self.chance.random() < 0.5)

    def spoil(self, how: str) -> None:
        """One of the next writes goes wrong."""
        name = self._engine("prefill")
        gate = self.bench.gate(name)
        gate.tell("spoil", at=self.chance.randrange(1, 4), how=how)
        gate.tell("go")
        self._wait(1.0)
        gate.tell("land")

    def disk(self, how: str) -> None:
        """The log's disk takes nothing for a moment."""
        gate = self.bench.gate("scheduler")
        gate.tell(how)
        self._wait(0.5)
        gate.tell("mend")

    # --- whole again --------------------------------------------------------------------------

    def replace_ended(self) -> None:
        """An engine that was given up too often has ended, and says so by its exit code."""
        self._wait(0.2)
        for name in self.bench.names:
            code = self.bench.children[name].process.poll()
            if code is not None:
                assert code == EXIT_REFUSED, f"{name}: {self.bench.children[name].said_errors()}"
                self.bench.start_engines(name)

    def mend(self) -> None:
        """Replace whoever was given up, or owns pages that a foreign tag keeps out."""
        self.bench.wait_until("every engine is attached, or has ended", self._all_known)
        self.replace_ended()
        for engine in self.bench.client.status().engines:
            if any(rank.pages.quarantined for rank in engine.ranks):
                self.bench.children[engine.engine].kill()
                self.bench.start_engines(engine.engine)

    def _all_known(self) -> bool:
        connected = {
            engine.engine
            for engine in self.bench.client.status().engines
            if any(rank.connected for rank in engine.ranks)
        }
        ended = {n for n in self.bench.names if self.bench.children[n].process.poll() is not None}
        return set(self.bench.names) <= connected | ended

    def _measure(self, at_seconds: float) -> None:
        for name, child in self.bench.children.items():
            path = Path(f"/proc/{child.process_id}/statm")
            if child.process.poll() is None:
                pages = int(path.read_text(encoding="ascii").split()[1])
                self.sizes.append((at_seconds, name.split("-")[0], pages * PAGE_BYTES))

    def growth(self, seconds: float) -> dict[str, Any]:
        """The largest resident size of each kind of part in the first and the last third."""
        out: dict[str, Any] = {}
        for kind in ("scheduler", "prefill", "decode"):
            first = [b for at, name, b in self.sizes if name == kind and at < seconds / 3]
            last = [b for at, name, b in self.sizes if name == kind and at > 2 * seconds / 3]
            if first and last:
                out[kind] = {"first_mib": max(first) >> 20, "last_mib": max(last) >> 20}
        return out


def soak(folder: Path, *, seconds: float, seed: int, plane: str) -> dict[str, Any]:
    """Run, and say what came of it. Raises AssertionError when something is not whole."""
    model = tiny_model(folder)
    shape = Shape(cancelled_share=0.1, cancel_seconds_max=0.5)
    with Bench(folder / "bench", model, plane=plane) as bench:
        it = Soak(bench, random.Random(seed))
        with Load(bench, CLIENTS, shape, seed=seed) as load:
            it.run(seconds)
        it.mend()
        bench.wait_settled()
        entries, evaluations = bench.judged()
        doubts = answers_doubted(bench, load.done, references=REFERENCES)
        bench.wait_settled()
    return {
        "seconds": seconds,
        "seed": seed,
        "plane": plane,
        "faults": dict(it.struck),
        "requests": len(load.done),
        "statuses": dict(Counter(done.status for done in load.done)),
        "entries": entries,
        "evaluations": evaluations,
        "violations": 0,
        "pages_missing": 0,
        "untruthful": len(doubts),
        "doubts": doubts[:10],
        "memory": it.growth(seconds),
    }


def main() -> int:
    """Run for as long as asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--plane", choices=("shared-memory", "grpc"), default="shared-memory")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="custody-soak-") as name:
        out = soak(Path(name), seconds=asked.seconds, seed=asked.seed, plane=asked.plane)
    print(json.dumps(out, indent=1))
    if asked.json is not None:
        keep(asked.json, "soak", out)
    return 1 if out["untruthful"] else 0


if __name__ == "__main__":
    sys.exit(main())
