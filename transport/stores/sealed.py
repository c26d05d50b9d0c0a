"""The bytes of a sealed segment: a header, then the plain segment in compressed blocks.

Owns: the header's layout and checks, and the way from plain bytes to sealed ones and back.
Must not know: files, frames.  `docs/log-format.md` describes the bytes for others.

The header is one of zstd's skippable frames and every block an ordinary one, so that zstd's own
command unpacks the file to the plain segment.  Blocks are independent: reading one batch unpacks
one block, and damage is told by the block.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from collections.abc import Sequence

import attrs

from transport.stores.frames import Damage

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SEALED_MAGIC = b"CUSTODYZ"
VERSION = 1
BLOCK_BYTES = 1 << 20
"""How much of the plain segment one block holds; the last holds what is left."""
BLOCK_BYTES_MAX = 16 << 20
HEADER_BYTES_MAX = 1 << 20
BEGINNING_BYTES = 16
"""So many bytes tell a sealed segment, and how long its header is."""

_SKIPPABLE = 0x184D2A50
_SKIPPABLE_BYTES = 8
_HEAD = struct.Struct("<II8sIIQQQ32s32sII")
_BLOCK = struct.Struct("<II")
_SUM = struct.Struct("<I")
_OPTIONS: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}


@attrs.frozen
class Block:
    """Where a compressed block stands in the file, and its check sum."""

    offset: int
    size: int
    checksum: int


@attrs.frozen
class SealedHeader:
    """What the header says.

    `content_digest` is the SHA-256 of the plain segment, `last_frame_digest` the hash that the
    next segment names as its predecessor's.
    """

    first_position: int
    last_position: int
    content_bytes: int
    block_bytes: int
    content_digest: bytes
    last_frame_digest: bytes
    blocks: tuple[Block, ...]

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.blocks[-1].offset + self.blocks[-1].size

    def content_of(self, number: int) -> int:
        """How many plain bytes this block holds."""
        return min(self.block_bytes, self.content_bytes - number * self.block_bytes)


def is_sealed(beginning: bytes) -> bool:
    """Whether these first bytes of a file are those of a sealed segment."""
    return beginning[_SKIPPABLE_BYTES:BEGINNING_BYTES] == SEALED_MAGIC


def pack(
    content: bytes,
    *,
    first_position: int,
    last_position: int,
    last_frame_digest: bytes,
    block_bytes: int = BLOCK_BYTES,
) -> bytes:
    """The sealed file of this plain segment, which is not empty."""
    packed = [
        zstd.compress(content[start : start + block_bytes], options=_OPTIONS)
        for start in range(0, len(content), block_bytes)
    ]
    size = _HEAD.size + len(packed) * _BLOCK.size + _SUM.size
    head = _HEAD.pack(
        _SKIPPABLE,
        size - _SKIPPABLE_BYTES,
        SEALED_MAGIC,
        VERSION,
        block_bytes,
        first_position,
        last_position,
        len(content),
        hashlib.sha256(content).digest(),
        last_frame_digest,
        len(packed),
        0,
    )
    head += b"".join(_BLOCK.pack(len(block), zlib.crc32(block)) for block in packed)
    return b"".join([head, _SUM.pack(zlib.crc32(head)), *packed])


def header_bytes(beginning: bytes) -> int:
    """The size of the header that begins like this.  Raises `Damage`."""
    if len(beginning) < BEGINNING_BYTES:
        raise Damage(0, f"{len(beginning)} bytes are no header of a sealed segment")
    if not is_sealed(beginning):
        raise Damage(0, f"has {beginning[8:16]!r} at byte 8 instead of {SEALED_MAGIC!r}")
    magic, rest = struct.unpack_from("<II", beginning)
    size: int = rest + _SKIPPABLE_BYTES
    if magic != _SKIPPABLE or not _HEAD.size + _SUM.size < size <= HEADER_BYTES_MAX:
        raise Damage(0, f"starts with {beginning[:8].hex()}, which no sealed segment does")
    return size


def unpack_header(data: bytes) -> SealedHeader:
    """The header that these bytes begin with.  Raises `Damage`."""
    size = header_bytes(data)
    if len(data) < size:
        raise Damage(0, f"a header of {size} bytes is cut after {len(data)}")
    end = size - _SUM.size
    if _SUM.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        raise Damage(0, "the header's check sum does not match")
    fields = _HEAD.unpack_from(data)
    version, block_bytes, first, last, content_bytes, digest, last_digest, count, _ = fields[3:]
    if version != VERSION:
        raise Damage(0, f"version {version} of the sealed format is not {VERSION}")
    if (
        not 0 < block_bytes <= BLOCK_BYTES_MAX
        or count != -(-content_bytes // block_bytes)
        or end != _HEAD.size + count * _BLOCK.size
    ):
        raise Damage(0, f"{count} blocks of {block_bytes} bytes do not make {content_bytes}")
    blocks, offset = [], size
    for length, checksum in _BLOCK.iter_unpack(data[_HEAD.size : end]):
        blocks.append(Block(offset, length, checksum))
        offset += length
    return SealedHeader(first, last, content_bytes, block_bytes, digest, last_digest, tuple(blocks))


def unpack_block(header: SealedHeader, number: int, packed: bytes) -> bytes:
    """The plain bytes of one block.  Raises `Damage`."""
    block, size = header.blocks[number], header.content_of(number)
    if len(packed) != block.size:
        raise Damage(block.offset, f"a block of {block.size} bytes is cut after {len(packed)}")
    if zlib.crc32(packed) != block.checksum:
        raise Damage(block.offset, "the block's check sum does not match")
    unpacker = zstd.ZstdDecompressor()
    try:
        # Bounded, so that a forged block cannot take all memory.
        content = unpacker.decompress(packed, max_length=size + 1)
    except zstd.ZstdError as error:
        raise Damage(block.offset, f"the block cannot be unpacked: {error}") from error
    if len(content) != size or not unpacker.eof or unpacker.unused_data:
        raise Damage(block.offset, f"the block does not unpack to {size} bytes")
    return content


def unpack(data: bytes) -> tuple[SealedHeader, bytes]:
    """Header and plain segment of a whole sealed file, everything checked.  Raises `Damage`."""
    header = unpack_header(data)
    content = b"".join(
        unpack_block(header, number, data[block.offset : block.offset + block.size])
        for number, block in enumerate(header.blocks)
    )
    if len(data) != header.file_bytes:
        extra = len(data) - header.file_bytes
        raise Damage(header.file_bytes, f"{extra} bytes follow the last block")
    if hashlib.sha256(content).digest() != header.content_digest:
        raise Damage(0, "the content's check sum does not match")
    return header, content


def blocks_of(header: SealedHeader, *, offset: int, size: int) -> Sequence[int]:
    """The numbers of the blocks that hold these plain bytes."""
    return range(offset // header.block_bytes, -(-(offset + size) // header.block_bytes))
