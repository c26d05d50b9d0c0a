"""Memory that two processes share: the owner's segment and a writer's mapping of it.

Owns the header page, the seals, and the order in which views and maps are let go.
It must not know grants, parties or tickets.
"""

import fcntl
import hmac
import mmap
import os
import re
import secrets
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.dataplane import Descriptor
from engine.dataplane_errors import DescriptorMalformed, PeerMismatch, PlaneMisused

HEADER_BYTES = 4_096
INCARNATION_BYTES_MAX = 256
KEY_BYTES = 32

_MAGIC = b"CUSTODY\x01"
_HEADER = struct.Struct(f"<8sQ{KEY_BYTES}sH{INCARNATION_BYTES_MAX}s")
_ENDPOINT = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes = npt.NDArray[np.uint8]
Copy = Callable[[Bytes, Bytes], None]


def copy_bytes(target: Bytes, source: Bytes) -> None:
    """Copy `source` over `target`; numpy lets other threads run meanwhile."""
    np.copyto(target, source)


def as_bytes(buffer: memoryview) -> Bytes:
    """View a contiguous buffer as bytes, without copying."""
    if not buffer.contiguous or buffer.nbytes == 0:
        raise PlaneMisused("a region must be contiguous and not empty")
    return np.frombuffer(buffer, dtype=np.uint8)


class Segment:
    """A pool's memory: a sealed memfd, one header page, then `size_bytes` usable bytes.

    The header carries a magic, the size, a random key and the incarnation, so that a writer that
    opens a recycled path or descriptor number finds out.
    """

    def __init__(self, size_bytes: int, *, incarnation: str) -> None:
        name = incarnation.encode()
        if size_bytes <= 0 or len(name) > INCARNATION_BYTES_MAX:
            raise PlaneMisused(
                f"a segment needs more than 0 bytes ({size_bytes}) and an incarnation of at most "
                f"{INCARNATION_BYTES_MAX} bytes ({len(name)})"
            )
        self.size_bytes = size_bytes
        self.incarnation = incarnation
        self.key = secrets.token_bytes(KEY_BYTES)
        self._fd = os.memfd_create("custody-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, HEADER_BYTES + size_bytes)
        # Without the seals, a writer that truncates the file kills the owner by SIGBUS.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self._fd, HEADER_BYTES + size_bytes)
        _HEADER.pack_into(self._map, 0, _MAGIC, size_bytes, self.key, len(name), name)
        self._whole = memoryview(self._map)
        self.buffer = self._whole[HEADER_BYTES:]

    @property
    def endpoint(self) -> str:
        """The path by which processes of the same user on this host open the segment."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Unmap the segment; raises `PlaneMisused` while a tensor or view still uses it."""
        if self._fd < 0:
            return
        try:
            self.buffer.release()
            self._whole.release()
            self._map.close()
        except BufferError:
            raise PlaneMisused("the segment is still in use; release its tensors first") from None
        os.close(self._fd)
        self._fd = -1


def create_segment(size_bytes: int, *, incarnation: str) -> Segment:
    """Make zeroed pool memory for one incarnation, for `torch.frombuffer(segment.buffer, ...)`."""
    return Segment(size_bytes, incarnation=incarnation)


class Mapping:
    """A writer's mapping of a peer's segment."""

    def __init__(self, descriptor: Descriptor) -> None:
        if _ENDPOINT.fullmatch(descriptor.endpoint) is None:
            raise DescriptorMalformed(f"{descriptor.endpoint!r} is not /proc/<pid>/fd/<fd>")
        total = HEADER_BYTES + descriptor.pool_bytes
        try:
            fd = os.open(descriptor.endpoint, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            raise PeerMismatch(endpoint=descriptor.endpoint, why=str(error.strerror)) from None
        try:
            actual = os.fstat(fd).st_size
            if actual != total:
                why = f"it has {actual} bytes, published were {total}"
                raise PeerMismatch(endpoint=descriptor.endpoint, why=why)
            self._map = mmap.mmap(fd, total)
        except (OSError, ValueError) as error:
            raise PeerMismatch(endpoint=descriptor.endpoint, why=str(error)) from None
        finally:
            os.close(fd)
        # A forked child must not inherit write access that outlives this process.
        self._map.madvise(mmap.MADV_DONTFORK)
        try:
            self._check(descriptor)
        except PeerMismatch:
            self._map.close()
            raise
        self.pool: Bytes | None = np.frombuffer(self._map, dtype=np.uint8, offset=HEADER_BYTES)

    def _check(self, descriptor: Descriptor) -> None:
        magic, size, key, name_bytes, name = _HEADER.unpack_from(self._map, 0)
        wrong = [
            what
            for what, same in (
                ("magic", magic == _MAGIC),
                ("size", size == descriptor.pool_bytes),
                ("incarnation", name[:name_bytes] == descriptor.incarnation.encode()),
                ("key", hmac.compare_digest(key, bytes.fromhex(descriptor.key))),
            )
            if not same
        ]
        if wrong:
            raise PeerMismatch(endpoint=descriptor.endpoint, why=f"other {', '.join(wrong)}")

    def close(self) -> bool:
        """Unmap; False while a copy still holds the mapping."""
        self.pool = None
        try:
            self._map.close()
        except BufferError:
            return False
        return True
