"""Claims about running a deployment of real processes: hung parts, impatient ends, restarts.

Every log is read from its files at the end, and must be whole and clean.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from engine.store import Stored
from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    Cause,
    Lost,
    LostCause,
)
from tests.log_files import read_log
from tests.process_harness import (
    READY_SECONDS,
    STOP_SECONDS,
    Deployment,
    collect,
    ids_request,
    judged,
    text_request,
    tiny_model,
    wait_until,
)
from transport.child import PROGRAM, Child
from transport.client import Client, Refused
from transport.pb.admin_pb2 import ENGINE_STATE_ATTACHED
from transport.pb.admin_pb2 import ENGINE_STATE_LOST as LOST

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
TINY_FLAGS = ("--kv-memory=4MiB", "--page-tokens=16")
LONG = 300
FAREWELL = 2000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("operations"))


class Serve:
    """`custody serve` as a process."""

    def __init__(self, folder: Path, model: Path, *flags: str, engines: int = 1) -> None:
        """So many engines of each role."""
        self.log = folder / "log"
        self._parts = 1 + 2 * engines
        flags = (*flags, f"--prefill={engines}", f"--decode={engines}")
        words = ["serve", "--json", "--port=0", f"--log={self.log}", "--model", str(model)]
        self.child = Child("serve", [*words, *TINY_FLAGS, *flags], errors=folder / "errors")
        self.processes: dict[str, int] = {}
        self.client: Client

    def __enter__(self) -> Self:
        try:
            while len(self.processes) < self._parts:
                self.next_started()
            self.client = Client(self.child.wait_event("ready", timeout=READY_SECONDS)["address"])
        except BaseException:
            self.child.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.__exit__(None, None, None)
        self.child.kill()

    def next_started(self) -> str:
        """The part that is started next."""
        said = self.child.wait_event("started", timeout=READY_SECONDS)
        self.processes[said["part"]] = said["process_id"]
        return str(said["part"])

    def entries(self) -> Sequence[Stored]:
        """The log's files, judged: whole and clean."""
        file = read_log(self.log)
        assert file.complete
        judged(list(file.entries), "serve")
        return file.entries

    def whole(self) -> bool:
        """Whether every engine is attached and every page of its is free."""
        return all(
            engine.state == ENGINE_STATE_ATTACHED
            and all(rank.pages.free == rank.pages.capacity for rank in engine.ranks)
            for engine in self.client.status().engines
        )

    def wait_for(self, event: type[Any]) -> Any:
        """Follow the log until such an event was appended."""
        for one in self.client.tail(follow=True):
            if isinstance(one.entry.event, event):
                return one.entry.event
        raise AssertionError(event)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_hung_engine_is_killed_and_replaced(tmp_path: Path, tiny: Path, role: str) -> None:
    """Past its lease it is lost, its process is ended, and a new one serves; no page stays away.

    The request that decoded on it goes on elsewhere, and its client sees one answer.
    """
    with Serve(tmp_path, tiny, "--lease-seconds=5", engines=2) as serve:
        alone = collect(serve.client.generate(ids_request(range(3, 40), LONG, ignore_eos=True)))
        stream = serve.client.generate(ids_request(range(3, 40), LONG, ignore_eos=True))
        first = [next(stream), next(stream)]
        engine = str(getattr(first[0].admission, f"{role}_engine"))
        stopped = serve.processes[engine]
        os.kill(stopped, signal.SIGSTOP)
        answer = collect(iter([*first, *stream]))
        assert answer.tokens == alone.tokens
        lost = serve.wait_for(Lost)
        assert (lost.engine, lost.cause) == (engine, LostCause.LEASE)
        assert serve.next_started() == engine
        assert not Path(f"/proc/{stopped}").exists()
        wait_until("every engine is back with its pages", serve.whole, seconds=READY_SECONDS)
        collect(serve.client.generate(text_request("served again", 4)))
        serve.child.signal(signal.SIGTERM)
        assert serve.child.wait(timeout=STOP_SECONDS) == 0, serve.child.said_errors()
        lives = [
            one.entry.event.incarnation
            for one in serve.entries()
            if isinstance(one.entry.event, Attached) and one.entry.event.engine == engine
        ]
        assert len(lives) == 2
        assert lives[0] < lives[1]


def ask_until_refused(client: Client) -> None:
    """Small requests, one after the other; only a refusal ends this."""
    while True:
        collect(client.generate(text_request("too late", 1)))


def test_a_second_signal_ends_at_once_with_an_event_for_each_request(
    tmp_path: Path, tiny: Path
) -> None:
    """The client is told, the log says so and is whole, and the exit code is not 0."""
    with Serve(tmp_path, tiny) as serve:
        stream = serve.client.generate(ids_request(range(3, 40), FAREWELL, ignore_eos=True))
        next(stream)
        serve.child.signal(signal.SIGTERM)
        with pytest.raises(Refused) as refused:
            ask_until_refused(serve.client)
        assert refused.value.reason == "DRAINING"
        serve.child.signal(signal.SIGTERM)
        with pytest.raises(Refused) as caught:
            for _ in stream:
                pass
        assert caught.value.reason == "SHUTDOWN"
        assert serve.child.wait(timeout=STOP_SECONDS) == 1, serve.child.said_errors()
        causes = [
            e.entry.event.cause for e in serve.entries() if isinstance(e.entry.event, Aborted)
        ]
        assert causes == [Cause.SHUTDOWN]


def test_an_engine_from_outside_does_not_hold_up_the_end(tmp_path: Path, tiny: Path) -> None:
    """It was not told to leave, so nobody waits for it."""
    with Serve(tmp_path, tiny) as serve:
        arguments = ["decode", "outside", "--scheduler", serve.client.address]
        arguments += ["--model", str(tiny), "--json", *TINY_FLAGS]
        outside = Child("outside", arguments, errors=tmp_path / "outside.errors")
        try:
            outside.wait_event("ready", timeout=READY_SECONDS)
            serve.child.signal(signal.SIGTERM)
            # Less than the time that engines which were told to leave may take.
            assert serve.child.wait(timeout=10) == 0, serve.child.said_errors()
        finally:
            outside.kill()
        serve.entries()


def pools_mapped(process_id: int) -> int:
    """How many pools a process has in its address space, its own and others'."""
    lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:custody-pool" in line})


def test_memory_of_a_killed_engine_is_nobodys(tmp_path: Path, tiny: Path) -> None:
    """A writer lets go of a lost owner's pool, so that `kill -9` leaves nothing behind."""
    with Deployment(tmp_path / "here", tiny, engine=TINY_FLAGS, lease_seconds=3) as here:
        here.start_engines("prefill-0", "decode-0")
        here.ask(text_request("hello", 4))
        prefill = here.children["prefill-0"].process_id
        assert pools_mapped(prefill) == 1
        for number in (1, 2):
            here.kill_engine(f"decode-{number - 1}")
            here.start_engines(f"decode-{number}")
            here.ask(text_request("hello again", 4))
            here.wait_until("the dead pool is let go", lambda: pools_mapped(prefill) == 1)
        here.wait_whole()


def test_a_paused_scheduler_keeps_its_log_and_goes_on(tmp_path: Path, tiny: Path) -> None:
    """A second one refuses to start meanwhile; when the first wakes up nobody was lost."""
    with Deployment(tmp_path / "here", tiny, engine=TINY_FLAGS, lease_seconds=2) as here:
        here.start_engines("prefill-0", "decode-0")
        before = here.ask(text_request("hello", 4))
        scheduler = here.children["scheduler"].process_id
        os.kill(scheduler, signal.SIGSTOP)
        try:
            command = [*PROGRAM, "scheduler", "--model", str(tiny), "--port=0", f"--log={here.log}"]
            second = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=READY_SECONDS
            )
        finally:
            os.kill(scheduler, signal.SIGCONT)
        assert second.returncode == 1
        assert "held by another scheduler" in second.stderr
        after = here.ask(text_request("hello", 4))
        assert after.tokens == before.tokens
        assert not [e for e in here.history().fleet.lives if e[1].lost is not None]


def test_a_hung_engine_that_wakes_up_begins_another_life(tmp_path: Path, tiny: Path) -> None:
    """In the same process it joins again in other memory, and nobody has the old pool mapped."""
    with Deployment(tmp_path / "here", tiny, engine=TINY_FLAGS, lease_seconds=2) as here:
        here.start_engines("prefill-0", "decode-0")
        here.ask(text_request("hello", 4))
        old = here.engine_status("decode-0").incarnation
        child = here.children["decode-0"]
        child.signal(signal.SIGSTOP)
        here.wait_until("it is lost", lambda: here.engine_status("decode-0").state == LOST)
        child.signal(signal.SIGCONT)
        here.wait_until("it is back", lambda: here.engine_status("decode-0").incarnation > old)
        here.wait_until("it serves", lambda: here.engine_status("decode-0").ranks[0].connected)
        assert child.process.poll() is None
        answer = here.ask(text_request("hello", 4))
        legs = [e.decode for e in here.events(answer.request) if isinstance(e, Admitted)]
        assert legs[0].incarnation > old
        processes = [here.children[name].process_id for name in ("prefill-0", "decode-0")]
        here.wait_until("one pool is mapped", lambda: [*map(pools_mapped, processes)] == [1, 1])
        here.wait_whole()
