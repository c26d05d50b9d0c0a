"""A log whose beginning is dropped: what stands for it, what it starts from, what it still says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import attrs
import grpc
import pytest

from engine.store import PositionOutOfRange, Stored, StoreDamaged
from lifecycle.events import Entry, FenceScope, Finished, Released, Role
from lifecycle.history import History
from lifecycle.ids import FLEET, RequestId
from lifecycle.replay import Replayer
from lifecycle.snapshot import Snapshot, restore
from lifecycle.state import Phase
from tests.driver import DECODE, PREFILL, Driver, Sizes
from tests.log_files import read_capture, read_log
from tests.serving import Deployment, ask, deployment
from tests.tiny import tiny_llama
from transport import cli, scheduler_shell
from transport.forensics_read import open_capture
from transport.jsonlines import UnreadableLog
from transport.log_index import LogIndex
from transport.pb import admin_pb2, generation_pb2, log_pb2
from transport.stores import segment_files
from transport.stores.disk import Disk
from transport.stores.retention import count_to_drop, fold
from transport.stores.retention_limits import Retention
from transport.stores.segments import SegmentStore
from transport.stores.snapshot_file import newest_snapshot, snapshot_paths

Log = list[tuple[int, Entry]]
OVER = {Phase.CLOSED, Phase.REJECTED}


def eventful() -> Driver:
    """Answers, a requeue, a lost engine with its grants, a cancel, and requests that stay open."""
    driver = Driver(Sizes(pages=12)).pair().run()
    for number in range(6):
        driver.submit(7, 10 + number)
    driver.run()
    moved = driver.submit()
    driver.run_until(lambda: driver.phase(moved) is Phase.DECODING)
    cancelled = driver.submit()
    driver.kill(DECODE)
    driver.join(Role.DECODE, attrs.evolve(DECODE, incarnation=2))
    driver.run_until(lambda: driver.phase(cancelled) is Phase.DECODING)
    driver.cancel(cancelled)
    driver.submit(7, 30)
    for _ in range(25):
        driver.advance()
    driver.submit(8, 20)
    for _ in range(12):
        driver.advance()
    return driver


def _granted_twice(driver: Driver, request: RequestId) -> bool:
    return "Reserved" in driver.events(request)[2:]


def quarantined() -> Driver:
    """A writer that is lost and cannot be shut out: the owner lives on without some pages."""
    driver = Driver(Sizes(pages=24, fence_scope=FenceScope.NONE)).pair().run()
    for _ in range(3):
        driver.submit(7, 10)
        driver.run()
        request = driver.submit(7, 10)
        driver.run_until(partial(_granted_twice, driver, request))
        prefill = next(p for p in driver.cores if p.engine == PREFILL.engine)
        driver.kill(prefill)
        driver.run()
        driver.tick(driver.now_ns + 2_000_000)
        driver.join(Role.PREFILL, attrs.evolve(prefill, incarnation=prefill.incarnation + 1))
        driver.run()
    return driver


@pytest.fixture(scope="module")
def driver() -> Driver:
    return eventful()


def last_positions(log: Log) -> dict[RequestId, int]:
    return {entry.request: position for position, entry in log}


def snapshot_at(log: Log, border: int, before: Snapshot | None = None) -> Snapshot:
    last = last_positions(log)
    start = 0 if before is None else before.position
    entries = [Stored(p, e) for p, e in log if start < p <= border]
    return fold(before, entries, border=border, is_last=lambda r, p: last[r] <= p)


def state_of(log: Log, *, start: Snapshot | None = None) -> History:
    history = History() if start is None else restore(start)
    for position, entry in log:
        if start is None or position > start.position:
            assert history.apply(entry) is None, (position, entry)
    return history


# --- the fold ---------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [eventful, quarantined])
def test_a_snapshot_and_the_rest_come_to_the_same_as_the_whole(made: Callable[[], Driver]) -> None:
    """At every border, and at the end: the same fleet, pages, time, and requests not over."""
    log = made().log
    whole, before = state_of(log), History()
    dropped = 0
    for border in range(1, len(log) + 1):
        snapshot = snapshot_at(log, border)
        assert before.apply(log[border - 1][1]) is None
        for rest, wanted in (
            (restore(snapshot), before),
            (state_of(log, start=snapshot), whole),
        ):
            assert rest.fleet == wanted.fleet
            assert rest.ledger == wanted.ledger
            assert rest.time_ns == wanted.time_ns
            missing = wanted.requests.keys() - rest.requests.keys()
            assert rest.requests == {r: s for r, s in wanted.requests.items() if r not in missing}
            assert {wanted.requests[r].phase for r in missing} <= OVER
            dropped += len(missing)
    assert dropped > 100


def test_pages_in_quarantine_are_not_forgotten() -> None:
    """Where the log above is cut there are pages that a living owner lacks."""
    history = state_of(quarantined().log)
    assert sum(account.quarantined_pages for account in history.ledger.values()) > 0


def test_snapshots_of_snapshots_are_the_same(driver: Driver) -> None:
    """It makes no difference in how many steps a beginning was dropped."""
    log = driver.log
    before: Snapshot | None = None
    for border in range(5, len(log), 7):
        before = snapshot_at(log, border, before)
        assert before == snapshot_at(log, border)


def test_a_snapshot_is_small(driver: Driver) -> None:
    """Of requests that are over nothing is left."""
    log = driver.log
    snapshot = snapshot_at(log, len(log))
    kept = {entry.request for _, entry in snapshot.entries}
    whole = state_of(log)
    assert kept - {FLEET} == {r for r, s in whole.requests.items() if s.phase not in OVER}
    assert len(snapshot.entries) < len(log) / 2


# --- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_max", "before_ns", "count"),
    [
        (None, None, 0),
        (100, None, 0),
        (29, None, 1),
        (1, None, 3),
        (None, 25, 1),
        (None, 30, 1),
        (None, 31, 2),
        (None, 1000, 3),
        (29, 31, 2),
    ],
)
def test_the_oldest_go_and_the_last_stays(
    bytes_max: int | None, before_ns: int | None, count: int
) -> None:
    """A segment goes when the log is too large, or when all of it is older than the limit."""
    begins: list[int | None] = [10, 20, 30, 40]
    found = count_to_drop(
        [10, 10, 10, 5], begins.__getitem__, bytes_max=bytes_max, before_ns=before_ns
    )
    assert found == count


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("30d", Retention(age_ns=30 * 86_400 * 10**9)),
        ("12h", Retention(age_ns=12 * 3600 * 10**9)),
        ("20GiB", Retention(size_bytes=20 << 30)),
        ("90m, 512MiB", Retention(age_ns=90 * 60 * 10**9, size_bytes=512 << 20)),
    ],
)
def test_a_limit_is_an_age_or_a_size_or_both(text: str, wanted: Retention) -> None:
    """Numbers bear their units."""
    assert Retention.parse(text) == wanted


@pytest.mark.parametrize("text", ["", "30", "d", "0d", "30d,1d", "-1d", "1.5h", "30s", "30d;1GiB"])
def test_other_limits_are_refused(text: str) -> None:
    """Nothing is guessed about how much history may go."""
    with pytest.raises(ValueError, match="is no age and no size"):
        Retention.parse(text)


# --- the store --------------------------------------------------------------------------------


def filled(folder: Path, log: Log, *, disk: Disk | None = None) -> SegmentStore:
    """The log in segments of a few entries each."""
    store = SegmentStore(folder, segment_bytes=1500, disk=disk)
    for _, entry in log:
        store.append(entry.request, entry.sequence, [entry])
    store.flush()
    return store


def keep_open(log: Log) -> set[RequestId]:
    return {r for r, s in state_of(log).requests.items() if s.phase not in OVER}


def drop(store: SegmentStore, log: Log, bytes_max: int = 3000) -> int:
    return store.retain(bytes_max=bytes_max, before_ns=None, keep=keep_open(log))


def the_rest(log: Log, first: int) -> Sequence[Stored]:
    return tuple(Stored(p, e) for p, e in log if p >= first)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_log_goes_on_without_its_beginning(tmp_path: Path, driver: Driver, sealed: bool) -> None:
    """Reads, appends and another start see the rest, and the whole of every open request."""
    log = driver.log
    store = filled(tmp_path, log)
    if sealed:
        store.seal()
    segments = len(segment_files.segment_paths(tmp_path))
    assert drop(store, log) > 0
    first = store.first_position
    assert 1 < first <= len(log)
    assert len(segment_files.segment_paths(tmp_path)) < segments
    for again in range(2):
        assert tuple(store.tail(first)) == the_rest(log, first)
        with pytest.raises(PositionOutOfRange):
            store.tail(first - 1)
        for request in (*keep_open(log), FLEET):
            assert store.read(request) == tuple(
                Stored(p, e) for p, e in log if e.request == request
            )
        assert store.snapshot == snapshot_at(log, first - 1)
        assert store.last_position == len(log)
        if not again:
            store.close()
            store = SegmentStore(tmp_path)
    last = log[-1][1]
    sequence = store.read(last.request)[-1].entry.sequence + 1
    assert sequence == last.sequence + 1
    assert store.append(last.request, last.sequence, [last]) == len(log)
    store.close()


def test_beginnings_are_dropped_again_and_again(tmp_path: Path, driver: Driver) -> None:
    """There is one snapshot, and no more files than the limit allows."""
    log = driver.log
    store = SegmentStore(tmp_path, segment_bytes=1500)
    for number, (_, entry) in enumerate(log):
        store.append(entry.request, entry.sequence, [entry])
        if number % 20 == 19:
            store.flush()
            store.seal()
            # Whoever appends knows who may still be extended: here all that goes on later.
            later = {e.request for _, e in log[number + 1 :]}
            store.retain(bytes_max=3000, before_ns=None, keep=later)
            assert len(snapshot_paths(tmp_path)) <= 1
    sizes = [path.stat().st_size for path in segment_files.segment_paths(tmp_path)]
    assert sum(sizes) < 6000
    assert store.snapshot is not None
    rest = state_of(log, start=store.snapshot)
    assert rest.ledger == state_of(log).ledger
    store.close()


def test_a_drop_by_age_looks_at_the_entries_time(tmp_path: Path, driver: Driver) -> None:
    """What is kept begins no later than the limit."""
    log = driver.log
    store = filled(tmp_path, log)
    limit_ns = log[len(log) // 2][1].time_ns
    store.retain(bytes_max=None, before_ns=limit_ns, keep=keep_open(log))
    begins_ns = next(iter(store.tail(store.first_position))).entry.time_ns
    assert 1 < store.first_position <= len(log) // 2 + 1
    assert begins_ns < limit_ns
    store.close()


class Interrupted(Exception):
    """The process is killed."""


class DyingDisk(Disk):
    """A disk whose process is killed before the file call of that number, from `count` on."""

    def __init__(self) -> None:
        self.left: int | None = None

    def _call(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Interrupted
            self.left -= 1

    def write_at(self, handle: int, data: bytes | memoryview, *, offset: int) -> int:
        self._call()
        return super().write_at(handle, data, offset=offset)

    def sync(self, handle: int) -> None:
        self._call()
        super().sync(handle)

    def rename(self, old: Path, new: Path) -> None:
        self._call()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._call()
        super().remove(path)


def test_a_drop_that_is_killed_at_any_call_loses_nothing(tmp_path: Path, driver: Driver) -> None:
    """The next start finds the whole log, or the snapshot and the rest; what is left over goes."""
    log = driver.log
    firsts = set()
    for calls in range(100):
        folder, disk = tmp_path / str(calls), DyingDisk()
        store = filled(folder, log, disk=disk)
        disk.left = calls
        try:
            drop(store, log)
            ended = True
        except Interrupted:
            ended = False
        disk.left = None
        store.close()
        store = SegmentStore(folder)
        firsts.add(store.first_position)
        assert tuple(store.tail(store.first_position)) == the_rest(log, store.first_position)
        for request in keep_open(log):
            assert len(store.read(request)) == sum(e.request == request for _, e in log)
        paths = segment_files.segment_paths(folder)
        assert segment_files.first_position(paths[0]) == store.first_position
        assert len(snapshot_paths(folder)) == (store.first_position > 1)
        store.close()
        if ended:
            break
    assert ended
    assert len(firsts) == 2


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "renamed"])
def test_a_harmed_snapshot_is_told(tmp_path: Path, driver: Driver, harm: str) -> None:
    """Without its snapshot the rest has no beginning, and nobody invents one."""
    store = filled(tmp_path, driver.log)
    drop(store, driver.log)
    store.close()
    (path,) = snapshot_paths(tmp_path)
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "gone":
        path.unlink()
    else:
        path.rename(path.with_name(f"{1:020d}.snapshot"))
    with pytest.raises(StoreDamaged):
        SegmentStore(tmp_path)


def test_every_flipped_bit_of_a_snapshot_is_told(tmp_path: Path, driver: Driver) -> None:
    """The check sum covers every byte that means anything."""
    store = filled(tmp_path, driver.log)
    drop(store, driver.log)
    store.close()
    (path,) = snapshot_paths(tmp_path)
    content = path.read_bytes()
    for place in range(0, len(content) - 1, 13):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(StoreDamaged):
            newest_snapshot(tmp_path)


def test_a_reader_whom_a_drop_overtakes_is_told(tmp_path: Path, driver: Driver) -> None:
    """Files that it has listed are gone when it comes to them; who asks again reads the rest."""
    log = driver.log
    store = filled(tmp_path, log)
    with ExitStack() as stack:
        capture = open_capture(tmp_path, stack)
        drop(store, log)
        with pytest.raises(UnreadableLog, match="was removed while it was read; ask again"):
            read_capture(capture)
    file = read_log(tmp_path)
    assert file.entries == the_rest(log, store.first_position)
    assert file.snapshot == store.snapshot
    assert not file.complete
    store.close()


def test_an_iterator_never_takes_a_part_for_all(tmp_path: Path, driver: Driver) -> None:
    """What it has not given when the beginning is dropped is missed, with where the log begins."""
    store = filled(tmp_path, driver.log)
    found = store.tail(1)
    assert next(found).position == 1
    drop(store, driver.log)
    with pytest.raises(PositionOutOfRange) as caught:
        _ = [*found]
    assert caught.value.first == store.first_position
    store.close()


class Overtaken(SegmentStore):
    """Drops its beginning whenever somebody has begun to read it, once it is told to."""

    def __init__(self, folder: Path, log: Log) -> None:
        super().__init__(folder, segment_bytes=1500)
        self.log = log
        self.dropping = False

    def tail(self, position: int) -> Iterator[Stored]:
        found = super().tail(position)
        if self.dropping:
            drop(self, self.log)
        return found


@pytest.mark.anyio
@pytest.mark.parametrize("follow", [False, True])
async def test_a_tail_that_a_drop_overtakes_is_refused(
    tmp_path: Path, model: Path, driver: Driver, follow: bool
) -> None:
    """It never ends as if there were no more: the client is told where the log begins now."""
    filled(tmp_path, driver.log).close()
    store = Overtaken(tmp_path, driver.log)
    async with deployment(model, store=store, engines=False) as here:
        store.dropping = True
        call = here.log.Tail(log_pb2.TailRequest(from_position=1, follow=follow))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in call]
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert f"{store.first_position}" in str(caught.value.details())


# --- judging the rest -------------------------------------------------------------------------


def test_the_rest_is_judged_from_the_snapshot_on(driver: Driver) -> None:
    """A legal rest is clean, and a broken one is red by the rule that it breaks."""
    log = driver.log
    release = next(p for p, e in log if isinstance(e.event, Released) and p > len(log) // 2)
    snapshot = snapshot_at(log, release - 1)
    replayer = Replayer(snapshot=snapshot)
    for position, entry in log[snapshot.position :]:
        assert replayer.take(position, entry) is None
    assert replayer.report(whole=False).clean
    twice = Replayer(snapshot=snapshot)
    twice.take(*log[release - 1])
    violation = twice.take(*log[release - 1])
    assert violation is not None
    assert [e for _, e in log if isinstance(e.event, Finished)]


# --- the scheduler ----------------------------------------------------------------------------


def test_what_goes_on_behind_a_drop_stays_its_tenants(driver: Driver) -> None:
    """A request that is kept has its line; of one that is over nothing is left."""
    log = driver.log
    index = LogIndex()
    for position, entry in log:
        index.note(position, entry)
    first, *_, last = {e.request: None for _, e in log if e.request != FLEET}
    line = index.find(first)
    assert line is not None
    index.forget_before(len(log) + 1, {first})
    assert index.find(last) is None
    assert list(index.lines) == []
    index.note(len(log) + 1, next(e for _, e in log if e.request == first))
    assert index.find(first) is line
    assert line.tenant
    assert line.last_position == len(log) + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


async def answer(here: Deployment) -> str:
    """The id of a request that was answered whole."""
    wanted = generation_pb2.CompleteRequest(generation=ask())
    return str((await here.generation.Complete(wanted)).admission.request_id)


@pytest.mark.anyio
async def test_a_scheduler_starts_from_a_snapshot_and_says_what_is_missing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines come back, requests are served, and the log, and its export, name what is missing."""
    folder = tmp_path / "log"
    async with deployment(model, store=SegmentStore(folder, segment_bytes=2000)) as first:
        old = [await answer(first) for _ in range(8)]
        await first.tail_until(*["released"] * 2, request=old[-1])
    store = SegmentStore(folder, segment_bytes=2000)
    log = [(s.position, s.entry) for s in store.tail(1)]
    assert store.retain(bytes_max=4000, before_ns=None, keep=keep_open(log)) > 0
    begins = store.first_position
    async with deployment(model, store=store, engines=False) as here:
        for engine in (first.prefill, first.decode):
            engine.refused, engine.synced, engine.address = None, anyio.Event(), here.address
            here.tasks.start_soon(engine.run)
            await engine.synced.wait()
        new = await answer(here)
        await here.tail_until(*["released"] * 2, request=new)
        status = await here.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert status.log_first_position == begins
        assert all(e.ranks[0].pages.free == e.ranks[0].pages.capacity for e in status.engines)
        listed = await here.log.ListRequests(log_pb2.ListRequestsRequest())
        names = [one.request_id for one in listed.requests]
        assert new in names
        assert old[0] not in names
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.log.Tail(log_pb2.TailRequest(from_position=1)).read()
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert str(begins) in str(caught.value.details())
        capsys.readouterr()
        live = ("log", "export", "--scheduler", here.address)
        assert await anyio.to_thread.run_sync(cli.run, live) == 0
        printed = capsys.readouterr()
        assert f"missing: positions 1 to {begins - 1}: " in printed.err
        assert json.loads(printed.out.splitlines()[0])["complete"] is False
    capsys.readouterr()
    assert await anyio.to_thread.run_sync(cli.run, ("replay", str(folder))) == 5
    said = capsys.readouterr().out
    assert f"1 to {begins - 1}" in said
    assert "in a snapshot" in said
    assert await anyio.to_thread.run_sync(cli.run, ("replay", str(folder), "--json")) == 5
    assert json.loads(capsys.readouterr().out)["violations"] == []
    arguments = ("log", "export", "--log", str(folder), "--output", str(tmp_path / "export"))
    assert await anyio.to_thread.run_sync(cli.run, arguments) == 0
    said = capsys.readouterr().err
    assert f"missing: positions 1 to {begins - 1}: dropped" in said
    assert not read_log(tmp_path / "export").complete


@pytest.mark.anyio
async def test_the_oldest_is_dropped_while_requests_come_and_go(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log stays small, nobody notices, and another life starts from what is left."""
    monkeypatch.setattr(scheduler_shell, "RETAIN_SECONDS", 0.02)
    store = SegmentStore(tmp_path / "log", segment_bytes=2000)
    async with deployment(model, store=store, retain="6KiB") as here:
        for _ in range(25):
            await answer(here)
        while store.first_position == 1:
            await answer(here)
    sizes = [path.stat().st_size for path in segment_files.segment_paths(tmp_path / "log")]
    assert sum(sizes) < store.last_position * 100
    assert store.first_position > store.last_position // 2
    again = SegmentStore(tmp_path / "log")
    rest = [(s.position, s.entry) for s in again.tail(again.first_position)]
    assert state_of(rest, start=again.snapshot).ledger
    again.close()
