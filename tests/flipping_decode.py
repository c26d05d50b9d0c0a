"""A decode engine in whose memory one byte changes after the transfer, before it is checked.

The command line with one class replaced by a subclass.  The first request is hit in the first byte
of its first token, the second in its first page's header, the third in the last byte of its last
written page, and no other.
"""

from __future__ import annotations

import transport.engine_parts
from engine.effects import VerifyPages
from engine.runner import grant_spans
from engine.runner_decode import DecodeRunner
from lifecycle.events import Failed, Verified
from lifecycle.ids import GrantId
from transport import cli


class FlippingRunner(DecodeRunner):
    """Checks what arrived, after it has damaged one byte of it."""

    requests = 0

    def verify(self, effect: VerifyPages, grants: tuple[GrantId, ...]) -> Verified | Failed:
        _reserved, _tokens, ranges, _digest = effect.writes[0]
        layout = self.pool.layout
        spans = grant_spans(layout, ranges, pool_pages=self.pool.pages)
        first, last = spans[0].offset, spans[-1].offset + spans[-1].length - 1
        places = (first + layout.header_bytes, first, last)
        if self.requests < len(places):
            self.pool.memory.octets[places[self.requests]] ^= 1
        self.requests += 1
        return super().verify(effect, grants)


transport.engine_parts.DecodeRunner = FlippingRunner  # type: ignore[attr-defined]
cli.main()
