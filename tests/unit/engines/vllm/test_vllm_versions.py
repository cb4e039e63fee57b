"""vLLM's stored pages from 0.5 to 0.32 into engines and pools, and what their versions count."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from kvdiag.engines.vllm.metrics import parse_engines, parse_pools, parse_version
from kvdiag.model import Engine, KvPool
from tests.unit.engines.vllm.vllm_pages import page_of

V0_ENGINE = Engine(
    engine="0",
    kv_usage_ratio=0.25,
    requests_running=3,
    requests_waiting=1,
    preemptions_total=2,
    prompt_tokens_total=1000,
    generation_tokens_total=500,
)
V0_POOL = KvPool(
    engine="0",
    block_tokens=16,
    total_blocks=27000,
    usable_blocks=27000,
    usage_blocks=27000,
    cache_dtype="auto",
    memory_fraction_ratio=0.9,
    prefix_caching=True,
)
V1_ENGINE = Engine(
    engine="0",
    kv_usage_ratio=0.25,
    requests_running=3,
    requests_waiting=1,
    preemptions_total=0,
    prompt_tokens_total=0,
    generation_tokens_total=0,
    prefix_queries_total=1000,
    prefix_hits_total=250,
)
EARLY_V1_POOL = KvPool(
    engine="0",
    block_tokens=16,
    total_blocks=27000,
    usable_blocks=26999,
    usage_blocks=27000,
    memory_fraction_ratio=0.9,
    prefix_caching=True,
)
V1_POOL = replace(EARLY_V1_POOL, usage_blocks=26999)
AWAKE_V1_ENGINE = replace(V1_ENGINE, asleep=False)

LOADED_ENGINE = Engine(
    engine="0",
    kv_usage_ratio=0.06642246642246641,
    requests_running=16,
    requests_waiting=4,
    requests_waiting_for_capacity=4,
    preemptions_total=0,
    prompt_tokens_total=148136,
    generation_tokens_total=5977,
    prefix_queries_total=148136,
    prefix_hits_total=0,
    asleep=False,
)
IDLE_ENGINE = Engine(
    engine="0",
    kv_usage_ratio=0.0,
    requests_running=0,
    requests_waiting=0,
    requests_waiting_for_capacity=0,
    preemptions_total=0,
    prompt_tokens_total=0,
    generation_tokens_total=0,
    prefix_queries_total=0,
    prefix_hits_total=0,
    asleep=False,
)
CPU_POOL = KvPool(
    engine="0",
    block_tokens=128,
    total_blocks=4096,
    usable_blocks=4095,
    usage_blocks=4095,
    capacity_tokens=521783,
    max_concurrency=26.089171974522294,
    pool_bytes=2**30,
    cache_dtype="auto",
    state_cache_mode="none",
    state_dtype="float32",
    memory_fraction_ratio=0.92,
    prefix_caching=True,
)
DATA_PARALLEL_LOAD = replace(
    LOADED_ENGINE, prompt_tokens_total=32768, generation_tokens_total=1353, prefix_queries_total=32768
)
NEVER_SET = Engine(
    engine="0",
    preemptions_total=0,
    prompt_tokens_total=0,
    generation_tokens_total=0,
    prefix_queries_total=0,
    prefix_hits_total=0,
    asleep=False,
)


@dataclass(frozen=True, slots=True)
class Known:
    """A stored page and what is on it."""

    page: str
    version: str
    engines: tuple[Engine, ...]
    pools: tuple[KvPool, ...]


KNOWN = (
    Known(
        "vllm-0.5-V0-cpu-excerpt",
        "0.5.0",
        (
            Engine(
                engine="0",
                kv_usage_ratio=0.0,
                requests_running=0,
                requests_waiting=0,
                preemptions_total=0,
                prompt_tokens_total=5,
                generation_tokens_total=7,
            ),
        ),
        (replace(V0_POOL, total_blocks=7281, usable_blocks=7281, usage_blocks=7281, prefix_caching=False),),
    ),
    Known("vllm-0.6.0-V0-rendered", "0.6.0", (V0_ENGINE,), (V0_POOL,)),
    Known("vllm-0.6.6-V0-rendered", "0.6.6.post1", (V0_ENGINE,), (V0_POOL,)),
    Known("vllm-0.7.3-V0-rendered", "0.7.3", (V0_ENGINE,), (V0_POOL,)),
    Known("vllm-0.8.4-V0-rendered", "0.8.4", (V0_ENGINE,), (V0_POOL,)),
    Known("vllm-0.8.5.post2-V1-rendered", "0.8.5.post2", (V1_ENGINE,), (EARLY_V1_POOL,)),
    Known("vllm-0.9.0.1-V1-rendered", "0.9.0.1", (V1_ENGINE,), (EARLY_V1_POOL,)),
    Known("vllm-0.9.2-V1-rendered", "0.9.2", (V1_ENGINE,), (EARLY_V1_POOL,)),
    Known("vllm-0.10.2-V1-rendered", "0.10.2", (V1_ENGINE,), (V1_POOL,)),
    Known("vllm-0.11.0-V1-rendered", "0.11.0", (V1_ENGINE,), (V1_POOL,)),
    Known("vllm-0.11.2-V1-rendered", "0.11.2", (AWAKE_V1_ENGINE,), (V1_POOL,)),
    Known("vllm-0.11.2-V1-hidden-rendered", "0.11.2", (AWAKE_V1_ENGINE,), (V1_POOL,)),
    Known("vllm-0.14.0-V1-rendered", "0.14.0+cu129", (AWAKE_V1_ENGINE,), (V1_POOL,)),
    Known(
        "vllm-0.28.0-cpu-load",
        "0.28.0+cpu",
        (replace(LOADED_ENGINE, prompt_tokens_total=32768, generation_tokens_total=1769, prefix_queries_total=32768),),
        (CPU_POOL,),
    ),
    Known("vllm-0.32.0-cpu-load", "0.32.0", (LOADED_ENGINE,), (CPU_POOL,)),
    Known(
        "vllm-0.32.0-cpu-devmode-sleep",
        "0.32.0",
        (replace(IDLE_ENGINE, prompt_tokens_total=3010, generation_tokens_total=402, prefix_queries_total=3010),),
        (CPU_POOL,),
    ),
    Known(
        "vllm-0.32.0-cpu-tp2-idle",
        "0.32.0",
        (IDLE_ENGINE,),
        (
            replace(
                CPU_POOL,
                total_blocks=8192,
                usable_blocks=8191,
                usage_blocks=8191,
                capacity_tokens=1043566,
                max_concurrency=52.17834394904459,
            ),
        ),
    ),
    Known(
        "vllm-0.32.0-cpu-dp2-apiserver2-load",
        "0.32.0",
        (DATA_PARALLEL_LOAD, replace(DATA_PARALLEL_LOAD, engine="1")),
        (CPU_POOL, replace(CPU_POOL, engine="1")),
    ),
    Known(
        "vllm-0.32.0-cpu-dp2-apiserver2-idle",
        "0.32.0",
        (NEVER_SET, replace(NEVER_SET, engine="1")),
        (CPU_POOL, replace(CPU_POOL, engine="1")),
    ),
)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.page)
def test_every_version_reads_alike(known: Known) -> None:
    """The page of each version gives its engines' figures and its pools, and nothing is missed."""
    page = page_of(known.page)

    assert ((known.engines, ()), (known.pools, ())) == (parse_engines(page), parse_pools(page, known.version))


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.page)
def test_unknown_version_is_told_by_the_page(known: Known) -> None:
    """Without /version the pool comes out the same, but where a version shows both names of the usage gauge."""
    # 0.10.2, and 0.11 with hidden metrics, whose pages cannot be told from 0.9.2's
    both_names = known.page in ("vllm-0.10.2-V1-rendered", "vllm-0.11.2-V1-hidden-rendered")
    expected = (EARLY_V1_POOL,) if both_names else known.pools

    actual = [parse_pools(page_of(known.page), version) for version in (None, "", "dev", "v", "0", "1" * 5000)]

    assert [(expected, ())] * 6 == actual


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.6.0", (0, 6, 0)),
        ("0.8.5.post2", (0, 8, 5)),
        ("0.10.2+cu128", (0, 10, 2)),
        ("v0.11.1rc2", (0, 11, 1)),
        ("0.32", (0, 32, 0)),
        ("1.0.0", (1, 0, 0)),
        ("main", None),
        ("", None),
        (None, None),
        ("9999999.1.2", None),
    ],
)
def test_version_is_three_numbers(version: str | None, expected: tuple[int, int, int] | None) -> None:
    """Major, minor and patch are what counts of a version; anything else is none."""
    assert expected == parse_version(version)


@pytest.mark.parametrize(
    ("page", "version", "usage_ratio", "expected"),
    [
        pytest.param("vllm-0.8.4-V0-rendered", "0.8.4", 0.0, 0, id="V0 idle"),
        pytest.param("vllm-0.8.4-V0-rendered", "0.8.4", 270 / 27000, 270, id="V0 load"),
        pytest.param("vllm-0.9.2-V1-rendered", "0.9.2", 1 / 27000, 0, id="V1 0.9.2 idle"),
        pytest.param("vllm-0.9.2-V1-rendered", "0.9.2", 271 / 27000, 270, id="V1 0.9.2 load"),
        pytest.param("vllm-0.9.2-V1-rendered", "0.9.2", 0.0, 0, id="V1 0.9.2 before its first step"),
        pytest.param("vllm-0.10.2-V1-rendered", "0.10.2", 270 / 26999, 270, id="V1 0.10.2 load"),
        pytest.param("vllm-0.10.2-V1-rendered", "0.10.1", 271 / 27000, 270, id="V1 0.10.1 load"),
        pytest.param("vllm-0.32.0-cpu-load", "0.32.0", 272 / 4095, 272, id="V1 0.32 load"),
    ],
)
def test_usage_counts_blocks_as_its_version_does(page: str, version: str, usage_ratio: float, expected: int) -> None:
    """The usage gauge gives the blocks that requests hold, whether or not its version counts the null block."""
    (pool,), _ = parse_pools(page_of(page), version)

    assert expected == pool.used_blocks(usage_ratio)
