"""`custody metrics`: of a log, of a running scheduler, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.digests import keyed_digest
from engine.scheduler import Scheduler
from engine.store import Append, Stored
from lifecycle.decide import Limits
from lifecycle.events import Released
from lifecycle.tally import Tally
from tests import handmade
from tests.serving import deployment
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_metrics_live import busy, from_the_log
from tests.tiny import tiny_llama
from transport import cli
from transport.admin_service import status
from transport.jsonlines import jsonlines
from transport.metrics_text import document, exposition
from transport.pb import lifecycle_pb2
from transport.scheduler_owner import OwnerSettings, SchedulerOwner
from transport.status_text import status_lines
from transport.stores.memory import MemoryStore

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A log in which one request went the whole way and another was refused."""
    log = handmade.decoding(handmade.Log()).add(handmade.finished())
    log.add(Released(handmade.SOURCE), Released(handmade.DESTINATION))
    log.add(handmade.rejected(), request=handmade.TWO)
    return write_log(tmp_path / "good.jsonl", log.entries)


def test_a_log_is_counted(good: Path, capsys: Capsys) -> None:
    """Standard output is the text form and nothing else."""
    assert cli.run(["metrics", str(good)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    counted = from_the_log(said.out)
    assert counted["custody_requests_total[('outcome', 'finished'), ('reason', 'stop')]"] == 1
    assert counted["custody_requests_total[('outcome', 'rejected'), ('reason', 'queue_full')]"] == 1
    assert "custody_queued_requests" not in said.out


def test_json_holds_what_the_text_holds(good: Path, capsys: Capsys) -> None:
    """A line for each metric, with its kind, its help and every sample."""
    cli.run(["metrics", str(good)])
    text = capsys.readouterr().out
    assert cli.run(["metrics", "--json", str(good)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == document(text)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert sum(len(one["samples"]) for one in lines) == len(samples)
    (requests,) = (one for one in lines if one["name"] == "custody_requests_total")
    assert requests["type"] == "counter"
    assert {"name", "labels", "value"} == set(requests["samples"][0])


def test_illegal_entries_are_not_counted_and_change_the_exit_code(
    tmp_path: Path, capsys: Capsys
) -> None:
    """As a replay judges them: 1, and a word on standard error."""
    log = handmade.decoding(handmade.Log())
    illegal = log.entry(handmade.destination(grant=handmade.GROWTH))
    path = write_log(tmp_path / "bad.jsonl", [*log.entries, (len(log.entries) + 1, illegal)])
    assert cli.run(["metrics", str(path)]) == 1
    said = capsys.readouterr()
    assert from_the_log(said.out)["custody_grants_total[('purpose', 'destination')]"] == 1
    assert "1 request with a violation" in said.err


def test_a_log_with_something_missing_says_so(tmp_path: Path, capsys: Capsys) -> None:
    """Exit code 5, and what there is is counted."""
    log = handmade.decoding(handmade.Log())
    path = write_log(tmp_path / "part.jsonl", log.entries, complete=False)
    assert cli.run(["metrics", str(path)]) == 5
    said = capsys.readouterr()
    assert from_the_log(said.out)["custody_attempts_total[('attempt', 'first')]"] == 1
    assert "incomplete" in said.err


def test_another_systems_log_is_counted_as_it_stands(tmp_path: Path, capsys: Capsys) -> None:
    """What it did counts, whatever our rules make of it."""
    log = handmade.decoding(handmade.Log())
    illegal = log.entry(handmade.destination(grant=handmade.GROWTH))
    stored = [Stored(n, e) for n, e in [*log.entries, (len(log.entries) + 1, illegal)]]
    lines = list(jsonlines(stored, complete=True))
    header = json.loads(lines[0]) | {"source": "toy", "foreign": True}
    path = tmp_path / "foreign.jsonl"
    path.write_text(json.dumps(header) + "\n" + "".join(lines[1:]))
    assert cli.run(["metrics", str(path)]) in {1, 5}
    said = capsys.readouterr()
    assert from_the_log(said.out)["custody_grants_total[('purpose', 'destination')]"] == 2


@pytest.mark.anyio
async def test_a_captured_log_gives_what_the_scheduler_prints(
    tmp_path: Path, capsys: Capsys
) -> None:
    """The verb on the live scheduler and the verb on its exported log agree on every series."""
    async with deployment(tiny_llama(tmp_path / "tiny")) as here:
        await busy(here)
        capsys.readouterr()
        code = await anyio.to_thread.run_sync(
            cli.run, ("metrics", "--scheduler", here.address, "--json")
        )
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        code += await anyio.to_thread.run_sync(cli.run, ("metrics", "--scheduler", here.address))
        live = capsys.readouterr().out
        path = tmp_path / "captured.jsonl"
        path.write_text("".join(jsonlines(list(here.store.tail(1)), complete=True)))
    assert code == 0
    capsys.readouterr()
    assert cli.run(["metrics", str(path)]) == 0
    assert from_the_log(live) == from_the_log(capsys.readouterr().out)
    assert any(one["name"] == "custody_queued_requests" for one in lines)


def test_a_replay_says_how_requests_ended(tmp_path: Path, capsys: Capsys) -> None:
    """By the same tally: outcomes with their reasons, and pages that are out of circulation."""
    log = handmade.closed(handmade.Log()).add(handmade.rejected(), request=handmade.TWO)
    path = write_log(tmp_path / "log.jsonl", log.entries)
    assert cli.run(["replay", str(path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "ends: aborted (client_cancel) 1, rejected (queue_full) 1" in said
    assert "pages in quarantine (no_proof): 3" in said
    assert cli.run(["replay", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ends"] == {"aborted (client_cancel)": 1, "rejected (queue_full)": 1}
    assert found["quarantined_pages"] == {"no_proof": 3}


def test_the_status_says_why_pages_are_in_quarantine() -> None:
    """A scheduler that finds quarantined pages in its log shows how many there are of each cause."""
    store = MemoryStore()
    log = handmade.closed(handmade.Log())
    store.take_epoch()
    store.append_batch([Append(e.request, e.sequence, (e,)) for _, e in log.entries])
    core = Scheduler(limits=Limits(context_tokens=64), epoch=2, digest=keyed_digest(b"k"))
    settings = OwnerSettings(
        model="m",
        model_context=64,
        context_wanted=None,
        tokenizer="t",
        digest_key=b"k",
        tenant_salt=b"s",
        lease_ns=1,
        reader_tokens_max=8,
    )
    owner = SchedulerOwner(core, store, settings, now=lambda: 99, monotonic=lambda: 99)
    owner.resume()
    said = status(owner)
    owner.close()
    (decode,) = (one for one in said.engines if one.engine == handmade.DECODE.engine)
    (quarantined,) = decode.ranks[0].quarantined
    assert (quarantined.cause, quarantined.pages) == (lifecycle_pb2.QUARANTINE_CAUSE_NO_PROOF, 3)
    assert decode.ranks[0].pages.quarantined == 3
    assert any("3 quarantined (3 no_proof)" in line for line in status_lines(said))


def test_no_counts_and_no_log_look_alike() -> None:
    """An empty tally is a whole document as well."""
    names = [one["name"] for one in document(exposition(Tally().families()))]
    assert "custody_events_total" in names
