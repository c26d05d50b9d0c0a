"""Figures of a comparison: what was measured on both sides, and their ratio round by round.

Owns: medians, spreads, ratios, and the JSON of a report.
Must not know: what is measured, or how anything is run.

Times and rates of a shared machine drift.  Both sides are therefore measured in turn, and a ratio
is formed of the two that stand next to each other, before any median is taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import attrs

SCHEMA = "custody.bench.v1"
Better = Literal["higher", "lower"]
Ours = TypeVar("Ours")
Theirs = TypeVar("Theirs")


class UnusableSample(ValueError):
    """A measurement that no ratio can be made of: the run was wrong, not slow."""

    def __init__(self, *, figure: str, reason: str) -> None:
        super().__init__(f"{figure}: {reason}")
        self.figure = figure
        self.reason = reason


@attrs.frozen
class Spread:
    """The middle of some samples, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Of at least one sample."""
        return cls(statistics.median(samples), min(samples), max(samples))


@attrs.frozen(kw_only=True)
class Target:
    """What a ratio, or our own value where there is no peer, is wanted to be."""

    value: float
    better: Better

    def met(self, value: float) -> bool:
        """Whether a value is as good as the target."""
        return value >= self.value if self.better == "higher" else value <= self.value


@attrs.frozen(kw_only=True)
class Figure:
    """One line of a report: `ours[n]` and `theirs[n]` were measured next to each other.

    theirs: empty where nothing is compared.
    notes: facts about the runs that a reader needs to judge the figure.
    """

    name: str
    says: str
    unit: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...] = ()
    peer: str = ""
    target: Target | None = None
    notes: dict[str, Any] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        if not self.ours:
            raise UnusableSample(figure=self.name, reason="there is no sample")
        if self.theirs and len(self.theirs) != len(self.ours):
            reason = f"{len(self.ours)} samples of ours, {len(self.theirs)} of {self.peer}"
            raise UnusableSample(figure=self.name, reason=reason)
        if any(not value > 0 for value in self.theirs):
            reason = f"{self.peer} gave {min(self.theirs)} {self.unit}, which divides nothing"
            raise UnusableSample(figure=self.name, reason=reason)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours by theirs, round by round; empty where nothing is compared."""
        if not self.theirs:
            return ()
        return tuple(ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True))

    @property
    def met(self) -> bool | None:
        """Whether the median is as good as the target; None without one."""
        if self.target is None:
            return None
        return self.target.met(Spread.of(self.ratios or self.ours).median)

    def to_object(self) -> dict[str, Any]:
        """The figure as JSON."""
        return {
            "name": self.name,
            "says": self.says,
            "unit": self.unit,
            "ours": _samples(self.ours),
            "peer": {"name": self.peer, **_samples(self.theirs)} if self.theirs else None,
            "ratio": _samples(self.ratios) if self.theirs else None,
            "target": (
                None
                if self.target is None
                else {"value": self.target.value, "better": self.target.better, "met": self.met}
            ),
            "notes": dict(self.notes),
        }


def _samples(values: Sequence[float]) -> dict[str, Any]:
    return {**attrs.asdict(Spread.of(values)), "samples": list(values)}


@attrs.frozen(kw_only=True)
class Report:
    """Everything that one run of the command found."""

    date: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    figures: tuple[Figure, ...]

    def to_object(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "schema": SCHEMA,
            "date": self.date,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "figures": [figure.to_object() for figure in self.figures],
        }


def interleave(
    rounds: int, ours: Callable[[int], Ours], theirs: Callable[[int], Theirs]
) -> tuple[tuple[Ours, Theirs], ...]:
    """Measure ours, theirs, ours, theirs ...; each is told the round."""
    return tuple((ours(number), theirs(number)) for number in range(rounds))


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of the samples does not exceed."""
    if not samples or not 0 < share <= 1:
        raise UnusableSample(figure="percentile", reason=f"{share} of {len(samples)} samples")
    ordered = sorted(samples)
    rank = -int(-share * len(ordered) // 1)
    return ordered[max(0, rank - 1)]


@attrs.frozen
class Arrivals:
    """When the tokens of one stream came: (seconds, how many) in order."""

    tokens: tuple[tuple[float, int], ...]

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.tokens[0][0]

    @property
    def last(self) -> float:
        """When the last token came."""
        return self.tokens[-1][0]

    def within(self, start: float, stop: float) -> int:
        """Tokens that came after `start` and not after `stop`."""
        return sum(count for at, count in self.tokens if start < at <= stop)

    def when(self, count: int) -> float | None:
        """When so many tokens had come; None if they never did."""
        held = 0
        for at, some in self.tokens:
            held += some
            if held >= count:
                return at
        return None


def decode_rate(streams: Sequence[Arrivals], *, new_tokens: int) -> float:
    """Tokens a second of all streams together, while all of them decode.

    The window opens with the first token of the stream that is last to begin, and closes with its
    `new_tokens`-th.  Streams that began before it must go on until then.
    """
    if any(not stream.tokens for stream in streams) or not streams:
        raise UnusableSample(figure="decode", reason="a stream gave no token")
    last = max(streams, key=lambda stream: stream.first)
    start, stop = last.first, last.when(new_tokens)
    if stop is None:
        raise UnusableSample(figure="decode", reason=f"a stream gave fewer than {new_tokens}")
    # A stream that ended early would count as a slow one: the window ends before it.
    stop = min(stop, *(stream.last for stream in streams)) if len(streams) > 1 else stop
    if not stop > start:
        raise UnusableSample(figure="decode", reason="the streams never decoded all at once")
    return sum(stream.within(start, stop) for stream in streams) / (stop - start)
