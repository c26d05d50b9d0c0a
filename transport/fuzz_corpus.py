"""A corpus during one search: replayed first, then added to and merged.

Owns: what is kept and what is dropped.
Must not know: how a trace was found.
"""

from __future__ import annotations

from pathlib import Path

from transport.fuzz_files import (
    FINDINGS,
    FOUND,
    SEEN,
    WHOLE,
    corpus_paths,
    needless,
    read_trace,
    write_trace,
)
from transport.fuzz_replay import judge, replay_file
from transport.fuzz_values import Report


class Corpus:
    """A folder of traces, or none: then only findings are written, to `fuzz-findings`."""

    def __init__(self, folder: Path | None) -> None:
        """Nothing is read yet."""
        self.folder = folder
        self.features: frozenset[str] = frozenset()
        self.replayed = 0
        self.kept = 0

    def replay(self) -> list[tuple[Path, str]]:
        """Replay all; returns those that are not as they should be, and drops needless ones.

        Traces of mutants and whole traces beside their reduced ones are left alone.
        Raises UnreadableTrace.
        """
        if self.folder is None:
            return []
        broken: list[tuple[Path, str]] = []
        reached: list[tuple[Path, frozenset[str]]] = []
        for path in corpus_paths(self.folder):
            file = read_trace(path)
            if file.mutant or path.name.startswith(WHOLE):
                continue
            replayed = replay_file(file)
            self.replayed += 1
            verdict = judge(file, replayed)
            features = frozenset(replayed.world.sometimes)
            if not verdict.good:
                broken.append((path, verdict.sentence))
            elif path.name.startswith(SEEN):
                reached.append((path, features))
            self.features |= features
        for path in needless(reached):
            path.unlink()
        return broken

    def add(self, report: Report) -> list[Path]:
        """Keep what was reached anew, and what was found; returns the files of the finding."""
        if self.folder is not None:
            for file, _ in report.kept:
                write_trace(self.folder, SEEN, file)
                self.kept += 1
        if report.finding is None:
            return []
        folder = self.folder or FINDINGS
        return [
            write_trace(folder, FOUND, report.finding.small),
            write_trace(folder, WHOLE, report.finding.whole),
        ]
