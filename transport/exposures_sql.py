"""Who was exposed to whom, asked of Parquet in SQL: out of core, and with the pass's own verdict.

Owns: what is reduced in DuckDB, and which entries the ordered pass still has to see.
Must not know: what counts as exposed; `lifecycle.forensics_exposures` defines it.

`assets/exposures.sql` clears every request that it can clear for certain.  What is left goes
through the pass, with the entries of whoever wrote on the same pages before, and both add up.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import attrs

from lifecycle.forensics_exposures import Inquiry
from lifecycle.forensics_story import Story
from lifecycle.forensics_sums import (
    SPEED_FACTOR,
    SPEED_SAMPLES_MIN,
    length_symptom,
    lengths_differ,
    speed_symptom,
    summed,
    wait_of,
)
from lifecycle.forensics_values import Exposures, Missing, Others, Symptom
from lifecycle.ids import FLEET, RequestId
from lifecycle.wording import counted
from transport.aside import DiskAside
from transport.jsonlines import UnreadableLog
from transport.parquet import quoted
from transport.parquet_read import ParquetCapture
from transport.replaying import found_in, inquired

SHARE_MOST = 0.5
"""Where more of the requests than this are needed, the pass over everything is the shorter way."""

TOLD_ENTRIES = 10_000
"""After so many entries the pass over everything says again how far it is."""


@attrs.frozen
class Answered:
    """The answer, and how much of it the tables gave.

    `open_questions` of `requests` were left to the pass, which saw the entries of `needed`;
    `sql` is false where it saw everything.
    """

    exposures: Exposures
    sql: bool
    requests: int = 0
    open_questions: int = 0
    needed: int = 0


def script() -> str:
    """The views and tables, over the file that the variable `log` names."""
    return (files("transport") / "assets" / "exposures.sql").read_text(encoding="utf-8")


def exposures_of(
    capture: ParquetCapture,
    *,
    share_most: float = SHARE_MOST,
    told: Callable[[str], object] = lambda _: None,
) -> Answered:
    """The answer for a file that has not been read yet; `told` hears each step as it begins.

    Raises `UnreadableLog`.
    """
    import duckdb

    asked = _Question(capture, told)
    try:
        if asked.reduce(share_most):
            return asked.answer()
    except (duckdb.ConversionException, duckdb.OutOfRangeException):
        # Another system's numbers may be larger than a database adds up; the pass takes any.
        pass
    except duckdb.Error as error:
        reason = f"{error}; --memory-limit and --temporary say what it may use"
        raise UnreadableLog(0, f"{capture.path}: DuckDB gives no answer: {reason}") from error
    # From the beginning again: a survey may have ended halfway.
    capture.begin_again()
    inquiry = Inquiry(from_the_beginning=capture.claims_whole, shelf=DiskAside())
    for _ in inquired(capture, inquiry):
        if capture.entries_read % TOLD_ENTRIES == 0:
            told(f"tables clear too few: {counted(capture.entries_read, 'entry', ',')} read")
    found = found_in(capture, inquiry)
    return Answered(found, sql=False, requests=found.requests)


class _Question:
    """One file's tables and what follows from them."""

    def __init__(self, capture: ParquetCapture, told: Callable[[str], object]) -> None:
        self.capture = capture
        self.told = told
        self.connection = capture.connection
        self.claims_whole = capture.claims_whole
        self.losses: list[int] = []
        self.gaps: list[Missing] = []
        self.counts = (0, 0, 0)

    def one(self, query: str) -> tuple[int, ...]:
        (row,) = self.connection.execute(query).fetchall()
        return row

    # --- In SQL -----------------------------------------------------------------------------------

    def reduce(self, share_most: float) -> bool:
        """Make the tables; false where they are no shorter way."""
        self.told("looking for what is missing")
        self.losses = self.capture.survey()
        self.gaps = self.capture.gaps()
        unlocated = (not self.capture.whole and not self.gaps) or any(
            gap.last is None for gap in self.gaps
        )
        run = self.connection.execute
        run(f"SET VARIABLE log = {quoted(self.capture.name)}")
        run(f"SET VARIABLE unlocated = {unlocated}")
        run("CREATE OR REPLACE TEMP TABLE gaps (gap_first BIGINT, gap_last BIGINT)")
        located = [gap for gap in self.gaps if gap.last is not None]
        run(
            "INSERT INTO gaps SELECT unnest($first), unnest($last)",
            {"first": [gap.first for gap in located], "last": [gap.last for gap in located]},
        )
        statements = self.connection.extract_statements(script())
        for number, statement in enumerate(statements, start=1):
            self.told(f"step {number} of {len(statements)}")
            run(statement)
        if self.one("SELECT count(*) FROM pools WHERE odd")[0]:
            return False
        sums = self.one(
            "SELECT (SELECT count(*) FROM stories), (SELECT count(*) FROM open_questions), "
            "(SELECT count(*) FROM needed)"
        )
        requests, left, needed = sums
        self.counts = (requests, left, needed)
        return needed <= requests * share_most

    # --- What is left to the pass -----------------------------------------------------------------

    def answer(self) -> Answered:
        self.told(f"judging {counted(self.counts[1], 'open question', ',')}")
        inquiry, places = self._inquiry()
        self.told("adding up")
        others = self._others(inquiry, places)
        found = summed(
            inquiry,
            missing=self.gaps,
            missing_ns=self.capture.missing_ns,
            unknown=self.capture.unplaced,
            whole=self.capture.whole,
            others=others,
        )
        requests, left, needed = self.counts
        return Answered(found, sql=True, requests=requests, open_questions=left, needed=needed)

    def _inquiry(self) -> tuple[Inquiry, dict[RequestId, int]]:
        """The pass over the entries that are needed, and where each open request begins."""
        opened = {
            row[0] for row in self.connection.execute("SELECT r FROM open_questions").fetchall()
        }
        self.connection.execute(
            "CREATE OR REPLACE TEMP TABLE wanted AS SELECT place FROM entries "
            "WHERE of_fleet OR r IN (SELECT r FROM needed)"
        )
        low, high = self.one("SELECT coalesce(min(place), 0), coalesce(max(place), 0) FROM wanted")
        inquiry = Inquiry(from_the_beginning=self.claims_whole)
        places: dict[RequestId, int] = {}
        losses = iter([*self.losses, None])
        loss = next(losses)
        condition = (
            f"file_row_number BETWEEN {low} AND {high} "
            "AND file_row_number IN (SELECT place FROM wanted)"
        )
        for place, r, position, entry in self.capture.placed(condition):
            while loss is not None and loss <= place:
                inquiry.lose()
                loss = next(losses)
            inquiry.take(position, entry)
            if r in opened:
                places.setdefault(entry.request, place)
        # The others were cleared, and are there for what they wrote.
        inquiry.stories = {name: inquiry.stories[name] for name in places if name != FLEET}
        (proved,) = self.one(
            "SELECT coalesce(bool_or(proved), false) FROM verdicts WHERE NOT broken"
        )
        inquiry.any_verified = inquiry.any_verified or bool(proved)
        return inquiry, places

    def _others(self, inquiry: Inquiry, places: dict[RequestId, int]) -> Others:
        """Sums over everybody whom the tables cleared."""
        self.connection.execute(
            "CREATE OR REPLACE TEMP TABLE cleared AS SELECT * FROM verdicts ANTI JOIN "
            "open_questions USING (r)"
        )
        entries, first_ns, last_ns = self.one(
            "SELECT count(*), coalesce(arg_min(time_ns, place) FILTER (time_ns > 0), 0), "
            "coalesce(max(time_ns), 0) FROM entries"
        )
        requests, answers, tokens, end_ns = self.one(
            "SELECT count(*), count(*) FILTER (answered), max(prompt_tokens) FILTER (answered), "
            "max(end_ns) FILTER (answered) FROM cleared"
        )
        stories = list(inquiry.stories.values())
        return Others(
            entries=entries,
            first_ns=first_ns,
            last_ns=last_ns,
            requests=requests,
            answers=answers,
            cleared_most=(tokens, end_ns) if answers else None,
            symptoms=(*self._lengths(stories, places), *self._speeds(stories, places)),
        )

    def _lengths(self, stories: list[Story], places: dict[RequestId, int]) -> list[Symptom]:
        found = [
            (
                places[one.request],
                length_symptom(one.request, handed=one.prefilled, declared=one.prompt_tokens),
            )
            for one in stories
            if lengths_differ(one)
        ]
        cleared = self.connection.execute(
            "SELECT first_place, request, handed_over, prompt_tokens FROM cleared "
            "JOIN entries ON place = first_place WHERE answered AND handed_over > 0 "
            "AND abs(prompt_tokens - handed_over) > 1"
        ).fetchall()
        found += [
            (place, length_symptom(RequestId(request), handed=handed, declared=declared))
            for place, request, handed, declared in cleared
        ]
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def _speeds(self, stories: list[Story], places: dict[RequestId, int]) -> list[Symptom]:
        run = self.connection.execute
        run(
            "CREATE OR REPLACE TEMP TABLE waits AS SELECT first_place, prompt_tokens AS tokens, "
            "first_token_ns - first_ns AS wait FROM cleared "
            "WHERE answered AND first_token_ns > first_ns"
        )
        waited = [story for story in stories if wait_of(story)]
        columns = {
            "place": [places[story.request] for story in waited],
            "tokens": [story.prompt_tokens for story in waited],
            "wait": [wait_of(story) for story in waited],
        }
        run("INSERT INTO waits SELECT unnest($place), unnest($tokens), unnest($wait)", columns)
        (count,) = self.one("SELECT count(*) FROM waits")
        if count < SPEED_SAMPLES_MIN:
            return []
        (middle,) = self.one(
            f"SELECT tokens FROM waits ORDER BY tokens LIMIT 1 OFFSET {count // 2}"
        )
        speed = "tokens::HUGEINT * 1000000000 // wait"
        (long,) = self.one(f"SELECT count(*) FROM waits WHERE tokens >= {middle}")
        (usual,) = self.one(
            f"SELECT greatest(1, {speed}) AS speed FROM waits WHERE tokens >= {middle} "
            f"ORDER BY speed LIMIT 1 OFFSET {long // 2}"
        )
        found = run(
            f"SELECT request, tokens, wait FROM waits JOIN entries ON place = first_place "
            f"WHERE tokens >= {middle} AND {speed} > {usual * SPEED_FACTOR} ORDER BY first_place"
        ).fetchall()
        return [
            speed_symptom(RequestId(request), tokens=tokens, wait_ns=wait, usual=usual)
            for request, tokens, wait in found
        ]
