"""`custody simulate`: formats of traces, the incident's refusals at scale, and oracles that can fail."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest

from engine import simulator_engines, simulator_presets
from engine.decode import DecodeCore
from engine.effects import DecodeSlice, Payload
from engine.holdings import Holding
from engine.simulator import Simulation, length_digest
from engine.simulator_clock import Clock, Wire
from engine.simulator_memory import TracedMemory
from engine.simulator_presets import PRESETS, incident
from engine.simulator_report import Spread
from engine.simulator_values import SECOND, Cluster, Costs, Goals, TraceRequest
from engine.world_values import Found
from lifecycle.ids import EngineId, PageRange, Party, RequestId, TokenRange, request_id
from lifecycle.replay import replay
from transport import cli
from transport.commands_simulate import Preset
from transport.simulate_traces import UnreadableTrace, find_trace, read_trace

STATED = {
    ("mooncake_conversation.jsonl", "incident-128k"): (0, 123, 11_908),
    ("mooncake_conversation.jsonl", "incident-64k"): (257, 262, 11_512),
    ("mooncake_synthetic.jsonl", "incident-192k"): (0, 10, 3_983),
    ("azure_llm_code_2023.csv", "incident-8k"): (0, 867, 7_952),
    ("azure_llm_conv_2023.csv", "incident-8k"): (1, 54, 19_311),
}
"""Over the context, over the prefill pool, servable: counted on the published files."""

MOONCAKE = '{"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.9799600,4808,10\n"
    "2023-11-17 00:00:00.0319600,110,27\n"
)


def made_trace(seed: int, count: int, context: int) -> tuple[TraceRequest, ...]:
    """Requests of all sizes, some of them larger than anything offered."""
    chance = random.Random(seed)
    return tuple(
        TraceRequest(
            arrival_ns=chance.randrange(count * 100_000_000),
            prompt_tokens=int(context * chance.random() ** 3 * 1.3) + 1,
            new_tokens=chance.randrange(1, 60),
        )
        for _ in range(count)
    )


def expected_refusals(requests: tuple[TraceRequest, ...], cluster: Cluster) -> dict[str, int]:
    """The refusals by arithmetic alone, in the order in which they are looked for."""
    codes = {"context_length_exceeded": 0, "kv_pool_capacity_exceeded": 0}
    for asked in requests:
        if asked.prompt_tokens + asked.new_tokens > cluster.context_tokens:
            codes["context_length_exceeded"] += 1
        elif asked.prompt_tokens - 1 > cluster.prefill_pool_tokens:
            codes["kv_pool_capacity_exceeded"] += 1
    return {code: number for code, number in codes.items() if number}


def replayed(requests: tuple[TraceRequest, ...], cluster: Cluster) -> Simulation:
    """A simulation that has served the requests."""
    simulation = Simulation(cluster, Costs())
    simulation.run(requests)
    return simulation


# --- traces -----------------------------------------------------------------------------------


def test_a_mooncake_line_is_milliseconds_and_two_lengths(tmp_path: Path) -> None:
    """Arrival in nanoseconds, prompt and new tokens; hashes of blocks are not used."""
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE + "\n")
    assert read_trace(path) == (TraceRequest(27_000_000, 6758, 500),)


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    """Wall times of seven digits become nanoseconds since the first row, over midnight too."""
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    assert read_trace(path) == (TraceRequest(0, 4808, 10), TraceRequest(52_000_000, 110, 27))
    assert read_trace(path, limit=1) == (TraceRequest(0, 4808, 10),)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("nonsense\n", 1),
        (MOONCAKE + '{"timestamp": 1}\n', 2),
        (MOONCAKE + "[1, 2]\n", 2),
        (MOONCAKE.replace("27", '"x"'), 1),
        (MOONCAKE.replace("27", "-1"), 1),
        (MOONCAKE.replace("27", "NaN"), 1),
        (MOONCAKE.replace("6758", "-6758"), 1),
        (MOONCAKE.replace("6758", "1e400"), 1),
        (MOONCAKE.replace("6758", str(1 << 40)), 1),
        (AZURE + "2023-11-17 00:00:00,x,1\n", 4),
        (AZURE + "yesterday,1,1\n", 4),
        (AZURE + "2023-11-17 00:00:00\n", 4),
        ("TIMESTAMP,Tokens\n2023-11-17 00:00:00,1\n", 2),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, line: int) -> None:
    """File, line and reason; nothing is skipped, because numbers over half a trace would lie."""
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(UnreadableTrace) as raised:
        read_trace(path)
    assert raised.value.line == line


def test_a_binary_file_is_no_trace(tmp_path: Path) -> None:
    """It is refused as such."""
    path = tmp_path / "t"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableTrace):
        read_trace(path)


def test_a_trace_is_found_by_path_or_in_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path comes first, then the folder of CUSTODY_TRACES; otherwise both places are named."""
    (tmp_path / "t.jsonl").write_text(MOONCAKE)
    monkeypatch.setenv("CUSTODY_TRACES", str(tmp_path))
    assert find_trace(Path("t.jsonl")) == tmp_path / "t.jsonl"
    assert find_trace(tmp_path / "t.jsonl") == tmp_path / "t.jsonl"
    assert cli.run(["simulate", "--trace=absent.jsonl", "--preset=incident-8k"]) == 5
    assert str(tmp_path) in capsys.readouterr().err
    monkeypatch.delenv("CUSTODY_TRACES")
    assert cli.run(["simulate", "--trace=absent.jsonl", "--preset=incident-8k"]) == 5
    assert "CUSTODY_TRACES" in capsys.readouterr().err


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [512, 1_024])
def test_refusals_are_exactly_those_of_arithmetic(context: int) -> None:
    """Over the context and over the prefill pool are told apart; everybody else is answered."""
    cluster = attrs.evolve(incident(context), decode_pool_tokens=4 * context, growth_tokens=16)
    requests = made_trace(context, 300, context)
    summary = replayed(requests, cluster).summary(Goals())
    refused = expected_refusals(requests, cluster)
    assert summary.rejected == refused
    assert len(refused) == 2
    assert summary.finished == len(requests) - sum(refused.values())
    served = [r for r in requests if r.prompt_tokens - 1 <= cluster.prefill_pool_tokens]
    fits = [r for r in served if r.prompt_tokens + r.new_tokens <= context]
    assert summary.tokens == sum(r.new_tokens for r in fits)
    assert (summary.handed_off, summary.foreign_reads) == (0, 0)
    assert summary.pages_compared > 0


def test_a_prompt_of_one_token_more_than_the_pool_is_the_first_that_is_refused() -> None:
    """Prefill stores the KV of tokens 0 to n-2, so n-1 tokens have to fit."""
    cluster = incident(1_024)
    pool = cluster.prefill_pool_tokens // 2 * 2
    fits, over = (TraceRequest(0, pool + extra, 1) for extra in (1, 2))
    assert replayed((fits,), cluster).summary(Goals()).finished == 1
    assert replayed((over,), cluster).summary(Goals()).rejected == {"kv_pool_capacity_exceeded": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("file", "preset"), STATED)
def test_the_published_traces_are_refused_as_stated(file: str, preset: str) -> None:
    """Every refusal of the whole trace, by kind, and a share of what is served.

    With CUSTODY_TRACES_WHOLE everything is served, which takes minutes. Without CUSTODY_TRACES
    the lengths are made here, as many of each kind as the files hold.
    """
    context, pool, servable = STATED[file, preset]
    cluster = PRESETS[preset]
    if folder := os.environ.get("CUSTODY_TRACES"):
        requests = read_trace(Path(folder) / file)
    else:
        requests = stand_in(cluster, context, pool, servable)
    if not os.environ.get("CUSTODY_TRACES_WHOLE"):
        requests = refused_and_some(requests, cluster, every=60)
    served = sum(fits(request, cluster) for request in requests)
    summary = replayed(requests, cluster).summary(Goals())
    wanted = {"context_length_exceeded": context, "kv_pool_capacity_exceeded": pool}
    assert summary.rejected == {code: number for code, number in wanted.items() if number}
    assert summary.finished == served
    assert (summary.handed_off, summary.foreign_reads, summary.requeued) == (0, 0, 0)
    assert served > servable // 100


def fits(request: TraceRequest, cluster: Cluster) -> bool:
    """Whether arithmetic lets it in."""
    total = request.prompt_tokens + request.new_tokens
    small = request.prompt_tokens - 1 <= cluster.prefill_pool_tokens
    return total <= cluster.context_tokens and small


def refused_and_some(
    requests: tuple[TraceRequest, ...], cluster: Cluster, *, every: int
) -> tuple[TraceRequest, ...]:
    """All that is refused, and one of so many of the others."""
    some = [request for request in requests if fits(request, cluster)][::every]
    return tuple(request for request in requests if not fits(request, cluster)) + tuple(some)


def stand_in(cluster: Cluster, context: int, pool: int, servable: int) -> tuple[TraceRequest, ...]:
    """As many requests of each kind."""
    beyond, held = cluster.context_tokens, cluster.prefill_pool_tokens
    return (
        *(TraceRequest(n * 10**9, beyond + n, 1) for n in range(context)),
        *(TraceRequest(n * 10**9, held + 2 + n, 1) for n in range(pool)),
        *(TraceRequest(n * 10**8, held * n // servable + 1, 20) for n in range(servable)),
    )


# --- the run ----------------------------------------------------------------------------------


def test_the_log_of_a_replayed_trace_replays_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was simulated is a log as any other: `custody replay` finds nothing wrong with it."""
    trace, log = tmp_path / "t.jsonl", tmp_path / "log.jsonl"
    line = '{{"timestamp": {}, "input_length": {}, "output_length": 40}}\n'
    sizes = (300, 6_000, 8_190, 20)
    trace.write_text("".join(line.format(number, size) for number, size in enumerate(sizes)))
    command = ["simulate", f"--trace={trace}", "--preset=incident-8k", f"--log={log}", "--json"]
    assert cli.run(command) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert value["rejected"] == {"context_length_exceeded": 1, "kv_pool_capacity_exceeded": 1}
    assert (value["requests"], value["finished"], value["tokens"]) == (4, 2, 80)
    assert value["first_token_s"]["median"] > 0
    assert value["held_s"].keys() == {"destination", "source"}
    assert cli.run(["replay", str(log)]) == 0
    assert "clean" in capsys.readouterr().out


def test_the_same_trace_gives_the_same_log() -> None:
    """Nothing but the trace and the cluster decides what happens, and when."""
    logs = []
    for _ in range(2):
        kept: list[Any] = []
        cluster = attrs.evolve(incident(512), decode_engines=2)
        simulation = Simulation(cluster, Costs(), keep=lambda *both, into=kept: into.append(both))
        simulation.run(made_trace(5, 60, 400))
        logs.append(kept)
    assert logs[0] == logs[1]
    assert replay(logs[0]).clean


def test_a_decode_pool_that_cannot_hold_all_at_once_serves_them_one_after_the_other() -> None:
    """Want of pages is waited out or requeued, never refused, and all answers are whole."""
    cluster = Cluster(
        context_tokens=512,
        prefill_pool_tokens=512,
        decode_pool_tokens=640,
        page_tokens=4,
        growth_tokens=8,
    )
    requests = tuple(TraceRequest(n, 100, 120) for n in range(12))
    summary = replayed(requests, cluster).summary(Goals())
    assert (summary.finished, summary.tokens) == (12, 12 * 120)
    assert summary.requeued > 0


def test_more_load_makes_clients_wait_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--rate` brings the same requests faster, and `--requests` fewer of them."""
    trace = tmp_path / "t.jsonl"
    line = '{{"timestamp": {}, "input_length": 4000, "output_length": 3}}\n'
    trace.write_text("".join(line.format(2_000 * number) for number in range(40)))
    waited = {}
    for rate in (1, 50):
        command = ["simulate", f"--trace={trace}", "--preset=sound-8k", f"--rate={rate}"]
        assert cli.run([*command, "--prefill-engines=1", "--requests=30", "--json"]) == 0
        value = json.loads(capsys.readouterr().out)
        assert value["finished"] == 30
        waited[rate] = value["first_token_s"]["p90"]
    assert waited[50] > 2 * waited[1]


@pytest.mark.parametrize(
    "flag", ["--requests=0", "--rate=0", "--rate=nan", "--token-goal=-1", "--decode-engines=0"]
)
def test_flags_that_make_no_sense_are_refused(tmp_path: Path, flag: str) -> None:
    """They are usage errors."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(MOONCAKE)
    assert cli.run(["simulate", f"--trace={trace}", "--preset=sound-8k", flag]) == 2


def test_every_preset_can_be_named() -> None:
    """The command knows the presets by name before it loads them."""
    assert set(get_args(Preset)) == set(PRESETS)


# --- its parts --------------------------------------------------------------------------------


def test_what_was_asked_for_first_comes_first_of_one_moment() -> None:
    """Calls of one nanosecond keep their order, and a call for the past comes at once."""
    clock, seen = Clock(), list[str]()
    clock.at(5, lambda: seen.append("a"))
    clock.at(5, lambda: seen.append("b"))
    clock.at(1, lambda: clock.at(0, lambda: seen.append("late")))
    while clock.step():
        pass
    assert (seen, clock.now_ns, clock.step()) == (["late", "a", "b"], 5, False)


def test_a_wire_keeps_its_order_and_its_delay() -> None:
    """Items of one moment arrive together, later ones later."""
    clock, seen = Clock(), list[tuple[int, list[int]]]()
    wire: Wire[int] = Wire(
        clock, delay_ns=10, deliver=lambda items: seen.append((clock.now_ns, items))
    )
    wire.send(1)
    wire.send(2)
    clock.at(4, lambda: wire.send(3))
    while clock.step():
        pass
    assert seen == [(10, [1, 2]), (14, [3])]


def test_percentiles_are_those_of_nearest_rank() -> None:
    """Of a hundred values the median is the fiftieth; of none it is 0."""
    assert Spread.of(range(1, 101)) == Spread(100, 50, 90, 99)
    assert Spread.of(()) == Spread(0, 0, 0, 0)


# --- oracles ----------------------------------------------------------------------------------


class KeepsOne(DecodeCore):
    """A page is held for nobody, for ever."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.take(1)


class Forgets(DecodeCore):
    """No page ever comes home."""

    def _give_back(self, holding: Holding) -> None:
        return


@pytest.mark.parametrize(
    ("core", "finding"), [(KeepsOne, "conservation"), (Forgets, "leak")], ids=["kept", "forgotten"]
)
def test_a_page_that_stays_behind_ends_the_replay_with_a_finding(
    core: type[DecodeCore],
    finding: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command waits for no page for ever: it names the oracle, keeps the log and exits 1."""
    monkeypatch.setattr(simulator_engines, "DecodeCore", core)
    short = attrs.evolve(PRESETS["sound-8k"], deadline_ns=20 * SECOND, queue_ns=SECOND)
    monkeypatch.setattr(simulator_presets, "PRESETS", {"sound-8k": short})
    trace, log = tmp_path / "t.jsonl", tmp_path / "log.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 99, "output_length": 3}\n')
    command = ["simulate", f"--trace={trace}", "--preset=sound-8k", f"--log={log}"]
    assert cli.run(command) == 1
    assert f"custody: {finding}: " in capsys.readouterr().err
    assert log.is_file()


REQUEST, OTHER = request_id(epoch=1, serial=1), request_id(epoch=1, serial=2)


def holding_core(pages: int = 8) -> tuple[DecodeCore, TracedMemory, Callable[..., DecodeSlice]]:
    """A decode core that holds pages 0 and 1 for a request's first attempt."""
    party = Party(EngineId("d"), 1, 0)
    core = DecodeCore(
        party,
        pages=pages,
        page_tokens=2,
        mint=lambda: 7,
        batch=4,
        growth_tokens=2,
        digest=length_digest,
    )
    memory = TracedMemory(2)
    memory.add(party, pages)
    hold(core, REQUEST, (PageRange(0, 2),))

    def part(position: int, index: int = 1, request: RequestId = REQUEST) -> DecodeSlice:
        return DecodeSlice(request, 1, position, index, (PageRange(0, 2),), (7,))

    return core, memory, part


def hold(core: DecodeCore, request: RequestId, pages: tuple[PageRange, ...]) -> None:
    """Let the core's own books give pages to a request."""
    from engine.decode import DecodeJob
    from lifecycle.events import Purpose

    core.take(sum(run.count for run in pages))
    job = DecodeJob(request, 1, Payload((1, 2, 3)))
    core.hold(job, Purpose.GROWTH, pages, TokenRange(0, 4), kind="kv")


def test_a_page_that_nobody_wrote_for_the_request_is_seen() -> None:
    """A read finds pages that were never written, or written by somebody else."""
    core, memory, part = holding_core()
    with pytest.raises(Found, match="observed-foreign"):
        memory.read(core, part(1), 2)
    memory.append(core, part(0))
    memory.read(core, part(1), 2)
    with pytest.raises(Found, match="observed-foreign"):
        memory.read(core, part(3), 4)
    hold(core, OTHER, (PageRange(2, 1),))
    with pytest.raises(Found, match="observed-foreign"):
        memory.read(core, part(1, request=OTHER), 2)
    assert memory.foreign_reads == 3


def test_a_step_on_pages_that_are_not_held_is_seen() -> None:
    """An attempt without a holding may not read, whatever the pages bear."""
    core, memory, part = holding_core()
    with pytest.raises(Found, match="step-on-unheld"):
        memory.read(core, part(1, request=OTHER), 2)
