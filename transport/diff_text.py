"""What differs between two logs, in words.

Owns: how a difference is said.
Must not know: how it was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lifecycle.forensics_diff import Difference, Divergence
from lifecycle.wording import counted

LINES_SHOWN = 20


def difference_lines(found: Difference) -> Iterator[str]:
    """Configurations first, then the first divergence of each request, then the verdict."""
    for one in found.settings:
        yield f"{one.engine}: {one.field}: {one.left or 'nothing'} | {one.right or 'nothing'}"
    for divergence in found.divergences[:LINES_SHOWN]:
        yield divergence_line(divergence)
    if len(found.divergences) > LINES_SHOWN:
        yield f"... and {len(found.divergences) - LINES_SHOWN} more; --json has them all"
    for field, count in _by_field(found)[:LINES_SHOWN]:
        yield f"first apart in {field}: {counted(count, 'request')}"
    for side, requests in (("left", found.only_left), ("right", found.only_right)):
        if requests:
            shown = ", ".join(requests[:5])
            yield f"only in the {side} log: {counted(len(requests), 'request')}, such as {shown}"
    yield f"{counted(found.compared, 'request')} in both, {len(found.divergences)} of them differ"
    yield "the same" if found.same else "different"


def divergence_line(one: Divergence) -> str:
    """Where a request first goes apart."""
    left = f"position {one.left_position}" if one.left_position else "nothing"
    right = f"position {one.right_position}" if one.right_position else "nothing"
    return (
        f"{one.request}, entry {one.index} ({left} | {right}): {one.field}: "
        f"{one.left or 'nothing'} | {one.right or 'nothing'}"
    )


def _by_field(found: Difference) -> list[tuple[str, int]]:
    return Counter(one.field for one in found.divergences).most_common()
