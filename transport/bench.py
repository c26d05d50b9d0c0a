"""The benchmark of serving: which measures there are, in what surroundings they run, the report.

Owns: the list of measures and the frame of a report.
Must not know: how a single figure comes about.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import attrs

from transport import bench_inside, bench_serving, bench_transfer
from transport.bench_context import (
    BenchSettings,
    Bystanders,
    Context,
    UnknownMeasure,
    busy_before,
    machine,
)
from transport.bench_stats import Figure, Report, Spread

Measure = Callable[[Context], tuple[Figure, ...]]
MEASURES: dict[str, Measure] = {
    "single": bench_serving.single,
    "batch": bench_serving.batch,
    "refusal": bench_serving.refusal,
    "stores": bench_serving.stores,
    "transfer": bench_transfer.transfer,
    "loop": bench_inside.loop,
    "headers": bench_inside.headers,
    "colocated": bench_serving.colocated,
}
"""By name, in the order in which they run."""


def run_bench(settings: BenchSettings, *, progress: Callable[[str], None]) -> Report:
    """Run the chosen measures one after the other.

    Raises UnknownMeasure, ChildFailed, UnusableSample, and what a client of ours raises.
    """
    wanted = settings.only or tuple(MEASURES)
    for name in wanted:
        if name not in MEASURES:
            raise UnknownMeasure(name=name, known=tuple(MEASURES))
    date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    figures: list[Figure] = []
    with Context(settings, progress=progress) as context:
        for name in (name for name in MEASURES if name in wanted):
            before, bystanders = busy_before(), Bystanders()
            progress(f"{name}: {before:.2f} cores busy with other work")
            found = MEASURES[name](context)
            load = {
                "cores_busy_with_others_before": round(before, 2),
                "cores_busy_with_others_meanwhile": round(bystanders.cores(), 2),
            }
            for figure in found:
                progress(f"{figure.name}: {_middle(figure)}")
            figures += [attrs.evolve(figure, notes=figure.notes | load) for figure in found]
        versions = context.versions()
    return Report(
        date=date,
        machine=machine(),
        settings=attrs.asdict(settings),
        versions=versions,
        figures=tuple(figures),
    )


def _middle(figure: Figure) -> str:
    """The figure in a few words, for whoever waits for the report."""
    median = Spread.of(figure.ratios or figure.ours).median
    return f"{median:.4g} times {figure.peer}" if figure.ratios else f"{median:.4g} {figure.unit}"
