"""A simulated run: the real parts of a deployment on a virtual clock, through a plan of faults.

Owns: putting the parts together, carrying out faults, healing, and running to the end.
Must not know: what must hold; that is `simulated_checks`.
"""

from __future__ import annotations

import traceback
from collections import Counter
from functools import partial
from random import Random

import attrs

from engine.dataplane import ObservedExit
from engine.simulator_clock import Clock
from engine.world_values import CORE_ERRORS, Found, as_found
from lifecycle.events import Role
from lifecycle.ids import Party
from transport.simulated_checks import at_rest, books_agree, resting
from transport.simulated_clients import Client
from transport.simulated_control import MILLISECOND, Network
from transport.simulated_engine import Engine, Parts
from transport.simulated_faults import Fault, Plan
from transport.simulated_scheduler import SECOND, SchedulerPart
from transport.simulated_wires import Weather, Wires

CHECK_EVERY = 64
REST_NS = 100 * MILLISECOND
PATIENCE_NS = 90 * SECOND
"""How long after healing everything may take to come to rest."""

STORMS = {
    "doubt": Weather(doubt=0.3, tear=0.1),
    "fail": Weather(fail=0.3),
    "corrupt": Weather(corrupt=0.3),
    "lie": Weather(lie=0.3, echo=0.1),
    "slow-wire": Weather(slow_ns=500 * MILLISECOND),
}


class Deployment:
    """One run of one plan."""

    def __init__(self, plan: Plan, parts: Parts = Parts()) -> None:  # noqa: B008 - frozen
        self.plan = plan
        self.parts = parts
        self.clock = Clock(1)
        self.chance = Random(plan.seed ^ 0x5EED)
        self.network = Network(self.clock, self.chance)
        self.wires = Wires(self.clock, self.chance, placing=plan.placing)
        self._set_fair()
        self.scheduler = SchedulerPart(
            plan.terms, make=parts.scheduler, clock=self.clock, chance=self.chance
        )
        self.scheduler.on_death = self._scheduler_died
        self.engines: dict[str, Engine] = {}
        self.sometimes: Counter[str] = Counter()
        self.unobserved: list[Party] = []
        self.healed = False
        self.scheduler.start()
        for role, count in ((Role.PREFILL, plan.prefills), (Role.DECODE, plan.decodes)):
            for number in range(count):
                self._add(f"{role.value[0]}{number}", role)
        self.clients = tuple(
            Client(wish, clock=self.clock, scheduler=self.scheduler) for wish in plan.wishes
        )
        for client in self.clients:
            self.clock.at(client.wish.comes_ns, client.come)
        for fault in plan.faults:
            self.clock.at(fault.time_ns, partial(self._begin, fault))
        self.clock.at(plan.heals_ns, self._heal)

    def _add(self, name: str, role: Role) -> None:
        engine = self.engines[name] = Engine(
            name,
            role,
            self.plan.sizes,
            parts=self.parts,
            clock=self.clock,
            chance=self.chance,
            network=self.network,
            door=self.scheduler,
            wires=self.wires,
            on_end=self._engine_ended,
        )
        engine.pass_ns = self.plan.pass_ns
        self.clock.after(self.chance.randrange(1, 20 * MILLISECOND), engine.start)

    def close(self) -> None:
        """Let go of what the parts hold."""
        if self.scheduler.owner is not None:
            self.scheduler.owner.close()
        for engine in self.engines.values():
            if engine.shell is not None:
                engine.shell.end()

    # --- the run ------------------------------------------------------------------------------

    def run(self) -> None:
        """Go through the plan, heal, come to rest. Raises Found."""
        try:
            self._run()
            self.sometimes.update(self.wires.reached)
        except CORE_ERRORS as error:
            raise as_found(error) from error
        except Found:
            raise
        except Exception as error:
            # Whatever a part did not foresee would have ended its process.
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            raise Found("crashed", f"{type(error).__name__} in {at}: {error}") from error

    def _run(self) -> None:
        look_ns = self.plan.heals_ns + REST_NS
        while self.clock.step():
            if self.clock.called % CHECK_EVERY == 0:
                books_agree(self)
            if self.clock.now_ns >= look_ns:
                if resting(self):
                    at_rest(self)
                    return
                look_ns = self.clock.now_ns + REST_NS
                if self.clock.now_ns > self.plan.heals_ns + PATIENCE_NS:
                    raise Found("never-quiet", self._unrest(), rule="bounded")

    def _unrest(self) -> str:
        waiting = [c.wish.number for c in self.clients if c.end is None]
        owner = self.scheduler.owner
        open_requests = [] if owner is None else owner.core.log.requests.values()
        states = [f"{s.request} {s.label()}" for s in open_requests][:4]
        busy = [
            name
            for name, engine in self.engines.items()
            if engine.shell is None
            or not engine.shell.owner.idle
            or not engine.shell.control.welcomed
        ]
        return f"clients {waiting[:8]} wait; requests {states}; engines {busy}"

    # --- faults -------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        """Carry a fault out, and end it after its time."""
        engine = self.engines[fault.target]
        shell, control = engine.shell, None if engine.shell is None else engine.shell.control
        self.sometimes[fault.kind] += 1
        match fault.kind:
            case "break" if control is not None:
                control.drop()
            case "part" if control is not None:
                control.part(parted=True)
                self.clock.after(fault.length_ns, partial(control.part, parted=False))
            case "hang" if shell is not None and not shell.hung:
                shell.hang()
                self.clock.after(fault.length_ns, shell.go_on)
            case "kill":
                engine.restart_ns = fault.length_ns
                engine.kill()
            case "slow":
                engine.slow_ns = 100 * MILLISECOND
                self.clock.after(fault.length_ns, partial(setattr, engine, "slow_ns", 0))
            case "step-fails":
                engine.step_fails = 0.2
                self.clock.after(fault.length_ns, partial(setattr, engine, "step_fails", 0.0))
            case "crash" | "machine-crash":
                self.scheduler.die(machine=fault.kind == "machine-crash")
                self.clock.after(min(fault.length_ns, 2 * SECOND), self.scheduler.start)
            case "scheduler-hang" if not self.scheduler.hung:
                self.scheduler.hung = True
                self.clock.after(fault.length_ns, self.scheduler.go_on)
            case "disk-full":
                self.scheduler.store.full = True
                self.clock.after(fault.length_ns, self._room)
            case "disk-sick":
                self.scheduler.store.sick = True
            case "disk-slow":
                self.scheduler.flush_ns = 400 * MILLISECOND
                self.clock.after(
                    fault.length_ns, partial(setattr, self.scheduler, "flush_ns", 2 * MILLISECOND)
                )
            case "doubt" | "fail" | "corrupt" | "lie" | "slow-wire":
                self._set_weather(STORMS[fault.kind], fault)
            case "repeat":
                self.network.repeat = 0.3
                self.clock.after(fault.length_ns, partial(setattr, self.network, "repeat", 0.0))
            case "slow-net":
                self.network.delay_ns = 200 * MILLISECOND
                self.clock.after(
                    fault.length_ns, partial(setattr, self.network, "delay_ns", 3 * MILLISECOND)
                )
            case _:
                self.sometimes[fault.kind] -= 1

    def _room(self) -> None:
        self.scheduler.store.full = False

    def _set_weather(self, weather: Weather, fault: Fault) -> None:
        self.wires.weather = attrs.evolve(weather, delay_ns=self.plan.wire_ns)
        self.clock.after(fault.length_ns, self._set_fair)

    def _set_fair(self) -> None:
        self.wires.weather = Weather(delay_ns=self.plan.wire_ns)

    def _heal(self) -> None:
        """No more faults: everything works again, and what was not observed is."""
        self.healed = True
        self._set_fair()
        self.network.repeat, self.network.delay_ns = 0.0, 3 * MILLISECOND
        self.scheduler.flush_ns = 2 * MILLISECOND
        self.scheduler.store.full = self.scheduler.store.sick = False
        if self.scheduler.hung:
            self.scheduler.go_on()
        self.scheduler.start()
        for engine in self.engines.values():
            engine.slow_ns, engine.step_fails = 0, 0.0
            if engine.shell is not None:
                engine.shell.control.part(parted=False)
                engine.shell.go_on()
        for party in tuple(self.unobserved):
            self._observe(party)

    # --- ends ---------------------------------------------------------------------------------

    def _engine_ended(self, party: Party) -> None:
        self.sometimes["engine-ended"] += 1
        self.unobserved.append(party)
        if self.healed or self.chance.random() < self.plan.observed:
            delay = self.chance.randrange(1, 100 * MILLISECOND)
            self.clock.after(delay, partial(self._observe, party))

    def _observe(self, party: Party) -> None:
        """Whoever waits for processes has seen that one's end."""
        if party not in self.unobserved:
            return
        self.unobserved.remove(party)
        seen = ObservedExit(party=str(party), pid=1)
        for engine in self.engines.values():
            if engine.role is Role.DECODE and engine.plane is not None:
                engine.plane.fence_party(str(party), seen)

    def _scheduler_died(self) -> None:
        self.sometimes["scheduler-died"] += 1
        for client in self.clients:
            client.scheduler_died()
        for engine in self.engines.values():
            if engine.shell is not None:
                engine.shell.control.drop()
