"""The thresholds of a diagnosis that can be set: by a flag, KVDIAG_RUN_… in the environment, or the TOML file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits

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


def limits_of(reserved_gap_bytes: int) -> Limits:
    """The usual limits but for what was set."""
    return replace(DEFAULT_LIMITS, reserved_gap_bytes=reserved_gap_bytes)
