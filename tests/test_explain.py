"""`custody explain`: one request in plain sentences, and whether its client was told the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lifecycle.events import Aborted, Admitted, Cause, RejectCode, Released
from lifecycle.ids import FLEET
from tests import handmade
from tests.driver import Driver, Sizes
from tests.handmade import DESTINATION, ONE, SOURCE, TWO
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import Careless, first_answered, short_handoff
from transport import cli
from transport.explain import near
from transport.forensics_text import HTTP_DUE


def told(
    log: Any, request: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and document."""
    write_log(path, log.entries)
    code = cli.run(["explain", request, "--log", str(path)])
    text = capsys.readouterr().out
    assert cli.run(["explain", request, "--log", str(path), "--json"]) == code
    return code, text, json.loads(capsys.readouterr().out)


def test_an_answer_is_told_as_the_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of the admission, places, writes, drains, comparison, end: each is a sentence."""
    code, text, document = told(first_answered(), ONE, tmp_path / "x", capsys)
    assert (code, document["true"], document["told"]) == (0, True, "answer")
    for part in (
        "7 prompt tokens and at most 10 new ones are 17 in a context of 64",
        "d0 needed 5 pages, booked 3, and had 16 free of 16",
        "d0/1/0 took pages 0 to 2 as destination for tokens 0 to 11, and let p0/1/0 write there",
        "Tokens 0 to 5 were written to pages 0 to 1.",
        "p0/1/0 said that nothing of it is on its way",
        "compared 2 headers and 2 digests on 2 pages",
        "All of tokens 0 to 5 were written into d0/1/0/1, none is missing.",
        "The client was told success (HTTP 200) with 3 new tokens",
        "That was the truth.",
    ):
        assert part in text, part


def test_the_fleet_is_nobodys_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its entries bear an id as a request's do, and that id is no request in the log."""
    write_log(tmp_path / "x", first_answered().entries)
    assert cli.run(["explain", FLEET, "--log", str(tmp_path / "x")]) == 1
    assert f"no entry of request {FLEET}" in capsys.readouterr().err


def test_the_story_runs_forward_and_the_verdict_stands_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Positions never go back above the heading, under which the broken rule and the end are named."""
    log = first_answered()
    short_handoff(log).say(Released(SOURCE), request=TWO)
    _, text, document = told(log, TWO, tmp_path / "x", capsys)
    _, *story = text.splitlines()
    above, below = story[: story.index("verdict")], story[story.index("verdict") :]
    positions = [one["position"] for one in document["sentences"][: len(above)]]
    assert positions == sorted(positions)
    assert "was given back." in above[-1]
    assert "It broke the rule " in below[-2]
    assert "The client was told success" in below[-1]


def test_a_foreign_read_is_no_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose bytes were read, which rule was broken, and that success was not the truth."""
    code, text, document = told(short_handoff(first_answered()), TWO, tmp_path / "x", capsys)
    assert (code, document["true"]) == (0, False)
    assert "4 to 5 were never written for it" in text
    assert f"It read 2 tokens that it had not written: 2 of {ONE}" in text
    assert "It broke the rule " in text
    assert "That was not the truth: the answer was made from others' bytes." in text
    assert document["exposure"]["reads"][0]["writer"] == ONE


def test_nobody_is_accused_by_a_log_with_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever entry is missing of sound answers, no client was certainly lied to."""
    driver = Driver(Sizes(pages=8)).pair()
    requests = [driver.submit(prompt=9, new=4), driver.submit(prompt=17, new=4)]
    driver.run()
    for lost in range(1, len(driver.log)):
        entries = [one for one in driver.log if one[0] != lost]
        write_log(tmp_path / "x", entries)
        for request in requests:
            assert cli.run(["explain", request, "--log", str(tmp_path / "x")]) == 5
            text = capsys.readouterr().out
            assert "not the truth" not in text, lost
            kinds = [type(e.event) for _, e in entries if e.request == request]
            if Admitted not in kinds:
                assert "How long its prompt was, this log does not say." in text
                assert "none is missing" not in text


def test_a_rejection_is_told_with_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why, with what was compared, and what that is over HTTP."""
    log = handmade.Log().add(handmade.rejected(), request=TWO)
    code, text, document = told(log, TWO, tmp_path / "x", capsys)
    assert (code, document["told"], document["true"]) == (0, "refusal", True)
    assert "It was rejected (queue_full)" in text
    assert "the prompt has 7 tokens" in text
    assert "The client was refused (HTTP 429). That was the truth." in text


def test_a_rejection_that_is_answered_was_due_as_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer where the log holds a rejection says which status was due."""
    log = Careless()
    log.say(handmade.rejected(), handmade.destination(), handmade.drained())
    log.say(handmade.finished(), Released(DESTINATION))
    _, text, document = told(log, ONE, tmp_path / "x", capsys)
    assert document["true"] is False
    assert "That was not the truth: it had been rejected, 429 was due." in text


def test_an_abort_says_who_reported_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cause, reporter and message, and what became of the pages."""
    log = handmade.written(handmade.Log())
    log.add(Aborted(Cause.DEADLINE, "scheduler", "too late"), Released(SOURCE))
    _, text, _ = told(log, ONE, tmp_path / "x", capsys)
    assert "told of an error without an answer: deadline, reported by scheduler: too late" in text
    assert "The source grant p0/1/0/1 was given back." in text


def test_an_open_request_was_told_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log that ends before the request does gives no verdict."""
    log = handmade.written(handmade.Log())
    _, text, document = told(log, ONE, tmp_path / "x", capsys)
    assert document["true"] is None
    assert text.splitlines()[-1].endswith("In this log the client was told nothing.")


def test_a_part_of_a_log_is_exit_code_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The story is told as far as it is there."""
    path = write_log(tmp_path / "x", first_answered().entries, complete=False)
    assert cli.run(["explain", ONE, "--log", str(path)]) == 5
    assert "By what there is of this log" in capsys.readouterr().out


@pytest.mark.parametrize("request_id", [ONE[:-1] + "9", ONE[-4:], "nothing at all"])
def test_an_unknown_request_is_answered_with_near_ones(
    request_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and ids that look like it where there are any."""
    path = write_log(tmp_path / "x", short_handoff(first_answered()).entries)
    assert cli.run(["explain", request_id, "--log", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert (ONE in said.err) == (request_id != "nothing at all")


def test_a_part_of_an_id_finds_it() -> None:
    """What contains it is shown, and only for want of that what is spelt alike."""
    assert near("0007", ["x-0001", "x-0007", "x-0071"]) == ["x-0007"]
    assert near("", ["a"]) == []


def test_codes_of_rejections_are_all_known_over_http() -> None:
    """Each code has its status."""
    assert set(HTTP_DUE) == set(RejectCode)
