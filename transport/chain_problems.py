"""What can be wrong with a log's files, and where.

Owns: the kinds of problems, and one problem as a value.
Must not know: how they are found or worded.
"""

from __future__ import annotations

from enum import Enum

import attrs


class Wrong(Enum):
    """What was done to a log, as far as it can be told."""

    DAMAGED = "damaged"
    """Bytes do not match their check sum."""
    TORN = "torn"
    """The end was cut in the middle of a batch, as an interrupted write leaves it."""
    MISSING = "missing"
    """Positions are not there."""
    REPEATED = "repeated"
    """A batch is there a second time."""
    OUT_OF_ORDER = "out_of_order"
    """A batch stands before one that it was written after."""
    FOREIGN = "foreign"
    """A batch whose predecessor is in no place of this log: it belongs to another one."""
    CHANGED = "changed"
    """A batch that its successor knows by another hash."""
    CLOCK = "clock"
    """Times go backwards."""
    MISNAMED = "misnamed"
    """A file is called otherwise than its header says."""
    ENDS_SEALED = "ends_sealed"
    """The last segment is sealed, so at least one followed it."""
    OTHER_HEAD = "other_head"
    """The chain ends with another hash than was expected."""
    SIGNATURE = "signature"
    """A signature does not hold, or is of another log."""


@attrs.frozen
class Problem:
    """Something wrong, located: segment, offset in the plain segment, and the batch's positions."""

    wrong: Wrong
    segment: str
    offset: int
    first_position: int
    last_position: int
    message: str
