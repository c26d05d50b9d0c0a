"""Metrics in the forms that Prometheus reads, made by its own library.

Owns: families as text and as JSON.
Must not know: where values come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as TextFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from lifecycle.tally_metrics import BOUNDS_NS, SECOND_NS, Distribution, Family, Kind

VERSIONS = ("version=0.0.4", "version=1.0.0")
"""Versions of the text form; the later one is OpenMetrics' as well."""


@attrs.frozen(eq=False)
class _Families(Collector):
    """Families that were collected before, in the library's own form."""

    families: tuple[Family, ...]

    def collect(self) -> Iterable[TextFamily]:
        return map(_text_family, self.families)


def _text_family(family: Family) -> TextFamily:
    metric, values = family.metric, family.values
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            assert isinstance(value, Distribution)
            histogram.add_metric(labels, _buckets(value), value.sum_ns / SECOND_NS)
        return histogram
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    plain = make(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        assert isinstance(value, int)
        plain.add_metric(labels, value)
    return plain


def _buckets(value: Distribution) -> list[tuple[str, float]]:
    bounds = [*(str(bound / SECOND_NS) for bound in BOUNDS_NS), "+Inf"]
    return list(zip(bounds, accumulate(value.counts), strict=True))


def registry(families: Iterable[Family], *, process: bool = False) -> CollectorRegistry:
    """The families, and with `process` what the system says of this process."""
    found = CollectorRegistry()
    found.register(_Families(tuple(families)))
    if process:
        ProcessCollector(registry=found)
    return found


def exposition(families: Iterable[Family]) -> str:
    """The text form, version 0.0.4."""
    return generate_latest(registry(families)).decode()


def encoded(collectors: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The form that a scraper asks for in its Accept header, and that form's name.

    An alternative of a version that is not known is no alternative.
    """
    # The library would give any higher version's name to what it writes.
    known = ",".join(filter(_known, accept.split(",")))
    encode, content_type = choose_encoder(known)
    return encode(collectors), content_type


def _known(alternative: str) -> bool:
    """Whether an alternative of an Accept header leaves the version open or names a known one."""
    parameters = (one.strip() for one in alternative.split(";"))
    return all(one in VERSIONS for one in parameters if one.startswith("version="))


def document(text: str) -> list[dict[str, Any]]:
    """A text form as JSON: each family with its samples. Raises ValueError for another text."""
    return [
        {
            "name": _full_name(family),
            "type": family.type,
            "help": family.documentation,
            "samples": [_sample(one.name, one.labels, one.value) for one in family.samples],
        }
        for family in text_string_to_metric_families(text)
    ]


def _full_name(family: TextFamily) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _sample(name: str, labels: Mapping[str, str], value: float) -> dict[str, Any]:
    whole = int(value) if value.is_integer() else value
    return {"name": name, "labels": dict(labels), "value": whole}
