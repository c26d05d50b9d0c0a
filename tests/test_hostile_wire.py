"""An engine that lies without end: typed answers, bounded memory, and nobody else is harmed.

Malformed bytes on every method, and well-formed nonsense, are the business of `test_bad_input`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs
import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from engine.judge import MESSAGE_CHARACTERS_MAX
from engine.scheduler import ANSWERS_KEPT
from lifecycle.events import (
    Aborted,
    Cause,
    Drained,
    Dropped,
    Failed,
    Finished,
    FinishReason,
    Proof,
    Proposable,
    Proposal,
    Purpose,
    Released,
    Requeued,
    Reserved,
    Role,
    Transferred,
    Verified,
)
from lifecycle.ids import PAGES_MAX, EngineId, GrantId, PageRange, Party, RequestId, TokenRange
from lifecycle.replay import replay
from lifecycle.rules import RULES
from tests.bad_input import nothing_lost
from tests.driver import DECODE, PREFILL, Driver, Sizes
from tests.fake_engine import FakeEngine
from tests.odd_messages import Drawer
from tests.serving import Deployment, ask, deployment, details
from tests.test_services import begin, rest
from tests.tiny import tiny_llama
from transport import codec
from transport.client_desk import TOKEN_CHARACTERS_MAX
from transport.pb import admin_pb2, generation_pb2, log_pb2
from transport.pb import fleet_pb2 as pb

LIAR = Party(EngineId("liar"), 1, 0)
LIES = 3_000
HUGE = (1 << 64) - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def lies(party: Party, grant: GrantId) -> Iterator[Proposable]:
    """Every kind of proposal, again and again, about somebody else's grant and about none."""
    number = 0
    while True:
        number += 1
        own = GrantId(party, number)
        pages, tokens = (PageRange(number % 8, 1),), TokenRange(0, 4)
        yield Reserved(own, Purpose.DESTINATION, pages, tokens, "kv", number, (party,))
        yield Reserved(grant, Purpose.SOURCE, (PageRange(1, PAGES_MAX - 1),), tokens, "kv", 1)
        yield Reserved(own, Purpose.GROWTH, pages * 300, TokenRange(0, HUGE), "kv", 1)
        yield Transferred(grant, TokenRange(number, number), pages, 1, 1, 1, 1)
        yield Transferred(
            grant, TokenRange(1 << 40, 1 << 41), (PageRange(PAGES_MAX - 1, 1),), 1, 1, 1, 1
        )
        yield Transferred(own, tokens, pages, 1, 1, 1, 1)
        yield Drained(grant, party, Proof.FENCED)
        yield Drained(grant, PREFILL, Proof.ACKNOWLEDGED)
        yield Verified((grant, own), 1, 1, 1, "none")
        yield Finished(FinishReason.LENGTH, 10, 1, b"", 1, 1, 0)
        yield Released(grant)
        yield Released(own)
        yield Failed(Cause.ENGINE_FAILED, "x" * 10_000)


def weight(driver: Driver) -> Counter[str]:
    """What the scheduler keeps of everybody, counted."""
    core = driver.scheduler
    return Counter(
        {
            "log": core.position,
            "drops": len(core.drops),
            "answers": max(len(line.answers) for line in core.lines.values()),
            "entries": sum(map(len, core.entries.values())),
            "requests": len(core.log.requests),
            "relayed": sum(len(relay.tokens) for relay in core.relays.values()),
        }
    )


def held(driver: Driver) -> object:
    """The pages and the fleet, by the log."""
    return dict(driver.scheduler.log.ledger), driver.scheduler.log.fleet


@attrs.define
class Lie:
    """A liar's numbers over one driver."""

    driver: Driver
    party: Party
    number: int = 0

    def say(self, request: RequestId, attempt: int, body: Proposable) -> None:
        """One proposal in order."""
        self.number += 1
        proposal = Proposal(self.party, self.number, request, attempt, body)
        self.driver.perform(self.driver.scheduler.propose(proposal, self.driver.now_ns))


@pytest.mark.parametrize("attempt", [1, 2, HUGE])
def test_a_liar_about_a_running_request_leaves_a_few_lines(attempt: int) -> None:
    """Thousands of proposals are answered, and the log grows by their logarithm.

    Pages, fleet and request stay as they were; an old or future attempt makes no difference.
    """
    driver = Driver(Sizes(pages=16)).pair()
    driver.join(Role.DECODE, LIAR)
    driver.run()
    # The honest request runs on the engines that were there first.
    driver.perform(driver.scheduler.drain(LIAR.engine, driver.now_ns))
    request = driver.submit()
    driver.run_until(lambda: "Transferred" in driver.events(request))
    before, books = weight(driver), held(driver)
    grant = next(
        e.event.grant for _, e in driver.log if isinstance(e.event, Reserved) and e.event.parties
    )
    liar = Lie(driver, LIAR)
    for _, body in zip(range(LIES), lies(LIAR, grant), strict=False):
        liar.say(request, attempt, body)
    after = weight(driver)
    rules = after["drops"] - before["drops"]
    assert 0 < rules < len(RULES)
    assert after["log"] - before["log"] <= rules * LIES.bit_length()
    assert after["answers"] <= ANSWERS_KEPT
    assert after["requests"] == before["requests"]
    assert held(driver) == books
    driver.run()
    assert driver.tokens[request] == list(range(6, 16))
    assert isinstance(driver.outcomes[request], Finished)
    assert replay(driver.log).clean


def test_a_success_that_is_not_ones_own_waits_for_no_tokens() -> None:
    """A stranger's `Finished` is dropped at once: what it says next is not held up behind it."""
    driver = Driver(Sizes(pages=16)).pair()
    driver.join(Role.DECODE, LIAR)
    driver.run()
    driver.perform(driver.scheduler.drain(LIAR.engine, driver.now_ns))
    request = driver.submit()
    driver.run_until(lambda: "Verified" in driver.events(request))
    liar = Lie(driver, LIAR)
    liar.say(request, 1, Finished(FinishReason.LENGTH, 10, 1, b"", 1, 1, 0))
    assert driver.scheduler.lines[LIAR].expected == 2
    driver.run()
    assert isinstance(driver.outcomes[request], Finished)


def test_lies_about_nobody_leave_nothing() -> None:
    """Requests that do not exist, numbers with gaps and repeats: no entry, no memory."""
    driver = Driver(Sizes(pages=16)).pair()
    driver.join(Role.DECODE, LIAR)
    driver.run()
    before = weight(driver)
    liar = Lie(driver, LIAR)
    for serial, body in zip(range(LIES), lies(LIAR, GrantId(DECODE, 1)), strict=False):
        liar.say(RequestId(f"00000009-{serial:012x}"), 1, body)
        if serial % 3 == 0:
            liar.number -= 1
        if serial % 7 == 0:
            gap = Proposal(LIAR, HUGE - serial, RequestId("x"), 1, body)
            assert driver.scheduler.propose(gap, driver.now_ns) == []
    after = weight(driver)
    assert after - before == Counter(answers=after["answers"] - before["answers"])
    assert after["answers"] <= ANSWERS_KEPT


def test_answers_to_one_rank_are_kept_up_to_a_limit() -> None:
    """An engine that proposes without end and never reads makes no memory without end."""
    driver = Driver(Sizes(pages=16)).pair()
    driver.join(Role.DECODE, LIAR)
    liar = Lie(driver, LIAR)
    for _ in range(ANSWERS_KEPT + 500):
        liar.say(RequestId("00000009-000000000001"), 1, Released(GrantId(LIAR, 1)))
    assert weight(driver)["answers"] == ANSWERS_KEPT


def test_a_decode_engine_cannot_give_more_than_was_admitted() -> None:
    """Tokens beyond the admitted number are cut off, in one message or one by one."""
    driver = Driver(Sizes(pages=16)).pair()
    request = driver.submit(new=10)
    driver.run_until(lambda: len(driver.tokens.get(request, ())) >= 2)
    have = len(driver.tokens[request])
    driver.relay(DECODE, request, 1, first=have, tokens=tuple(range(5_000)))
    for first in range(5, 3_000):
        driver.relay(DECODE, request, 1, first=first, tokens=(first,))
    driver.relay(DECODE, request, 1, first=HUGE, tokens=(1, 2))
    assert len(driver.tokens[request]) == 10
    assert weight(driver)["relayed"] == 10
    driver.relay(PREFILL, request, 1, first=10, tokens=(7,))
    assert len(driver.tokens[request]) == 10


def test_the_log_keeps_an_end_of_a_failures_words() -> None:
    """An engine's message of megabytes is cut before it stands in the log, and tried no more."""
    driver = Driver(Sizes(pages=16, attempts_max=2)).pair()
    request = driver.submit()
    driver.run_until(lambda: "Verified" in driver.events(request))
    number = driver.scheduler.lines[DECODE].expected
    failed = Failed(Cause.ISOLATION_VIOLATION, "x" * 1_000_000, 1 << 50, 0, HUGE)
    proposal = Proposal(DECODE, number, request, 1, failed)
    driver.perform(driver.scheduler.propose(proposal, driver.now_ns))
    ends = [e.event for _, e in driver.log if isinstance(e.event, Aborted | Requeued)]
    assert len(ends) == 1
    assert len(getattr(ends[0], "message", "")) <= MESSAGE_CHARACTERS_MAX
    driver.run()
    assert replay(driver.log).clean


# --- over the wire --------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_lying_engine_beside_an_honest_request(model: Path) -> None:
    """Over loopback: every lie is answered by a rule, and the honest request's answer is whole."""
    async with deployment(model, pause_at=2) as here:
        call, request = await begin(here, ask(new=6))
        await here.decode.paused.wait()
        grant = next(
            s.entry.event.grant
            for s in here.store.read(RequestId(request))
            if isinstance(s.entry.event, Reserved) and s.entry.event.parties
        )
        before = here.store.last_position
        liar = FakeEngine(Role.DECODE, here.address, name="liar")
        stream = here.fleet.Connect()
        await stream.write(pb.ConnectRequest(items=[pb.EngineItem(hello=liar.hello())]))
        welcome = await stream.read()
        assert isinstance(welcome, pb.ConnectResponse)
        inventory = pb.Inventory(epoch=welcome.items[0].welcome.epoch)
        await stream.write(pb.ConnectRequest(items=[pb.EngineItem(inventory=inventory)]))
        count = 1_000
        items = []
        for number, body in zip(range(1, count + 1), lies(liar.party, grant), strict=False):
            lie = Proposal(liar.party, number, RequestId(request), number % 3 + 1, body)
            items.append(pb.EngineItem(proposal=codec.encode_proposal(lie)))
        for start in range(0, count, 50):
            await stream.write(pb.ConnectRequest(items=items[start : start + 50]))
        rules: Counter[str] = Counter()
        while sum(rules.values()) < count:
            message = await stream.read()
            assert isinstance(message, pb.ConnectResponse)
            for item in message.items:
                if item.HasField("answer"):
                    assert item.answer.accepted_position == 0
                    rules[item.answer.dropped_rule] += 1
        assert set(rules) <= set(RULES)
        kinds = [type(s.entry.event) for s in here.store.tail(before + 1)]
        assert kinds.count(Dropped) <= len(rules) * count.bit_length()
        assert len(kinds) - kinds.count(Dropped) <= 1
        stream.cancel()
        await stream.code()
        here.decode.go_on()
        answer = await rest(call)
        assert [t for step in answer for t in step.chunk.token_ids] == list(range(10, 16))
        assert answer[-1].outcome.attempts == 1
        sane = FakeEngine(Role.DECODE, here.address, name="liar", incarnation=2)
        here.tasks.start_soon(sane.run)
        await sane.synced.wait()
        await nothing_lost(here)


OUT_OF_ORDER = {
    "proposal of another party": pb.EngineItem(
        proposal=codec.encode_proposal(
            Proposal(DECODE, 1, RequestId("r"), 1, Released(GrantId(DECODE, 1)))
        )
    ),
    "inventory for another epoch": pb.EngineItem(inventory=pb.Inventory(epoch=HUGE)),
    "a second hello": pb.EngineItem(hello=pb.Hello()),
    "nothing": pb.EngineItem(),
    "tokens without texts": pb.EngineItem(tokens=pb.TokenBatch(token_ids=[1, 2], texts=["x"])),
    "a text without end": pb.EngineItem(
        tokens=pb.TokenBatch(token_ids=[1], texts=["x" * (TOKEN_CHARACTERS_MAX + 1)])
    ),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", OUT_OF_ORDER)
async def test_what_breaks_the_order_ends_the_stream_with_a_reason(model: Path, name: str) -> None:
    """The engine is told PROTOCOL with a sentence; its stream is over, and nobody else's."""
    async with deployment(model) as here:
        liar = FakeEngine(Role.DECODE, here.address, name="liar")
        stream = here.fleet.Connect()
        await stream.write(pb.ConnectRequest(items=[pb.EngineItem(hello=liar.hello())]))
        welcome = await stream.read()
        assert isinstance(welcome, pb.ConnectResponse)
        inventory = pb.Inventory(epoch=welcome.items[0].welcome.epoch)
        items = [pb.EngineItem(inventory=inventory), OUT_OF_ORDER[name]]
        await stream.write(pb.ConnectRequest(items=items))
        refused: pb.AttachRefused | None = None
        while isinstance(message := await stream.read(), pb.ConnectResponse):
            for item in message.items:
                if item.HasField("refused"):
                    refused = item.refused
        assert refused is not None
        assert refused.reason == pb.ATTACH_REFUSAL_PROTOCOL
        assert refused.message
        sane = FakeEngine(Role.DECODE, here.address, name="liar", incarnation=2)
        here.tasks.start_soon(sane.run)
        await sane.synced.wait()
        await nothing_lost(here)


Code = grpc.StatusCode
FAULTS_OF_OURS = {Code.UNKNOWN, Code.INTERNAL, Code.UNIMPLEMENTED, Code.DATA_LOSS}
ENDS_EVERYTHING = {"DrainScheduler"}
METHODS = [
    method
    for module in (admin_pb2, log_pb2, generation_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name not in ENDS_EVERYTHING
]
"""Every method of the scheduler that others than engines call."""


async def ended_with(
    here: Deployment, method: MethodDescriptor, request: Message
) -> grpc.StatusCode:
    """The status of a call, whatever it answers; a refusal says who refuses and why."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    # On the wire a single message is a stream of one.
    callable_: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = here.channel.unary_stream(path)
    call = callable_(request.SerializeToString())
    error: grpc.aio.AioRpcError | None = None
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as caught:
        error = caught
    if error is not None and error.code() not in FAULTS_OF_OURS:
        assert details(error)[0].domain == "custody", error
    return await call.code()


@pytest.mark.anyio
async def test_well_formed_nonsense_on_every_method_has_a_typed_answer(model: Path) -> None:
    """Status codes that name the caller's fault, with their details; the deployment serves on."""
    codes: Counter[grpc.StatusCode] = Counter()
    async with deployment(model) as here:
        draw = Drawer(11, ("odd", "layout-a"))
        for method in METHODS:
            for _ in range(25):
                request = message_factory.GetMessageClass(method.input_type)()
                draw.fill(request)
                if isinstance(request, log_pb2.TailRequest):
                    request.follow = False
                codes[await ended_with(here, method, request)] += 1
        assert not FAULTS_OF_OURS & set(codes), codes
        assert codes[Code.INVALID_ARGUMENT] > 0
        await nothing_lost(here)
