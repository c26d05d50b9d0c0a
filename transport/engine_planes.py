"""An engine's KV memory and the data plane over it, for the time that its process runs.

Owns: which memory a plane wants, the server that the gRPC plane needs, and the order of letting go.
Must not know: requests, the log, the scheduler.

A decode engine registers its pool, which others write; a prefill engine registers its staging,
which it posts from, and keeps its pool to itself.
"""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.to_thread
import attrs
import grpc
import numpy as np
import numpy.typing as npt
import torch

from engine.dataplane import DataPlane
from engine.dataplane_errors import PlaneMisused
from engine.memory_size import measure_free_bytes, parse_memory
from engine.model import Model
from engine.pool import KVPool, bytes_needed, pages_for
from kernels.layout import PageLayout, PageMemory
from lifecycle.events import FenceScope, Role
from lifecycle.ids import Party
from transport.access import caller, open_access
from transport.pb import pages_pb2_grpc
from transport.planes.grpc_stream import SERVER_OPTIONS, GrpcStreamPlane
from transport.planes.shared_memory import Segment, SharedMemoryPlane, create_segment
from transport.settings import EngineSettings
from transport.tls import Dial, listen, server_credentials
from transport.wellformed import WellFormed

SERVER_GRACE_SECONDS = 1.0
PROTOCOL = 1
"""Part of the layout fingerprint: engines that speak otherwise are never paired."""


@attrs.frozen
class EngineMemory:
    """What an engine computes in and moves pages with.

    staging: prefill only; descriptor: decode only, "" otherwise, and a credential;
    unmap: take memory that others may write out of this process; False while something looks at it.
    """

    pool: KVPool
    staging: PageMemory | None
    plane: DataPlane
    descriptor: str
    unmap: Callable[[], bool] = lambda: True

    @property
    def fence_scope(self) -> FenceScope:
        """The plane's scope in the log's words."""
        return FenceScope[self.plane.capabilities.fence_scope.name]


def require_usable(settings: EngineSettings) -> None:
    """Whether the files of its doors can be used, which needs no model.  Raises InvalidSetting."""
    Dial.of(settings, token_file=settings.token_file)
    if settings.role is Role.DECODE and settings.plane == "grpc":
        open_access(settings.credentials)
        server_credentials(settings)


def page_layout(model: Model, *, page_tokens: int) -> PageLayout:
    """The layout of this model's pages. Raises LayoutUnsupportedError."""
    config = model.config
    return PageLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        page_tokens=page_tokens,
        dtype=model.dtype,
    )


def fingerprint(model: Model, layout: PageLayout) -> str:
    """A text that is equal exactly for engines whose KV is interchangeable.

    It reads every weight once.
    """
    return (
        f"{layout.canonical()} ranks=1 kinds=kv protocol={PROTOCOL} "
        f"model={model.identity.fingerprint}"
    )


def pool_pages(settings: EngineSettings, layout: PageLayout) -> int:
    """How many pages the wanted memory holds. Raises MemorySizeError, PoolTooSmallError."""
    free = measure_free_bytes()
    if settings.device != "cpu":
        # Pages land in host memory of the same size.
        free = min(free, torch.cuda.mem_get_info(settings.device)[0])
    wanted = parse_memory(settings.kv_memory, free_bytes=free)
    return pages_for(wanted, layout)


def open_memory(
    settings: EngineSettings, layout: PageLayout, *, party: Party, wake: Callable[[], None]
) -> AbstractAsyncContextManager[EngineMemory]:
    """Memory and plane of one life; when the block ends every address of it is dead.

    wake: called from any thread when the plane may have something to say.
    """
    pages = pool_pages(settings, layout)
    if settings.role is Role.PREFILL:
        return _open_writer(settings, layout, pages=pages, party=party, wake=wake)
    if settings.plane == "grpc":
        return _open_server(settings, layout, pages=pages, party=party, wake=wake)
    return _open_segment(layout, pages=pages, party=party, wake=wake)


@asynccontextmanager
async def _open_writer(
    settings: EngineSettings,
    layout: PageLayout,
    *,
    pages: int,
    party: Party,
    wake: Callable[[], None],
) -> AsyncIterator[EngineMemory]:
    """A private pool, and staging that the plane posts from."""
    pool = KVPool(layout, pages, _private(layout, pages))
    staging = KVPool(
        layout, settings.staging_pages, _private(layout, settings.staging_pages)
    ).memory
    plane: DataPlane
    if settings.plane == "grpc":
        dial = Dial.of(settings, token_file=settings.token_file)
        plane = GrpcStreamPlane(party=str(party), incarnation=str(party), wake=wake, dial=dial)
    else:
        plane = SharedMemoryPlane(wake=wake)
    plane.register(_octets(staging))
    try:
        yield EngineMemory(pool, staging, plane, "")
    finally:
        await shut_down(plane)


@asynccontextmanager
async def _open_segment(
    layout: PageLayout, *, pages: int, party: Party, wake: Callable[[], None]
) -> AsyncIterator[EngineMemory]:
    """A pool in memory that writers on this host map."""
    segment: Segment = create_segment(bytes_needed(layout, pages), incarnation=str(party))
    plane = SharedMemoryPlane(segment=segment, wake=wake)
    plane.register(segment.buffer)

    def unmap() -> bool:
        try:
            segment.close()
        except PlaneMisused:
            return False
        return True

    try:
        # No name of this frame may keep what is yielded, or it could never be unmapped.
        yield EngineMemory(
            KVPool(layout, pages, segment.buffer), None, plane, plane.descriptor(), unmap
        )
    finally:
        await shut_down(plane)
        # Tensors may still look at it; the process that holds them is about to end.
        unmap()


@asynccontextmanager
async def _open_server(
    settings: EngineSettings,
    layout: PageLayout,
    *,
    pages: int,
    party: Party,
    wake: Callable[[], None],
) -> AsyncIterator[EngineMemory]:
    """A private pool, and a server of this process's own that places what writers send."""
    pool = KVPool(layout, pages, _private(layout, pages))
    plane = GrpcStreamPlane(party=str(party), incarnation=str(party), wake=wake)
    plane.register(_octets(pool.memory))
    access = open_access(settings.credentials)
    server = grpc.aio.server(interceptors=(access, WellFormed()), options=SERVER_OPTIONS)
    pages_pb2_grpc.add_PagesServiceServicer_to_server(plane.servicer(_caller_may_be), server)
    port = listen(server, f"{settings.host}:0", server_credentials(settings))
    await server.start()
    plane.listening_at(f"{settings.host}:{port}")
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(access.watch)
            yield EngineMemory(pool, None, plane, plane.descriptor())
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop(SERVER_GRACE_SECONDS)
        await shut_down(plane)


def _private(layout: PageLayout, pages: int) -> mmap.mmap:
    """Private memory from the kernel, all zeros: no page of it was ever another life's."""
    size = bytes_needed(layout, pages)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _caller_may_be(party: str) -> bool:
    """Whether the caller's credential allows the engine of that party."""
    return caller().may_join_as(party.rsplit("/", 2)[0])


async def shut_down(plane: DataPlane) -> None:
    """Ending a plane waits for its threads, so it is kept off the event loop."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(plane.shutdown)


def _octets(memory: PageMemory) -> memoryview:
    octets: npt.NDArray[np.uint8] = memory.octets.numpy()
    return octets.data
