"""SGLang's stored pages from 0.3.6 to 0.5.23 into engines, pools and caches."""

import json
from collections.abc import Callable

import pytest

from kvdiag.engines.sglang import ENGINE
from kvdiag.engines.sglang.metrics import capabilities, parse_caches, parse_engines, parse_lengths, parse_pools
from kvdiag.model.codec import to_plain
from tests.builders.metrics_pages import parse_page
from tests.unit.engines.sglang.sglang_pages import page_of

PAGES = (
    "0.3.6-rendered",
    "0.4-docs-excerpt",
    "0.4.6.post5-rendered",
    "0.5.2-rendered",
    "0.5.8-rendered",
    "0.5.23-cpu-page1-10x1600-load",
    "0.5.23-cpu-page1-10x1600-after",
    "0.5.23-cpu-page16-10x1600-load",
    "0.5.23-cpu-page16-10x1600-after",
    "0.5.23-cpu-dp2-8x700-idle",
    "0.5.23-cpu-dp2-8x700-load",
    "0.5.23-cpu-dp2-8x700-after",
)


def test_every_version_reads_alike(golden: Callable[[str, str], None]) -> None:
    """The page of each version gives its engines' figures and, since 0.5.6, its pools."""
    lines = []
    for name in PAGES:
        engines, gaps = parse_engines(page_of(name))
        pools, pool_gaps = parse_pools(page_of(name), None)
        assert gaps == ()
        assert bool(pools) is not bool(pool_gaps)
        lines += [name, *(f"  {json.dumps(to_plain(one))}" for one in (*(engines or ()), *pools))]
    golden("sglang_pages.txt", "\n".join(lines) + "\n")


def test_usage_gives_the_tokens_back() -> None:
    """The share of the pool in use is exact: 7,520 tokens are 470 pages of 16."""
    name = "0.5.23-cpu-page16-10x1600-load"
    engines, _ = parse_engines(page_of(name))
    pools, _ = parse_pools(page_of(name), None)
    assert engines
    assert engines[0].kv_usage_ratio is not None
    assert pools[0].used_blocks(engines[0].kv_usage_ratio) == 470


def test_pool_has_one_page_more_than_requests_can_hold() -> None:
    """The bytes of a page are those of 16 tokens, since the padding page is among those that the bytes are of."""
    pools, _ = parse_pools(page_of("0.5.23-cpu-page16-10x1600-load"), None)
    assert (pools[0].total_blocks, pools[0].usable_blocks, pools[0].block_bytes) == (513, 512, 16 * 2048)


def test_ranks_of_one_engine_hold_the_same_tokens() -> None:
    """With --enable-metrics-for-all-schedulers two tensor-parallel ranks report one pool: the largest, not the sum."""
    ranks = "".join(
        f'sglang:{name}{{tp_rank="{rank}"}} {value}\n'
        for rank in (0, 1)
        for name, value in (
            ("max_total_num_tokens", 8192),
            ("kv_used_tokens", 2048),
            ("num_running_reqs", 3),
            ("num_queue_reqs", 0),
            ("num_retracted_requests_total", 5),
        )
    )
    engines, gaps = parse_engines(parse_page(ranks))
    assert gaps == ()
    assert engines
    assert [(one.kv_usage_ratio, one.requests_running, one.preemptions_total) for one in engines] == [(0.25, 3, 5)]


def test_two_servers_behind_one_address_are_refused() -> None:
    """One rank reports its pool once; a page that merges two servers has it twice, and neither is read."""
    both = parse_page(
        'sglang:max_total_num_tokens{tp_rank="0",model_name="a"} 8192\n'
        'sglang:max_total_num_tokens{tp_rank="0",model_name="b"} 4096\n'
        'sglang:num_running_reqs{tp_rank="0",model_name="a"} 0\n'
    )
    engines, gaps = parse_engines(both)
    assert engines is None
    assert [gap.kind for gap in gaps] == ["failed"]
    assert parse_pools(both, None)[0] == ()


def test_streams_and_sources_of_one_counter_add_up() -> None:
    """Tokens of streamed and of other requests, and cached ones of each tier, are one count each."""
    page = parse_page(
        'sglang:prompt_tokens_total{is_streaming="true"} 300\nsglang:prompt_tokens_total{is_streaming="false"} 100\n'
        'sglang:cached_tokens_total{cache_source="device"} 20\nsglang:cached_tokens_total{cache_source="host"} 3\n'
    )
    engines, _ = parse_engines(page)
    assert engines
    assert (engines[0].prompt_tokens_total, engines[0].prefix_hits_total) == (400, 23)


def test_requests_that_are_handed_over_wait() -> None:
    """A request between a prefill and a decode server holds its tokens, and runs on neither."""
    page = parse_page("sglang:num_running_reqs 0\nsglang:num_queue_reqs 1\nsglang:num_decode_transfer_queue_reqs 4\n")
    engines, _ = parse_engines(page)
    assert engines
    assert engines[0].requests_waiting == 5


@pytest.mark.parametrize("used", [8193, -1, "NaN", "+Inf", 1e30])
def test_impossible_usage_is_a_gap(used: float | str) -> None:
    """More tokens than the pool has, and what is no number of tokens, is no usage."""
    engines, gaps = parse_engines(parse_page(f"sglang:max_total_num_tokens 8192\nsglang:kv_used_tokens {used}\n"))
    assert engines
    assert engines[0].kv_usage_ratio is None
    assert len(gaps) == 1


def test_pool_without_room_is_a_gap() -> None:
    """A pool that is smaller than its page, or of no tokens, is not used."""
    page = parse_page("sglang:max_total_num_tokens 8\nsglang:page_size 16\n")
    assert (0, 1) == tuple(map(len, parse_pools(page, None)))


def test_page_alone_is_late_and_loads_are_not() -> None:
    """An idle scheduler's gauges are up to half a minute old; the snapshots of /v1/loads are not."""
    assert capabilities(page_of("0.5.8-rendered")).late_seconds > 30
    assert capabilities(parse_page("sglang:loads_used_tokens 0\n")).late_seconds == 0


@pytest.mark.parametrize(
    ("lines", "late_tokens"),
    [
        ("", 41),
        ("sglang:decode_log_interval 200", 201),
        ("sglang:loads_used_tokens 0", 16),
        ("sglang:loads_used_tokens 0\nsglang:loads_publish_interval 100", 101),
        ("sglang:loads_used_tokens 0\nsglang:loads_publish_interval 1\nsglang:step_tokens 4", 8),
        ("sglang:loads_used_tokens 0\nsglang:loads_publish_interval -3", 16),
        ("sglang:loads_used_tokens 0\nsglang:loads_publish_interval NaN", 16),
    ],
)
def test_tokens_are_as_late_as_the_flags_say(lines: str, late_tokens: int) -> None:
    """The steps between two snapshots, or two updates of the gauges, and one under way, each of so many tokens."""
    assert capabilities(parse_page(f"{lines}\n")).late_tokens == late_tokens


def test_share_of_two_digits_counts_no_pages() -> None:
    """A page with `token_usage` alone is judged by share; before the first request there is neither."""
    page = dict(page_of("0.5.8-rendered"))
    assert capabilities(page).blocks
    del page["sglang:num_used_tokens"]
    assert not capabilities(page).blocks
    assert capabilities(page_of("0.5.23-cpu-page1-10x1600-load")).blocks
    assert capabilities(page_of("0.5.23-cpu-dp2-8x700-idle")).blocks


def test_host_cache_has_the_bytes_of_its_tokens() -> None:
    """The hierarchical cache's tokens cost as much in host memory as on the device."""
    page = parse_page(
        f"sglang:max_total_num_tokens 8192\nsglang:kv_cache_memory_usage_gb {8193 * 2048 / 2**30}\n"
        "sglang:hicache_host_total_tokens 16384\n"
    )
    (cache,) = parse_caches(page)
    assert (cache.flag, cache.limit_bytes) == ("--hicache-size", 16384 * 2048)


def test_lengths_are_of_finished_requests() -> None:
    """The histograms of prompts and outputs give the mean prompt."""
    lengths = parse_lengths(page_of("0.5.23-cpu-dp2-8x700-after"))
    assert lengths is not None
    assert (sum(lengths.counts), lengths.mean_prompt_tokens) == (8, 500.0)


def test_request_has_only_ids_that_every_vocabulary_has() -> None:
    """An id beyond the vocabulary ends the server, so that none is sent as it is."""
    body = ENGINE.request.body(model="m", token_ids=[5, 128_000, 2**24], max_tokens=7, cache_salt="s", user=None)
    assert all(300 <= token < 900 for token in body["prompt"])
    assert (len(body["prompt"]), body["max_tokens"], body["min_tokens"], body["cache_salt"]) == (3, 7, 7, "s")
