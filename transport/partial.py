"""Output that has its name once it is whole.

Owns: where it is written meanwhile, and that nothing is left of what was cut off.
Must not know: what is written.

Nothing is removed but what was made here, so two writers never meet: the later one has the name.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".partial"
NAME_CHARACTERS_MAX = 50
SYSTEM = (("/", "dev"), ("/", "proc"))


@contextmanager
def partial_file(output: Path) -> Iterator[Path]:
    """Where to write a file that is to stand at `output`, and takes its place when the block ends.

    A pipe, a device, and a file in a folder where no other can be made, are written as they are.
    Raises OSError.
    """
    if output.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(output))
    # A link stays, and what it leads to is written.
    target = Path(os.path.realpath(output))
    special = output.absolute().parts[:2] in SYSTEM or (target.exists() and not target.is_file())
    if special or (target.exists() and not os.access(target.parent, os.W_OK | os.X_OK)):
        yield output
        return
    path = target.with_name(_name(target))
    try:
        yield path
        if target.exists():
            shutil.copymode(target, path)
        _take_place(path, target)
    finally:
        path.unlink(missing_ok=True)


def _name(target: Path) -> str:
    return f"{target.name[:NAME_CHARACTERS_MAX]}.{secrets.token_hex(4)}{SUFFIX}"


def _take_place(path: Path, target: Path) -> None:
    try:
        path.replace(target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        # Nothing can be put in the place of a file that is a mount of its own.
        shutil.copyfile(path, target)


@contextmanager
def partial_folder(output: Path) -> Iterator[Path]:
    """Where to write the files of a folder that is to stand at `output`, which is empty or absent.

    They are moved there when the block ends, the first by its name as the last: a folder of which
    only a part was moved lacks its beginning.  Raises OSError.
    """
    found = output.is_dir()
    if not found:
        output.mkdir(parents=True)
    path = Path(tempfile.mkdtemp(suffix=SUFFIX, dir=output))
    try:
        yield path
        for one in sorted(path.iterdir(), reverse=True):
            one.rename(output / one.name)
        path.rmdir()
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        if not found:
            output.rmdir()
        raise
