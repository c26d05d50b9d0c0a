"""Segment files looked at without trust: every batch, and every place where the chain is broken.

Owns: finding batches again behind damage, and saying what was done to which batch.
Must not know: what entries mean, beyond position and time; `segment_files` reads what is whole.

A reader of a whole log stops at the first damage.  An inquiry goes on: it looks for the next
genuine frame header, and names the batch, the segment and the offset of everything that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import attrs

from engine.store import StoreDamaged
from transport import codec
from transport.pb import lifecycle_pb2 as pb
from transport.stores import sealed, segment_files
from transport.stores.frames import (
    CHAIN_START,
    FILE_HEADER_BYTES,
    FRAME_MAGIC,
    Damage,
    FileHeader,
    Frame,
    Torn,
    unpack_file_header,
    walk,
)


class Wrong(Enum):
    """What was done to a log, as far as it can be told."""

    DAMAGED = "damaged"
    """Bytes do not match their check sum."""
    TORN = "torn"
    """The end was cut in the middle of a batch, as an interrupted write leaves it."""
    MISSING = "missing"
    """Positions are not there."""
    REPEATED = "repeated"
    """A batch is there a second time."""
    OUT_OF_ORDER = "out_of_order"
    """A batch stands before one that it was written after."""
    FOREIGN = "foreign"
    """A batch whose predecessor is in no place of this log: it belongs to another one."""
    CHANGED = "changed"
    """A batch that its successor knows by another hash."""
    CLOCK = "clock"
    """Times go backwards."""
    MISNAMED = "misnamed"
    """A file is called otherwise than its header says."""
    ENDS_SEALED = "ends_sealed"
    """The last segment is sealed, so at least one followed it."""
    OTHER_HEAD = "other_head"
    """The chain ends with another hash than was expected."""


@attrs.frozen
class Problem:
    """Something wrong, located: segment, offset in the plain segment, and the batch's positions."""

    wrong: Wrong
    segment: str
    offset: int
    first_position: int
    last_position: int
    message: str


@attrs.frozen
class Batch:
    """A genuine frame with its entries, parsed and not decoded."""

    segment: Path
    frame: Frame
    entries: tuple[pb.Entry, ...]


@attrs.frozen
class _Link:
    """What the chain needs of a frame."""

    segment: str
    offset: int
    first: int
    count: int
    previous: bytes
    digest: bytes

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class Survey:
    """One look over the segments: iterate `batches`, then read `problems`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Of these segments, in the order of their names."""
        self.paths = tuple(paths)
        self.problems: list[Problem] = []
        self.links: list[_Link] = []
        self.entries = 0
        self.size_bytes = 0
        self._time_ns = 0
        self._seen: dict[bytes, _Link] = {}

    @property
    def head(self) -> bytes:
        """The hash of the last batch; zeros of an empty log."""
        return self.links[-1].digest if self.links else CHAIN_START

    def batches(self) -> Iterator[Batch]:
        """Every genuine batch in the order of the files, damage passed over and noted."""
        for number, path in enumerate(self.paths):
            last = number == len(self.paths) - 1
            try:
                content, sealed_now = self._content(path)
            except StoreDamaged as damage:
                self._found(Wrong.DAMAGED, damage.segment, damage.offset, 0, 0, damage.reason)
                continue
            self.size_bytes += len(content)
            self._header(path, content)
            for found in self._walk(path, content, last=last and not sealed_now):
                batch = self._parsed(path, found)
                if batch is not None:
                    yield batch
            if last and sealed_now:
                reason = "a sealed segment always had a successor"
                self._found(Wrong.ENDS_SEALED, path.name, 0, 0, 0, reason)

    def _content(self, path: Path) -> tuple[bytes, bool]:
        data = path.read_bytes()
        if not segment_files.is_sealed(path):
            return data, False
        try:
            return sealed.unpack(data)[1], True
        except Damage as damage:
            first = damage
        try:
            header = sealed.unpack_header(data)
        except Damage as damage:
            raise StoreDamaged(path.name, damage.offset, damage.reason) from damage
        # The blocks are independent: what cannot be unpacked becomes zeros, which are no frames.
        self._found(Wrong.DAMAGED, path.name, first.offset, 0, 0, first.reason)
        parts = []
        for number, block in enumerate(header.blocks):
            try:
                packed = data[block.offset : block.offset + block.size]
                parts.append(sealed.unpack_block(header, number, packed))
            except Damage:
                parts.append(bytes(header.content_of(number)))
        return b"".join(parts), True

    def _header(self, path: Path, content: bytes) -> FileHeader | None:
        try:
            header = unpack_file_header(content)
        except Damage as damage:
            self._found(Wrong.DAMAGED, path.name, damage.offset, 0, 0, damage.reason)
            return None
        named = segment_files.segment_name(header.first_position)
        if path.with_suffix(segment_files.SUFFIX).name != named:
            reason = f"its header says that it should be called {named}"
            first = header.first_position
            self._found(Wrong.MISNAMED, path.name, 0, first, first, reason)
        return header

    def _walk(self, path: Path, content: bytes, *, last: bool) -> Iterator[Frame]:
        """Genuine frames; behind damage, from the next frame header whose check sum matches."""
        start = FILE_HEADER_BYTES
        while True:
            # A walk begins behind a file header, whose place is moved along with the damage.
            shift = start - FILE_HEADER_BYTES
            try:
                for item in walk(content[shift:] if shift else content, last=last):
                    if isinstance(item, Torn):
                        reason = f"{len(content) - shift - item.offset} bytes are no whole batch"
                        place = shift + item.offset
                        self._found(Wrong.TORN, path.name, place, 0, 0, reason)
                        return
                    yield attrs.evolve(item, offset=item.offset + shift)
            except Damage as damage:
                place = shift + damage.offset
                self._found(Wrong.DAMAGED, path.name, place, 0, 0, damage.reason)
                found = content.find(FRAME_MAGIC, place + 1)
                if found < 0:
                    return
                start = found
            else:
                return

    def _parsed(self, path: Path, frame: Frame) -> Batch | None:
        link = _Link(
            path.name,
            frame.offset,
            frame.first_position,
            frame.count,
            frame.previous,
            frame.digest,
        )
        known = self._seen.get(frame.digest)
        if known is not None:
            reason = f"the batch at byte {known.offset} of {known.segment} stands here again"
            self._at(Wrong.REPEATED, link, reason)
            return None
        self._seen[frame.digest] = link
        self.links.append(link)
        try:
            entries = codec.batch_from_bytes(frame.payload)
        except codec.MalformedRecord as error:
            self._at(Wrong.DAMAGED, link, str(error))
            return None
        if len(entries) != frame.count:
            reason = f"holds {len(entries)} entries, its header says {frame.count}"
            self._at(Wrong.DAMAGED, link, reason)
        self._clock(link, entries)
        self.entries += len(entries)
        return Batch(path, frame, entries)

    def _clock(self, link: _Link, entries: Sequence[pb.Entry]) -> None:
        for number, entry in enumerate(entries):
            if entry.time_ns < self._time_ns:
                back = self._time_ns - entry.time_ns
                reason = f"position {link.first + number} is {back} ns before the one before it"
                self._at(Wrong.CLOCK, link, reason)
                # What follows is measured from here, so that one step back is told once.
                self._time_ns = entry.time_ns
                return
            self._time_ns = entry.time_ns

    def _found(
        self, wrong: Wrong, segment: str, offset: int, first: int, last: int, message: str
    ) -> None:
        self.problems.append(Problem(wrong, segment, offset, first, last, message))

    def _at(self, wrong: Wrong, link: _Link, message: str) -> None:
        self._found(wrong, link.segment, link.offset, link.first, link.last, message)

    # --- The chain, once everything was seen --------------------------------------------------

    def judge_chain(self, *, whole: bool, head: bytes | None = None) -> None:
        """Compare each batch with the one before it, and the last with the expected head.

        `whole` says that the log begins with the first of these segments.
        """
        places = {link.digest: index for index, link in enumerate(self.links)}
        parents = [places.get(link.previous) for link in self.links]
        blamed: set[int] = set()
        reached = 0 if whole or not self.links else self.links[0].first - 1
        for index, link in enumerate(self.links):
            if index == 0:
                if whole and (link.first != 1 or link.previous != CHAIN_START):
                    self._begin(link)
            elif parents[index] != index - 1:
                self._judge(index, parents, blamed, reached)
            elif link.first != self.links[index - 1].last + 1:
                self._gap(link, self.links[index - 1].last)
            reached = max(reached, link.last)
        if head is not None and head != self.head and self.links:
            reason = f"the chain ends with {self.head.hex()}, expected was {head.hex()}"
            self._at(Wrong.OTHER_HEAD, self.links[-1], reason)

    def _begin(self, link: _Link) -> None:
        if link.first > 1:
            self._gap(link, 0)
        else:
            self._at(Wrong.FOREIGN, link, "is no beginning of a log")

    def _judge(self, index: int, parents: list[int | None], blamed: set[int], reached: int) -> None:
        """Say why this batch does not continue the one before it."""
        link, parent = self.links[index], parents[index]
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
        before, last = self.links[index - 1], index + 1 == len(self.links)
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
        reason = f"{gone} entries are missing before it"
        self._found(Wrong.MISSING, link.segment, link.offset, reached + 1, link.first - 1, reason)
