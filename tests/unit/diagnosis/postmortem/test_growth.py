"""leak.device_torch and leak.host of a post-mortem: growth since the start, by what the start printed."""

from __future__ import annotations

from typing import Any

import pytest

from kvdiag.diagnosis.postmortem import Case, postmortem
from tests.unit.diagnosis.postmortem.cases import GIB, account, finding, report_of, status_of_text

TORCH, HOST = "leak.device_torch", "leak.host"


@pytest.mark.parametrize(
    ("total_gib", "least_bytes"),
    [(80, 2 * 10**9), (200, 4_294_967_296)],  # a fiftieth of 200 GiB
)
@pytest.mark.parametrize(("beyond_bytes", "status"), [(0, "ok"), (1, "suspect")])
def test_suspect_from_two_gigabytes_and_a_fiftieth(
    total_gib: int, least_bytes: int, beyond_bytes: int, status: str
) -> None:
    """Beyond weights, pool, peak activation and graphs of the start."""
    report = report_of(weights=10, pool=50, activation=4, graphs_actual=1)
    allocated = 65 * GIB + least_bytes + beyond_bytes

    one = account(phase="decode", allocated_bytes=allocated, total_bytes=total_gib * GIB)

    assert status == finding(TORCH, one, report=report).status


@pytest.mark.parametrize(
    ("over_bytes", "total_bytes", "status"), [(0, 100 * GIB, "ok"), (1, 100 * GIB, "suspect"), (1, None, "suspect")]
)
def test_usual_peak_stands_in_for_one_that_is_not_printed(
    over_bytes: int, total_bytes: int | None, status: str
) -> None:
    """8 % of 100 GiB; of a device of unknown size none."""
    allocated = 60 * GIB + round(0.08 * 100 * GIB) + round(0.02 * 100 * GIB) + over_bytes

    one = account(phase="decode", allocated_bytes=allocated, total_bytes=total_bytes)

    assert status == finding(TORCH, one, report=report_of(weights=10, pool=50)).status


@pytest.mark.parametrize(
    ("kind", "phase", "expected"),
    [
        ("torch", None, ["unknown"]),
        ("torch", "prefill", ["unknown"]),
        ("torch", "load", []),
        ("budget", None, []),
        ("host", "prefill", []),
    ],
)
def test_only_judged_where_it_served(kind: str, phase: str | None, expected: list[str]) -> None:
    """Nothing can have grown before the first request; without the start's figures it is unknown."""
    found = postmortem(Case(accounts=(account(kind, phase=phase),))).findings
    assert expected == [one.status for one in found if one.id == TORCH]


@pytest.mark.parametrize("missing", ["weights", "pool", "allocated"])
def test_unknown_where_a_part_of_the_sum_is_missing(missing: str) -> None:
    """Of the start's figures weights and pool, and what torch had allocated."""
    sizes: dict[str, int | None] = {"weights": 10, "pool": 50, "activation": 4}
    report = report_of(**{name: None if name == missing else size for name, size in sizes.items()})
    figures: dict[str, Any] = {"allocated_bytes": None} if missing == "allocated" else {}

    assert "unknown" == finding(TORCH, account(phase="decode", **figures), report=report).status


@pytest.mark.parametrize(("anonymous", "size"), [(", anon-rss:6291456kB", "6.00 GiB"), ("", "")])
def test_host_kill_is_unknown(anonymous: str, size: str) -> None:
    """The kernel reports how much was in use, not whether it grew; a device's failure is no host's."""
    worst, actual = status_of_text(f"Out of memory: Killed process 4 (x) total-vm:1kB{anonymous}", HOST)

    assert ("unknown", "unknown") == (worst, actual.status)
    assert size in actual.summary
    assert HOST not in {one.id for one in postmortem(Case(accounts=(account(),))).findings}
