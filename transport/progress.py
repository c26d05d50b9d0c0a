"""Progress on a terminal: loading a model, waiting for the first token, reading logs.

Owns: what is drawn on standard error, and that nothing is drawn where nobody looks.
Must not know: what is loaded or waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from lifecycle.wording import counted
from transport.commands_shared import note
from transport.spelling import spelt

if TYPE_CHECKING:
    from rich.progress import Progress, Task, TaskID


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
            self._bars = _progress(bar=True)
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
    """A spinner with a sentence and the time that has passed, until `stop`.

    Nothing is printed on standard output before that.
    """

    def __init__(self, sentence: str = "waiting for admission", *, shown: bool) -> None:
        self._sentence = sentence
        self._bar = _progress(bar=False, said=self.sentence) if shown else None

    def sentence(self) -> str:
        """What is waited for now; asked by the thread that draws, a few times a second."""
        return self._sentence

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task("", total=None)
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
        self._sentence = sentence

    def stop(self) -> None:
        """Remove it; again is nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Searching(Waiting):
    """A waiting line of a search, whose last sentence Ctrl-C leaves there for everybody.

    It is how far the search came, and from which seed.
    """

    def __init__(self, sentence: str, *, shown: bool) -> None:
        super().__init__(sentence, shown=shown and on_terminal())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if isinstance(error, KeyboardInterrupt):
            note(f"custody: interrupted: {self.sentence()}")


class Read(Protocol):
    """A log that is being read."""

    entries_read: int


class Reading(Waiting):
    """A waiting line that asks logs how many of their entries have been read.

    Whoever reads is not slowed down by it: the thread that draws looks now and then.
    """

    def __init__(self, *logs: Read, shown: bool) -> None:
        self._logs = logs
        super().__init__("", shown=shown and on_terminal())

    def sentence(self) -> str:
        """How many entries there were, and what is made of them once `say` has said it."""
        count = counted(sum(log.entries_read for log in self._logs), "entry", ",")
        return f"{count}, {self._sentence}" if self._sentence else count


class Asking(Waiting):
    """A waiting line with a step of a database's work, and how much of the step is done."""

    def __init__(self, percent: Callable[[], float | None], *, shown: bool) -> None:
        """`percent` may be asked by another thread, and is None where nobody knows."""
        self._percent = percent
        super().__init__("asking the database", shown=shown and on_terminal())

    def sentence(self) -> str:
        """The step, and its share if the database tells it."""
        percent = self._percent()
        return self._sentence if percent is None else f"{self._sentence}, {percent:.0f} %"


def _progress(*, bar: bool, said: Callable[[], str] | None = None) -> Progress:
    """Bars with their names, or a spinner beside whatever `said` says when it is drawn."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Said(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(spelt(task.description if said is None else said()))

    shape = (Said(), BarColumn()) if bar else (SpinnerColumn(), Said())
    return Progress(
        *shape,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        # What is written to standard output is data, and never a line of this drawing.
        redirect_stdout=False,
    )
