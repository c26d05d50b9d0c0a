"""An engine of a simulated run: the real shell's decisions, owner and core, over simulated things.

Owns: one engine through its lives: starting, killing, hanging, and the compute thread's stand-in.
Must not know: the scheduler, clients, and when faults come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import attrs

from engine.decode import DecodeCore
from engine.prefill import PrefillCore
from engine.scheduler import Scheduler
from engine.simulator_clock import Clock
from engine.world_memory import holder
from lifecycle.events import Role
from lifecycle.ids import EngineId, Party, party_of
from transport.decode_owner import DecodeOwner
from transport.engine_lives import WIND_UP_SECONDS_MAX
from transport.engine_owner import Continuation, Owner, Send
from transport.engine_parts import LifeDigest, Loaded
from transport.engine_planes import EngineMemory
from transport.engine_shell import EngineShell, _Done, _Message, _Tick, _Woken
from transport.fleet_client import Broken, FleetClient, Heard, PreviousLife
from transport.pb import fleet_pb2 as pb
from transport.prefill_owner import PrefillOwner
from transport.settings import EngineSettings
from transport.simulated_control import MILLISECOND, Control, Door, Network
from transport.simulated_memory import Layout, Region
from transport.simulated_plane import SimulatedPlane
from transport.simulated_runners import SimulatedDecodeRunner, SimulatedPrefillRunner
from transport.simulated_wires import Wires

TICK_NS = 20 * MILLISECOND
SECOND = 1_000 * MILLISECOND


@attrs.frozen
class Parts:
    """The decision code that a run is made of; mutants stand in here to be found."""

    scheduler: Callable[..., Scheduler] = Scheduler
    prefill: Callable[..., PrefillCore] = PrefillCore
    decode: Callable[..., DecodeCore] = DecodeCore


@attrs.frozen(kw_only=True)
class Sizes:
    """How large an engine is."""

    prefill_pages: int
    decode_pages: int
    page_tokens: int
    staging: int
    chunk_tokens: int
    growth_tokens: int
    batch: int
    slots: int
    context_tokens: int
    layout: str = "simulated"


class SimulatedShell(EngineShell):
    """The real shell without its tasks: messages are handed in by the clock."""

    def __init__(
        self,
        settings: EngineSettings,
        loaded: Loaded,
        memory: EngineMemory,
        *,
        party: Party,
        clock: Clock,
        make: Callable[..., Owner[Any]],
        network: Network,
        door: Door,
        pass_ns: Callable[[], int],
        over: Callable[[int], None],
        previous: PreviousLife | None = None,
    ) -> None:
        super().__init__(
            settings,
            loaded,
            memory,
            party=party,
            waker=cast("Any", None),
            make=make,
            monotonic=lambda: clock.now_ns,
            previous=previous,
        )
        self.hung = False
        self.dead = False
        self._clock = clock
        self._pass_ns = pass_ns
        self._over = over
        self._held_up: deque[_Message] = deque()
        self._woken = False
        self.control = Control(
            network,
            door,
            hello=self._hello,
            hear=lambda items: self.hand(Heard(items)),
            broken=lambda reason: self.hand(Broken(reason)),
        )
        self._client = cast("FleetClient", self.control)
        clock.after(TICK_NS, self._ticked)
        self.control.connect()

    def hand(self, message: _Message) -> None:
        """A message for the owner; one that hangs takes it when it goes on."""
        if self.dead:
            return
        if self.hung:
            self._held_up.append(message)
            return
        code = self._take(message)
        if code is not None:
            self._over(code)
            return
        computing = self._computing
        self._feed()
        if self._computing and not computing:
            self._compute_next()

    def wake(self) -> None:
        """The data plane has something to say."""
        if not self._woken:
            self._woken = True
            self._clock.after(MILLISECOND // 100, self._wake_up)

    def _wake_up(self) -> None:
        self._woken = False
        self.hand(_Woken())

    def _ticked(self) -> None:
        if not self.dead:
            if not self.hung:
                self.hand(_Tick())
            self._clock.after(TICK_NS, self._ticked)

    def hang(self) -> None:
        """The process stops."""
        self.hung = True

    def go_on(self) -> None:
        """The process goes on where it stopped."""
        self.hung = False
        while self._held_up and not self.dead and not self.hung:
            self.hand(self._held_up.popleft())

    def end(self) -> None:
        """The process is gone."""
        self.dead = True
        self.control.end()
        for stream in (self._send, self._receive, self._jobs, self._work):
            stream.close()

    def _compute_next(self) -> None:
        """The compute thread: it touches memory at some moment of the time that it takes."""
        job = self._work.receive_nowait()
        takes = self._pass_ns()
        self._clock.after(takes // 2, partial(self._touch, job, takes - takes // 2))

    def _touch(self, job: Callable[[], Continuation], rest_ns: int) -> None:
        if self.dead:
            return
        if self.hung:
            self._clock.after(TICK_NS, partial(self._touch, job, rest_ns))
            return
        continuation = job()
        self._clock.after(rest_ns, lambda: self.hand(_Done(continuation)))

    def _hello(self) -> pb.Hello:
        hello = super()._hello()
        # Its process is simulated as well; nobody may watch the one that simulates.
        hello.process = ""
        hello.process_id = 1 + self.party.incarnation % 1_000_000
        return hello


class Engine:
    """One engine by its name, life after life."""

    def __init__(
        self,
        name: str,
        role: Role,
        sizes: Sizes,
        *,
        parts: Parts,
        clock: Clock,
        chance: Random,
        network: Network,
        door: Door,
        wires: Wires,
        on_end: Callable[[Party], None],
    ) -> None:
        self.name = name
        self.role = role
        self.sizes = sizes
        self.parts = parts
        self.pass_ns = 2 * MILLISECOND
        self.slow_ns = 0
        self.step_fails = 0.0
        self.lives = 0
        self.shell: SimulatedShell | None = None
        self.plane: SimulatedPlane | None = None
        self.restart_ns = 0
        self._clock = clock
        self._chance = chance
        self._network = network
        self._door = door
        self._wires = wires
        self._on_end = on_end
        self._process: list[Party] = []
        self._previous: PreviousLife | None = None

    def start(self) -> None:
        """Begin a life, with memory and addresses of its own; its process may have had others."""
        if self.shell is not None:
            return
        self.lives += 1
        party = party_of(EngineId(self.name), self._clock.now_ns // MILLISECOND + 1, 0)
        layout, prefill = Layout(self.sizes.page_tokens), self.role is Role.PREFILL
        pages = self.sizes.prefill_pages if prefill else self.sizes.decode_pages
        pool = Region(layout, pages)
        staging = Region(layout, self.sizes.staging) if prefill else None
        plane = SimulatedPlane(
            self._wires, staging or pool, party=str(party), wake=partial(self._wake, party)
        )
        memory = EngineMemory(
            cast("Any", pool), cast("Any", staging), plane, "" if prefill else plane.descriptor()
        )
        settings = EngineSettings(
            role=self.role, engine=self.name, model="simulated", slots=self.sizes.slots
        )
        self.plane = plane
        self.shell = SimulatedShell(
            settings,
            self._loaded(layout),
            memory,
            party=party,
            clock=self._clock,
            make=self._make,
            network=self._network,
            door=self._door,
            pass_ns=self._pass_ns,
            over=self._over,
            previous=self._previous,
        )
        self._process.append(party)
        core = self.core
        if isinstance(core, DecodeCore):
            plane.holder = partial(_grant_on, core)

    @property
    def core(self) -> PrefillCore | DecodeCore | None:
        """The present life's core."""
        return None if self.shell is None else cast("Any", self.shell.owner.core)

    def kill(self) -> None:
        """The process is gone at once; another one follows it after `restart_ns`."""
        shell, plane = self.shell, self.plane
        if shell is None or plane is None:
            return
        self.shell = self.plane = None
        shell.end()
        plane.shutdown()
        lives, self._process, self._previous = self._process, [], None
        for party in lives:
            self._on_end(party)
        pause = self.restart_ns or self._chance.randrange(1, 500 * MILLISECOND)
        # Milliseconds name lives, so two of them never share one.
        self._clock.after(pause + MILLISECOND, self.start)

    def _over(self, _code: int) -> None:
        """The life is over: one that was given up is followed by another of the same process."""
        shell = self.shell
        if shell is None or not shell.lost:
            self.kill()
            return
        shell.end()
        self._end_life(shell, self._clock.now_ns + int(WIND_UP_SECONDS_MAX * SECOND))

    def _end_life(self, shell: SimulatedShell, until_ns: int) -> None:
        """As `engine_lives.end_life`, by the clock."""
        plane, clock = self.plane, self._clock
        if self.shell is not shell or plane is None:
            return
        quiet = not shell.hung and shell.owner.wind_up()
        if shell.hung or not (quiet or self._wires.placing):
            if clock.now_ns >= until_ns and not shell.hung:
                self.kill()
            else:
                clock.after(TICK_NS, partial(self._end_life, shell, until_ns))
            return
        self.shell = self.plane = None
        plane.shutdown()
        self._previous = shell.end_as(quiet=quiet)
        self._wires.reached["began-again" if quiet else "began-again-in-doubt"] += 1
        # Milliseconds name lives, so two of them never share one.
        clock.after(MILLISECOND, self.start)

    def _wake(self, party: Party) -> None:
        if self.shell is not None and self.shell.party == party:
            self.shell.wake()

    def _pass_ns(self) -> int:
        return self._chance.randrange(2, self.pass_ns + self.slow_ns)

    def _loaded(self, layout: Layout) -> Loaded:
        config = SimpleNamespace(context=self.sizes.context_tokens)
        model = SimpleNamespace(config=config)
        tokenizer = SimpleNamespace(fingerprint="simulated")
        named = f"{self.sizes.layout} page_tokens={layout.page_tokens}"
        return Loaded(cast("Any", model), cast("Any", tokenizer), cast("Any", layout), named)

    def _make(
        self,
        settings: EngineSettings,
        _loaded: Loaded,
        memory: EngineMemory,
        *,
        party: Party,
        digest: LifeDigest,
        send: Send,
    ) -> Owner[Any]:
        sizes, chance = self.sizes, self._chance

        def mint() -> int:
            return chance.randrange(1, 1 << 64)

        def note(_sentence: str, **_fields: object) -> None:
            return

        def fails() -> bool:
            return self.step_fails > 0 and chance.random() < self.step_fails

        pool = cast("Region", memory.pool)
        if settings.role is Role.PREFILL:
            prefill_core = self.parts.prefill(
                party,
                pages=sizes.prefill_pages,
                page_tokens=sizes.page_tokens,
                mint=mint,
                staging=sizes.staging,
                chunk_tokens=sizes.chunk_tokens,
                digest=digest,
            )
            prefill = SimulatedPrefillRunner(pool, cast("Region", memory.staging))
            prefill.fails = fails
            return PrefillOwner(
                prefill_core, cast("Any", prefill), plane=memory.plane, send=send, note=note
            )
        decode_core = self.parts.decode(
            party,
            pages=sizes.decode_pages,
            page_tokens=sizes.page_tokens,
            mint=mint,
            batch=sizes.batch,
            growth_tokens=sizes.growth_tokens,
            digest=digest,
        )
        decode = SimulatedDecodeRunner(pool, now=lambda: self._clock.now_ns)
        decode.fails = fails
        return DecodeOwner(
            decode_core, cast("Any", decode), plane=memory.plane, send=send, note=note
        )


def _grant_on(core: DecodeCore, page: int) -> str | None:
    holding = holder(core, page)
    return None if holding is None else str(holding.reserved.grant)
