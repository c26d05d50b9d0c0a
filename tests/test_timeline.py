"""The timeline: one page that needs nothing else, and a trace with arrows; both say what the log says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from examples.incident.simulation import Setup, simulate
from lifecycle.forensics_sums import exposures
from lifecycle.ids import RequestId
from lifecycle.replay import Replayer
from tests.handmade import ONE, TWO
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import Careless, first_answered, late_write, short_handoff
from transport import cli
from transport.perfetto import INSTANT, SLICE_BEGIN, SLICE_END, perfetto, trace_class
from transport.timeline import page
from transport.timeline_model import Model, choose

BYTES_MAX = 5 << 20


def drawn(log: Any, path: Path, *flags: str) -> tuple[int, str]:
    """Exit code and page of the verb."""
    write_log(path, log.entries)
    output = path.with_suffix(".html")
    code = cli.run(["timeline", str(path), "--output", str(output), *flags])
    return code, output.read_text() if output.exists() else ""


def data_of(html: str) -> dict[str, Any]:
    """What the page's script reads."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """No address but that of a namespace, and a policy that forbids every load."""
    code, html = drawn(short_handoff(first_answered()), tmp_path / "x")
    assert code == 0
    assert set(re.findall(r"https?://[\w./-]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html
    assert not re.search(r"<(?:link|img|iframe|object|embed)\b|@import|url\(h", html)


def test_a_foreign_read_points_at_its_last_writer(tmp_path: Path) -> None:
    """Reader, writer, pages, and the entries between which the red arrow runs."""
    _, html = drawn(short_handoff(first_answered()), tmp_path / "x")
    data = data_of(html)
    ((reader, lane, first, pages, writer, written, read, start, stop, whose),) = data["reads"]
    names = [one[0] for one in data["requests"]]
    assert (names[reader], names[writer], whose) == (TWO, ONE, ONE)
    assert (data["lanes"][lane], first, pages, start, stop) == ("d0/1/0", 1, 1, 4, 6)
    kinds = [data["kinds"][data["events"][i][1]] for i in (written, read)]
    assert kinds == ["Transferred", "Finished"]
    assert data["requests"][reader][3] == 2
    assert "affected answers: 1" in html


def test_grants_have_their_drains_and_ends(tmp_path: Path) -> None:
    """Each grant spans its reservation and its end, with everybody who drained."""
    _, html = drawn(first_answered(), tmp_path / "x")
    data = data_of(html)
    by_purpose = {grant[2]: grant for grant in data["grants"]}
    _, _, _, runs, pages, start, stop, drains, waiting, gone = by_purpose["destination"]
    assert (runs, pages, waiting, gone) == ([[0, 3]], 3, [], 0)
    kinds = [data["kinds"][data["events"][i][1]] for i in (start, stop)]
    assert kinds == ["Reserved", "Released"]
    assert [(party, proof) for _, party, proof in drains] == [("p0/1/0", "acknowledged")]


def test_who_never_drained_is_named(tmp_path: Path) -> None:
    """A grant that was given back with its door open says for whom."""
    _, html = drawn(late_write(Careless(), told=False), tmp_path / "x")
    waiting = [grant[8] for grant in data_of(html)["grants"] if grant[2] == "destination"]
    assert waiting[0] == ["p0/1/0"]


def test_ten_thousand_entries_stay_small_and_show_what_matters() -> None:
    """At most 5 MB, and every affected answer is among what is shown."""
    engine = simulate(Setup(seed=4, affected=40, sound=1_000, refused=10))
    found = exposures(engine.log.entries)
    replayer = Replayer(foreign=True)
    for position, entry in engine.log.entries:
        replayer.take(position, entry)
    report = replayer.report()
    shown = choose(engine.log.entries, found, report, most=10_000)
    assert 9_000 < len(shown) <= 10_000
    assert {r.request for r in found.certain} <= {entry.request for _, entry in shown}
    document = Model(shown, found, report).document(title="t", summary=[], total=len(shown))
    assert len(page(document).encode()) < BYTES_MAX
    few = choose(engine.log.entries, found, report, most=500)
    assert len(few) <= 500
    assert {r.request for r in found.certain} <= {entry.request for _, entry in few}


def test_a_name_cannot_leave_its_place(tmp_path: Path) -> None:
    """Whatever a foreign log calls a request, the page's script stays what it is."""
    nasty = '</script><script>alert("1")</script>\u2028'
    log = short_handoff(first_answered())
    renamed = [
        (n, attrs.evolve(e, request=RequestId(nasty)) if e.request == TWO else e)
        for n, e in log.entries
    ]
    log.entries = renamed
    code, html = drawn(log, tmp_path / "x")
    assert code == 0
    assert html.count("</script>") == 2
    assert nasty in {one[0] for one in data_of(html)["requests"]}


def test_only_the_wanted_request_is_drawn(tmp_path: Path) -> None:
    """`--request` leaves the fleet and that request; an unknown one is answered with near ones."""
    log = short_handoff(first_answered())
    _, html = drawn(log, tmp_path / "x", "--request", TWO)
    assert [one[0] for one in data_of(html)["requests"]] == [TWO]
    assert drawn(log, tmp_path / "y", "--request", "nobody")[0] == 1


def test_a_log_without_entries_is_drawn(tmp_path: Path) -> None:
    """An empty timeline is a page, not an error."""
    path = write_log(tmp_path / "x", [])
    assert cli.run(["timeline", str(path), "--output", str(tmp_path / "x.html")]) == 0
    assert data_of((tmp_path / "x.html").read_text())["events"] == []


@pytest.mark.parametrize("flags", [("--limit", "0"), ("--limit", "x")])
def test_a_limit_below_one_is_a_usage_error(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Nothing is written."""
    code, html = drawn(first_answered(), tmp_path / "x", *flags)
    assert (code, html) == (2, "")


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is exit code 5, and no page is written."""
    path = tmp_path / "x"
    path.write_bytes(b"nonsense\n")
    assert cli.run(["timeline", str(path), "--output", str(tmp_path / "y")]) == 5
    assert capsys.readouterr().err.startswith("custody: ")
    assert not (tmp_path / "y").exists()


# --- The trace --------------------------------------------------------------------------------


def traced(log: Any) -> list[Any]:
    """The packets of the trace file."""
    trace = trace_class().FromString(perfetto(log.entries, exposures(log.entries)))
    return list(trace.packet)


def test_the_trace_has_a_track_for_each_engine_and_request() -> None:
    """Tracks are named after scheduler, engines and requests, and each event has one."""
    packets = traced(first_answered())
    names = {
        p.track_descriptor.uuid: p.track_descriptor.name for p in packets if p.track_descriptor.uuid
    }
    assert {"scheduler", "p0/1/0", "d0/1/0", ONE} <= set(names.values())
    events = [p.track_event for p in packets if p.track_event.type]
    assert all(event.track_uuid in names for event in events)
    types = [event.type for event in events]
    assert types.count(SLICE_BEGIN) == types.count(SLICE_END) == 3
    assert types.count(INSTANT) == len(first_answered().entries)


def test_an_arrow_runs_from_each_transfer_to_decode() -> None:
    """Every flow that begins ends, at Verified or at the answer; a foreign read is one more."""
    packets = [p.track_event for p in traced(short_handoff(first_answered()))]
    begun = [(flow, e.name) for e in packets for flow in e.flow_ids]
    ended = [(flow, e.name) for e in packets for flow in e.terminating_flow_ids]
    assert sorted(flow for flow, _ in begun) == sorted(flow for flow, _ in ended)
    assert {name for _, name in begun} == {"Transferred"}
    assert {name for _, name in ended} == {"Verified", "Finished"}


def test_the_verb_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--perfetto` writes the trace beside the page, and `--json` says what was written."""
    trace = tmp_path / "x.pftrace"
    capsys.readouterr()
    code, html = drawn(first_answered(), tmp_path / "x", "--perfetto", str(trace), "--json")
    said = json.loads(capsys.readouterr().out)
    assert (code, said["drawn"], said["bytes"]) == (0, said["entries"], len(html.encode()))
    assert trace_class().FromString(trace.read_bytes()).packet


def test_what_a_limit_leaves_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page that lacks entries says how to see them; a whole one has nothing to say."""
    drawn(first_answered(), tmp_path / "whole")
    assert "--limit" not in capsys.readouterr().err
    drawn(first_answered(), tmp_path / "part", "--limit", "3")
    assert "--limit draws more" in capsys.readouterr().err
