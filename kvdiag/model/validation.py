"""What a figure can be at all: the checks by which the values refuse the impossible."""

from __future__ import annotations

import math

MAX_BYTES = 2**50
"""No memory of one host is larger (1 PiB); a larger figure is a wrong reading."""

MAX_COUNT = 2**53
"""Largest integer that a float on a metrics page can carry exactly."""


def refuse(value: object, problem: str | None) -> None:
    """Raise ValueError where there is a problem, naming the class."""
    if problem is not None:
        raise ValueError(f"{type(value).__name__}: {problem}")


def count_problem(name: str, count: int | None, limit: int = MAX_COUNT) -> str | None:
    """Why a count cannot be: negative, or beyond its limit."""
    if count is None or 0 <= count <= limit:
        return None
    return f"{name} is {count}, not within 0..{limit}"


def time_problem(name: str, seconds: float | None) -> str | None:
    """Why a time cannot be: negative or not finite."""
    if seconds is None or (math.isfinite(seconds) and seconds >= 0):
        return None
    return f"{name} is {seconds}, not a time"


def first(*problems: str | None) -> str | None:
    """The first problem there is."""
    for problem in problems:  # a loop, since every value that is made comes through here
        if problem is not None:
            return problem
    return None
