"""Settings by the figures of a failure, as one would type them."""

import re
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.postmortem import Case, postmortem
from kvdiag.diagnosis.postmortem.remedies import (
    fraction_that_fits,
    joined,
    lower_fraction,
    raise_fraction,
    scaled,
    shorter_requests,
    smaller_pool,
)
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.model import Facts
from tests.builders.values import pool
from tests.unit.diagnosis.postmortem.cases import GIB, MIB, account

TOTAL = 100 * GIB
HEADROOM = 300 * 10**6
"""What stays free beyond what was missing."""

NO_REPORT = EngineReport()


def report_of(fraction: float | None = 0.9, *, pool_gib: int = 50, tokens: int | None = 500_000) -> EngineReport:
    """An engine's log with a pool of so many GiB."""
    rank = RankReport(name="", pool=PrintedSize(nominal_bytes=pool_gib * GIB), total=PrintedSize(nominal_bytes=TOTAL))
    return EngineReport(settings=EngineSettings(memory_fraction_ratio=fraction), ranks=(rank,), tokens=tokens)


def case_with(report: EngineReport = NO_REPORT, **figures: Any) -> Case:
    """A failure on a device of 100 GiB."""
    return Case(accounts=(account(**{"total_bytes": TOTAL, **figures}),), report=report)


def figures_of(text: str | None) -> tuple[float | None, float | None, int | None]:
    """By how much a setting is changed, to what, and the tokens that this costs."""
    by, new, tokens = (
        re.search(pattern, text or "") for pattern in (r" by (0\.\d\d) ", r" -> (\d[\d.]*)", r"costs ([\d,]+) of")
    )
    cost = None if tokens is None else int(tokens[1].replace(",", ""))
    return None if by is None else float(by[1]), None if new is None else float(new[1].rstrip(".")), cost


@pytest.mark.parametrize(
    ("short_bytes", "expected"),
    [
        (MIB, (0.01, 0.89, 10_000)),  # never less than a hundredth
        (5 * GIB - HEADROOM, (0.05, 0.85, 50_000)),
        (5 * GIB - HEADROOM + 1024, (0.06, 0.84, 60_000)),
        (50 * GIB - HEADROOM, (None, None, None)),  # more than the pool has, so no fraction would do
    ],
)
def test_fraction_is_lowered_by_what_was_missing_and_headroom(short_bytes: int, expected: tuple[float, ...]) -> None:
    """Up to the next hundredth; the pool's tokens that this costs are shown."""
    assert expected == figures_of(lower_fraction(case_with(report_of()), short_bytes))


def test_unknown_fraction_or_device_leaves_the_difference() -> None:
    """The advice then names the difference or the bytes; without bytes it is a fixed step of 0.02."""
    no_fraction, no_total = case_with(), case_with(total_bytes=None)

    assert (0.01, None, None) == figures_of(lower_fraction(no_fraction, 512 * MIB))
    assert "(798 MiB / total" in lower_fraction(no_total, 512 * MIB)  # with headroom
    assert "(5.00 GiB / total" in (raise_fraction(no_total, 5 * GIB) or "")
    assert (0.02, None, None) == figures_of(lower_fraction(no_fraction, None))


@pytest.mark.parametrize(("short_gib", "left_bytes", "tokens"), [(5, 44 * GIB + 704 * MIB, 53_125), (50, None, None)])
def test_pool_set_in_bytes_is_lowered_in_bytes(short_gib: int, left_bytes: int | None, tokens: int | None) -> None:
    """To a multiple of 64 MiB; a pool that is smaller than what was missing is left as it is."""
    printed = report_of(None)
    report = replace(printed, settings=replace(printed.settings, pool_bytes=50 * GIB))

    assert (None, left_bytes, tokens) == figures_of(lower_fraction(case_with(report), short_gib * GIB))


@pytest.mark.parametrize(
    ("sized", "expected"),
    [
        ({"pool_bytes": 50 * GIB}, (None, 44 * GIB + 704 * MIB, None)),
        ({"pool_bytes": None, "memory_fraction_ratio": 0.9}, (0.06, 0.84, None)),
    ],
    ids=["in bytes", "by the fraction"],
)
def test_trace_shows_what_sizes_the_pool(sized: dict[str, Any], expected: tuple[float | None, ...]) -> None:
    """Without a log of the start, the setting that the trace's pool has is changed."""
    case = replace(case_with(), facts=Facts(pools=(pool(**sized),)))
    assert expected == figures_of(lower_fraction(case, 5 * GIB))


@pytest.mark.parametrize(
    "report", [report_of(tokens=None), report_of(tokens=0), report_of(pool_gib=0), replace(report_of(), ranks=())]
)
def test_cost_in_tokens_is_left_out_where_the_log_does_not_show_it(report: EngineReport) -> None:
    """A pool without tokens, or without bytes, has no price."""
    assert (0.06, 0.84, None) == figures_of(lower_fraction(case_with(report), 5 * GIB))


@pytest.mark.parametrize(
    ("missing_bytes", "fraction", "expected"),
    [
        (5 * GIB, 0.9, (0.05, 0.95, None)),
        (5 * GIB + MIB, 0.9, (0.06, 0.96, None)),
        (7 * GIB, 0.9, (0.07, 0.97, None)),
        (8 * GIB, 0.9, None),
        (5 * GIB, None, (0.05, None, None)),
        (None, 0.9, (None, None, None)),
    ],
)
def test_fraction_is_raised_by_what_is_missing(
    missing_bytes: int | None, fraction: float | None, expected: tuple[float | None, ...] | None
) -> None:
    """Up to the next hundredth, and to 0.97 at most, beyond which libraries find no room."""
    actual = raise_fraction(case_with(NO_REPORT if fraction is None else report_of(fraction)), missing_bytes)
    assert expected == (None if actual is None else figures_of(actual))


@pytest.mark.parametrize(
    ("free", "total", "expected"), [(100, 100, 1.0), (29, 100, 0.29), (2899, 10000, 0.28), (0, 100, 0.0)]
)
def test_fraction_that_fits_is_the_largest_of_two_decimals(free: int, total: int, expected: float) -> None:
    """29 hundredths are 0.29, and not the 0.28 that a float's last digit would make of it."""
    assert expected == fraction_that_fits(free, total)


@pytest.mark.parametrize(
    ("free_mib", "asked_bytes", "old", "step", "expected"),
    [
        (512, GIB, 8192, 64, "8192 -> 4096"),
        (512, GIB, 100, 64, "now 100"),
        (512, GIB, 128, 64, "128 -> 64"),
        (512, GIB, 3, 1, "3 -> 1"),
        (2048, GIB, 8, 1, "8 -> 7"),
        (0, GIB, 8, 1, "now 8"),
        (512, GIB, 0, 1, None),
        (512, GIB, None, 1, None),
        (None, GIB, 8, 1, None),
        (512, None, 8, 1, None),
    ],
)
def test_setting_is_scaled_to_what_was_free(
    free_mib: int | None, asked_bytes: int | None, old: int | None, step: int, expected: str | None
) -> None:
    """The setting shrinks as the room for it, in whole steps, and by one at least; without figures it is left."""
    case = case_with(free_bytes=None if free_mib is None else free_mib * MIB, asked_bytes=asked_bytes)

    actual = scaled("--x", old, case, step=step)

    assert (actual is None) == (expected is None)
    assert (expected or "") in (actual or "")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [(("lower a", None, "raise b", ""), "Lower a; or raise b."), (("--flag",), "--flag."), ((None, ""), "")],
)
def test_remedies_are_joined_to_a_sentence(parts: tuple[str | None, ...], expected: str) -> None:
    """The first one first; what is none is left out."""
    assert expected == joined(*parts)


@pytest.mark.parametrize(("name", "is_assumed"), [(None, True), ("vllm", False), ("sglang", False)])
def test_flags_of_an_assumed_engine_are_said_to_be_so(name: str | None, is_assumed: bool) -> None:
    """A message of torch is that of any engine; a log that an engine wrote has that engine's flags."""
    found = postmortem(replace(case_with(), engine_name=name, flags={"memory_fraction": "--gpu-memory-utilization"}))
    remedies = [one.remedy or "" for one in found.findings if one.status in ("fault", "suspect")]
    assert is_assumed == any("The flags are vLLM's" in remedy for remedy in remedies)


@pytest.mark.parametrize(
    ("report", "short_bytes", "change"),
    [
        (report_of(), 5 * GIB - HEADROOM, "--gpu-memory-utilization 0.85"),
        (NO_REPORT, 512 * MIB, "lower the memory fraction by 0.01"),
        (report_of(), 50 * GIB - HEADROOM, None),
        (report_of(), None, None),
    ],
    ids=["by its share", "share unknown", "more than the pool", "shortage unknown"],
)
def test_the_fix_has_the_value_of_the_remedy(report: EngineReport, short_bytes: int | None, change: str | None) -> None:
    """The same figure as it is typed; where there is none, exactly one figure is missing."""
    found = smaller_pool(case_with(report), short_bytes)
    assert ([] if change is None else [change]) == [one.change for one in found.changes]
    assert (change is None) == (1 == len(found.missing))


def test_a_pool_given_in_bytes_is_typed_in_bytes() -> None:
    """50 GiB less 5 GiB and headroom, in steps of 64 MiB."""
    printed = report_of(None)
    report = replace(printed, settings=replace(printed.settings, pool_bytes=50 * GIB))
    found = smaller_pool(case_with(report), 5 * GIB)
    assert [f"--kv-cache-memory-bytes {44 * GIB + 704 * MIB}"] == [one.change for one in found.changes]


def test_the_longest_request_is_what_the_pool_holds() -> None:
    """By the engine's own estimate; without it the figure is missing."""
    assert [5_632] == [one.context_tokens for one in shorter_requests(case_with(), 5_632).changes]
    assert 1 == len(shorter_requests(case_with(), None).missing)
