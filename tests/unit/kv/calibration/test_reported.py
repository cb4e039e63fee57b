"""An engine's report from a server's facts: what a metrics page tells, and what it does not."""

from __future__ import annotations

from dataclasses import replace

from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport, page_report
from kvdiag.model import Facts, KvPool

POOL = KvPool(
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
    engine_version="0.32.0", model="m", max_model_len_tokens=8000, pools=(POOL,), tensor_parallel=2, pipeline_parallel=1
)


def test_a_page_tells_capacity_and_settings() -> None:
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


def test_the_size_of_a_pool_is_of_every_rank() -> None:
    """Where --kv-cache-memory-bytes set it, or the engine is on the CPU."""
    report = page_report(replace(FACTS, pools=(replace(POOL, pool_bytes=1 << 30),)))

    assert (RankReport(name="each rank", pool=PrintedSize(nominal_bytes=1 << 30)),) == report.ranks
    assert 1 << 30 == report.settings.pool_bytes


def test_of_several_engines_the_smallest_is_taken() -> None:
    """Each data-parallel engine has its own pool."""
    other = replace(POOL, engine="1", total_blocks=900, usable_blocks=899, usage_blocks=899)

    report = page_report(replace(FACTS, pools=(POOL, other)))

    assert 900 == report.num_blocks
    assert "engine 1" in report.notes[0]


def test_a_page_without_pools_tells_nothing() -> None:
    """The report is empty but for who answers."""
    report = page_report(replace(FACTS, pools=()))

    assert (None, None, ()) == (report.num_blocks, report.tokens, report.ranks)
