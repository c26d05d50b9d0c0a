"""Claims about the gRPC plane over a network that stands still: every write ends by itself."""

from __future__ import annotations

import json
import threading

import anyio
import grpc
import numpy as np
import pytest

from engine.dataplane import Answer, Span, Write
from tests.faults.relay import Relay
from transport.pb import pages_pb2_grpc
from transport.planes.grpc_stream import SERVER_OPTIONS, GrpcStreamPlane

SIZE = 4096
WRITE = (Write(source_offset=0, target_offset=0, length=SIZE),)
PARTY = "prefill-0/1/0"
SECONDS_MAX = 40.0


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_owner_out_of_reach_is_noticed() -> None:
    """A write to an owner whose network stands still ends, and so does one that must connect first.

    A probe of the bandwidth is on its way when the network stops: of itself it may wait a minute,
    and no other ping is sent meanwhile.
    """
    owner = GrpcStreamPlane(party="", incarnation="decode-0/1/0")
    owner.register(np.zeros(SIZE, dtype=np.uint8).data)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    pages_pb2_grpc.add_PagesServiceServicer_to_server(owner.servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    owner.listening_at(f"127.0.0.1:{port}")
    relay = Relay(f"127.0.0.1:{port}")
    fields = json.loads(owner.descriptor())
    writer = GrpcStreamPlane(party=PARTY, incarnation=PARTY)
    writer.register(np.ones(SIZE, dtype=np.uint8).data)
    peer = writer.open_peer(json.dumps({**fields, "endpoint": relay.address}))

    async def ended(grant: str) -> Answer:
        owner.expose(grant, spans=[Span(offset=0, length=SIZE)], parties=[PARTY])
        ticket = writer.post(peer, WRITE, grant)

        def wait() -> None:
            pace = threading.Event()
            while writer.poll(ticket) is Answer.IN_FLIGHT:
                pace.wait(0.01)

        with anyio.fail_after(SECONDS_MAX):
            await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)
        return writer.poll(ticket)

    assert await ended("d/1/0/1") is Answer.DONE
    relay.stall()
    assert await ended("d/1/0/2") is Answer.FAILED_QUIESCED
    assert await ended("d/1/0/3") is Answer.FAILED_QUIESCED
    relay.heal(broken=True)
    await anyio.to_thread.run_sync(writer.shutdown)
    relay.close()
    await server.stop(None)
