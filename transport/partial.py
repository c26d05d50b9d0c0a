"""Output that has its name once it is whole.

Owns: the name that it has meanwhile, and that nothing is left of what was cut off.
Must not know: what is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".partial"


@contextmanager
def partial(output: Path) -> Iterator[Path]:
    """Where to write a file or a folder that is to stand at `output`.

    When the block ends it has its name; when it fails it is gone, and what stood there stays.
    A pipe or a device is written as it is.  Raises OSError.
    """
    output = output.resolve()
    if output.exists() and not (output.is_file() or output.is_dir()):
        yield output
        return
    path = output.with_name(output.name + SUFFIX)
    _remove(path)
    try:
        yield path
        path.replace(output)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
