"""Claims about a replay that goes on with a running scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.store import Stored
from lifecycle.replay import Replayer
from lifecycle.tally import Tally
from tests.serving import deployment
from tests.test_cli import bare  # noqa: F401 - a fixture for every test here
from tests.test_cli_verbs import Run, answered, model, run  # noqa: F401 - fixtures
from tests.test_exposures import first_answered, short_handoff
from transport.forensics_read import LiveCapture
from transport.replaying import followed

NOBODY = "127.0.0.1:1"


@pytest.mark.anyio
async def test_it_ends_at_a_position_with_a_verdict(model: Path, run: Run) -> None:  # noqa: F811
    """Everything up to there is judged, and nothing behind it is waited for."""
    async with deployment(model) as here:
        request = await answered(here)
        last = (await here.tail_until("released", request=request))[-1].position
        where = ("--follow", "--scheduler", here.address, "--to", str(last))
        said = await run("replay", *where)
        assert (said.code, said.out.splitlines()[-1]) == (0, "clean")
        document = (await run("replay", *where, "--json")).lines[-1]
        assert (document["entries"], document["violations"]) == (last, [])


def test_a_violation_is_told_before_the_next_entry_is_asked_for() -> None:
    """Whoever follows hears of it at once, though the log goes on."""
    log = short_handoff(first_answered())
    entries = [Stored(position, entry) for position, entry in log.entries]
    asked: list[int] = []

    def live() -> Iterator[Stored]:
        for one in entries:
            asked.append(one.position)
            yield one

    replayer = Replayer()
    found = followed(LiveCapture(live()), replayer, Tally(replayer.history))
    first = next(found)
    assert asked[-1] == first.position
    assert first.position < entries[-1].position
    rest = [first, *found]
    assert rest == list(replayer.report(whole=False).findings)
    assert asked[-1] == entries[-1].position


@pytest.mark.parametrize(
    "tokens",
    [(), ("x.jsonl", "--follow"), ("--follow", "--at", "3"), ("--follow", "--to", "0")],
)
def test_what_makes_no_sense_together(
    tokens: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a file nor --follow, or both, or a world at a position: usage errors."""
    from transport import cli

    assert cli.run(["replay", *tokens, "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["exit_code"] == 2


def test_nobody_to_follow(capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduler that is not there is told as everywhere."""
    from transport import cli

    assert cli.run(["replay", "--follow", "--scheduler", NOBODY]) == 3
    assert NOBODY in capsys.readouterr().err
