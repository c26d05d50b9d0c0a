"""Trace files on disk: one file, and a corpus of them.

Owns: names of files, reading, and which kept traces another one makes needless.
Must not know: what a trace does.

A file is named after its content, so corpora of several machines are merged by copying.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import attrs

from engine.trace import MAGIC, SUFFIX, TraceError, TraceFile, dumps, loads
from transport.commands_shared import UnreadableFile

FOUND = "found"
WHOLE = "whole"
SEEN = "seen"
FINDINGS = Path("fuzz-findings")
"""Where findings go when no corpus is named."""


class UnreadableTrace(UnreadableFile):
    """This file is no trace."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def is_trace(path: Path) -> bool:
    """Whether the file says that it is a trace; a folder or a missing file is none."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC.encode()
    except OSError:
        return False


def read_trace(path: Path) -> TraceFile:
    """Read one file. Raises UnreadableTrace."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableTrace(path, (error.strerror or str(error)).lower()) from error
    except (TraceError, UnicodeDecodeError) as error:
        raise UnreadableTrace(path, str(error)) from error


def file_name(kind: str, file: TraceFile) -> str:
    """A name that says what it is and is a function of the content."""
    plain = attrs.evolve(file, seed=0, title="")
    digest = hashlib.sha256(dumps(plain).encode()).hexdigest()[:10]
    return f"{kind}-{file.finding}-{digest}{SUFFIX}" if file.finding else f"{kind}-{digest}{SUFFIX}"


def write_trace(folder: Path, kind: str, file: TraceFile) -> Path:
    """Write one file, named after its content; the same trace is the same file."""
    return _write(folder / file_name(kind, file), file)


def write_named(folder: Path, name: str, file: TraceFile) -> Path:
    """Write one file under a name of its own, over what was there."""
    return _write(folder / f"{name}{SUFFIX}", file)


def _write(path: Path, file: TraceFile) -> Path:
    """A file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(dumps(file), encoding="utf-8")
    draft.replace(path)
    return path


def corpus_paths(folder: Path) -> list[Path]:
    """Its traces, in the order of their names; none when there is no such folder yet."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def needless(reached: Iterable[tuple[Path, frozenset[str]]]) -> list[Path]:
    """Traces whose every situation is reached by others that stay: the merge of corpora."""
    left = sorted(reached, key=lambda pair: (-len(pair[1]), pair[0].name))
    seen: set[str] = set()
    gone = []
    for path, features in left:
        if features <= seen:
            gone.append(path)
        seen |= features
    return gone
