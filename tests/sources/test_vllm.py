"""vLLM's metrics pages from 0.5 to 0.32 into engines and pools, and pages that no vLLM ever sent."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvdiag.model import MAX_COUNT, Engine, Gap, KvPool
from kvdiag.sources.vllm import (
    MAX_SERIES,
    SOURCE,
    WAITING_BY_REASON,
    parse_caches,
    parse_engines,
    parse_pools,
    parse_version,
)
from kvdiag.sources.vllm_page import MAX_LINE_CHARACTERS, Page, parse_page

SCRAPES = Path(__file__).parents[1] / "fixtures" / "scrapes"

NO_POOL = Gap(source=SOURCE, kind="absent", reason="the page has no vllm:cache_config_info: the pool's size is unknown")


def page_of(name: str) -> Page:
    """A stored page."""
    return parse_page((SCRAPES / f"{name}.prom").read_text())


def engine_page(*lines: str, config: str = "") -> str:
    """A page of one engine with these gauges, and a pool where `config` gives its labels."""
    pool = [f'vllm:cache_config_info{{engine="0",{config}}} 1.0'] if config else []
    return "".join(f"{line}\n" for line in (*lines, *pool))


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
    # GIVEN
    page = page_of(known.page)

    # WHEN
    actual = (parse_engines(page), parse_pools(page, known.version))

    # THEN
    assert ((known.engines, ()), (known.pools, ())) == actual


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.page)
def test_unknown_version_is_told_by_the_page(known: Known) -> None:
    """Without /version the pool comes out the same, but where a version shows both names of the usage gauge."""
    # GIVEN 0.10.2, and 0.11 with hidden metrics, whose pages cannot be told from 0.9.2's
    both_names = known.page in ("vllm-0.10.2-V1-rendered", "vllm-0.11.2-V1-hidden-rendered")
    expected = (EARLY_V1_POOL,) if both_names else known.pools

    # WHEN
    actual = [parse_pools(page_of(known.page), version) for version in (None, "", "dev", "v", "0", "1" * 5000)]

    # THEN
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
    # WHEN
    actual = parse_version(version)

    # THEN
    assert expected == actual


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
    # GIVEN
    (pool,), _ = parse_pools(page_of(page), version)

    # WHEN
    actual = pool.used_blocks(usage_ratio)

    # THEN
    assert expected == actual


@pytest.mark.parametrize(
    ("lines", "expected", "reasons"),
    [
        pytest.param(
            ["vllm:num_requests_running NaN", "vllm:num_requests_waiting 0.0"],
            Engine(engine="0", requests_waiting=0),
            ["vllm:num_requests_running of engine 0 is nan: not a possible figure"],
            id="count NaN",
        ),
        pytest.param(
            ["vllm:num_requests_running -1.0"],
            Engine(engine="0"),
            ["vllm:num_requests_running of engine 0 is -1: not a possible figure"],
            id="count negative",
        ),
        pytest.param(
            ["vllm:prompt_tokens_total +Inf"],
            Engine(engine="0"),
            ["vllm:prompt_tokens_total of engine 0 is inf: not a possible figure"],
            id="count infinite",
        ),
        pytest.param(
            [f"vllm:prompt_tokens_total {2 * MAX_COUNT}.0"],
            Engine(engine="0"),
            ["vllm:prompt_tokens_total of engine 0 is 1.80144e+16: not a possible figure"],
            id="count beyond what a float carries",
        ),
        pytest.param(
            [f"vllm:num_requests_running 1{'0' * 400}"],
            Engine(engine="0"),
            ["vllm:num_requests_running of engine 0 is inf: not a possible figure"],
            id="count of 401 digits",
        ),
        pytest.param(
            ["vllm:kv_cache_usage_perc NaN"],
            Engine(engine="0"),
            ["KV usage of engine 0 is nan: not a possible figure"],
            id="usage NaN",
        ),
        pytest.param(
            ["vllm:kv_cache_usage_perc -0.1"],
            Engine(engine="0"),
            ["KV usage of engine 0 is -0.1: not a possible figure"],
            id="usage negative",
        ),
        pytest.param(
            ["vllm:kv_cache_usage_perc 37.5"],
            Engine(engine="0"),
            ["KV usage of engine 0 is 37.5: not a possible figure"],
            id="usage in percent",
        ),
        pytest.param(
            ['vllm:engine_sleep_state{sleep_state="awake"} NaN'],
            Engine(engine="0"),
            ["vllm:engine_sleep_state of engine 0 is nan: not a possible figure"],
            id="sleep state NaN",
        ),
        pytest.param(
            [
                'vllm:engine_sleep_state{sleep_state="awake"} 0.0',
                'vllm:engine_sleep_state{sleep_state="discard_all"} 1',
            ],
            Engine(engine="0", asleep=True),
            [],
            id="asleep",
        ),
        pytest.param(
            ['vllm:num_requests_waiting_by_reason{reason="capacity"} -3'],
            Engine(engine="0"),
            ["vllm:num_requests_waiting_by_reason of engine 0 is -3: not a possible figure"],
            id="waiting for capacity negative",
        ),
        pytest.param(
            ['vllm:num_requests_running{model_name="a"} 1.0', 'vllm:num_requests_running{model_name="b"} 0.0'],
            Engine(engine="0"),
            ["vllm:num_requests_running stands 2 times for engine 0: is this page joined from several servers?"],
            id="two servers on one page",
        ),
        pytest.param(
            ['vllm:num_requests_waiting_by_reason{reason="capacity"} 3'] * 2,
            Engine(engine="0"),
            [
                f"{WAITING_BY_REASON} stands 2 times for engine 0: is this page joined from several servers?",
            ],
            id="a reason twice",
        ),
        pytest.param(
            ['vllm:engine_sleep_state{sleep_state="awake"} 0', 'vllm:engine_sleep_state{sleep_state="awake"} 1'],
            Engine(engine="0"),
            ["vllm:engine_sleep_state stands 2 times for engine 0: is this page joined from several servers?"],
            id="a sleep state twice",
        ),
    ],
)
def test_impossible_figure_is_a_gap(lines: list[str], expected: Engine, reasons: list[str]) -> None:
    """A figure that cannot be is missing from the engine, and a gap names it; the others stand."""
    # GIVEN
    page = parse_page(engine_page(*lines))

    # WHEN
    actual = parse_engines(page)

    # THEN
    assert ((expected,), tuple(Gap(source=SOURCE, kind="failed", reason=reason) for reason in reasons)) == actual


def test_fraction_of_a_count_is_rounded() -> None:
    """A count that was averaged on its way, as multiprocess modes can, comes out whole."""
    # GIVEN
    page = parse_page("vllm:num_requests_running 2.6\n")

    # WHEN
    engines, gaps = parse_engines(page)

    # THEN
    assert ((Engine(engine="0", requests_running=3),), ()) == (engines, gaps)


def test_engines_come_in_numeric_order() -> None:
    """Ten data-parallel engines are listed by number, labels that are none after them."""
    # GIVEN
    labels = ["10", "2", "x", "0", "٣", "9" * 5000]
    page = parse_page("".join(f'vllm:num_requests_running{{engine="{label}"}} 0\n' for label in labels))

    # WHEN
    engines, _ = parse_engines(page)

    # THEN
    assert engines is not None
    assert ["0", "2", "٣", "10", "9" * 5000, "x"] == [engine.engine for engine in engines]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(
            re.sub(r"(?m)^(# (HELP|TYPE) )?vllm:.*\n", "", (SCRAPES / "vllm-0.28.0-cpu-load.prom").read_text()),
            "the page has no vllm:* series: start the server without --disable-log-stats",
            id="--disable-log-stats",
        ),
        pytest.param(
            "",
            "the page has no vllm:* series: is this the metrics page of a vLLM server?",
            id="empty",
        ),
        pytest.param(
            'node_cpu_seconds_total{cpu="0",mode="idle"} 5.0\n',
            "the page has no vllm:* series: is this the metrics page of a vLLM server?",
            id="another exporter",
        ),
    ],
)
def test_page_without_engines_says_why(text: str, reason: str) -> None:
    """A page that shows no engine is a gap with what to do, not an idle server."""
    # GIVEN
    page = parse_page(text)

    # WHEN
    actual = (parse_engines(page), parse_pools(page, "0.32.0"))

    # THEN
    assert ((None, (Gap(source=SOURCE, kind="absent", reason=reason),)), ((), (NO_POOL,))) == actual


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(
            'num_gpu_blocks="None",block_size="16"', "num_gpu_blocks is 'None', block_size is '16'", id="0.8: None"
        ),
        pytest.param('block_size="16"', "num_gpu_blocks is None, block_size is '16'", id="no blocks"),
        pytest.param('num_gpu_blocks="100"', "num_gpu_blocks is '100', block_size is None", id="no block size"),
        pytest.param('num_gpu_blocks="1",block_size="16"', "KvPool: total_blocks is 1", id="the null block alone"),
        pytest.param('num_gpu_blocks="100",block_size="0"', "KvPool: block_tokens is 0", id="empty blocks"),
        pytest.param(
            'num_gpu_blocks="-5",block_size="16"', "num_gpu_blocks is '-5', block_size is '16'", id="negative"
        ),
        pytest.param(
            f'num_gpu_blocks="{"9" * 5000}",block_size="16"',
            f"num_gpu_blocks is '{'9' * 39}, block_size is '16'",
            id="5,000 digits",
        ),
    ],
)
def test_pool_that_cannot_be_is_a_gap(config: str, reason: str) -> None:
    """A pool whose labels make no pool is missing, and a gap quotes them, shortened."""
    # GIVEN
    page = parse_page(engine_page("vllm:prefix_cache_queries_total 0.0", config=config))

    # WHEN
    actual = parse_pools(page, "0.32.0")

    # THEN
    told = Gap(source=SOURCE, kind="failed", reason=f"vllm:cache_config_info of engine 0 cannot be used: {reason}")
    assert ((), (told,)) == actual


def test_one_broken_pool_leaves_the_others() -> None:
    """Of two engines' lines, the one that cannot be read is a gap and the other a pool of its half."""
    # GIVEN
    page = parse_page(
        'vllm:cache_config_info{engine="0",num_gpu_blocks="200",block_size="16"} 1\n'
        'vllm:cache_config_info{engine="1",num_gpu_blocks="None",block_size="16"} 1\n'
        "vllm:prefix_cache_queries_total 0\n"
    )

    # WHEN
    pools, gaps = parse_pools(page, "0.32.0")

    # THEN
    expected = KvPool(engine="0", block_tokens=16, total_blocks=100, usable_blocks=99, usage_blocks=99)
    reason = "vllm:cache_config_info of engine 1 cannot be used: num_gpu_blocks is 'None', block_size is '16'"
    assert ((expected,), (Gap(source=SOURCE, kind="failed", reason=reason),)) == (pools, gaps)


def test_pool_told_twice_is_a_gap() -> None:
    """Two different lines for one engine are two servers behind one address: neither is taken."""
    # GIVEN
    page = parse_page(
        'vllm:cache_config_info{engine="0",num_gpu_blocks="200",block_size="16"} 1\n'
        'vllm:cache_config_info{engine="0",num_gpu_blocks="900",block_size="16"} 1\n'
    )

    # WHEN
    actual = parse_pools(page, "0.32.0")

    # THEN
    reason = "vllm:cache_config_info stands 2 times for engine 0: is this page joined from several servers?"
    assert ((), (Gap(source=SOURCE, kind="failed", reason=reason),)) == actual


@pytest.mark.parametrize(
    ("labels", "changes"),
    [
        pytest.param(
            'num_gpu_blocks_override="40"', {"pool_bytes": None}, id="overridden: the size asked for is not it"
        ),
        pytest.param('num_gpu_blocks_override="None"', {}, id="not overridden"),
        pytest.param('effective_attention_block_size="64"', {"block_tokens": 64}, id="context parallel"),
        pytest.param('effective_attention_block_size="None"', {}, id="effective size not told"),
        pytest.param('sliding_window="4096"', {"sliding_window_tokens": 4096}, id="sliding window"),
        pytest.param('gpu_memory_utilization="0.85"', {"memory_fraction_ratio": 0.85}, id="fraction"),
        pytest.param('gpu_memory_utilization="85"', {}, id="fraction in percent"),
        pytest.param('gpu_memory_utilization="nan"', {}, id="fraction nan"),
        pytest.param('enable_prefix_caching="False"', {"prefix_caching": False}, id="no prefix caching"),
        pytest.param('enable_prefix_caching="maybe"', {}, id="prefix caching not told"),
        pytest.param('kv_cache_max_concurrency="inf"', {}, id="concurrency infinite"),
        pytest.param('kv_cache_max_concurrency="1e-320"', {}, id="concurrency next to nothing"),
        pytest.param('kv_cache_size_tokens="9007199254740992"', {}, id="capacity beyond any"),
        pytest.param('sliding_window="0"', {}, id="sliding window of nothing"),
        pytest.param('kv_cache_max_concurrency="2.5"', {"max_concurrency": 2.5}, id="concurrency"),
        pytest.param('cache_dtype="fp8"', {"cache_dtype": "fp8"}, id="fp8"),
    ],
)
def test_label_is_read_or_left_out(labels: str, changes: dict[str, object]) -> None:
    """Each label of the pool's line becomes its field; a value that says nothing leaves the field out."""
    # GIVEN
    config = f'num_gpu_blocks="100",block_size="16",kv_cache_memory_bytes="1073741824",{labels}'
    page = parse_page(engine_page("vllm:prefix_cache_queries_total 0", config=config))

    # WHEN
    actual = parse_pools(page, "0.32.0")

    # THEN
    usual = KvPool(engine="0", block_tokens=16, total_blocks=100, usable_blocks=99, usage_blocks=99, pool_bytes=2**30)
    assert ((replace(usual, **changes),), ()) == actual  # type: ignore[arg-type]


def test_v1_of_which_only_the_pool_is_seen_has_its_null_block() -> None:
    """Where a filter or multiprocess mode leaves just the pool's line, the version tells that a null block is there."""
    # GIVEN
    page = parse_page(engine_page(config='num_gpu_blocks="100",block_size="16"'))

    # WHEN
    (pool,), _ = parse_pools(page, "0.32.0")

    # THEN
    assert (99, 99) == (pool.usable_blocks, pool.usage_blocks)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<!DOCTYPE html>\n<html><body>Login</body></html>\n", id="HTML"),
        pytest.param('{"detail":"Not Found"}', id="JSON"),
        pytest.param("vllm:num_requests_running\n", id="no value"),
        pytest.param("vllm:num_requests_running three\n", id="a word for a value"),
        pytest.param('vllm:num_requests_running{engine="0} 1\n', id="open quote"),
        pytest.param('vllm:num_requests_running{engine="0"\n', id="cut off"),
        pytest.param('vllm:num_requests_running{engine="0",engine="1"} 1\n', id="a label twice"),
        pytest.param("# TYPE vllm:num_requests_running\n", id="no type"),
        pytest.param('x{a="b", ="c"} 1\n', id="a label without a name"),
        pytest.param("\x00\x01\x02\xff", id="binary"),
        pytest.param(f'x{{a="{"a" * MAX_LINE_CHARACTERS}"}} 1\n', id="an endless line"),
        pytest.param("x{" + ",".join(f'l{n}="v"' for n in range(100_000)) + "} 1\n", id="100,000 labels"),
    ],
)
def test_what_is_no_page_is_refused(text: str) -> None:
    """Text that is not in the format is one kind of error, told at once."""
    # WHEN
    with pytest.raises(ValueError, match=r".") as caught:
        parse_page(text)

    # THEN a subclass such as UnicodeError would be another kind
    assert ValueError is type(caught.value)


def test_hostile_number_of_engines_is_refused() -> None:
    """A page with more engines than any server has is a gap, not an hour's work."""
    # GIVEN
    count = 5_000
    page = parse_page("".join(f'vllm:num_requests_running{{engine="{number}"}} 0\n' for number in range(count)))

    # WHEN
    actual = parse_engines(page)

    # THEN
    reason = f"vllm:num_requests_running has {count} series, more than {MAX_SERIES}: not a page of one server"
    assert (None, (Gap(source=SOURCE, kind="failed", reason=reason),)) == actual


def test_hostile_number_of_pools_is_refused() -> None:
    """A page with more pools than any server has is a gap."""
    # GIVEN
    count = 5_000
    line = 'vllm:cache_config_info{{engine="{}",num_gpu_blocks="9",block_size="16"}} 1\n'
    page = parse_page("".join(line.format(number) for number in range(count)))

    # WHEN
    actual = parse_pools(page, "0.32.0")

    # THEN
    reason = f"vllm:cache_config_info has {count} series, more than {MAX_SERIES}: not a page of one server"
    assert ((), (Gap(source=SOURCE, kind="failed", reason=reason),)) == actual


LINES = [
    line
    for name in ("vllm-0.32.0-cpu-dp2-apiserver2-load", "vllm-0.6.0-V0-rendered", "vllm-0.9.2-V1-rendered")
    for line in (SCRAPES / f"{name}.prom").read_text().splitlines()
    if re.search(r"vllm:(cache_config|\w+_usage_perc|num_|prompt_tokens_total|engine_sleep)", line)
]
PIECES = st.sampled_from(
    [
        *'{}"\\=, #\n\t\r\x00_:',
        *("NaN", "+Inf", "-1", "1e999", "9" * 400, "٣", "²", "é", "\u2028", "\ud800", "# TYPE ", "# HELP ", "counter"),
        *("_total", 'engine="', "vllm:kv_cache_usage_perc", 'num_gpu_blocks="', 'block_size="0"', '"} 1\n', " 0.5\n"),
    ]
)


@st.composite
def spoilt_pages(draw: st.DrawFn) -> str:
    """Lines of real pages, cut and pasted over."""
    text = "\n".join(draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=5)))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(PIECES) + text[start + draw(st.integers(0, 12)) :]
    return text


@settings(max_examples=400, deadline=None)
@given(
    text=st.one_of(spoilt_pages(), st.lists(PIECES).map("".join), st.text()),
    version=st.one_of(st.none(), st.text(max_size=12), st.sampled_from(["0.6.0", "0.9.2", "0.10.2", "0.32.0"])),
)
@example(text="# HELP a b= , =c", version=None)
@example(text='vllm:num_requests_running{engine="' + "1" * 5000 + '"} 1', version=None)
@example(text="vllm:kv_cache_usage_perc " + "9" * 400, version=None)
def test_no_text_does_harm(text: str, version: str | None) -> None:
    """Whatever a server sends is either refused as no page, or parsed without another error."""
    # GIVEN
    try:
        page = parse_page(text)
    except ValueError:
        return

    # WHEN
    engines, gaps = parse_engines(page)
    pools, pool_gaps = parse_pools(page, version)

    # THEN nothing seen is said to be nothing there
    assert engines or gaps
    assert pools or pool_gaps


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (["32"], [32 * 2**30]),
        (["0.5", "0.5"], [2**29]),
        (["None"], []),
        (["4", "8"], []),
        (["1e9"], []),
        (["-1"], []),
        (["99999999"], []),
        ([None], []),
    ],
)
def test_bounds_of_host_caches_stand_on_the_page(sizes: list[str | None], expected: list[int]) -> None:
    """The size of the offloading buffer, where all engines say the same and it is a size at all."""
    # GIVEN
    lines = "\n".join(
        f'vllm:cache_config_info{{engine="{number}"'
        + ("" if size is None else f',kv_offloading_size="{size}"')
        + "} 1.0"
        for number, size in enumerate(sizes)
    )

    # THEN
    assert expected == [cache.limit_bytes for cache in parse_caches(parse_page(f"{lines}\n"))]
