"""Pages across requests: who holds which, what is booked, what is in quarantine.

Owns: one account for each rank of each live incarnation, as frozen values.
Must not know: phases, digests, or why something was booked.

Pages are kept as bit masks (page p is bit p), so that overlap and count are one operation each.
"""

from __future__ import annotations

import attrs

from lifecycle.ids import PageRange, Party, RequestId, count_pages, mask_of


@attrs.frozen
class Account:
    """The pages of one rank: free + booked + held + quarantined = capacity.

    `booked` has an item for each live attempt on this rank, also when nothing is left to
    reserve, because such an attempt holds a request slot.
    """

    capacity: int
    slots: int
    held: int = 0
    quarantined: int = 0
    booked: tuple[tuple[RequestId, int], ...] = ()
    serial: int = 0

    @property
    def held_pages(self) -> int:
        """Pages that grants hold."""
        return self.held.bit_count()

    @property
    def quarantined_pages(self) -> int:
        """Pages out of circulation."""
        return self.quarantined.bit_count()

    @property
    def booked_pages(self) -> int:
        """Pages promised to admitted requests and not yet reserved."""
        return sum([pages for _, pages in self.booked])

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds and nobody was promised."""
        return self.capacity - self.held_pages - self.quarantined_pages - self.booked_pages

    @property
    def usable_pages(self) -> int:
        """Capacity without quarantine."""
        return self.capacity - self.quarantined_pages

    def promised(self, request: RequestId) -> int:
        """Pages booked for that request and not yet reserved."""
        for name, pages in self.booked:
            if name == request:
                return pages
        return 0

    def book(self, request: RequestId, pages: int) -> Account:
        """Promise pages to a request."""
        return self._booked((*self.booked, (request, pages)))

    def unbook(self, request: RequestId) -> Account:
        """Take back what a request was promised and did not reserve; itself if that is nothing."""
        for name, _ in self.booked:
            if name == request:
                return self._booked(tuple([b for b in self.booked if b[0] != request]))
        return self

    def hold(self, request: RequestId, pages: tuple[PageRange, ...], serial: int) -> Account:
        """Move pages from the request's promise, then from what is free, into a grant."""
        count = count_pages(pages)
        booked = tuple(
            [(b[0], max(0, b[1] - count)) if b[0] == request else b for b in self.booked]
        )
        held, highest = self.held | mask_of(pages), max(self.serial, serial)
        return Account(self.capacity, self.slots, held, self.quarantined, booked, highest)

    def free(self, pages: tuple[PageRange, ...]) -> Account:
        """Take pages back, out of a grant or out of quarantine."""
        mask = mask_of(pages)
        return self._without(mask, self.quarantined ^ (self.quarantined & mask))

    def quarantine(self, pages: tuple[PageRange, ...]) -> Account:
        """Move pages out of a grant and out of circulation."""
        mask = mask_of(pages)
        return self._without(mask, self.quarantined | mask)

    def _without(self, mask: int, quarantined: int) -> Account:
        held = self.held ^ (self.held & mask)
        return Account(self.capacity, self.slots, held, quarantined, self.booked, self.serial)

    def _booked(self, booked: tuple[tuple[RequestId, int], ...]) -> Account:
        return Account(self.capacity, self.slots, self.held, self.quarantined, booked, self.serial)


Ledger = dict[Party, Account]
"""Accounts of live incarnations; copied before it is changed where a copy must stay."""
