"""The verb that makes credentials: `credentials new`.

Owns: how a new token and the entry for it are shown, once.
Must not know: where credentials files are, and who reads them.
"""

from __future__ import annotations

from pathlib import Path

from cyclopts import App, Parameter

from transport.commands_shared import EXIT_OK, Json, UsageError, note, say, say_json
from transport.settings import flag_name

credentials_app = App(
    name="credentials",
    help="Make credentials for callers.",
    default_parameter=Parameter(name_transform=flag_name),
)


@credentials_app.command
def new(
    *,
    role: str,
    tenant: str = "",
    engine: str = "",
    name: str = "",
    certificate: Path | None = None,
    json: Json = False,
) -> int:
    """Print a new token, once, and the entry that lets it in.

    Parameters
    ----------
    role
        client, engine or operator.
    tenant
        Clients: whose requests these are.
    engine
        Engines: the only name under which it may join.
    name
        The entry's name, as logs show it.
    certificate
        Make an entry for this client certificate (PEM) instead of a token.
    json
        Print one JSON document.
    """
    from transport import credentials, new_credentials

    token, fingerprint = "", ""
    if certificate is None:
        token = new_credentials.new_token()
    else:
        fingerprint = credentials.certificate_digest(certificate.read_bytes())
        if not fingerprint:
            raise UsageError(f"{certificate} is no PEM certificate")
    fields = {
        "name": name or "-".join(word for word in (role, tenant or engine) if word),
        "role": role,
        "tenant": tenant,
        "engine": engine,
        "token_sha256": credentials.token_digest(token) if token else "",
        "certificate_sha256": fingerprint,
    }
    try:
        entry = credentials.make_entry({key: value for key, value in fields.items() if value})
    except ValueError as error:
        raise UsageError(str(error)) from error
    text = new_credentials.entry_text(entry)
    if json:
        say_json({"token": token, "entry": text} if token else {"entry": text})
        return EXIT_OK
    if token:
        note("The token is shown this once; its entry holds only a digest of it.")
        say(token)
        say()
    for line in text.splitlines():
        say(line)
    return EXIT_OK
