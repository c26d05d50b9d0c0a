"""The text of one request as its tokens come: whole characters only, and nothing of a stop string.

Owns what may be shown.
It must not know how tokens are chosen, nor the vocabulary beyond what a token spells.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
UTF8_BYTES_MAX = 4


class Detokenizer:
    """Text of one request, token by token; only whole characters leave.

    Bytes that can never become UTF-8 leave as U+FFFD, as in a decode of the whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._previous: list[int] = []
        self._pending: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that became whole with `token`, often empty. Raises UnknownToken."""
        if token in self._tokenizer.special_tokens:
            return ""
        if self._tokenizer.byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token))
        self._tokenizer.token_text(token)
        self._pending.append(token)
        text = self._tokenizer.decode(self._previous + self._pending)
        # A character has at most four bytes, hence at most four byte tokens.
        if text.endswith(REPLACEMENT) and len(self._pending) < UTF8_BYTES_MAX:
            return ""
        new = text[self._shown :]
        # What a token adds can depend on those before it (a leading space), so these are kept.
        self._previous, self._pending = self._pending, []
        self._shown = len(self._tokenizer.decode(self._previous))
        return new

    def flush(self) -> str:
        """What is still held back, at the end of the output."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"", final=True)
        text = self._tokenizer.decode(self._previous + self._pending)[self._shown :]
        self._previous, self._pending, self._shown = [], [], 0
        return text


@attrs.frozen
class StopResult:
    """`text` may be shown. `stop` is the stop string that ended the output, itself not shown."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class StopMatcher:
    """Finds stop strings across the borders of pieces of text.

    The stop string that is complete first wins, the longest of several that end together: the
    result does not depend on how the text was cut.
    After a stop nothing more is shown.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")  # SamplingParams refuses it earlier
        self._stops = tuple(stops)
        self._held = ""
        self._stop: str | None = None

    def push(self, text: str) -> StopResult:
        """Take in `text`; what could be the beginning of a stop string is held back."""
        if self._stop is not None:
            return StopResult("", self._stop)
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends:
            _, start, self._stop = min(ends)
            self._held = ""
            return StopResult(text[:start], self._stop)
        kept = self._held_length(text)
        self._held = text[len(text) - kept :]
        return StopResult(text[: len(text) - kept])

    def flush(self) -> str:
        """What is held back, at the end of an output that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
