"""The rules of the house, as functions over source text and file lists.

Each checker returns one sentence for each breach, so that a test can show it to fail on a small
example and to pass on this repository.  Run as a program it reports the largest modules and
functions.

Owns: what may import what, what a pure module may use, how long things may be.
Must not know: what any module does.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lifecycle", "kernels", "engine", "transport")
GENERATED = Path("transport/pb")

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 90
# Modules that may be longer, each with its own limit and its reason.
LONGER_MODULES: Mapping[str, tuple[int, str]] = {
    "lifecycle/events.py": (500, "the whole vocabulary of both logs is read in one place"),
}

# Imports go one way: a package may import itself and what stands here.
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "lifecycle": frozenset(),
    "kernels": frozenset(),
    "engine": frozenset({"lifecycle", "kernels"}),
    "transport": frozenset({"lifecycle", "kernels", "engine"}),
}
# Nothing that serves a request imports what only builds or tests it.
OUTSIDE = frozenset({"tests", "property_tests", "tools", "scripts", "conftest"})
# The outside world is `transport`'s; an engine is handed what it needs.
TRANSPORT_ONLY = frozenset(
    {"cyclopts", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "http"}
    | {"rich", "socket", "subprocess", "urllib"}
)

PURE_STDLIB = frozenset(
    {"__future__", "array", "bisect", "collections", "collections.abc", "enum", "functools"}
    | {"heapq", "itertools", "math", "operator", "struct", "typing"}
)
LIFECYCLE_LIBRARIES = frozenset({"attr", "attrs"})
# Kernels keep dataclasses, which torch and Triton understand, where the lifecycle has attrs.
# Numba, and the instruction builder beneath it, compile the decode step on CPUs.
KERNELS_LIBRARIES = frozenset(
    {"torch", "triton", "numba", "llvmlite", "dataclasses", "contextlib", "importlib"}
)

FORBIDDEN_CALLS = frozenset(
    {"__import__", "breakpoint", "compile", "eval", "exec", "input", "open", "print"}
)
# Worlds and their explorers draw what happens next, from a seed that they are given.
_SEEDED_MODULE = re.compile(r"(^|[._])(world|worlds|explore|explorer|explorers|walk)([._]|$)")

# Written in parts, so that this file does not contain them.
_REGISTRIES = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("huggingface", "co"),
        ("npmjs", "org"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("anaconda", "org"),
        ("ghcr", "io"),
        ("docker", "io"),
        ("quay", "io"),
    )
)
_MACHINE_PATH = re.compile(r"(?<![\w.~)}-])/(?:home|root|Users|work|opt|srv|mnt)/\w")


def module_name(path: Path) -> str:
    """`engine/pool.py` is `engine.pool`; a package's `__init__.py` is the package."""
    parts = list(path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, *, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute module name of every import, inside functions too.

    `package` is the one that relative imports start from.  `from a import b` gives `a` and, since
    `b` may be a module, `a.b`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _package_of(path: Path) -> str:
    return ".".join(path.parent.parts)


def direction_breaches(source: str, *, path: Path) -> list[str]:
    """Imports that go against transport → engine → (lifecycle | kernels)."""
    own = path.parts[0]
    allowed = MAY_IMPORT[own] | {own}
    ours = set(PACKAGES) | OUTSIDE
    breaches = set()
    for line, name in imports(source, package=_package_of(path)):
        root = name.split(".")[0]
        if root in ours and root not in allowed:
            breaches.add(f"{path}:{line}: {own} must not import {root}")
        if root in TRANSPORT_ONLY and own != "transport":
            breaches.add(f"{path}:{line}: only transport may import {root}")
    return sorted(breaches)


def foreign_imports(source: str, *, path: Path, libraries: frozenset[str]) -> list[str]:
    """Imports beyond the pure part of the standard library, the named libraries, and itself."""
    own = path.parts[0]
    seeded = _SEEDED_MODULE.search(module_name(path)) is not None
    breaches = set()
    for line, name in imports(source, package=_package_of(path)):
        root = name.split(".")[0]
        if root == own or root in libraries or root in PURE_STDLIB:
            continue
        if root == "random" and seeded:
            continue
        breaches.add(f"{path}:{line}: {root} is not on the list of what {own} may import")
    return sorted(breaches)


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def impurities(source: str, *, path: Path) -> list[str]:
    """Async code, input and output, and randomness without an explicit seed."""
    breaches = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await):
            breaches.append(f"{path}:{node.lineno}: asynchronous code")
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            # A function taken out of the module would draw from its hidden, unseeded state.
            if any(alias.name != "Random" for alias in node.names):
                breaches.append(f"{path}:{node.lineno}: only random.Random may be used")
        elif isinstance(node, ast.Call):
            name = _called(node)
            if name in FORBIDDEN_CALLS:
                breaches.append(f"{path}:{node.lineno}: calls {name}()")
            elif name in {"random.Random", "Random"} and not (node.args or node.keywords):
                breaches.append(f"{path}:{node.lineno}: random.Random() without a seed")
            elif name.startswith("random.") and name != "random.Random":
                breaches.append(f"{path}:{node.lineno}: {name}() draws from hidden state")
    return sorted(breaches)


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length in lines of every function, nested ones too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def size_breaches(source: str, *, path: Path) -> list[str]:
    """Modules and functions over their limits, with both numbers."""
    lines = source.count("\n")
    breaches = []
    most, _ = LONGER_MODULES.get(path.as_posix(), (MODULE_LINES_MAX, ""))
    if lines > most:
        breaches.append(f"{path}: {lines} lines, at most {most}")
    breaches += [
        f"{path}:{line}: {name}() has {length} lines, at most {FUNCTION_LINES_MAX}"
        for name, line, length in functions(source)
        if length > FUNCTION_LINES_MAX
    ]
    return breaches


def machine_breaches(text: str, *, path: Path) -> list[str]:
    """Registry hosts and absolute paths of one machine: they hold nowhere else."""
    breaches = []
    for number, line in enumerate(text.splitlines(), start=1):
        breaches += [f"{path}:{number}: names {host}" for host in _REGISTRIES if host in line]
        if found := _MACHINE_PATH.search(line):
            breaches.append(f"{path}:{number}: the path {found.group()}... of one machine")
    return breaches


def root_breaches(names: Iterable[str], *, distribution: str) -> list[str]:
    """Top-level names in a wheel other than exactly the four packages and its metadata."""
    roots = {name.split("/")[0] for name in names}
    expected = {*PACKAGES, f"{distribution}.dist-info"}
    return [f"the wheel lacks {name}" for name in sorted(expected - roots)] + [
        f"the wheel must not contain {name}" for name in sorted(roots - expected)
    ]


def sources(*folders: str) -> list[Path]:
    """Python files below these folders, relative to the repository, without generated code."""
    return [
        path.relative_to(ROOT)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if GENERATED not in path.relative_to(ROOT).parents
    ]


def tracked_files() -> list[Path]:
    """Files that git tracks, or that it would track once added, relative to the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = sorted(set(listed.split("\0")) - {""})
    return [Path(name) for name in names if (ROOT / name).is_file()]


def report(*, top: int = 10) -> str:
    """The largest modules and functions, and the lines of each package."""
    paths = sources(*PACKAGES, "tools", "tests", "property_tests")
    texts = {path: (ROOT / path).read_text() for path in paths}
    lines = ["Lines by folder:"]
    for folder in (*PACKAGES, "tools", "tests", "property_tests"):
        total = sum(text.count("\n") for path, text in texts.items() if path.parts[0] == folder)
        lines.append(f"{total:7}  {folder}")
    modules = sorted(((text.count("\n"), str(path)) for path, text in texts.items()), reverse=True)
    lines += [f"Largest modules (at most {MODULE_LINES_MAX} outside tests):"]
    lines += [f"{length:7}  {name}" for length, name in modules[:top]]
    longest = sorted(
        (
            (length, f"{path}:{line} {name}()")
            for path, text in texts.items()
            for name, line, length in functions(text)
        ),
        reverse=True,
    )
    lines += [f"Largest functions (at most {FUNCTION_LINES_MAX} outside tests):"]
    lines += [f"{length:7}  {name}" for length, name in longest[:top]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
    sys.exit(0)
