"""Bundles: others can check one, and one changed byte is named with its file."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from engine.store import Stored
from lifecycle.ids import FLEET
from tests.handmade import ONE, TWO
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import first_answered, short_handoff
from transport import bundle, cli
from transport.stores.segments import SegmentStore

SECRET_TENANT = "tenant"


def keys(folder: Path, kind: Any = Ed25519PrivateKey) -> tuple[Path, Path]:
    """A private and a public key as files."""
    key = kind.generate()
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", short_handoff(first_answered()).entries)


def made(log: Path, *flags: str) -> Path:
    """The archive of the log."""
    output = log.with_name("bundle.zip")
    assert cli.run(["bundle", str(log), "--output", str(output), *flags]) == 0
    return output


def checked(
    path: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.run(["bundle", "verify", str(path), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def rewritten(path: Path, change: Mapping[str, bytes | None]) -> Path:
    """The archive with files replaced, added, or left out (None)."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for name, data in change.items():
        if data is None:
            del files[name]
        else:
            files[name] = data
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def member(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)


def summed(path: Path, name: str, data: bytes) -> Path:
    """The archive with another file, whose sum is in the manifest."""
    manifest = json.loads(member(path, "manifest.json"))
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest()}
    return rewritten(path, {name: data, "manifest.json": json.dumps(manifest).encode()})


def test_a_signed_bundle_verifies(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums, signature and commitments hold, and the verdicts are found anew."""
    private, public = keys(tmp_path)
    path = made(log, "--sign", str(private))
    code, said = checked(path, capsys, "--key", str(public))
    assert (code, said["problems"]) == (0, [])
    assert said["signature_checked"] is True
    assert said["verdict"]["affected"] == {"least": 1, "most": 1}
    assert said["verdict"]["violations"] == 1


def test_another_key_is_refused(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signature of somebody else is a problem of the manifest."""
    path = made(log, "--sign", str(keys(tmp_path)[0]))
    code, said = checked(path, capsys, "--key", str(keys(tmp_path)[1]))
    assert code == 1
    assert said["problems"] == ["manifest.json: the signature is not that of this manifest"]
    assert cli.run(["bundle", "verify", str(path), "--key", str(keys(tmp_path)[1])]) == 1
    assert "not signed" not in capsys.readouterr().out


def test_a_missing_signature_is_a_problem_where_one_is_wanted(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--key` an unsigned archive does not pass."""
    code, said = checked(made(log), capsys, "--key", str(keys(tmp_path)[1]))
    assert code == 1
    assert said["problems"][0].startswith("manifest.sig")


def test_one_changed_byte_names_its_file(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In every file of the archive."""
    with zipfile.ZipFile(made(log)) as archive:
        names = archive.namelist()
    assert {"log.jsonl", "verdicts.json", "timeline.html", "lifecycle.binpb"} <= set(names)
    for name in names:
        if name == "manifest.json":
            continue
        path = made(log)
        data = member(path, name)
        middle = len(data) // 2
        rewritten(path, {name: data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]})
        code, said = checked(path, capsys)
        assert code == 1
        assert any(problem.startswith(f"{name}: ") for problem in said["problems"]), name


def test_a_rewritten_manifest_breaks_the_signature(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever changes a file and its sum cannot sign."""
    path = made(log, "--sign", str(keys(tmp_path)[0]))
    manifest = member(path, "manifest.json").replace(b'"complete": true', b'"complete": false')
    code, said = checked(rewritten(path, {"manifest.json": manifest}), capsys)
    assert code == 1
    assert any(problem.startswith("manifest.json: ") for problem in said["problems"])


def test_missing_and_added_files_are_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest names all files, and no others."""
    code, said = checked(rewritten(made(log), {"fleet.json": None, "more.txt": b"x"}), capsys)
    assert code == 1
    assert said["problems"] == ["fleet.json: is missing", "more.txt: is not in the manifest"]


def test_verdicts_that_the_log_does_not_bear_are_named(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict with a right sum is compared with what the log says."""
    path = made(log)
    verdicts = member(path, "verdicts.json").replace(b'"least": 1', b'"least": 0')
    code, said = checked(summed(path, "verdicts.json", verdicts), capsys)
    assert code == 1
    assert said["problems"] == ["verdicts.json: exposures is not what the log says"]


def test_identities_are_redacted_and_separable(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tenants and endpoints are nowhere but in the side file, without which all still holds."""
    path = made(log)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name not in ("identities.json", "README.txt", "lifecycle.binpb", "timeline.html"):
                assert f'"{SECRET_TENANT}"'.encode() not in archive.read(name).replace(
                    b'"tenant":', b""
                ), name
        clear = json.loads(archive.read("identities.json"))
    assert {one["value"] for one in clear.values()} >= {SECRET_TENANT, "endpoint"}
    code, said = checked(rewritten(path, {"identities.json": None}), capsys)
    assert (code, said["identities"]) == (0, False)


def test_a_false_clear_value_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The side file cannot be made to say that a commitment stands for somebody else."""
    path = made(log)
    data = member(path, "identities.json").replace(b'"value": "tenant"', b'"value": "other"')
    code, said = checked(rewritten(path, {"identities.json": data}), capsys)
    assert code == 1
    assert any("does not stand for its value" in problem for problem in said["problems"])


def test_clear_values_can_be_kept(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--clear` leaves the entries as they are, and makes no side file."""
    path = made(log, "--clear")
    assert b'"tenant":"tenant"' in member(path, "log.jsonl")
    assert checked(path, capsys)[0] == 0
    with zipfile.ZipFile(path) as archive:
        assert "identities.json" not in archive.namelist()


def test_a_slice_says_that_it_is_one(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request's bundle holds it and the fleet, and claims no completeness."""
    path = made(log, "--request", TWO)
    lines = [json.loads(line) for line in member(path, "log.jsonl").splitlines()[1:]]
    assert {line["request"] for line in lines} == {TWO, FLEET}
    assert json.loads(member(path, "manifest.json"))["complete"] is False
    code, said = checked(path, capsys)
    assert (code, said["verdict"]["complete"]) == (0, False)
    assert cli.run(["bundle", "verify", str(path)]) == 0
    assert "the log in it is incomplete" in capsys.readouterr().out
    whole = made(log)
    capsys.readouterr()
    assert cli.run(["bundle", "verify", str(whole)]) == 0
    assert "incomplete" not in capsys.readouterr().out
    window = made(log, "--from", "4", "--to", "9")
    lines = [json.loads(line) for line in member(window, "log.jsonl").splitlines()[1:]]
    assert {line["position"] for line in lines if line["request"] == ONE} == set(range(4, 10))


def test_a_request_that_is_not_in_the_log_gives_no_archive(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An archive without it would look like its evidence; as in every verb, that is exit code 1."""
    output = tmp_path / "none.zip"
    asked = ["bundle", str(log), "--output", str(output), "--request", TWO]
    assert cli.run([*asked, "--request", TWO[:-1] + "9"]) == 1
    assert f"no entry of request {TWO[:-1]}9; near it are {TWO}" in capsys.readouterr().err
    assert not output.exists()


def test_the_chain_of_segments_is_in_the_manifest(tmp_path: Path) -> None:
    """The hash with which a folder of segments ends is what `log verify --head` takes."""
    store = SegmentStore(tmp_path / "log")
    counts: dict[str, int] = {}
    for one in (Stored(n, e) for n, e in first_answered().entries):
        at = counts.get(one.entry.request, 0)
        store.append(one.entry.request, at, [one.entry])
        counts[one.entry.request] = at + 1
    store.close()
    output = tmp_path / "b.zip"
    assert cli.run(["bundle", str(tmp_path / "log"), "--output", str(output)]) == 0
    head = json.loads(member(output, "manifest.json"))["chain"]["head"]
    assert cli.run(["log", "verify", str(tmp_path / "log"), "--head", head]) == 0


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04nonsense"])
def test_what_is_no_archive_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is exit code 5 and a sentence."""
    path = tmp_path / "x.zip"
    path.write_bytes(content)
    assert cli.run(["bundle", "verify", str(path)]) == 5
    assert capsys.readouterr().err.startswith("custody: ")


def test_an_archive_without_a_manifest_is_refused(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another archive is no bundle."""
    path = rewritten(made(log), {"manifest.json": b"{}"})
    assert cli.run(["bundle", "verify", str(path)]) == 5
    assert "no manifest" in capsys.readouterr().err


def test_a_key_of_another_kind_is_a_usage_error(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only Ed25519 keys sign."""
    private, _ = keys(tmp_path, X25519PrivateKey)
    assert cli.run(["bundle", str(log), "--sign", str(private)]) == 2
    assert "no Ed25519 key" in capsys.readouterr().err
    private.write_bytes(b"nonsense")
    assert cli.run(["bundle", str(log), "--sign", str(private)]) == 2


@pytest.mark.parametrize("content", [b"", b"nonsense", "X25519"])
def test_no_signature_passes_for_that_of_an_unusable_key(
    content: bytes | str, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key file that holds no Ed25519 key is a usage error that names it, whoever signed."""
    path = made(log, "--sign", str(keys(tmp_path)[0]))
    given = tmp_path / "given.pub"
    if isinstance(content, str):
        keys(tmp_path, X25519PrivateKey)[1].rename(given)
    else:
        given.write_bytes(content)
    capsys.readouterr()
    assert cli.run(["bundle", "verify", str(path), "--key", str(given)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"custody: {given}: the public key ")


def test_an_unusable_key_in_the_archive_is_a_problem_of_the_archive(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody used it wrongly: the check goes on, and does not pass."""
    path = made(log, "--sign", str(keys(tmp_path)[0]))
    code, said = checked(rewritten(path, {"manifest.pub": b""}), capsys)
    assert (code, said["signed_by"], len(said["problems"])) == (1, None, 1)
    assert said["problems"][0].startswith("manifest.json: the public key cannot be read")


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the file is refused as no bundle."""
    capsys.readouterr()
    assert cli.run(["bundle", "verify", str(path)]) == 5
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("separable", [5, None, "identities.json", {}])
def test_a_manifest_of_other_types_is_refused(
    separable: object, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What may be missing is a list."""
    path = made(log)
    manifest = json.loads(member(path, "manifest.json")) | {"separable": separable}
    rewritten(path, {"fleet.json": None, "manifest.json": json.dumps(manifest).encode()})
    assert '"separable" is no list' in refusal(path, capsys)


@pytest.mark.parametrize("name", ["log.jsonl", "verdicts.json"])
def test_log_and_verdicts_cannot_be_left_out(
    name: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by calling them separable nor by not naming them."""
    path = made(log)
    manifest = json.loads(member(path, "manifest.json")) | {"separable": [name]}
    rewritten(path, {name: None, "manifest.json": json.dumps(manifest).encode()})
    assert checked(path, capsys)[1]["problems"] == [f"{name}: is missing"]
    del manifest["files"][name]
    rewritten(path, {"manifest.json": json.dumps(manifest).encode()})
    assert "does not name" in refusal(path, capsys)


def test_json_that_is_nested_too_deep_is_refused(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the manifest it is no bundle; in another file it is that file's problem."""
    for name in ("log.jsonl", "verdicts.json", "identities.json"):
        code, said = checked(summed(made(log), name, DEEP), capsys)
        assert (code, len(said["problems"])) == (1, 1), name
        assert "recursion" in said["problems"][0], name
    assert "recursion" in refusal(rewritten(made(log), {"manifest.json": DEEP}), capsys)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_file_packed_by_another_method_is_named(
    method: int, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged or not: only what `bundle` itself uses is unpacked."""
    # The sum is that of no bytes, for which such a file must not be taken.
    path = rewritten(summed(made(log), "fleet.json", b""), {"fleet.json": None})
    with zipfile.ZipFile(path, "a", method) as archive:
        archive.writestr("fleet.json", b"[]")
    code, said = checked(path, capsys)
    assert code == 1
    assert said["problems"] == ["fleet.json: cannot be unpacked"]


@pytest.mark.parametrize(("offset", "value"), [(8, 1), (6, 99), (10, 99)])
def test_an_encrypted_file_or_one_of_another_version_is_refused(
    offset: int, value: int, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag, the version and the method that the directory of the archive bears."""
    path = made(log)
    data = bytearray(path.read_bytes())
    at = data.index(b"manifest.json", data.index(b"PK\x01\x02")) - 46
    data[at + offset] = value
    path.write_bytes(data)
    assert refusal(path, capsys)


def test_one_changed_byte_of_the_archive_is_no_traceback(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it is in the archive's own directory, a check ends with a code of its own."""
    data = made(log).read_bytes()
    for position in range(data.index(b"PK\x01\x02"), len(data)):
        for bits in (1, 0x80, 0xFF):
            path = tmp_path / "changed.zip"
            path.write_bytes(
                data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]
            )
            try:
                bundle._unpacked(path)
            except bundle.NoBundle:
                continue
    capsys.readouterr()


def test_an_offset_beyond_all_files_is_that_of_a_damaged_file(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even one that no file position can hold."""
    path = made(log)
    with zipfile.ZipFile(path, "a") as archive:
        archive.getinfo("fleet.json").header_offset = (1 << 63) + 1
        archive.writestr("manifest.sig", b"")
    code, said = checked(path, capsys)
    assert code == 1
    assert "fleet.json: cannot be unpacked" in said["problems"]


def test_what_would_unpack_to_too_much_is_refused_unread(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum of all sizes and the number of files are bounded, and no such bundle is made."""
    path = made(log)
    many = tmp_path / "many.zip"
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(bundle.FILES_MAX + 1):
            archive.writestr(str(number), b"")
    assert f"holds {bundle.FILES_MAX + 1} files" in refusal(many, capsys)
    with zipfile.ZipFile(path) as archive:
        size = sum(one.file_size for one in archive.infolist())
    monkeypatch.setattr(bundle, "BYTES_MAX", size)
    assert checked(path, capsys)[0] == 0
    monkeypatch.setattr(bundle, "BYTES_MAX", size - 1)
    assert f"holds {size} bytes, more than {size - 1}" in refusal(path, capsys)
    monkeypatch.setattr(bundle, "BYTES_MAX", 1000)
    assert cli.run(["bundle", str(log), "--output", str(tmp_path / "large.zip")]) == 2
    assert not (tmp_path / "large.zip").exists()


def test_no_name_in_an_archive_passes_for_a_line_of_the_check(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line ends, control characters and lone surrogates of foreign names are spelt."""
    path = made(log)
    manifest = json.loads(member(path, "manifest.json"))
    manifest["files"]["\ud800"] = {}
    rewritten(path, {"a\nintact\x1b": b"", "manifest.json": json.dumps(manifest).encode()})
    capsys.readouterr()
    assert cli.run(["bundle", "verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["\\ud800: is missing", "a\\u000aintact\\u001b: is not in the manifest"]
    assert "intact" not in lines
