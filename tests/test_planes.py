"""The contract over every back end, and what each promises beyond it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import attrs
import grpc
import numpy as np
import pytest

from engine.dataplane import Answer, DataPlane, ObservedExit, Peer, Span
from engine.dataplane_errors import (
    DescriptorMalformed,
    PeerMismatch,
    PlaneBusy,
    PlaneMisused,
)
from tests.plane_contract import (
    GRANT,
    PARTY,
    POOL_BYTES,
    STAGING_BYTES,
    WAIT_SECONDS_MAX,
    Faults,
    PlaneContract,
    Rig,
    write,
)
from tests.plane_processes import BYTES as CHILD_BYTES
from tests.plane_processes import pattern
from transport.pb import pages_pb2, pages_pb2_grpc
from transport.planes.grpc_frames import FrameSource, judge
from transport.planes.grpc_receiver import PagesServicer
from transport.planes.grpc_stream import SERVER_OPTIONS, GrpcStreamPlane
from transport.planes.naive import NaiveNetwork, NaivePlane
from transport.planes.shared_memory import Segment, SharedMemoryPlane, create_segment
from transport.planes.tickets import TicketBook, Worker

ROOT = Path(__file__).resolve().parent.parent
INCARNATION = "decode/b1"


class LoopThread:
    """An asyncio loop beside the test, as an engine has one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS_MAX)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def staging() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return pattern(STAGING_BYTES)


@attrs.define
class Service:
    """A grpc.aio server with one pages service."""

    loop: LoopThread
    server: Any = None

    def start(self, plane: GrpcStreamPlane, servicer: PagesServicer) -> None:
        async def start() -> int:
            self.server = grpc.aio.server(options=SERVER_OPTIONS)
            pages_pb2_grpc.add_PagesServiceServicer_to_server(servicer, self.server)
            port: int = self.server.add_insecure_port("127.0.0.1:0")
            await self.server.start()
            return port

        plane.listening_at(f"127.0.0.1:{self.loop.run(start())}")

    def stop(self) -> None:
        self.loop.run(self.server.stop(None))


class TestNaive(PlaneContract):
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        network, faults, changed = NaiveNetwork(), Faults(), threading.Event()
        owner = NaivePlane(
            network, party="", incarnation=INCARNATION, wake=changed.set, copy=faults.copy
        )
        writer = NaivePlane(network, party=PARTY, incarnation="a1", wake=changed.set)
        pool, source = np.zeros(POOL_BYTES, dtype=np.uint8), staging()
        owner.register(pool.data)
        writer.register(source.data)

        def pump() -> None:
            if not faults.held:
                network.deliver()

        yield Rig(owner, writer, pool, source, faults, changed, pump)
        owner.shutdown()

    def test_bytes_that_arrive_after_the_fence_are_refused(self, rig: Rig) -> None:
        """A write whose stream broke still arrives, and finds the grant refused."""
        rig.expose()
        assert isinstance(rig.writer, NaivePlane)
        rig.faults.hold()
        ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], GRANT)
        rig.writer._network.break_streams()
        assert rig.writer.poll(ticket) is Answer.IN_DOUBT
        assert rig.owner.fence(GRANT) is not None
        rig.faults.let_go()
        rig.pump()
        assert not rig.pool.any()
        rig.writer.inquire(ticket)
        assert rig.writer.poll(ticket) is Answer.FAILED_QUIESCED

    def test_bytes_that_arrive_after_a_broken_stream_are_known_to_an_inquiry(
        self, rig: Rig
    ) -> None:
        """An inquiry says DONE when the bytes came late and whole, and else shuts them out."""
        rig.expose()
        peer = rig.open()
        assert isinstance(rig.writer, NaivePlane)
        rig.faults.hold()
        landed = rig.writer.post(peer, [write(0, 0, 64)], GRANT)
        rig.writer._network.break_streams()
        rig.faults.let_go()
        rig.pump()
        rig.writer.inquire(landed)
        assert rig.writer.poll(landed) is Answer.DONE
        rig.faults.hold()
        late = rig.writer.post(peer, [write(0, 4_096, 64)], GRANT)
        rig.writer._network.break_streams()
        rig.writer.inquire(late)
        assert rig.writer.poll(late) is Answer.FAILED_QUIESCED
        rig.faults.let_go()
        rig.pump()
        assert not rig.pool[4_096:].any()


class TestSharedMemory(PlaneContract):
    @pytest.fixture
    def segment(self) -> Iterator[Segment]:
        segment = create_segment(POOL_BYTES, incarnation=INCARNATION)
        yield segment
        segment.close()

    @pytest.fixture
    def rig(self, segment: Segment) -> Iterator[Rig]:
        faults, changed = Faults(), threading.Event()
        owner = SharedMemoryPlane(segment=segment)
        writer = SharedMemoryPlane(wake=changed.set, copy=faults.copy)
        pool, source = np.frombuffer(segment.buffer, dtype=np.uint8), staging()
        owner.register(segment.buffer)
        writer.register(source.data)
        rig = Rig(owner, writer, pool, source, faults, changed)
        yield rig
        faults.let_go()
        writer.shutdown()
        owner.shutdown()
        # The views must go before the segment can.
        rig.pool = rig.staging
        del pool

    def test_only_the_segment_can_be_the_pool(self, segment: Segment) -> None:
        """An owner that registers other memory would publish pages that nobody can reach."""
        plane = SharedMemoryPlane(segment=segment)
        with pytest.raises(PlaneMisused):
            plane.register(memoryview(bytearray(POOL_BYTES)))
        with pytest.raises(PlaneMisused):
            plane.descriptor()

    def test_a_segment_in_use_does_not_close(self) -> None:
        """Closing under a tensor would leave it pointing at nothing."""
        segment = create_segment(4_096, incarnation=INCARNATION)
        view = np.frombuffer(segment.buffer, dtype=np.uint8)
        with pytest.raises(PlaneMisused):
            segment.close()
        assert view.size == 4_096
        del view
        segment.close()
        segment.close()

    def test_no_writer_can_truncate_a_segment(self, segment: Segment) -> None:
        """A shorter file would kill the owner at its next read."""
        fd = os.open(segment.endpoint, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)

    @pytest.mark.parametrize("endpoint", ["/etc/passwd", "/proc/1/mem", "/proc/1/fd/../mem", ""])
    def test_a_descriptor_cannot_name_another_file(self, rig: Rig, endpoint: str) -> None:
        """A peer's text never chooses which file this process opens for writing."""
        published = {**json.loads(rig.owner.descriptor()), "endpoint": endpoint}
        with pytest.raises(DescriptorMalformed):
            rig.writer.open_peer(json.dumps(published))

    def test_a_recycled_endpoint_is_found_out(self, rig: Rig) -> None:
        """Another segment under the same path, of the same size and name, is not the peer."""
        other = create_segment(POOL_BYTES, incarnation=INCARNATION)
        smaller = create_segment(4_096, incarnation=INCARNATION)
        for imposter in (other, smaller):
            published = {**json.loads(rig.owner.descriptor()), "endpoint": imposter.endpoint}
            with pytest.raises(PeerMismatch):
                rig.writer.open_peer(json.dumps(published))
            imposter.close()
        with pytest.raises(PeerMismatch):
            rig.writer.open_peer(json.dumps(published))


class Muffled(PagesServicer):
    """Loses the last answer on its way: everything was placed, and the stream breaks."""

    async def Write(  # noqa: N802 - the name in the schema
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[Any]:
        async for response in super().Write(request_iterator, context):
            if response.WhichOneof("answer") == "placed":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "injected")
            yield response


class TestGrpcStream(PlaneContract):
    @pytest.fixture
    def rig(self, loop_thread: LoopThread) -> Iterator[Rig]:
        faults, changed = Faults(), threading.Event()
        owner = GrpcStreamPlane(
            party="", incarnation=INCARNATION, wake=changed.set, copy=faults.copy
        )
        writer = GrpcStreamPlane(party=PARTY, incarnation="prefill/a1", wake=changed.set)
        pool, source = np.zeros(POOL_BYTES, dtype=np.uint8), staging()
        owner.register(pool.data)
        writer.register(source.data)
        service = Service(loop_thread)
        service.start(owner, owner.servicer())
        yield Rig(owner, writer, pool, source, faults, changed)
        faults.let_go()
        writer.shutdown()
        service.stop()

    def test_a_fence_waits_for_the_copy_under_way(self, rig: Rig) -> None:
        """The proof comes after the last placing copy, and the frames behind it are refused."""
        rig.expose()
        rig.faults.hold()
        ticket = rig.writer.post(rig.open(), [write(0, 0, 64), write(0, 4_096, 64)], GRANT)
        assert rig.faults.entered.wait(WAIT_SECONDS_MAX)
        assert rig.owner.fence(GRANT) is None
        assert rig.owner.fence_party(PARTY) is None
        rig.faults.let_go()
        rig.until(lambda: rig.owner.fence(GRANT) is not None)
        assert rig.owner.fence_party(PARTY) is not None
        before = rig.pool.copy()
        assert rig.ended(ticket) is Answer.FAILED_QUIESCED
        assert np.array_equal(rig.pool, before)
        assert not rig.pool[4_096:].any()

    def test_a_lost_acknowledgement_is_in_doubt_until_an_inquiry(
        self, rig: Rig, loop_thread: LoopThread
    ) -> None:
        """Everything was placed, the writer cannot know, and asking settles it as DONE."""
        assert isinstance(rig.owner, GrpcStreamPlane)
        normal = rig.owner.servicer()
        muffled = Muffled(
            table=normal._table,
            pool=normal._pool,
            incarnation=normal._incarnation,
            key=normal._key,
            copy=normal._copy,
            wake=normal._wake,
        )
        service = Service(loop_thread)
        service.start(rig.owner, muffled)
        try:
            rig.expose()
            ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], GRANT)
            assert rig.ended(ticket) is Answer.IN_DOUBT
            assert "UNAVAILABLE" in rig.writer.explain(ticket)
            rig.writer.inquire(ticket)
            assert rig.final(ticket) is Answer.DONE
            assert rig.pool[:64].any()
        finally:
            service.stop()

    def test_nobody_listening_is_a_quiesced_failure(self, rig: Rig) -> None:
        """A connection that was never made has carried no byte."""
        published = {**json.loads(rig.owner.descriptor()), "endpoint": "127.0.0.1:1"}
        peer = rig.writer.open_peer(json.dumps(published))
        ticket = rig.writer.post(peer, [write(0, 0, 64)], GRANT)
        assert rig.ended(ticket) is Answer.FAILED_QUIESCED
        assert "UNAVAILABLE" in rig.writer.explain(ticket)

    def test_a_shutdown_in_flight_leaves_doubt(self, rig: Rig) -> None:
        """Cancelling a stream whose bytes may have left proves nothing."""
        rig.expose()
        rig.faults.hold()
        ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], GRANT)
        assert rig.faults.entered.wait(WAIT_SECONDS_MAX)
        rig.writer.shutdown()
        assert rig.writer.poll(ticket) is Answer.IN_DOUBT

    def test_the_owner_refuses_whatever_breaks_the_declared_order(self, rig: Rig) -> None:
        """A writer that is not ours gets no byte past its own declaration."""
        rig.expose()
        published = json.loads(rig.owner.descriptor())
        good = pages_pb2.Credentials(
            incarnation=INCARNATION, key=bytes.fromhex(published["key"]), party=PARTY
        )

        def opening(ticket: bytes, *extents: tuple[int, int]) -> pages_pb2.WriteRequest:
            message = pages_pb2.WriteRequest()
            message.opening.credentials.CopyFrom(good)
            message.opening.name.grant = GRANT
            message.opening.name.ticket = ticket
            for offset, length in extents:
                message.opening.extents.add(target_offset=offset, length=length)
            return message

        def frame(offset: int, payload: bytes) -> pages_pb2.WriteRequest:
            return pages_pb2.WriteRequest(
                frame=pages_pb2.Frame(target_offset=offset, payload=payload)
            )

        cases: list[tuple[list[pages_pb2.WriteRequest], str, int]] = [
            ([], "REFUSAL_REASON_TICKET", 0),
            ([frame(0, b"x")], "REFUSAL_REASON_TICKET", 0),
            ([opening(b"")], "REFUSAL_REASON_TICKET", 0),
            ([opening(b"a")], "REFUSAL_REASON_TICKET", 0),
            ([opening(b"b", (0, 0))], "REFUSAL_REASON_SPAN", 0),
            ([opening(b"c", (POOL_BYTES - 1, 2))], "REFUSAL_REASON_SPAN", 0),
            ([opening(b"c", (2**64 - 1, 2))], "REFUSAL_REASON_SPAN", 0),
            ([opening(b"d", (8, 8)), frame(0, b"x")], "REFUSAL_REASON_TICKET", 0),
            ([opening(b"e", (8, 8)), frame(8, b"x" * 9)], "REFUSAL_REASON_TICKET", 0),
            ([opening(b"f", (8, 8)), frame(8, b"")], "REFUSAL_REASON_TICKET", 0),
            ([opening(b"g", (8, 8)), frame(8, b"x" * 4)], "REFUSAL_REASON_TICKET", 4),
            ([opening(b"g", (8, 8)), frame(8, b"x" * 8)], "REFUSAL_REASON_TICKET", 0),
            (
                [opening(b"h", (8, 4)), frame(8, b"x" * 4), frame(12, b"x")],
                "REFUSAL_REASON_TICKET",
                4,
            ),
            ([opening(b"i", (8, 4)), opening(b"i", (8, 4))], "REFUSAL_REASON_TICKET", 0),
        ]
        with grpc.insecure_channel(published["endpoint"]) as channel:
            stub = pages_pb2_grpc.PagesServiceStub(channel)
            for requests, reason, placed_bytes in cases:
                *_, last = stub.Write(iter(requests))
                assert last.WhichOneof("answer") == "refused", requests
                assert pages_pb2.RefusalReason.Name(last.refused.reason) == reason, requests
                assert last.refused.placed_bytes == placed_bytes, requests
        assert not rig.pool[16:].any()
        assert not rig.pool[:8].any()

    def test_an_inquiry_is_answered_only_to_who_knows_this_life(self, rig: Rig) -> None:
        """Another life, or a grant that was never known here, is no proof of anything."""
        published = json.loads(rig.owner.descriptor())
        request = pages_pb2.SettleRequest()
        request.credentials.incarnation = INCARNATION
        request.credentials.party = PARTY
        request.name.grant = GRANT
        request.name.ticket = b"t"
        with grpc.insecure_channel(published["endpoint"]) as channel:
            stub = pages_pb2_grpc.PagesServiceStub(channel)
            rig.expose()
            assert stub.Settle(request).settlement == pages_pb2.SETTLEMENT_UNKNOWN
            request.credentials.key = bytes.fromhex(published["key"])
            assert stub.Settle(request).settlement == pages_pb2.SETTLEMENT_QUIESCED
            request.name.grant = "decode/b1/0/9"
            assert stub.Settle(request).settlement == pages_pb2.SETTLEMENT_UNKNOWN


def test_only_a_final_answer_or_nothing_sent_is_proof() -> None:
    """A stream's status never turns into DONE or FAILED_QUIESCED once bytes may have left."""
    network = NaiveNetwork()
    plane = NaivePlane(network, party="", incarnation="x")
    plane.register(memoryview(bytearray(64)))
    peer = plane.open_peer(plane.descriptor())
    ticket = plane.post(peer, [write(0, 0, 64)], GRANT)
    placed = pages_pb2.WriteResponse(placed=pages_pb2.Placed(placed_bytes=64))
    short = pages_pb2.WriteResponse(placed=pages_pb2.Placed(placed_bytes=63))
    refused = pages_pb2.WriteResponse(refused=pages_pb2.Refused())
    for final, left, answer in (
        (None, False, Answer.FAILED_QUIESCED),
        (None, True, Answer.IN_DOUBT),
        (short, True, Answer.IN_DOUBT),
        (refused, True, Answer.FAILED_QUIESCED),
        (placed, True, Answer.DONE),
    ):
        assert judge(ticket, final=final, trouble="", left=left)[0] is answer


def test_a_stopped_source_reads_no_local_memory() -> None:
    """After `stop` no further frame is drawn, however far the sender had come."""
    source = FrameSource(
        opening=pages_pb2.Opening(),
        staging=pattern(128),
        writes=[write(0, 0, 64), write(64, 64, 64)],
    )
    requests = iter(source)
    assert next(requests).WhichOneof("step") == "opening"
    source.admit()
    assert next(requests).frame.payload == pattern(64).tobytes()
    assert source.stop()
    assert list(requests) == []
    assert not FrameSource(opening=pages_pb2.Opening(), staging=pattern(8), writes=[]).stop()


@pytest.mark.parametrize("final", [Answer.DONE, Answer.FAILED_QUIESCED])
def test_a_final_answer_never_changes(final: Answer) -> None:
    """Whatever a back end says after its final answer, the caller has acted on the first."""
    book = TicketBook(None)
    peer = Peer(serial=1, incarnation=INCARNATION, pool_bytes=64)
    ticket = book.open(peer=peer, grant=GRANT, length=64)
    book.settle(ticket, Answer.IN_DOUBT, "why")
    assert book.in_flight(peer) == 0
    book.settle(ticket, final)
    for later in Answer:
        book.settle(ticket, later, "late")
        assert (book.answer(ticket), book.reason(ticket)) == (final, "")
    assert book.in_flight(peer) == 0


def test_a_full_queue_is_a_typed_refusal() -> None:
    """A bounded queue says that it is full, and keeps what it took."""
    entered, let_go, ran = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        entered.set()
        let_go.wait(WAIT_SECONDS_MAX)

    worker = Worker(name="test", waiting_max=1)
    worker.submit(job)
    assert entered.wait(WAIT_SECONDS_MAX)
    worker.submit(ran.set)
    with pytest.raises(PlaneBusy):
        worker.submit(job)
    let_go.set()
    worker.stop()
    assert ran.is_set()


def start_child(role: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "plane_processes.py"), role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def tell(child: "subprocess.Popen[str]", line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")


def hear(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.fixture
def children() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate()


def expose_to_child(owner: DataPlane) -> None:
    owner.expose(GRANT, spans=[Span(offset=0, length=CHILD_BYTES)], parties=[PARTY])


@pytest.mark.process
def test_another_process_writes_into_shared_memory(
    children: list["subprocess.Popen[str]"],
) -> None:
    """The bytes of another process are in the owner's segment when it says DONE."""
    segment = create_segment(CHILD_BYTES, incarnation=INCARNATION)
    owner = SharedMemoryPlane(segment=segment)
    owner.register(segment.buffer)
    expose_to_child(owner)
    child = start_child("memory-writer")
    children.append(child)
    tell(child, owner.descriptor())
    assert hear(child) == "DONE"
    assert bytes(segment.buffer) == pattern(CHILD_BYTES).tobytes()
    assert child.wait(WAIT_SECONDS_MAX) == 0
    owner.shutdown()
    segment.close()


@pytest.mark.process
def test_only_the_reaped_writer_is_fenced_from_shared_memory(
    children: list["subprocess.Popen[str]"],
) -> None:
    """A writer stopped or killed half-way is in doubt until its exit has been observed."""
    segment = create_segment(CHILD_BYTES, incarnation=INCARNATION)
    owner = SharedMemoryPlane(segment=segment)
    owner.register(segment.buffer)
    expose_to_child(owner)
    child = start_child("stalling-memory-writer")
    children.append(child)
    tell(child, owner.descriptor())
    assert hear(child) == "stalled"
    child.send_signal(signal.SIGSTOP)
    assert owner.fence(GRANT) is None
    child.send_signal(signal.SIGKILL)
    assert owner.fence(GRANT) is None
    child.wait(WAIT_SECONDS_MAX)
    proof = owner.fence_party(PARTY, ObservedExit(party=PARTY, pid=child.pid))
    assert proof is not None
    assert str(child.pid) in proof.evidence
    assert owner.fence(GRANT) is not None
    owner.shutdown()
    segment.close()


@pytest.mark.process
def test_the_segment_of_a_dead_process_is_not_opened() -> None:
    """A descriptor whose process is gone names no memory."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(WAIT_SECONDS_MAX)
    segment = create_segment(4_096, incarnation=INCARNATION)
    owner = SharedMemoryPlane(segment=segment)
    owner.register(segment.buffer)
    published = {**json.loads(owner.descriptor()), "endpoint": f"/proc/{child.pid}/fd/3"}
    with pytest.raises(PeerMismatch):
        SharedMemoryPlane().open_peer(json.dumps(published))
    owner.shutdown()
    segment.close()


@pytest.mark.process
def test_another_process_writes_over_a_stream(
    loop_thread: LoopThread, children: list["subprocess.Popen[str]"]
) -> None:
    """The owner places the frames of another process, and says DONE after the last."""
    owner = GrpcStreamPlane(party="", incarnation=INCARNATION)
    pool = np.zeros(CHILD_BYTES, dtype=np.uint8)
    owner.register(pool.data)
    service = Service(loop_thread)
    service.start(owner, owner.servicer())
    expose_to_child(owner)
    child = start_child("stream-writer")
    children.append(child)
    tell(child, owner.descriptor())
    assert hear(child) == "DONE"
    assert np.array_equal(pool, pattern(CHILD_BYTES))
    assert child.wait(WAIT_SECONDS_MAX) == 0
    service.stop()


@pytest.mark.process
def test_a_killed_owner_leaves_the_ticket_in_doubt(
    children: list["subprocess.Popen[str]"],
) -> None:
    """An owner that dies while placing proves nothing, and neither does its silence after."""
    child = start_child("stalling-stream-owner")
    children.append(child)
    changed = threading.Event()
    writer = GrpcStreamPlane(party=PARTY, incarnation="prefill/a1", wake=changed.set)
    source = pattern(CHILD_BYTES)
    writer.register(source.data)
    rig = Rig(writer, writer, source, source, Faults(), changed)
    ticket = writer.post(writer.open_peer(hear(child)), [write(0, 0, CHILD_BYTES)], GRANT)
    assert hear(child) == "stalled"
    assert writer.poll(ticket) is Answer.IN_FLIGHT
    child.kill()
    assert rig.ended(ticket) is Answer.IN_DOUBT
    writer.inquire(ticket)
    rig.until(lambda: "inquiry failed" in writer.explain(ticket))
    assert writer.poll(ticket) is Answer.IN_DOUBT
    writer.shutdown()
