"""The rules of a post-mortem on what fails before there is a pool: weights, budget, context and blocks."""

from typing import Any

import pytest

from tests.unit.diagnosis.postmortem.cases import (
    FRACTION,
    GIB,
    MIB,
    MODEL_LEN,
    account,
    changes,
    finding,
    report_of,
    status_of_text,
)

FOREIGN, MISCONFIGURED, CONTEXT = "baseline.foreign_memory", "baseline.misconfigured", "capacity.long_context"

REPORT = report_of(weights=10, pool=60, activation=4, total=80)


def test_weights_that_do_not_fit_are_not_helped_by_the_fraction() -> None:
    """While weights are loaded there is no pool that could be smaller."""
    actual = finding(MISCONFIGURED, account(phase="load"), report=REPORT)
    assert (True, False) == ("--tensor-parallel-size" in (actual.remedy or ""), FRACTION in (actual.remedy or ""))


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, {FRACTION: 0.75}),  # 60 of 80 GiB
        ({"device": None, "fraction_ratio": None}, {}),
        ({"needed_bytes": None}, {FRACTION: 0.75}),
        ({"free_bytes": None}, {}),
        ({"total_bytes": None}, {}),
        ({"free_bytes": 7 * GIB}, {}),  # 0.08: too little for a server
    ],
)
def test_refused_budget_gets_the_fraction_that_is_free(figures: dict[str, Any], expected: dict[str, float]) -> None:
    """Where the message has both figures."""
    budget = {"free_bytes": 60 * GIB, "needed_bytes": 72 * GIB, "fraction_ratio": 0.9, **figures}
    for verdict in (MISCONFIGURED, FOREIGN)[
        : 1 if None in (budget["free_bytes"], figures.get("total_bytes", 0)) else 2
    ]:
        actual = finding(verdict, account("budget", **budget))
        assert ("fault", expected) == (actual.status, changes(actual))


@pytest.mark.parametrize(
    ("parts", "used", "expected"),
    [
        # 77 of the 76 GiB that 0.95 of 80 GiB are: one is missing, 0.0125 of the device.
        ({"report": report_of(weights=70, activation=4, non_torch=3)}, "77.0 GiB", {FRACTION: 0.97}),
        ({"report": report_of(consumed=73, activation=4, non_torch=3)}, "77.0 GiB", {FRACTION: 0.97}),
        ({"report": report_of(weights=78, activation=None)}, "78.0 GiB", {}),  # beyond 0.97
        ({"report": report_of(weights=76)}, "76.0 GiB", {}),
        ({"report": REPORT, "failed_pool_bytes": 800 * MIB}, "14.0 GiB", {FRACTION: 0.96}),
        ({"report": report_of(None, weights=70)}, "70.0 GiB", {}),
        ({"report": report_of()}, "no memory", {}),
        ({}, "no memory", {}),
    ],
)
def test_empty_pool_is_made_up_for(parts: dict[str, Any], used: str, expected: dict[str, float]) -> None:
    """By what weights, activations and the rest use beyond the memory fraction, or by what the log prints."""
    actual = finding(MISCONFIGURED, account("blocks"), **parts)

    assert ("fault", expected) == (actual.status, changes(actual))
    assert used in actual.summary


REFUSED_CONTEXT = (
    "To serve at least one request with the model's max seq len (131072), (16.00 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (12.00 GiB). Based on the available memory, the estimated maximum model "
    "length is 98304. Try increasing"
)
REFUSED_BUDGET = (
    "Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 19.84 GiB)."
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.00 GiB of which 10.00 GiB is "
    "free. 11.00 GiB allowed; Of the allocated memory 10.90 GiB is allocated by PyTorch, and 1.00 MiB is reserved by "
    "PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "verdict", "expected"),
    [
        (REFUSED_CONTEXT, CONTEXT, {MODEL_LEN: 98304}),
        (REFUSED_BUDGET, MISCONFIGURED, {FRACTION: 0.89}),
        (REFUSED_BUDGET, FOREIGN, {FRACTION: 0.89}),
        (LIMITED, MISCONFIGURED, {}),
    ],
    ids=["context", "budget", "foreign", "a limit below the device"],
)
def test_refusal_names_the_setting_that_fits(text: str, verdict: str, expected: dict[str, float]) -> None:
    """From the message alone."""
    worst, actual = status_of_text(text, verdict)
    assert ("fault", "fault", expected) == (worst, actual.status, changes(actual))
