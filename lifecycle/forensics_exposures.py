"""Who was exposed to whom: one pass over a log, joining who wrote a slot last with who read it.

Owns: what counts as a write and as a read, and when a read is not covered by the reader's own
writes.
Must not know: files, formats, wording; whether an entry is legal, which is `replay`'s business.

A request reads the slots of its prompt's tokens 0 to n-2 in its destination grants, and those of
the tokens that it makes itself.  A read is its own if the last write to that slot was made under
the very grant through which it reads.  Reads are looked at when an attempt that read has ended;
what lies between is judged by who wrote last before that.
Nothing is taken from a status, and an unsettled question is a doubt, never a silence.

Any request may still be named by a late write, so none is ever forgotten; with a shelf those that
are over leave the memory and come back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    Drained,
    Entry,
    Finished,
    Purpose,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.forensics_slots import SlotMap, slots_of
from lifecycle.forensics_story import Held, Story
from lifecycle.forensics_values import Doubt, Read, Source, Told
from lifecycle.ids import FLEET, EngineId, Party, RequestId, TokenRange
from lifecycle.shelf import Library

Write = tuple[Held, int, int]
"""Under which grant, at which position, and when."""


class Pool:
    """The slots of one rank, and grants that were given back while somebody could still write."""

    __slots__ = ("doors", "new", "page_tokens", "slots")

    def __init__(self, page_tokens: int, *, new: bool) -> None:
        """`new` says that the log has everything since this memory began."""
        self.page_tokens = page_tokens
        self.new = new
        self.slots: SlotMap[Write] = SlotMap()
        self.doors: list[Held] = []


class Inquiry:
    """The pass: `take` every entry in the log's order, then look at `everyone`.

    `stories` are those in memory.
    """

    def __init__(
        self, *, from_the_beginning: bool = True, shelf: Library[Story] | None = None
    ) -> None:
        """`from_the_beginning`: no entry before the first one taken is missing."""
        self.stories: dict[RequestId, Story] = {}
        self._seen = 0
        self._shelf = shelf
        self.pools: dict[Party, Pool] = {}
        self.capacities: dict[EngineId, int] = {}
        self.entries = 0
        self.first_ns = 0
        self.last_ns = 0
        self.any_verified = False
        self._whole = from_the_beginning
        self._handlers: dict[type, Callable[[Story, int, Entry, Any], None]] = {
            Admitted: self._admitted,
            Rejected: self._rejected,
            Reserved: self._reserved,
            Transferred: self._transferred,
            Drained: self._drained,
            Verified: self._verified,
            Finished: self._finished,
            Aborted: self._aborted,
            Requeued: self._requeued,
            Released: self._released,
            Quarantined: self._quarantined,
        }

    def take(self, position: int, entry: Entry) -> None:
        """The next entry; one whose number was taken before is a copy and says nothing new."""
        self.entries += 1
        time_ns = entry.time_ns
        if not self.first_ns:
            self.first_ns = time_ns
        self.last_ns = max(self.last_ns, time_ns)
        if entry.request == FLEET:
            self._fleet(entry)
            return
        story = self.story(entry.request)
        if story is None:
            story = Story(entry.request, self._seen, position=position, time_ns=time_ns)
            self._seen += 1
        self.stories[entry.request] = story
        if entry.sequence >= story.sequence:
            story.gap = story.gap or entry.sequence > story.sequence
            story.sequence = entry.sequence + 1
            handler = self._handlers.get(type(entry.event))
            if handler is not None:
                handler(story, position, entry, entry.event)
        if self._shelf is not None and story.over:
            del self.stories[story.request]
            self._shelf.put(story)

    def story(self, request: RequestId) -> Story | None:
        """What is known of this request; None where no entry named it."""
        story = self.stories.get(request)
        if story is None and self._shelf is not None:
            story = self._shelf.find(request)
        return story

    def everyone(self) -> Iterator[Story]:
        """Every request that was named, once, in no order; a second time in the same one."""
        if self._shelf is not None:
            yield from (
                story for story in self._shelf.values() if story.request not in self.stories
            )
        yield from self.stories.values()

    def names(self) -> Iterator[RequestId]:
        """The name of every request, once, in no order."""
        if self._shelf is not None:
            yield from (name for name in self._shelf.names() if name not in self.stories)
        yield from self.stories

    def lose(self) -> None:
        """Entries are missing here: memory that joins no more is not known from its beginning."""
        self._whole = False
        for pool in self.pools.values():
            pool.new = False

    # --- The fleet ----------------------------------------------------------------------------

    def _fleet(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, Attached):
            for rank in range(event.ranks):
                party = Party(event.engine, event.incarnation, rank)
                self.pools[party] = Pool(event.page_tokens, new=self._whole)
            self.capacities[event.engine] = event.pages * event.page_tokens
            # The memory of a life that is lost stays: who read in it is asked when the attempt ends,
            # which is after the loss.

    # --- A request's events -------------------------------------------------------------------

    def _admitted(self, story: Story, _position: int, entry: Entry, event: Admitted) -> None:
        story.tenant = event.tenant
        story.prompt_tokens = event.prompt_tokens
        story.attempt = entry.attempt
        story.next_attempt()
        for leg in (event.prefill, event.decode):
            for party in leg.parties():
                if party not in self.pools:
                    self.pools[party] = Pool(leg.page_tokens, new=False)

    def _rejected(self, story: Story, position: int, entry: Entry, event: Rejected) -> None:
        story.tenant = story.tenant or event.tenant
        story.prompt_tokens = story.prompt_tokens or event.prompt_tokens
        story.refused = event.code
        if story.told is Told.NOTHING:
            story.told = Told.REFUSAL
            story.ended_position, story.ended_ns = position, entry.time_ns

    def _reserved(self, story: Story, position: int, entry: Entry, event: Reserved) -> None:
        held = Held(story.request, event, position=position, attempt=entry.attempt)
        story.grants[event.grant] = held
        if event.purpose is Purpose.DESTINATION:
            return
        # The owner itself fills these, after this and before anybody else may.
        pool = self.pools.get(event.grant.owner)
        if pool is not None:
            write = (held, position, entry.time_ns)
            for pages in event.pages:
                first, last = pages.first * pool.page_tokens, pages.stop * pool.page_tokens
                pool.slots.assign(first, last, write)

    def _transferred(self, story: Story, position: int, entry: Entry, event: Transferred) -> None:
        owner = event.grant.owner
        held = story.grants.get(event.grant)
        if held is None:
            # Its reservation is missing, or it was given back long ago: the bytes landed all the
            # same.
            unseen = Reserved(
                event.grant, Purpose.GROWTH, event.pages, event.tokens, "", tag=1, parties=()
            )
            held = Held(story.request, unseen, position=position, attempt=entry.attempt)
        tokens = event.tokens
        held.used += tokens.count
        story.prefilled = max(story.prefilled, held.used)
        pool = self.pools.get(owner)
        if pool is not None:
            write = (held, position, entry.time_ns)
            for start, stop, _ in slots_of(event.pages, tokens, pool.page_tokens):
                pool.slots.assign(start, stop, write)
        self._look_at_source(story, tokens, attempt=held.attempt)

    def _look_at_source(self, story: Story, tokens: TokenRange, *, attempt: int) -> None:
        for grant, held in story.grants.items():
            if held.purpose is not Purpose.SOURCE or not held.released:
                continue
            # An earlier attempt's source was copied by that attempt alone.
            if held.attempt != attempt:
                continue
            pool = self.pools.get(grant.owner)
            if pool is None:
                continue
            part = TokenRange(tokens.start - tokens.start % pool.page_tokens, tokens.stop)
            for start, stop, _ in slots_of(held.pages, part, pool.page_tokens, held.tokens.start):
                for _a, _b, write in pool.slots.runs(start, stop):
                    if write is not None and write[0].request != story.request:
                        story.doubts |= {Doubt.SOURCE_REUSED}

    def _drained(self, story: Story, _position: int, _entry: Entry, event: Drained) -> None:
        held = story.grants.get(event.grant)
        if held is None:
            return
        held.undrained -= {event.party}
        if held.released and not held.undrained:
            pool = self.pools.get(event.grant.owner)
            if pool is not None and held in pool.doors:
                pool.doors.remove(held)
            story.leave(event.grant)

    def _released(self, story: Story, position: int, _entry: Entry, event: Released) -> None:
        held = story.grants.get(event.grant)
        if held is None:
            return
        held.released = position
        if held.purpose is Purpose.GROWTH or (
            held.purpose is Purpose.DESTINATION and not held.undrained
        ):
            story.leave(event.grant)
        elif held.purpose is Purpose.DESTINATION:
            needed = min(held.tokens.stop, max(0, story.prompt_tokens - 1)) - held.tokens.start
            pool = self.pools.get(event.grant.owner)
            if pool is not None and held.used < needed:
                pool.doors.append(held)

    def _quarantined(self, story: Story, _pos: int, _entry: Entry, event: Quarantined) -> None:
        # Nobody is granted these pages again, so nothing is read in them.
        story.leave(event.grant)

    def _verified(self, story: Story, _position: int, _entry: Entry, event: Verified) -> None:
        story.verified = True
        # A signal that compared nothing lets a request read, and proves nothing.
        story.compared = event.headers_checked >= event.pages
        self.any_verified = self.any_verified or (story.compared and event.pages > 0)

    def _finished(self, story: Story, position: int, entry: Entry, event: Finished) -> None:
        story.told = Told.ANSWER
        story.first_token_ns = story.first_token_ns or event.first_token_ns
        # Pages that were compared before every load were its own, whatever the log lacks.
        story.unchecked = not story.compared or event.reads_unchecked > 0
        self._read(story, position, entry.time_ns, event.tokens)

    def _aborted(self, story: Story, position: int, entry: Entry, _event: Aborted) -> None:
        if story.told is not Told.ANSWER:
            story.told = Told.PART if story.verified or story.relayed else Told.REFUSAL
        if story.verified:
            self._read(story, position, entry.time_ns, 0)
        story.ended_position, story.ended_ns = position, entry.time_ns

    def _requeued(self, story: Story, position: int, entry: Entry, event: Requeued) -> None:
        if story.verified or event.tokens_relayed > story.relayed:
            self._read(story, position, entry.time_ns, event.tokens_relayed - story.relayed)
        story.relayed = event.tokens_relayed
        for grant, held in list(story.grants.items()):
            if held.purpose is Purpose.SOURCE and held.released:
                del story.grants[grant]

    # --- Reads --------------------------------------------------------------------------------

    def _read(self, story: Story, position: int, time_ns: int, made: int) -> None:
        story.ended_position, story.ended_ns = position, time_ns
        if story.gap:
            story.doubts |= {Doubt.OWN_ENTRIES_MISSING}
        placed = False
        for grant, held in story.grants.items():
            pool = self.pools.get(grant.owner)
            if held.purpose is Purpose.SOURCE or held.released or pool is None:
                continue
            placed = True
            self._read_grant(story, grant.owner, pool, held, time_ns, made)
            if pool.doors and story.unchecked:
                self._look_at_doors(story, pool, held)
        if not placed:
            story.doubts |= {Doubt.NO_PAGES}

    def _read_grant(
        self, story: Story, owner: Party, pool: Pool, held: Held, time_ns: int, made: int
    ) -> None:
        size, base = pool.page_tokens, held.tokens.start
        prompt = max(0, (story.prompt_tokens or held.tokens.stop) - 1)
        last = min(held.tokens.stop, prompt)
        if held.purpose is Purpose.DESTINATION and base < last:
            for start, stop, token in slots_of(held.pages, TokenRange(base, last), size, base):
                for low, high, write in pool.slots.runs(start, stop):
                    if write is None or write[0] is not held:
                        tokens = token + low - start, token + high - start
                        self._found(story, owner, pool, (low, high), tokens, write, time_ns)
        first = max(base, prompt)
        own = TokenRange(first, max(first, min(held.tokens.stop, prompt + made)))
        for start, stop, _token in slots_of(held.pages, own, size, base):
            for _low, _high, write in pool.slots.runs(start, stop):
                # What it makes itself it writes itself, token by token: whether somebody else's
                # write came before or after its own, the log does not say.
                if write is not None and write[0] is not held and write[1] > held.position:
                    story.doubts |= {Doubt.LATE_WRITE}
            pool.slots.assign(start, stop, (held, held.position, time_ns))

    def _found(
        self,
        story: Story,
        owner: Party,
        pool: Pool,
        slots: tuple[int, int],
        tokens: tuple[int, int],
        write: Write | None,
        time_ns: int,
    ) -> None:
        size = pool.page_tokens
        first = slots[0] // size
        read_ns = story.first_token_ns or time_ns
        writer, tenant, position, written_ns = None, "", 0, 0
        source = Source.NOBODY if pool.new else Source.BEFORE
        if write is not None:
            source, writer = Source.REQUEST, write[0].request
            known = self.story(writer)
            tenant = "" if known is None else known.tenant
            position, written_ns = write[1], write[2]
        story.reads.append(
            Read(
                reader=story.request,
                owner=owner,
                first_page=first,
                pages=(slots[1] - 1) // size - first + 1,
                start=tokens[0],
                stop=tokens[1],
                source=source,
                writer=writer,
                writer_tenant=tenant,
                written_position=position,
                written_ns=written_ns,
                read_ns=read_ns if written_ns <= read_ns else time_ns,
            )
        )

    def _look_at_doors(self, story: Story, pool: Pool, held: Held) -> None:
        for door in pool.doors:
            if door.released < held.position and door.overlaps(held):
                story.doubts |= {Doubt.OPEN_DOOR}
