"""What is shipped for operators names what exists: rules, runbook, dashboard, documents, names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from lifecycle.tally_metrics import METRICS, Distribution, Family, Kind, Metric
from transport.metrics import LIVE_METRICS
from transport.metrics_text import document, exposition

ROOT = Path(__file__).resolve().parent.parent
ALERTS = ROOT / "ops" / "prometheus" / "alerts.yml"
SCRAPE = ROOT / "ops" / "prometheus" / "scrape.yml"
DASHBOARD = ROOT / "ops" / "grafana" / "custody.json"
RUNBOOK = ROOT / "docs" / "alerts.md"
PAGE = ROOT / "docs" / "metrics.md"

ALL: tuple[Metric, ...] = (*METRICS, *LIVE_METRICS)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in ALL}
SCRAPED = frozenset({"job", "instance"})
"""Labels that Prometheus adds to everything."""
DISTRIBUTION = ("_bucket", "_sum", "_count")


# --- the rules of names ---------------------------------------------------------------------------

UNITS = ("seconds", "bytes", "pages", "tokens", "requests", "entries")
BAD_WORDS = (
    "counter",
    "gauge",
    "histogram",
    "summary",
    "milliseconds",
    "ms",
    "kb",
    "mb",
    "percent",
)


def faults(metric: Metric) -> list[str]:
    """What is against the rules that `promtool check metrics` and the naming guide state."""
    name, found = metric.name, []
    words = name.split("_")
    if not re.fullmatch(r"custody(_[a-z][a-z0-9]*)+", name):
        found.append(f"{name} is no plain name under custody_")
    if (words[-1] == "total") is not (metric.kind is Kind.COUNTER):
        found.append(f"{name} must end in _total exactly if it is a counter")
    if metric.kind is Kind.HISTOGRAM and words[-1] != "seconds":
        found.append(f"{name} has no unit")
    if words[-1] in {"count", "sum", "bucket", "info", "created"}:
        found.append(f"{name} ends like a part of something else")
    found += [f"{name} says {word}" for word in words if word in BAD_WORDS]
    middle = words[1:-2] if words[-1] == "total" else words[1:-1]
    found += [f"{name} has a unit in its middle" for word in middle if word in {"seconds", "bytes"}]
    if not metric.help.endswith(".") or not metric.help[0].isupper() or "\n" in metric.help:
        found.append(f"the help of {name} is no sentence")
    for label in metric.labels:
        if not re.fullmatch(r"[a-z][a-z_]*", label) or label in {"le", "quantile", *SCRAPED}:
            found.append(f"{label} is no label for {name}")
    return found


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_follow_the_habits_of_prometheus(metric: Metric) -> None:
    """No colons, units as a suffix, `_total` behind counters alone, a sentence of help."""
    assert faults(metric) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("custody:requests_total", Kind.COUNTER),
        ("custody_requests", Kind.COUNTER),
        ("custody_requests_total", Kind.GAUGE),
        ("custody_wait_milliseconds", Kind.HISTOGRAM),
        ("custody_request_count", Kind.GAUGE),
        ("custody_seconds_waited_total", Kind.COUNTER),
        ("requests_total", Kind.COUNTER),
    ],
)
def test_a_bad_name_is_seen(name: str, kind: Kind) -> None:
    """The checker is not green for everything."""
    assert faults(Metric(name=name, kind=kind, help="A sentence."))


def test_names_are_unique_and_the_library_reads_every_family() -> None:
    """The text form holds each metric once, with its kind and help, as the parser has it."""
    assert len(BY_NAME) == len(ALL)
    families = [Family(metric, metric.zeros()) for metric in ALL]
    parsed = {family["name"]: family for family in document(exposition(families))}
    for metric in ALL:
        assert parsed[metric.name]["type"] == metric.kind.value
        assert parsed[metric.name]["help"] == metric.help


def test_a_distribution_is_cumulative_and_ends_at_infinity() -> None:
    """Buckets never fall, the last equals the count, and the sum is in seconds."""
    value = Distribution()
    for duration_ns in (5, 2_000_000, 2_000_001, 700_000_000_000):
        value = value.with_one(duration_ns)
    metric = BY_NAME["custody_phase_seconds"]
    text = exposition([Family(metric, {("ended",): value})])
    (family,) = text_string_to_metric_families(text)
    buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[0] == 1
    assert buckets[-1] == 4
    rest = {s.name: s.value for s in family.samples if not s.name.endswith("_bucket")}
    assert rest["custody_phase_seconds_count"] == 4
    assert rest["custody_phase_seconds_sum"] == pytest.approx(700.004000006)


# --- queries --------------------------------------------------------------------------------------


def metric_of(series: str) -> Metric:
    """The metric of a series' name; a histogram's series have three endings."""
    if series in BY_NAME and BY_NAME[series].kind is not Kind.HISTOGRAM:
        return BY_NAME[series]
    for ending in DISTRIBUTION:
        metric = BY_NAME.get(series.removesuffix(ending))
        if series.endswith(ending) and metric is not None and metric.kind is Kind.HISTOGRAM:
            return metric
    raise AssertionError(f"there is no series {series}")


def labels_of(series: str) -> frozenset[str]:
    """The labels that a series bears once it is scraped."""
    bucket = {"le"} if series.endswith("_bucket") else set()
    return frozenset({*metric_of(series).labels, *SCRAPED, *bucket})


def selectors(query: str) -> Iterator[promql_parser.VectorSelector]:
    """Every series that a query reads. Raises ValueError for what is no PromQL."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(query), visit)
    return iter(dict.fromkeys(found))


def grown(query: str) -> set[str]:
    """The names inside `rate` and `increase`."""
    return set(re.findall(r"(?:rate|increase)\(\s*([a-z_]+)", query))


def check_query(query: str) -> None:
    """Everything that the query names exists, and nothing grows that is no counter."""
    read = list(selectors(query))
    assert read
    available: set[str] = set()
    for selector in read:
        assert selector.name is not None
        metric = metric_of(selector.name)
        available |= labels_of(selector.name)
        counts = metric.kind is not Kind.GAUGE
        assert counts == (selector.name in grown(query)), f"{selector.name} in {query}"
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels_of(selector.name), f"{matcher.name} in {query}"
            check_values(metric, matcher.name, matcher.value)
    for listed in re.findall(r"(?:by|ignoring|on)\s*\(([a-z_, ]+)\)", query):
        assert set(re.split(r",\s*", listed)) <= available, query
    if "histogram_quantile" in query:
        assert all(selector.name.endswith("_bucket") for selector in read if selector.name)
        assert re.search(r"by \([a-z_, ]*\ble\b", query)


def check_values(metric: Metric, label: str, wanted: str) -> None:
    """A value that is looked for is one that the metric can have."""
    if label not in metric.labels or not metric.known:
        return
    known = {labels[metric.labels.index(label)] for labels in metric.known}
    assert set(wanted.split("|")) <= set(known), f"{metric.name} has no {label} {wanted}"


@pytest.mark.parametrize(
    "query",
    [
        "sum(custody_nothing)",
        "rate(custody_open_requests[5m])",
        "sum(custody_requests_total)",
        'rate(custody_requests_total{outcome="lost"}[5m])',
        'rate(custody_requests_total{result="aborted"}[5m])',
        "sum by (engine) (custody_open_requests)",
        "histogram_quantile(0.9, sum by (phase) (rate(custody_phase_seconds_bucket[5m])))",
        "rate(custody_phase_seconds[5m])",
        "sum by (",
    ],
)
def test_a_bad_query_is_seen(query: str) -> None:
    """The checker is not green for everything."""
    with pytest.raises((AssertionError, ValueError)):
        check_query(query)


# --- alerts ---------------------------------------------------------------------------------------


def alerts() -> list[dict[str, Any]]:
    """Every rule of the file."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    assert len({group["name"] for group in groups}) == len(groups)
    return [rule for group in groups for rule in group["rules"]]


def runbook() -> dict[str, list[str]]:
    """The sections of the runbook by anchor, and the lines of each."""
    parts: dict[str, list[str]] = {}
    for part in RUNBOOK.read_text().split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        body = body.partition("\n## ")[0]
        parts[title.lower()] = [line for line in body.splitlines() if line]
    return parts


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_can_fire_and_says_what_to_do(rule: dict[str, Any]) -> None:
    """Its query parses and names what exists; it has a severity, a summary and its runbook."""
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Custody([A-Z][a-z]+)+", rule["alert"])
    check_query(rule["expr"])
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    if "for" in rule:
        promql_parser.parse_duration(rule["for"])
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (ROOT / page) == RUNBOOK
    assert anchor == rule["alert"].lower()
    assert len(runbook()[anchor]) >= 2
    assert rule["annotations"]["summary"].endswith(".")
    for label in re.findall(r"\$labels\.([a-z]+)", rule["annotations"]["summary"]):
        shown = re.findall(r"by \(([a-z_, ]+)\)", rule["expr"])
        bears = labels_of(next(selectors(rule["expr"])).name or "")
        assert label in (re.split(r",\s*", shown[0]) if shown else bears)


def test_the_runbook_has_a_page_for_each_alert_and_no_other() -> None:
    """Names are unique, and a section without an alert is stale."""
    names = [rule["alert"].lower() for rule in alerts()]
    assert len(set(names)) == len(names)
    assert set(runbook()) == set(names)


def test_links_inside_the_runbook_lead_somewhere() -> None:
    """A page refers to others by their anchors."""
    text = RUNBOOK.read_text()
    assert set(re.findall(r"\]\(#([a-z]+)\)", text)) <= set(runbook())
    for name in re.findall(r"`(custody_[a-z_]+)", text):
        assert name in BY_NAME


def test_flags_and_verbs_of_the_runbook_exist() -> None:
    """Who is told to change a setting finds it."""
    reference = (ROOT / "docs" / "cli-reference.md").read_text()
    text = RUNBOOK.read_text()
    flags = set(re.findall(r"`?(--[a-z-]+)", text))
    assert flags
    assert {
        flag for flag in flags if f"`{flag} " not in reference and f"`{flag}`" not in reference
    } == set()
    for verb in re.findall(r"`custody ((?:log )?[a-z]+)", text):
        assert f"# custody {verb}\n" in reference, verb


def test_the_scrape_configuration_reads_the_rules() -> None:
    """It names the file beside it and the port that the documents name."""
    found = yaml.safe_load(SCRAPE.read_text())
    assert found["rule_files"] == [ALERTS.name]
    (job,) = found["scrape_configs"]
    assert job["job_name"] == "custody"
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:9464"]


def series_of(text: str) -> tuple[str, dict[str, str]]:
    """A series' name and labels, as the rules' own tests write them."""
    name, _, rest = text.partition("{")
    return name, dict(re.findall(r'(\w+)="([^"]*)"', rest))


def test_every_alert_is_shown_to_fire_on_series_that_exist() -> None:
    """`promtool test rules` runs that file; here its alerts, series and labels are real ones."""
    found = yaml.safe_load((ALERTS.parent / "alerts.test.yml").read_text())
    assert found["rule_files"] == [ALERTS.name]
    rules = {rule["alert"]: rule for rule in alerts()}
    *single, calm = found["tests"]
    assert [test["name"] for test in single] == list(rules)
    for test in found["tests"]:
        for one in test["input_series"]:
            name, labels = series_of(one["series"])
            assert set(labels) == labels_of(name), one["series"]
            for label, wanted in labels.items():
                check_values(metric_of(name), label, wanted)
    for test in single:
        (expected,) = test["alert_rule_test"]
        assert expected["alertname"] == test["name"]
        (alert,) = expected["exp_alerts"]
        assert alert["exp_labels"]["severity"] == rules[test["name"]]["labels"]["severity"]
        read = {selector.name for selector in selectors(rules[test["name"]]["expr"])}
        assert {series_of(one["series"])[0] for one in test["input_series"]} == read
    assert {one["alertname"] for one in calm["alert_rule_test"]} == set(rules)
    assert not [one for one in calm["alert_rule_test"] if one["exp_alerts"]]


# --- dashboard ------------------------------------------------------------------------------------


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Every panel that shows something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def replaced(query: str) -> str:
    """The query with Grafana's own variables filled in, as Grafana sends it."""
    query = query.replace("$__rate_interval", "1m").replace("$__range", "1h")
    return re.sub(r'=~"\$(job|instance)"', '=~".*"', query)


def test_the_dashboard_has_what_grafana_asks_for() -> None:
    """Ids and titles are unique, panels have a place and do not overlap, variables are declared."""
    found = dashboard()
    assert found["schemaVersion"] >= 36
    assert found["uid"]
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    assert "id" not in found
    titles = [panel["title"] for panel in found["panels"]]
    assert len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    declared = {variable["name"] for variable in found["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(found["panels"])))
    assert used == declared
    assert "__inputs" not in found


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_shows_what_exists(panel: dict[str, Any]) -> None:
    """Each query parses and names what exists, with references of its own and a unit."""
    assert panel["targets"]
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        query = replaced(target["expr"])
        assert "$" not in query
        check_query(query)
        for label in re.findall(r"\{\{([a-z]+)\}\}", target["legendFormat"]):
            by = re.search(r"by \(([a-z, ]+)\)", query)
            assert by is not None
            assert label in re.split(r",\s*", by[1])


def test_variables_of_the_dashboard_ask_for_what_exists() -> None:
    """Jobs and instances are those that show a scheduler."""
    for variable in dashboard()["templating"]["list"]:
        for name in re.findall(r"custody_[a-z_]+", json.dumps(variable)):
            assert name in BY_NAME


# --- documents ------------------------------------------------------------------------------------


def test_the_page_about_metrics_names_what_exists() -> None:
    """Every name of ours on the page is a metric, in the table of other systems' names too."""
    text = PAGE.read_text()
    for name in re.findall(r"\b(custody_[a-z_]+)\b", text):
        if name.endswith(DISTRIBUTION) and name not in BY_NAME:
            metric_of(name)
        else:
            assert name in BY_NAME, name


def test_queries_on_the_page_about_metrics_are_queries() -> None:
    """What stands in the column of ours can be typed into Prometheus."""
    rows = [line for line in PAGE.read_text().splitlines() if line.count("|") >= 6]
    table = [row.replace("\\|", "\0").split("|") for row in rows]
    cells = [cells[2].replace("\0", "|") for cells in table if len(cells) == 7]
    queries = [query for cell in cells for query in re.findall(r"`([^`]+)`", cell)]
    assert len(queries) > 15
    for query in queries:
        promql_parser.parse(query)
        for selector in selectors(query):
            name = selector.name or ""
            metric = BY_NAME.get(name) or metric_of(name)
            for matcher in selector.matchers.matchers:
                check_values(metric, matcher.name, matcher.value)


def test_names_of_other_systems_look_like_theirs() -> None:
    """Names of vLLM and SGLang have a colon behind their prefix; ours have none."""
    text = PAGE.read_text()
    foreign = re.findall(r"`((?:vllm|sglang)[^`{]*)", text)
    assert len(foreign) > 30
    assert all(re.fullmatch(r"(vllm|sglang):[a-z0-9_]+", name) for name in foreign)
