"""New credentials: tokens, the entries that go with them, and files only this user can read.

Owns: how a token is drawn, and the credential that lives as long as one run.
Must not know: who checks it, and what it is good for.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from transport.credentials import CallerRole, Credential, token_digest

TOKEN_PREFIX = "custody_"
"""Lets a scanner of leaked secrets recognise one."""
TOKEN_BYTES = 32


def new_token() -> str:
    """A token that nobody can guess."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def entry_text(entry: Credential) -> str:
    """An entry as it stands in a file."""
    lines = ["[[credential]]"]
    for field in attrs.fields(Credential):
        value = getattr(entry, field.name)
        text = value.value if isinstance(value, CallerRole) else value
        if text:
            # A JSON string is a basic string of TOML.
            lines.append(f"{field.name} = {json.dumps(text)}")
    return "\n".join(lines) + "\n"


def write_private(path: Path, content: bytes) -> None:
    """A new file that only this user can read. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


@attrs.frozen(kw_only=True)
class EphemeralEngine:
    """Files of a credential that lives as long as one run: the token, and its entry."""

    token_file: Path
    credentials: Path


@contextmanager
def ephemeral_engine() -> Iterator[EphemeralEngine]:
    """A credential for the engines of this run, in files that only this user can read."""
    with tempfile.TemporaryDirectory(prefix="custody-") as name:
        folder = Path(name)
        made = EphemeralEngine(
            token_file=folder / "engine.token", credentials=folder / "engines.toml"
        )
        token = new_token()
        entry = Credential(
            name="supervised-engines", role=CallerRole.ENGINE, token_sha256=token_digest(token)
        )
        write_private(made.token_file, token.encode())
        write_private(made.credentials, entry_text(entry).encode())
        yield made
