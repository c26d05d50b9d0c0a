"""`custody diff`: configurations first, then where each request first goes apart."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import attrs
import pytest

from lifecycle.events import Attached, Entry, Finished, Reserved
from lifecycle.forensics_diff import difference
from tests import handmade
from tests.driver import Driver
from tests.handmade import ONE, TWO
from tests.test_cli import bare, write_log  # noqa: F401 - a fixture for every test here
from tests.test_exposures import first_answered, short_handoff
from transport import cli

Entries = list[tuple[int, Entry]]


def with_event(entries: Entries, kind: type, **changes: Any) -> Entries:
    """The log with fields of the first event of that kind changed."""
    out, done = [], False
    for position, entry in entries:
        if isinstance(entry.event, kind) and not done:
            done = True
            changed = attrs.evolve(entry, event=attrs.evolve(entry.event, **changes))
            out.append((position, changed))
        else:
            out.append((position, entry))
    return out


def driven() -> Entries:
    driver = Driver().pair()
    for n in (5, 9):
        driver.submit(prompt=n, new=4)
    driver.run()
    return driver.log


def test_a_run_that_is_repeated_is_the_same() -> None:
    """Two runs of the same traffic do not differ, in nothing at all."""
    found = difference(driven(), driven(), everything=True)
    assert found.same
    assert found.compared == 2


def test_drawn_fields_say_nothing_unless_asked() -> None:
    """Tags and times differ between any two runs; `everything` shows them."""
    log = first_answered().entries
    other = with_event(log, Reserved, tag=99)
    assert difference(log, other).same
    (one,) = difference(log, other, everything=True).divergences
    assert (one.field, one.left, one.right) == ("Reserved.tag", "11", "99")


def test_the_first_unequal_field_is_named() -> None:
    """By event and path, with both values and positions; what follows is not reported."""
    log = first_answered().entries
    other = with_event(log, Finished, tokens=2, pages_read=1)
    (one,) = difference(log, other).divergences
    assert (one.request, one.field, one.left, one.right) == (ONE, "Finished.tokens", "3", "2")
    assert one.left_position == one.right_position


def test_a_nested_field_has_its_path() -> None:
    """An admission's leg is compared field by field."""
    log = first_answered().entries
    changed = attrs.evolve(handmade.admitted().decode, pages_booked=4)
    other = with_event(log, type(handmade.admitted()), decode=changed)
    (one,) = difference(log, other).divergences
    assert (one.field, one.left, one.right) == ("Admitted.decode.pages_booked", "3", "4")


def test_another_event_and_an_end_are_divergences() -> None:
    """Where the events differ, and where one log has no more."""
    log = first_answered().entries
    aborted = handmade.written(handmade.Log()).add(handmade.ABORTED).entries
    (one,) = difference(log, aborted).divergences
    assert (one.field, one.left, one.right) == ("event", "Drained", "Aborted")
    (one,) = difference(log, log[:-1]).divergences
    assert (one.field, one.left, one.right, one.right_position) == ("end", "Released", "", 0)
    (one,) = difference(log[:-1], log).divergences
    assert (one.field, one.left, one.right, one.left_position) == ("end", "", "Released", 0)


def test_configurations_come_first() -> None:
    """Fields of an engine, and engines that are in one log only."""
    log = first_answered().entries
    other = with_event(log, Attached, pages=99)
    (setting,) = difference(log, other).settings
    assert (setting.engine, setting.field, setting.right) == ("p0", "pages", "99")
    fewer = [one for one in log if not isinstance(one[1].event, Attached)]
    found = difference(log, fewer)
    assert [(s.engine, s.left, s.right) for s in found.settings] == [
        ("d0", "attached", ""),
        ("p0", "attached", ""),
    ]


def test_requests_of_one_log_only_are_listed() -> None:
    """A request that never came is no divergence, and no silence."""
    log = first_answered()
    one = list(log.entries)
    two = short_handoff(log).entries
    found = difference(one, two)
    assert (found.only_left, found.only_right, found.divergences) == ((), (TWO,), ())
    assert difference(two, one).only_left == (TWO,)


def interleaved(entries: Entries, draw: random.Random) -> Entries:
    """The same entries, each request's in their order, and requests among each other in any."""
    left: dict[str, Entries] = {}
    for one in entries:
        left.setdefault(one[1].request, []).append(one)
    out: Entries = []
    while left:
        name = draw.choice(sorted(left))
        out.append(left[name].pop(0))
        if not left[name]:
            del left[name]
    return out


@pytest.mark.parametrize("seed", range(6))
def test_how_requests_take_turns_makes_no_difference(seed: int) -> None:
    """What one log says first waits for the other, be it a line behind or at the log's other end."""
    draw = random.Random(seed)
    log = driven()
    for other in (log, with_event(log, Finished, tokens=9), log[:-2], log[4:]):
        plain = difference(log, other)
        assert difference(log, interleaved(other, draw)) == plain
        assert difference(interleaved(log, draw), other) == plain


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 the same, 1 different, 5 when something is missing or is no log."""
    log = first_answered().entries
    same = write_log(tmp_path / "a", log)
    other = write_log(tmp_path / "b", with_event(log, Finished, tokens=2))
    part = write_log(tmp_path / "c", log, complete=False)
    assert cli.run(["diff", str(same), str(same)]) == 0
    assert capsys.readouterr().out.endswith("the same\n")
    assert cli.run(["diff", str(same), str(other)]) == 1
    assert "Finished.tokens: 3 | 2" in capsys.readouterr().out
    assert cli.run(["diff", str(same), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["divergences"][0]["field"] == "Finished.tokens"
    assert cli.run(["diff", str(same), str(part)]) == 5
    assert cli.run(["diff", str(same), str(tmp_path / "none")]) == 5
