"""The moments at which faults strike: how a request is brought there and held, and what shows it.

Owns: the moments and their proof in the log.
Must not know: faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from lifecycle.events import (
    Admitted,
    Drained,
    Event,
    Finished,
    Purpose,
    Released,
    Reserved,
    Transferred,
    Verified,
)
from tests.faults.asking import Asking
from tests.faults.bench import PAGE_TOKENS, Bench
from tests.process_harness import ids_request
from transport.pb.generation_pb2 import GenerateRequest

PROMPT_TOKENS = 7 * PAGE_TOKENS - 3
NEW_TOKENS = 24
NEIGHBOUR_TOKENS = 60
MIDDLE_TOKENS = 8
WORDS = 250


@attrs.define
class Scene:
    """One request on its way to a moment, and who runs beside it."""

    bench: Bench
    seed: int
    how: str = "hold"
    """How the write of the moment goes on: hold, or the name of what is wrong with it."""
    beside: dict[str, tuple[Asking, GenerateRequest]] = attrs.Factory(dict)
    door: str = ""
    target: Asking = attrs.field(default=None)
    wanted: GenerateRequest = attrs.field(default=None)
    begun: int = 0
    answered: bool = False
    """Whether the client had its answer when the fault struck."""

    @property
    def prefill(self) -> str:
        """The engine that computes the prompt, or would be asked first."""
        return self.target.legs.get("prefill", "prefill-0")

    @property
    def decode(self) -> str:
        """The engine that answers, or would be asked first."""
        return self.target.legs.get("decode", "decode-0")

    def prompt(self, tokens: int, salt: int) -> list[int]:
        """A canary: a prompt that no other request of any cell has."""
        mixed = (self.seed * 7919 + salt * 104729) % 1_000_003
        return [3 + (mixed * (at + 1) + at * at) % WORDS for at in range(tokens)]

    def ask(self, salt: int, prompt_tokens: int, new_tokens: int) -> tuple[Asking, GenerateRequest]:
        """Ask as another client would."""
        prompt = self.prompt(prompt_tokens, salt)
        options = {"temperature": 1.0, "seed": self.seed * 16 + salt, "ignore_eos": True}
        request = ids_request(prompt, new_tokens)
        for name, value in options.items():
            setattr(request.sampling, name, value)
        return Asking(
            self.door if salt == 0 and self.door else self.bench.address, request
        ), request

    def ask_target(self) -> None:
        """Ask the request that the cell is about."""
        self.begun = self.bench.position()
        self.target, self.wanted = self.ask(0, PROMPT_TOKENS, NEW_TOKENS)

    def ask_beside(self, count: int) -> None:
        """Have others decode meanwhile."""
        for salt in range(1, 1 + count):
            asking, request = self.ask(salt, 2 * PAGE_TOKENS, NEIGHBOUR_TOKENS)
            asking.wait_tokens(1)
            assert asking.request, asking.status
            self.beside[asking.request] = asking, request

    def stop(self, role: str, *names: str, beyond: int = 0) -> None:
        """Have every engine of that role hold from these of a new request on."""
        for name in self.bench.names:
            if name.startswith(role):
                self.bench.gate(name).command(
                    "stop", names=names, beyond=beyond, ignore=sorted(self.beside)
                )

    def spoil(self, at: int) -> None:
        """Have every prefill engine hold, or spoil, its next write but so many."""
        for name in self.bench.names:
            if name.startswith("prefill"):
                self.bench.gate(name).command("spoil", at=at, how=self.how)

    def reached(self, name: str) -> None:
        """That engine holds what it was told to."""
        self.bench.gate(name).wait_reached()

    def events(self) -> list[Event]:
        """The request's log so far."""
        return self.bench.events(self.target.request) if self.target.request else []


Shown = Callable[[Sequence[Event]], bool]


@attrs.frozen
class Moment:
    """A moment: how to get there, and whether the log is there."""

    name: str
    reach: Callable[[Scene], None]
    shown: Shown


def kinds(events: Sequence[Event]) -> list[str]:
    """The events' names; grants with their purpose."""
    return [
        f"{type(e).__name__}:{e.purpose.value}" if isinstance(e, Reserved) else type(e).__name__
        for e in events
    ]


def _queued(scene: Scene) -> None:
    """Every prefill engine is full, and those who fill it are held."""
    scene.stop("prefill", "Reserved:source")
    status = scene.bench.client.status()
    pages = min(e.ranks[0].pages.capacity for e in status.engines)
    fillers = [name for name in scene.bench.names if name.startswith("prefill")]
    for salt, _ in enumerate(fillers, start=1):
        asking, request = scene.ask(salt, (pages - 6) * PAGE_TOKENS, 1)
        asking.wait_admitted()
        assert asking.request, asking.status
        scene.beside[asking.request] = asking, request
    for name in fillers:
        scene.reached(name)
    scene.ask_target()
    scene.bench.wait_until("it waits", lambda: scene.bench.client.status().queued == 1)


def _asked(scene: Scene) -> None:
    scene.ask_target()
    scene.target.wait_admitted()
    assert scene.target.request, scene.target.status


def _admitted(scene: Scene) -> None:
    scene.ask_beside(1)
    scene.stop("prefill", "Reserved:source")
    scene.stop("decode", "Reserved:destination")
    _asked(scene)
    scene.reached(scene.prefill)
    scene.reached(scene.decode)


def _one_leg(scene: Scene) -> None:
    scene.ask_beside(1)
    scene.stop("decode", "Reserved:destination")
    _asked(scene)
    scene.reached(scene.decode)


def _writing(scene: Scene, at: int) -> None:
    scene.ask_beside(1)
    scene.spoil(at)
    _asked(scene)
    scene.reached(scene.prefill)


def _at_decode(scene: Scene, *names: str, beyond: int = 0) -> None:
    scene.ask_beside(1)
    scene.stop("decode", *names, beyond=beyond)
    _asked(scene)
    scene.reached(scene.decode)


def _decoding(scene: Scene, tokens: int) -> None:
    _at_decode(scene, "Tokens", beyond=tokens)
    scene.target.wait_tokens(tokens)
    assert len(scene.target.tokens) == tokens, "no more than that has come"


def _ended(scene: Scene) -> None:
    _at_decode(scene, "Released")
    scene.target.wait()
    assert scene.target.status == "OK", scene.target.status


def _has(events: Sequence[Event], *wanted: type[Event]) -> bool:
    return all(any(isinstance(event, kind) for event in events) for kind in wanted)


def _purposes(events: Sequence[Event]) -> set[Purpose]:
    return {event.purpose for event in events if isinstance(event, Reserved)}


BOTH = {Purpose.SOURCE, Purpose.DESTINATION}


def _decoded(events: Sequence[Event]) -> bool:
    return _has(events, Drained, Verified) and not _has(events, Finished)


MOMENTS = {
    moment.name: moment
    for moment in (
        Moment("queued", _queued, lambda events: not events),
        Moment("admitted", _admitted, lambda events: kinds(events) == ["Admitted"]),
        Moment(
            "one leg reserved",
            _one_leg,
            lambda events: kinds(events) == ["Admitted", "Reserved:source"],
        ),
        Moment(
            "both reserved",
            lambda scene: _writing(scene, 1),
            lambda events: _purposes(events) == BOTH and not _has(events, Transferred),
        ),
        Moment(
            "between chunks",
            lambda scene: _writing(scene, 2),
            lambda events: kinds(events).count("Transferred") == 1 and not _has(events, Drained),
        ),
        Moment(
            "before Verified",
            lambda scene: _at_decode(scene, "Verified"),
            lambda events: _has(events, Transferred, Drained) and not _has(events, Verified),
        ),
        Moment("first token", lambda scene: _decoding(scene, 1), _decoded),
        Moment("mid-decode", lambda scene: _decoding(scene, MIDDLE_TOKENS), _decoded),
        Moment(
            "ended, unsettled",
            _ended,
            lambda events: (
                _has(events, Admitted, Finished)
                and sum(isinstance(e, Released) for e in events)
                < sum(isinstance(e, Reserved) for e in events)
            ),
        ),
    )
}
