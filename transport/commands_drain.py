"""The verb that takes one engine out of service: `drain`.

Owns: asking until the engine has nothing left, what is said when it was the last, the exit code.
Must not know: how the scheduler places requests, or how an engine ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lifecycle.wording import counted
from transport.commands_shared import (
    CALL,
    DEFAULT_SCHEDULER,
    EXIT_FAILED,
    EXIT_OK,
    Door,
    Json,
    SchedulerAddress,
    Switch,
    UsageError,
    connect,
    note,
    require_timeout,
    say,
    say_json,
)

if TYPE_CHECKING:
    from transport.client import Client
    from transport.pb.admin_pb2 import EngineStatus, GetStatusResponse

ASK_SECONDS = 0.2


def drain(
    engine: str,
    /,
    *,
    wait: Switch = False,
    timeout: float | None = None,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """Give an engine nothing new, so that its siblings take over and it can be stopped.

    Where it has no sibling, a warning on standard error says what follows.

    Parameters
    ----------
    engine
        The engine's name in the fleet.
    wait
        Return when no request runs on it and all its pages are settled; exits 1 if it is lost before.
    timeout
        With --wait: exit 1 after so many seconds; the engine goes on draining.
    scheduler
        Address of a running scheduler.
    json
        Print one JSON document.
    """
    if timeout is not None and not wait:
        raise UsageError("--timeout needs --wait")
    require_timeout(timeout)
    with connect(scheduler, door) as client:
        incarnation = client.drain(engine)
        siblings, warning = _siblings(client.status(), engine)
        if warning and not json:
            note(f"custody: warning: {warning}")
        left: int | None = None
        if wait:
            left = _wait(client, engine, incarnation, timeout=timeout, json=json)
    drained = left == 0
    if json:
        about = {"engine": engine, "incarnation": incarnation, "siblings": siblings}
        say_json(
            about
            | ({"warning": warning} if warning else {})
            | ({"drained": drained} if wait else {})
        )
    elif drained:
        say(f"{engine} is drained: nothing runs on it")
    elif not wait:
        say(f"{engine} is draining")
    return EXIT_OK if drained or not wait else EXIT_FAILED


def _siblings(status: GetStatusResponse, engine: str) -> tuple[int, str]:
    """How many engines of its role take new requests, and what follows when none does."""
    from transport.pb.admin_pb2 import ENGINE_STATE_ATTACHED
    from transport.pb.lifecycle_pb2 import Role

    role = next((one.role for one in status.engines if one.engine == engine), None)
    of_role = [one for one in status.engines if one.role == role]
    taking = sum(one.state == ENGINE_STATE_ATTACHED for one in of_role)
    if role is None or taking:
        return taking, ""
    name = Role.Name(role).removeprefix("ROLE_").lower()
    return 0, (
        f"no {name} engine takes requests now (0 of {len(of_role)}), "
        f"{counted(status.queued, 'request')} in the queue; what comes waits for one as long as the "
        f"scheduler's --engine-wait-seconds, not at all once none is attached, and is then refused "
        f"as NO_ENGINE"
    )


def _wait(
    client: Client, engine: str, incarnation: int, *, timeout: float | None, json: bool
) -> int | None:
    """How many requests it still has: 0 when it is drained, None when it was lost before."""
    from transport.pb.admin_pb2 import ENGINE_STATE_LOST
    from transport.progress import Waiting, on_terminal

    until = None if timeout is None else time.monotonic() + timeout
    with Waiting(f"draining {engine}", shown=on_terminal() and not json) as waiting:
        while True:
            found = _life(client, engine, incarnation)
            if found is None or found.state == ENGINE_STATE_LOST:
                waiting.stop()
                note(f"custody: {engine}/{incarnation} was lost before it was drained")
                return None
            left: int = found.requests
            waiting.say(f"{engine} has {counted(left, 'request')} left")
            if left == 0:
                return 0
            if until is not None and time.monotonic() >= until:
                waiting.stop()
                note(f"custody: {engine} still has {counted(left, 'request')} after {timeout:g} s")
                return left
            time.sleep(ASK_SECONDS)


def _life(client: Client, engine: str, incarnation: int) -> EngineStatus | None:
    named = [e for e in client.status().engines if e.engine == engine]
    return next((e for e in named if e.incarnation == incarnation), None)
