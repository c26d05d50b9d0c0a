"""Who may call: credentials from TOML files, read again when they change.

Owns: the files' form, and finding the credential of a token or a certificate.
Must not know: gRPC, methods, and what a role may do.

A token has 256 random bits, so its plain SHA-256 cannot be turned back; tokens themselves are
never stored.  Looking one up compares digests only: whoever guesses tokens learns nothing from
the time that it takes, because a digest says nothing about how near its token was.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import structlog

TOKEN_CHARACTERS_MAX = 512
ENTRIES_MAX = 10_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
DIGEST = re.compile(r"[0-9a-f]{64}")

_log = structlog.get_logger("custody.credentials")


class CallerRole(Enum):
    """What a caller is; each may do what the table of methods says."""

    CLIENT = "client"
    ENGINE = "engine"
    OPERATOR = "operator"


class CredentialsError(ValueError):
    """A credentials file cannot be used; no value of it stands in the message."""

    def __init__(self, path: Path, reason: str, *, entry: str = "") -> None:
        super().__init__(f"{path}: {entry + ': ' if entry else ''}{reason}")
        self.path = path
        self.entry = entry
        self.reason = reason


@attrs.frozen(kw_only=True)
class Credential:
    """One entry: a client has a tenant, an engine may have the only id under which it joins."""

    name: str
    role: CallerRole
    tenant: str = ""
    engine: str = ""
    token_sha256: str = attrs.field(default="", repr=False)
    certificate_sha256: str = attrs.field(default="", repr=False)
    certificate_name: str = attrs.field(default="", repr=False)


@attrs.frozen(eq=False)
class Credentials:
    """All entries of some files at one moment."""

    entries: frozenset[Credential]
    _by_token: Mapping[str, Credential]
    _by_certificate: Mapping[str, Credential]
    _by_certificate_name: Mapping[str, Credential]

    @classmethod
    def of(cls, entries: Iterable[Credential]) -> Credentials:
        """An index of these entries, whose secrets differ."""
        entries = tuple(entries)
        return cls(
            frozenset(entries),
            {e.token_sha256: e for e in entries if e.token_sha256},
            {e.certificate_sha256: e for e in entries if e.certificate_sha256},
            {e.certificate_name: e for e in entries if e.certificate_name},
        )

    @property
    def by_certificate(self) -> bool:
        """Whether anybody is known by a certificate."""
        return bool(self._by_certificate or self._by_certificate_name)

    def of_token(self, token: str) -> Credential | None:
        """Whose token this is."""
        if len(token) > TOKEN_CHARACTERS_MAX:
            return None
        digest = token_digest(token)
        found = self._by_token.get(digest)
        known = "" if found is None else found.token_sha256
        return found if hmac.compare_digest(known, digest) else None

    def of_certificate(self, pem: bytes, names: Iterable[str]) -> Credential | None:
        """Whose certificate this is, by fingerprint or else by the one name that is known."""
        found = self._by_certificate.get(certificate_digest(pem))
        if found is not None:
            return found
        by_name = {self._by_certificate_name[n] for n in names if n in self._by_certificate_name}
        return by_name.pop() if len(by_name) == 1 else None


def token_digest(token: str) -> str:
    """What a credentials file holds of a token."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def certificate_digest(pem: bytes) -> str:
    """SHA-256 of a certificate's DER form; "" for what is none."""
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).hexdigest()
    except ValueError:
        return ""


# --- files ----------------------------------------------------------------------------------------


def read_credentials(path: Path) -> tuple[Credential, ...]:
    """The entries of a file. Raises CredentialsError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CredentialsError(path, error.strerror or "cannot be read") from error
    except UnicodeDecodeError as error:
        raise CredentialsError(path, "is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise CredentialsError(path, f"is no TOML: {error}") from error
    tables = values.pop("credential", [])
    if values or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise CredentialsError(path, "holds nothing but [[credential]] tables")
    if len(tables) > ENTRIES_MAX:
        raise CredentialsError(path, f"{len(tables)} of them exceed the limit of {ENTRIES_MAX}")
    entries = [_entry(path, number, table) for number, table in enumerate(tables, start=1)]
    _differ(path, entries)
    return tuple(entries)


def _differ(path: Path, entries: Iterable[Credential]) -> None:
    """Names and secrets are unique, so that a caller is one credential."""
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        for field in ("name", "token_sha256", "certificate_sha256", "certificate_name"):
            key = field, getattr(entry, field)
            if key[1] and key in seen:
                raise CredentialsError(path, f"another entry has this {field}", entry=entry.name)
            seen.add(key)


def _entry(path: Path, number: int, table: Mapping[str, Any]) -> Credential:
    try:
        return make_entry(table)
    except ValueError as error:
        name = table.get("name")
        plain = isinstance(name, str) and NAME.fullmatch(name)
        entry = f"credential {number}" + (f" ({name})" if plain else "")
        raise CredentialsError(path, str(error), entry=entry) from None


def make_entry(table: Mapping[str, Any]) -> Credential:
    """An entry of these values. Raises ValueError, in whose message no value stands."""
    known = {field.name for field in attrs.fields(Credential)}
    if table.keys() - known:
        # The keys alone: somebody may have written a token here.
        raise ValueError(f"unknown keys: {', '.join(sorted(table.keys() - known))}")
    if not all(isinstance(value, str) for value in table.values()):
        raise ValueError("every value is a string")
    if not NAME.fullmatch(table.get("name", "")):
        raise ValueError("it needs a plain name")
    if table.get("role") not in {role.value for role in CallerRole}:
        roles = ", ".join(role.value for role in CallerRole)
        raise ValueError(f"role must be one of {roles}")
    entry = Credential(**{**table, "role": CallerRole(table["role"])})
    fault = _fault(entry)
    if fault:
        raise ValueError(fault)
    return entry


def _fault(entry: Credential) -> str:
    if bool(entry.tenant) is not (entry.role is CallerRole.CLIENT):
        return "a client, and nobody else, has a tenant"
    if entry.tenant and not NAME.fullmatch(entry.tenant):
        return "the tenant's name is not plain"
    if entry.engine and entry.role is not CallerRole.ENGINE:
        return "only an engine is bound to an engine's id"
    shown = (entry.token_sha256, entry.certificate_sha256, entry.certificate_name)
    if sum(map(bool, shown)) != 1:
        return "exactly one of token_sha256, certificate_sha256, certificate_name is needed"
    for digest in shown[:2]:
        if digest and not DIGEST.fullmatch(digest):
            return "a SHA-256 has 64 lower-case hexadecimal digits"
    return ""


class CredentialFiles:
    """The credentials of some files; `engines` is a file in which only engines count."""

    def __init__(self, path: Path, engines: Path | None = None) -> None:
        """Read the files. Raises CredentialsError."""
        self._paths = tuple(p for p in (path, engines) if p is not None)
        self._engines = engines
        self._stamps = self._stamp()
        self.current = self._read()

    def refresh(self) -> bool:
        """Read changed files again; whether that gave other credentials.

        A new file that cannot be used leaves the old credentials in force.
        """
        stamps = self._stamp()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self.current = self._read()
        except CredentialsError as error:
            _log.error("credentials_unusable", reason=str(error), entries=len(self.current.entries))
            return False
        _log.info("credentials_read", entries=len(self.current.entries))
        return True

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(file_stamp(path) for path in self._paths)

    def _read(self) -> Credentials:
        entries: list[Credential] = []
        for path in self._paths:
            found = read_credentials(path)
            if path is self._engines:
                found = tuple(e for e in found if e.role is CallerRole.ENGINE)
            entries += found
            _differ(path, entries)
        return Credentials.of(entries)


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced or written; None when there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
