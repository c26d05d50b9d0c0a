"""Choosing the next token of each row: validated parameters, filters, and draws that can be repeated.

Owns what "seed" means: a draw is a pure function of seed, position and that row's logits, so a
request that is computed again, alone or in other company, gets the same tokens from the same logits.
It must not know requests, pages or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 256
STOP_TOKENS_MAX = 64
TEMPERATURE_MAX = 100.0
COUNT_MAX = (1 << 31) - 1
SEED_MIN, SEED_MAX = -(1 << 63), (1 << 64) - 1
# Candidates looked at before a whole row is sorted; nearly every nucleus lies within them.
CANDIDATES = 1024
_MASK_64 = (1 << 64) - 1


class InvalidSampling(ValueError):
    """A sampling parameter is outside its limit."""

    def __init__(self, *, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {value!r}; it must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class NonFiniteLogits(ArithmeticError):
    """The model produced rows that hold no distribution; the other rows are usable."""

    def __init__(self, *, rows: tuple[int, ...]) -> None:
        super().__init__(f"logits of rows {rows} are not finite")
        self.rows = rows


def _number(low: float, high: float, *, open_low: bool = False) -> Any:
    limit = f"a finite number {'above' if open_low else 'from'} {low:g} to {high:g}"

    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        if fits and isinstance(value, (int, float)):
            fits = (low < value if open_low else low <= value) and value <= high
        if not fits:
            raise InvalidSampling(field=field.name, value=value, limit=limit)

    return check


def _whole(low: int, high: int) -> Any:
    limit = f"a whole number from {low} to {high}"

    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidSampling(field=field.name, value=value, limit=limit)

    return check


def _flag(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidSampling(field=field.name, value=value, limit="true or false")


def _stop_strings(_: object, field: attrs.Attribute[Any], value: tuple[object, ...]) -> None:
    if len(value) > STOP_STRINGS_MAX:
        limit = f"at most {STOP_STRINGS_MAX} strings"
        raise InvalidSampling(field=field.name, value=len(value), limit=limit)
    for stop in value:
        # A lone surrogate can match nothing; "replace" only lets its length be counted.
        length = len(stop.encode("utf-8", "replace")) if isinstance(stop, str) else 0
        if not 1 <= length <= STOP_STRING_BYTES_MAX:
            limit = f"strings of 1 to {STOP_STRING_BYTES_MAX} bytes"
            raise InvalidSampling(field=field.name, value=stop, limit=limit)


def _stop_tokens(_: object, field: attrs.Attribute[Any], value: tuple[object, ...]) -> None:
    if len(value) > STOP_TOKENS_MAX:
        limit = f"at most {STOP_TOKENS_MAX} tokens"
        raise InvalidSampling(field=field.name, value=len(value), limit=limit)
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= COUNT_MAX:
            limit = f"token ids from 0 to {COUNT_MAX}"
            raise InvalidSampling(field=field.name, value=token, limit=limit)


def _tuple(value: Any) -> tuple[Any, ...]:
    # A string is a sequence too, but "ab" as two stop strings is never what was meant.
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen
class SamplingParams:
    """How one request's tokens are chosen and when it stops. Raises InvalidSampling.

    `temperature` 0 is greedy: the highest logit, the lowest token id among equals.
    `top_k` 0 and `top_p` 1 filter nothing.
    The filters apply in the order temperature, top-k, top-p (over what top-k left).
    `seed` is 64 bits, signed or unsigned: -1 and 2**64 - 1 are one seed.
    `ignore_eos` concerns the model's own end tokens, never `stop_tokens`.
    """

    max_new_tokens: int = attrs.field(default=256, validator=_whole(1, COUNT_MAX))
    temperature: float = attrs.field(default=0.0, validator=_number(0.0, TEMPERATURE_MAX))
    top_p: float = attrs.field(default=1.0, validator=_number(0.0, 1.0, open_low=True))
    top_k: int = attrs.field(default=0, validator=_whole(0, COUNT_MAX))
    seed: int = attrs.field(default=0, validator=_whole(SEED_MIN, SEED_MAX))
    stop: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_stop_strings)
    stop_tokens: tuple[int, ...] = attrs.field(default=(), converter=_tuple, validator=_stop_tokens)
    logprobs: bool = attrs.field(default=False, validator=_flag)
    ignore_eos: bool = attrs.field(default=False, validator=_flag)


@attrs.frozen
class Draw:
    """A chosen token and, where its request asked for it, the logarithm of its probability.

    The probability is that of the model's own distribution: temperature 1, nothing filtered.
    """

    token: int
    logprob: float | None = None


@torch.inference_mode()
def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[Draw]:
    """One draw for each row of `logits` float32[M, vocabulary].

    `positions` are the places in their sequences that the drawn tokens will take.
    Raises NonFiniteLogits, which names the rows, before anything is drawn.
    """
    rows = logits.shape[0]
    if not rows == len(params) == len(positions):
        raise ValueError(f"{rows} rows, {len(params)} parameters, {len(positions)} positions")
    logits = logits.cpu()
    # NumPy looks at a row with one thread: waking a second one costs more than it saves.
    values = logits.numpy()
    # Minus infinity masks a token; NaN or plus infinity, or nothing but masks, is no distribution.
    bad = ~np.isfinite(values.max(axis=-1))
    if bad.any():
        raise NonFiniteLogits(rows=tuple(np.flatnonzero(bad).tolist()))
    # Rows are treated one by one: nothing that is computed for one can touch another.
    return [
        _draw(logits[row], values[row], param, position)
        for row, (param, position) in enumerate(zip(params, positions, strict=True))
    ]


def _draw(row: Tensor, values: NDArray[np.float32], params: SamplingParams, position: int) -> Draw:
    if params.temperature == 0:
        # The first of equals.
        token = int(values.argmax())
    else:
        # Shifted first: a tiny temperature then gives minus infinity, never infinity minus infinity.
        wide = row.to(torch.float64)
        scaled = (wide - wide.max()) / params.temperature
        token = _inverse_cdf(scaled, params, uniform(seed=params.seed, position=position))
    return Draw(token=token, logprob=_logprob(values, token) if params.logprobs else None)


def _logprob(values: NDArray[np.float32], token: int) -> float:
    wide = values.astype(np.float64)
    top = wide.max()
    return float(wide[token] - top - np.log(np.exp(wide - top).sum()))


def _inverse_cdf(scaled: Tensor, params: SamplingParams, point: float) -> int:
    """The token at `point` of the filtered distribution, most probable first, ties by id."""
    weights = scaled.exp()
    vocabulary = weights.shape[0]
    count = min(params.top_k or vocabulary, vocabulary)
    order = _descending(weights, count if params.top_k else min(count, CANDIDATES))[:count]
    total = float((weights[order] if params.top_k else weights).sum())
    cumulative = weights[order].cumsum(0)
    nucleus = total * params.top_p if params.top_p < 1 else total * point
    if not params.top_k and float(cumulative[-1]) <= nucleus:
        order = _descending(weights, vocabulary)
        cumulative = weights[order].cumsum(0)
    if params.top_p < 1:
        # The first token that reaches the mass is the last one kept.
        kept = int(torch.searchsorted(cumulative, nucleus)) + 1
        cumulative = cumulative[:kept]
        total = float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, total * point, right=True))
    return int(order[min(place, len(cumulative) - 1)])


def _descending(weights: Tensor, count: int) -> Tensor:
    """Ids of the `count` greatest weights (and of all that tie with the last), greatest first."""
    if count < weights.shape[0]:
        threshold = torch.topk(weights, count).values[-1]
        ids = torch.nonzero(weights >= threshold).flatten()
        return ids[torch.sort(weights[ids], descending=True, stable=True).indices]
    return torch.sort(weights, descending=True, stable=True).indices


def uniform(*, seed: int, position: int) -> float:
    """A number in [0, 1) with 53 bits, a pure function of its arguments.

    Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014) over seed and position.
    """
    mixed = _mix(_mix(seed & _MASK_64) ^ (position & _MASK_64))
    return (mixed >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
