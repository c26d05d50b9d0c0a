"""The verbs that run parts: `serve`, `scheduler`, `prefill`, `decode`.

Owns: signals, readiness lines, and the settings of each part.
Must not know: what a scheduler or an engine does.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Annotated

import anyio
import attrs
import structlog
from cyclopts import Parameter

from lifecycle.events import Role
from transport.commands_shared import EXIT_SIGNAL, Json, note, say, say_json
from transport.logging_setup import bind, configure_logging
from transport.progress import LoadingBar, on_terminal
from transport.settings import (
    EngineSettings,
    JoinSettings,
    PoolSettings,
    SchedulerSettings,
)

PR_SET_PDEATHSIG = 1
Ready = Callable[[str], None]


@attrs.frozen
class Signals:
    """What the operator has asked for so far: to stop in order, and not to wait any longer."""

    stop: anyio.Event = attrs.Factory(anyio.Event)
    hurry: anyio.Event = attrs.Factory(anyio.Event)


Runner = Callable[[Ready, Signals], Awaitable[int]]
SupervisedBy = Annotated[int | None, Parameter(name="--supervised-by", show=False, env_var=())]

_log = structlog.get_logger("custody.serve")
_SCHEDULER = SchedulerSettings()
_JOIN = JoinSettings()
_POOL = PoolSettings()


def end_with(supervisor: int | None) -> None:
    """Be told by the kernel (SIGTERM) when the supervising process is gone."""
    if supervisor is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:
        # It went before the kernel was asked.
        raise SystemExit(EXIT_SIGNAL + signal.SIGTERM)


async def run_until_signalled(run: Runner, ready: Ready, cut_at: int | None = 3) -> int:
    """Run a part; the first SIGTERM or SIGINT asks it to stop, the second not to wait any longer.

    cut_at: the signal, counted from 1, that cuts it short; None has it end by itself.
    """
    signals = Signals()
    code = EXIT_SIGNAL

    async def watch() -> None:
        nonlocal code
        count = 0
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for number in received:
                count += 1
                if count == cut_at:
                    code = EXIT_SIGNAL + number
                    tasks.cancel_scope.cancel()
                    return
                (signals.hurry if signals.stop.is_set() else signals.stop).set()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            code = await run(ready, signals)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise sole_error(group) from group
    return code


def sole_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error inside nested groups; the group itself when there are several."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        if len(error.exceptions) != 1:
            return group
        error = error.exceptions[0]
    return error


def announce(part: str, address: str, *, json: bool) -> None:
    """Tell whoever started this part that it is ready."""
    if json:
        ready = {"part": part, "process_id": os.getpid(), "address": address}
        say_json({"event": "ready", **ready})
    else:
        say(f"{part} ready" + (f" at {address}" if address else "") + f", process {os.getpid()}")


def _run_part(
    part: str, run: Runner, *, json: bool, supervised_by: int | None, cut_at: int | None
) -> int:
    end_with(supervised_by)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    configure_logging()
    bind(part=part)

    def ready(address: str) -> None:
        announce(part, address, json=json)

    return anyio.run(run_until_signalled, run, ready, cut_at)


def scheduler(
    *,
    options: Annotated[SchedulerSettings, Parameter(name="*")] = _SCHEDULER,
    json: Json = False,
    supervised_by: SupervisedBy = None,
) -> int:
    """Run the scheduler: it admits requests, keeps the log, and engines join it.

    Parameters
    ----------
    json
        Announce readiness as a JSON line.
    """

    def say_settled() -> None:
        say_json({"event": "settled", "part": "scheduler"})

    # Nobody tells the engines of a scheduler that runs alone to leave, so it waits for none.
    supervised = supervised_by is not None

    def say_lost(engine: str, process_id: int, cause: str) -> None:
        say_json({"event": "lost", "engine": engine, "process_id": process_id, "cause": cause})

    async def run(ready: Ready, signals: Signals) -> int:
        from transport.scheduler_shell import run_scheduler

        return await run_scheduler(
            options,
            ready=ready,
            stop=signals.stop,
            hurry=signals.hurry,
            settled=say_settled if supervised else None,
            lost=say_lost if supervised else None,
        )

    # The supervisor says again that it waits for nobody; it cuts short by killing.
    cut_at = None if supervised else 3
    return _run_part("scheduler", run, json=json, supervised_by=supervised_by, cut_at=cut_at)


def prefill(
    engine: str = "prefill-0",
    /,
    *,
    options: Annotated[JoinSettings, Parameter(name="*")] = _JOIN,
    json: Json = False,
    supervised_by: SupervisedBy = None,
) -> int:
    """Run a prefill engine: it computes the KV of prompts and writes it to decode.

    Parameters
    ----------
    engine
        The engine's name in the fleet.
    json
        Announce readiness as a JSON line.
    """
    return _run_engine(Role.PREFILL, engine, options, json=json, supervised_by=supervised_by)


def decode(
    engine: str = "decode-0",
    /,
    *,
    options: Annotated[JoinSettings, Parameter(name="*")] = _JOIN,
    json: Json = False,
    supervised_by: SupervisedBy = None,
) -> int:
    """Run a decode engine: it checks what arrived and samples every token.

    Parameters
    ----------
    engine
        The engine's name in the fleet.
    json
        Announce readiness as a JSON line.
    """
    return _run_engine(Role.DECODE, engine, options, json=json, supervised_by=supervised_by)


def _run_engine(
    role: Role, engine: str, join: JoinSettings, *, json: bool, supervised_by: int | None
) -> int:
    shared = {field.name: getattr(join, field.name) for field in attrs.fields(JoinSettings)}
    settings = EngineSettings(role=role, engine=engine, **shared)
    # Engines share cores, and an OpenMP thread that spins at a barrier keeps its neighbour from
    # reaching it: beside a busy process a forward pass took five to ten times as long.
    # The variable is read once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    async def run(ready: Ready, signals: Signals) -> int:
        from transport.engine_lives import run_engine

        def joined() -> None:
            if bar is not None:
                bar.close()
            ready("")

        bind(engine=engine, role=role.value)
        return await run_engine(settings, ready=joined, stop=signals.stop, progress=bar)

    # Several parts on one terminal would draw over each other; those say lines.
    bar = LoadingBar() if on_terminal() and not json and supervised_by is None else None
    try:
        return _run_part(engine, run, json=json, supervised_by=supervised_by, cut_at=2)
    finally:
        if bar is not None:
            bar.close()


def serve(
    *,
    prefill: int = 1,
    decode: int = 1,
    options: Annotated[SchedulerSettings, Parameter(name="*")] = _SCHEDULER,
    pool: Annotated[PoolSettings, Parameter(name="*")] = _POOL,
    json: Json = False,
) -> int:
    """Run a scheduler, prefill and decode engines as supervised processes of this machine.

    Parameters
    ----------
    prefill
        How many prefill engines.
    decode
        How many decode engines.
    json
        Announce parts and readiness as JSON lines.
    """
    from transport.supervised_parts import Parts
    from transport.supervisor import Started, supervise

    parts = Parts(prefill=prefill, decode=decode, scheduler=options, pool=pool)
    configure_logging()
    bind(part="serve")

    def complain(text: str) -> None:
        if on_terminal():
            note(f"custody: {text}")
        else:
            _log.error("part_failed", message=text)

    def started(part: Started) -> None:
        if json:
            about = {"part": part.name, "process_id": part.process_id}
            say_json({"event": "started", **about})
        else:
            say(f"{part.name} started, process {part.process_id}")

    async def run(ready: Ready, signals: Signals) -> int:
        return await supervise(
            parts,
            started=started,
            ready=ready,
            stop=signals.stop,
            hurry=signals.hurry,
            complain=complain,
        )

    before = False

    def ready(address: str) -> None:
        nonlocal before
        if json:
            say_json({"event": "ready", "part": "serve", "address": address})
        else:
            say(f"ready {'again ' if before else ''}at {address}")
        before = True

    return anyio.run(run_until_signalled, run, ready)
