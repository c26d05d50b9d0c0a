"""Claims about supervision: the order of start and end, unexpected deaths, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import anyio
import pytest

from transport import supervisor
from transport.settings import InvalidSetting, PoolSettings, SchedulerSettings
from transport.supervised_parts import Parts
from transport.supervisor import Started, _Child, supervise

pytestmark = [pytest.mark.anyio, pytest.mark.process]
STUB = Path(__file__).with_name("part_stub.py")


class Stage:
    """A supervised deployment of stubs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Started] = []
        self.complaints: list[str] = []
        self.addresses: list[str] = []
        self.ready = anyio.Event()
        self.stop = anyio.Event()
        self.hurry = anyio.Event()

    def script(self, name: str, what: str) -> None:
        (self.folder / f"{name}.script").write_text(what)

    def on_ready(self, address: str) -> None:
        self.addresses.append(address)
        self.ready.set()

    async def run(self, *, prefill: int = 1, decode: int = 1) -> int:
        parts = Parts(
            prefill=prefill,
            decode=decode,
            scheduler=SchedulerSettings(drain_seconds=0.01),
            pool=PoolSettings(),
        )
        return await supervise(
            parts,
            started=self.started.append,
            ready=self.on_ready,
            stop=self.stop,
            hurry=self.hurry,
            complain=self.complaints.append,
        )

    async def run_until_ready(self, **counts: int) -> int:
        """Stop as soon as all parts are ready."""
        code = -1

        async def run() -> None:
            nonlocal code
            code = await self.run(**counts)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await self.ready.wait()
            self.stop.set()
        return code

    async def until_told(self, what: str, name: str, times: int = 1) -> None:
        """Wait until the story says this of that part, so many times."""
        while self.story(what).count(name) < times:
            await anyio.lowlevel.checkpoint()

    def story(self, what: str) -> list[str]:
        """Names of parts of which this is told, in order."""
        path = self.folder / "story"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == what]

    def alive(self) -> list[str]:
        """Parts whose process still exists."""
        return [one.name for one in self.started if Path(f"/proc/{one.process_id}").exists()]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(supervisor, "ENTRY", (sys.executable, str(STUB), str(tmp_path)))
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 10.0)
    stage = Stage(tmp_path)
    yield stage
    assert stage.alive() == []


async def test_the_scheduler_starts_first_and_ends_last(stage: Stage) -> None:
    """Engines get the address that the scheduler announced, and leave when it has settled."""
    assert await stage.run_until_ready(prefill=2, decode=1) == 0
    names = ["scheduler", "prefill-0", "prefill-1", "decode-0"]
    assert [one.name for one in stage.started] == names
    assert len({one.process_id for one in stage.started}) == 4
    assert stage.addresses == ["127.0.0.1:4321"]
    assert sorted(stage.story("joins:127.0.0.1:4321")) == sorted(names[1:])
    assert stage.story("starts")[0] == "scheduler"
    told = [line.split()[0] for line in (stage.folder / "story").read_text().splitlines()]
    assert told.index("settles") < told.index("ends")
    assert stage.story("ends")[-1] == "scheduler"
    assert sorted(stage.story("ends")) == sorted(names)
    assert stage.complaints == []


@pytest.mark.parametrize("victim", ["scheduler", "prefill-0", "decode-0"])
async def test_an_unexpected_death_ends_everything(stage: Stage, victim: str) -> None:
    """A part that dies by itself is named with its exit code, the others end, and the code is 1."""
    stage.script(victim, "die 7")
    assert await stage.run() == 1
    assert f"{victim} (process " in stage.complaints[0]
    assert "ended unexpectedly with exit code 7" in stage.complaints[0]


async def test_an_engine_that_dies_is_started_again(stage: Stage) -> None:
    """With the same arguments and a process of its own; the end is then as orderly as any."""
    stage.script("decode-0", "die 7 once")
    code = -1

    async def run() -> None:
        nonlocal code
        code = await stage.run(prefill=2)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await stage.until_told("joins:127.0.0.1:4321", "decode-0", 2)
        await stage.ready.wait()
        stage.stop.set()
    assert code == 0
    assert sorted(stage.story("starts").count(name) for name in set(stage.story("starts"))) == [
        *(1, 1, 1, 2)
    ]
    assert len(stage.complaints) == 1
    assert stage.complaints[0].endswith("ended unexpectedly with exit code 7")


async def test_that_all_serve_again_is_said(stage: Stage) -> None:
    """After a part was replaced the deployment says once more that it is ready, and where."""
    stage.script("decode-0", "die 7 once")

    async def run() -> None:
        assert await stage.run(prefill=2) == 0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while len(stage.addresses) < 2:
            await anyio.lowlevel.checkpoint()
        assert stage.story("starts").count("decode-0") == 2
        stage.stop.set()
    assert stage.addresses == ["127.0.0.1:4321"] * 2


async def test_an_engine_that_was_given_up_is_killed_and_started_again(stage: Stage) -> None:
    """A hung writer's process is ended and seen to be gone; a new one takes its place."""
    stage.script("scheduler", "give-up prefill-0")
    stage.script("prefill-0", "stuck")
    code = -1

    async def run() -> None:
        nonlocal code
        code = await stage.run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await stage.until_told("starts", "prefill-0", 2)
        await stage.ready.wait()
        stage.stop.set()
    assert code == 0
    assert stage.complaints[0].endswith("was given up (lease) by signal 9")


async def test_hurry_reaches_the_scheduler(stage: Stage) -> None:
    """Whoever does not want to wait is passed on; the order of the end stays."""
    stage.script("scheduler", "busy")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.run)
        await stage.ready.wait()
        stage.stop.set()
        await stage.until_told("hears", "scheduler")
        stage.hurry.set()
    assert stage.story("ends")[-1] == "scheduler"
    assert stage.complaints == []


@pytest.mark.parametrize("code", [2, 4])
async def test_what_the_user_can_change_is_passed_on(stage: Stage, code: int) -> None:
    """A part that finds its settings unusable, or is refused, gives the exit code, told once."""
    stage.script("decode-0", f"die {code}")
    assert await stage.run() == code
    assert len(stage.complaints) == 1


async def test_a_part_that_fails_at_its_end_is_told(stage: Stage) -> None:
    """An orderly shutdown in which a part exits with another code than 0 is no success."""
    stage.script("decode-0", "fail")
    assert await stage.run_until_ready() == 1
    assert stage.complaints == ["decode-0 ended with exit code 3"]


async def test_a_part_that_does_not_end_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for leaving is limited; who stays longer is killed, and the code is 1."""
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 0.2)
    stage.script("prefill-0", "deaf")
    assert await stage.run_until_ready() == 1
    assert len(stage.complaints) == 1
    assert "prefill-0" in stage.complaints[0]
    assert stage.complaints[0].endswith("did not end; killed")


async def test_stop_before_everything_is_ready(stage: Stage) -> None:
    """A stop while parts are still coming up ends those that were started, with code 0."""
    stage.script("decode-0", "mute")
    code = -1

    async def run() -> None:
        nonlocal code
        code = await stage.run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while "decode-0" not in (one.name for one in stage.started):
            await anyio.lowlevel.checkpoint()
        stage.stop.set()
    assert code == 0
    assert stage.addresses == []


async def test_being_cut_short_leaves_nobody(stage: Stage) -> None:
    """Cancellation kills every part at once."""
    stage.script("decode-0", "deaf")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.run)
        await stage.ready.wait()
        tasks.cancel_scope.cancel()
    assert len(stage.started) == 3
    assert stage.story("ends") == []


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_a_deployment_needs_both_roles(name: str) -> None:
    """Without a prefill or a decode engine nothing can be served, so nothing is started."""
    counts = {"prefill": 1, "decode": 1, name: 0}
    with pytest.raises(InvalidSetting, match=f"{name} = 0"):
        Parts(**counts, scheduler=SchedulerSettings(), pool=PoolSettings())


def test_a_signal_takes_no_exit_code_away() -> None:
    """Who is signalled while nobody has waited for its end keeps its code for who does."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        child = _Child(
            "decode-0",
            cast("anyio.abc.Process", process),
            on_ready=lambda: None,
            on_lost=lambda *_said: None,
        )
        child.send(signal.SIGTERM)
        assert os.waitpid(process.pid, 0) == (process.pid, 0)
