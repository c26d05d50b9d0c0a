"""The claims that every data plane back end must keep, and the rig in which they are tried.

Owns the contract; `test_planes` runs it over each back end.
It must not know any back end, except through the capabilities that the back end declares.
"""

import json
import threading
from collections.abc import Callable

import attrs
import numpy as np
import pytest

from engine.dataplane import (
    Answer,
    CloseProof,
    DataPlane,
    FenceScope,
    ObservedExit,
    Peer,
    Span,
    Ticket,
    Write,
)
from engine.dataplane_errors import (
    DescriptorMalformed,
    GrantEnded,
    OutOfBounds,
    PeerClosed,
    PeerMismatch,
    PlaneMisused,
    PostRefused,
)
from transport.planes.segment import Bytes, copy_bytes

WAIT_SECONDS_MAX = 20
POOL_BYTES = 9 << 20
STAGING_BYTES = 8 << 20
PARTY = "prefill/a1/0"
OTHER_PARTY = "prefill/a2/0"
GRANT = "decode/b1/0/1"
NEXT_GRANT = "decode/b1/0/2"
FINAL = (Answer.DONE, Answer.FAILED_QUIESCED)


class Faults:
    """What the copies of a rig do: pass, wait until let go, or fail from a certain one on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._let_go = threading.Event()
        self._let_go.set()
        self._passing: int | None = None

    @property
    def held(self) -> bool:
        return not self._let_go.is_set()

    def hold(self) -> None:
        self.entered.clear()
        self._let_go.clear()

    def let_go(self) -> None:
        self._let_go.set()

    def fail_after(self, copies: int | None) -> None:
        self._passing = copies

    def copy(self, target: Bytes, source: Bytes) -> None:
        self.entered.set()
        if not self._let_go.wait(WAIT_SECONDS_MAX):
            raise OSError("nobody let the copy go")
        if self._passing is not None:
            if self._passing == 0:
                raise OSError("injected")
            self._passing -= 1
        copy_bytes(target, source)


@attrs.define(eq=False)
class Rig:
    """An owner and a writer of one back end in this process, with their memory."""

    owner: DataPlane
    writer: DataPlane
    pool: Bytes
    staging: Bytes
    faults: Faults
    changed: threading.Event
    pump: Callable[[], None] = lambda: None

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that a wake-up announces; fail after a bound."""
        while True:
            self.changed.clear()
            self.pump()
            if condition():
                return
            assert self.changed.wait(WAIT_SECONDS_MAX), "no wake-up came"

    def open(self) -> Peer:
        return self.writer.open_peer(self.owner.descriptor())

    def expose(self, grant: str = GRANT, *, offset: int = 0, length: int = POOL_BYTES) -> None:
        span = Span(offset=offset, length=length)
        self.owner.expose(grant, spans=[span], parties=[PARTY])

    def ended(self, ticket: Ticket) -> Answer:
        self.until(lambda: self.writer.poll(ticket) is not Answer.IN_FLIGHT)
        return self.writer.poll(ticket)

    def final(self, ticket: Ticket) -> Answer:
        self.until(lambda: self.writer.poll(ticket) in FINAL)
        return self.writer.poll(ticket)


def write(source: int, target: int, length: int) -> Write:
    return Write(source_offset=source, target_offset=target, length=length)


class PlaneContract:
    """Every back end keeps this; a subclass provides the `rig` fixture."""

    def test_after_done_nothing_of_that_ticket_lands(self, rig: Rig) -> None:
        """Once a ticket is DONE its target belongs to the next owner, whatever else happens."""
        rig.expose()
        rig.expose(NEXT_GRANT)
        peer = rig.open()
        ticket = rig.writer.post(peer, [write(0, 0, 3 << 20), write(64, 4 << 20, 64)], GRANT)
        assert rig.ended(ticket) is Answer.DONE
        rig.pool[:] = 0xEE
        rig.writer.inquire(ticket)
        other = rig.writer.post(peer, [write(0, 8 << 20, 128)], NEXT_GRANT)
        assert rig.ended(other) is Answer.DONE
        rig.until(lambda: rig.writer.close(peer) is not None)
        assert (rig.pool[: 8 << 20] == 0xEE).all()
        assert rig.writer.poll(ticket) is Answer.DONE

    def test_the_written_bytes_arrive_and_no_others_change(self, rig: Rig) -> None:
        """Scattered writes of odd sizes land where they were sent; their neighbours stay."""
        rig.expose()
        rig.pool[:] = 0xEE
        expected = rig.pool.copy()
        writes = [write(7, 100, 1), write(0, 4_099, 70_001), write(1 << 20, 5 << 20, 3_000_001)]
        for one in writes:
            expected[one.target_offset : one.target_offset + one.length] = rig.staging[
                one.source_offset : one.source_offset + one.length
            ]
        ticket = rig.writer.post(rig.open(), writes, GRANT)
        assert rig.ended(ticket) is Answer.DONE
        assert rig.writer.explain(ticket) == ""
        assert np.array_equal(rig.pool, expected)

    def test_a_large_write_arrives_whole(self, rig: Rig) -> None:
        """Eight mebibytes in one write are placed before DONE is said."""
        rig.expose()
        ticket = rig.writer.post(rig.open(), [write(0, 512, STAGING_BYTES)], GRANT)
        assert rig.ended(ticket) is Answer.DONE
        assert np.array_equal(rig.pool[512 : 512 + STAGING_BYTES], rig.staging)

    def test_tickets_in_flight_together_each_end(self, rig: Rig) -> None:
        """Many tickets posted at once all become DONE, and their bytes do not mix."""
        rig.expose()
        peer = rig.open()
        size = 100_003
        tickets = [
            rig.writer.post(peer, [write(n * size, (15 - n) * size, size)], GRANT)
            for n in range(16)
        ]
        assert [rig.ended(ticket) for ticket in tickets] == [Answer.DONE] * 16
        for n in range(16):
            target = rig.pool[(15 - n) * size : (16 - n) * size]
            assert np.array_equal(target, rig.staging[n * size : (n + 1) * size])

    @pytest.mark.parametrize("field", ["key", "incarnation"])
    def test_another_life_or_key_is_refused_before_a_byte_leaves(
        self, rig: Rig, field: str
    ) -> None:
        """A descriptor of another life reaches no memory, even at the same endpoint."""
        rig.expose()
        published = json.loads(rig.owner.descriptor())
        published[field] = {"key": "00" * 32, "incarnation": "decode/b0"}[field]
        try:
            peer = rig.writer.open_peer(json.dumps(published))
        except PeerMismatch:
            pass
        else:
            ticket = rig.writer.post(peer, [write(0, 0, 64)], GRANT)
            assert rig.ended(ticket) is Answer.FAILED_QUIESCED
        assert not rig.pool.any()

    def test_a_redacted_or_foreign_descriptor_is_malformed(self, rig: Rig) -> None:
        """Text that is no descriptor of this plane opens nothing."""
        published = json.loads(rig.owner.descriptor())
        for text in (
            "",
            "[]",
            "{}",
            json.dumps({**published, "key": ""}),
            json.dumps({**published, "key": "é0"}),
            json.dumps({**published, "plane": "carrier pigeon"}),
            json.dumps({**published, "pool_bytes": True}),
            json.dumps({**published, "incarnation": "\ud800"}),
        ):
            with pytest.raises(DescriptorMalformed):
                rig.writer.open_peer(text)

    @pytest.mark.parametrize(
        "writes",
        [
            [],
            [write(0, 0, 0)],
            [write(0, 0, -1)],
            [write(-1, 0, 2)],
            [write(0, -1, 2)],
            [write(STAGING_BYTES - 1, 0, 2)],
            [write(0, POOL_BYTES - 1, 2)],
            [write(0, 0, 64), write(0, POOL_BYTES, 1)],
        ],
    )
    def test_a_write_out_of_bounds_leaves_nothing(self, rig: Rig, writes: list[Write]) -> None:
        """One write that leaves its region refuses the whole post: no ticket, no byte."""
        rig.expose()
        peer = rig.open()
        with pytest.raises(OutOfBounds) as caught:
            rig.writer.post(peer, writes, GRANT)
        assert isinstance(caught.value, PostRefused)
        after = rig.writer.post(peer, [write(0, 4_096, 64)], GRANT)
        assert rig.ended(after) is Answer.DONE
        assert not rig.pool[:4_096].any()

    def test_an_error_after_the_post_is_in_doubt_until_proved(self, rig: Rig) -> None:
        """A copy that fails half-way proves nothing; a later answer of the back end does."""
        rig.expose()
        rig.faults.fail_after(1)
        peer = rig.open()
        ticket = rig.writer.post(peer, [write(0, 0, 64), write(0, 4_096, 64)], GRANT)
        assert rig.ended(ticket) is Answer.IN_DOUBT
        assert rig.writer.explain(ticket)
        assert rig.writer.poll(ticket) is Answer.IN_DOUBT
        rig.faults.fail_after(None)
        rig.writer.inquire(ticket)
        assert rig.final(ticket) is Answer.FAILED_QUIESCED
        rig.pool[:] = 0xEE
        rig.pump()
        rig.until(lambda: rig.writer.close(peer) is not None)
        assert (rig.pool == 0xEE).all()

    def test_a_late_poll_repeats_the_answer(self, rig: Rig) -> None:
        """An answer may be asked for long after, when the peer is closed and the grant retired."""
        rig.expose()
        peer = rig.open()
        ticket = rig.writer.post(peer, [write(0, 0, 64)], GRANT)
        assert rig.ended(ticket) is Answer.DONE
        rig.until(lambda: rig.writer.close(peer) is not None)
        rig.owner.retire(GRANT)
        rig.writer.inquire(ticket)
        assert [rig.writer.poll(ticket) for _ in range(3)] == [Answer.DONE] * 3

    def test_a_ticket_of_another_plane_is_a_misuse(self, rig: Rig) -> None:
        """A plane never answers for a ticket that it did not make."""
        rig.expose()
        ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], GRANT)
        assert rig.ended(ticket) is Answer.DONE
        with pytest.raises(PlaneMisused):
            rig.owner.poll(ticket)

    def test_close_is_proved_only_after_the_ticket_in_flight_has_ended(self, rig: Rig) -> None:
        """The proof of `close` means that local memory is no longer read."""
        rig.expose()
        peer = rig.open()
        rig.faults.hold()
        first = rig.writer.post(peer, [write(0, 0, 64)], GRANT)
        second = rig.writer.post(peer, [write(0, 4_096, 64)], GRANT)
        assert rig.writer.close(peer) is None
        with pytest.raises(PeerClosed):
            rig.writer.post(peer, [write(0, 0, 64)], GRANT)
        assert rig.writer.close(peer) is None
        assert rig.writer.poll(first) is Answer.IN_FLIGHT
        rig.faults.let_go()
        rig.until(lambda: rig.writer.close(peer) is not None)
        assert rig.writer.poll(first) in FINAL
        assert rig.writer.poll(second) in FINAL
        before = rig.pool.copy()
        rig.staging[:] = 0x11
        rig.pump()
        assert np.array_equal(rig.pool, before)
        assert rig.writer.close(peer) == CloseProof(peer=peer)

    def test_a_fence_proves_what_its_scope_can(self, rig: Rig) -> None:
        """Only a receiver that places the bytes can revoke; elsewhere the process must be gone."""
        rig.expose()
        proof = rig.owner.fence(GRANT)
        ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], GRANT)
        answer = rig.ended(ticket)
        if rig.owner.capabilities.fence_scope is FenceScope.GRANT:
            assert proof is not None
            assert (proof.scope, proof.grant) == (FenceScope.GRANT, GRANT)
            assert answer is Answer.FAILED_QUIESCED
            assert not rig.pool.any()
        else:
            assert rig.owner.capabilities.fence_scope is FenceScope.PROCESS
            assert proof is None
            assert rig.owner.fence_party(PARTY) is None
            assert answer is Answer.DONE

    def test_an_observed_exit_fences_a_party_and_its_grants(self, rig: Rig) -> None:
        """The exit of the one party that was let in is proof on every back end."""
        rig.expose()
        with pytest.raises(PlaneMisused):
            rig.owner.fence_party(PARTY, ObservedExit(party=OTHER_PARTY, pid=7))
        proof = rig.owner.fence_party(PARTY, ObservedExit(party=PARTY, pid=7))
        assert proof is not None
        assert proof.parties == (PARTY,)
        assert rig.owner.fence_party(PARTY) is not None
        of_grant = rig.owner.fence(GRANT)
        assert of_grant is not None
        assert of_grant.grant == GRANT

    def test_the_exit_of_one_party_does_not_fence_another(self, rig: Rig) -> None:
        """A grant with two parties is not proved quiet by the exit of one."""
        whole = Span(offset=0, length=POOL_BYTES)
        rig.owner.expose(GRANT, spans=[whole], parties=[PARTY, OTHER_PARTY])
        assert rig.owner.fence_party(OTHER_PARTY, ObservedExit(party=OTHER_PARTY, pid=7))
        ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], GRANT)
        assert rig.ended(ticket) is Answer.DONE
        if rig.owner.capabilities.fence_scope is FenceScope.PROCESS:
            assert rig.owner.fence(GRANT) is None

    @pytest.mark.parametrize("end", ["fence", "retire"])
    def test_an_ended_grant_stays_ended(self, rig: Rig, end: str) -> None:
        """A fence holds for more than one frame, one post or one exposure."""
        rig.expose()
        getattr(rig.owner, end)(GRANT)
        for _ in range(3):
            with pytest.raises(GrantEnded):
                rig.expose()
            if rig.owner.capabilities.receiver_places_bytes:
                assert rig.owner.fence(GRANT) is not None
                ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], GRANT)
                assert rig.ended(ticket) is Answer.FAILED_QUIESCED
        assert not rig.pool.any()

    def test_a_grant_fenced_before_its_exposure_is_never_exposed(self, rig: Rig) -> None:
        """A fence that overtakes the exposure wins."""
        rig.owner.fence(GRANT)
        with pytest.raises(GrantEnded):
            rig.expose()

    def test_fencing_one_grant_leaves_the_others(self, rig: Rig) -> None:
        """The scope of a fence is the grant that it names."""
        rig.expose()
        rig.expose(NEXT_GRANT)
        rig.owner.fence(GRANT)
        ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], NEXT_GRANT)
        assert rig.ended(ticket) is Answer.DONE

    def test_the_receiver_places_only_what_was_exposed(self, rig: Rig) -> None:
        """Unknown grants, other parties and other spans are refused before a byte leaves.

        A back end whose writers place bytes cannot do so, and must not claim to fence a grant.
        """
        if not rig.owner.capabilities.receiver_places_bytes:
            assert rig.owner.capabilities.fence_scope is not FenceScope.GRANT
            ticket = rig.writer.post(rig.open(), [write(0, 0, 64)], "decode/b1/0/3")
            assert rig.ended(ticket) is Answer.DONE
            return
        whole = Span(offset=0, length=POOL_BYTES)
        rig.owner.expose(GRANT, spans=[whole], parties=[OTHER_PARTY])
        rig.owner.expose(
            NEXT_GRANT,
            spans=[Span(offset=4_096, length=64), Span(offset=4_160, length=64)],
            parties=[PARTY],
        )
        peer = rig.open()
        for grant, writes in (
            ("decode/b1/0/3", [write(0, 0, 64)]),
            (GRANT, [write(0, 0, 64)]),
            (NEXT_GRANT, [write(0, 4_095, 2)]),
            (NEXT_GRANT, [write(0, 4_096, 64), write(0, 4_223, 2)]),
        ):
            ticket = rig.writer.post(peer, writes, grant)
            assert rig.ended(ticket) is Answer.FAILED_QUIESCED
        assert not rig.pool.any()
        ticket = rig.writer.post(peer, [write(0, 4_096, 128)], NEXT_GRANT)
        assert rig.ended(ticket) is Answer.DONE

    def test_an_exposure_is_given_once(self, rig: Rig) -> None:
        """The same exposure again is a repeat; another one under the same grant is a defect."""
        rig.expose()
        rig.expose()
        with pytest.raises(PlaneMisused):
            rig.owner.expose(
                GRANT, spans=[Span(offset=0, length=POOL_BYTES)], parties=[OTHER_PARTY]
            )
        for span in (Span(offset=POOL_BYTES - 1, length=2), Span(offset=0, length=0)):
            with pytest.raises(OutOfBounds):
                rig.owner.expose(NEXT_GRANT, spans=[span], parties=[PARTY])

    def test_a_plane_has_one_region(self, rig: Rig) -> None:
        """A second region would make offsets ambiguous."""
        with pytest.raises(PlaneMisused):
            rig.writer.register(memoryview(bytearray(64)))
