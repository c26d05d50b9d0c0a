"""What the gRPC plane sends: frames of one ticket, limits of a stream, and what an end proves.

Owns the reading of local memory.
It must not know channels, threads or the owner's table.
"""

import threading
from collections.abc import Iterator, Sequence

from engine.dataplane import Answer, Ticket, Write
from transport.pb import pages_pb2
from transport.planes.segment import Bytes

FRAME_BYTES = 1 << 20
MESSAGE_BYTES_MAX = 4 << 20
# A request whose writer cannot reach its reader goes to another pair only when that is noticed.
KEEPALIVE_MS = 4_000
KEEPALIVE_ANSWER_MS = 3_000
CONNECT_MS = 5_000
TICKET_SECONDS_MAX = 120
INQUIRY_SECONDS_MAX = 5

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_MS),
    # The writers' pings must not be taken for abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
"""What the engine's grpc.aio server needs, to serve pages."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A stopped owner ends a call only through these.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
    # While a probe of the bandwidth is out no other ping is sent, and it may wait for a minute.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_MS),
    # So is how long an attempt to connect may take: of itself, twenty seconds.
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    # A retry would be a second attempt at pages whose first attempt is in doubt.
    ("grpc.enable_retries", 0),
    # Each peer has its own connection, so that closing one ends only its own streams.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class FrameSource:
    """The requests of one ticket, drawn by a thread of gRPC; the only reader of local memory."""

    def __init__(
        self, *, opening: pages_pb2.Opening, staging: Bytes, writes: Sequence[Write]
    ) -> None:
        self._opening = opening
        self._staging = staging
        self._writes = writes
        self._lock = threading.Lock()
        self._admitted = threading.Event()
        self._stopped = False
        self._left = False

    def admit(self) -> None:
        """Let frames follow the opening."""
        self._admitted.set()

    def stop(self) -> bool:
        """End all reading of local memory; returns whether any byte may have left."""
        with self._lock:
            self._stopped = True
            left = self._left
        self._admitted.set()
        return left

    def __iter__(self) -> Iterator[pages_pb2.WriteRequest]:
        yield pages_pb2.WriteRequest(opening=self._opening)
        self._admitted.wait()
        for write in self._writes:
            for done in range(0, write.length, FRAME_BYTES):
                begin = write.source_offset + done
                length = min(FRAME_BYTES, write.length - done)
                with self._lock:
                    if self._stopped:
                        return
                    payload = self._staging[begin : begin + length].tobytes()
                    self._left = True
                frame = pages_pb2.Frame(target_offset=write.target_offset + done, payload=payload)
                yield pages_pb2.WriteRequest(frame=frame)


def judge(
    ticket: Ticket, *, final: pages_pb2.WriteResponse | None, trouble: str, left: bool
) -> tuple[Answer, str]:
    """Only the owner's own final answer, or that nothing left, is proof; a status never is."""
    if final is None:
        return (Answer.IN_DOUBT if left else Answer.FAILED_QUIESCED), trouble
    if final.WhichOneof("answer") == "refused":
        name = pages_pb2.RefusalReason.Name(final.refused.reason)
        placed_bytes = final.refused.placed_bytes
        return Answer.FAILED_QUIESCED, f"{name} after {placed_bytes} of {ticket.length} bytes"
    placed_bytes = final.placed.placed_bytes
    if placed_bytes != ticket.length:
        return Answer.IN_DOUBT, f"placed {placed_bytes} of {ticket.length} bytes"
    return Answer.DONE, ""
