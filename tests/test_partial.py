"""What is written has its name when it is whole, and before that stands in nobody's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.partial import SUFFIX, partial


def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    """Until then what stood there can be read."""
    output = tmp_path / "x"
    output.write_text("old")
    with partial(output) as path:
        path.write_text("new")
        assert output.read_text() == "old"
    assert output.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_a_folder_takes_the_place_of_an_empty_one(tmp_path: Path) -> None:
    """Whoever made it beforehand finds everything in it."""
    output = tmp_path / "x"
    output.mkdir()
    with partial(output) as path:
        path.mkdir()
        (path / "part").write_text("one")
        assert list(output.iterdir()) == []
    assert (output / "part").read_text() == "one"
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_cut_off_is_gone(tmp_path: Path, kind: str) -> None:
    """After an error nothing is left; what a killed process left does not get into the next."""
    output = tmp_path / "x"
    remains = tmp_path / f"x{SUFFIX}"
    remains.mkdir()
    (remains / "of the last time").write_text("half")

    def write_half() -> None:
        with partial(output) as path:
            assert not path.exists()
            if kind == "folder":
                path.mkdir()
            (path / "part" if kind == "folder" else path).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_link_leads_to_what_is_written(tmp_path: Path) -> None:
    """It stays a link."""
    (tmp_path / "x").symlink_to("y")
    with partial(tmp_path / "x") as path:
        path.write_text("one")
    assert (tmp_path / "x").is_symlink()
    assert (tmp_path / "y").read_text() == "one"


def test_a_device_is_written_as_it_is() -> None:
    """It has no other name, and nobody could put something in its place."""
    with partial(Path("/dev/null")) as path:
        assert path == Path("/dev/null")
