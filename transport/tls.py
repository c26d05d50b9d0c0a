"""TLS and bearer tokens on both ends: how a server listens, and how a process dials.

Owns: reading certificates, keys and token files, and reading them again when they change.
Must not know: who may do what, and what is called.

A server's new certificate counts from the next connection on.
Files that do not fit together leave the old ones in force: they are replaced one after the other.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import attrs
import grpc
import structlog

from transport.credentials import TOKEN_CHARACTERS_MAX, file_stamp
from transport.settings import DialSettings, InvalidSetting

Options = Sequence[tuple[str, int]]
Metadata = tuple[tuple[str, str], ...]

_log = structlog.get_logger("custody.tls")


class ListenSettings(Protocol):
    """The settings of a process that listens."""

    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_client_ca(self) -> Path | None: ...


# --- listening ------------------------------------------------------------------------------------


class Certificates:
    """A server's certificate, key, and the authority of its clients, as files."""

    def __init__(self, *, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Read them. Raises OSError or ssl.SSLError for files that are none or do not fit."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._lock = threading.Lock()
        self._stamps = self._stamp()
        self._first = self._read()

    def server_credentials(self) -> grpc.ServerCredentials:
        """What gRPC listens with; it asks for changes at every new connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type]  # None is allowed and means no change
            require_client_authentication=self._client_ca is not None,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called on a thread of gRPC before a handshake; None goes on with what there is."""
        with self._lock:
            stamps = self._stamp()
            if stamps == self._stamps:
                return None
            self._stamps = stamps
        try:
            configuration = self._read()
        except (OSError, ssl.SSLError) as error:
            _log.error("certificates_unusable", reason=str(error), file=str(self._cert))
            return None
        _log.info("certificates_read", file=str(self._cert))
        return configuration

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        files = (self._cert, self._key, self._client_ca)
        return tuple(None if path is None else file_stamp(path) for path in files)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        # gRPC notices a key of another certificate only in the handshake; this notices it here.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._cert, self._key, password=_no_password)
        authority = None
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)
            authority = self._client_ca.read_bytes()
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], authority)


def _no_password() -> str:
    """Never ask on a terminal: a key under a password cannot be used by a server."""
    return ""


def server_credentials(settings: ListenSettings) -> grpc.ServerCredentials | None:
    """What the settings say to listen with, None for no TLS. Raises InvalidSetting."""
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None or key is None:
        return None
    try:
        files = Certificates(cert=cert, key=key, client_ca=settings.tls_client_ca)
    except (OSError, ssl.SSLError) as error:
        reason = f"certificate, key or client authority cannot be used: {error}"
        raise InvalidSetting(name="tls_cert", value=str(cert), reason=reason) from error
    return files.server_credentials()


def listen(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
) -> int:
    """Bind the address; the port. Raises RuntimeError when it cannot be had."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


# --- dialling -------------------------------------------------------------------------------------


class Token:
    """The bearer token of a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises InvalidSetting."""
        self._path = path
        self._stamp = file_stamp(path)
        self._text = self._read()

    def text(self) -> str:
        """The present token; the last one while the file cannot be used."""
        stamp = file_stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._text = self._read()
            except InvalidSetting as error:
                _log.error("token_file_unusable", reason=error.reason, file=str(self._path))
        return self._text

    def _read(self) -> str:
        try:
            text = self._path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            # The content of the file is a secret, also when it is not what it should be.
            reason = "cannot be read" if isinstance(error, OSError) else "holds no token"
            raise InvalidSetting(name="token_file", value=str(self._path), reason=reason) from None
        if not text or len(text) > TOKEN_CHARACTERS_MAX or not text.isprintable() or " " in text:
            raise InvalidSetting(name="token_file", value=str(self._path), reason="holds no token")
        return text


@attrs.frozen
class Dial:
    """How a process reaches servers and shows who it is."""

    _credentials: grpc.ChannelCredentials | None = None
    _server_name: str | None = None
    _token: Token | None = None

    @classmethod
    def of(cls, settings: DialSettings, *, token_file: Path | None = None) -> Dial:
        """Read what the settings name. Raises InvalidSetting."""
        token = None if token_file is None else Token(token_file)
        if settings.tls_ca is None:
            return cls(token=token)
        try:
            context = ssl.create_default_context(cafile=str(settings.tls_ca))
            authority = settings.tls_ca.read_bytes()
            key = cert = None
            if settings.tls_client_cert is not None and settings.tls_client_key is not None:
                context.load_cert_chain(
                    settings.tls_client_cert, settings.tls_client_key, password=_no_password
                )
                key, cert = (
                    settings.tls_client_key.read_bytes(),
                    settings.tls_client_cert.read_bytes(),
                )
        except (OSError, ssl.SSLError) as error:
            reason = f"authority, client certificate or its key cannot be used: {error}"
            raise InvalidSetting(
                name="tls_ca", value=str(settings.tls_ca), reason=reason
            ) from error
        credentials = grpc.ssl_channel_credentials(authority, key, cert)
        return cls(credentials, settings.tls_server_name, token)

    def channel(self, target: str, options: Options) -> grpc.Channel:
        """A channel for calls that block."""
        if self._credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, self._credentials, options=self._named(options))

    def aio_channel(self, target: str, options: Options) -> grpc.aio.Channel:
        """A channel for calls on the event loop."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, self._credentials, options=self._named(options))

    def metadata(self) -> Metadata:
        """What goes with every call."""
        if self._token is None:
            return ()
        return (("authorization", f"Bearer {self._token.text()}"),)

    def _named(self, options: Options) -> list[tuple[str, int | str]]:
        named: list[tuple[str, int | str]] = [*options]
        if self._server_name is not None:
            named.append(("grpc.ssl_target_name_override", self._server_name))
        return named


PLAIN = Dial()
"""No TLS and no token: what loopback needs while there are no credentials."""
