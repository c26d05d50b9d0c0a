"""Exposures in SQL: over Parquet the answer is the pass's own, whatever the log."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import duckdb
import pytest

from examples.incident.__main__ import FIRST, SECOND
from examples.incident.simulation import Setup, simulate
from lifecycle.events import Released, Transferred
from lifecycle.forensics_exposures import Inquiry
from lifecycle.forensics_story import Story
from lifecycle.ids import FLEET, PageRange
from tests import handmade
from tests.captures import FOLDER
from tests.handmade import ONE, TWO
from tests.odd_logs import odd_log
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import (
    SECOND as SECOND_GRANT,
)
from tests.test_exposures import (
    SECOND_SOURCE,
    Careless,
    first_answered,
    late_write,
    of_two,
    second,
    short_handoff,
    snapshot_of,
)
from tests.test_forensics_bad_input import TABLE, Maker
from tests.test_parquet import converted
from transport import cli, forensics_text
from transport.aside import DiskAside
from transport.exposures_sql import Answered, exposures_of, script
from transport.forensics_read import open_capture
from transport.parquet_read import open_parquet
from transport.replaying import found_in, inquired

EVERYTHING = 9.0
"""More than all requests: the tables are asked however few of them they clear."""


def by_the_pass(log: Path) -> dict[str, Any]:
    """What the ordered pass finds, be all requests in memory or one that is over."""
    shelf: DiskAside[Story] = DiskAside(latest=1)
    plain, thrifty = (pass_over(log, one) for one in (None, shelf))
    assert thrifty == plain
    return plain


def pass_over(log: Path, shelf: DiskAside[Story] | None) -> dict[str, Any]:
    """What one pass finds."""
    with ExitStack() as stack:
        capture = open_capture(log, stack)
        inquiry = Inquiry(from_the_beginning=capture.claims_whole, shelf=shelf)
        for _ in inquired(capture, inquiry):
            pass
        return forensics_text.exposures_object(capture, found_in(capture, inquiry))


def in_sql(table: Path, share_most: float = EVERYTHING) -> tuple[dict[str, Any], Answered]:
    """What SQL and the pass over what is left find."""
    with ExitStack() as stack:
        capture = open_parquet(table, stack)
        answered = exposures_of(capture, share_most=share_most)
        return forensics_text.exposures_object(capture, answered.exposures), answered


def agreed(log: Path, folder: Path) -> Answered:
    """Whether both say the same to the last field."""
    document, answered = in_sql(converted(log, folder / "log.parquet"))
    assert document == by_the_pass(log)
    return answered


# --- Every log that we have -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["segments", "log.jsonl"])
def test_both_agree_on_kept_logs(name: str, tmp_path: Path) -> None:
    """A log of real engines is cleared without the pass, but for whoever was requeued."""
    for folder in sorted(FOLDER.iterdir()):
        answered = agreed(folder / name, tmp_path)
        assert answered.sql
        assert answered.open_questions < answered.requests


def incident(setup: Setup, path: Path) -> Path:
    """The incident's log as JSON Lines of another system."""
    simulate(setup).log.write(path)
    return path


def test_the_published_incident_is_found_in_sql(tmp_path: Path) -> None:
    """155 of 155, and every answer that was cleared was cleared by the tables alone."""
    answered = agreed(incident(FIRST, tmp_path / "x.jsonl"), tmp_path)
    assert answered.sql
    assert answered.open_questions == len(answered.exposures.certain) == 155


def test_late_writes_are_found_in_sql(tmp_path: Path) -> None:
    """The second family, with its bounds."""
    answered = agreed(incident(SECOND, tmp_path / "x.jsonl"), tmp_path)
    assert answered.sql
    assert answered.exposures.affected.most > answered.exposures.affected.least > 0


def landing_late() -> Careless:
    """A reader that compared everything, and a write of somebody else after that."""
    log = Careless()
    log.say(handmade.admitted(), handmade.source(), handmade.destination())
    log.say(handmade.transferred(0, 4), handmade.ABORTED)
    log.say(Released(handmade.SOURCE), Released(handmade.DESTINATION))
    whole_handoff(log, handmade.transferred(grant=SECOND_GRANT))
    log.say(handmade.transferred(4, 6))
    return of_two(log, handmade.finished())


def misplaced() -> Careless:
    """A whole hand-off whose bytes went to other pages than those that are read."""
    elsewhere = attrs.evolve(handmade.transferred(grant=SECOND_GRANT), pages=(PageRange(5, 2),))
    return of_two(whole_handoff(first_answered(), elsewhere), handmade.finished())


def source_reused() -> Careless:
    """Pages that were given back and granted to another request before they were copied."""
    log = Careless()
    log.say(handmade.admitted(), handmade.source(), handmade.destination())
    log.say(Released(handmade.SOURCE))
    log.say(handmade.source(grant=SECOND_SOURCE), request=TWO)
    log.say(handmade.transferred(), handmade.drained(), handmade.verified())
    return log.say(handmade.finished())


def whole_handoff(log: Careless, transferred: Transferred) -> Careless:
    """Request two is handed its prompt over by this write."""
    return of_two(
        log,
        handmade.admitted(),
        handmade.source(grant=SECOND_SOURCE),
        second(),
        transferred,
        handmade.drained(grant=SECOND_GRANT),
        handmade.verified(grants=(SECOND_GRANT,)),
    )


HANDMADE = {
    "short": lambda: short_handoff(first_answered()),
    "door left open": lambda: late_write(Careless(), told=False),
    "late write": lambda: late_write(Careless(), told=True),
    "late write to a reader that compared": landing_late,
    "misplaced": misplaced,
    "source reused": source_reused,
}


@pytest.mark.parametrize("name", HANDMADE)
def test_tables_clear_nobody_whom_the_pass_does_not(name: str, tmp_path: Path) -> None:
    """Each way in which a read goes wrong keeps the reader from being cleared in SQL."""
    log = write_log(tmp_path / "x.jsonl", HANDMADE[name]().entries)
    answered = agreed(log, tmp_path)
    assert answered.sql
    assert answered.exposures.affected.most > 0


BAD = [maker for maker, codes in TABLE.items() if set(codes) != {5}]


@pytest.mark.parametrize("maker", BAD, ids=lambda maker: str(maker.__name__))
def test_both_agree_on_bad_logs(maker: Maker, tmp_path: Path) -> None:
    """Gaps, damage and disorder: the same bounds."""
    agreed(maker(tmp_path), tmp_path)


def test_both_agree_behind_a_snapshot(tmp_path: Path) -> None:
    """Where the beginning was dropped, what stands for it counts in SQL too."""
    answered = agreed(snapshot_of(tmp_path / "log"), tmp_path)
    assert answered.sql
    assert answered.exposures.affected.least == 1


@pytest.mark.parametrize("block", range(4))
def test_both_agree_on_odd_logs(block: int, tmp_path: Path) -> None:
    """Legal or not, whole or not, ours or another system's."""
    for seed in range(block * 8, block * 8 + 8):
        agreed(odd_log(seed, tmp_path / "x.jsonl"), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_both_agree_on_many_odd_logs(tmp_path: Path) -> None:
    """The same for hundreds; some are affected, some in doubt, and most are asked in SQL."""
    found = [agreed(odd_log(seed, tmp_path / "x.jsonl"), tmp_path) for seed in range(100, 300)]
    assert sum(one.sql for one in found) > len(found) * 0.8
    assert any(one.exposures.affected.least for one in found)
    assert any(one.exposures.affected.most > one.exposures.affected.least for one in found)
    assert any(one.open_questions == 0 for one in found)


# --- What is asked how ------------------------------------------------------------------------


def test_where_much_is_open_the_pass_judges_all(tmp_path: Path) -> None:
    """Tables that clear few are no shorter way, and the answer is the same."""
    log = write_log(tmp_path / "x.jsonl", short_handoff(first_answered()).entries)
    table = converted(log, tmp_path / "x.parquet")
    for share_most, sql in ((EVERYTHING, True), (0.0, False)):
        document, answered = in_sql(table, share_most)
        assert answered.sql is sql
        assert document == by_the_pass(log)


def test_numbers_that_no_database_adds_up_are_judged_by_the_pass(tmp_path: Path) -> None:
    """A foreign number of 64 bits is an entry like any other."""
    log = write_log(tmp_path / "x.jsonl", short_handoff(first_answered()).entries)
    text = log.read_text().replace('"source":"custody"', '"source":"other"')
    log.write_text(text.replace('"first_token_ns":', '"first_token_ns":1000000000000000000'))
    answered = agreed(log, tmp_path)
    assert not answered.sql


def test_the_tables_stand_alone(tmp_path: Path) -> None:
    """Whoever has DuckDB and the script can ask on: who held these pages, and when."""
    log = write_log(tmp_path / "x.jsonl", short_handoff(first_answered()).entries)
    table = converted(log, tmp_path / "x.parquet")
    with duckdb.connect() as connection:
        connection.execute(f"SET VARIABLE log = '{table}'")
        connection.execute(script())
        query = "SELECT DISTINCT request FROM holders WHERE engine = 'd0' AND first_page <= 1"
        assert sorted(connection.execute(query).fetchall()) == [(ONE,), (TWO,)]
        left = "SELECT DISTINCT request FROM entries JOIN open_questions USING (r)"
        assert connection.execute(left).fetchall() == [(TWO,)]


def test_the_script_knows_the_fleet() -> None:
    """Its name stands there as it is minted."""
    assert f"request = '{FLEET}' AS of_fleet" in script()


def test_the_verb_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever wants to ask on can have it."""
    assert cli.run(["log", "schema", "--sql"]) == 0
    assert capsys.readouterr().out == script()


# --- The verb ---------------------------------------------------------------------------------


def test_the_verb_says_the_same_of_both_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, document and exit code, with little memory and a folder for the rest."""
    log = write_log(tmp_path / "x.jsonl", short_handoff(first_answered()).entries)
    table = converted(log, tmp_path / "x.parquet")
    means = ["--memory-limit", "200MB", "--temporary", str(tmp_path / "more")]
    for flags in (["--reads"], ["--json"]):
        said = []
        for tokens in ([str(log)], [str(table), *means]):
            assert cli.run(["exposures", *tokens, *flags]) == 1
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]
    assert json.loads(said[0])["affected"] == {"least": 1, "most": 1}


def test_a_name_is_no_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose name DuckDB would take for a pattern, or for the end of a string, is that file."""
    log = write_log(tmp_path / "x.jsonl", short_handoff(first_answered()).entries)
    table = converted(log, tmp_path / "a[1]'*?.parquet")
    assert cli.run(["exposures", str(table)]) == 1
    assert cli.run(["replay", str(table)]) == 1
    assert "affected answers: 1" in capsys.readouterr().out


def test_too_little_memory_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the database cannot do within its limit is a sentence: exit code 5."""
    log = write_log(tmp_path / "x.jsonl", short_handoff(first_answered()).entries)
    table = converted(log, tmp_path / "x.parquet")
    flags = ["--memory-limit", "1MB", "--temporary", "/dev/null/none"]
    assert cli.run(["exposures", str(table), *flags]) == 5
    assert "memory" in capsys.readouterr().err.lower()


def test_means_are_for_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of another log, or of a limit that is none, the verb says what is wrong: exit code 2."""
    log = write_log(tmp_path / "x.jsonl", first_answered().entries)
    assert cli.run(["exposures", str(log), "--memory-limit", "1GB"]) == 2
    table = converted(log, tmp_path / "x.parquet")
    assert cli.run(["exposures", str(table), "--memory-limit", "much"]) == 2
    assert "memory" in capsys.readouterr().err
