"""Entries on disk are the entries that came, in their order, however often they are read."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import attrs
import pytest

from examples.incident.simulation import Setup, simulate
from lifecycle.ids import RequestId
from lifecycle.state import RequestState
from tests.test_cli import bare  # noqa: F401 - a fixture for every test here
from transport import bundle, cli, spool
from transport.aside import DiskAside, NotPutAside
from transport.bench_forensics import Traffic
from transport.spool import BATCH, Spool


@pytest.mark.parametrize("held", [0, 1, 700, 5_000])
def test_what_went_in_comes_out_as_often_as_wanted(held: int) -> None:
    """The same entries at the same positions, also while somebody else is reading them."""
    entries = list(enumerate(Traffic().entries(2_000), start=1))
    kept = Spool(held=held)
    for one in entries:
        kept.append(one)
        assert kept.in_memory <= held + BATCH
    assert len(kept) == len(entries)
    assert list(kept) == entries
    first, second = iter(kept), iter(kept)
    assert list(islice(first, 1_000)) == list(islice(second, 1_000)) == entries[:1_000]
    assert list(first) == list(second) == entries[1_000:]


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """Some answers made of others' bytes, among many sound ones."""
    log = tmp_path / "incident.jsonl"
    simulate(Setup(seed=3, affected=5, sound=40, refused=3)).log.write(log)
    return log


def written(log: Path, folder: Path) -> dict[str, bytes]:
    """What the verbs that read a log several times make of it."""
    folder.mkdir()
    verbs = (
        ["timeline", str(log), "--output", str(folder / "x.html"), "--limit", "60"],
        ["slice", str(log), "--output", str(folder)],
        ["bundle", str(log), "--output", str(folder / "x.zip"), "--clear"],
    )
    for verb in verbs:
        assert cli.run(verb) == 0
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_log_that_does_not_fit_into_memory_gives_the_same_evidence(
    incident: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timeline, slices and bundle are byte for byte those of a log that was held whole."""
    plain = written(incident, tmp_path / "plain")
    monkeypatch.setattr(spool, "HELD_MAX", 3)
    thrifty = written(incident, tmp_path / "thrifty")
    assert len(plain) > 5
    assert thrifty == plain


def test_a_bundle_that_nobody_could_check_is_refused_before_it_is_made(
    incident: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message counts what there is and says how to choose; nothing is written."""
    monkeypatch.setattr(bundle, "BYTES_MAX", 5_000)
    output = tmp_path / "x.zip"
    assert cli.run(["bundle", str(incident), "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert "more than 5000 bytes" in said
    assert "--request" in said
    assert not output.exists()


@contextmanager
def files_of_at_most(limit_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_is_said_with_the_folder_to_change() -> None:
    """Neither a traceback of a database nor an error without a file's name: TMPDIR is named."""
    aside: DiskAside[RequestState] = DiskAside(latest=1)
    kept = Spool(held=0)
    entry = next(Traffic().entries(1))

    def put(count: int) -> None:
        for number in range(count):
            aside.put(RequestState(RequestId(f"{number} {'x' * 100_000}")))

    def append(count: int) -> None:
        for number in range(count):
            request = RequestId(f"{number} {'x' * 1_000}")
            kept.append((number, attrs.evolve(entry, request=request)))

    with files_of_at_most(1 << 16):
        with pytest.raises(NotPutAside, match="TMPDIR"):
            put(400)
        with pytest.raises(NotPutAside, match="TMPDIR"):
            append(2 * BATCH)
