"""A log of any length as JSON Lines.

Owns: that the header, which counts the lines, stands before them.
Must not know: where the log comes from.

The lines go into a temporary file without a name, for their number is known when the last is there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

import attrs

from engine.store import Stored
from transport.aside import NotPutAside
from transport.forensics_read import Capture
from transport.json_values import NUMBER_MAX
from transport.jsonlines import UnknownRecord, entry_line, header_line


@attrs.define
class Lines:
    """What was read so far: the lines behind the header, and what the header says.

    `kept` counts records that say nothing to this version and stand as they are, `left_out` those
    of which nothing could be read.
    """

    file: IO[str]
    entries: int = 0
    kept: int = 0
    left_out: int = 0
    first_position: int = 0
    last_position: int = 0

    def read(self, capture: Capture) -> None:
        """Read the log to its end.  Raises `NotPutAside`."""
        capture.passing_over = self._keep
        for position, entry in capture:
            self.entries += 1
            self._put(entry_line(Stored(position, entry)), position)
        try:
            self.file.flush()
        except OSError as error:
            raise NotPutAside(error) from error

    def write(self, capture: Capture, out: IO[str]) -> None:
        """Header and lines of the log that was read.  Raises OSError."""
        header = header_line(
            complete=capture.claims_whole and not capture.missing and not self.left_out,
            entries=self.entries + self.kept,
            first_position=self.first_position,
            last_position=self.last_position,
            source=capture.source,
            foreign=capture.foreign,
        )
        out.write(header)
        self.file.seek(0)
        shutil.copyfileobj(self.file, out)
        out.flush()

    def _keep(self, record: UnknownRecord) -> None:
        line = _kept_line(record)
        if line is None:
            self.left_out += 1
        else:
            self.kept += 1
            self._put(line, record.position or 0)

    def _put(self, line: str, position: int) -> None:
        try:
            self.file.write(line)
        except OSError as error:
            raise NotPutAside(error) from error
        # A record that says nothing may claim any position, or none.
        if 1 <= position <= NUMBER_MAX:
            self.first_position = self.first_position or position
            self.last_position = position


@contextmanager
def no_lines() -> Iterator[Lines]:
    """Nothing has been read yet; the file ends with the block.  Raises `NotPutAside`."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", newline=""))
        except OSError as error:
            raise NotPutAside(error) from error
        yield Lines(file)


def _kept_line(record: UnknownRecord) -> str | None:
    """A record as it was read, or, out of a segment, its bytes beside the name of its place."""
    said = record.record
    if not record.line and record.position is not None:
        said = {"position": record.position, "event": record.name, **said}
    return json.dumps(said, separators=(",", ":")) + "\n" if said else None
