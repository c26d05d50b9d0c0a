"""One cell of the matrix: a fault at a moment, and everything that must be so afterwards.

Owns: the order of a cell's run, its checks, its record.
Must not know: any fault or moment by name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs

from lifecycle.events import Aborted, Dropped, Finished, Rejected, Requeued
from tests.faults.asking import Asking
from tests.faults.bench import Bench
from tests.faults.moments import MOMENTS, Scene, kinds
from tests.faults.table import FAULTS, Fault, Strike, why_impossible
from tests.process_harness import collect
from transport.pb.generation_pb2 import GenerateRequest

NS = 1e9


@attrs.frozen
class Cell:
    """What strikes, when, and over which plane."""

    fault: str
    moment: str
    plane: str

    def __str__(self) -> str:
        return f"{self.fault} / {self.moment} / {self.plane}"


@attrs.frozen
class Result:
    """What came of it; times in seconds from the fault on.

    answer_seconds: 0 when the client had been answered before;
    settle_seconds: until the last grant of the request was released or quarantined;
    whole_seconds: until every pool was whole again, replaced parts included;
    entries, evaluations: what the log gained meanwhile, and the guards asked over it.
    """

    cell: Cell
    status: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    answer_seconds: float
    settle_seconds: float
    whole_seconds: float
    entries: int
    evaluations: int


def all_cells() -> list[Cell]:
    """Every possible cell, planes apart, so that each plane needs one deployment."""
    return [
        Cell(fault.name, moment, plane)
        for plane in ("shared-memory", "grpc")
        for fault in FAULTS.values()
        if plane in fault.planes
        for moment in MOMENTS
        if not why_impossible(fault, moment)
    ]


def run_cell(bench: Bench, cell: Cell, seed: int) -> Result:
    """Bring a request to the moment, strike, heal, and judge. Raises AssertionError."""
    fault, moment = FAULTS[cell.fault], MOMENTS[cell.moment]
    entries_before, evaluated_before = bench.judged()
    scene = Scene(bench, seed, how=fault.how)
    if fault.door:
        scene.door = bench.door().address
    moment.reach(scene)
    bench.wait_until(
        f"the log shows the moment: {kinds(scene.events())}",
        lambda: moment.shown(scene.events()),
    )
    scene.answered = scene.target.answered
    before = kinds(scene.events())
    strike = Strike(scene, bench.position(), scene.prefill, scene.decode)
    wall_ns, begun_ns = time.time_ns(), time.monotonic_ns()
    fault.strike(strike)
    if fault.heals_first:
        fault.heal(strike)
    scene.target.wait()
    if not fault.heals_first:
        fault.heal(strike)
    strike.let_go()
    for asking, _ in scene.beside.values():
        asking.wait()
    bench.wait_settled()
    whole_ns = time.monotonic_ns() - begun_ns
    read, evaluated = bench.judged()
    _judge(scene, fault)
    entries = strike.entries()
    last_ns = max((e.time_ns for e in entries), default=wall_ns)
    return Result(
        cell=cell,
        status=scene.target.status,
        before=tuple(before),
        after=tuple(_named([e.event for e in entries])),
        answer_seconds=max(0.0, (scene.target.answered_ns - begun_ns) / NS),
        settle_seconds=max(0.0, (last_ns - wall_ns) / NS),
        whole_seconds=whole_ns / NS,
        entries=read - entries_before,
        evaluations=evaluated - evaluated_before,
    )


def _named(events: Sequence[object]) -> list[str]:
    """Events' names, ends with their causes."""
    out = []
    for event, name in zip(events, kinds(events), strict=True):  # type: ignore[arg-type]
        if isinstance(event, Aborted | Requeued):
            out.append(f"{name}({event.cause.value})")
        elif isinstance(event, Rejected):
            out.append(f"{name}({event.code.value})")
        elif isinstance(event, Dropped):
            out.append(f"{name}({event.kind}: {event.rule})")
        else:
            proof = getattr(event, "proof", None)
            cause = getattr(event, "cause", None)
            said = proof or cause
            out.append(f"{name}({said.value})" if said is not None else name)
    return out


def _judge(scene: Scene, fault: Fault) -> None:
    """The answers are truthful, and each is what its prompt gives alone."""
    everybody: list[tuple[Asking, GenerateRequest]] = [(scene.target, scene.wanted)]
    everybody += scene.beside.values()
    for asking, request in everybody:
        # Asked alone and afterwards, so that no page of it can have been lying about before.
        wanted = collect(scene.bench.client.generate(request)).tokens
        events = scene.bench.events(asking.request) if asking.request else []
        doubts = asking.told.doubts(events, wanted)
        assert not doubts, doubts
        asking.close()
    status = scene.target.status
    if scene.answered:
        assert status == "OK", status
        assert any(isinstance(event, Finished) for event in scene.events())
    elif fault.answer:
        assert status == fault.answer, (status, kinds(scene.events()))
