"""Clients of a simulated run: they ask, read, lose patience, and know what they should have got.

Owns: one client's view of its request, and the comparison with the truth.
Must not know: how a request is served.

A client's prompt is made of tokens that no other client's sequence contains, and the answer goes
on where the prompt ends; so one foreign token shows at once.
"""

from __future__ import annotations

from functools import partial

import attrs

from engine.simulator_clock import Clock
from engine.world_values import Found
from lifecycle.events import Cause
from lifecycle.ids import RequestId
from transport.client_records import Asked, Step
from transport.pb import generation_pb2
from transport.refusals import Refusal
from transport.scheduler_owner import SchedulerOwner
from transport.simulated_control import OpenMailbox
from transport.simulated_scheduler import EPOCH_NS, SchedulerPart

SEQUENCE_TOKENS = 4_096
"""Ids of one client's sequence."""


@attrs.frozen
class Wish:
    """What one client asks for, and when; `leaves_ns` is when it goes away, 0 never."""

    number: int
    comes_ns: int
    prompt_tokens: int
    new_tokens: int
    deadline_ns: int
    leaves_ns: int = 0
    key: str = ""
    cause: Cause = Cause.CLIENT_CANCEL

    def token(self, position: int) -> int:
        """The token at that position of the sequence."""
        return (self.number + 1) * SEQUENCE_TOKENS + position


class Client:
    """One client and its stream."""

    def __init__(self, wish: Wish, *, clock: Clock, scheduler: SchedulerPart) -> None:
        self.wish = wish
        self.request: RequestId | None = None
        self.got = 0
        self.end: str | None = None
        """How it ended for the client: finished, a refusal's reason, gone, or broken."""
        self._clock = clock
        self._scheduler = scheduler
        self._reader: OpenMailbox[Step] = OpenMailbox(10_000, self._changed)
        self._owner: SchedulerOwner | None = None
        self._reading = False
        self._asked = False

    def come(self) -> None:
        """Ask; where nobody is there, that is the answer."""
        wish, self._asked = self.wish, True
        if wish.leaves_ns:
            self._clock.at(wish.leaves_ns, self.leave)
        now = EPOCH_NS + self._clock.now_ns
        asked = Asked(
            tokens=tuple(wish.token(position) for position in range(wish.prompt_tokens)),
            sampling=generation_pb2.Sampling(),
            new_tokens_max=wish.new_tokens,
            deadline_ns=now + wish.deadline_ns,
            asked_ns=now,
            tenant=f"tenant-{wish.number % 3}",
            key=wish.key,
            body=wish.key.encode(),
        )

        def submit(owner: SchedulerOwner) -> None:
            self._owner = owner
            if self.end is None:
                owner.clients.submit(self._reader, asked)

        if not self._scheduler.call(submit):
            self.end = "unreachable"

    def leave(self) -> None:
        """Go away before the end."""
        if self.end is not None:
            return
        self.end = "gone"
        self._scheduler.call(
            lambda owner: (
                owner.clients.leave(self._reader, self.wish.cause) if owner is self._owner else None
            )
        )

    def scheduler_died(self) -> None:
        """The stream is broken; nobody will say more."""
        if self._asked and self.end is None:
            self.end = "broken"

    def _changed(self) -> None:
        if not self._reading:
            self._reading = True
            self._clock.after(1, partial(self._read, self._owner))

    def _read(self, owner: SchedulerOwner | None) -> None:
        self._reading = False
        steps = self._reader.drain()
        if self.end in {"gone", "broken", "unreachable"}:
            return
        if owner is not None and owner is not self._scheduler.owner:
            return
        for step in steps:
            self._step(step)

    def _step(self, step: Step) -> None:
        wish = self.wish
        if self.end is not None:
            raise Found("answered-twice", f"client {wish.number} heard more after {self.end}")
        if isinstance(step, Refusal):
            self.end = step.reason
            return
        match step.WhichOneof("step"):
            case "admission":
                self.request = RequestId(step.admission.request_id)
            case "chunk":
                self._chunk(step.chunk)
            case "outcome":
                self.end = "finished"
                if self.got != wish.new_tokens or step.outcome.usage.new_tokens != self.got:
                    raise Found(
                        "truncated",
                        f"client {wish.number}: success, {self.got} of {wish.new_tokens}",
                    )

    def _chunk(self, chunk: generation_pb2.Chunk) -> None:
        wish = self.wish
        start = wish.prompt_tokens + self.got
        want = [wish.token(start + index) for index in range(len(chunk.token_ids))]
        if chunk.first_index != self.got or list(chunk.token_ids) != want:
            have = list(chunk.token_ids)
            raise Found(
                "token-order", f"client {wish.number}: {have} at {chunk.first_index}, not {want}"
            )
        self.got += len(want)
