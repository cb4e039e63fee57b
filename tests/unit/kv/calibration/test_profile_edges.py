"""Profiles at their edges: what is measured to the byte, what a plan takes of it, which figures it may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, RankReport
from kvdiag.kv.calibration.profiles import MeasuredOverheads as Measured
from kvdiag.kv.calibration.profiles import measure
from tests.unit.kv.calibration.profiled import PROFILE, size

PIB = 1 << 50


@pytest.mark.parametrize(
    ("planned", "pool", "told", "expected"),
    [
        (500, 400, {}, Measured(overhead_bytes=0)),
        (500, 401, {}, None),
        (500, 300, {}, Measured(overhead_bytes=100)),
        (None, 300, {}, None),
        (None, 300, {"activation": 30, "non_torch": 10}, None),
        (None, 300, {"activation": 30, "consumed": 600}, None),
        (500, 300, {"weights": 480}, Measured(overhead_bytes=120)),
        (500, 300, {"graphs_estimate": 40}, Measured(overhead_bytes=60, graph_bytes=40)),
        (500, 300, {"activation": 50}, Measured(overhead_bytes=100)),
        (500, 300, {"non_torch": 50}, Measured(overhead_bytes=100)),
        (500, 300, {"activation": 50, "non_torch": 7}, Measured(activation_bytes=50, context_bytes=7)),
        (
            500,
            300,
            {"activation": 50, "non_torch": 7, "graphs_estimate": 40},
            Measured(activation_bytes=10, context_bytes=7, graph_bytes=40),
        ),
        (
            500,
            300,
            {"activation": 30, "non_torch": 7, "graphs_estimate": 40},
            Measured(activation_bytes=0, context_bytes=7, graph_bytes=40),
        ),
        (
            None,
            300,
            {"activation": 50, "weights": 480, "consumed": 490},
            Measured(activation_bytes=50, context_bytes=10),
        ),
        (
            500,
            300,
            {"activation": 50, "weights": 480, "consumed": 470},
            Measured(activation_bytes=50, context_bytes=0),
        ),
        (
            500,
            300,
            {"peak_torch": 530, "weights": 480, "non_torch": 7},
            Measured(activation_bytes=50, context_bytes=7),
        ),
        (
            500,
            300,
            {"peak_torch": 470, "weights": 480, "non_torch": 7},
            Measured(activation_bytes=0, context_bytes=7),
        ),
        (500, 300, {"peak_torch": 530, "consumed": 510}, Measured(overhead_bytes=100)),
    ],
    ids=[
        "nothing left",
        "a byte too much",
        "one figure",
        "no weights",
        "no weights, parts told",
        "no weights, consumed told",
        "the engine's own weights",
        "graphs told",
        "no context",
        "no activation",
        "both",
        "graphs within activation",
        "graphs larger than activation",
        "context by what is consumed",
        "less consumed than the weights",
        "activation by torch's peak",
        "a peak below the weights",
        "a peak without its weights",
    ],
)
def test_what_an_engine_took(planned: int | None, pool: int, told: dict[str, int], expected: Measured | None) -> None:
    """Of 1,000 bytes 900 are the engine's, 500 of them weights and 300 the pool: 100 are left, and are told apart only
    where the engine tells both context and activation.
    """
    sizes: dict[str, Any] = {name: size(nominal_bytes) for name, nominal_bytes in told.items()}
    rank = RankReport(name="", pool=size(pool), **sizes)
    report = EngineReport(settings=EngineSettings(memory_fraction_ratio=0.9), ranks=(rank,))

    assert expected == measure(report, total_bytes=1000, weights_bytes=planned, pool_bytes=pool)


@pytest.mark.parametrize(
    ("version", "activation_bytes", "overhead_bytes", "graph_bytes", "within"),
    [("0.20.0", 50, 120, 60, False), ("0.21.0", 10, 80, 40, True)],
)
def test_graphs_count_where_the_release_keeps_them(
    version: str, activation_bytes: int, overhead_bytes: int, graph_bytes: int, within: bool
) -> None:
    """Before 0.21 what they really took, beside the fraction; since then the estimate, inside it: 0.92 x 1,000 less
    500 and 300 are 120.
    """
    bare = RankReport(name="", pool=size(300), graphs_estimate=size(40), graphs_actual=size(60))
    split = replace(bare, activation=size(50), non_torch=size(7))

    def taken(rank: RankReport) -> Measured | None:
        settings = EngineSettings(version=version, memory_fraction_ratio=0.92)
        report = EngineReport(settings=settings, ranks=(rank,))
        return measure(report, total_bytes=1000, weights_bytes=500, pool_bytes=300)

    assert [
        Measured(
            context_bytes=7, activation_bytes=activation_bytes, graph_bytes=graph_bytes, graphs_in_fraction=within
        ),
        Measured(overhead_bytes=overhead_bytes, graph_bytes=graph_bytes, graphs_in_fraction=within),
    ] == [taken(split), taken(bare)]


def test_a_fraction_of_a_gpu_is_rounded_up() -> None:
    """0.9 x 1,001 = 900.9: 101 of 901 bytes are left beside 800."""
    report = EngineReport(settings=EngineSettings(memory_fraction_ratio=0.9))

    assert Measured(overhead_bytes=101) == measure(report, total_bytes=1001, weights_bytes=500, pool_bytes=300)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (10, 20, 5, 0)),
        ({"graph_bytes": None}, (10, 20, 0, 0)),
        ({"context_bytes": 0, "activation_bytes": 0}, (0, 0, 5, 0)),
        ({"graphs_in_fraction": False}, (10, 20, 0, 0)),
        ({"overhead_bytes": 70}, (0, 0, 5, 70)),
        ({"overhead_bytes": 0}, (0, 0, 5, 0)),
        ({"overhead_bytes": 70, "context_bytes": None, "activation_bytes": None, "graph_bytes": 0}, (0, 0, 0, 70)),
    ],
)
def test_what_a_plan_takes_of_a_profile(change: dict[str, Any], expected: tuple[int, ...]) -> None:
    """One overhead stands in place of context and activation; graphs count where they lie inside the fraction."""
    overheads = replace(PROFILE, **change).overheads

    assert expected == (
        overheads.context_bytes,
        overheads.activation_bytes,
        overheads.graph_bytes,
        overheads.overhead_bytes,
    )
