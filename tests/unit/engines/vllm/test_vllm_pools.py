"""vLLM's metrics endpoint to pools and host caches: labels read or omitted, and impossible pools."""

from dataclasses import replace

import pytest

from kvdiag.engines.engine import SOURCE
from kvdiag.engines.metrics_reader import MAX_SERIES
from kvdiag.engines.vllm import ENGINE
from kvdiag.engines.vllm.metrics import parse_caches, parse_pools
from kvdiag.model import Gap, KvPool
from tests.builders.answers import containing
from tests.builders.metrics_pages import parse_page
from tests.unit.engines.vllm.vllm_pages import engine_page


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param('num_gpu_blocks="None",block_size="16"', "num_gpu_blocks is 'None'", id="0.8: None"),
        pytest.param('block_size="16"', "num_gpu_blocks is None", id="no blocks"),
        pytest.param('num_gpu_blocks="100"', "block_size is None", id="no block size"),
        pytest.param('num_gpu_blocks="1",block_size="16"', "KvPool: 0 usable", id="the null block alone"),
        pytest.param('num_gpu_blocks="100",block_size="0"', "KvPool: block_tokens is 0", id="empty blocks"),
        pytest.param('num_gpu_blocks="-5",block_size="16"', "num_gpu_blocks is '-5'", id="negative"),
        pytest.param(
            f'num_gpu_blocks="{"9" * 5000}",block_size="16"',
            f"num_gpu_blocks is '{'9' * 39}, block_size is '16'",
            id="5,000 digits",
        ),
    ],
)
def test_pool_that_cannot_be_is_a_gap(config: str, reason: str) -> None:
    """A pool whose labels make no pool is missing, and a gap quotes them, shortened."""
    page = parse_page(engine_page("vllm:prefix_cache_queries_total 0.0", config=config))
    actual = parse_pools(page, "0.32.0")
    told = Gap(source=SOURCE, kind="failed", reason=containing("vllm:cache_config_info of engine 0", reason))
    assert ((), (told,)) == actual


LINE = 'vllm:cache_config_info{{engine="{}",num_gpu_blocks="{}",block_size="16"}} 1\n'


def test_one_broken_pool_leaves_the_others() -> None:
    """Of two engines' lines, the one that cannot be read is a gap and the other a pool of its half."""
    pools, gaps = parse_pools(
        parse_page(LINE.format(0, 200) + LINE.format(1, None) + "vllm:prefix_cache_queries_total 0\n"),
        "0.32.0",
    )

    expected = KvPool(engine="0", block_tokens=16, total_blocks=100, usable_blocks=99, usage_blocks=99)
    reason = containing("vllm:cache_config_info of engine 1", "'None'", "'16'")
    assert ((expected,), (Gap(source=SOURCE, kind="failed", reason=reason),)) == (pools, gaps)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        pytest.param(
            LINE.format(0, 200) + LINE.format(0, 900),
            containing("vllm:cache_config_info", "2 times", "engine 0"),
            id="two servers behind one address",
        ),
        pytest.param(
            "".join(LINE.format(number, 9) for number in range(5_000)),
            containing("vllm:cache_config_info", "5000 series", f"more than {MAX_SERIES}"),
            id="more pools than any server has",
        ),
    ],
)
def test_hostile_number_of_pools_is_refused(page: str, reason: str) -> None:
    """Of a page that is not one server's no pool is taken, and a gap says why."""
    pools, (gap,) = parse_pools(parse_page(page), "0.32.0")
    assert ((), SOURCE, reason) == (pools, gap.source, gap.reason)


@pytest.mark.parametrize(
    ("labels", "changes"),
    [
        pytest.param('num_gpu_blocks_override="40"', {"pool_bytes": None, "overridden": True}, id="overridden"),
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
    config = f'num_gpu_blocks="100",block_size="16",kv_cache_memory_bytes="1073741824",{labels}'
    page = parse_page(engine_page("vllm:prefix_cache_queries_total 0", config=config))
    actual = parse_pools(page, "0.32.0")
    usual = KvPool(engine="0", block_tokens=16, total_blocks=100, usable_blocks=99, usage_blocks=99, pool_bytes=2**30)
    assert ((replace(usual, **changes),), ()) == actual  # type: ignore[arg-type]


def test_v1_of_which_only_the_pool_is_seen_has_its_null_block() -> None:
    """Where a filter or multiprocess mode leaves only the pool's line, the version shows that there is a null block."""
    page = parse_page(engine_page(config='num_gpu_blocks="100",block_size="16"'))
    (pool,), _ = parse_pools(page, "0.32.0")
    assert (99, 99) == (pool.usable_blocks, pool.usage_blocks)


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
    lines = "\n".join(
        f'vllm:cache_config_info{{engine="{number}"'
        + ("" if size is None else f',kv_offloading_size="{size}"')
        + "} 1.0"
        for number, size in enumerate(sizes)
    )
    assert expected == [cache.limit_bytes for cache in parse_caches(parse_page(f"{lines}\n"))]


@pytest.mark.parametrize(
    ("names", "commands", "expected"),
    [
        (
            (),
            ['vllm serve m --kv-transfer-config {"kv_connector":"NixlConnector"}'],
            "NixlConnector",
        ),
        ((), ["vllm serve m --kv-transfer-config.kv_connector MooncakeConnector"], "MooncakeConnector"),
        (
            (),
            ["vllm serve m --kv-transfer-config={'kv_role': 'kv_both', 'kv_connector': 'P2p'}"],
            "P2p",
        ),
        (("vllm:nixl_bytes_transferred_sum",), ["VLLM::EngineCore"], "nixl"),
        (("vllm:num_requests_running",), ['vllm serve m --x {"kv_connector_extra_config": {"a": 1}}'], None),
        ((), [], None),
    ],
)
def test_a_kv_connector_is_visible(names: tuple[str, ...], commands: list[str], expected: str | None) -> None:
    """On the command line, or by its metrics where the server's processes are not visible."""
    assert expected == ENGINE.kv_connector(names, commands)


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (("vllm serve m --max-num-seqs 6",), 6),
        (("vllm serve m --max_num_seqs=6 --port 8000", "VLLM::EngineCore"), 6),
        (("vllm serve m --max-num-seqs 6 --max-num-seqs 9",), 9),
        (("vllm serve m --max-num-seqs 0",), None),
        (("vllm serve m --max-num-seqs six", "vllm serve m --max-num-seqs 6k"), None),
        ((f"vllm serve m --max-num-seqs {'9' * 5000}",), None),
        ((), None),
    ],
)
def test_requests_at_once_stand_on_the_command_line(commands: tuple[str, ...], expected: int | None) -> None:
    """No metric of vLLM has --max-num-seqs; the last one given counts, and what is no number is not reported."""
    page = parse_page(engine_page("vllm:prefix_cache_queries_total 0", config='num_gpu_blocks="100",block_size="16"'))
    assert [expected] == [pool.max_requests for pool in parse_pools(page, "0.32.0", commands)[0]]
