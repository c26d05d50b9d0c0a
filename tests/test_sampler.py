"""A draw depends on seed, position and its own row; parameters outside their limits are named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampler import (
    CANDIDATES,
    Draw,
    InvalidSampling,
    NonFiniteLogits,
    SamplingParams,
    sample,
    uniform,
)

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Rows are small: a second thread only waits for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def logits_of(rows: int, vocabulary: int, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocabulary, generator=generator)


def draws(row: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    return [sample(row[None], [params], [position])[0].token for position in range(count)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, NAN, INFINITY, 1e9, "1", True)),
        *(("top_p", value) for value in (0, -1, 1.0001, NAN, None)),
        *(("top_k", value) for value in (-1, 1.5, True, 1 << 40)),
        *(("seed", value) for value in (1 << 64, -(1 << 63) - 1, 0.5)),
        *(("max_new_tokens", value) for value in (0, -5, 1 << 31)),
        *(("stop", value) for value in ([""], ["x"] * 17, ["é" * 129], [3])),
        *(("stop_tokens", value) for value in ([-1], [True], list(range(65)), ["a"])),
        ("logprobs", 1),
        ("ignore_eos", "yes"),
    ],
)
def test_parameters_outside_their_limits_are_named(field: str, value: Any) -> None:
    """Each limit is checked, and the error has field, value and limit."""
    with pytest.raises(InvalidSampling) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field
    assert refused.value.limit in str(refused.value)


def test_parameters_at_their_limits_are_accepted() -> None:
    """The limits themselves are legal, and a single stop string is one string."""
    params = SamplingParams(
        max_new_tokens=1, temperature=100, top_p=1, top_k=0, seed=(1 << 64) - 1, stop="ab"
    )
    assert params.stop == ("ab",)
    assert SamplingParams(seed=-(1 << 63), stop=["é" * 128], stop_tokens=[0]).stop_tokens == (0,)


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals() -> None:
    """Temperature 0 is the arg max; filters and seed change nothing."""
    row = torch.tensor([0.0, 3.0, -INFINITY, 3.0])
    params = [SamplingParams(), SamplingParams(top_k=3, top_p=0.1, seed=9)]
    assert [draw.token for draw in sample(row.expand(2, -1), params, [0, 1])] == [1, 1]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
def test_the_logprob_is_of_the_models_own_distribution(temperature: float) -> None:
    """Neither temperature nor filters show in it."""
    logits = logits_of(8, 50)
    params = [SamplingParams(temperature=temperature, top_k=5, top_p=0.9, logprobs=True)] * 8
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, draw in enumerate(sample(logits, params, list(range(8)))):
        assert draw.logprob is not None
        assert draw.logprob == pytest.approx(float(expected[row, draw.token]), abs=1e-9)


@given(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(0, 1 << 40))
def test_uniform_is_a_number_from_zero_to_below_one(seed: int, position: int) -> None:
    """For every seed and position, and the same each time."""
    point = uniform(seed=seed, position=position)
    assert 0 <= point < 1
    assert point == uniform(seed=seed, position=position)


def test_uniform_is_spread_evenly_and_seeds_do_not_shift_into_each_other() -> None:
    """Tenths are hit evenly along positions and along seeds, and no two places share a number."""
    for points in (
        [uniform(seed=5, position=position) for position in range(10_000)],
        [uniform(seed=seed, position=5) for seed in range(10_000)],
    ):
        counts = torch.histc(torch.tensor(points), bins=10, min=0, max=1)
        assert counts.min() > 880
        assert counts.max() < 1120
    grid = {uniform(seed=seed, position=position) for seed in range(100) for position in range(100)}
    assert len(grid) == 10_000


def test_uniform_is_pinned() -> None:
    """These numbers are part of what a seed means and never change silently."""
    assert uniform(seed=0, position=0) == 0.6524484863740322
    assert uniform(seed=42, position=7) == 0.08603176010658542
    assert uniform(seed=-1, position=3) == uniform(seed=(1 << 64) - 1, position=3)


def test_draws_follow_the_distribution() -> None:
    """Frequencies over positions are the probabilities at that temperature."""
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, -INFINITY])
    drawn = draws(row, SamplingParams(temperature=0.7, seed=11), 4000)
    found = torch.bincount(torch.tensor(drawn), minlength=5) / 4000
    expected = torch.softmax(row / 0.7, dim=0)
    assert (found - expected).abs().max() < 0.03
    assert found[4] == 0


def test_filters_keep_what_they_say() -> None:
    """Top-k keeps k, top-p the least set that reaches the mass; p is taken of what k left."""
    row = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.35}, {1}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.75}, {1, 3, 2}),
        ({"top_k": 2, "top_p": 0.56}, {1}),
        ({"top_k": 2, "top_p": 0.58}, {1, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
    ]
    for filters, kept in cases:
        params = SamplingParams(temperature=1.0, **filters)
        assert set(draws(row, params, 300)) == kept, filters


def test_equal_weights_are_kept_by_id() -> None:
    """Where the last kept place is tied, the lowest ids have it."""
    row = torch.zeros(3000)
    assert set(draws(row, SamplingParams(temperature=1.0, top_k=3), 200)) == {0, 1, 2}


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": CANDIDATES + 5}, {"top_k": 40}]
)
def test_the_short_cut_equals_the_full_sort(
    monkeypatch: pytest.MonkeyPatch, scale: float, filters: dict[str, Any]
) -> None:
    """Looking at the best candidates first draws exactly what a sort of the whole row draws."""
    row = logits_of(1, 5000, scale=scale)[0]
    params = SamplingParams(temperature=0.9, seed=3, **filters)
    short = draws(row, params, 100)
    monkeypatch.setattr("engine.sampler.CANDIDATES", 1 << 20)
    assert draws(row, params, 100) == short


@given(st.integers(0, 1 << 32), st.integers(0, 10_000), st.integers(0, 7))
def test_a_draw_depends_on_nothing_but_seed_position_and_row(
    seed: int, position: int, place: int
) -> None:
    """Alone or anywhere in a batch of others, the token and its logprob are the same."""
    row = logits_of(1, 100, seed=1)
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=seed, logprobs=True)
    alone = sample(row, [params], [position])[0]
    others = logits_of(8, 100, seed=seed)
    others[place] = row[0]
    batch_params = [SamplingParams(temperature=float(n), seed=n) for n in range(8)]
    batch_params[place] = params
    positions = list(range(8))
    positions[place] = position
    assert sample(others, batch_params, positions)[place] == alone


def test_seeds_and_positions_differ() -> None:
    """Another seed is another text, and a position does not repeat its predecessor's draw."""
    row = logits_of(1, 1000)[0]
    texts = {tuple(draws(row, SamplingParams(temperature=2.0, seed=s), 10)) for s in range(20)}
    assert len(texts) == 20
    assert all(len(set(text)) > 3 for text in texts)


def test_tiny_temperatures_are_greedy() -> None:
    """The smallest temperature overflows nothing."""
    row = torch.tensor([1e30, -1e30, 0.0])
    assert draws(row, SamplingParams(temperature=5e-324), 5) == [0] * 5


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_rows_without_a_distribution_are_named(value: float) -> None:
    """NaN and infinity are an error that says which rows, not a token."""
    logits = logits_of(4, 10)
    logits[1, 3] = value
    logits[3] = -INFINITY
    with pytest.raises(NonFiniteLogits) as bad:
        sample(logits, [SamplingParams()] * 4, [0] * 4)
    assert bad.value.rows == (1, 3)


def test_masked_tokens_are_never_drawn() -> None:
    """Minus infinity is a mask; a single token left has log probability 0."""
    row = torch.full((1, 9), -INFINITY)
    row[0, 4] = 1.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logprobs=True)
        assert sample(row, [params], [0]) == [Draw(token=4, logprob=0.0)]


def test_an_empty_batch_is_empty() -> None:
    """No rows, no draws; unequal lengths are the caller's error."""
    assert sample(torch.zeros(0, 10), [], []) == []
    with pytest.raises(ValueError, match="1 rows, 0 parameters, 1 positions"):
        sample(torch.zeros(1, 10), [], [0])


def test_a_logprob_is_given_to_who_asks() -> None:
    """It costs a pass over the row, so that a request without the wish has none."""
    row = torch.zeros(1, 10)
    assert sample(row, [SamplingParams()], [0]) == [Draw(token=0)]
    (draw,) = sample(row, [SamplingParams(logprobs=True)], [0])
    assert draw.logprob == pytest.approx(-math.log(10))
