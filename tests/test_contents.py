"""A segment that is read by the part has the bytes that it has as a whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from transport.stores import contents, sealed
from transport.stores.contents import FileBytes, SealedBytes
from transport.stores.frames import Content, Damage

DATA = random.Random(5).randbytes(997) + b"here" + bytes(60)


def same(content: Content, data: bytes) -> None:
    """Slices in an order that goes back and forth, and searches that cross every border."""
    draw = random.Random(7)
    assert len(content) == len(data)
    for _ in range(300):
        start, stop = draw.randrange(len(data) + 9), draw.randrange(len(data) + 9)
        assert content[start:stop] == data[start:stop]
        assert content.find(b"here", start) == data.find(b"here", start)
    assert content.find(b"nowhere", 0) == -1


@pytest.mark.parametrize("window", [5, 64, 1 << 18])
def test_a_file_read_by_the_window(
    tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the window, slices and searches are those of the whole file."""
    monkeypatch.setattr(contents, "WINDOW_BYTES", window)
    path = tmp_path / "x"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        same(FileBytes(file), DATA)


def packed(block_bytes: int) -> bytes:
    return sealed.pack(
        DATA,
        first_position=1,
        last_position=2,
        last_frame_digest=bytes(32),
        block_bytes=block_bytes,
    )


@pytest.mark.parametrize("block_bytes", [64, 100, 1 << 20])
def test_a_sealed_segment_read_by_the_block(tmp_path: Path, block_bytes: int) -> None:
    """Slices and searches are those of the plain segment."""
    path = tmp_path / "x.sealed"
    path.write_bytes(packed(block_bytes))
    damaged: list[Damage] = []
    same(SealedBytes(path, damaged=damaged.append), DATA)
    assert damaged == []


def test_a_damaged_block_is_told_and_holds_zeros(tmp_path: Path) -> None:
    """The other blocks are read, and the damage is told with its offset once it is met."""
    data = bytearray(packed(100))
    data[-3] ^= 1
    path = tmp_path / "x.sealed"
    path.write_bytes(data)
    damaged: list[Damage] = []
    content = SealedBytes(path, damaged=damaged.append)
    assert content[0:1000] == DATA[:1000]
    assert damaged == []
    assert content[990 : len(DATA)] == DATA[990:1000] + bytes(len(DATA) - 1000)
    assert len(damaged) == 1
