"""What the data plane adapter raises: a class for each reaction of the caller.

Owns the sentences and the numbers in them.
It must not know any back end.
"""


class DataPlaneError(Exception):
    """Root of what the adapter raises."""


class PlaneMisused(DataPlaneError):
    """A call out of turn: a defect of the caller, not of the peer."""


class DescriptorMalformed(DataPlaneError):
    """A peer published a descriptor that this plane cannot read."""

    def __init__(self, why: str) -> None:
        super().__init__(f"malformed descriptor: {why}")
        self.why = why


class PeerMismatch(DataPlaneError):
    """What stands at the peer's endpoint is not the memory that the descriptor names."""

    def __init__(self, *, endpoint: str, why: str) -> None:
        super().__init__(f"{endpoint} is not the published peer: {why}")
        self.endpoint = endpoint
        self.why = why


class GrantEnded(DataPlaneError):
    """The grant was fenced or retired, which holds for ever."""

    def __init__(self, grant: str) -> None:
        super().__init__(f"grant {grant} has ended and is never exposed again")
        self.grant = grant


class PostRefused(DataPlaneError):
    """`post` made no ticket and nothing left: the same standing as `FAILED_QUIESCED`."""


class PeerClosed(PostRefused):
    """The peer was closed by this writer."""


class PlaneBusy(PostRefused):
    """The bounded queue of posts is full; try again after some have ended."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} posts are waiting, which is the limit")
        self.limit = limit


class OutOfBounds(PostRefused):
    """A write or a span leaves its region; no part of the call took effect."""

    def __init__(self, *, what: str, offset: int, length: int, limit: int) -> None:
        super().__init__(f"{what}: offset {offset} length {length} is not inside 0..{limit}")
        self.what = what
        self.offset = offset
        self.length = length
        self.limit = limit
