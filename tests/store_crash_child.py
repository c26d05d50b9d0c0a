"""Writers of a log that are there to be killed, forked from one small process.

Run as a program it reads lines `<folder> <seed> <death>` and forks a writer for each.  The writer
reports on standard output, one line each, what a scheduler would act on: `P` its process, `E` an
epoch taken, `A` a position appended, `D` a position made durable, `S` segments sealed, `X` an
error.  When the writer is dead, `Z` follows with the signal that ended it.  With a `death` above 0
the writer kills itself within its so-manyth call that changes a file; otherwise others do it.

Owns: what writers write, and what their entries must look like when they are read again.
Must not know: what the one who kills is looking for.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from lifecycle.events import ByScheduler, Cause, Entry, Requeued
from lifecycle.ids import RequestId, request_id
from transport.stores.disk import Disk
from transport.stores.segments import SegmentStore

BIG_BYTES = 30_000


class Hasty(Disk):
    """Leaves out what only lost power could show, because waiting for disks takes most time."""

    def sync(self, handle: int) -> None:
        pass


class DyingDisk(Hasty):
    """Kills its own process within one of the calls: before it, after it, or in mid-write."""

    def __init__(self, calls: int, chance: random.Random) -> None:
        self._calls = calls
        self._chance = chance

    def _due(self) -> bool:
        self._calls -= 1
        return self._calls == 0

    def write_at(self, handle: int, data: bytes | memoryview, *, offset: int) -> int:
        if self._due():
            os.pwrite(handle, data[: self._chance.randint(0, len(data))], offset)
            die()
        return super().write_at(handle, data, offset=offset)

    def sync(self, handle: int) -> None:
        if self._due():
            die()
        super().sync(handle)

    def rename(self, old: Path, new: Path) -> None:
        if self._due():
            if self._chance.random() < 0.5:
                super().rename(old, new)
            die()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        if self._due():
            if self._chance.random() < 0.5:
                super().remove(path)
            die()
        super().remove(path)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def entry_of(request: RequestId, sequence: int) -> Entry:
    """The one entry that any writer writes there; every seventh is big, all differ."""
    mark = f"{request}/{sequence}/"
    size = BIG_BYTES if sequence % 7 == 6 else 20
    text = mark * (1 + size // len(mark))
    return Entry(request, sequence, 1, ByScheduler(1), sequence, Requeued(Cause.DEADLINE, text, 0))


def report(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def write(folder: Path, seed: int, death: int) -> None:
    """Append, flush and seal until killed."""
    chance = random.Random(seed)
    # Some wait for the disk, so that they can die in the middle of it.
    patient = chance.random() < 0.1
    disk = DyingDisk(death, chance) if death else Disk() if patient else Hasty()
    store = SegmentStore(folder, segment_bytes=chance.choice((2_000, 40_000)), disk=disk)
    epoch = store.take_epoch()
    report(f"E {epoch}")
    if chance.random() < 0.5:
        # As the scheduler does it: flushes run beside appends.
        threading.Thread(target=flush_for_ever, args=(store,), daemon=True).start()
    lengths = [0, 0, 0]
    while True:
        number = chance.randrange(len(lengths))
        request = request_id(epoch=epoch, serial=number + 1)
        count = chance.randint(1, 5)
        start = lengths[number]
        entries = [entry_of(request, start + n) for n in range(count)]
        first = store.append(request, start, entries)
        lengths[number] += count
        report(f"A {first + count - 1}")
        what = chance.random()
        if what < 0.2:
            report(f"D {store.flush()}")
        elif what < 0.3:
            report(f"S {store.seal()}")


def flush_for_ever(store: SegmentStore) -> None:
    while True:
        report(f"D {store.flush()}")


def main() -> None:
    for line in sys.stdin:
        folder, seed, death = line.rsplit(" ", 2)
        process = os.fork()
        if process == 0:
            try:
                report(f"P {os.getpid()}")
                write(Path(folder), int(seed), int(death))
            except BaseException as error:  # noqa: BLE001  # reported, then the killer is awaited
                report(f"X {error!r}")
                signal.pause()
        _, status = os.waitpid(process, 0)
        report(f"Z {os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}")


if __name__ == "__main__":
    main()
