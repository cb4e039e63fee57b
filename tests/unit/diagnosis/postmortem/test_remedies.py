from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.postmortem import Case
from kvdiag.diagnosis.postmortem.remedies import fraction_that_fits, joined, lower_fraction, raise_fraction, scaled
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from tests.unit.diagnosis.postmortem.cases import GIB, MIB, account

TOTAL = 100 * GIB


def report_of(fraction: float | None = 0.9, *, pool_gib: int = 50, tokens: int | None = 500_000) -> EngineReport:
    """An engine's log with a pool of so many GiB."""
    rank = RankReport(name="", pool=PrintedSize(nominal_bytes=pool_gib * GIB), total=PrintedSize(nominal_bytes=TOTAL))
    return EngineReport(settings=EngineSettings(memory_fraction_ratio=fraction), ranks=(rank,), tokens=tokens)


def case_with(report: EngineReport | None = None, **figures: Any) -> Case:
    """A failure on a device of 100 GiB."""
    return Case(accounts=(account(**{"total_bytes": TOTAL, **figures}),), report=report)


@pytest.mark.parametrize(
    ("short_bytes", "expected"),
    [
        # 5 of 100 GiB; 0.9 - 0.05 = 0.85; 5 of 50 GiB are a tenth of the pool.
        (5 * GIB, ("0.9 -> 0.85", "5.00 GiB of 100 GiB", "50,000 of")),
        # What is more does not fit 0.85.
        (5 * GIB + MIB, ("0.9 -> 0.84", "5.00 GiB of 100 GiB", "60,000 of")),
        # No fraction is below 0.01, which is 89 GiB less: the whole pool.
        (95 * GIB, ("0.9 -> 0.01", "95.0 GiB of 100 GiB", "500,000 of")),
    ],
)
def test_fraction_is_lowered_by_what_was_short(short_bytes: int, expected: tuple[str, ...]) -> None:
    """By shortage over total, down to the next hundredth; the pool's tokens that this costs are told."""
    actual = lower_fraction(case_with(report_of()), short_bytes)
    assert all(figure in actual for figure in expected)


def test_fraction_in_force_and_the_devices_size_may_not_be_told() -> None:
    """Then the share, or the bytes, are all that can be said; without bytes it is a matter of trying."""
    no_fraction, no_total = case_with(), case_with(total_bytes=None)

    assert "by 0.01 (512 MiB of 100 GiB" in lower_fraction(no_fraction, 512 * MIB)
    assert "512 MiB / the device" in lower_fraction(no_total, 512 * MIB)
    assert "0.02 at a time" in lower_fraction(no_fraction, None)


@pytest.mark.parametrize(
    ("short_gib", "left_bytes", "tokens"), [(5, 45 * GIB, "50,000"), (50, 0, "500,000"), (51, 0, "500,000")]
)
def test_pool_set_in_bytes_is_lowered_in_bytes(short_gib: int, left_bytes: int, tokens: str) -> None:
    """Down to nothing at most."""
    told = report_of(None)
    report = replace(told, settings=replace(told.settings, pool_bytes=50 * GIB))

    actual = lower_fraction(case_with(report), short_gib * GIB)

    assert f"by {short_gib * GIB} bytes" in actual
    assert f"{50 * GIB} -> {left_bytes}" in actual
    assert f"{tokens} of the pool" in actual


@pytest.mark.parametrize(
    "report", [report_of(tokens=None), report_of(tokens=0), report_of(pool_gib=0), replace(report_of(), ranks=())]
)
def test_cost_in_tokens_is_left_out_where_the_log_does_not_tell_it(report: EngineReport) -> None:
    """A pool without tokens, or without bytes, has no price."""
    actual = lower_fraction(case_with(report), 5 * GIB)
    assert actual.endswith(": 0.9 -> 0.85 (5.00 GiB of 100 GiB are missing)")


@pytest.mark.parametrize(
    ("missing_bytes", "fraction", "expected"),
    [
        (5 * GIB, 0.9, "0.9 -> 0.95"),
        (5 * GIB + MIB, 0.9, "0.9 -> 0.96"),
        (7 * GIB, 0.9, "0.9 -> 0.97"),
        (8 * GIB, 0.9, None),
        (5 * GIB, None, "by 0.05 (5.00 GiB"),
        (None, 0.9, "if the rest"),
    ],
)
def test_fraction_is_raised_by_what_is_missing(
    missing_bytes: int | None, fraction: float | None, expected: str | None
) -> None:
    """Up to the next hundredth, and to 0.97 at most, beyond which libraries find no room."""
    actual = raise_fraction(case_with(None if fraction is None else report_of(fraction)), missing_bytes)

    assert (actual is None) == (expected is None)
    assert (expected or "") in (actual or "")


def test_raised_fraction_of_an_unknown_device_is_told_in_bytes() -> None:
    """What is missing over the total, which the reader has to know."""
    assert "5.00 GiB / the device" in (raise_fraction(case_with(total_bytes=None), 5 * GIB) or "")


@pytest.mark.parametrize(
    ("free", "total", "expected"), [(100, 100, 1.0), (29, 100, 0.29), (2899, 10000, 0.28), (0, 100, 0.0)]
)
def test_fraction_that_fits_is_the_largest_of_two_decimals(free: int, total: int, expected: float) -> None:
    """29 hundredths are 0.29, and not the 0.28 that a float's last digit would make of it."""
    assert expected == fraction_that_fits(free, total)


@pytest.mark.parametrize(
    ("free_mib", "old", "step", "expected"),
    [
        (512, 8192, 64, "8192 -> 4096"),
        (512, 100, 64, "now 100"),
        (512, 128, 64, "128 -> 64"),
        (512, 3, 1, "3 -> 1"),
        (2048, 8, 1, "8 -> 7"),
        (0, 8, 1, "now 8"),
        (512, 0, 1, None),
        (512, None, 1, None),
        (None, 8, 1, None),
    ],
)
def test_setting_is_scaled_to_what_was_free(
    free_mib: int | None, old: int | None, step: int, expected: str | None
) -> None:
    """1 GiB was asked for: the setting shrinks as the room for it, in whole steps, and by one at least."""
    case = case_with(free_bytes=None if free_mib is None else free_mib * MIB)

    actual = scaled("--x", old, case, step=step)
    assert (actual is None) == (expected is None)
    assert (expected or "") in (actual or "")


def test_nothing_is_scaled_without_what_was_asked_for() -> None:
    """A failure without figures, or no failure at all, has no measure."""
    assert (None, None) == (scaled("--x", 8, case_with(asked_bytes=None)), scaled("--x", 8, Case()))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("lower a", None, "raise b", ""), "Lower a; or raise b."),
        (("--flag",), "--flag."),
        ((None, ""), ""),
    ],
)
def test_remedies_are_joined_to_a_sentence(parts: tuple[str | None, ...], expected: str) -> None:
    """The first one first; what is none is left out."""
    assert expected == joined(*parts)
