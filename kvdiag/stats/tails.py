"""The p-value of a score: how often noise alone makes it as high, or higher."""

import math

TINY = 1e-300
"""In place of a zero that Lentz's continued fraction would divide by."""


def student_tail(score: float, freedom: float) -> float:
    """The probability of a Student's t above `score`."""
    half = 0.5 * _incomplete_beta(freedom / (freedom + score * score), freedom / 2.0, 0.5)
    return half if score > 0.0 else 1.0 - half


def binomial_tail(successes: int, trials: int) -> float:
    """The probability of at least so many of `trials` coins."""
    return sum(math.comb(trials, number) for number in range(successes, trials + 1)) / 2.0**trials


def _incomplete_beta(share: float, first: float, second: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction (Numerical Recipes 6.4)."""
    if share <= 0.0 or share >= 1.0:
        return 0.0 if share <= 0.0 else 1.0
    if share > (first + 1.0) / (first + second + 2.0):
        return 1.0 - _incomplete_beta(1.0 - share, second, first)
    front = math.exp(
        math.lgamma(first + second)
        - math.lgamma(first)
        - math.lgamma(second)
        + first * math.log(share)
        + second * math.log1p(-share)
    )
    ratio = value = 1.0 / _off_zero(1.0 - (first + second) * share / (first + 1.0))
    previous = 1.0
    for step in range(1, 300):
        even = step * (second - step) * share / ((first + 2 * step - 1) * (first + 2 * step))
        odd = -(first + step) * (first + second + step) * share / ((first + 2 * step) * (first + 2 * step + 1))
        before = value
        for term in (even, odd):
            ratio = 1.0 / _off_zero(1.0 + term * ratio)
            previous = _off_zero(1.0 + term / previous)
            value *= ratio * previous
        if abs(value - before) < 1e-12 * abs(value):
            break
    return front * value / first


def _off_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY
