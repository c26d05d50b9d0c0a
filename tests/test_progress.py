"""Claims about progress: who sees it, what it leaves alone, and that nothing of it stays behind."""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from pathlib import Path

import pytest

from tests import handmade
from tests.captures import FOLDER
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_parquet import converted
from tests.test_simulate import MOONCAKE
from transport import cli
from transport.exposures_sql import exposures_of
from transport.parquet_read import open_parquet
from transport.progress import Asking, Reading

SEGMENTS = FOLDER / "schema-1" / "segments"
SHOW_CURSOR = "\x1b[?25h"

READERS = (
    "replay {log}",
    "replay {log} --at 3",
    "exposures {log}",
    "explain {one} --log {log}",
    "timeline {log} --output {new}",
    "diff {log} {log}",
    "slice {log} --output {new}",
    "bundle {log} --clear --output {new}",
    "metrics {log}",
    "log index {log} --output {new}",
    "log verify {log}",
    "log ls --log {log}",
    "log export --log {log} --format parquet --output {new}",
    "log export --log {log} --output {new}",
    "log show {one} --log {log}",
)
"""Verbs that count a log's entries while they read."""

WAITERS = (
    ("exposures {table}", "adding up"),
    ("bundle verify {archive}", "checking"),
)
"""Verbs that say what they do."""

SEARCHES = (
    ("fuzz --simulate --seed 3 --runs 1", "seed 3: 1 run, "),
    ("fuzz --seed 3 --runs 1", "1 run, "),
    ("simulate --trace {trace} --preset sound-8k", "simulating "),
)
"""Verbs that print how long they took."""


class Screen(io.StringIO):
    """A terminal that remembers everything."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal of the usual size."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Screen()


def run_before(stream: io.StringIO, words: Sequence[str]) -> int:
    """Run a verb whose standard error this is, which it leaves as it was."""
    with redirect_stderr(stream):
        code = cli.run(words)
        assert sys.stderr is stream
    return code


@pytest.fixture
def places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """A log in several forms, a request of it, and where something new may be written."""
    archive, new = tmp_path / "archive.zip", tmp_path / "new"
    assert cli.run(["bundle", str(SEGMENTS), "--output", str(archive)]) == 0
    assert cli.run(["log", "ls", "--log", str(SEGMENTS), "--limit", "1"]) == 0
    table = converted(SEGMENTS, tmp_path / "log.parquet")
    one = capsys.readouterr().out.splitlines()[-2].split()[0]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(MOONCAKE)
    return {
        "log": str(SEGMENTS),
        "table": str(table),
        "archive": str(archive),
        "new": str(new),
        "trace": str(trace),
        "one": one,
    }


def nothing_is_drawn_any_more() -> bool:
    """Whether no thread but this one goes on; one that draws may need a moment to see its end."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("rich."):
            thread.join(30)
            assert not thread.is_alive()
    return True


@pytest.mark.parametrize(
    ("verb", "shown"), [*((verb, "entries") for verb in READERS), *WAITERS], ids=lambda one: one
)
def test_progress_is_for_a_terminal_and_leaves_the_data_alone(
    verb: str,
    shown: str,
    places: dict[str, str],
    screen: Screen,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A person sees how far it is; what is printed and the exit code are those of a pipe."""
    words = shlex.split(verb.format(**places))
    pipe = io.StringIO()
    off = run_before(pipe, words), capsys.readouterr().out
    assert "\x1b" not in pipe.getvalue()
    assert (run_before(screen, words), capsys.readouterr().out) == off
    seen = screen.getvalue()
    assert shown in seen
    assert SHOW_CURSOR in seen
    assert nothing_is_drawn_any_more()
    screen.truncate(0)
    run_before(screen, [*words, "--json"])
    assert "\x1b" not in screen.getvalue()


@pytest.mark.parametrize(("verb", "shown"), SEARCHES)
def test_a_search_says_how_far_it_is(
    verb: str, shown: str, places: dict[str, str], screen: Screen
) -> None:
    """On a terminal, and never beside one JSON document."""
    words = shlex.split(verb.format(**places))
    assert run_before(screen, words) == 0
    assert shown in screen.getvalue()
    assert nothing_is_drawn_any_more()
    screen.truncate(0)
    assert run_before(screen, [*words, "--json"]) == 0
    assert screen.getvalue() == ""


def test_what_fails_takes_its_progress_away(screen: Screen, places: dict[str, str]) -> None:
    """The complaint stands behind the last thing drawn, and nothing goes on drawing."""
    assert run_before(screen, ["explain", "none", "--log", places["log"]]) == 1
    drawn, cursor, said = screen.getvalue().rpartition(SHOW_CURSOR)
    assert "entries" in drawn
    assert cursor
    assert "custody: the log holds no entry of request none" in said
    assert nothing_is_drawn_any_more()


class Counted:
    """A log of which so much was read."""

    def __init__(self, entries_read: int) -> None:
        self.entries_read = entries_read


def test_entries_of_several_logs_are_counted_together() -> None:
    """Two logs that are read side by side are one progress; then comes what is made of them."""
    reading = Reading(Counted(1), Counted(1_234), shown=False)
    assert reading.sentence() == "1,235 entries"
    reading.say("drawing")
    assert reading.sentence() == "1,235 entries, drawing"


@pytest.mark.parametrize(("percent", "said"), [(None, "step 2"), (41.7, "step 2, 42 %")])
def test_a_database_tells_its_share_where_it_knows_one(percent: float | None, said: str) -> None:
    """Nothing is made up where nobody knows how far it is."""
    asking = Asking(lambda: percent, shown=False)
    asking.say("step 2")
    assert asking.sentence() == said


def test_the_steps_over_parquet_have_names(tmp_path: Path) -> None:
    """Each statement of the script is a step, between the survey and the sums."""
    steps: list[str] = []
    with ExitStack() as stack:
        table = open_parquet(converted(SEGMENTS, tmp_path / "log.parquet"), stack)
        assert exposures_of(table, share_most=2, told=steps.append).sql
        assert table.percent() is None
    first, *tables, judged, last = steps
    assert (first, last) == ("looking for what is missing", "adding up")
    assert judged.startswith("judging ")
    assert tables == [f"step {n} of {len(tables)}" for n in range(1, len(tables) + 1)]


def ask_without_end(table: Path, number: signal.Signals) -> None:
    """Ask what nobody waits for, and send the signal once that has begun."""
    with ExitStack() as stack:
        capture = open_parquet(table, stack)

        def send() -> None:
            while not capture.percent():
                pass
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        capture.connection.execute(
            "SELECT count(*) FROM range(1000000000000) AS t(i) WHERE hash(i) = 1"
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_query_as_it_ends_everything(
    number: signal.Signals, tmp_path: Path
) -> None:
    """DuckDB would make its own error of it, with a traceback and the wrong exit code."""

    class Ended(BaseException):
        pass

    def handler(_number: int, _frame: object) -> None:
        raise Ended

    table = converted(
        write_log(tmp_path / "log.jsonl", handmade.Log().entries), tmp_path / "log.parquet"
    )
    before = signal.signal(number, handler)
    try:
        with pytest.raises(Ended):
            ask_without_end(table, number)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
