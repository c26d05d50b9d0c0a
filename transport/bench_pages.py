"""An owner of pages in a process of its own, for the transfer that crosses a socket.

Owns: a pool that one writer may fill again and again under one grant.
Must not know: models, requests, figures.

Run as `python -m transport.bench_pages --bytes N`; it lives as long as its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from engine.dataplane import Span
from transport.child import PYTHON, Child, clean_environment
from transport.pb import pages_pb2_grpc
from transport.planes.grpc_stream import SERVER_OPTIONS, GrpcStreamPlane
from transport.settings import LOOPBACK

GRANT = "decode/1/0/1"
PARTY = "prefill/1/0"


class PagesChild:
    """The owner as the measuring process holds it."""

    def __init__(self, *, size_bytes: int, folder: Path) -> None:
        self._child = Child(
            "pages",
            ("--bytes", str(size_bytes)),
            errors=folder / "pages.stderr",
            program=(*PYTHON, "-m", "transport.bench_pages"),
            environment=clean_environment(),
        )
        self.descriptor = ""

    def __enter__(self) -> Self:
        try:
            self.descriptor = self._child.read()["descriptor"]
        except BaseException:
            self._child.end(terminate=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.end(terminate=False)


async def serve(size_bytes: int) -> None:
    """Take writes until standard input ends."""
    plane = GrpcStreamPlane(party="", incarnation="decode/1")
    pool = bytearray(size_bytes)
    plane.register(memoryview(pool))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    pages_pb2_grpc.add_PagesServiceServicer_to_server(plane.servicer(), server)
    plane.listening_at(f"{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}")
    await server.start()
    plane.expose(GRANT, spans=[Span(offset=0, length=size_bytes)], parties=[PARTY])
    sys.stdout.write(json.dumps({"descriptor": plane.descriptor()}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    asyncio.run(serve(parser.parse_args().bytes))


if __name__ == "__main__":
    main()
