"""An engine's process over its lives: one memory after another, for as often as it is given up.

Owns: loading the model, when another life may begin, and what of the last has to be over before.
Must not know: what a life does; that is `engine_shell`'s.

A life that the scheduler gave up is over in this order: its steps have ended, its writes have ended
and its peers' memory is unmapped, its own memory is no longer mapped here.
What cannot be proved is proved by the end of the process, which then ends.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import attrs
import structlog
import torch

from engine.pool import bytes_needed
from lifecycle.ids import EngineId, Party, party_of
from transport.engine_hooks import NO_HOOKS, EngineHooks
from transport.engine_parts import Loaded, Progress, ProgressLines, load
from transport.engine_planes import open_memory, pool_pages, require_usable, shut_down
from transport.engine_shell import EngineShell
from transport.fleet_client import PreviousLife
from transport.logging_setup import bind
from transport.settings import EngineSettings
from transport.waker import Waker

THREADS_MAX = 8
WIND_UP_SECONDS_MAX = 10.0
"""How long a process waits for its own copies to end; then it ends, which ends them."""
LOOK_SECONDS = 0.02
LIVES_MAX = 32
LIVES_SECONDS = 60.0
"""A process that is given up in the last of more than so many lives in so many seconds ends.

Losing a life takes a lease, and the shortest that is of use is two seconds, so more than that are
given up for something that another life meets too.
"""

_log = structlog.get_logger("custody.engine")


async def run_engine(
    settings: EngineSettings,
    *,
    ready: Callable[[], None],
    stop: anyio.Event,
    progress: Progress | None = None,
    hooks: EngineHooks = NO_HOOKS,
) -> int:
    """Run a prefill or decode engine until it has left, is refused, or cannot go on.

    A life that was given up is followed by another one, in memory of its own.
    ready: called once, when the scheduler has brought the engine up to date;
    stop: set to leave in order; progress: log lines unless given; hooks: a harness's.
    Returns the exit code. Raises ModelError, MemorySizeError, PoolTooSmallError,
    LayoutUnsupportedError before anything was joined.
    """
    torch.set_num_threads(settings.threads or min(os.cpu_count() or 1, THREADS_MAX))
    # Reading a model takes as long as a minute; what is refused in any case is refused before it.
    require_usable(settings)
    loaded = await anyio.to_thread.run_sync(load, settings, progress or ProgressLines())
    # A share of what is free is taken once: every life has as many pages.
    pool_bytes = bytes_needed(loaded.layout, pool_pages(settings, loaded.layout))
    settings = attrs.evolve(settings, kv_memory=str(pool_bytes))
    begun: list[float] = []
    waiting = [ready]

    def joined() -> None:
        while waiting:
            waiting.pop()()

    previous: PreviousLife | None = None
    while True:
        party = _next_life(settings, previous)
        bind(engine=party.engine, incarnation=party.incarnation)
        begun = [*(t for t in begun if time.monotonic() - t < LIVES_SECONDS), time.monotonic()]
        opened = open_engine(settings, loaded, party=party, hooks=hooks, previous=previous)
        async with opened as shell:
            code = await shell.run(ready=joined, stop=stop)
            if not shell.lost or stop.is_set():
                return code
            previous = await end_life(shell)
        if previous is None or len(begun) > LIVES_MAX:
            _log.error("no_other_life", lives=len(begun), ended=previous is not None)
            return code
        _log.warning("begins_again", **attrs.asdict(previous))


def _next_life(settings: EngineSettings, previous: PreviousLife | None) -> Party:
    """Milliseconds of wall time grow from one life to the next, also if the clock went back."""
    last = 0 if previous is None else previous.incarnation
    return party_of(EngineId(settings.engine), max(time.time_ns() // 1_000_000, last + 1), 0)


@asynccontextmanager
async def open_engine(
    settings: EngineSettings,
    loaded: Loaded,
    *,
    party: Party,
    hooks: EngineHooks = NO_HOOKS,
    previous: PreviousLife | None = None,
) -> AsyncIterator[EngineShell]:
    """An engine over its own memory, not yet joined."""
    waker = Waker()
    async with open_memory(settings, loaded.layout, party=party, wake=waker) as opened:
        memory = attrs.evolve(opened, plane=hooks.plane(opened.plane))
        shell = EngineShell(
            settings, loaded, memory, party=party, waker=waker, hooks=hooks, previous=previous
        )
        # Only the shell holds the memory, and lets go of it when its life is over.
        del opened, memory
        yield shell


async def end_life(shell: EngineShell) -> PreviousLife | None:
    """End everything of a life whose `run` has returned; None when only an exit could prove it.

    Where the receiver places the bytes nothing is waited for: it has shut this life out, or will.
    """
    quiet = await _wound_up(shell)
    if not quiet and not shell.memory.plane.capabilities.receiver_places_bytes:
        _log.error("writes_do_not_end", party=str(shell.party), seconds=WIND_UP_SECONDS_MAX)
        return None
    # When this returns every copying thread has ended, and no peer's memory is mapped.
    await shut_down(shell.memory.plane)
    if shell.owner.pool.on_device:
        # An allocator hands out what was given back; on the host it is the kernel, which clears it.
        shell.owner.pool.memory.octets.zero_()
    unmap = shell.memory.unmap
    ended = shell.end_as(quiet=quiet)
    # What only a cycle of references keeps is gone after this.
    gc.collect()
    if not unmap():
        _log.error("memory_still_used", party=str(shell.party))
        return None
    return ended


async def _wound_up(shell: EngineShell) -> bool:
    """Whether nothing that was posted lands any more, as soon as that is proved."""
    places = shell.memory.plane.capabilities.receiver_places_bytes
    until = time.monotonic() + WIND_UP_SECONDS_MAX
    while not shell.owner.wind_up():
        if places or time.monotonic() >= until:
            return False
        await anyio.sleep(LOOK_SECONDS)
    return True
