"""The engines as the scheduler's owner task sees them: joining, proposing, leases, leaving.

Owns: who may join, what engines' items lead to, when each was last heard, and when it is lost.
Must not know: gRPC, and what an entry means; the core decides.

Everything here is called by the owner task and never waits.
A stream's order is: welcome, then entries with the addresses that they need before them, then a
`Synced`, then whatever comes; answers and signs of life may overtake entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import structlog

from engine.dataplane import Descriptor
from engine.dataplane_errors import DescriptorMalformed
from engine.scheduler import RefusedEngineError
from lifecycle.events import Attached, Lost, LostCause
from lifecycle.ids import EngineId, Party, RequestId
from lifecycle.state import LIVE, RequestState, Settlement
from lifecycle.wording import counted
from transport import codec
from transport.codec_values import FENCE_SCOPES, ROLES
from transport.fleet_streams import FleetStreams, Link, Rank
from transport.pb import fleet_pb2 as pb
from transport.process_ends import PROCESS_CHARACTERS_MAX
from transport.protocol_version import protocol_refusal

if TYPE_CHECKING:
    from transport.scheduler_owner import SchedulerOwner

HEARTBEATS_PER_LEASE = 5
# The tokens of a pool are counted in 64 bits.
PAGE_TOKENS_MAX = 1 << 16
SLOTS_MAX = 1 << 16
_log = structlog.get_logger("custody.fleet")

_REFUSALS = {
    LostCause.LEFT: pb.ATTACH_REFUSAL_LEFT,
    LostCause.REPLACED: pb.ATTACH_REFUSAL_SUPERSEDED,
    LostCause.RULE_BROKEN: pb.ATTACH_REFUSAL_RULE_BROKEN,
}
"""What a life is told that was lost for that; for any other cause, that it is lost."""

Life = tuple[EngineId, int]


class FleetDesk:
    """Streams by rank, leases by life."""

    def __init__(
        self, owner: SchedulerOwner, *, lease_ns: int, monotonic: Callable[[], int], tokenizer: str
    ) -> None:
        self.owner = owner
        self.lease_ns = lease_ns
        self.heartbeat_ns = lease_ns // HEARTBEATS_PER_LEASE
        self.streams = FleetStreams(owner, on_gone=self.hear)
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
        refusal = self._follows(attached, hello) or self._refusal(attached, hello)
        if refusal is not None:
            return self._refuse(link, *refusal)
        try:
            effects = core.attach(attached, self.owner.now())
        except RefusedEngineError as error:
            return self._refuse(link, pb.ATTACH_REFUSAL_INCOMPATIBLE, str(error))
        rank = Rank(hello.endpoint, hello.plane, hello.process_id, hello.process)
        self.streams.begin(link, party, rank)
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
        if hello.previous.quiet:
            self._quiet(party, hello.previous)
        if known:
            position = self.streams.cursor(party, hello.cursor.position)
            self._connect(link, party, epoch=core.epoch, position=position, number=0)
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

    def _follows(
        self, attached: Attached, hello: pb.Hello
    ) -> tuple[pb.AttachRefusal.ValueType, str] | None:
        """A process that was given up comes back in its own place, never in another's."""
        if not hello.HasField("previous"):
            return None
        before, name = hello.previous.incarnation, f"{attached.engine}/{attached.incarnation}"
        if before >= attached.incarnation:
            return pb.ATTACH_REFUSAL_PROTOCOL, f"{name} does not follow incarnation {before}"
        current = self.owner.core.log.fleet.current(attached.engine)
        if current is None or current.lost is not None:
            return None
        known = current.attached.incarnation
        if known in (before, attached.incarnation):
            return None
        return pb.ATTACH_REFUSAL_SUPERSEDED, f"incarnation {known} has taken the place of {before}"

    def _quiet(self, party: Party, previous: pb.PreviousLife) -> None:
        """Nothing of the life before can land any more, says the process that was it."""
        before = attrs.evolve(party, incarnation=previous.incarnation)
        highest, now_ns = previous.highest_proposal, self.owner.now()
        self.owner.perform(self.owner.core.hear_quiet(before, highest=highest, now_ns=now_ns))

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
                reason = _REFUSALS.get(current.lost, pb.ATTACH_REFUSAL_LOST)
                return reason, f"{name} was declared lost ({current.lost.value})"
        unfit = protocol_refusal(hello.protocol_major, hello.protocol_minor)
        if unfit is not None:
            return pb.ATTACH_REFUSAL_PROTOCOL, f"{name} {unfit}"
        known_rank = self.streams.ranks.get(codec.decode_party(hello.party))
        if known_rank is not None and known_rank.process_id != hello.process_id:
            # One incarnation is one memory: pages of the other process are not this one's.
            message = f"{name} is process {known_rank.process_id}, not process {hello.process_id}"
            return pb.ATTACH_REFUSAL_SUPERSEDED, message
        sizes = {"page_tokens": PAGE_TOKENS_MAX, "slots": SLOTS_MAX}
        for field, limit in sizes.items():
            if getattr(attached, field) > limit:
                message = f"{name} has {getattr(attached, field)} {field}, the limit is {limit}"
                return pb.ATTACH_REFUSAL_INCOMPATIBLE, message
        if len(hello.process) > PROCESS_CHARACTERS_MAX:
            message = f"{name} names its process in {len(hello.process)} characters, the limit is "
            return pb.ATTACH_REFUSAL_INCOMPATIBLE, f"{message}{PROCESS_CHARACTERS_MAX}"
        if not attached.layout:
            return pb.ATTACH_REFUSAL_INCOMPATIBLE, f"{name} has no layout fingerprint"
        if not attached.engine or attached.ranks != 1 or hello.party.rank != 0:
            message = f"{name} has rank {hello.party.rank} of {attached.ranks}: one rank is served"
            return pb.ATTACH_REFUSAL_INCOMPATIBLE, message
        context, pool = self.owner.context_wanted, attached.pages * attached.page_tokens
        if context is not None and context > pool:
            holds = counted(pool, "token")
            message = f"the pool of {name} holds {holds}, less than the context of {context}"
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
        self.streams.end(link, reason, message)

    # --- from engines -------------------------------------------------------------------------

    def items(self, link: Link, items: Sequence[pb.EngineItem]) -> None:
        """Take in what a rank sent, in order; a stream that was replaced is not listened to."""
        party = self.streams.current(link)
        if party is None:
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
                self.streams.ranks[party].counters = item.heartbeat.counters
                if link.live and item.heartbeat.cursor.epoch == owner.core.epoch:
                    position = item.heartbeat.cursor.position
                    owner.core.acknowledge(party, self.streams.cursor(party, position))
            case "leaving":
                self.leaving.add((party.engine, party.incarnation))
                owner.perform(owner.core.drain(party.engine, owner.now()))
            case "hello" | None:
                raise ValueError("a hello is the first item and no other, and no item is empty")

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

    def let_go(self) -> None:
        """End the lives of leaving engines of which nothing is unsettled."""
        for life in tuple(self.leaving):
            if not self.unsettled(life):
                self.leaving.discard(life)
                effects = self.owner.core.lose(*life, LostCause.LEFT, self.owner.now())
                self.owner.perform(effects)

    def unsettled(self, life: Life) -> list[RequestId]:
        """Requests that run on this life, or of which it owns or may write a grant that is held."""
        states = self.owner.core.log.requests.values()
        return [s.request for s in states if _runs_on(s, life) or _holds(s, life)]

    def processes(self, event: Lost) -> list[int]:
        """The process ids of a life's ranks, as far as they are known."""
        life = (event.engine, event.incarnation)
        ranks = self.streams.ranks.items()
        return [rank.process_id for p, rank in ranks if (p.engine, p.incarnation) == life]

    def lost(self, event: Lost) -> None:
        """A life is over: its streams end, and its addresses are forgotten."""
        life = (event.engine, event.incarnation)
        reason = _REFUSALS.get(event.cause, pb.ATTACH_REFUSAL_LOST)
        self.leaving.discard(life)
        for party in [p for p in self.streams.ranks if (p.engine, p.incarnation) == life]:
            link = self.streams.links.get(party)
            if link is not None:
                self.streams.end(link, reason, f"{party} is lost: {event.cause.value}")
            self.streams.ahead.pop(party, None)
            del self.streams.ranks[party]
        # The end of a stream is a sign of life, too.
        self._heard.pop(life, None)

    def shut_down(self) -> None:
        """End every stream; the engines may come back to the next scheduler."""
        for link in tuple(self.streams.links.values()):
            self.streams.end(link, pb.ATTACH_REFUSAL_SHUTDOWN, "the scheduler is shutting down")


def _runs_on(state: RequestState, life: Life) -> bool:
    admitted = state.admitted
    if admitted is None or state.phase not in LIVE:
        return False
    return life in [(leg.engine, leg.incarnation) for leg in (admitted.prefill, admitted.decode)]


def _holds(state: RequestState, life: Life) -> bool:
    held = [grant for grant in state.grants if grant.settlement is Settlement.HELD]
    parties = [party for grant in held for party in (grant.id.owner, *grant.undrained)]
    return life in [(party.engine, party.incarnation) for party in parties]
