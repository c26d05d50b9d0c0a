"""Generate `transport/pb` from `proto/custody/v1`, or check that it is up to date.

The schema's files import one another by their public path, `custody/v1/...`, which is what buf,
reflection and other people's clients see.  The generated Python lives in `transport.pb`, because
`custody` is not an import name of this project, so the module path is rewritten in the output:
in import lines and in the module name that each message class reports, and nowhere else.

Owns: every `*_pb2*` file in `transport/pb` and its `__init__.py`.
Must not know: what the messages mean.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
PACKAGE = Path("custody/v1")
OUTPUT = ROOT / "transport" / "pb"

_INIT = (
    '"""Generated from `proto/custody/v1` by `make proto`; edit the schema, never these files."""\n'
)
# Import lines of modules and stubs, and the name that the builder stamps on message classes.
_IMPORT = re.compile(r"^from custody\.v1 import ", re.MULTILINE)
_MODULE = re.compile(r"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')custody\.v1\.")


def rewrite(text: str) -> str:
    """Point the generated code at the package where it lives."""
    text = _IMPORT.sub("from transport.pb import ", text)
    return _MODULE.sub(r"\1transport.pb.", text)


def _serves_nothing(name: str, text: str) -> bool:
    """Whether a gRPC file was made for a schema file without services: only noise."""
    return "_pb2_grpc.py" in name and "Stub" not in text


def generate() -> dict[str, str]:
    """Generated file name to text, made afresh from the schema.

    Raises `subprocess.CalledProcessError` when the compiler refuses the schema.
    """
    protos = sorted((SOURCES / PACKAGE).glob("*.proto"))
    names = [str(PACKAGE / proto.name) for proto in protos]
    # The plug-ins are console scripts of the environment that runs this file.
    search = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory() as folder:
        outputs = [
            f"--{kind}={folder}"
            for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
        ]
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}", *outputs, *names],
            check=True,
            env={**os.environ, "PATH": search},
            stderr=subprocess.PIPE,
            text=True,
        )
        made = {path.name: path.read_text() for path in (Path(folder) / PACKAGE).iterdir()}
    files = {name: rewrite(text) for name, text in made.items() if not _serves_nothing(name, text)}
    return {"__init__.py": _INIT, **dict(sorted(files.items()))}


def differences(*, expected: dict[str, str], folder: Path) -> list[str]:
    """One sentence for each file that is missing, stale or left over."""
    found = {path.name for path in folder.glob("*.py*") if path.is_file()}
    lines = [f"{name} is missing" for name in expected if name not in found]
    lines += [f"{name} has no schema file" for name in sorted(found - expected.keys())]
    for name in sorted(found & expected.keys()):
        if (folder / name).read_text() != expected[name]:
            lines.append(f"{name} is stale")
    return lines


def write(expected: dict[str, str], *, folder: Path) -> None:
    """Make the folder hold exactly these files; untouched ones keep their time stamps."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.py*"):
        if path.name not in expected:
            path.unlink()
    for name, text in expected.items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def main() -> int:
    """Write the files, or with ``--check`` only compare: exit status 1 on a difference."""
    parser = argparse.ArgumentParser(description="Generate transport/pb from proto/custody/v1.")
    parser.add_argument("--check", action="store_true", help="compare and change nothing")
    check: bool = parser.parse_args().check
    try:
        expected = generate()
    except subprocess.CalledProcessError as error:
        print(error.stderr, end="")
        print("The schema does not compile.")
        return 1
    if check:
        stale = differences(expected=expected, folder=OUTPUT)
        for line in stale:
            print(f"transport/pb/{line}")
        print("Run `make proto`." if stale else f"{len(expected)} generated files are up to date.")
        return 1 if stale else 0
    write(expected, folder=OUTPUT)
    print(f"{len(expected)} generated files are in transport/pb.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
