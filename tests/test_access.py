"""Who may do what, over the wire: roles, tenants, revoked credentials, and what is never said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from engine.dataplane import Descriptor
from engine.store import Stored
from lifecycle.events import Role
from lifecycle.ids import FLEET, request_id
from tests.fake_engine import FakeEngine
from tests.keys import Keys
from tests.serving import SAFETY_SECONDS, Deployment, ask, deployment, details
from tests.tiny import tiny_llama
from transport.access import METHODS, caller, open_access
from transport.client import Client
from transport.credentials import (
    CallerRole,
    Credential,
    CredentialFiles,
    CredentialsError,
    read_credentials,
)
from transport.engine_planes import _caller_may_be
from transport.fleet_client import Broken, FleetClient, Heard
from transport.pb import (
    admin_pb2,
    fleet_pb2,
    generation_pb2,
    log_pb2,
    pages_pb2,
    pages_pb2_grpc,
)
from transport.planes.grpc_stream import PLANE_NAME, GrpcStreamPlane
from transport.settings import InvalidSetting, JoinSettings
from transport.stores.segments import SegmentStore

pytestmark = pytest.mark.anyio
Code = grpc.StatusCode

CANARY = "zanzibar-canary-9431"
DENIALS = {Code.UNAUTHENTICATED, Code.PERMISSION_DENIED}
ROLE_OF = {"acme": "client", "engines": "engine", "operator": "operator"}
PAGES = "/custody.v1.PagesService/"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys.make(tmp_path / "keys")


def guarded(model: Path, keys: Keys, **settings: Any) -> Any:
    """A deployment that knows its callers; the test's own tail is the operator's."""
    return deployment(
        model,
        dial=keys.dial("operator"),
        engine_dial=keys.dial("engines"),
        credentials=keys.file,
        **settings,
    )


async def code_of(call: Any) -> grpc.StatusCode:
    """How a unary call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def rest(call: Any) -> list[generation_pb2.GenerateResponse]:
    """Whatever a call still has to say. Raises AioRpcError when its end is a refusal."""
    steps = []
    while (step := await call.read()) is not grpc.aio.EOF:
        steps.append(step)
    return steps


async def answered(call: Any) -> bool:
    """Whether a call's last message is its outcome."""
    return (await rest(call))[-1].HasField("outcome")


async def knock(channel: grpc.aio.Channel, method: str, metadata: Any) -> grpc.StatusCode:
    """Send one empty message to a method; OK stands for any first answer."""
    # One message in the call's first batch: a stream's write may race the refusal, and then the
    # library makes up a status of its own.
    knocker: Any = channel.unary_stream(method)
    call = knocker(b"", metadata=metadata)
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    code: grpc.StatusCode = Code.OK
    if answer is grpc.aio.EOF:
        code = await call.code()
    call.cancel()
    return code


# --- the table ------------------------------------------------------------------------------------


def methods_of(files: Iterable[FileDescriptor]) -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


def test_every_method_has_a_row() -> None:
    """A new RPC without a decision about who may call it fails here, and nobody may call it."""
    ours = (generation_pb2, fleet_pb2, log_pb2, admin_pb2, pages_pb2)
    files = [module.DESCRIPTOR for module in (*ours, health_pb2, reflection_pb2)]
    assert set(METHODS) == methods_of(files)
    opened = {method for method, roles in METHODS.items() if roles is None}
    assert opened == methods_of([health_pb2.DESCRIPTOR])


def test_nobody_is_a_caller_outside_of_a_call() -> None:
    """Code that a call did not reach through the door finds no caller to act for."""
    with pytest.raises(LookupError):
        caller()


async def test_every_role_reaches_its_methods_and_no_others(model: Path, keys: Keys) -> None:
    """Each method of the scheduler is tried with each role, without a credential, and a wrong one."""
    tried = 0
    async with guarded(model, keys, engines=False) as here:
        for method, roles in METHODS.items():
            # Pages are served elsewhere, and the health library leaves `List` out.
            if method.startswith((PAGES, "/grpc.health.v1.Health/List")):
                continue
            for name, role in ROLE_OF.items():
                code = await knock(here.channel, method, keys.metadata(name))
                let_in = roles is None or CallerRole(role) in roles
                assert (code not in DENIALS) == let_in, (method, role, code)
                assert let_in or code is Code.PERMISSION_DENIED
                tried += 1
            for metadata in STRANGERS:
                code = await knock(here.channel, method, metadata)
                assert (code is not Code.UNAUTHENTICATED) == (roles is None), (method, code)
    assert tried == 3 * 14


STRANGERS: tuple[Any, ...] = (
    (),
    (("authorization", "Bearer custody_unknown"),),
    (("authorization", "Bearer "),),
    (("authorization", "Basic YTpi"),),
    (("authorization", "Bearer " + "x" * 4000),),
    (("x-role", "operator"), ("x-tenant", "acme")),
)


async def test_two_credentials_in_one_call_are_none(model: Path, keys: Keys) -> None:
    """A call that bears two tokens is refused, so that no proxy's order decides."""
    both = (*keys.metadata("acme"), *keys.metadata("operator"))
    async with guarded(model, keys, engines=False) as here:
        code = await knock(here.channel, "/custody.v1.AdminService/GetStatus", both)
        assert code is Code.UNAUTHENTICATED


async def test_only_engines_reach_the_pages(keys: Keys) -> None:
    """An engine's own server checks its callers before the key that stands in their messages."""
    plane = GrpcStreamPlane(party="", incarnation="decode/1")
    plane.register(memoryview(bytearray(4096)))
    server = grpc.aio.server(interceptors=(open_access(keys.file),))
    pages_pb2_grpc.add_PagesServiceServicer_to_server(plane.servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in ("Write", "Settle"):
                codes = {
                    name: await knock(channel, PAGES + method, keys.metadata(name))
                    for name in ROLE_OF
                }
                assert codes["acme"] is codes["operator"] is Code.PERMISSION_DENIED
                assert codes["engines"] not in DENIALS, codes
                assert await knock(channel, PAGES + method, ()) is Code.UNAUTHENTICATED
    finally:
        await server.stop(None)
        plane.shutdown()


async def test_a_bound_engine_writes_pages_as_itself_only(keys: Keys) -> None:
    """A writer that knows the pool's key still cannot pass for an engine that it is not."""
    plane = GrpcStreamPlane(party="", incarnation="decode/1/0")
    plane.register(memoryview(bytearray(4096)))
    server = grpc.aio.server(interceptors=(open_access(keys.file),))
    servicer = plane.servicer(_caller_may_be)
    pages_pb2_grpc.add_PagesServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    plane.listening_at(f"127.0.0.1:{port}")
    reasons = {}
    try:
        key = bytes.fromhex(Descriptor.decode(plane.descriptor(), plane=PLANE_NAME).key)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: pages_pb2_grpc.PagesServiceAsyncStub = pages_pb2_grpc.PagesServiceStub(channel)
            for party in ("prefill-7/1/0", "prefill-8/1/0"):
                opening = pages_pb2.Opening(
                    credentials=pages_pb2.Credentials(
                        incarnation="decode/1/0", key=key, party=party
                    ),
                    name=pages_pb2.TicketName(grant="g", ticket=b"t" * 24),
                    extents=[pages_pb2.Extent(target_offset=0, length=8)],
                )
                call = stub.Write(metadata=keys.metadata("bound"))
                await call.write(pages_pb2.WriteRequest(opening=opening))
                answer = await call.read()
                assert isinstance(answer, pages_pb2.WriteResponse)
                reasons[party] = answer.refused.reason
                call.cancel()
    finally:
        await server.stop(None)
        plane.shutdown()
    assert reasons == {
        "prefill-7/1/0": pages_pb2.REFUSAL_REASON_NOT_EXPOSED,
        "prefill-8/1/0": pages_pb2.REFUSAL_REASON_CREDENTIALS,
    }


async def test_without_credentials_all_is_allowed_and_said(model: Path) -> None:
    """A loopback deployment of one user needs no file, and its log says that it is open."""
    with capture_logs() as logs:
        await use_everything(model)
    assert "open_to_everybody" in {log["event"] for log in logs}


async def use_everything(model: Path) -> None:
    async with deployment(model) as here:
        answer = await here.generation.Complete(generation_pb2.CompleteRequest(generation=ask()))
        wanted = log_pb2.GetRequestLogRequest(request_id=answer.admission.request_id)
        assert (await here.log.GetRequestLog(wanted)).entries
        await here.admin.GetStatus(admin_pb2.GetStatusRequest())


# --- tenants --------------------------------------------------------------------------------------


async def begin(here: Deployment, keys: Keys, name: str, **fields: Any) -> tuple[Any, str]:
    """A call of this client whose admission has arrived, and its request's id."""
    call = here.generation.Generate(ask(**fields), metadata=keys.metadata(name))
    first = await call.read()
    assert isinstance(first, generation_pb2.GenerateResponse)
    return call, first.admission.request_id


async def seen(here: Deployment, keys: Keys, name: str) -> set[str]:
    """The requests whose entries a tail shows this caller, perhaps the fleet's own."""
    call = here.log.Tail(log_pb2.TailRequest(), metadata=keys.metadata(name))
    return {stored.entry.request async for message in call for stored in message.entries}


async def listed(here: Deployment, keys: Keys, name: str, **fields: Any) -> list[str]:
    wanted = log_pb2.ListRequestsRequest(**fields)
    answer = await here.log.ListRequests(wanted, metadata=keys.metadata(name))
    return [line.request_id for line in answer.requests]


async def refusal_of(call: Any, request: str) -> tuple[grpc.StatusCode, str]:
    """Code and text of a refusal, with the request's id taken out."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details()).replace(request, "ID")


async def test_another_tenants_request_is_as_if_unknown(model: Path, keys: Keys) -> None:
    """It cannot be read, listed, tailed, exported or cancelled, and the refusal tells nothing."""
    async with guarded(model, keys, pause_at=2) as here:
        call, request = await begin(here, keys, "acme", new=50)
        await here.decode.paused.wait()
        other = keys.metadata("globex")
        said = []
        for name in (request, "nobody"):
            read = log_pb2.GetRequestLogRequest(request_id=name)
            cancel = admin_pb2.CancelRequestRequest(request_id=name)
            said.append(
                (
                    await refusal_of(here.log.GetRequestLog(read, metadata=other), name),
                    await refusal_of(here.admin.CancelRequest(cancel, metadata=other), name),
                )
            )
        assert said[0] == said[1]
        assert said[0][0][0] is said[0][1][0] is Code.NOT_FOUND
        assert await seen(here, keys, "globex") == set()
        assert await listed(here, keys, "globex") == []
        assert await exported(here, keys, "globex") == set()
        here.decode.go_on()
        assert await answered(call)


async def exported(here: Deployment, keys: Keys, name: str) -> set[str]:
    """What the command line would export."""

    def export() -> set[str]:
        with Client(here.address, keys.call(name)) as client:
            return {stored.entry.request for stored in client.tail()}

    return await anyio.to_thread.run_sync(export)


async def test_a_client_sees_its_own_requests_and_an_operator_all(model: Path, keys: Keys) -> None:
    """Each tenant reads its own log and no fleet; the operator reads everything."""
    async with guarded(model, keys) as here:
        mine: dict[str, str] = {}
        for name in ("acme", "globex"):
            call, mine[name] = await begin(here, keys, name)
            assert await answered(call)
        for name, request in mine.items():
            read = log_pb2.GetRequestLogRequest(request_id=request)
            metadata = keys.metadata(name)
            assert (await here.log.GetRequestLog(read, metadata=metadata)).entries
            assert await seen(here, keys, name) == {request}
            assert await exported(here, keys, name) == {request}
            assert await listed(here, keys, name) == [request]
            assert (await here.log.GetRequestLog(read, metadata=keys.metadata("operator"))).entries
        assert await seen(here, keys, "operator") == {*mine.values(), FLEET}
        assert await listed(here, keys, "operator") == list(mine.values())
        assert await listed(here, keys, "acme", page_token="1") == []


async def test_a_client_cancels_its_own_request(model: Path, keys: Keys) -> None:
    """By its id, from another call; the log says that a client did it."""
    async with guarded(model, keys, pause_at=2) as here:
        call, request = await begin(here, keys, "acme", new=50)
        await here.decode.paused.wait()
        cancel = admin_pb2.CancelRequestRequest(request_id=request)
        answer = await here.admin.CancelRequest(cancel, metadata=keys.metadata("acme"))
        assert answer.cancelled
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is Code.CANCELLED
        assert details(caught.value)[0].metadata["reported_by"] == "client"


async def test_a_waiting_request_is_its_tenants_alone(model: Path, keys: Keys) -> None:
    """A request in the queue, which no entry names yet, is hidden from others as well."""
    async with guarded(model, keys, pages=16, pause_at=1) as here:
        first, _ = await begin(here, keys, "acme", tokens=40, new=8)
        second = here.generation.Generate(
            ask(tokens=40, new=8, key="k"), metadata=keys.metadata("acme")
        )
        status = admin_pb2.GetStatusResponse()
        operator = keys.metadata("operator")
        while not status.queued:
            status = await here.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=operator)
        waiting = request_id(epoch=1, serial=2)
        cancel = admin_pb2.CancelRequestRequest(request_id=waiting)
        other, mine = keys.metadata("globex"), keys.metadata("acme")
        assert await code_of(here.admin.CancelRequest(cancel, metadata=other)) is Code.NOT_FOUND
        assert (await here.admin.CancelRequest(cancel, metadata=mine)).cancelled
        assert await code_of(second.read()) is Code.CANCELLED
        here.decode.go_on()
        assert await answered(first)


async def test_an_idempotency_key_belongs_to_its_tenant(model: Path, keys: Keys) -> None:
    """Two tenants may use the same key, and neither reads the other's answer by it."""
    async with guarded(model, keys) as here:
        calls = [await begin(here, keys, name, key="same") for name in ("acme", "globex")]
        assert calls[0][1] != calls[1][1]
        for call, _ in calls:
            assert await answered(call)


async def test_a_key_file_keeps_tenants_across_lives(model: Path, keys: Keys) -> None:
    """With it a tenant finds its requests after a restart; without it nobody but operators does."""
    folder, key = keys.folder / "log", keys.folder / "tenant.key"
    async with guarded(model, keys, store=SegmentStore(folder), tenant_key=key) as here:
        call, request = await begin(here, keys, "acme")
        assert await answered(call)
    assert key.stat().st_mode & 0o777 == 0o600
    for with_key, found in ((key, [request]), (None, [])):
        life = guarded(model, keys, store=SegmentStore(folder), tenant_key=with_key, engines=False)
        async with life as here:
            assert await listed(here, keys, "acme") == found
            assert await listed(here, keys, "globex") == []
            assert await listed(here, keys, "operator") == [request]


async def test_a_key_file_of_another_size_is_refused(model: Path, keys: Keys) -> None:
    """A short key would be a weak one."""
    key = keys.folder / "tenant.key"
    key.write_bytes(b"short")
    with pytest.raises(ExceptionGroup) as caught:
        async with guarded(model, keys, tenant_key=key, engines=False):
            pass
    assert caught.group_contains(InvalidSetting, match="5 bytes, 32 are needed")


# --- engines --------------------------------------------------------------------------------------


async def test_a_bound_engine_joins_under_its_name_only(model: Path, keys: Keys) -> None:
    """The hello of another id is refused, and the refusal names both."""
    async with guarded(model, keys, engines=False) as here:
        other = FakeEngine(Role.PREFILL, here.address, name="prefill-8")
        call = here.fleet.Connect(metadata=keys.metadata("bound"))
        hello = fleet_pb2.EngineItem(hello=other.hello())
        await call.write(fleet_pb2.ConnectRequest(items=[hello]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is Code.PERMISSION_DENIED
        assert "prefill-7" in str(caught.value.details())
        assert "prefill-8" in str(caught.value.details())
        own = FakeEngine(Role.PREFILL, here.address, name="prefill-7", dial=keys.dial("bound"))
        here.tasks.start_soon(own.run)
        await own.synced.wait()


@pytest.mark.parametrize("name", ["acme", "operator"])
async def test_an_engine_hears_that_it_is_not_let_in(model: Path, keys: Keys, name: str) -> None:
    """A stream that is refused for its credential is told apart from one that broke."""
    send, receive = anyio.create_memory_object_stream[Heard | Broken](1)
    async with guarded(model, keys, engines=False) as here:
        settings = JoinSettings(scheduler=here.address, token_file=keys.token_file(name))
        hello = FakeEngine(Role.PREFILL, here.address).hello
        client = FleetClient(settings, hello=hello, deliver=send.send)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            heard = await receive.receive()
            tasks.cancel_scope.cancel()
        assert isinstance(heard, Broken)
        assert heard.denied
        assert "PERMISSION_DENIED" in heard.reason
    send.close()
    receive.close()


# --- changes --------------------------------------------------------------------------------------


async def test_a_revoked_credential_ends_its_calls(model: Path, keys: Keys) -> None:
    """Without a restart open calls end, requests of the revoked with them, and new ones fail."""
    async with guarded(model, keys, pause_at=2) as here:
        tail = here.log.Tail(log_pb2.TailRequest(follow=True), metadata=keys.metadata("acme"))
        call, request = await begin(here, keys, "acme", new=50)
        kept, _ = await begin(here, keys, "globex", new=50)
        keys.write("globex", "engines", "operator")
        for revoked in (tail, call):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest(revoked)
            assert caught.value.code() is Code.UNAUTHENTICATED
            assert "revoked" in str(caught.value.details())
        await here.tail_until("aborted", request=request)
        again = here.generation.Generate(ask(), metadata=keys.metadata("acme"))
        assert await code_of(again.read()) is Code.UNAUTHENTICATED
        here.decode.go_on()
        assert await answered(kept)


async def test_a_new_credential_lets_in_without_a_restart(model: Path, keys: Keys) -> None:
    """Who is added to the file may call within seconds."""
    keys.write("engines", "operator")
    method = "/custody.v1.LogService/ListRequests"
    async with guarded(model, keys, engines=False) as here:
        assert await knock(here.channel, method, keys.metadata("acme")) is Code.UNAUTHENTICATED
        keys.write("acme", "engines", "operator")
        with anyio.fail_after(SAFETY_SECONDS):
            while await knock(here.channel, method, keys.metadata("acme")) is not Code.OK:
                pass


def test_a_broken_file_keeps_the_old_credentials(keys: Keys) -> None:
    """A mistake in the file locks nobody out and lets nobody in, and is logged as an error."""
    files = CredentialFiles(keys.file)
    assert not files.refresh()
    keys.write("acme", further="[[credential]]\nname = 'x'\n")
    with capture_logs() as logs:
        assert not files.refresh()
        assert not files.refresh()
    assert [(log["event"], log["log_level"]) for log in logs] == [("credentials_unusable", "error")]
    assert files.current.of_token(keys.tokens["globex"]) is not None
    keys.file.unlink()
    assert not files.refresh()
    assert files.current.of_token(keys.tokens["globex"]) is not None
    keys.write("acme")
    assert files.refresh()
    assert files.current.of_token(keys.tokens["globex"]) is None


def test_a_second_file_makes_engines_only(keys: Keys) -> None:
    """What `serve` adds for its engines can make nobody a client or an operator."""
    second = Keys.make(keys.folder / "second")
    keys.write("acme")
    second.write("engines", "operator")
    files = CredentialFiles(keys.file, second.file)
    assert {entry.name for entry in files.current.entries} == {"acme", "engines"}


GOOD = "role = 'operator'\nname = 'a'\ntoken_sha256 = '" + "0" * 64 + "'\n"
BAD_FILES: dict[str, tuple[str, str]] = {
    "no TOML": ("[[", "is no TOML"),
    "another table": ("[other]\n", "nothing but"),
    "another form": ("credential = 1\n", "nothing but"),
    "no name": ("[[credential]]\nrole = 'operator'\n", "plain name"),
    "no role": ("[[credential]]\nname = 'a'\n", "role must be one of"),
    "another role": ("[[credential]]\nname = 'a'\nrole = 'root'\n", "role must be one of"),
    "no secret": ("[[credential]]\nname = 'a'\nrole = 'operator'\n", "exactly one of"),
    "a token": (f"[[credential]]\n{GOOD}token = '{CANARY}'\n", "unknown keys: token"),
    "no tenant": ("[[credential]]\n" + GOOD.replace("operator", "client"), "has a tenant"),
    "a tenant": (f"[[credential]]\n{GOOD}tenant = 'a'\n", "has a tenant"),
    "an engine": (f"[[credential]]\n{GOOD}engine = 'a'\n", "only an engine"),
    "no digest": ("[[credential]]\n" + GOOD.replace("0" * 64, CANARY), "64 lower-case"),
    "a number": ("[[credential]]\nname = 'a'\nrole = 7\n", "is a string"),
    "the same twice": (f"[[credential]]\n{GOOD}\n[[credential]]\n{GOOD}", "another entry"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_understood_is_refused(tmp_path: Path, name: str) -> None:
    """The message says which file and what is wrong, and repeats no value that may be a secret."""
    text, reason = BAD_FILES[name]
    path = tmp_path / "credentials.toml"
    path.write_text(text)
    with pytest.raises(CredentialsError, match=reason) as caught:
        read_credentials(path)
    assert str(path) in str(caught.value)
    assert CANARY not in str(caught.value)


# --- what is never said ---------------------------------------------------------------------------


def provoke(keys: Keys) -> dict[str, Callable[[Deployment], Any]]:
    """Calls that are refused or end in different ways, each with the canary in its prompt."""
    pb = generation_pb2
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="nobody", content=CANARY)])
    secret = (("authorization", f"Bearer {CANARY}"),)
    mine = keys.metadata("acme")
    requests = {
        "answered": pb.GenerateRequest(text=CANARY, sampling=pb.Sampling(new_tokens_max=3)),
        "chat": pb.GenerateRequest(chat=chat),
        "sampling": pb.GenerateRequest(text=CANARY, sampling=pb.Sampling(top_p=7)),
        "several": pb.GenerateRequest(text=CANARY, n=2),
        "context": pb.GenerateRequest(text=CANARY, sampling=pb.Sampling(new_tokens_max=100_000)),
        "bytes": pb.GenerateRequest(text=CANARY * 100),
        "stop": pb.GenerateRequest(
            text=CANARY, sampling=pb.Sampling(stop_strings=[CANARY] * 100, new_tokens_max=2)
        ),
    }

    def sends(request: pb.GenerateRequest, metadata: Any) -> Callable[[Deployment], Any]:
        return lambda here: here.generation.Generate(request, metadata=metadata)

    calls = {name: sends(request, mine) for name, request in requests.items()}
    calls["unknown token"] = sends(requests["answered"], secret)
    calls["engine's token"] = sends(requests["answered"], keys.metadata("engines"))
    return calls


async def test_neither_prompts_nor_tokens_are_said(
    model: Path, keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    """No log line, status or stored event holds a prompt or a bearer token."""
    said: list[str] = []
    with capture_logs() as logs:
        stored = await misbehave(model, keys, said)
    assert sum(line.endswith(" OK") for line in said) == 1, said
    assert {"call_refused", "request_refused"} <= {log["event"] for log in logs}
    captured = capfd.readouterr()
    texts = (*said, captured.out, captured.err, *map(str, logs), *map(str, stored))
    for secret in (CANARY, *keys.tokens.values()):
        assert [text for text in texts if secret in text] == []


async def misbehave(model: Path, keys: Keys, said: list[str]) -> list[Stored]:
    """Make every call of `provoke`; what the log then holds."""
    async with guarded(model, keys, prompt_bytes_max=512) as here:
        for name, call in provoke(keys).items():
            try:
                async for _ in call(here):
                    pass
                said.append(f"{name} OK")
            except grpc.aio.AioRpcError as error:
                info, found = details(error)
                said.append(f"{name} {error.code()} {error.details()} {info} {found}")
        return list(here.store.tail(1))


def test_a_credential_shows_no_digest() -> None:
    """What a log line might print of an entry is its name, role, tenant and engine."""
    entry = Credential(name="a", role=CallerRole.OPERATOR, token_sha256="0" * 64)
    assert "0" * 64 not in repr(entry)
