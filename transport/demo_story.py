"""How the demo tells its story: lines for people, or JSON Lines.

Owns: the form of headings, sentences, checked claims and logs.
Must not know: what the story is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from engine.store import Stored
from transport import render
from transport.commands_shared import say, say_json, say_table
from transport.jsonlines import entry_object


class Differs(Exception):
    """Something that the demo claims is not so."""


class Story:
    """What is told, in order; in JSON each piece has an `event` that says what it is."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def heading(self, text: str) -> None:
        """What comes next."""
        if not self._json:
            say()
        self._tell("heading", text, f"--- {text}")

    def say(self, text: str, **about: Any) -> None:
        """A sentence; `about` are its figures."""
        self._tell("said", text, f"  {text}", **about)

    def say_all(self, lines: Iterable[str]) -> None:
        """Several sentences."""
        for line in lines:
            self.say(line)

    def check(self, claim: str, holds: bool) -> None:
        """Say a claim that holds; raise for one that does not."""
        if not holds:
            raise Differs(claim)
        self._tell("checked", claim, f"  checked: {claim}")

    def piece(self, text: str) -> None:
        """A piece of an answer as it comes; nothing in JSON, where the answer is one line."""
        if not self._json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def answered(self, text: str) -> None:
        """The whole answer, whose pieces people have seen."""
        if self._json:
            say_json({"event": "answered", "text": text})
        else:
            say()

    def log(self, entries: Sequence[Stored]) -> None:
        """The entries of a request."""
        if not self._json:
            say_table(render.log_table(entries))
            return
        for one in entries:
            say_json({"event": "entry", "entry": entry_object(one)})

    def _tell(self, event: str, text: str, line: str, **about: Any) -> None:
        if self._json:
            say_json({"event": event, "text": text, **about})
        else:
            say(line)
