"""What is written has its name when it is whole, and before that stands in nobody's way."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import first_answered
from transport import cli
from transport.partial import partial_file, partial_folder

Partial = Callable[[Path], AbstractContextManager[Path]]


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


# --- A file -----------------------------------------------------------------------------------


def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    """Until then what stood there can be read; who may read it stays as it was."""
    output = tmp_path / "x"
    output.write_text("old")
    output.chmod(0o600)
    with partial_file(output) as path:
        path.write_text("new")
        assert output.read_text() == "old"
    assert output.read_text() == "new"
    assert output.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["x"]


def test_two_that_write_one_file_never_meet(tmp_path: Path) -> None:
    """Each is whole; the name belongs to the one that ended last."""
    output = tmp_path / "x"
    with ExitStack() as first, ExitStack() as second:
        one = first.enter_context(partial_file(output))
        two = second.enter_context(partial_file(output))
        two.write_text("half")
        one.write_text("one")
        first.close()
        assert output.read_text() == "one"
        two.write_text("two")
        second.close()
        assert output.read_text() == "two"
    assert names(tmp_path) == ["x"]


def test_a_link_leads_to_what_is_written(tmp_path: Path) -> None:
    """It stays a link."""
    (tmp_path / "x").symlink_to("y")
    with partial_file(tmp_path / "x") as path:
        path.write_text("one")
    assert (tmp_path / "x").is_symlink()
    assert (tmp_path / "y").read_text() == "one"


@pytest.mark.parametrize("device", ["/dev/null", "/dev/stdout", "/proc/self/fd/1"])
def test_a_device_is_written_as_it_is(device: str) -> None:
    """It has no other name, and nobody could put something in its place."""
    with partial_file(Path(device)) as path:
        assert path == Path(device)


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    """Whoever reads it waits for no other file."""
    os.mkfifo(tmp_path / "x")
    with partial_file(tmp_path / "x") as path:
        assert path == tmp_path / "x"


def test_a_name_may_be_as_long_as_a_name_can_be(tmp_path: Path) -> None:
    """What it is called meanwhile is no longer than that."""
    output = tmp_path / ("\N{EURO SIGN}" * 85)
    with partial_file(output) as path:
        path.write_text("one")
    assert output.read_text() == "one"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """It is refused under its own name before anything is read."""
    with (
        pytest.raises(IsADirectoryError, match=str(tmp_path)),
        partial_file(tmp_path),
    ):
        raise AssertionError


# --- A folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_is_filled_when_everything_is_there(tmp_path: Path, there: bool) -> None:
    """One that was made beforehand stays that folder, with what belongs to it."""
    output = tmp_path / "a" / "x"
    if there:
        output.mkdir(parents=True, mode=0o700)
    before = output.stat() if there else None
    with partial_folder(output) as path:
        for name in ("1", "2"):
            (path / name).write_text(name)
        assert not {"1", "2"} & set(names(output))
    assert [(output / name).read_text() for name in names(output)] == ["1", "2"]
    if before is not None:
        assert (output.stat().st_ino, output.stat().st_mode) == (before.st_ino, before.st_mode)


# --- Both -------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [partial_file, partial_folder])
@pytest.mark.parametrize("there", [False, True])
def test_what_is_cut_off_is_gone_and_nothing_else(
    tmp_path: Path, partial: Partial, there: bool
) -> None:
    """What others have put beside it stays, whatever its name."""
    output = tmp_path / "x"
    if there and partial is partial_folder:
        output.mkdir()
    elif there:
        output.write_text("old")
    (tmp_path / "x.partial").mkdir()
    before = names(tmp_path)

    def write_half() -> None:
        with partial(output) as path:
            (path / "1" if partial is partial_folder else path).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert names(tmp_path) == before
    assert not there or partial is partial_folder or output.read_text() == "old"
    assert not output.is_dir() or names(output) == []


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_is_read_is_never_removed(tmp_path: Path, form: str) -> None:
    """The log that an export reads may have any name, also that of what was cut off."""
    source = write_log(tmp_path / "x.partial", first_answered().entries)
    before = source.read_bytes()
    flags = ["--log", str(source), "--output", str(tmp_path / "x"), "--format", form]
    assert cli.run(["log", "export", *flags]) == 0
    assert source.read_bytes() == before
    assert names(tmp_path) == ["x", "x.partial"]
