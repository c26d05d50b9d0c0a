"""The lock that keeps a log's folder to one writer at a time.

Owns: the lock's file.
Must not know: what else is in the folder.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from engine.store import StoreLocked, StoreUnavailable

LOCK_FILE = "lock"


def take_lock(folder: Path) -> int:
    """Make the folder if need be and lock it; closing the returned handle unlocks it.

    The system closes it when the process dies, however it dies.
    Raises `StoreLocked` or `StoreUnavailable`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreUnavailable(str(error)) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StoreLocked(str(folder)) from error
    return handle
