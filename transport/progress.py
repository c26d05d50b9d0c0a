"""Progress on a terminal: loading a model, waiting for the first token, counting entries.

Owns: what is drawn on standard error, and that nothing is drawn where nobody looks.
Must not know: what is loaded or waited for.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lifecycle.wording import counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def on_terminal() -> bool:
    """Whether a person looks at standard error."""
    return sys.stderr.isatty()


class LoadingBar:
    """A bar for each stage of loading; the first call draws it, `close` removes it."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._stages: dict[str, TaskID] = {}
        self._closed = False

    def __call__(self, stage: str, share: float) -> None:
        """How far a stage is, from 0 to 1; may come from a worker thread."""
        if self._closed:
            return
        if self._bars is None:
            self._bars = _progress("{task.description}", bar=True)
            self._bars.start()
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(stage, total=1.0)
        self._bars.update(self._stages[stage], completed=share)

    def close(self) -> None:
        """Draw nothing any more; again is nothing."""
        self._closed = True
        if self._bars is not None:
            self._bars.stop()


class Waiting:
    """A spinner with a sentence and the time that has passed, until `stop`."""

    def __init__(self, sentence: str = "waiting for admission", *, shown: bool) -> None:
        self._bar = _progress("{task.description}", bar=False) if shown else None
        self._sentence = sentence
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._sentence, total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def say(self, sentence: str) -> None:
        """What is waited for now."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=sentence)

    def stop(self) -> None:
        """Remove it; again is nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Counting(Waiting):
    """A waiting line that says how many entries have been seen, until `stop`."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__("reading", shown=shown and on_terminal())

    def __call__(self, count: int) -> None:
        """So many by now."""
        self.say(counted(count, "entry", ","))


def _progress(text: str, *, bar: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shape = (TextColumn(text), BarColumn()) if bar else (SpinnerColumn(), TextColumn(text))
    return Progress(*shape, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
