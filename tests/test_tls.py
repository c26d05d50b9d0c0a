"""TLS on the wire, identities by certificate, and that nothing is bound or dialled in the clear."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import grpc
import pytest
from structlog.testing import capture_logs

from lifecycle.events import Role
from tests.certificates import Authority, Pair
from tests.keys import Keys
from tests.process_harness import READY_SECONDS, STOP_SECONDS, collect
from tests.serving import Deployment, ask, deployment
from tests.tiny import tiny_llama
from transport.child import PROGRAM, Child
from transport.client import Client, Refused, Unreachable
from transport.credentials import CallerRole, Credential, certificate_digest
from transport.new_credentials import entry_text
from transport.pb import generation_pb2, log_pb2
from transport.planes.grpc_stream import GrpcStreamPlane
from transport.settings import (
    CallSettings,
    DialSettings,
    EngineSettings,
    InvalidSetting,
    JoinSettings,
    PoolSettings,
    SchedulerSettings,
    to_flags,
)
from transport.supervised_parts import Parts
from transport.tls import Certificates, Dial

pytestmark = pytest.mark.anyio
Code = grpc.StatusCode
CANARY = "zanzibar-canary-9431"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@attrs.frozen
class Shop:
    """An authority, and what it signed."""

    authority: Authority
    server: Pair
    folder: Path

    def dial(self, client: Pair | None = None, **more: Any) -> CallSettings:
        return CallSettings(
            tls_ca=self.authority.file,
            tls_client_cert=None if client is None else client.cert,
            tls_client_key=None if client is None else client.key,
            **more,
        )

    def listens(self, *, asks: bool = False) -> dict[str, Any]:
        settings: dict[str, Any] = {"tls_cert": self.server.cert, "tls_key": self.server.key}
        return settings | ({"tls_client_ca": self.authority.file} if asks else {})


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    authority = Authority(tmp_path / "certificates")
    return Shop(authority, authority.sign("server", server=True), tmp_path / "certificates")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys.make(tmp_path / "keys")


def dialled(settings: CallSettings) -> Dial:
    return Dial.of(settings, token_file=settings.token_file)


async def in_thread(here: Deployment, settings: CallSettings) -> int:
    """How many requests a client of these settings may list, by its tail."""

    def look() -> int:
        with Client(here.address, settings) as client:
            return len({one.entry.request for one in client.tail()})

    return await anyio.to_thread.run_sync(look)


# --- the wire -------------------------------------------------------------------------------------


async def test_calls_and_engines_go_over_tls(model: Path, shop: Shop, keys: Keys) -> None:
    """With a certificate on the server and tokens on the callers everything works as before."""
    acme = dialled(shop.dial(token_file=keys.token_file("acme")))
    engine = dialled(shop.dial(token_file=keys.token_file("engines")))
    served = shop.listens() | {"credentials": keys.file}
    async with deployment(model, dial=acme, engine_dial=engine, **served) as here:
        wanted = generation_pb2.CompleteRequest(generation=ask(new=5))
        answer = await here.generation.Complete(wanted, metadata=acme.metadata())
        assert len(answer.chunk.token_ids) == 5
        assert await in_thread(here, shop.dial(token_file=keys.token_file("acme"))) == 1


async def test_neither_a_wrong_authority_nor_plain_text_connects(
    model: Path, shop: Shop, tmp_path: Path
) -> None:
    """A client trusts only its authority's servers, and a TLS port speaks nothing else."""
    other = Authority(tmp_path / "other", "other")
    async with deployment(
        model, engines=False, dial=dialled(shop.dial()), **shop.listens()
    ) as here:
        assert await in_thread(here, shop.dial()) == 1
        for wrong in (CallSettings(tls_ca=other.file), CallSettings()):
            with pytest.raises(Unreachable):
                await in_thread(here, wrong)


async def test_a_server_of_another_name_is_not_trusted(model: Path, shop: Shop) -> None:
    """The certificate must be for the host that was dialled, or for the name that was set."""
    named = attrs.evolve(shop, server=shop.authority.sign("named", server=True, host="one.test"))
    fits = shop.dial(tls_server_name="one.test")
    async with deployment(model, engines=False, dial=dialled(fits), **named.listens()) as here:
        assert await in_thread(here, fits) == 1
        for wrong in (shop.dial(), shop.dial(tls_server_name="two.test")):
            with pytest.raises(Unreachable):
                await in_thread(here, wrong)


async def test_a_client_certificate_is_an_identity(model: Path, shop: Shop, tmp_path: Path) -> None:
    """It gives role and tenant by fingerprint or name; one that is not listed gives nothing."""
    pairs = {name: shop.authority.sign(name) for name in ("acme", "globex", "engine", "nobody")}
    print_of_acme = certificate_digest(pairs["acme"].cert.read_bytes())
    file = tmp_path / "credentials.toml"
    listed = (
        Credential(
            name="a", role=CallerRole.CLIENT, tenant="acme", certificate_sha256=print_of_acme
        ),
        Credential(name="g", role=CallerRole.CLIENT, tenant="globex", certificate_name="globex"),
        Credential(name="e", role=CallerRole.ENGINE, certificate_name="engine"),
    )
    file.write_text("\n".join(map(entry_text, listed)))
    dials = {name: dialled(shop.dial(pair)) for name, pair in pairs.items()}
    served = shop.listens(asks=True) | {"credentials": file}
    engine = dials["engine"]
    async with deployment(model, dial=dials["acme"], engine_dial=engine, **served) as here:
        wanted = generation_pb2.CompleteRequest(generation=ask())
        request = (await here.generation.Complete(wanted)).admission.request_id
        read = log_pb2.GetRequestLogRequest(request_id=request)
        assert (await here.log.GetRequestLog(read)).entries
        assert await in_thread(here, shop.dial(pairs["globex"])) == 0
        assert await in_thread(here, shop.dial(pairs["acme"])) == 1
        for name, code in (("engine", Code.PERMISSION_DENIED), ("nobody", Code.UNAUTHENTICATED)):
            with pytest.raises(Refused) as caught:
                await in_thread(here, shop.dial(pairs[name]))
            assert caught.value.code == code.name
        with pytest.raises(Unreachable):
            await in_thread(here, shop.dial())


async def test_a_certificate_of_another_authority_is_no_identity(
    model: Path, shop: Shop, tmp_path: Path
) -> None:
    """A name in a certificate counts only when our authority has signed it."""
    file = tmp_path / "credentials.toml"
    listed = Credential(name="a", role=CallerRole.CLIENT, tenant="acme", certificate_name="acme")
    file.write_text(entry_text(listed))
    forged = Authority(tmp_path / "other", "other").sign("acme")
    good = shop.dial(shop.authority.sign("acme"))
    served = shop.listens(asks=True) | {"credentials": file}
    async with deployment(model, engines=False, dial=dialled(good), **served) as here:
        assert await in_thread(here, good) == 0
        with pytest.raises(Unreachable):
            await in_thread(here, shop.dial(forged))


async def test_new_certificates_count_without_a_restart(
    model: Path, shop: Shop, tmp_path: Path
) -> None:
    """After a rotation to another authority new connections see the new certificate."""
    other = Authority(tmp_path / "other", "other")
    new = other.sign("new", server=True)
    async with deployment(
        model, engines=False, dial=dialled(shop.dial()), **shop.listens()
    ) as here:
        assert await in_thread(here, shop.dial()) == 1
        shop.server.key.write_bytes(new.key.read_bytes())
        # Half of the change is no change: the old pair stays in force.
        assert await in_thread(here, shop.dial()) == 1
        shop.server.cert.write_bytes(new.cert.read_bytes())
        assert await in_thread(here, CallSettings(tls_ca=other.file)) == 1
        with pytest.raises(Unreachable):
            await in_thread(here, shop.dial())


def test_pages_go_over_tls_as_well(shop: Shop, keys: Keys) -> None:
    """The gRPC plane dials as its engine does: by its authority and with its token."""
    settings = EngineSettings(
        role=Role.PREFILL,
        engine="p",
        tls_ca=shop.authority.file,
        token_file=keys.token_file("engines"),
    )
    dial = Dial.of(settings, token_file=settings.token_file)
    plane = GrpcStreamPlane(party="p", incarnation="p/1", dial=dial)
    plane.shutdown()
    assert dial.metadata() == keys.metadata("engines")


# --- settings -------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "bare": (SchedulerSettings, {"host": "10.0.0.1"}, "--tls-cert, --credentials"),
    "every": (SchedulerSettings, {"host": "0.0.0.0"}, "--tls-cert, --credentials"),  # noqa: S104
    "no TLS": (SchedulerSettings, {"host": "a.test", "credentials": Path("c")}, "--tls-cert"),
    "no credentials": (
        SchedulerSettings,
        {"host": "a.test", "tls_cert": Path("c"), "tls_key": Path("k")},
        "missing: --credentials",
    ),
    "no key": (SchedulerSettings, {"tls_cert": Path("c")}, "--tls-key"),
    "no cert": (SchedulerSettings, {"tls_key": Path("k")}, "--tls-cert"),
    "only a client CA": (SchedulerSettings, {"tls_client_ca": Path("a")}, "--tls-cert"),
    "pages": (JoinSettings, {"host": "10.0.0.1"}, "--tls-cert, --credentials"),
    "pages anywhere": (
        JoinSettings,
        {
            "host": "0.0.0.0",  # noqa: S104
            "tls_cert": Path("c"),
            "tls_key": Path("k"),
            "credentials": Path("f"),
        },
        "can reach",
    ),
    "a far scheduler": (JoinSettings, {"scheduler": "10.0.0.1:1"}, "--tls-ca"),
    "no client key": (DialSettings, {"tls_ca": Path("a"), "tls_client_cert": Path("c")}, "key"),
    "a name alone": (CallSettings, {"tls_server_name": "a"}, "--tls-ca"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_open_a_hole_are_refused(name: str) -> None:
    """The refusal says which flags are missing."""
    kind, fields, reason = REFUSED[name]
    with pytest.raises(InvalidSetting) as caught:
        kind(**fields)
    assert reason in str(caught.value)


def test_a_client_sends_nothing_in_the_clear_beyond_loopback() -> None:
    """Neither a prompt nor a token leaves the machine without TLS."""
    with pytest.raises(InvalidSetting, match="--tls-ca"):
        Client("10.0.0.1:50551")


def test_serve_needs_what_its_engines_dial_with(shop: Shop) -> None:
    """Its engines call its own scheduler, so they must trust its certificate and show their own."""
    for asks, missing in ((False, "--tls-ca"), (True, "--tls-client-cert")):
        scheduler = SchedulerSettings(**shop.listens(asks=asks))
        pool = PoolSettings(tls_ca=shop.authority.file if asks else None)
        with pytest.raises(InvalidSetting, match=missing):
            Parts(prefill=1, decode=1, scheduler=scheduler, pool=pool)


def test_unusable_files_are_named(shop: Shop, tmp_path: Path) -> None:
    """A key of another certificate, what is no PEM, and what is not there are refused at start."""
    other = shop.authority.sign("other", server=True)
    with pytest.raises(ssl.SSLError):
        Certificates(cert=shop.server.cert, key=other.key, client_ca=None)
    with pytest.raises(InvalidSetting, match="no-such-file"):
        Dial.of(DialSettings(tls_ca=tmp_path / "no-such-file"))
    empty = tmp_path / "empty.token"
    empty.write_text("")
    secret = tmp_path / "secret.token"
    secret.write_text(f"{CANARY} {CANARY}")
    for path in (empty, secret, tmp_path / "missing"):
        with pytest.raises(InvalidSetting) as caught:
            Dial.of(DialSettings(), token_file=path)
        assert str(path) in str(caught.value)
        assert CANARY not in str(caught.value)


def test_a_token_file_is_read_again(keys: Keys) -> None:
    """A rotated token goes with the next call; a broken file keeps the last one."""
    dial, file = keys.dial("acme"), keys.token_file("acme")
    file.write_text("custody_another-one")
    assert dial.metadata() == (("authorization", "Bearer custody_another-one"),)
    file.write_text("")
    with capture_logs() as logs:
        assert dial.metadata() == (("authorization", "Bearer custody_another-one"),)
    assert [log["event"] for log in logs] == ["token_file_unusable"]


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("verb", ["scheduler", "serve", "prefill", "decode"])
def test_a_process_beyond_loopback_does_not_start(verb: str, tmp_path: Path) -> None:
    """Exit code 2, and the message says what is missing."""
    arguments = [*PROGRAM, verb, "--host", "0.0.0.0", "--json"]  # noqa: S104
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 2
    message = json.loads(ended.stderr.splitlines()[-1])["error"]["message"]
    assert "--tls-cert" in message
    assert "--credentials" in message
    assert ended.stdout == ""


@pytest.mark.process
def test_served_engines_have_a_credential_of_their_own(model: Path, shop: Shop, keys: Keys) -> None:
    """`serve` over TLS, pages too: its engines join, a client's token does not, and no one reads
    a token from a command line or a log.
    """
    folder = shop.folder
    scheduler = SchedulerSettings(
        model=str(model),
        port=0,
        credentials=keys.file,
        tls_cert=shop.server.cert,
        tls_key=shop.server.key,
    )
    pool = PoolSettings(tls_ca=shop.authority.file, plane="grpc", kv_memory="8MiB", page_tokens=4)
    call = shop.dial(token_file=keys.token_file("acme"))
    served = Child(
        "serve",
        ["serve", *to_flags(scheduler), *to_flags(pool), "--json"],
        errors=folder / "serve.errors",
    )
    try:
        address = served.wait_event("ready", timeout=READY_SECONDS)["address"]
        commands = [
            path.read_bytes().decode(errors="replace")
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if readable(path)
        ]
        assert any(f"{folder}" in command for command in commands)
        assert not [c for c in commands if "custody_" in c and "transport.cli" in c]
        with Client(address, call) as client:
            request = generation_pb2.GenerateRequest(
                text=CANARY, sampling=generation_pb2.Sampling(new_tokens_max=4)
            )
            assert len(collect(client.generate(request, timeout=60.0)).tokens) >= 1
            with pytest.raises(Refused, match="PERMISSION_DENIED"):
                client.status()
        wrong = JoinSettings(
            scheduler=address,
            model=str(model),
            tls_ca=shop.authority.file,
            token_file=keys.token_file("acme"),
            kv_memory="8MiB",
            page_tokens=4,
        )
        intruder = Child(
            "intruder",
            ["prefill", "prefill-9", *to_flags(wrong), "--json"],
            errors=folder / "intruder.errors",
        )
        try:
            assert intruder.wait(timeout=READY_SECONDS) == 4, intruder.said_errors()
            assert "denied_by_scheduler" in intruder.said_errors()
        finally:
            intruder.kill()
        served.signal(signal.SIGTERM)
        assert served.wait(timeout=STOP_SECONDS) == 0, served.said_errors()
    finally:
        served.kill()
    for errors in folder.glob("*.errors"):
        text = errors.read_text()
        assert CANARY not in text
        assert "custody_" not in text
        for token in keys.tokens.values():
            assert token not in text


def readable(path: Path) -> bool:
    """Whether a process that was listed still exists."""
    try:
        path.read_bytes()
    except OSError:
        return False
    return True
