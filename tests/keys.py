"""Credentials for tests: a file of entries, and the tokens that go with them."""

from __future__ import annotations

from pathlib import Path

import attrs

from transport.credentials import CallerRole, Credential, token_digest
from transport.new_credentials import entry_text, new_token
from transport.settings import CallSettings
from transport.tls import Dial, Metadata, Token

CALLERS = (
    Credential(name="acme", role=CallerRole.CLIENT, tenant="acme"),
    Credential(name="globex", role=CallerRole.CLIENT, tenant="globex"),
    Credential(name="engines", role=CallerRole.ENGINE),
    Credential(name="bound", role=CallerRole.ENGINE, engine="prefill-7"),
    Credential(name="operator", role=CallerRole.OPERATOR),
)


@attrs.frozen
class Keys:
    """A credentials file in a folder, and each caller's token."""

    folder: Path
    tokens: dict[str, str]

    @classmethod
    def make(cls, folder: Path) -> Keys:
        """Everybody may call."""
        folder.mkdir(parents=True, exist_ok=True)
        keys = cls(folder, {caller.name: new_token() for caller in CALLERS})
        for name, token in keys.tokens.items():
            keys.token_file(name).write_text(token + "\n")
        keys.write(*keys.tokens)
        return keys

    @property
    def file(self) -> Path:
        return self.folder / "credentials.toml"

    def write(self, *names: str, further: str = "") -> None:
        """From now on these may call; the file is replaced at once, as an editor does it."""
        entries = [
            entry_text(attrs.evolve(c, token_sha256=token_digest(self.tokens[c.name])))
            for c in CALLERS
            if c.name in names
        ]
        new = self.folder / "credentials.new"
        new.write_text("\n".join(entries) + further)
        new.replace(self.file)

    def token_file(self, name: str) -> Path:
        return self.folder / f"{name}.token"

    def metadata(self, name: str) -> Metadata:
        """What a call of this caller bears."""
        return (("authorization", f"Bearer {self.tokens[name]}"),)

    def dial(self, name: str) -> Dial:
        return Dial(token=Token(self.token_file(name)))

    def call(self, name: str) -> CallSettings:
        return CallSettings(token_file=self.token_file(name))
