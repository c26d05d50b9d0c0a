"""The writes of a prefill engine: from packed pages to an answer of the data plane.

Owns: which post stands where, peers' descriptors, and what is tried again.
Must not know: packing, streams, threads.

The writer may post before the owner has heard of its own reservation; a plane whose receiver
places the bytes then refuses before any byte leaves, and the post is tried again for as long as
its request lives.
After an attempt has ended nothing of it is posted any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from engine.dataplane import Answer, DataPlane, Peer, Ticket
from engine.dataplane_errors import DataPlaneError, PlaneBusy
from engine.effects import EngineEffect, Post
from engine.prefill import Posted, PrefillCore
from engine.runner import Packed
from lifecycle.events import Failed
from lifecycle.ids import GrantId, Party

UNEXPOSED = "NOT_EXPOSED"
"""What a plane's explanation contains when the owner does not know the grant yet."""

ENDED = frozenset({Answer.DONE, Answer.FAILED_QUIESCED})
"""Answers after which nothing of a write lands."""


class Noter(Protocol):
    """The process's own log."""

    def __call__(self, sentence: str, **fields: object) -> None: ...


@attrs.define
class _Flight:
    """A packed post: without a ticket it waits for its turn, or for its exposure."""

    post: Post
    packed: Packed
    ticket: Ticket | None = None
    in_doubt: bool = False


class Posts:
    """The posts of one prefill rank, by the core's ticket."""

    def __init__(
        self,
        core: PrefillCore,
        plane: DataPlane,
        *,
        perform: Callable[[list[EngineEffect]], None],
        note: Noter,
    ) -> None:
        self.bytes_posted = 0
        self._core = core
        self._plane = plane
        self._perform = perform
        self._note = note
        self._descriptors: dict[Party, str] = {}
        self._peers: dict[Party, Peer] = {}
        self._flights: dict[int, _Flight] = {}

    @property
    def waiting(self) -> bool:
        """Whether a post waits for a tick, or the fate of one is not known, or a peer is lost."""
        posts = any(f.ticket is None or f.in_doubt for f in self._flights.values())
        return posts or any(self._is_lost(party) for party in self._peers)

    @property
    def in_flight(self) -> bool:
        """Whether the end of a post is still to come; one in doubt may never have one."""
        return any(not f.in_doubt for f in self._flights.values())

    def writable(self) -> tuple[GrantId, ...]:
        """Grants into which something may still land."""
        return tuple({f.post.grant: None for f in self._flights.values()})

    def peer(self, party: Party, descriptor: str) -> None:
        """That rank's pool is there. The descriptor is a credential and is never written down."""
        if descriptor:
            self._descriptors[party] = descriptor

    def packed(self, post: Post, packed: Packed | Failed) -> None:
        """The pages of a post are staged, or could not be."""
        if isinstance(packed, Failed):
            job = self._core.jobs.get(post.request)
            if job is not None and job.attempt == post.attempt:
                self._core.fail(job, packed)
            self._perform(self._core.post_ended(post.ticket, Posted.FAILED))
            return
        self._flights[post.ticket] = flight = _Flight(post, packed)
        self._start(flight)

    def poll(self) -> None:
        """Ask the plane about everything that it was given."""
        for flight in tuple(self._flights.values()):
            if flight.ticket is not None:
                self._judge(flight, flight.ticket)

    def tick(self) -> None:
        """Try again what waits, ask again about what is in doubt, let go of lost peers."""
        self.poll()
        for flight in tuple(self._flights.values()):
            if flight.ticket is None:
                self._start(flight)
            elif flight.in_doubt:
                self._plane.inquire(flight.ticket)
        for party in tuple(self._peers):
            if self._is_lost(party):
                self._let_go(party)

    def wind_up(self) -> bool:
        """Let go of every peer; whether nothing that was posted can land any more.

        Where the writer places the bytes, closing proves it: nobody copies, and nothing is mapped.
        Elsewhere bytes may be on their way for as long as a write is in flight or in doubt.
        """
        for party, peer in tuple(self._peers.items()):
            if self._plane.close(peer) is not None:
                del self._peers[party]
        if self._peers:
            return False
        if not self._plane.capabilities.receiver_places_bytes:
            return True
        tickets = [flight.ticket for flight in self._flights.values() if flight.ticket is not None]
        return all(self._plane.poll(ticket) in ENDED for ticket in tickets)

    def _is_lost(self, party: Party) -> bool:
        life = self._core.log.fleet.life(party.engine, party.incarnation)
        return life is not None and life.lost is not None

    def _start(self, flight: _Flight) -> None:
        post = flight.post
        if not self._is_live(post):
            self._end(flight, Posted.FAILED, "its attempt has ended")
            return
        try:
            peer = self._open(post.grant.owner)
            if peer is None:
                return
            flight.ticket = self._plane.post(peer, flight.packed.writes, str(post.grant))
        except PlaneBusy:
            return
        except DataPlaneError as error:
            self._end(flight, Posted.FAILED, str(error))

    def _judge(self, flight: _Flight, ticket: Ticket) -> None:
        answer = self._plane.poll(ticket)
        if answer is Answer.DONE:
            self._end(flight, Posted.DONE)
        elif answer is Answer.FAILED_QUIESCED:
            why = self._plane.explain(ticket)
            if UNEXPOSED in why and not flight.in_doubt and self._is_live(flight.post):
                # Nothing has left; the owner will hear of its grant soon.
                flight.ticket = None
                return
            self._end(flight, Posted.FAILED, why)
        elif answer is Answer.IN_DOUBT and not flight.in_doubt:
            flight.in_doubt = True
            why = self._plane.explain(ticket)
            self._note("write_in_doubt", grant=str(flight.post.grant), reason=why)
            self._perform(self._core.post_ended(flight.post.ticket, Posted.IN_DOUBT))
            self._plane.inquire(ticket)

    def _end(self, flight: _Flight, how: Posted, why: str = "") -> None:
        post, packed = flight.post, flight.packed
        del self._flights[post.ticket]
        if how is Posted.DONE:
            self.bytes_posted += packed.size_bytes
        if why:
            self._note("write_failed", grant=str(post.grant), reason=why)
        self._perform(
            self._core.post_ended(
                post.ticket, how, size_bytes=packed.size_bytes, digest=packed.digest
            )
        )

    def _is_live(self, post: Post) -> bool:
        job = self._core.jobs.get(post.request)
        return job is not None and job.attempt == post.attempt and self._core.is_live(job)

    def _open(self, party: Party) -> Peer | None:
        peer = self._peers.get(party)
        if peer is None and party in self._descriptors:
            peer = self._peers[party] = self._plane.open_peer(self._descriptors[party])
        return peer

    def _let_go(self, party: Party) -> None:
        """A mapping of a lost owner's pool would keep its memory from the host.

        Nobody is left to say what became of a write in doubt, and its pages died with their owner;
        the proof of closing says that its staging pages are no longer read, so they come home.
        """
        self._descriptors.pop(party, None)
        if self._plane.close(self._peers[party]) is None:
            return
        del self._peers[party]
        for flight in tuple(self._flights.values()):
            if flight.in_doubt and flight.post.grant.owner == party:
                self._end(flight, Posted.FAILED, "its owner is lost")
