"""The contract over the simulated plane, in both of its kinds, and the one way in which it lies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from engine.dataplane import Answer
from engine.dataplane_errors import PeerMismatch
from engine.simulator_clock import Clock
from tests.plane_contract import (
    GRANT,
    NEXT_GRANT,
    PARTY,
    POOL_BYTES,
    STAGING_BYTES,
    Faults,
    PlaneContract,
    Rig,
    write,
)
from tests.plane_processes import pattern
from transport.simulated_memory import HEAD_WORDS, WORD, Layout, Region
from transport.simulated_plane import SimulatedPlane
from transport.simulated_wires import Weather, Wires

OWNER = "decode/b1/0"
PAGE_BYTES = 1 << 16
LAYOUT = Layout(PAGE_BYTES // WORD - HEAD_WORDS - 1)
CALM, TORN, LYING = Weather(), Weather(tear=1.0), Weather(lie=1.0)


class Storms(Faults):
    """Faults of copies as weather: where nothing is copied by a thread, a copy fails on the wire."""

    def __init__(self, wires: Wires) -> None:
        super().__init__()
        self._wires = wires

    def fail_after(self, copies: int | None) -> None:
        self._wires.weather = CALM if copies is None else TORN


def region(size_bytes: int) -> Region:
    """So many bytes as pages."""
    made = Region(LAYOUT, size_bytes // PAGE_BYTES)
    assert len(made.bytes) == size_bytes
    return made


class TestSimulated(PlaneContract):
    """No claim of the contract is left out for this plane: its weather is calm unless told."""

    @pytest.fixture(params=["placing", "one-sided"])
    def rig(self, request: pytest.FixtureRequest) -> Iterator[Rig]:
        clock, changed = Clock(1), threading.Event()
        wires = Wires(clock, Random(1), placing=request.param == "placing")
        faults = Storms(wires)
        pool, source = region(POOL_BYTES), region(STAGING_BYTES)
        owner = SimulatedPlane(wires, pool, party=OWNER, wake=changed.set)
        writer = SimulatedPlane(wires, source, party=PARTY, wake=changed.set)
        landed = np.frombuffer(pool.bytes, dtype=np.uint8)
        staged = np.frombuffer(source.bytes, dtype=np.uint8)
        landed[:], staged[:] = 0, pattern(STAGING_BYTES)

        def pump() -> None:
            """Let everything happen that is to happen, however late; nothing while held."""
            while not faults.held and clock.step():
                changed.set()

        yield Rig(owner, writer, landed, staged, faults, changed, pump)
        owner.shutdown()

    def test_a_lie_breaks_the_first_sentence_and_nothing_else_does(self, rig: Rig) -> None:
        """Told to lie it says DONE, and bytes land afterwards: what the pages' tags are there for.

        The oracle that looks for landings in foreign pages is deaf to these, and to no others.
        """
        assert isinstance(rig.writer, SimulatedPlane)
        rig.expose()
        peer = rig.open()
        rig.writer.wires.weather = LYING
        ticket = rig.writer.post(peer, [write(0, 0, 4 * PAGE_BYTES)], GRANT)
        while rig.writer.poll(ticket) is Answer.IN_FLIGHT:
            assert rig.writer.wires.clock.step()
        rig.pool[:] = 0xEE
        rig.pump()
        assert rig.writer.poll(ticket) is Answer.DONE
        assert (rig.pool != 0xEE).any()

    def test_an_owner_that_is_gone_takes_nothing_in(self, rig: Rig) -> None:
        """What was on its way to it never lands, and nobody reaches it any more."""
        rig.expose()
        peer, descriptor = rig.open(), rig.owner.descriptor()
        ticket = rig.writer.post(peer, [write(0, 0, 64)], GRANT)
        rig.owner.shutdown()
        assert rig.ended(ticket) is Answer.FAILED_QUIESCED
        assert not rig.pool.any()
        with pytest.raises(PeerMismatch):
            rig.writer.open_peer(descriptor)

    def test_a_writer_that_is_gone_lands_only_what_was_sent(self, rig: Rig) -> None:
        """A copy ends with its process; what was sent arrives, unless the receiver refuses it."""
        assert isinstance(rig.writer, SimulatedPlane)
        rig.expose()
        rig.expose(NEXT_GRANT)
        peer = rig.open()
        rig.writer.post(peer, [write(0, 0, 4_096)], GRANT)
        rig.writer.post(peer, [write(0, 1 << 20, 4_096)], NEXT_GRANT)
        rig.writer.shutdown()
        rig.owner.fence(NEXT_GRANT)
        rig.pump()
        assert rig.pool[:4_096].any() == rig.owner.capabilities.receiver_places_bytes
        assert not rig.pool[4_096:].any()
