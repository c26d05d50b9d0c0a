"""What a running scheduler shows is what its log says, and only to those who may read it."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import grpc
import h11
import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from lifecycle.tally import Tally
from lifecycle.tally_metrics import METRICS
from tests.certificates import Authority
from tests.keys import Keys
from tests.serving import Deployment, ask, deployment
from tests.test_services import begin, last
from tests.tiny import tiny_llama
from transport import metrics_server
from transport.credentials import CallerRole, Credential
from transport.metrics import LIVE_METRICS
from transport.metrics_server import MetricsServer, Reply
from transport.metrics_text import exposition
from transport.new_credentials import entry_text
from transport.pb import admin_pb2
from transport.settings import CallSettings, InvalidSetting, SchedulerSettings
from transport.stores.segments import SegmentStore
from transport.tls import Dial

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@attrs.frozen
class Got:
    """What came back of one request."""

    status: int
    body: str
    headers: dict[str, str]


def port_in(logs: Sequence[Mapping[str, Any]]) -> int:
    """The port that the scheduler said it reads scrapes on."""
    ready = next(one for one in logs if one["event"] == "metrics_ready")
    return int(str(ready["address"]).rpartition(":")[2])


def _fetch(
    port: int,
    path: str = "/metrics",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> Got:
    connection: http.client.HTTPConnection
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Got(answer.status, answer.read().decode(), found)
    finally:
        connection.close()


async def fetch(port: int, path: str = "/metrics", **how: object) -> Got:
    """One request of a client that is not ours."""
    call: Callable[[], Got] = partial(_fetch, port, path, **how)  # type: ignore[arg-type]
    return await anyio.to_thread.run_sync(call)


def families(text: str) -> list[Metric]:
    """What the library's parser makes of a text."""
    return list(text_string_to_metric_families(text))


def from_the_log(text: str) -> dict[str, float]:
    """The samples of metrics that are counted over the log, by name and labels."""
    wanted = {metric.name for metric in METRICS}
    return {
        f"{one.name}{sorted(one.labels.items())}": one.value
        for family in families(text)
        if {family.name, f"{family.name}_total"} & wanted
        for one in family.samples
    }


async def busy(here: Deployment) -> None:
    """An answer, a refusal and a cancelled request, all settled."""
    call, _ = await begin(here, ask())
    assert await last(call) == "outcome"
    refused = here.generation.Generate(ask(new=100_000))
    with pytest.raises(grpc.aio.AioRpcError, match="context"):
        await refused.read()
    call, request = await begin(here, ask(new=50))
    cancel = admin_pb2.CancelRequestRequest(request_id=request)
    await here.admin.CancelRequest(cancel)
    while (await here.admin.GetStatus(admin_pb2.GetStatusRequest())).phases:
        pass


# --- what is shown --------------------------------------------------------------------------------


async def test_folding_the_captured_log_gives_what_the_live_server_shows(model: Path) -> None:
    """Every series that is counted over the log, exactly, from the port and from the RPC."""
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0) as here:
            await busy(here)
            got = await fetch(port_in(logs))
            asked = await here.admin.GetMetrics(admin_pb2.GetMetricsRequest())
            tally = Tally()
            for stored in here.store.tail(1):
                tally.note(stored.entry)
    counted = from_the_log(exposition(tally.families()))
    assert from_the_log(got.body) == counted
    assert from_the_log(asked.exposition) == counted
    assert counted["custody_requests_total[('outcome', 'finished'), ('reason', 'length')]"] == 1
    assert counted["custody_requests_total[('outcome', 'aborted'), ('reason', 'client_cancel')]"]
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_a_new_life_counts_on_from_the_log_of_the_last(model: Path, tmp_path: Path) -> None:
    """Counters are the log's, so a restart of the scheduler does not set them back."""
    async with deployment(model, store=SegmentStore(tmp_path)) as here:
        call, _ = await begin(here, ask())
        assert await last(call) == "outcome"
    async with deployment(model, store=SegmentStore(tmp_path), engines=False) as here:
        answer = await here.admin.GetMetrics(admin_pb2.GetMetricsRequest())
    counted = from_the_log(answer.exposition)
    assert counted["custody_requests_total[('outcome', 'finished'), ('reason', 'length')]"] == 1
    assert counted["custody_scheduler_epoch[]"] == 2


async def test_a_scrape_shows_what_only_the_process_knows(model: Path) -> None:
    """Queue, store and streams are levels that no log holds; the process is the system's word."""
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0):
            text = (await fetch(port_in(logs))).body
    found = {family.name: family for family in families(text)}
    assert {metric.name for metric in LIVE_METRICS} <= set(found)
    assert [one.value for one in found["custody_log_writable"].samples] == [1]
    assert [one.value for one in found["custody_accepting"].samples] == [1]
    assert [one.value for one in found["custody_rank_connected"].samples] == [1, 1]
    assert "process_resident_memory_bytes" in found


async def test_a_scraper_that_asks_for_openmetrics_gets_it(model: Path) -> None:
    """What Prometheus prefers, read by the library's strict parser."""
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0) as here:
            await busy(here)
            got = await fetch(port_in(logs), headers=accept)
    assert got.headers["content-type"].startswith("application/openmetrics-text")
    parse: Callable[[str], Iterable[Metric]] = openmetrics.text_string_to_metric_families
    names = {family.name for family in parse(got.body)}
    assert {"custody_requests", "custody_phase_seconds", "custody_engine_pages"} <= names


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
@pytest.mark.parametrize("version", ["9999", "2.0.0", "1.0.1", "", "x"])
async def test_a_version_that_nobody_knows_is_not_answered(
    model: Path, kind: str, version: str
) -> None:
    """What is said of a body is what it is: the next alternative counts, or the oldest form."""
    unknown = f"{kind}; version={version}; escaping=allow-utf-8"
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0, engines=False):
            port = port_in(logs)
            alone = await fetch(port, headers={"Accept": unknown})
            known = "application/openmetrics-text; version=1.0.0;q=0.1"
            both = await fetch(port, headers={"Accept": f"{unknown}, {known}"})
    assert alone.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert both.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0;")


async def test_without_a_port_nothing_listens(model: Path) -> None:
    """Metrics are opt-in."""
    with capture_logs() as logs:
        async with deployment(model, engines=False):
            pass
    assert not [one for one in logs if one["event"] == "metrics_ready"]


async def ends(stream: anyio.abc.ByteStream) -> None:
    """Read what is left until the other side closes."""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            await stream.receive()


# --- HTTP -----------------------------------------------------------------------------------------


async def test_one_resource_is_read_and_nothing_else(model: Path) -> None:
    """Another path, another method, a body and a HEAD get what HTTP says."""
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0, engines=False):
            port = port_in(logs)
            assert (await fetch(port, "/")).status == 404
            assert (await fetch(port, "/metrics/../etc/passwd")).status == 404
            assert (await fetch(port, "/metrics?name=x")).status == 200
            posted = await fetch(port, method="POST")
            assert (posted.status, posted.headers["allow"]) == (405, "GET, HEAD")
            head = await fetch(port, method="HEAD")
            assert (head.status, head.body) == (200, "")
            assert int(head.headers["content-length"]) > 1000


async def test_a_connection_is_used_again(model: Path) -> None:
    """Prometheus keeps its connection between scrapes."""
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0, engines=False):
            stream = await anyio.connect_tcp("127.0.0.1", port_in(logs))
            async with stream:
                for _ in range(3):
                    await stream.send(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert (await stream.receive()).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"A" * 100_000,
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: no\r\n\r\n",
    ],
    ids=["tls", "http/0.9", "no host", "endless line", "bad length"],
)
async def test_what_is_no_request_is_refused_and_the_next_one_answered(
    model: Path, sent: bytes
) -> None:
    """Bytes of any kind end their own connection with a 4xx, and nothing else."""
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0, engines=False):
            port = port_in(logs)
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(sent)
                answer = await stream.receive()
                assert answer.startswith(b"HTTP/1.1 4")
                await ends(stream)
            assert (await fetch(port)).status == 200
    assert not [one for one in logs if one["event"] == "metrics_failed"]


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HT"], ids=["silent", "half a request"])
async def test_a_connection_that_asks_for_nothing_is_ended(
    model: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """It holds one of few places, so it may not keep it."""
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.2)
    with capture_logs() as logs:
        async with (
            deployment(model, metrics_port=0, engines=False),
            await anyio.connect_tcp("127.0.0.1", port_in(logs)) as stream,
        ):
            await stream.send(sent)
            await ends(stream)
    assert not [one for one in logs if one["event"] == "metrics_failed"]


async def test_a_newcomer_takes_the_place_of_the_one_that_is_silent_longest(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has asked once, or never, keeps nobody out by saying nothing."""
    monkeypatch.setattr(metrics_server, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 1000.0)
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0, engines=False), AsyncExitStack() as kept:

            async def dial() -> anyio.abc.ByteStream:
                stream = await anyio.connect_tcp("127.0.0.1", port_in(logs))
                return await kept.enter_async_context(stream)

            async def answered(stream: anyio.abc.ByteStream) -> None:
                await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await stream.receive()).startswith(b"HTTP/1.1 404")

            never, once, often = [await dial() for _ in range(3)]
            await answered(once)
            await answered(often)
            for longest in (never, once):
                newcomer = await dial()
                await answered(newcomer)
                await ends(longest)
                await answered(often)
            await answered(newcomer)


async def test_nobody_is_ended_who_is_being_answered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections are counted: one too many is turned away, and one that ends makes room."""
    monkeypatch.setattr(metrics_server, "CONNECTIONS_MAX", 1)
    asked, go_on, answer = anyio.Event(), anyio.Event(), MetricsServer._answer

    async def later(
        server: MetricsServer, request: h11.Request, stream: anyio.abc.ByteStream
    ) -> Reply:
        asked.set()
        await go_on.wait()
        return await answer(server, request, stream)

    monkeypatch.setattr(MetricsServer, "_answer", later)
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0, engines=False):
            port = port_in(logs)
            async with await anyio.connect_tcp("127.0.0.1", port) as first:
                await first.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                await asked.wait()
                async with await anyio.connect_tcp("127.0.0.1", port) as beyond:
                    with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                        await beyond.receive()
                go_on.set()
                assert (await first.receive()).startswith(b"HTTP/1.1 404")
                await ends(first)
            assert (await fetch(port)).status == 200


async def test_a_fault_of_the_metrics_does_not_end_the_scheduler(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks cannot stop what he looks at: it is logged, and requests go on."""

    def broken(_families: object, *, process: bool) -> None:
        raise ZeroDivisionError(process)

    monkeypatch.setattr(metrics_server, "registry", broken)
    with capture_logs() as logs:
        async with deployment(model, metrics_port=0) as here:
            with pytest.raises(http.client.RemoteDisconnected):
                await fetch(port_in(logs))
            call, _ = await begin(here, ask())
            assert await last(call) == "outcome"
    assert [one for one in logs if one["event"] == "metrics_failed"]


async def test_a_port_that_is_taken_is_a_setting_to_change(model: Path) -> None:
    """The scheduler does not start half."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - no database
        with pytest.raises(BaseExceptionGroup) as caught:
            async with deployment(model, metrics_port=port, engines=False):
                pass
    assert caught.group_contains(InvalidSetting, match="metrics_port", depth=None)


# --- who may read ---------------------------------------------------------------------------------


def test_a_host_beyond_loopback_needs_tls_and_credentials() -> None:
    """The rule of everything that binds holds for this port as well, for it binds the same host."""
    with pytest.raises(InvalidSetting, match="--tls-cert, --credentials"):
        SchedulerSettings(host="0.0.0.0", metrics_port=9400)  # noqa: S104 - it is refused


async def test_with_credentials_only_an_operator_reads(model: Path, tmp_path: Path) -> None:
    """Nobody, a stranger, a client and an engine are refused without a number being shown."""
    keys = Keys.make(tmp_path / "keys")
    with capture_logs() as logs:
        async with deployment(
            model, metrics_port=0, engines=False, credentials=keys.file, dial=keys.dial("operator")
        ):
            port = port_in(logs)

            async def status(headers: dict[str, str]) -> int:
                got = await fetch(port, headers=headers)
                assert ("custody_requests_total" in got.body) is (got.status == 200)
                return got.status

            assert await status({}) == 401
            assert await status({"Authorization": "Bearer custody_unknown"}) == 401
            assert await status({"Authorization": "Basic YTpi"}) == 401
            for name, expected in (("acme", 403), ("engines", 403), ("operator", 200)):
                (header,) = keys.metadata(name)
                assert await status({"Authorization": header[1]}) == expected
            (operator,) = keys.metadata("operator")
            keys.write("acme", "engines")
            assert await status({"Authorization": operator[1]}) == 401


@attrs.frozen
class Shop:
    """A server's certificate, two clients', and what trusts them."""

    authority: Authority
    folder: Path

    def context(self, client: str = "") -> ssl.SSLContext:
        """What a scraper dials with."""
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if client:
            pair = self.authority.sign(client)
            context.load_cert_chain(pair.cert, pair.key)
        return context


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """An authority of its own for each test."""
    return Shop(Authority(tmp_path / "certificates"), tmp_path / "certificates")


async def test_with_tls_the_port_speaks_nothing_else(model: Path, shop: Shop) -> None:
    """The gRPC server's certificate counts here too, and a clear request gets no number."""
    pair = shop.authority.sign("server", server=True)
    dial = Dial.of(CallSettings(tls_ca=shop.authority.file))
    with capture_logs() as logs:
        async with deployment(
            *(model,),
            metrics_port=0,
            engines=False,
            tls_cert=pair.cert,
            tls_key=pair.key,
            dial=dial,
        ):
            port = port_in(logs)
            assert (await fetch(port, context=shop.context())).status == 200
            with pytest.raises((http.client.HTTPException, OSError)):
                await fetch(port)
            with pytest.raises(ssl.SSLError):
                await fetch(port, context=ssl.create_default_context())
            assert (await fetch(port, context=shop.context())).status == 200
    assert not [one for one in logs if one["event"] == "metrics_failed"]


async def test_an_operator_may_be_known_by_its_certificate(model: Path, shop: Shop) -> None:
    """By the same entries as on the gRPC port; another certificate of the authority is nobody."""
    pair = shop.authority.sign("server", server=True)
    file = shop.folder / "credentials.toml"
    file.write_text(
        entry_text(Credential(name="op", role=CallerRole.OPERATOR, certificate_name="prometheus"))
    )
    with capture_logs() as logs:
        async with deployment(
            *(model,),
            metrics_port=0,
            engines=False,
            credentials=file,
            tls_cert=pair.cert,
            tls_key=pair.key,
            tls_client_ca=shop.authority.file,
        ):
            port = port_in(logs)
            assert (await fetch(port, context=shop.context("prometheus"))).status == 200
            assert (await fetch(port, context=shop.context("somebody"))).status == 401
            with pytest.raises((ssl.SSLError, http.client.HTTPException, OSError)):
                await fetch(port, context=shop.context())


async def test_a_new_certificate_counts_from_the_next_connection_on(
    model: Path, shop: Shop
) -> None:
    """Files that do not fit together leave the old one in force."""
    pair = shop.authority.sign("server", server=True)
    other = Authority(shop.folder / "other")
    fresh = other.sign("server", server=True)
    trusting_other = ssl.create_default_context(cafile=str(other.file))
    with capture_logs() as logs:
        async with deployment(
            *(model,), metrics_port=0, engines=False, tls_cert=pair.cert, tls_key=pair.key
        ):
            port = port_in(logs)
            pair.cert.write_bytes(fresh.cert.read_bytes())
            assert (await fetch(port, context=shop.context())).status == 200
            pair.key.write_bytes(fresh.key.read_bytes())
            assert (await fetch(port, context=trusting_other)).status == 200
    assert [one for one in logs if one["event"] == "certificates_unusable"]
