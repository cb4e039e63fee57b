"""Arrivals and stays into requests at once: quantiles of printed tables, Little's law by hand, and what is refused."""

import math
from dataclasses import replace

import pytest

from kvdiag.kv.fit.plan import Traffic, traffic_from_histogram
from tests.unit.kv.refused import refused

TRAFFIC = Traffic(
    requests_per_second=2,
    prompt_tokens=1000.2,
    output_tokens=200.3,
    seconds_per_output_token=0.05,
    seconds_to_first_token=1.5,
)


def present(mean: float) -> Traffic:
    """Traffic with so many requests in the system on average."""
    return Traffic(requests_per_second=mean, prompt_tokens=1, output_tokens=1, seconds_per_output_token=1)


def test_a_request_stays_until_its_last_token() -> None:
    """1.5 s to the first token and 200.3 tokens of 0.05 s are 11.515 s, at 2 requests a second 23.03 at a time."""
    assert (11.515, 23.03) == pytest.approx((TRAFFIC.seconds_in_system, TRAFFIC.mean_requests))


@pytest.mark.parametrize(("present_tokens", "expected"), [(None, 1201), (1500.5, 1501), (1200.0, 1200), (1, 1)])
def test_tokens_are_counted_up(present_tokens: float | None, expected: int) -> None:
    """1,000.2 + 200.3 tokens are 1,201 to plan for, unless the length of those present is known."""
    assert expected == replace(TRAFFIC, present_tokens=present_tokens).peak_tokens


@pytest.mark.parametrize(
    ("mean", "ratio", "expected"),
    [
        # P(X <= k) of Poisson's distribution as tables print it, the k before and the k itself.
        (0.1, 0.50, 1),  # zero requests, 0.905: one is planned for all the same
        (0.1, 0.99, 1),  # 0.9048, 0.9953
        (1.0, 0.50, 1),  # 0.3679, 0.7358
        (1.0, 0.99, 4),  # 0.9810, 0.9963
        (2.0, 0.90, 4),  # 0.8571, 0.9473
        (5.0, 0.95, 9),  # 0.9319, 0.9682
        (10.0, 0.95, 15),  # 0.9165, 0.9513
        (20.0, 0.50, 20),  # 0.4703, 0.5591
        (20.0, 0.99, 31),  # 0.9865, 0.9919
        # Above 500 mean + z x sqrt(mean), counted up: z of 0.99 is 2.3263, of 0.999 3.0902, of 0.1 -1.2816.
        (500.5, 0.999, 570),  # 69.13
        (600.0, 0.99, 657),  # 56.98
        (1000.0, 0.50, 1000),
        (1000.0, 0.99, 1074),  # 73.57
        (1000.0, 0.10, 960),  # -40.53
        (1_000_000.0, 0.999, 1_003_091),  # 3,090.23
        (1_000_000.0, 0.99, 1_002_327),  # 2,326.35
    ],
)
def test_requests_that_are_not_exceeded(mean: float, ratio: float, expected: int) -> None:
    """The number present is Poisson; for large means it is as good as normal."""
    assert expected == present(mean).requests_at(ratio)


def test_the_sum_and_the_normal_meet() -> None:
    """At 500 requests the one gives the other's number, to one."""
    assert present(500.0).requests_at(0.99) == pytest.approx(present(500.001).requests_at(0.99), abs=1)


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_a_quantile_lies_between_0_and_1(ratio: float) -> None:
    """Neither end is one: nothing is never exceeded."""
    with refused("quantile"):
        present(1.0).requests_at(ratio)


def test_those_present_are_longer_than_those_that_arrive() -> None:
    """Nine of 150 tokens that stay 10 s and one of 1,650 that stays 60 s.

    The mean stay is (9 x 10 + 60) / 10 = 15 s; by stay (9 x 150 x 10 + 1,650 x 60) / 10 / 15 = 750 tokens are present.
    """
    actual = traffic_from_histogram(
        [(100, 50, 9), (1100, 550, 1)], requests_per_second=2, seconds_per_output_token=0.1, seconds_to_first_token=5
    )

    assert (200.0, 100.0, 15.0, 30.0, 750.0) == pytest.approx(
        (
            actual.prompt_tokens,
            actual.output_tokens,
            actual.seconds_in_system,
            actual.mean_requests,
            actual.present_tokens,
        )
    )


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [(100, 50, 0)],
        [(100, 50, math.inf)],
        [(100, 50, 2), (100, 50, -1)],
        [(-1, 50, 1), (100, 50, 1)],
        [(100, -1, 1), (100, 50, 1)],
    ],
    ids=["none", "no weight", "endless weight", "negative weight", "negative prompt", "negative output"],
)
def test_a_histogram_that_is_none_is_refused(lengths: list[tuple[float, float, float]]) -> None:
    """And the message says what one needs."""
    with refused("lengths"):
        traffic_from_histogram(lengths, requests_per_second=1, seconds_per_output_token=1)


def test_an_entry_of_no_weight_or_no_prompt_is_allowed() -> None:
    """A bucket that nothing fell into counts for nothing; 0 of 2 and 4 of 4 prompts' tokens have a mean of 2."""
    actual = traffic_from_histogram(
        [(0, 10, 1), (4, 10, 1), (999, 999, 0)], requests_per_second=1, seconds_per_output_token=1
    )

    assert (2.0, 10.0, 12.0) == (actual.prompt_tokens, actual.output_tokens, actual.present_tokens)
