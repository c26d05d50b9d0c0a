"""Reading many values without the garbage collector.

Owns: that it is as it was afterwards.
Must not know: what is read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector away: a log's values hold no cycles, and it looks at all of them.

    Counting references still frees everything at once.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
