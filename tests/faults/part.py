"""A part of the program with a gate in its shell: `part SWITCHBOARD VERB [NAME] FLAGS...`.

The command line with the shells' constructors given what a harness may give them; the product has
no way to ask for it.
"""

from __future__ import annotations

import sys
from functools import partial

import transport.engine_lives
import transport.scheduler_shell
from tests.faults.gate import Gate, RefusingDisk
from tests.faults.wire import join
from transport import cli
from transport.stores.segments import SegmentStore


def main() -> None:
    """Join the harness, then be the part."""
    path, verb, *rest = sys.argv[1:]
    if verb == "scheduler":
        disk = RefusingDisk()
        disk.wire = join(path, verb, disk.obey)
        store = partial(SegmentStore, disk=disk)
        transport.scheduler_shell.SegmentStore = store  # type: ignore[attr-defined, assignment]
    else:
        gate = Gate()
        gate.wire = join(path, rest[0], gate.obey)
        run = partial(transport.engine_lives.run_engine, hooks=gate)
        transport.engine_lives.run_engine = run
    sys.argv[1:] = [verb, *rest]
    cli.main()


main()
