"""`custody log sign` and `log verify`: whether and by whom a log's signatures are good."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.test_bundle import keys
from tests.test_cli import bare  # noqa: F401 - a fixture for every test here
from tests.test_log_verify import EACH, frames_of, made, put, verified
from transport import cli
from transport.head_signature import SUFFIX, checked, read_claim, signature_paths
from transport.stores import segment_files

Said = pytest.CaptureFixture[str]
BATCHES = 9


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    return keys(tmp_path)


@pytest.fixture
def log(tmp_path: Path, pair: tuple[Path, Path], capsys: Said) -> Path:
    """A signed log."""
    folder = made(tmp_path / "log")
    assert cli.run(["log", "sign", str(folder), "--key", str(pair[0])]) == 0
    assert f"signed up to position {BATCHES * EACH}, hash " in capsys.readouterr().out
    return folder


def signatures(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["signatures"]
    return found


def test_a_signed_log_says_by_whom(log: Path, pair: tuple[Path, Path], capsys: Said) -> None:
    """A named key is told from one that only the file itself names; both are fingerprinted."""
    code, text, document = verified(log, capsys)
    assert (code, text.splitlines()[-1]) == (0, "intact")
    assert "by a key that nobody named" in text
    (one,) = signatures(document)
    assert (one["position"], one["named"], one["compared"], one["problem"]) == (27, False, True, "")
    assert one["head"] == document["head"]
    code, text, document = verified(log, capsys, "--key", str(pair[1]))
    assert code == 0
    assert "signed up to position 27 by a given key, fingerprint " in text
    assert signatures(document)[0]["named"]


def test_an_unsigned_log_says_so(tmp_path: Path, pair: tuple[Path, Path], capsys: Said) -> None:
    """It is intact, unless a signature was asked for."""
    folder = made(tmp_path / "log")
    code, text, document = verified(folder, capsys)
    assert (code, signatures(document)) == (0, [])
    assert "not signed" in text
    code, text, _ = verified(folder, capsys, "--key", str(pair[1]))
    assert code == 1
    assert "no signature of this log is by a key that was given" in text


def test_a_signature_by_another_key_is_not_enough(log: Path, tmp_path: Path, capsys: Said) -> None:
    """It holds, and is not the one that was asked for; of several keys one is enough."""
    (tmp_path / "other").mkdir()
    other = keys(tmp_path / "other")
    assert verified(log, capsys, "--key", str(other[1]))[0] == 1
    assert cli.run(["log", "sign", str(log), "--key", str(other[0])]) == 0
    capsys.readouterr()
    assert verified(log, capsys, "--key", str(other[1]))[0] == 0


def test_a_log_that_grew_is_signed_as_far_as_it_was(
    log: Path, tmp_path: Path, capsys: Said
) -> None:
    """The signature holds for its part, and what is not signed is told."""
    parts = frames_of(log)
    put(log, parts[:5])
    for path in signature_paths(log):
        path.unlink()
    assert cli.run(["log", "sign", str(log), "--key", str(keys(tmp_path)[0])]) == 0
    put(log, parts)
    capsys.readouterr()
    code, text, _ = verified(log, capsys)
    assert code == 0
    assert "signed up to position 15 " in text
    assert "positions 16 to 27 are not signed" in text


def test_a_rewritten_log_is_not_the_one_that_was_signed(
    log: Path, tmp_path: Path, capsys: Said
) -> None:
    """A whole chain made anew is intact in itself; the signature tells, and needs no `--head`."""
    other = made(tmp_path / "rewritten", node=1)
    shutil.copy(signature_paths(log)[0], other)
    code, text, document = verified(other, capsys)
    assert code == 1
    assert "it is not the log that was signed" in text
    assert [one["wrong"] for one in document["problems"]] == ["signature"]


def test_a_log_that_was_cut_is_shorter_than_what_was_signed(log: Path, capsys: Said) -> None:
    """A cut at the end of a batch leaves a good chain; the signature knows better."""
    put(log, frames_of(log)[:-1])
    code, text, _ = verified(log, capsys)
    assert code == 1
    assert "the log ends with position 24, signed was position 27" in text


@pytest.mark.parametrize("field", ["position", "head", "signature", "public_key", "format"])
def test_a_changed_signature_is_named(
    log: Path, tmp_path: Path, pair: tuple[Path, Path], field: str, capsys: Said
) -> None:
    """Whatever was changed in the file, it does not hold, and the file is named."""
    (path,) = signature_paths(log)
    content = json.loads(path.read_text())
    (tmp_path / "other").mkdir()
    content[field] = {
        "position": 24,
        "head": "00" * 32,
        "signature": content["signature"][4:],
        "public_key": keys(tmp_path / "other")[1].read_text(),
        "format": "custody.tail",
    }[field]
    path.write_text(json.dumps(content))
    for flags in ((), ("--key", str(pair[1]))):
        code, text, _ = verified(log, capsys, *flags)
        assert code == 1
        assert f"{path.name}: signature: " in text


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"[]", b'{"format": "custody.head"}', b"\xff"]
)
def test_what_is_no_signature_is_named(log: Path, content: bytes, capsys: Said) -> None:
    """It is a problem of its own file; the log's chain is told all the same."""
    (path,) = signature_paths(log)
    path.write_bytes(content)
    code, text, document = verified(log, capsys)
    assert code == 1
    assert f"{path.name}: signature: is no signature" in text
    assert document["entries"] == 27


def test_a_part_of_a_log_is_not_compared(tmp_path: Path, capsys: Said) -> None:
    """Where the signed batch is in none of the segments, nothing is wrong and nothing is shown."""
    folder = made(tmp_path / "log", segment_bytes=1)
    key, public = keys(tmp_path)
    for segment in segment_files.segment_paths(folder)[4:]:
        segment.rename(tmp_path / segment.name)
    assert cli.run(["log", "sign", str(folder), "--key", str(key)]) == 0
    for segment in segment_files.segment_paths(folder):
        segment.unlink()
    for segment in segment_files.segment_paths(tmp_path):
        segment.rename(folder / segment.name)
    capsys.readouterr()
    code, text, document = verified(folder, capsys)
    assert code == 5
    assert "is not in these segments, so nothing compares" in text
    assert not signatures(document)[0]["compared"]
    assert verified(folder, capsys, "--key", str(public))[0] == 1


def test_only_an_intact_log_is_signed(tmp_path: Path, capsys: Said) -> None:
    """Nobody signs what is damaged or has gaps."""
    folder = made(tmp_path / "log")
    key, public = keys(tmp_path)
    parts = frames_of(folder)
    put(folder, [*parts[:3], *parts[4:]])
    assert cli.run(["log", "sign", str(folder), "--key", str(key)]) == 1
    assert "nothing is signed" in capsys.readouterr().err
    assert signature_paths(folder) == []
    put(folder, parts)
    assert cli.run(["log", "sign", str(folder), "--key", str(public)]) == 2
    assert cli.run(["log", "verify", str(folder), "--key", str(key)]) == 2
    odd = tmp_path / "odd"
    odd.mkdir()
    assert cli.run(["log", "sign", str(folder), "--key", str(keys(odd, X25519PrivateKey)[0])]) == 2
    lines = tmp_path / "x.jsonl"
    lines.write_text("")
    assert cli.run(["log", "verify", str(lines), "--key", str(public)]) in (2, 5)


def test_without_the_package_nothing_is_claimed(
    log: Path, pair: tuple[Path, Path], capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain is checked, that signatures were not is told, and `--key` is refused."""
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.run(["log", "verify", str(log), "--json"]) == 0
    said = capsys.readouterr()
    assert "were not checked" in said.err
    assert json.loads(said.out)["signatures"] is None
    assert cli.run(["log", "verify", str(log), "--key", str(pair[1])]) == 2


def test_a_position_within_a_batch_is_no_end(log: Path, pair: tuple[Path, Path]) -> None:
    """What was signed must be where a batch ends."""
    claim = read_claim(log / f"{27:020d}{SUFFIX}")
    (one,) = checked([claim], {}, first=1, last=30, keys=[pair[1].read_bytes()])
    assert "no batch ends at position 27" in one.problem
