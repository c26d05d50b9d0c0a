"""The engines as the scheduler's owner task sees them: streams, leases, addresses.

Owns: which stream a rank has, what waits for it, when it was last heard, how to reach it.
Must not know: gRPC, and what an entry means; the core decides.

Everything here is called by the owner task and never waits.
A stream's order is: welcome, then entries with the addresses that they need before them, then a
`Synced`, then whatever comes; answers and signs of life may overtake entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import structlog

from engine.dataplane import Descriptor
from engine.dataplane_errors import DescriptorMalformed
from engine.effects import Answer, Publish
from engine.scheduler import RefusedEngineError
from lifecycle.events import Admitted, Attached, Lost, LostCause
from lifecycle.ids import EngineId, Party
from lifecycle.state import LIVE, Settlement
from transport import codec
from transport.codec_values import FENCE_SCOPES, ROLES
from transport.mailbox import Mailbox
from transport.pb import fleet_pb2 as pb

if TYPE_CHECKING:
    from transport.scheduler_owner import SchedulerOwner

OUTBOX_MAX = 65_536
HEARTBEATS_PER_LEASE = 5
_log = structlog.get_logger("custody.fleet")

Life = tuple[EngineId, int]


@attrs.frozen
class Held:
    """Items of one entry, for a stream that may see them once the store holds them."""

    position: int
    durable: int
    items: tuple[pb.SchedulerItem, ...]


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
    counters: pb.EngineCounters = attrs.Factory(pb.EngineCounters)


class FleetDesk:
    """Streams by rank, leases by life."""

    def __init__(
        self, owner: SchedulerOwner, *, lease_ns: int, monotonic: Callable[[], int], tokenizer: str
    ) -> None:
        self.owner = owner
        self.lease_ns = lease_ns
        self.heartbeat_ns = lease_ns // HEARTBEATS_PER_LEASE
        self.links: dict[Party, Link] = {}
        self.ranks: dict[Party, Rank] = {}
        self.leaving: set[Life] = set()
        self._heard: dict[Life, int] = {}
        self._monotonic = monotonic
        self._tokenizer = tokenizer
        self._looked = monotonic()

    # --- streams ------------------------------------------------------------------------------

    def hello(self, link: Link, hello: pb.Hello) -> None:
        """Let a rank in on this stream, or end the stream with the reason."""
        core = self.owner.core
        try:
            attached = self._attached(hello)
            party = codec.decode_party(hello.party)
        except (ValueError, codec.CodecError, DescriptorMalformed) as error:
            return self._refuse(link, pb.ATTACH_REFUSAL_PROTOCOL, str(error))
        refusal = self._refusal(attached, hello)
        if refusal is not None:
            return self._refuse(link, *refusal)
        try:
            effects = core.attach(attached, self.owner.now())
        except RefusedEngineError as error:
            return self._refuse(link, pb.ATTACH_REFUSAL_INCOMPATIBLE, str(error))
        link.party = party
        previous = self.links.get(party)
        if previous is not None:
            # The engine has given up that stream; this one takes its place.
            previous.outbox.cut()
        self.links[party] = link
        counters = self.ranks[party].counters if party in self.ranks else pb.EngineCounters()
        self.ranks[party] = Rank(hello.endpoint, hello.plane, hello.process_id, counters)
        self.hear(party)
        line = core.lines.get(party)
        known = hello.HasField("cursor") and hello.cursor.epoch == core.epoch and line is not None
        welcome = pb.Welcome(
            epoch=core.epoch,
            incarnation=party.incarnation,
            lease_ns=self.lease_ns,
            heartbeat_ns=self.heartbeat_ns,
            inventory_wanted=not known,
            highest_answered=line.expected - 1 if line is not None and known else 0,
        )
        link.outbox.put(pb.SchedulerItem(welcome=welcome))
        _log.info("engine_connected", party=str(party), role=attached.role.value, resumed=known)
        self.owner.perform(effects)
        if known:
            self._connect(link, party, epoch=core.epoch, position=hello.cursor.position, number=0)
        return None

    def _attached(self, hello: pb.Hello) -> Attached:
        redacted = hello.endpoint
        if hello.endpoint:
            redacted = Descriptor.decode(hello.endpoint, plane=hello.plane).redacted()
        return Attached(
            engine=EngineId(hello.party.engine),
            incarnation=hello.party.incarnation,
            role=ROLES.decode(hello.role),
            ranks=hello.ranks,
            pages=hello.pages,
            page_tokens=hello.page_tokens,
            layers=hello.layers,
            slots=hello.slots,
            context_tokens=hello.context_tokens,
            layout=hello.layout,
            endpoints=(redacted,),
            plane=hello.plane,
            fence_scope=FENCE_SCOPES.decode(hello.fence_scope),
        )

    def _refusal(
        self, attached: Attached, hello: pb.Hello
    ) -> tuple[pb.AttachRefusal.ValueType, str] | None:
        name = f"{attached.engine}/{attached.incarnation}"
        current = self.owner.core.log.fleet.current(attached.engine)
        if current is not None:
            known = current.attached.incarnation
            if known > attached.incarnation:
                return pb.ATTACH_REFUSAL_SUPERSEDED, f"incarnation {known} follows {name}"
            if known == attached.incarnation and current.lost is not None:
                return pb.ATTACH_REFUSAL_LOST, f"{name} was declared lost ({current.lost.value})"
        if not attached.engine or attached.ranks != 1 or hello.party.rank != 0:
            message = f"{name} has rank {hello.party.rank} of {attached.ranks}: one rank is served"
            return pb.ATTACH_REFUSAL_INCOMPATIBLE, message
        context, pool = self.owner.context_wanted, attached.pages * attached.page_tokens
        if context is not None and context > pool:
            message = f"the pool of {name} holds {pool} tokens, less than the context of {context}"
            return pb.ATTACH_REFUSAL_INCOMPATIBLE, message
        if hello.tokenizer and hello.tokenizer != self._tokenizer:
            message = f"the tokenizer {hello.tokenizer} of {name} is not {self._tokenizer}"
            return pb.ATTACH_REFUSAL_INCOMPATIBLE, message
        return None

    def _connect(self, link: Link, party: Party, *, epoch: int, position: int, number: int) -> None:
        link.live = True
        effects = self.owner.core.connect(
            party, epoch=epoch, position=position, next_number=number, now_ns=self.owner.now()
        )
        self.owner.perform(effects)

    def _refuse(self, link: Link, reason: pb.AttachRefusal.ValueType, message: str) -> None:
        _log.warning(
            "engine_refused",
            party=str(link.party),
            reason=pb.AttachRefusal.Name(reason),
            message=message,
        )
        self._end(link, reason, message)

    def _end(self, link: Link, reason: pb.AttachRefusal.ValueType, message: str) -> None:
        refused = pb.AttachRefused(reason=reason, message=message)
        link.outbox.close(pb.SchedulerItem(refused=refused))
        self.gone(link)

    def gone(self, link: Link) -> None:
        """The stream has ended; that is nothing for the length of the lease."""
        party = link.party
        if party is None or self.links.get(party) is not link:
            return
        del self.links[party]
        self.hear(party)
        link.outbox.close()
        _log.info("engine_disconnected", party=str(party))

    # --- from engines -------------------------------------------------------------------------

    def items(self, link: Link, items: Sequence[pb.EngineItem]) -> None:
        """Take in what a rank sent, in order; a stream that was replaced is not listened to."""
        party = link.party
        if party is None or self.links.get(party) is not link:
            return
        self.hear(party)
        for item in items:
            try:
                self._item(link, party, item)
            except (ValueError, codec.CodecError) as error:
                self._refuse(link, pb.ATTACH_REFUSAL_PROTOCOL, str(error))
                return
            if link.outbox.closed:
                return

    def _item(self, link: Link, party: Party, item: pb.EngineItem) -> None:
        owner = self.owner
        match item.WhichOneof("item"):
            case "inventory":
                if item.inventory.epoch != owner.core.epoch or link.live:
                    raise ValueError(f"an inventory for epoch {item.inventory.epoch} is not wanted")
                number = item.inventory.highest_proposal + 1
                self._connect(link, party, epoch=0, position=0, number=number)
            case "proposal":
                proposal = codec.decode_proposal(item.proposal)
                if proposal.party != party:
                    raise ValueError(f"{party} sent a proposal of {proposal.party}")
                if link.live and not owner.journal.full:
                    owner.perform(owner.core.propose(proposal, owner.now()))
            case "tokens":
                if link.live:
                    owner.clients.relay(party, item.tokens)
            case "heartbeat":
                self.ranks[party].counters = item.heartbeat.counters
                if link.live and item.heartbeat.cursor.epoch == owner.core.epoch:
                    owner.core.acknowledge(party, item.heartbeat.cursor.position)
            case "leaving":
                self.leaving.add((party.engine, party.incarnation))
                owner.perform(owner.core.drain(party.engine, owner.now()))
            case "hello" | None:
                raise ValueError("a hello is the first item and no other, and no item is empty")

    # --- to engines ---------------------------------------------------------------------------

    def publish(self, effect: Publish) -> None:
        """Queue an entry for a rank; without a live stream the rank resumes by its cursor."""
        link = self.links.get(effect.party)
        if link is None or not link.live:
            return
        items = [self._peer(link, party) for party in self._named(effect)]
        publication = pb.Publication(
            position=effect.position, entry=codec.encode_entry(effect.entry)
        )
        if effect.payload is not None and isinstance(effect.entry.event, Admitted):
            publication.payload.CopyFrom(self.owner.clients.payload(effect))
        known = tuple(item for item in items if item is not None)
        self._hold(
            link, effect.position, effect.durable, *known, pb.SchedulerItem(publication=publication)
        )

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
            party=codec.encode_party(party), endpoint=rank.endpoint, plane=rank.plane
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
    ) -> None:
        journal = self.owner.journal
        if overtake and position <= journal.appended:
            if not all(link.outbox.put(item) for item in items):
                self._overflow(link)
            return
        link.held.append(Held(position, durable, items))
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
            if not all(link.outbox.put(item) for item in first.items):
                self._overflow(link)
                return
        if len(held) > OUTBOX_MAX:
            self._overflow(link)

    def _overflow(self, link: Link) -> None:
        _log.warning("engine_stream_cut", party=str(link.party), limit=OUTBOX_MAX)
        link.outbox.cut()
        self.gone(link)

    # --- leases and ends ----------------------------------------------------------------------

    def hear(self, party: Party) -> None:
        """A sign of life of this rank's engine."""
        self._heard[(party.engine, party.incarnation)] = self._monotonic()

    def tick(self) -> None:
        """Send signs of life, declare silent engines lost, let leaving ones go."""
        now = self._monotonic()
        if now - self._looked > self.lease_ns // 2:
            # This process stood still, so nobody's silence says anything.
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        core = self.owner.core
        for life in core.log.fleet.alive():
            name = (life.attached.engine, life.attached.incarnation)
            if now - self._heard.setdefault(name, now) > self.lease_ns:
                _log.warning("engine_lease_over", engine=name[0], incarnation=name[1])
                self.owner.perform(core.lose(*name, LostCause.LEASE, self.owner.now()))
        self.let_go()

    def heartbeat(self) -> None:
        """Tell every engine that the scheduler is alive."""
        beat = pb.SchedulerHeartbeat(position=self.owner.core.position)
        for link in tuple(self.links.values()):
            if not link.outbox.put(pb.SchedulerItem(heartbeat=beat)):
                self._overflow(link)

    def let_go(self) -> None:
        """End the lives of leaving engines of which nothing is unsettled."""
        for life in tuple(self.leaving):
            if not self.unsettled(life):
                self.leaving.discard(life)
                effects = self.owner.core.lose(*life, LostCause.LEFT, self.owner.now())
                self.owner.perform(effects)

    def unsettled(self, life: Life) -> bool:
        """Whether an attempt runs on this life, or a grant that it owns or may write is held."""
        for state in self.owner.core.log.requests.values():
            admitted = state.admitted
            if admitted is not None and state.phase in LIVE:
                legs = (admitted.prefill, admitted.decode)
                if any((leg.engine, leg.incarnation) == life for leg in legs):
                    return True
            for grant in state.grants:
                parties = (grant.id.owner, *grant.undrained)
                named = any((p.engine, p.incarnation) == life for p in parties)
                if named and grant.settlement is Settlement.HELD:
                    return True
        return False

    def lost(self, event: Lost) -> None:
        """A life is over: its streams end, and its addresses are forgotten."""
        life = (event.engine, event.incarnation)
        reason = {
            LostCause.LEFT: pb.ATTACH_REFUSAL_LEFT,
            LostCause.REPLACED: pb.ATTACH_REFUSAL_SUPERSEDED,
        }.get(event.cause, pb.ATTACH_REFUSAL_LOST)
        self.leaving.discard(life)
        self._heard.pop(life, None)
        for party in [p for p in self.ranks if (p.engine, p.incarnation) == life]:
            link = self.links.get(party)
            if link is not None:
                self._end(link, reason, f"{party} is lost: {event.cause.value}")
            self._heard.pop(life, None)
            del self.ranks[party]

    def shut_down(self) -> None:
        """End every stream; the engines may come back to the next scheduler."""
        for link in tuple(self.links.values()):
            self._end(link, pb.ATTACH_REFUSAL_SHUTDOWN, "the scheduler is shutting down")
