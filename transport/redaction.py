"""Identities replaced by salted commitments, with their clear values in a side file.

Owns: which fields say who somebody is, and what stands in their place.
Must not know: archives.

A commitment is the SHA-256 of a random salt and the value.  Equal values get equal commitments, so
that every verdict stays what it was; without the side file nobody can tell what they stand for.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping

import attrs

from lifecycle.events import Aborted, Admitted, Attached, Entry, Rejected

SALT_BYTES = 16
PREFIX = "redacted:"


class Redaction:
    """Hands out commitments, and remembers what they stand for."""

    def __init__(self) -> None:
        """Nothing has been replaced yet."""
        self._known: dict[tuple[str, str], tuple[str, str]] = {}

    def commitment(self, field: str, value: str) -> str:
        """What stands for the value in this field; an empty value stays empty."""
        if not value:
            return value
        known = self._known.get((field, value))
        if known is None:
            salt = secrets.token_hex(SALT_BYTES)
            known = self._known[field, value] = (commit(salt, value), salt)
        return known[0]

    def entry(self, entry: Entry) -> Entry:
        """The entry without identities; numbers, ids of requests and engines' names stay."""
        event = entry.event
        if isinstance(event, Admitted):
            event = attrs.evolve(event, tenant=self.commitment("tenant", event.tenant))
        elif isinstance(event, Rejected):
            event = attrs.evolve(
                event,
                tenant=self.commitment("tenant", event.tenant),
                reason=self.commitment("reason", event.reason),
            )
        elif isinstance(event, Aborted):
            event = attrs.evolve(event, message=self.commitment("message", event.message))
        elif isinstance(event, Attached):
            places = tuple(self.commitment("endpoint", place) for place in event.endpoints)
            event = attrs.evolve(event, endpoints=places)
        else:
            return entry
        return attrs.evolve(entry, event=event)

    def side_file(self) -> bytes:
        """The clear values, by their commitments."""
        clear = {
            stands: {"field": field, "salt": salt, "value": value}
            for (field, value), (stands, salt) in sorted(self._known.items())
        }
        return json.dumps(clear, indent=1, ensure_ascii=False).encode()


def commit(salt: str, value: str) -> str:
    """The commitment to a value."""
    return PREFIX + hashlib.sha256(f"{salt}:{value}".encode()).hexdigest()[:40]


def broken_commitments(side_file: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Commitments that do not stand for what the side file says."""
    return [
        stands
        for stands, clear in side_file.items()
        if commit(clear.get("salt", ""), clear.get("value", "")) != stands
    ]
