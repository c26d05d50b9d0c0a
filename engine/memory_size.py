"""How much memory a size means, as an operator writes it.

Owns: units, shares, and what is free on this host.
Must not know: pages, or any model; settings are judged by it before one is loaded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", re.ASCII)


class MemorySizeError(ValueError):
    """A KV memory size cannot be read, or is no size to work with; the operator corrects it."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(f"KV memory {text!r}: {reason}")
        self.text = text
        self.reason = reason


def parse_memory(text: str, *, free_bytes: int) -> int:
    """Bytes meant by `"536870912"`, `"512MiB"`, `"1.5GB"` or a share of free memory, `"20%"`.

    Raises:
        MemorySizeError: the text is none of these, is 0, or is a share above 100 %.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise MemorySizeError(
            text, "expected a number of bytes, a size as 512MiB, or a share as 20%"
        )
    number, unit = float(match[1]), match[2].upper()
    if number == float("inf"):
        raise MemorySizeError(text, "is more than can be counted")
    if unit == "%":
        if number > 100:
            raise MemorySizeError(text, "a share is at most 100%")
        size = int(free_bytes * number / 100)
    elif unit in _UNITS:
        # Whole numbers stay integers: a float loses bytes above 2**53.
        size = int(match[1]) * _UNITS[unit] if match[1].isdigit() else int(number * _UNITS[unit])
    else:
        raise MemorySizeError(text, f"unit {match[2]!r} is none of B, KiB, MiB, GiB, TiB, KB ...")
    if size < 1:
        raise MemorySizeError(text, "is less than one byte")
    return size


def measure_free_bytes() -> int:
    """Memory that a new pool could take on this host now, as the kernel estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
