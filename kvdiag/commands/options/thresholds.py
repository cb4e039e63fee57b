"""The thresholds of a diagnosis that can be set: by a flag, KVDIAG_RUN_… in the environment, or the TOML file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.errors import KvdiagError
from kvdiag.model import PressureThresholds

F = TypeVar("F", bound=Callable[..., Any])


def limit_options(function: F) -> F:
    """`--reserved-gap-bytes`."""
    option = click.option(
        "--reserved-gap-bytes",
        type=click.IntRange(min=0),
        default=DEFAULT_LIMITS.reserved_gap_bytes,
        show_default=True,
        help="Reserved minus allocated bytes of torch beyond which their parts are judged one by one.",
    )
    return option(function)


def pressure_options(function: F) -> F:
    """`--pressure-warning` and `--pressure-critical`, for those who show memory pressure."""
    usual = DEFAULT_LIMITS.pressure
    for name, default, text in (
        ("critical", usual.critical_ratio, "The same for a person to be called."),
        ("warning", usual.warning_ratio, "Memory pressure, from 0 to 1, above which a person is warned."),
    ):
        option = click.option(
            f"--pressure-{name}", type=click.FloatRange(0.0, 1.0), default=default, show_default=True, help=text
        )
        function = option(function)
    return function


def limits_of(reserved_gap_bytes: int, pressure: tuple[float, float] | None = None) -> Limits:
    """The usual limits but for what was set; `pressure` is that of a warning and the critical one.

    Raises:
        KvdiagError: the warning is not below the critical.

    """
    limits = replace(DEFAULT_LIMITS, reserved_gap_bytes=reserved_gap_bytes)
    if pressure is None:
        return limits
    try:
        thresholds = PressureThresholds(warning_ratio=pressure[0], critical_ratio=pressure[1])
    except ValueError as error:
        raise KvdiagError(f"--pressure-warning and --pressure-critical: {error}") from error
    return replace(limits, pressure=thresholds)
