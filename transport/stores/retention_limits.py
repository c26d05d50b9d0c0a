"""How much of a log is kept, as a setting says it.

Owns: the text form.
Must not know: logs; this is read at the start of every verb, so it imports next to nothing.
"""

from __future__ import annotations

import re

import attrs

_UNITS_NS = {"m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9}
_UNITS_BYTES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LIMIT = re.compile(r"([1-9][0-9]*)([A-Za-z]+)")


@attrs.frozen
class Retention:
    """How much of the log is kept: so long, in nanoseconds, and so many bytes."""

    age_ns: int | None = None
    size_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Retention:
        """Read "30d", "20GiB" or "30d,20GiB".  Raises ValueError."""
        age_ns = size_bytes = None
        for part in text.split(","):
            found = _LIMIT.fullmatch(part.strip())
            number, unit = (int(found[1]), found[2]) if found else (0, "")
            if unit in _UNITS_NS and age_ns is None:
                age_ns = number * _UNITS_NS[unit]
            elif unit in _UNITS_BYTES and size_bytes is None:
                size_bytes = number * _UNITS_BYTES[unit]
            else:
                units = ", ".join((*_UNITS_NS, *_UNITS_BYTES))
                raise ValueError(f"{part!r} is no age and no size; units are {units}, each once")
        return cls(age_ns, size_bytes)
