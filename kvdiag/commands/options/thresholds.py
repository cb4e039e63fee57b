"""The configurable thresholds of a diagnosis: by flag, KVDIAG_RUN_… in the environment, or the TOML file."""

from dataclasses import replace

import click

from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.errors import KvdiagError
from kvdiag.model import PressureThresholds

reserved_gap_option = click.option(
    "--reserved-gap-bytes",
    type=click.IntRange(min=0),
    default=DEFAULT_LIMITS.reserved_gap_bytes,
    show_default=True,
    help="How much memory torch may reserve without using it.",
)


def limits_of(reserved_gap_bytes: int, pressure: tuple[float, float] | None = None) -> Limits:
    """Return the default limits with these changes; `pressure` is the warning and the critical threshold.

    Raises:
        KvdiagError: the warning threshold is not below the critical one.
    """
    limits = replace(DEFAULT_LIMITS, reserved_gap_bytes=reserved_gap_bytes)
    if pressure is None:
        return limits
    try:
        thresholds = PressureThresholds(warning_ratio=pressure[0], critical_ratio=pressure[1])
    except ValueError as error:
        raise KvdiagError(f"--pressure-warning and --pressure-critical: {error}") from error
    return replace(limits, pressure=thresholds)
