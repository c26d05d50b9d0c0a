"""A scheduler and its engines as child processes: started, watched, and ended in order.

Owns: the order of start and end, and what an unexpected death of a child means.
Must not know: what the parts do; it reads one readiness line of each and its exit code.

Children run in sessions of their own, so that Ctrl-C reaches them through here and in order:
the scheduler stops accepting, finishes and says that it has settled, then the engines leave while
it still keeps the log, and it ends last.

An engine that ends by itself is started again; one that the scheduler has given up is killed first,
for what it could still write stays in the way until its process is seen to be gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.abc
import attrs
from anyio.streams.text import TextReceiveStream

from transport.commands_shared import EXIT_FAILED, EXIT_REFUSED, EXIT_SIGNAL, EXIT_USAGE
from transport.new_credentials import EphemeralEngine
from transport.supervised_parts import Parts

ENTRY = (sys.executable, "-P", "-m", "transport.cli")
LEAVE_SECONDS = 20.0
RESTARTS_MAX = 3
RESTART_SECONDS = 60.0
"""An engine that ends more often than so many times in so many seconds is not started again."""

LINE_CHARACTERS_MAX = 1 << 16


@attrs.frozen
class Started:
    """A child process."""

    name: str
    process_id: int


class _Child:
    """One child: its process, its readiness line, and its end."""

    def __init__(
        self,
        name: str,
        process: anyio.abc.Process,
        *,
        on_ready: Callable[[], None],
        on_lost: Callable[[str, int, str], None],
    ) -> None:
        """`on_lost` is told engine, process id and cause of what a scheduler has given up."""
        self.name = name
        self.process = process
        self._on_ready = on_ready
        self._on_lost = on_lost
        self.ready = anyio.Event()
        self.settled = anyio.Event()
        self.ended = anyio.Event()
        self.address = ""
        self.told = False
        self.given_up = ""
        self._handle: int | None = None
        # One that has ended and been waited for already needs no signal.
        with suppress(ProcessLookupError):
            self._handle = os.pidfd_open(process.pid)

    async def watch(self) -> None:
        """Read what it announces, and wait for its end."""
        assert self.process.stdout is not None
        text = ""
        async for piece in TextReceiveStream(self.process.stdout):
            *lines, text = (text + piece).split("\n")
            for line in lines:
                self._announced(line)
            # What is no announcement is discarded, however long it is.
            text = text[:LINE_CHARACTERS_MAX]
        await self.process.wait()
        self._close_handle()
        self.ended.set()
        # Nobody waits for an announcement that cannot come any more.
        self.settled.set()

    def _announced(self, line: str) -> None:
        said: Any = None
        with suppress(ValueError):
            said = json.loads(line)
        match said:
            case {"event": "ready"}:
                self.address = said.get("address", "")
                self.ready.set()
                self._on_ready()
            case {"event": "settled"}:
                self.settled.set()
            case {"event": "lost", "engine": engine, "process_id": process_id, "cause": cause}:
                self._on_lost(engine, process_id, cause)
            case _:
                pass

    def send(self, number: signal.Signals) -> None:
        """Signal it unless it has ended.

        By its own handle: `Process.terminate` asks first whether it has ended, and so takes the
        exit code away from whoever waits for it.
        """
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def _close_handle(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def exit_text(code: int | None) -> str:
    """An exit code in words."""
    if code is not None and code < 0:
        return f"by signal {-code}"
    return f"with exit code {code}"


def passed_on(code: int | None) -> int:
    """The exit code for a part's unexpected one: only what tells the user what to change."""
    return code if code in (EXIT_USAGE, EXIT_REFUSED) else EXIT_FAILED


class _Deployment:
    """All children of one `supervise` call."""

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        *,
        started: Callable[[Started], None],
        ready: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        self._tasks = tasks
        self._started = started
        self._ready = ready
        self._complain = complain
        self._stopping = False
        self.children: list[_Child] = []
        self._commands: dict[str, Sequence[str]] = {}
        self._restarts: dict[str, list[float]] = {}
        self.failed = anyio.Event()
        self.code = EXIT_FAILED

    async def start(self, name: str, arguments: Sequence[str]) -> _Child:
        """Start a part; one of that name which has ended gives its place to it."""
        self._commands[name] = arguments
        command = (*ENTRY, *arguments, "--json", "--supervised-by", str(os.getpid()))
        process = await anyio.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None,
            start_new_session=True,
        )
        child = _Child(name, process, on_ready=self._is_ready, on_lost=self._lost)
        before = next((n for n, one in enumerate(self.children) if one.name == name), None)
        if before is None:
            self.children.append(child)
        else:
            self.children[before] = child
        self._started(Started(name, process.pid))
        self._tasks.start_soon(self._watch, child)
        return child

    async def _watch(self, child: _Child) -> None:
        await child.watch()
        if self._stopping:
            return
        how = exit_text(child.process.returncode)
        told = f"{child.name} (process {child.process.pid}) "
        if child.given_up:
            told += f"was given up ({child.given_up})"
        elif child.process.returncode == 0:
            # An engine that was drained and told to end is on its way to a new life.
            told += "left in order, though nobody here asked it to:"
        else:
            told += "ended unexpectedly"
        self._complain(f"{told} {how}")
        if self._may_start_again(child):
            await child.process.aclose()
            await self.start(child.name, self._commands[child.name])
            return
        if not self.failed.is_set():
            self.code = passed_on(child.process.returncode)
        child.told = True
        self.failed.set()

    def _is_ready(self) -> None:
        """Whoever read that a part has ended reads when all of them serve again."""
        serve = (one.ready.is_set() and not one.ended.is_set() for one in self.children)
        if self._restarts and not self._stopping and all(serve):
            self._ready(self.children[0].address)

    def _may_start_again(self, child: _Child) -> bool:
        """Whether an engine's end is its own, and not the doing of its settings or its place."""
        unusable = child.process.returncode in (EXIT_USAGE, EXIT_REFUSED) and not child.given_up
        if child is self.children[0] or not child.ready.is_set() or unusable:
            return False
        now = anyio.current_time()
        recent = [t for t in self._restarts.get(child.name, ()) if now - t < RESTART_SECONDS]
        self._restarts[child.name] = [*recent, now]
        return len(recent) < RESTARTS_MAX

    def _lost(self, engine: str, process_id: int, cause: str) -> None:
        """The scheduler has given an engine up: nobody knows what it may still write, so kill it."""
        for child in self.children[1:]:
            if (child.name, child.process.pid) == (engine, process_id):
                child.given_up = cause
                self.kill(child)

    async def end(self, *, drain_seconds: float, hurry: anyio.Event) -> bool:
        """The scheduler settles, the engines leave, the scheduler ends.

        Returns whether all ended by themselves with code 0.
        """
        self._stopping = True
        async with anyio.create_task_group() as hurrying:
            hurrying.start_soon(self._pass_on, hurry)
            clean = await self._end(drain_seconds=drain_seconds)
            hurrying.cancel_scope.cancel()
        return clean

    async def _pass_on(self, hurry: anyio.Event) -> None:
        await hurry.wait()
        for scheduler in self.children[:1]:
            scheduler.send(signal.SIGTERM)

    async def _end(self, *, drain_seconds: float) -> bool:
        clean = True
        for scheduler in self.children[:1]:
            scheduler.send(signal.SIGTERM)
            with anyio.move_on_after(drain_seconds + LEAVE_SECONDS) as patience:
                await scheduler.settled.wait()
            if patience.cancelled_caught:
                self._complain(f"{scheduler.name} (process {scheduler.process.pid}) did not settle")
                clean = False
        for engine in self.children[1:]:
            engine.send(signal.SIGTERM)
        for group in (self.children[1:], self.children[:1]):
            if group == self.children[:1]:
                # Who else is connected was not told to leave, and is not waited for.
                for scheduler in group:
                    scheduler.send(signal.SIGTERM)
            with anyio.move_on_after(LEAVE_SECONDS):
                for child in group:
                    await child.ended.wait()
            for child in group:
                clean &= await self._settled(child)
        return clean

    async def _settled(self, child: _Child) -> bool:
        if not child.ended.is_set():
            self._complain(f"{child.name} (process {child.process.pid}) did not end; killed")
            self.kill(child)
            await child.ended.wait()
            return False
        terminated = child.process.returncode in (-signal.SIGTERM, EXIT_SIGNAL + signal.SIGTERM)
        if terminated and not child.ready.is_set():
            # It was still starting and had nothing to settle.
            return True
        if child.process.returncode != 0:
            if not child.told:
                self._complain(f"{child.name} ended {exit_text(child.process.returncode)}")
            return False
        return True

    async def bury(self) -> None:
        """Nobody is left behind, also when the end was cut short."""
        for child in self.children:
            self.kill(child)
        for child in self.children:
            await child.process.aclose()

    def kill(self, child: _Child) -> None:
        child.send(signal.SIGKILL)


async def supervise(
    parts: Parts,
    *,
    started: Callable[[Started], None],
    ready: Callable[[str], None],
    stop: anyio.Event,
    complain: Callable[[str], None],
    hurry: anyio.Event | None = None,
) -> int:
    """Run the parts until `stop`, then end them in order; 0 if nothing went wrong.

    A part that was set wrongly or refused gives its own exit code (2 or 4), all else 1.
    The scheduler's death ends everything, and so does an engine that cannot be kept running.
    `ready` is told the address when all parts serve, and again when one that was replaced does.
    `hurry` has what is open aborted instead of finished, once `stop` is set.
    """
    with parts.engine_credential() as known:
        async with anyio.create_task_group() as tasks:
            deployment = _Deployment(tasks, started=started, ready=ready, complain=complain)
            try:
                async with anyio.create_task_group() as run:
                    run.start_soon(_cancel_when, stop, run.cancel_scope)
                    run.start_soon(_cancel_when, deployment.failed, run.cancel_scope)
                    await _bring_up(deployment, parts, ready, known)
                clean = await deployment.end(
                    drain_seconds=parts.scheduler.drain_seconds,
                    hurry=anyio.Event() if hurry is None else hurry,
                )
            finally:
                with anyio.CancelScope(shield=True):
                    await deployment.bury()
    return 0 if clean and not deployment.failed.is_set() else deployment.code


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def _bring_up(
    deployment: _Deployment,
    parts: Parts,
    ready: Callable[[str], None],
    known: EphemeralEngine | None,
) -> None:
    scheduler = await deployment.start("scheduler", parts.scheduler_command(known))
    await scheduler.ready.wait()
    engines = [
        await deployment.start(name, command)
        for name, command in parts.engine_commands(scheduler.address, known).items()
    ]
    for engine in engines:
        await engine.ready.wait()
    ready(scheduler.address)
