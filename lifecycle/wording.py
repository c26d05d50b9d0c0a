"""Numbers of things in a sentence.

Owns: which form of a noun stands beside a number.
Must not know: what is counted, or where the sentence goes.
"""

from __future__ import annotations

HISSING = ("s", "x", "z", "ch", "sh")
VOWELS = "aeiou"


def form(noun: str, number: int) -> str:
    """The noun, which is given for one of it, as it stands beside this number."""
    if number == 1:
        return noun
    if noun.endswith(HISSING):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def counted(number: int, noun: str, spec: str = "") -> str:
    """As in "1 entry" and "2 entries"; `spec` is how the number is written, as `format` takes it."""
    return f"{number:{spec}} {form(noun, number)}"
