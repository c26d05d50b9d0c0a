"""Bad input gets a clear error and costs nothing: the table of everything foreseen.

Each test ends with the same proof: a good request is answered, every page is home by the word of
the ledger and of the engines, and the log replays clean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import attrs
import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from engine.model_config import ModelError
from engine.store import StoreDamaged
from engine.weights import load_model
from lifecycle.events import Role
from lifecycle.ids import Party
from tests.bad_input import (
    POOL_PAGES,
    REQUESTS,
    Impostor,
    Row,
    admissions,
    bearer,
    events_of,
    guarded,
    junk,
    nothing_lost,
    raw_stream,
    refusal_of,
    says,
    sent,
    settled,
    told_engines,
)
from tests.fake_engine import FakeEngine
from tests.odd_messages import Drawer
from tests.serving import Deployment, ask, deployment, details
from tests.test_services import begin, rest, status_of
from tests.test_store_full_disk import SmallDisk
from tests.tiny import tiny_gguf, tiny_llama
from transport import codec, server
from transport.cli import run as run_command
from transport.engine_planes import fingerprint, page_layout
from transport.pb import admin_pb2, fleet_pb2, log_pb2, pages_pb2, pages_pb2_grpc
from transport.pb import generation_pb2 as pb
from transport.planes.grpc_stream import GrpcStreamPlane
from transport.scheduler_shell import run_scheduler
from transport.settings import InvalidSetting, SchedulerSettings
from transport.stores.segments import SegmentStore
from transport.wellformed import WellFormed

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", REQUESTS, ids=lambda row: row.name)
async def test_a_bad_request_is_refused_and_owns_nothing(model: Path, row: Row) -> None:
    """It is one `Rejected` in the log, or no request at all, and never reaches an engine."""
    async with deployment(model, pages=POOL_PAGES, context_tokens=row.context) as here:
        request = says(await refusal_of(raw_stream(here, row.body)), row)
        if request:
            assert events_of(here, request) == ["Rejected"]
        assert admissions(here) == 0
        assert told_engines(here) == []
        await nothing_lost(here)


@pytest.mark.parametrize("context", [None, 40])
async def test_a_request_that_fits_exactly_is_served(model: Path, context: int | None) -> None:
    """Prompt and new tokens may fill the context, or the pool, to the last token."""
    whole = context or POOL_PAGES * 4
    async with deployment(model, pages=POOL_PAGES, context_tokens=context) as here:
        generation = ask(tokens=whole - 3, new=3)
        answer = await here.generation.Complete(pb.CompleteRequest(generation=generation))
        assert answer.outcome.usage.new_tokens == 3
        await nothing_lost(here)


async def test_a_key_with_another_body_leaves_the_first_alone(model: Path) -> None:
    """ALREADY_EXISTS names the request of the key, which goes on and is answered."""
    async with deployment(model, pause_at=2) as here:
        call, request = await begin(here, ask(new=6, key="one"))
        error = await status_of(here.generation.Generate(ask(new=5, key="one")))
        row = Row("", b"", Code.ALREADY_EXISTS, "REQUEST_ID_REUSED")
        assert says(error, row) == request
        assert admissions(here) == 1
        here.decode.go_on()
        assert (await rest(call))[-1].outcome.usage.new_tokens == 6
        await nothing_lost(here)


# --- bytes without a meaning ----------------------------------------------------------------------


@attrs.frozen
class Method:
    """One RPC as its descriptor says it is."""

    path: str
    takes: type

    def malformed(self, seed: int, count: int) -> list[bytes]:
        """Bytes that are no message of what this method takes."""
        found = [b"\xff", b"\x0a\x05ab"]
        for body in junk(seed, range(1, 400)):
            if len(found) == count:
                break
            try:
                self.takes.FromString(body)  # type: ignore[attr-defined]
            except DecodeError:
                found.append(body)
        return found


def methods(*services: str) -> Iterator[Method]:
    """Every method of these services."""
    pool = descriptor_pool.Default()
    for name in services:
        service = pool.FindServiceByName(name)
        for method in service.methods:
            takes = message_factory.GetMessageClass(method.input_type)
            yield Method(f"/{name}/{method.name}", takes)


SERVED = tuple(methods(*server.SERVICES, server.HEALTH, "grpc.reflection.v1alpha.ServerReflection"))
PAGES = tuple(methods(pages_pb2.DESCRIPTOR.services_by_name["PagesService"].full_name))


async def malformed_everywhere(channel: grpc.aio.Channel, served: tuple[Method, ...]) -> int:
    """Send every method bytes that it cannot read; how many calls were made."""
    calls = 0
    for number, method in enumerate(served):
        for body in method.malformed(seed=number, count=8):
            error = await sent(channel, method.path, body)
            assert error.code() is Code.INVALID_ARGUMENT, (method.path, body, error)
            info, _ = details(error)
            assert (info.reason, info.metadata["method"]) == ("INVALID_REQUEST", method.path)
            assert info.metadata["size_bytes"] == str(len(body))
            calls += 1
    return calls


async def test_malformed_protobuf_on_every_method_of_a_scheduler(
    model: Path, record_property: Callable[[str, object], None]
) -> None:
    """INVALID_ARGUMENT with the method and size, health and reflection included."""
    assert len(SERVED) == 15
    async with deployment(model) as here:
        calls = await malformed_everywhere(here.channel, SERVED)
        record_property("summary", f"malformed messages: {calls} calls of {len(SERVED)} methods")
        assert admissions(here) == 0
        await nothing_lost(here)


async def test_malformed_protobuf_on_every_method_of_the_pages() -> None:
    """An engine's pages refuse them alike, and no byte of the pool changes."""
    pool = bytearray(4096)
    plane = GrpcStreamPlane(party="p", incarnation="1")
    plane.register(memoryview(pool))
    pages = grpc.aio.server(interceptors=(WellFormed(),))
    pages_pb2_grpc.add_PagesServiceServicer_to_server(plane.servicer(), pages)
    port = pages.add_insecure_port("127.0.0.1:0")
    await pages.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert len(PAGES) == 2
        await malformed_everywhere(channel, PAGES)
    await pages.stop(None)
    assert pool == bytes(4096)


async def test_a_malformed_message_within_an_engines_stream(model: Path) -> None:
    """The stream ends with a status; the engine keeps its life and may come back."""
    async with deployment(model) as here:
        other = FakeEngine(Role.DECODE, here.address, name="other")
        hello = fleet_pb2.ConnectRequest(items=[fleet_pb2.EngineItem(hello=other.hello())])
        connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        connect = here.channel.stream_stream(CONNECT)
        call = connect()
        await call.write(hello.SerializeToString())
        await call.write(b"\xff\xff")

        async def to_the_end() -> None:
            async for _ in call:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end()
        assert caught.value.code() is Code.INVALID_ARGUMENT
        assert details(caught.value)[0].metadata["size_bytes"] == "2"
        await nothing_lost(here)
        here.tasks.start_soon(other.run)
        await other.synced.wait()
        await nothing_lost(here)


# --- callers --------------------------------------------------------------------------------------


@attrs.frozen
class Knock:
    """A call that the door must refuse."""

    name: str
    path: str
    metadata: tuple[tuple[str, str], ...]
    code: grpc.StatusCode
    body: bytes = b""


GENERATE = "/custody.v1.GenerationService/Generate"
CONNECT = "/custody.v1.FleetService/Connect"
STATUS = "/custody.v1.AdminService/GetStatus"
NO, NOT_HERE = Code.UNAUTHENTICATED, Code.PERMISSION_DENIED
HELLO = fleet_pb2.ConnectRequest(
    items=[fleet_pb2.EngineItem(hello=FakeEngine(Role.DECODE, "", name="nobody").hello())]
).SerializeToString()
KNOCKS = (
    Knock("no credential", GENERATE, (), NO),
    Knock("no credential and bad bytes", GENERATE, (), NO, b"\xff"),
    Knock("no credential, reflection", SERVED[-1].path, (), NO),
    Knock("wrong token", GENERATE, bearer("custody_wrong"), NO),
    Knock("token of nothing", GENERATE, (("authorization", "Bearer "),), NO),
    Knock("no bearer", GENERATE, (("authorization", "Basic {alice}"),), NO),
    Knock("two tokens", GENERATE, bearer("{alice}") + bearer("{bob}"), NO),
    Knock("an engine generates", GENERATE, bearer("{engine}"), NOT_HERE),
    Knock("an operator generates", GENERATE, bearer("{op}"), NOT_HERE),
    Knock("a client joins", CONNECT, bearer("{alice}"), NOT_HERE),
    Knock("an operator joins", CONNECT, bearer("{op}"), NOT_HERE),
    Knock("a bound engine joins as another", CONNECT, bearer("{bound}"), NOT_HERE, HELLO),
    Knock("a client asks for the status", STATUS, bearer("{alice}"), NOT_HERE),
    Knock("an engine asks for the status", STATUS, bearer("{engine}"), NOT_HERE),
)


@pytest.mark.parametrize("knock", KNOCKS, ids=lambda knock: knock.name)
async def test_who_does_not_belong_is_refused(model: Path, tmp_path: Path, knock: Knock) -> None:
    """By status with a reason, before a byte of the request is read; no token is repeated."""
    async with guarded(model, tmp_path / "credentials.toml") as (here, tokens):
        metadata = tuple((key, value.format(**tokens)) for key, value in knock.metadata)
        body = knock.body or ask().SerializeToString()
        error = await sent(here.channel, knock.path, body, metadata=metadata)
        assert error.code() is knock.code
        info, _ = details(error)
        assert info.reason == knock.code.name
        said = f"{error.details()} {info}"
        assert not [token for token in tokens.values() if token in said]
        assert admissions(here) == 0
        await nothing_lost(here, bearer(tokens["alice"]))


async def test_another_tenants_request_is_not_there(model: Path, tmp_path: Path) -> None:
    """Neither read nor cancelled: NOT_FOUND, as if it had never been, and it goes on."""
    async with guarded(model, tmp_path / "credentials.toml", pause_at=2) as (here, tokens):
        alice, bob = bearer(tokens["alice"]), bearer(tokens["bob"])
        call = here.generation.Generate(ask(new=6), metadata=alice)
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        name = first.admission.request_id
        asked = log_pb2.GetRequestLogRequest(request_id=name)
        cancel = admin_pb2.CancelRequestRequest(request_id=name)
        paths = {
            "/custody.v1.LogService/GetRequestLog": asked,
            "/custody.v1.AdminService/CancelRequest": cancel,
        }
        for path, request in paths.items():
            error = await sent(here.channel, path, request.SerializeToString(), metadata=bob)
            assert error.code() is Code.NOT_FOUND
            assert details(error)[0].reason == "NOT_FOUND"
        here.decode.go_on()
        assert (await rest(call))[-1].outcome.usage.new_tokens == 6
        await nothing_lost(here, alice)


async def test_an_endless_name_is_cut_and_still_a_status(model: Path) -> None:
    """A status travels in headers, so what a caller wrote is not repeated without end."""
    async with deployment(model) as here:
        name = "n" * 100_000
        for path, request, code in (
            (
                "LogService/GetRequestLog",
                log_pb2.GetRequestLogRequest(request_id=name),
                "NOT_FOUND",
            ),
            ("LogService/ListRequests", log_pb2.ListRequestsRequest(page_token=name), "INVALID_"),
            ("AdminService/CancelRequest", admin_pb2.CancelRequestRequest(request_id=name), "NOT_"),
            ("AdminService/DrainEngine", admin_pb2.DrainEngineRequest(engine=name), "NOT_FOUND"),
            ("GenerationService/Generate", ask(model=name), "INVALID_ARGUMENT"),
        ):
            error = await sent(here.channel, f"/custody.v1.{path}", request.SerializeToString())
            assert error.code().name.startswith(code), error
            assert len(str(error.details())) <= 512
        await nothing_lost(here)


# --- engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The real fingerprints of two models, and of one of them with other pages."""
    folder = tmp_path_factory.mktemp("fingerprints")
    one, other = (load_model(str(tiny_llama(folder / str(seed), seed=seed))) for seed in (1, 2))
    return {
        "ours": fingerprint(one, page_layout(one, page_tokens=16)),
        "another model": fingerprint(other, page_layout(other, page_tokens=16)),
        "another page size": fingerprint(one, page_layout(one, page_tokens=32)),
    }


@pytest.mark.parametrize("other", ["another model", "another page size"])
async def test_an_engine_of_another_make_is_refused(
    model: Path, layouts: dict[str, str], other: str
) -> None:
    """INCOMPATIBLE with both fingerprints, nothing in the log, and the fleet serves on."""
    async with deployment(model, engines=False) as here:
        for engine in (here.prefill, here.decode):
            engine.layout = layouts["ours"]
            here.tasks.start_soon(engine.run)
            await engine.synced.wait()
        position = here.store.last_position
        stranger = FakeEngine(Role.DECODE, here.address, name="stranger", layout=layouts[other])
        await stranger.run()
        assert stranger.refused is not None
        assert stranger.refused.reason == fleet_pb2.ATTACH_REFUSAL_INCOMPATIBLE
        assert layouts["ours"] in stranger.refused.message
        assert layouts[other] in stranger.refused.message
        assert here.store.last_position == position
        await nothing_lost(here)


@pytest.mark.parametrize("incarnation", [1, 2], ids=["older", "same"])
async def test_a_second_engine_of_one_id_does_not_disturb_the_first(
    model: Path, incarnation: int
) -> None:
    """SUPERSEDED for an older life, and for another process that claims the very same life."""
    async with deployment(model, engines=False, pause_at=2) as here:
        here.decode = FakeEngine(Role.DECODE, here.address, incarnation=2, pause_at=2)
        for engine in (here.prefill, here.decode):
            here.tasks.start_soon(engine.run)
            await engine.synced.wait()
        call, request = await begin(here, ask(new=6))
        second = Impostor(Role.DECODE, here.address, incarnation=incarnation)
        await second.run()
        assert second.refused is not None
        assert second.refused.reason == fleet_pb2.ATTACH_REFUSAL_SUPERSEDED
        here.decode.go_on()
        assert (await rest(call))[-1].outcome.attempts == 1
        assert "Aborted" not in events_of(here, request)
        await nothing_lost(here)


async def test_a_newer_engine_of_one_id_takes_over_what_the_older_had(model: Path) -> None:
    """The older is told SUPERSEDED, its request is tried again on the newer and answered."""
    async with deployment(model, pause_at=2) as here:
        call, request = await begin(here, ask(new=6))
        await here.decode.paused.wait()
        older = here.decode
        here.decode = FakeEngine(Role.DECODE, here.address, incarnation=2)
        here.tasks.start_soon(here.decode.run)
        await older.gone.wait()
        assert older.refused is not None
        assert older.refused.reason == fleet_pb2.ATTACH_REFUSAL_SUPERSEDED
        answer = await rest(call)
        # What was relayed before is not told twice; a fake engine counts from 10 in each attempt.
        assert sum(len(step.chunk.token_ids) for step in answer) == 6
        assert answer[-1].outcome.attempts == 2
        assert "Requeued" in events_of(here, request)
        # The older life's pages went with its memory; the newer one's are all free.
        history = await settled(here)
        assert all(
            account.free_pages == account.capacity
            for party, account in history.ledger.items()
            if history.fleet.current(party.engine).attached.incarnation == party.incarnation  # type: ignore[union-attr]
        )


NONSENSE: dict[str, dict[str, int | str]] = {
    "no role": {"role": 0},
    "no pages": {"pages": 0},
    "no page size": {"page_tokens": 0},
    "two ranks": {"ranks": 2},
    "no ranks": {"ranks": 0},
    "no layers": {"layers": 0},
    "no slots": {"slots": 0},
    "no layout": {"layout": ""},
    "no fence scope": {"fence_scope": 0},
    "an endpoint that is none": {"endpoint": "{not json"},
    "endless pages": {"pages": (1 << 64) - 1},
    "endless page size": {"page_tokens": (1 << 64) - 1},
    "endless slots": {"slots": (1 << 64) - 1},
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_an_engine_that_makes_no_sense_is_refused(model: Path, name: str) -> None:
    """A hello with impossible values is a refusal with a sentence, never an exception."""
    async with deployment(model) as here:
        hello = FakeEngine(Role.DECODE, here.address, name="odd").hello()
        for field, value in NONSENSE[name].items():
            setattr(hello, field, value)
        call = here.fleet.Connect()
        await call.write(fleet_pb2.ConnectRequest(items=[fleet_pb2.EngineItem(hello=hello)]))
        message = await call.read()
        assert isinstance(message, fleet_pb2.ConnectResponse)
        refused = message.items[-1].refused
        assert refused.reason in {
            fleet_pb2.ATTACH_REFUSAL_PROTOCOL,
            fleet_pb2.ATTACH_REFUSAL_INCOMPATIBLE,
        }
        assert refused.message
        await nothing_lost(here)


def odd_item(draw: Drawer, party: Party, number: int, request: str) -> fleet_pb2.EngineItem | None:
    """Something that can be decoded and makes no sense; None when this draw cannot be."""
    item = fleet_pb2.EngineItem()
    draw.fill(item)
    match item.WhichOneof("item"):
        case "proposal":
            item.proposal.party.CopyFrom(codec.encode_party(party))
            item.proposal.number = number
            if number % 2:
                item.proposal.request, item.proposal.attempt = request, 1
            try:
                codec.decode_proposal(item.proposal)
            except (ValueError, codec.CodecError):
                return None
        case "tokens":
            item.tokens.request = request
            del item.tokens.logprobs[:], item.tokens.texts[:]
            item.tokens.texts.extend("x" for _ in item.tokens.token_ids)
        case "heartbeat":
            pass
        case _:
            return None
    return item


async def test_well_formed_nonsense_from_an_engine_changes_nothing(
    model: Path, record_property: Callable[[str, object], None]
) -> None:
    """Proposals and tokens of a stranger about a running request: dropped, and it is answered."""
    sent_items = 0
    async with deployment(model, pause_at=2) as here:
        call, request = await begin(here, ask(new=6))
        await here.decode.paused.wait()
        draw = Drawer(7, (request, "decode", "prefill", "odd", "layout-a", "kv"))
        for incarnation in range(1, 9):
            odd = FakeEngine(Role.DECODE, here.address, name="odd", incarnation=incarnation)
            stream = here.fleet.Connect()
            hello = fleet_pb2.EngineItem(hello=odd.hello())
            await stream.write(fleet_pb2.ConnectRequest(items=[hello]))
            welcome = await stream.read()
            assert isinstance(welcome, fleet_pb2.ConnectResponse)
            epoch = welcome.items[0].welcome.epoch
            items = [fleet_pb2.EngineItem(inventory=fleet_pb2.Inventory(epoch=epoch))]
            for _ in range(80):
                # A proposal out of order would be ignored, so they are numbered without a gap.
                number = 1 + sum(item.HasField("proposal") for item in items)
                item = odd_item(draw, odd.party, number, request)
                items += [] if item is None else [item]
            sent_items += len(items)
            await stream.write(fleet_pb2.ConnectRequest(items=items))
            # A question behind everything that was sent; then the next life takes over.
            await here.admin.GetStatus(admin_pb2.GetStatusRequest())
            stream.cancel()
            await stream.code()
        kinds = [type(s.entry.event).__name__ for s in here.store.tail(1)]
        assert kinds.count("Dropped") > 0
        said = f"{sent_items} items of an engine, {kinds.count('Dropped')} drops in the log"
        record_property("summary", f"well-formed nonsense: {said}")
        sane = FakeEngine(Role.DECODE, here.address, name="odd", incarnation=99)
        here.tasks.start_soon(sane.run)
        await sane.synced.wait()
        here.decode.go_on()
        answer = await rest(call)
        assert answer[-1].outcome.attempts == 1
        assert [t for step in answer for t in step.chunk.token_ids] == list(range(10, 16))
        await nothing_lost(here)


# --- the machine ----------------------------------------------------------------------------------


async def test_a_port_in_use_is_a_setting_to_change(model: Path, tmp_path: Path) -> None:
    """The second scheduler says which; the first serves on, and the second's log is whole."""
    async with deployment(model) as here:
        port = int(here.address.rpartition(":")[2])
        with pytest.raises(InvalidSetting, match=f"{port}.*cannot be bound"):
            await run_scheduler(
                SchedulerSettings(model=str(model), port=port, log=tmp_path / "log"),
                ready=lambda _: None,
                stop=anyio.Event(),
            )
        await nothing_lost(here)
    async with deployment(model, store=SegmentStore(tmp_path / "log")) as here:
        await nothing_lost(here)


CUTS = (0, 3, 20, 400, 5_000, -4_096, -1)
"""Bytes that are left of a model file, or that are missing from its end."""


@pytest.mark.parametrize("cut", CUTS)
def test_a_model_file_cut_short_is_said_to_be(model: Path, tmp_path: Path, cut: int) -> None:
    """A GGUF file and a safetensors file alike: one error that names the file."""
    whole = tiny_gguf(tmp_path / "whole.gguf", model).read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(whole[:cut])
    with pytest.raises(ModelError, match=r"short\.gguf"):
        load_model(str(short))
    folder = tiny_llama(tmp_path / "cut")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:cut])
    with pytest.raises(ModelError, match="cut"):
        load_model(str(folder))


def test_a_scheduler_of_a_model_cut_short_touches_no_log(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the file is named, and there is no log as before."""
    whole = tiny_gguf(tmp_path / "whole.gguf", model).read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(whole[:400])
    arguments = ["scheduler", "--model", str(short), "--port", "0", "--log", str(tmp_path / "log")]
    assert run_command(arguments) == 2
    assert "short.gguf" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


async def write_log(model: Path, folder: Path) -> None:
    """A log of two answered requests."""
    async with deployment(model, store=SegmentStore(folder)) as here:
        await nothing_lost(here)
        await nothing_lost(here)


def the_segment(folder: Path) -> Path:
    """The one segment of a log."""
    (segment,) = folder.glob("*.segment")
    return segment


async def test_a_log_with_a_torn_end_is_repaired_and_goes_on(model: Path, tmp_path: Path) -> None:
    """The broken end is kept in a file of its own, and everything before it is still there."""
    await write_log(model, tmp_path)
    segment = the_segment(tmp_path)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-5])
    store = SegmentStore(tmp_path)
    assert store.torn is not None
    assert store.torn.exists()
    async with deployment(model, store=store, engines=False) as here:
        here.prefill = FakeEngine(Role.PREFILL, here.address, incarnation=2)
        here.decode = FakeEngine(Role.DECODE, here.address, incarnation=2)
        for engine in (here.prefill, here.decode):
            here.tasks.start_soon(engine.run)
            await engine.synced.wait()
        await nothing_lost(here)
    assert segment.read_bytes().startswith(whole[: len(whole) - 5 - store.torn.stat().st_size])


def test_a_log_with_a_corrupted_record_is_not_guessed_about(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Segment and offset are named, the exit code is 5, and not a byte is changed."""
    folder = tmp_path / "log"
    anyio.run(write_log, model, folder)
    segment = the_segment(folder)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(StoreDamaged, match=segment.name):
        SegmentStore(folder)
    arguments = ["scheduler", "--model", str(model), "--port", "0", "--log", str(folder)]
    assert run_command(arguments) == 5
    said = capsys.readouterr().err
    assert segment.name in said
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


async def test_a_full_disk_refuses_and_recovers(model: Path, tmp_path: Path) -> None:
    """UNAVAILABLE while there is no room, nothing is admitted; with room again it goes on."""
    disk = SmallDisk()
    store = SegmentStore(tmp_path, disk=disk)
    async with deployment(model, store=store) as here:
        await nothing_lost(here)
        admitted = admissions(here)
        disk.room = 0
        codes = {await outcome(here) for _ in range(3)}
        assert codes == {"LOG_UNAVAILABLE"}
        assert admissions(here) == admitted
        disk.room = None
        while (found := await outcome(here)) != "":
            assert found == "LOG_UNAVAILABLE"
        await nothing_lost(here)


async def outcome(here: Deployment) -> str:
    """The reason of a refusal, or nothing for an answer."""
    try:
        await here.generation.Complete(pb.CompleteRequest(generation=ask()), timeout=5)
    except grpc.aio.AioRpcError as error:
        return str(details(error)[0].reason)
    return ""


def test_a_full_disk_is_what_the_test_says_it_is(tmp_path: Path) -> None:
    """The stand-in fails as the system does."""
    disk = SmallDisk()
    disk.room = 0
    with (tmp_path / "file").open("wb") as stream, pytest.raises(OSError, match="No space left"):
        disk.write_at(stream.fileno(), b"a", offset=0)
