"""Segment files looked at without trust: every batch, and every place where the chain is broken.

Owns: finding batches again behind damage, and saying what was done to which batch.
Must not know: what entries mean, beyond position and time; `segment_files` reads what is whole.

A reader of a whole log stops at the first damage.  An inquiry goes on: it looks for the next
genuine frame header, and names the batch, the segment and the offset of everything that is wrong.

While each batch continues the one before it, only the first and the last are remembered.  The first
batch that does not makes the survey look up all that came before, since any of them may be named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from engine.store import StoreDamaged
from lifecycle.wording import counted
from transport import codec
from transport.chain_problems import Problem, Wrong
from transport.jsonlines import UnreadableLog
from transport.pb import lifecycle_pb2 as pb
from transport.stores import sealed, segment_files
from transport.stores.contents import FileBytes, SealedBytes
from transport.stores.frames import (
    CHAIN_START,
    FILE_HEADER_BYTES,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    Content,
    Damage,
    FileHeader,
    Frame,
    Torn,
    unpack_file_header,
    walk,
)

REMOVED = "a part of the log was removed while it was read; ask again"

__all__ = ["REMOVED", "Batch", "Place", "Problem", "Survey", "Wrong"]


@attrs.frozen
class Batch:
    """A genuine frame with its entries, parsed and not decoded."""

    segment: Path
    frame: Frame
    entries: tuple[pb.Entry, ...]


@attrs.frozen
class Place:
    """A batch that was looked at before, and behind which a survey begins.

    `segment` is the file's name without its ending, `stop` the offset behind the batch in the plain
    segment, `last` its last position, and `time_ns` the time of the entry there.
    """

    segment: str
    offset: int
    stop: int
    first: int
    last: int
    digest: bytes
    time_ns: int


@attrs.frozen
class _Link:
    """What the chain needs of a frame."""

    segment: str
    offset: int
    first: int
    count: int
    previous: bytes
    digest: bytes
    size: int = 0

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def continues(self, other: _Link) -> bool:
        return self.previous == other.digest and self.first == other.first + other.count


def _link(path: Path, frame: Frame) -> _Link:
    return _Link(
        path.name,
        frame.offset,
        frame.first_position,
        frame.count,
        frame.previous,
        frame.digest,
        FRAME_HEADER_BYTES + len(frame.payload),
    )


class Survey:
    """One look over the segments: iterate `batches`, then read `problems`."""

    def __init__(self, paths: Sequence[Path], *, after: Place | None = None) -> None:
        """Of these segments, in the order of their names; of the first, what follows that place."""
        self.paths = tuple(paths)
        self.problems: list[Problem] = []
        self.batch_count = 0
        self.entries = 0
        self.size_bytes = 0
        self.wanted: frozenset[int] = frozenset()
        """Last positions of batches whose hashes are to be remembered, in `heads`."""
        self.heads: dict[int, bytes] = {}
        self._after = after
        self._time_ns = 0 if after is None else after.time_ns
        self._first: _Link | None = None
        self._latest: _Link | None = None
        # Empty as long as every batch continues the one before it.
        self._links: list[_Link] = []
        self._seen: dict[bytes, _Link] = {}
        if after is not None:
            count = after.last - after.first + 1
            link = _Link(after.segment, after.offset, after.first, count, b"", after.digest)
            self._first = self._latest = link

    @property
    def head(self) -> bytes:
        """The hash of the last batch; zeros of an empty log."""
        return self._latest.digest if self._latest is not None else CHAIN_START

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last position that was seen; zeros of an empty log."""
        if self._first is None or self._latest is None:
            return 0, 0
        return self._first.first, self._latest.last

    @property
    def place(self) -> Place | None:
        """The last batch, whose entries have all been given by `batches` once the next is asked."""
        link = self._latest
        if link is None:
            return None
        stop = link.offset + link.size
        stem = Path(link.segment).stem
        return Place(stem, link.offset, stop, link.first, link.last, link.digest, self._time_ns)

    def batches(self) -> Iterator[Batch]:
        """Every genuine batch in the order of the files, damage passed over and noted."""
        for path, frame in self._frames():
            batch = self._parsed(path, frame)
            if batch is not None:
                yield batch

    def _frames(self) -> Iterator[tuple[Path, Frame]]:
        for number, path in enumerate(self.paths):
            last = number == len(self.paths) - 1
            start = 0
            if number == 0 and self._after is not None:
                start = self._after.stop
            try:
                yield from self._of(path, start, last=last)
            except StoreDamaged as damage:
                self._found(Wrong.DAMAGED, damage.segment, damage.offset, 0, 0, damage.reason)
                continue
            except FileNotFoundError as error:
                raise UnreadableLog(0, REMOVED) from error
            if last and segment_files.is_sealed(path):
                reason = "a sealed segment always had a successor"
                self._found(Wrong.ENDS_SEALED, path.name, 0, 0, 0, reason)

    def _of(self, path: Path, start: int, *, last: bool) -> Iterator[tuple[Path, Frame]]:
        with ExitStack() as stack:
            content, sealed_now = self._content(path, stack, part=start > 0)
            self.size_bytes += len(content) - start
            self._header(path, content)
            for found in self._walk(path, content, start, last=last and not sealed_now):
                yield path, found

    def _content(self, path: Path, stack: ExitStack, *, part: bool) -> tuple[Content, bool]:
        if not segment_files.is_sealed(path):
            try:
                return FileBytes(stack.enter_context(path.open("rb"))), False
            except FileNotFoundError:
                # It may have been sealed since it was listed.
                path = path.with_suffix(segment_files.SEALED_SUFFIX)
        if part:
            try:
                return SealedBytes(path, damaged=lambda d: self._damaged(path, d)), True
            except Damage as damage:
                raise StoreDamaged(path.name, damage.offset, damage.reason) from damage
        data = path.read_bytes()
        try:
            return sealed.unpack(data)[1], True
        except Damage as damage:
            first = damage
        try:
            header = sealed.unpack_header(data)
        except Damage as damage:
            raise StoreDamaged(path.name, damage.offset, damage.reason) from damage
        # The blocks are independent: what cannot be unpacked becomes zeros, which are no frames.
        self._damaged(path, first)
        parts = []
        for number, block in enumerate(header.blocks):
            try:
                packed = data[block.offset : block.offset + block.size]
                parts.append(sealed.unpack_block(header, number, packed))
            except Damage:
                parts.append(bytes(header.content_of(number)))
        return b"".join(parts), True

    def _damaged(self, path: Path, damage: Damage) -> None:
        self._found(Wrong.DAMAGED, path.name, damage.offset, 0, 0, damage.reason)

    def _header(self, path: Path, content: Content) -> FileHeader | None:
        try:
            header = unpack_file_header(content[:FILE_HEADER_BYTES])
        except Damage as damage:
            self._damaged(path, damage)
            return None
        named = segment_files.segment_name(header.first_position)
        if path.with_suffix(segment_files.SUFFIX).name != named:
            reason = f"its header says that it should be called {named}"
            first = header.first_position
            self._found(Wrong.MISNAMED, path.name, 0, first, first, reason)
        return header

    def _walk(self, path: Path, content: Content, start: int, *, last: bool) -> Iterator[Frame]:
        """Genuine frames; behind damage, from the next frame header whose check sum matches."""
        start = max(start, FILE_HEADER_BYTES)
        while True:
            try:
                for item in walk(content, last=last, start=start):
                    if isinstance(item, Torn):
                        reason = f"{len(content) - item.offset} bytes are no whole batch"
                        self._found(Wrong.TORN, path.name, item.offset, 0, 0, reason)
                        return
                    yield item
            except Damage as damage:
                self._damaged(path, damage)
                start = content.find(FRAME_MAGIC, damage.offset + 1)
                if start < 0:
                    return
            else:
                return

    def _parsed(self, path: Path, frame: Frame) -> Batch | None:
        link = _link(path, frame)
        if not self._links and self._latest is not None and not link.continues(self._latest):
            self._look_back(path, frame)
        if self._links:
            known = self._seen.get(link.digest)
            if known is not None:
                reason = f"the batch at byte {known.offset} of {known.segment} stands here again"
                self._at(Wrong.REPEATED, link, reason)
                return None
            self._remember(link)
        self._first = self._first or link
        self._latest = link
        self.batch_count += 1
        if link.last in self.wanted:
            self.heads[link.last] = link.digest
        try:
            entries = codec.batch_from_bytes(frame.payload)
        except codec.MalformedRecord as error:
            self._at(Wrong.DAMAGED, link, str(error))
            return None
        if len(entries) != frame.count:
            reason = f"holds {counted(len(entries), 'entry')}, its header says {frame.count}"
            self._at(Wrong.DAMAGED, link, reason)
        self._clock(link, entries)
        self.entries += len(entries)
        return Batch(path, frame, entries)

    def _remember(self, link: _Link) -> None:
        self._links.append(link)
        self._seen[link.digest] = link

    def _look_back(self, path: Path, frame: Frame) -> None:
        """Remember every batch before this one, which does not continue the one before it."""
        if self._after is not None and self._first is not None:
            self._remember(self._first)
        for earlier, found in Survey(self.paths, after=self._after)._frames():  # noqa: SLF001 - its own class
            if (earlier, found.offset) == (path, frame.offset):
                return
            self._remember(_link(earlier, found))

    def _clock(self, link: _Link, entries: Sequence[pb.Entry]) -> None:
        for number, entry in enumerate(entries):
            before, self._time_ns = self._time_ns, entry.time_ns
            if self._time_ns < before:
                back = before - self._time_ns
                reason = f"position {link.first + number} is {back} ns before the one before it"
                # What follows is measured from here, so that one step back is told once.
                self._at(Wrong.CLOCK, link, reason)
                return

    def _found(
        self, wrong: Wrong, segment: str, offset: int, first: int, last: int, message: str
    ) -> None:
        self.problems.append(Problem(wrong, segment, offset, first, last, message))

    def _at(self, wrong: Wrong, link: _Link, message: str) -> None:
        self._found(wrong, link.segment, link.offset, link.first, link.last, message)

    def refuse_signature(self, file: str, position: int, message: str) -> None:
        """A signature file that does not hold for what was seen."""
        self._found(Wrong.SIGNATURE, file, 0, 0, position, message)

    # --- The chain, once everything was seen --------------------------------------------------

    def judge_chain(self, *, whole: bool, head: bytes | None = None) -> None:
        """Compare each batch with the one before it, and the last with the expected head.

        `whole` says that the log begins with the first of these segments.
        """
        if self._first is None or self._latest is None:
            return
        first = self._first
        if whole and (first.first != 1 or first.previous != CHAIN_START):
            self._begin(first)
        links = self._links
        places = {link.digest: index for index, link in enumerate(links)}
        parents = [places.get(link.previous) for link in links]
        blamed: set[int] = set()
        reached = links[0].last if links else 0
        for index, link in enumerate(links[1:], start=1):
            if parents[index] != index - 1:
                self._judge(index, parents, blamed, reached)
            elif link.first != links[index - 1].last + 1:
                self._gap(link, links[index - 1].last)
            reached = max(reached, link.last)
        if head is not None and head != self.head:
            reason = f"the chain ends with {self.head.hex()}, expected was {head.hex()}"
            self._at(Wrong.OTHER_HEAD, self._latest, reason)

    def _begin(self, link: _Link) -> None:
        if link.first > 1:
            self._gap(link, 0)
        else:
            self._at(Wrong.FOREIGN, link, "is no beginning of a log")

    def _judge(self, index: int, parents: list[int | None], blamed: set[int], reached: int) -> None:
        """Say why this batch does not continue the one before it."""
        link, parent = self._links[index], parents[index]
        if parent is not None:
            if parent > index:
                self._at(Wrong.OUT_OF_ORDER, link, "was written after a batch that follows it here")
            elif not blamed.intersection(range(parent + 1, index)):
                self._at(Wrong.OUT_OF_ORDER, link, f"stands behind position {reached}")
            blamed.add(index)
            return
        if link.first > reached + 1:
            self._gap(link, reached)
            return
        if index - 1 in blamed:
            return
        before, last = self._links[index - 1], index + 1 == len(self._links)
        alone = not last and parents[index + 1] != index
        if alone or link.previous == CHAIN_START:
            blamed.add(index)
            self._at(Wrong.FOREIGN, link, "its predecessor is nowhere in this log")
            return
        if last:
            reason = f"it, or the batch at position {link.first}, is not what was written"
            problem = Problem(
                Wrong.CHANGED, before.segment, before.offset, before.first, link.last, reason
            )
            self.problems.append(problem)
            return
        reason = f"the batch at position {link.first} knows it by another hash"
        self._at(Wrong.CHANGED, before, reason)

    def _gap(self, link: _Link, reached: int) -> None:
        gone = link.first - reached - 1
        reason = f"{counted(gone, 'entry')} missing before it"
        self._found(Wrong.MISSING, link.segment, link.offset, reached + 1, link.first - 1, reason)
