"""Foreign text as one line that commands no terminal.

Owns: which characters are spelt instead of written.
Must not know: where a line goes.
"""

from __future__ import annotations

_SPELT = {
    number: f"\\u{number:04x}"
    for number in (
        *(one for one in range(32) if chr(one) != "\t"),
        *range(127, 160),
        # Ends of lines and paragraphs, changes of direction, and halves of surrogate pairs.
        *(0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
        *range(0xD800, 0xE000),
    )
}


def spelt(text: str) -> str:
    """The text with what a terminal obeys, or an encoder refuses, spelt as JSON spells it."""
    return text.translate(_SPELT)
