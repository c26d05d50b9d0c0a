"""Claims about seeing processes end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from transport.process_ends import PROCESS_CHARACTERS_MAX, Watched, this_process

SAYING = (
    "from transport.process_ends import this_process; import sys; "
    "print(this_process(), flush=True); sys.stdin.read()"
)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has said which one it is, and ends with its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAYING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_a_living_process_has_not_ended() -> None:
    """This process is seen alive, by a text that fits in a message."""
    watched = Watched(this_process())
    assert watched.process_id == os.getpid()
    assert not watched.ended()
    assert len(this_process()) <= PROCESS_CHARACTERS_MAX
    watched.close()


def test_a_killed_process_has_ended_and_a_stopped_one_has_not(
    child: tuple[subprocess.Popen[str], str],
) -> None:
    """Standing still is no end; the end is seen before anybody has reaped the process, for ever."""
    process, named = child
    watched = Watched(named)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert not watched.ended()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert watched.ended()
    process.wait()
    assert watched.ended()


def test_a_process_that_has_ended_before_it_is_watched_is_seen_to_be_gone(
    child: tuple[subprocess.Popen[str], str],
) -> None:
    """Nobody of this namespace has its number any more."""
    process, named = child
    process.kill()
    process.wait()
    assert Watched(named).ended()


def test_a_number_that_was_given_again_is_of_a_process_that_has_ended(
    child: tuple[subprocess.Popen[str], str],
) -> None:
    """The same number with another start is another process."""
    _, named = child
    space, _, started = named.rpartition("/")
    assert Watched(f"{space}/{int(started) - 1}").ended()


@pytest.mark.parametrize("part", ["boot", "namespace"])
def test_a_process_of_elsewhere_is_never_seen_to_end(
    child: tuple[subprocess.Popen[str], str], part: str
) -> None:
    """The number of another machine, or of another namespace, says nothing about processes here."""
    process, named = child
    boot, namespace, number, started = named.split("/")
    elsewhere = f"0{boot[1:]}x/{namespace}" if part == "boot" else f"{boot}/{int(namespace) + 1}"
    process.kill()
    process.wait()
    watched = Watched(f"{elsewhere}/{number}/{started}")
    assert not watched.ended()


@pytest.mark.parametrize("end", ["", "/", "/1", "/1/", "//1", "/-1/1", "/1/x", "/²/1", "/1/1/1"])
def test_a_text_that_names_no_process_proves_nothing(end: str) -> None:
    """Something else than a number and a start is never seen to end."""
    space = "/".join(this_process().split("/")[:2])
    assert not Watched(space + end).ended()


def test_a_number_that_no_process_can_have_proves_nothing() -> None:
    """The kernel refuses it without saying that nobody has it."""
    space = "/".join(this_process().split("/")[:2])
    assert not Watched(f"{space}/{1 << 80}/1").ended()
