"""One trace replayed from its file: the log beside it, the time that it took, what was found.

Owns: putting a trace file, a simulation and a log file together.
Must not know: what is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from engine.simulator import Simulation
from engine.simulator_report import Summary
from engine.simulator_values import SECOND, Cluster, Costs, Goals
from engine.store import Stored
from engine.world_values import Found
from transport.jsonlines import write_jsonlines
from transport.simulate_traces import read_trace


@attrs.frozen
class Replayed:
    """What a replay brought: numbers, or a sentence about what must never be."""

    summary: Summary | None
    found: str
    cpu_s: float

    @property
    def requests_per_cpu_s(self) -> float:
        """How fast it went."""
        requests = 0 if self.summary is None else self.summary.requests
        return requests / self.cpu_s if self.cpu_s else 0.0


def replay_trace(
    path: Path,
    cluster: Cluster,
    *,
    limit: int | None,
    rate: float,
    goals_s: tuple[float, float],
    log: Path | None,
    clock: Callable[[], float],
) -> Replayed:
    """Replay the trace of that file. Raises UnreadableTrace and OSError.

    limit: at most so many requests; rate: how many times as fast they come;
    goals_s: seconds to the first token, and for each further one; clock: counts CPU seconds.
    """
    requests = read_trace(path, limit=limit)
    if rate != 1.0:
        requests = tuple(
            attrs.evolve(request, arrival_ns=int(request.arrival_ns / rate)) for request in requests
        )
    first, each = (int(goal * SECOND) for goal in goals_s)
    kept: list[Stored] = []
    keep = None if log is None else lambda at, entry: kept.append(Stored(at, entry))
    simulation = Simulation(cluster, Costs(), keep=keep)
    found, start = "", clock()
    try:
        simulation.run(requests)
    except Found as error:
        found = str(error)
    spent = clock() - start
    if log is not None:
        with log.open("w", encoding="utf-8") as out:
            write_jsonlines(out, kept, complete=True)
    if found:
        return Replayed(None, found, spent)
    return Replayed(simulation.summary(Goals(first_token_ns=first, token_ns=each)), "", spent)
