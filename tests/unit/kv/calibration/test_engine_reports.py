"""An engine's report: printed sizes, releases and their defaults, the ranks that decide, and metrics as a report."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport, page_report
from kvdiag.model import Facts, KvPool

PIB = 1 << 50
POOL = KvPool(engine="0", block_tokens=16, total_blocks=1000, usable_blocks=999, usage_blocks=999)


def rank(name: str, pool: int | None = None, total: int | None = None) -> RankReport:
    """A rank that reports its pool, its GPU's total, or neither."""
    return RankReport(
        name=name,
        pool=None if pool is None else PrintedSize(nominal_bytes=pool),
        total=None if total is None else PrintedSize(nominal_bytes=total),
    )


@pytest.mark.parametrize(
    ("nominal", "slack", "expected"),
    [
        (100, 0, (100, 100)),
        (100, 5, (95, 105)),
        (5, 5, (0, 10)),
        (4, 5, (0, 9)),
        (PIB, PIB, (0, 2 * PIB)),
        (0, 0, (0, 0)),
    ],
)
def test_a_printed_size_lies_between_two(nominal: int, slack: int, expected: tuple[int, int]) -> None:
    """By as much as its last digit leaves open, and never below nothing."""
    size = PrintedSize(nominal_bytes=nominal, slack_bytes=slack)

    assert expected == (size.low_bytes, size.high_bytes)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", (0, 32)),
        ("v0.9", (0, 9)),
        ("0.10.1rc2", (0, 10)),
        ("1.0", (1, 0)),
        ("0.x", None),
        ("x.9", None),
        ("dev", None),
        ("9", None),
        ("", None),
        (None, None),
    ],
)
def test_major_and_minor_of_a_version(version: str | None, release: tuple[int, int] | None) -> None:
    """Where they are numbers; a build of no release has none."""
    assert release == EngineSettings(version=version).release


@pytest.mark.parametrize(
    ("settings", "fraction", "graphs"),
    [
        ({"version": "0.19.1"}, 0.90, False),
        ({"version": "0.20.2"}, 0.92, False),
        ({"version": "0.21.0"}, 0.92, True),
        ({"version": "1.0"}, 0.92, True),
        ({"version": "v0.32.0+cu130"}, 0.92, True),
        ({}, 0.92, True),
        ({"version": "0.19.1", "memory_fraction_ratio": 0.5}, 0.5, False),
        ({"version": "0.21.0", "enforce_eager": True}, 0.92, False),
        ({"version": "0.21.0", "enforce_eager": True, "graphs_estimated": True}, 0.92, False),
        ({"version": "0.21.0", "enforce_eager": False}, 0.92, True),
        ({"version": "0.21.0", "graphs_estimated": False}, 0.92, False),
        ({"version": "0.19.0", "graphs_estimated": True}, 0.90, True),
    ],
)
def test_what_changed_with_the_releases(settings: dict[str, Any], fraction: float, graphs: bool) -> None:
    """0.90 up to 0.19 and 0.92 since; room for graphs inside the fraction since 0.21, unless the log says otherwise."""
    told = EngineSettings(**settings)

    assert (fraction, graphs) == (told.fraction_ratio, told.graphs_in_fraction)


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("cuda", False), (None, False)])
def test_an_engine_on_the_cpu(device: str | None, expected: bool) -> None:
    """By the device that it names."""
    assert expected is EngineSettings(device=device).is_cpu


def test_the_rank_with_the_smallest_pool_decides() -> None:
    """A rank without a pool never decides, even as the first; of equal ones the first does; the total is the least."""
    report = EngineReport(ranks=(rank("a"), rank("b", 7, 90), rank("c", 5, 100), rank("d", 5), rank("e", None, 80)))

    assert report.ranks[2] == report.deciding_rank
    assert 80 == report.total_bytes
    assert (None, None) == (EngineReport().deciding_rank, EngineReport().total_bytes)
    assert EngineReport(ranks=(rank("a"),)).deciding_rank is None


@pytest.mark.parametrize(
    ("told", "longest", "expected"), [(8000, 9000, 8000), (None, 9000, 9000), (8000, None, 8000), (None, None, None)]
)
def test_the_length_that_concurrency_is_told_for(told: int | None, longest: int | None, expected: int | None) -> None:
    """The line's own, else max_model_len."""
    report = EngineReport(settings=EngineSettings(max_model_len_tokens=longest), concurrency_context_tokens=told)

    assert expected == report.context_tokens


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (False, None, None, ())),
        ({"usable_blocks": 1000, "usage_blocks": 1000}, (True, None, None, ())),
        ({"state_cache_mode": "align", "state_dtype": "float32"}, (False, "align", "float32", ())),
        ({"state_cache_mode": "all", "state_dtype": "auto"}, (False, "all", None, ())),
        ({"state_cache_mode": "of tomorrow"}, (False, None, None, ())),
        ({"pool_bytes": 5}, (False, None, None, (rank("each rank", 5),))),
    ],
    ids=["V1", "V0 keeps no null block", "states", "auto is no dtype", "an unknown mode", "bytes"],
)
def test_a_page_in_the_logs_terms(change: dict[str, Any], expected: tuple[object, ...]) -> None:
    """What the labels say, and nothing where they say nothing that is known."""
    report = page_report(Facts(pools=(replace(POOL, **change),)))

    assert expected == (report.is_v0, report.settings.state_cache_mode, report.settings.state_dtype, report.ranks)
    assert change.get("pool_bytes") == report.settings.pool_bytes


@pytest.mark.parametrize(
    ("blocks", "named"), [((1000,), None), ((1000, 900), "engine 1"), ((900, 1000, 900), "engine 0")]
)
def test_the_smallest_of_several_pools(blocks: tuple[int, ...], named: str | None) -> None:
    """It is named where there are several, the first of equals."""
    pools = tuple(
        replace(POOL, engine=str(number), total_blocks=total, usable_blocks=total - 1, usage_blocks=total - 1)
        for number, total in enumerate(blocks)
    )

    report = page_report(Facts(pools=pools))

    assert (min(blocks), [] if named is None else [True]) == (
        report.num_blocks,
        [named is not None and named in note for note in report.notes],
    )


FULL_POOL = KvPool(
    engine="0",
    block_tokens=16,
    total_blocks=1000,
    usable_blocks=999,
    usage_blocks=999,
    capacity_tokens=16_000,
    max_concurrency=2.0,
    cache_dtype="fp8",
    memory_fraction_ratio=0.85,
    prefix_caching=False,
    state_cache_mode="align",
    state_dtype="float32",
)
FACTS = Facts(
    engine_version="0.32.0",
    model="m",
    max_model_len_tokens=8000,
    pools=(FULL_POOL,),
    tensor_parallel=2,
    pipeline_parallel=1,
)


def test_a_metrics_endpoint_reports_capacity_and_settings() -> None:
    """On a GPU it has no sizes at all."""
    expected = EngineReport(
        settings=EngineSettings(
            version="0.32.0",
            model="m",
            kv_dtype="fp8",
            tensor_parallel=2,
            pipeline_parallel=1,
            max_model_len_tokens=8000,
            block_size_tokens=16,
            memory_fraction_ratio=0.85,
            prefix_caching=False,
            state_cache_mode="align",
            state_dtype="float32",
        ),
        num_blocks=1000,
        tokens=16_000,
        concurrency=2.0,
    )

    assert expected == page_report(FACTS)


def test_a_page_without_pools_tells_nothing() -> None:
    """The report is empty but for who answers."""
    report = page_report(replace(FACTS, pools=()))

    assert (None, None, ()) == (report.num_blocks, report.tokens, report.ranks)
