"""The faults: how each is made to happen, what shows that it did, and how the world heals.

Owns: the faults, and why some of them cannot meet some moments.
Must not know: how a request is brought to a moment.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import attrs

from lifecycle.events import Aborted, Cause, Drained, Entry, Quarantined, Requeued, Resumed
from tests.faults.bench import Bench
from tests.faults.moments import MOMENTS, Scene

Act = Callable[["Strike"], None]
PLANES = ("shared-memory", "grpc")


@attrs.define
class Strike:
    """A fault at work: where, and since which position of the log."""

    scene: Scene
    position: int
    prefill: str
    decode: str
    """The engines that serve, or would be asked first, when it strikes."""

    @property
    def bench(self) -> Bench:
        """The deployment."""
        return self.scene.bench

    def let_go(self, *besides: str, writes: bool = True) -> None:
        """Open every gate but those of parts that cannot open theirs."""
        for name in self.bench.names:
            if name not in besides:
                self.bench.gate(name).command("release")
                if writes and name.startswith("prefill"):
                    self.bench.gate(name).command("go")

    def wait_lost(self, name: str) -> None:
        """The log says that this engine is lost."""
        self.bench.wait_until(f"{name} is lost", lambda: self.bench.is_lost(name, self.position))

    def entries(self) -> list[Entry]:
        """What the target's log gained since."""
        request = self.scene.target.request
        return [
            one.entry for one in self.bench.since(self.position) if one.entry.request == request
        ]

    def wait_ended(self, *causes: Cause) -> None:
        """The attempt has ended, and for one of these causes."""

        def ended() -> bool:
            events = [entry.event for entry in self.entries()]
            return any(isinstance(e, Aborted | Requeued) and e.cause in causes for e in events)

        self.bench.wait_until(f"the attempt ended for {causes}", ended)


@attrs.frozen
class Fault:
    """A fault.

    strike: make it happen, see that it did, and let everybody go on;
    answer: what a client that was not answered before must be told.
    heal: after the client's answer, or at once where the answer waits for it (`heals_first`).
    how: what is wrong with the write at which the request is held; door: the client has a
    network of its own; planes: where the fault is another one than on the first.
    """

    name: str
    strike: Act
    heal: Act
    answer: str = "OK"
    heals_first: bool = True
    how: str = "hold"
    door: bool = False
    planes: tuple[str, ...] = PLANES


def _name(strike: Strike, role: str) -> str:
    return strike.prefill if role == "prefill" else strike.decode


# --- engines --------------------------------------------------------------------------------------


def _kill(role: str) -> Act:
    def act(strike: Strike) -> None:
        name = _name(strike, role)
        child = strike.bench.children[name]
        child.kill()
        assert child.wait(timeout=1) == -signal.SIGKILL
        strike.let_go(name)
        strike.wait_lost(name)

    return act


def _start_again(role: str) -> Act:
    return lambda strike: strike.bench.start_engines(_name(strike, role))


def _begins_again(strike: Strike, name: str) -> None:
    """An engine that was given up finds that out, drops everything, and joins as a new life."""

    def joined() -> bool:
        code = strike.bench.children[name].process.poll()
        assert code is None, f"{name} ended with {code}"
        return strike.bench.joined_again(name, strike.position)

    strike.bench.wait_until(f"{name} has joined again", joined)


def _hang(role: str) -> Act:
    def act(strike: Strike) -> None:
        name = _name(strike, role)
        strike.bench.children[name].signal(signal.SIGSTOP)
        strike.let_go(name)
        strike.wait_lost(name)

    return act


def _wake(role: str) -> Act:
    def act(strike: Strike) -> None:
        name = _name(strike, role)
        gate = strike.bench.gate(name)
        gate.tell("release")
        if role == "prefill":
            gate.tell("go")
        strike.bench.children[name].signal(signal.SIGCONT)
        _begins_again(strike, name)

    return act


def _cut(role: str) -> Act:
    def act(strike: Strike) -> None:
        name = _name(strike, role)
        strike.bench.relays[name].stall()
        strike.let_go()
        strike.wait_lost(name)

    return act


def _mend(role: str, *, broken: bool) -> Act:
    def act(strike: Strike) -> None:
        name = _name(strike, role)
        strike.bench.relays[name].heal(broken=broken)
        _begins_again(strike, name)

    return act


# --- transfers ------------------------------------------------------------------------------------


def _cut_peer(strike: Strike) -> None:
    strike.bench.gate(strike.prefill).command("cut")
    strike.let_go(writes=False)
    strike.wait_ended(Cause.TRANSFER_FAILED)


def _mend_peer(strike: Strike) -> None:
    strike.bench.gate(strike.prefill).command("mend")
    strike.let_go()


def _fails(strike: Strike) -> None:
    strike.let_go()
    strike.wait_ended(Cause.TRANSFER_FAILED)


def _in_doubt(strike: Strike) -> None:
    """The writer cannot say what became of its write until its time to settle is over."""
    _fails(strike)

    def given_up() -> bool:
        events = [entry.event for entry in strike.entries()]
        return any(isinstance(event, Quarantined | Drained) for event in events)

    strike.bench.wait_until("the grant is quarantined, or its writer shut out", given_up)


def _land(strike: Strike) -> None:
    strike.bench.gate(strike.prefill).command("land")


def _corrupted(strike: Strike) -> None:
    strike.let_go()
    strike.wait_ended(Cause.ISOLATION_VIOLATION)


def _replace_decode(strike: Strike) -> None:
    """Pages with a foreign tag stay out until their owner's life ends."""
    name = strike.decode
    strike.bench.children[name].kill()
    strike.bench.start_engines(name)


# --- the scheduler and its log --------------------------------------------------------------------


def _kill_scheduler(strike: Strike) -> None:
    child = strike.bench.children["scheduler"]
    child.kill()
    assert child.wait(timeout=1) == -signal.SIGKILL
    strike.let_go()


def _restart_scheduler(strike: Strike) -> None:
    strike.bench.start_scheduler()
    resumed = [o for o in strike.bench.since(strike.position) if isinstance(o.entry.event, Resumed)]
    assert len(resumed) == 1, resumed


def _disk_refuses(how: str, said: str) -> Act:
    def act(strike: Strike) -> None:
        gate = strike.bench.gate("scheduler")
        gate.command(how)
        strike.let_go()
        # Somebody else asks, so that the store has something to take whatever the target does.
        asking, request = strike.scene.ask(9, 5, 1)
        assert gate.wait_reached()["reached"] == said
        asking.wait()
        assert asking.status == "UNAVAILABLE LOG_UNAVAILABLE", asking.status
        strike.scene.beside[asking.request] = asking, request

    return act


def _disk_slow(strike: Strike) -> None:
    gate = strike.bench.gate("scheduler")
    gate.command("slow")
    strike.let_go()
    asking, request = strike.scene.ask(9, 5, 1)
    gate.wait_reached()
    asking.wait_admitted()
    strike.scene.beside[asking.request] = asking, request


def _disk_mended(strike: Strike) -> None:
    answered_before = strike.scene.answered
    told = strike.scene.target.status
    assert answered_before or told != "OK", "success was told before the log could hold it"
    strike.bench.gate("scheduler").command("mend")


# --- clients --------------------------------------------------------------------------------------


def _client_lost(strike: Strike) -> None:
    strike.scene.target.left = True
    strike.bench.doors[-1].close()
    strike.let_go()


def _client_cancels(strike: Strike) -> None:
    strike.scene.target.cancel()
    strike.let_go()


def _nothing(_strike: Strike) -> None:
    """What needs no healing."""


# --- the table ------------------------------------------------------------------------------------


def _engine(role: str) -> tuple[Fault, ...]:
    return (
        Fault(f"{role} killed", _kill(role), _start_again(role)),
        Fault(f"{role} hung, resumed when given up", _hang(role), _wake(role)),
        Fault(f"{role} cut off from the scheduler", _cut(role), _mend(role, broken=True)),
        Fault(f"{role} slow beyond its lease", _cut(role), _mend(role, broken=False)),
    )


_ONE = PLANES[:1]
_WRITE = "UNAVAILABLE LOG_UNAVAILABLE"
FAULTS = {
    fault.name: fault
    for fault in (
        *_engine("prefill"),
        *_engine("decode"),
        Fault("engines cut off from each other", _cut_peer, _mend_peer, planes=PLANES[1:]),
        Fault("a transfer fails", _fails, _nothing, how="fail"),
        Fault("a transfer in doubt lands later", _in_doubt, _land, how="late"),
        Fault(
            "bytes corrupted in flight",
            _corrupted,
            _replace_decode,
            answer="INTERNAL KV_ISOLATION_VIOLATION",
            how="corrupt",
        ),
        Fault("scheduler killed and restarted", _kill_scheduler, _restart_scheduler, "UNAVAILABLE"),
        Fault("log store full", _disk_refuses("full", "ENOSPC"), _disk_mended, planes=_ONE),
        Fault(
            "log store unwritable",
            _disk_refuses("unwritable", "EIO"),
            _disk_mended,
            answer=_WRITE,
            heals_first=False,
            planes=_ONE,
        ),
        Fault("log store slow", _disk_slow, _disk_mended, planes=_ONE),
        Fault("client lost", _client_lost, _nothing, answer="", door=True),
        Fault("client cancels", _client_cancels, _nothing, answer=""),
    )
}

WRITES = ("both reserved", "between chunks")
_NONE_YET = "no byte is on its way before both legs have reserved"
_ALL_THERE = "every write has ended: prefill has drained"
_TOLD = "the client has been answered, and its call has ended"


def why_impossible(fault: Fault, moment: str) -> str:
    """Why that fault cannot strike at that moment; empty if it can."""
    names = list(MOMENTS)
    crossing = fault.how != "hold"
    peers = fault.strike is _cut_peer
    if (crossing or peers) and names.index(moment) > names.index(WRITES[-1]):
        return _ALL_THERE
    if crossing and moment not in WRITES:
        return _NONE_YET
    if peers and moment == "queued":
        return "no leg has been chosen: it is the same as one moment later"
    if fault.answer == "" and moment == "ended, unsettled":
        return _TOLD
    return ""
