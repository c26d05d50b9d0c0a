"""What is on its way to the engines: a bounded outbox for each stream, entries held for the store.

Owns: which stream a rank has, what waits for it and for which position, how to reach a rank.
Must not know: gRPC, leases, and what an entry means.

Everything here is called by the owner task and never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import structlog

from engine.effects import Answer, Publish
from lifecycle.events import Admitted, Purpose, Reserved
from lifecycle.ids import Party, RequestId
from transport import codec
from transport.client_records import payload_message
from transport.mailbox import Mailbox
from transport.pb import fleet_pb2 as pb

if TYPE_CHECKING:
    from transport.scheduler_owner import SchedulerOwner

OUTBOX_MAX = 65_536
"""Items that may wait for one stream; beyond it the stream is cut, and the engine reconnects."""

_log = structlog.get_logger("custody.fleet")


@attrs.frozen
class Held:
    """Items of one entry, for a stream that may see them once the store holds them."""

    position: int
    durable: int
    items: tuple[pb.SchedulerItem, ...]
    request: RequestId | None = None


@attrs.define(eq=False)
class Link:
    """One stream of one rank; `live` from the moment at which the core brings it up to date."""

    outbox: Mailbox[pb.SchedulerItem] = attrs.Factory(lambda: Mailbox(OUTBOX_MAX))
    party: Party | None = None
    live: bool = False
    held: deque[Held] = attrs.Factory(deque)
    told: set[Party] = attrs.Factory(set)


@attrs.define
class Rank:
    """What is known of a rank beside the log: how to reach it, its process, its counters."""

    endpoint: str
    plane: str
    process_id: int
    process: str = ""
    counters: pb.EngineCounters = attrs.Factory(pb.EngineCounters)


@attrs.frozen
class Ahead:
    """Entries that a rank was shown before others: it may lack those from `lowest` to `highest`.

    A rank names the highest position that it has taken in.
    Beyond `highest` it was shown everything in order, so a higher one proves that nothing is lacking;
    what was only sent may have been on a stream that broke.
    """

    lowest: int
    highest: int


class FleetStreams:
    """The streams that are up, by rank, and what is known of each rank beside the log."""

    def __init__(self, owner: SchedulerOwner, *, on_gone: Callable[[Party], None]) -> None:
        """`on_gone` is called when a rank has no stream any more."""
        self.owner = owner
        self.links: dict[Party, Link] = {}
        self.ranks: dict[Party, Rank] = {}
        self.ahead: dict[Party, Ahead] = {}
        self._on_gone = on_gone
        self._published: tuple[Publish, pb.SchedulerItem] | None = None

    def current(self, link: Link) -> Party | None:
        """The rank whose stream this is, unless another one has taken its place."""
        party = link.party
        return party if party is not None and self.links.get(party) is link else None

    def begin(self, link: Link, party: Party, rank: Rank) -> None:
        """This stream is the rank's from now on; an older one has been given up by the engine."""
        link.party = party
        previous = self.links.get(party)
        if previous is not None:
            previous.outbox.cut()
        self.links[party] = link
        if party in self.ranks:
            rank.counters = self.ranks[party].counters
        self.ranks[party] = rank

    def end(self, link: Link, reason: pb.AttachRefusal.ValueType, message: str) -> None:
        """End the stream, and say why behind everything that was sent."""
        refused = pb.AttachRefused(reason=reason, message=message)
        link.outbox.close(pb.SchedulerItem(refused=refused))
        self.gone(link)

    def gone(self, link: Link) -> None:
        """The stream has ended."""
        party = self.current(link)
        if party is None:
            return
        del self.links[party]
        link.outbox.close()
        self._on_gone(party)
        _log.info("engine_disconnected", party=str(party))

    def publish(self, effect: Publish) -> None:
        """Queue an entry for a rank; without a live stream the rank resumes by its cursor."""
        link = self.links.get(effect.party)
        if link is None or not link.live:
            return
        peers = [self._peer(link, party) for party in self._named(effect)]
        known = (*(peer for peer in peers if peer is not None), self._publication(effect))
        if self._goes_ahead(link, effect):
            self._note_ahead(link, effect)
            self._put(link, known)
            return
        self._hold(link, effect.position, effect.durable, *known, request=effect.entry.request)

    def _publication(self, effect: Publish) -> pb.SchedulerItem:
        """The entry as it is sent; ranks that are shown the same are sent the same object.

        An entry is published to one rank after the other, and whoever sends it only reads it.
        """
        last = self._published
        if last is not None and last[0].entry is effect.entry and last[0].payload is effect.payload:
            return last[1]
        publication = pb.Publication(
            position=effect.position, entry=codec.encode_entry(effect.entry)
        )
        if effect.payload is not None and isinstance(effect.entry.event, Admitted):
            key = self.owner.clients.digest_key
            publication.payload.CopyFrom(payload_message(effect, digest_key=key))
        item = pb.SchedulerItem(publication=publication)
        self._published = (effect, item)
        return item

    def _goes_ahead(self, link: Link, effect: Publish) -> bool:
        """Whether an entry is shown before the store has it: growth, while the store has failed.

        It lets in nobody, so forgetting it would only make a request look less advanced, and
        without it nothing could decode on.  A request's own entries keep their order.
        """
        journal, event = self.owner.journal, effect.entry.event
        grows = isinstance(event, Reserved) and event.purpose is Purpose.GROWTH
        if journal.failure is None or not grows or effect.position <= journal.appended:
            return False
        return all(held.request != effect.entry.request for held in link.held)

    def _note_ahead(self, link: Link, effect: Publish) -> None:
        known = self.ahead.get(effect.party)
        if known is not None:
            # A stream that is brought up to date may show less ahead than the one that broke did.
            self.ahead[effect.party] = Ahead(known.lowest, max(known.highest, effect.position))
            return
        lowest = next((held.position for held in link.held if held.position), None)
        if lowest is not None:
            self.ahead[effect.party] = Ahead(lowest, effect.position)

    def cursor(self, party: Party, position: int) -> int:
        """Up to where a rank that says so has surely taken everything in."""
        ahead = self.ahead.get(party)
        if ahead is None:
            return position
        if position > ahead.highest:
            del self.ahead[party]
            return position
        return min(position, ahead.lowest - 1)

    def _named(self, effect: Publish) -> list[Party]:
        event = effect.entry.event
        if not isinstance(event, Admitted):
            return []
        return [p for p in (*event.prefill.parties(), *event.decode.parties()) if p != effect.party]

    def _peer(self, link: Link, party: Party) -> pb.SchedulerItem | None:
        rank = self.ranks.get(party)
        if rank is None or party in link.told:
            return None
        link.told.add(party)
        peer = pb.PeerEndpoint(
            party=codec.encode_party(party),
            endpoint=rank.endpoint,
            plane=rank.plane,
            process=rank.process,
        )
        return pb.SchedulerItem(peer=peer)

    def synced(self, party: Party) -> None:
        """The rank is up to date once it has seen everything queued before this."""
        link = self.links.get(party)
        if link is not None and link.live:
            self._hold(link, 0, 0, pb.SchedulerItem(synced=pb.Synced()))

    def answer(self, effect: Answer) -> None:
        """Answer a proposal; an answer may overtake entries, never the append."""
        link = self.links.get(effect.party)
        if link is None or not link.live:
            return
        answer = pb.ProposalAnswer(number=effect.number)
        if effect.position:
            answer.accepted_position = effect.position
        else:
            answer.dropped_rule = effect.rule
        self._hold(link, effect.position, 0, pb.SchedulerItem(answer=answer), overtake=True)

    def _hold(
        self,
        link: Link,
        position: int,
        durable: int,
        *items: pb.SchedulerItem,
        overtake: bool = False,
        request: RequestId | None = None,
    ) -> None:
        journal = self.owner.journal
        if overtake and position <= journal.appended:
            self._put(link, items)
            return
        link.held.append(Held(position, durable, items, request))
        journal.want(durable)
        self._release(link)

    def release(self) -> None:
        """More is appended or durable: send what waited for it."""
        for link in tuple(self.links.values()):
            self._release(link)

    def _release(self, link: Link) -> None:
        journal, held = self.owner.journal, link.held
        while held:
            first = held[0]
            if first.position > journal.appended or first.durable > journal.durable:
                break
            held.popleft()
            if not self._put(link, first.items):
                return
        if len(held) > OUTBOX_MAX:
            self._overflow(link)

    def _put(self, link: Link, items: tuple[pb.SchedulerItem, ...]) -> bool:
        """Send these; a stream for which it is too much is cut, and that is False."""
        for item in items:
            if not link.outbox.put(item):
                self._overflow(link)
                return False
        return True

    def _overflow(self, link: Link) -> None:
        _log.warning("engine_stream_cut", party=str(link.party), limit=OUTBOX_MAX)
        link.outbox.cut()
        self.gone(link)

    def heartbeat(self) -> None:
        """Tell every engine that the scheduler is alive."""
        beat = pb.SchedulerHeartbeat(position=self.owner.core.position)
        for link in tuple(self.links.values()):
            if not link.outbox.put(pb.SchedulerItem(heartbeat=beat)):
                self._overflow(link)
