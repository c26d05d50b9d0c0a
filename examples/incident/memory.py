"""The published incident as bytes: our own engines, a real model, and guards taken away.

Owns: the two customers' traffic, what is looked for in the decode engine's memory, the sums.
Must not know: how guards are taken away (`faulty`); where results are written.

Each round is a fresh deployment in this process and thread.
A first customer's conversation holds a secret; it ends, and its pages go home.
Then a second customer asks something that has nothing to do with it, in a prompt that the prefill
pool cannot hold.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from engine.effects import DecodeSlice
from engine.model import Model
from engine.pool import KVPool
from engine.sampler import SamplingParams
from engine.store import Stored
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weights import load_model
from examples.incident.faulty import (
    AllGuardsRemoved,
    BlindRunner,
    LogicalGuardsRemoved,
    logits_of,
)
from lifecycle.events import (
    Aborted,
    Cause,
    Finished,
    Purpose,
    RejectCode,
    Rejected,
    Reserved,
    Transferred,
)
from lifecycle.forensics_sums import exposures
from lifecycle.ids import RequestId
from lifecycle.replay import replay
from tests.inprocess import Client, Deployment
from transport.jsonlines import write_jsonlines

PAGE_TOKENS = 16
PREFILL_PAGES = 7
DECODE_PAGES = 32
CONTEXT_TOKENS = 1024
FIRST_TOKENS, SECOND_TOKENS = 112, 120
"""Both need eight pages of decode; the second prompt does not fit the seven of prefill."""
FIRST_ANSWER_TOKENS, ANSWER_TOKENS = 12, 24

_NAMES = ("Alice", "Boris", "Carla", "David", "Emil", "Fatima", "Greta", "Hugo", "Irene", "Jonas")
_WORDS = ("kestrel", "amber", "willow", "harbour", "copper", "lantern", "meadow", "thistle")
_GREETING = (
    "Good morning, I hope that you are well today and that the weather where you are is better than "
    "here, where it has been raining since the weekend and nobody wants to go out."
)
_TICKET = (
    "Support ticket of {name}. Account code {secret}. The customer {name} with account code {secret} "
    "cannot log in. Write a short answer to {name} and mention the account code {secret}."
)
_GARDEN = (
    "Here are my notes from the garden. The roses need water in the morning, and the old apple tree "
    "by the wall has to be cut back before the winter comes. The beans are doing well this year."
)


@attrs.frozen
class Talk:
    """One round's traffic: both prompts as tokens, and the secret that is in the first alone."""

    secret: str
    first: tuple[int, ...]
    second: tuple[int, ...]


@attrs.frozen
class Walk:
    """A round in which nothing stops the second request.

    `reserved`, `sent`, `foreign` and `equal` count pages: of its grant, written for it, read and
    not written for it, and of these byte-equal to what the first customer left.  `change` is the
    largest difference of a logit when the foreign pages are replaced, `idle_change` the same for
    pages that it does not read.  `named` says whether the log alone names the first customer
    as the one whose tokens were read, `rule` what a replay finds broken first.
    """

    answered: bool
    reserved: int
    sent: int
    foreign: int
    equal: int
    change: float
    idle_change: float
    named: bool
    rule: str
    secret: str
    answer: str
    tokens: int
    log: tuple[Stored, ...] = attrs.field(repr=False)

    @property
    def shown(self) -> bool:
        """Whether the answer holds the first customer's secret, character by character."""
        return self.secret in self.answer

    @property
    def number_shown(self) -> bool:
        """Whether the answer holds at least the secret's number."""
        return self.secret.split("-")[1] in self.answer


@attrs.frozen
class Round:
    """One round's traffic under each of the conditions.

    `refused_ns` is the time from the prompt's tokens to the refusal with all guards in place;
    `control` the answer of the same faulty engines in memory that was new.
    """

    refused: bool
    refused_events: int
    refused_ns: int
    stopped: bool
    stopped_tokens: int
    stopped_by_first_tag: bool
    walk: Walk
    control: str

    @property
    def control_shown(self) -> bool:
        """Whether the secret shows although its owner has never been there."""
        return self.walk.secret in self.control


def _fitted(tokenizer: Tokenizer, words: Sequence[str], rest: str, *, tokens: int) -> list[int]:
    """A conversation whose first message is as many of the words as fit, and then the rest."""
    best: list[int] = []
    for count in range(len(words) + 1):
        text = " ".join([*words[:count], rest]).strip()
        encoded = tokenizer.encode_chat([{"role": "user", "content": text}])
        if len(encoded) > tokens:
            break
        best = encoded
    return best


def talk(tokenizer: Tokenizer, seed: int) -> Talk:
    """The traffic of one round."""
    draw = random.Random(seed)
    secret = f"{draw.choice(_WORDS)}-{draw.randrange(1000, 10_000)}"
    ticket = _TICKET.format(name=draw.choice(_NAMES), secret=secret)
    first = _fitted(tokenizer, _GREETING.split(), ticket, tokens=FIRST_TOKENS)
    notes = _GARDEN.split()
    turned = notes[seed % len(notes) :] + notes * 8
    second = _fitted(tokenizer, turned, "", tokens=SECOND_TOKENS)
    return Talk(secret, tuple(first), tuple(second))


class Stage:
    """The model, and rounds on it."""

    def __init__(self, model_file: Path) -> None:
        self.model: Model = load_model(model_file)
        self.tokenizer: Tokenizer = load_tokenizer(model_file)

    def round(self, seed: int) -> Round:
        """The same traffic under each condition."""
        traffic = talk(self.tokenizer, seed)
        here, _, refused, took_ns = self._both(Deployment, traffic)
        name = here.request_of(refused)
        stopped, _, cut, _ = self._both(LogicalGuardsRemoved, traffic)
        return Round(
            refused=isinstance(refused.outcome, Rejected)
            and refused.outcome.code is RejectCode.KV_POOL_CAPACITY_EXCEEDED,
            refused_events=sum(entry.request == name for _, entry in here.log),
            refused_ns=took_ns,
            stopped=_isolated(cut),
            stopped_tokens=len(cut.tokens),
            stopped_by_first_tag=_found_tag_of_first(stopped, cut),
            walk=self._walk(traffic),
            control=self._alone(traffic).text,
        )

    def _deployment(self, kind: type[Deployment]) -> Deployment:
        return kind(
            self.model,
            self.tokenizer,
            prefill_pages=PREFILL_PAGES,
            decode_pages=DECODE_PAGES,
            page_tokens=PAGE_TOKENS,
            staging=PREFILL_PAGES,
            chunk_tokens=64,
            context_tokens=CONTEXT_TOKENS,
            poison=_clear,
        )

    def _both(
        self, kind: type[Deployment], traffic: Talk
    ) -> tuple[Deployment, Client, Client, int]:
        """Both customers, one after the other, and how long the second's submission took."""
        here = self._deployment(kind)
        first = here.ask(list(traffic.first), _sampling(FIRST_ANSWER_TOKENS), tenant="first")
        here.run()
        begun = time.perf_counter_ns()
        second = here.ask(list(traffic.second), _sampling(ANSWER_TOKENS), tenant="second")
        took_ns = time.perf_counter_ns() - begun
        here.run()
        return here, first, second, took_ns

    def _alone(self, traffic: Talk) -> Client:
        """The second customer in memory that nobody has used."""
        here = self._deployment(AllGuardsRemoved)
        client = here.ask(list(traffic.second), _sampling(ANSWER_TOKENS), tenant="second")
        here.run()
        return client

    def _walk(self, traffic: Talk) -> Walk:
        here = self._deployment(AllGuardsRemoved)
        first = here.ask(list(traffic.first), _sampling(FIRST_ANSWER_TOKENS), tenant="first")
        here.run()
        left = here.decode.pool.memory.octets.clone()
        look = _Look(here, left)
        runner = here.decode.runner
        assert isinstance(runner, BlindRunner)
        runner.seen = look
        second = here.ask(list(traffic.second), _sampling(ANSWER_TOKENS), tenant="second")
        here.run()
        reader, owner = here.request_of(second), here.request_of(first)
        log = tuple(Stored(position, entry) for position, entry in here.log)
        found = [f for f in replay(here.log).findings if f.violation.request == reader]
        return Walk(
            answered=isinstance(second.outcome, Finished),
            reserved=look.reserved,
            sent=look.sent,
            foreign=len(look.foreign),
            equal=look.equal,
            change=look.change,
            idle_change=look.idle_change,
            named=_named(here, reader=reader, owner=owner),
            rule=found[0].violation.rule if found else "",
            secret=traffic.secret,
            answer=second.text,
            tokens=len(second.tokens),
            log=log,
        )


class _Look:
    """What is seen of the decode engine's memory when the second request is about to be read."""

    def __init__(self, here: Deployment, left: Tensor) -> None:
        self._here = here
        self._left = left
        self.reserved = self.sent = self.equal = 0
        self.foreign: list[int] = []
        self.change = self.idle_change = 0.0

    def __call__(self, runner: BlindRunner, part: DecodeSlice, token: int) -> None:
        mine = [page for run in part.pages for page in range(run.first, run.stop)]
        written = {
            page
            for _, entry in self._here.log
            if entry.request == part.request and isinstance(entry.event, Transferred)
            for run in entry.event.pages
            for page in range(run.first, run.stop)
        }
        live = mine[: runner.pool.layout.pages_for_tokens(part.position)]
        self.reserved, self.sent = len(mine), len(written)
        self.foreign = [page for page in live if page not in written]
        memory = runner.pool.memory
        size = memory.layout.block_bytes
        now = memory.octets.view(memory.layout.layers, -1, size)
        before = self._left.view(memory.layout.layers, -1, size)
        self.equal = sum(torch.equal(now[:, page], before[:, page]) for page in self.foreign)
        found = logits_of(runner, part, token)
        idle = [page for page in range(memory.pages) if page not in mine]
        for pages, name in ((self.foreign, "change"), (idle, "idle_change")):
            kept = memory.octets.clone()
            now[:, pages] = 0
            other = logits_of(runner, part, token)
            memory.octets.copy_(kept)
            setattr(self, name, float((other - found).abs().max()))


def _clear(pool: KVPool) -> None:
    """Make a pool's memory new: what it is made of may have been an earlier round's."""
    pool.memory.octets.zero_()


def _sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens)


def _isolated(client: Client) -> bool:
    outcome = client.outcome
    return isinstance(outcome, Aborted) and outcome.cause is Cause.ISOLATION_VIOLATION


def _grant(here: Deployment, request: RequestId) -> Reserved:
    """The destination grant of a request's first attempt."""
    return next(
        entry.event
        for _, entry in here.log
        if entry.request == request
        and isinstance(entry.event, Reserved)
        and entry.event.purpose is Purpose.DESTINATION
    )


def _found_tag_of_first(here: Deployment, client: Client) -> bool:
    """Whether the page that stopped a request bore the tag of the first customer's grant."""
    first, second = (_grant(here, name) for name in here.clients)
    outcome = client.outcome
    return isinstance(outcome, Aborted) and (outcome.tag_expected, outcome.tag_found) == (
        second.tag,
        first.tag,
    )


def _named(here: Deployment, *, reader: RequestId, owner: RequestId) -> bool:
    """Whether the log alone says that this request, and no other, read that one's tokens."""
    certain = exposures(here.log).certain
    writers = {read.writer for response in certain for read in response.reads}
    return [response.request for response in certain] == [reader] and owner in writers


def facts(rounds: Sequence[Round]) -> list[str]:
    """What must be the same on every machine, as lines."""
    walks = [one.walk for one in rounds]
    n = len(rounds)
    equal, foreign = sum(walk.equal for walk in walks), sum(walk.foreign for walk in walks)
    idle = sum(walk.idle_change > 0 for walk in walks)
    control = sum(one.control_shown for one in rounds)
    codes = sum(one.refused and one.refused_events == 1 for one in rounds)
    cut = sum(one.stopped and not one.stopped_tokens for one in rounds)
    tags = sum(one.stopped_by_first_tag for one in rounds)
    shapes = sorted({f"{w.reserved} reserved, {w.sent} sent, {w.foreign} foreign" for w in walks})
    rules = sorted({walk.rule for walk in walks})
    return [
        f"rounds: {n}",
        f"guards in place, refused for want of capacity by one event: {codes} of {n}",
        f"logical guards removed, stopped by a page header before the first token: {cut} of {n}",
        f"the header that stopped it bore the first customer's tag: {tags} of {n}",
        f"all guards removed, answered with status OK: {sum(w.answered for w in walks)} of {n}",
        f"pages of the answered: {'; '.join(shapes)}",
        f"foreign pages byte-equal to what the first customer left: {equal} of {foreign}",
        f"replacing them changes the logits: {sum(w.change > 0 for w in walks)} of {n}",
        f"replacing pages that are not read changes the logits: {idle} of {n}",
        f"the log names the reader and the first customer: {sum(w.named for w in walks)} of {n}",
        f"a replay of the log finds broken first: {', '.join(rules)}",
        f"the secret shows where its owner has never been: {control} of {n}",
    ]


def measured(rounds: Sequence[Round]) -> list[str]:
    """What depends on the machine and its arithmetic, as lines."""
    walks = [one.walk for one in rounds]
    n = len(rounds)
    times = sorted(one.refused_ns for one in rounds)
    changes = sorted(walk.change for walk in walks)
    return [
        f"the whole secret shows in the answer: {sum(w.shown for w in walks)} of {n}",
        f"at least its number shows: {sum(w.number_shown for w in walks)} of {n}",
        f"logits change by up to: {changes[0]:.1f} to {changes[-1]:.1f}",
        f"time to the refusal: median {times[n // 2] / 1e6:.2f} ms, longest {times[-1] / 1e6:.2f} ms",
    ]


def write_log(log: Sequence[Stored], path: Path) -> None:
    """One round's log as JSON Lines, for the verbs."""
    with path.open("w", encoding="utf-8") as file:
        write_jsonlines(file, log, complete=True)
