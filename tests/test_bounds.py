"""What a log may claim: nobody who reads a stranger's log runs out of memory."""

from __future__ import annotations

import io
import json
from typing import Any

import attrs
import pytest

from engine.store import Stored
from lifecycle.events import Admitted, Attached, Entry, Reserved
from lifecycle.ids import PAGES_MAX, RANKS_MAX, PageRange
from lifecycle.state import Phase
from tests.driver import Driver
from tests.log_files import read_capture
from transport.forensics_read import open_lines
from transport.jsonlines import jsonlines


@pytest.fixture(scope="module")
def entries() -> list[Stored]:
    """A small legal log."""
    driver = Driver().pair().run()
    request = driver.submit()
    driver.run_until(lambda: driver.phase(request) is Phase.DECODING)
    return [Stored(position, entry) for position, entry in driver.log]


def changed(entries: list[Stored], kind: type, change: Any) -> io.BytesIO:
    """The log as JSON Lines, with the fields of one event changed."""
    lines = [json.loads(line) for line in jsonlines(entries, complete=True)]
    (first, *_) = [line for line in lines if line.get("event") == kind.__name__]
    change(first["fields"])
    return io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())


def many_pages(fields: dict[str, Any]) -> None:
    fields["pages"] = [{"first": 1 << 50, "count": 1 << 50}]


def large_pool(fields: dict[str, Any]) -> None:
    fields["pages"] = PAGES_MAX + 1


def many_ranks(fields: dict[str, Any]) -> None:
    fields["ranks"] = 1 << 40


def many_ranks_of_a_leg(fields: dict[str, Any]) -> None:
    fields["decode"]["ranks"] = 1 << 40


@pytest.mark.parametrize(
    ("kind", "change", "limit"),
    [
        (Reserved, many_pages, PAGES_MAX),
        (Attached, large_pool, PAGES_MAX),
        (Attached, many_ranks, RANKS_MAX),
        (Admitted, many_ranks_of_a_leg, RANKS_MAX),
    ],
)
def test_numbers_that_no_memory_holds_are_refused_with_their_limit(
    entries: list[Stored], kind: type, change: Any, limit: int
) -> None:
    """The line is named, and so are both numbers."""
    (refused,) = read_capture(open_lines(changed(entries, kind, change))).unknown
    assert str(limit) in refused.reason


def test_the_largest_pool_is_taken(entries: list[Stored]) -> None:
    """A limit is no smaller than it says."""
    assert PageRange(0, PAGES_MAX).stop == PAGES_MAX
    attached = next(s.entry for s in entries if isinstance(s.entry.event, Attached))
    assert isinstance(attached, Entry)
    assert isinstance(attached.event, Attached)
    assert attrs.evolve(attached.event, pages=PAGES_MAX).pages == PAGES_MAX
