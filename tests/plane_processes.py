"""Programs for the tests whose claims are about processes: an owner and writers that can be killed.

Owns the child's side; the parent speaks to it in lines.
"""

import asyncio
import sys
import threading
from collections.abc import Callable

import grpc
import numpy as np

from engine.dataplane import Answer, DataPlane, Write
from transport.pb import pages_pb2_grpc
from transport.planes.grpc_stream import SERVER_OPTIONS, GrpcStreamPlane
from transport.planes.segment import Bytes, copy_bytes
from transport.planes.shared_memory import SharedMemoryPlane

BYTES = 4 << 20
PARTY = "prefill/a1/0"
GRANT = "decode/b1/0/1"


def say(line: str) -> None:
    print(line, flush=True)


def pattern(length: int) -> Bytes:
    return (np.arange(length, dtype=np.uint32) * 2_654_435_761 >> 24).astype(np.uint8)


def stall_from(copies: int) -> Callable[[Bytes, Bytes], None]:
    """Copy so many times, then say so and stop for ever in the middle of the next one."""
    left = [copies]

    def copy(target: Bytes, source: Bytes) -> None:
        if left[0] == 0:
            half = len(source) // 2
            copy_bytes(target[:half], source[:half])
            say("stalled")
            threading.Event().wait()
        left[0] -= 1
        copy_bytes(target, source)

    return copy


def write_all(plane: DataPlane, changed: threading.Event, descriptor: str) -> None:
    plane.register(pattern(BYTES).data)
    peer = plane.open_peer(descriptor)
    half = BYTES // 2
    writes = [Write(source_offset=at, target_offset=at, length=half) for at in (0, half)]
    ticket = plane.post(peer, writes, GRANT)
    while plane.poll(ticket) is Answer.IN_FLIGHT:
        changed.wait()
    say(plane.poll(ticket).name)
    while plane.close(peer) is None:
        changed.wait()
    plane.shutdown()


async def serve_pages(stalling_after: int) -> None:
    plane = GrpcStreamPlane(party="", incarnation="decode/b1", copy=stall_from(stalling_after))
    plane.register(memoryview(bytearray(BYTES)))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    pages_pb2_grpc.add_PagesServiceServicer_to_server(plane.servicer(), server)
    plane.listening_at(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    from engine.dataplane import Span

    plane.expose(GRANT, spans=[Span(offset=0, length=BYTES)], parties=[PARTY])
    say(plane.descriptor())
    await server.wait_for_termination()


def main(role: str) -> None:
    changed = threading.Event()
    match role:
        case "memory-writer":
            plane: DataPlane = SharedMemoryPlane(wake=changed.set)
            write_all(plane, changed, input())
        case "stalling-memory-writer":
            plane = SharedMemoryPlane(wake=changed.set, copy=stall_from(1))
            write_all(plane, changed, input())
        case "stream-writer":
            plane = GrpcStreamPlane(party=PARTY, incarnation="prefill/a1", wake=changed.set)
            write_all(plane, changed, input())
        case "stalling-stream-owner":
            asyncio.run(serve_pages(1))
        case _:
            sys.exit(f"unknown role {role}")


if __name__ == "__main__":
    main(sys.argv[1])
