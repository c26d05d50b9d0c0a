"""The metrics as Markdown tables, from the lists in the code.

Owns: how a list of metrics looks in a document.
Must not know: which document it stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lifecycle.tally_metrics import BOUNDS_NS, METRICS, SECOND_NS, Metric
from transport.metrics import LIVE_METRICS


def counted() -> str:
    """What is counted over the log."""
    return _table(METRICS)


def live() -> str:
    """What only the running process knows."""
    return _table(LIVE_METRICS)


def values() -> str:
    """Every label whose values are known beforehand."""
    lines = ["| metric | label | values |", "|---|---|---|"]
    for metric in (*METRICS, *LIVE_METRICS):
        for place, label in enumerate(metric.labels):
            found = dict.fromkeys(labels[place] for labels in metric.known)
            if found:
                shown = ", ".join(f"`{value}`" for value in found)
                lines.append(f"| `{metric.name}` | `{label}` | {shown} |")
    return "\n".join(lines)


def buckets() -> str:
    """The upper bounds of every histogram."""
    bounds = ", ".join(f"{bound / SECOND_NS:g}" for bound in BOUNDS_NS)
    return f"Every histogram has the same upper bounds, in seconds: {bounds}, and infinity."


def _table(metrics: Iterable[Metric]) -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |")
    return "\n".join(lines)


PARTS: Mapping[str, Callable[[], str]] = {
    "metrics of the log": counted,
    "values of labels": values,
    "buckets": buckets,
    "metrics of the process": live,
}
"""The generated parts of the page about metrics."""
