"""TensorRT-LLM's metrics, of trtllm-serve and of Triton, to an engine and its pool."""

import json

import pytest

from kvdiag.diagnosis.blocks.expected import ExpectedBlocks, blocks_needed
from kvdiag.engines.engine import SOURCE
from kvdiag.engines.trtllm import ENGINE, TRITON
from kvdiag.engines.trtllm.metrics import STILL, longest_tokens, parse_engines, parse_pools
from kvdiag.model import Engine, Facts, Gap, KvPool
from kvdiag.sources.prometheus_text import Series
from tests.builders.answers import containing
from tests.builders.metrics_pages import parse_page
from tests.builders.scrapes import scrape

USED, MOST, SIZE = (f"trtllm_kv_cache_{name}" for name in ("used_blocks", "max_blocks", "tokens_per_block"))

MOVING = {STILL: (Series({}, 0.0),)}
"""As the client adds it while iterations come."""


def test_counts_of_the_last_iteration_may_be_over() -> None:
    """Without knowing whether the figures move, a count above 0 is unknown; standing still, it is 0."""
    page = scrape("trtllm-1.3-written")
    unknown, still = (parse_engines(one)[0] or () for one in (page, {**page, STILL: (Series({}, 1.0),)}))
    counts = [(one.requests_running, one.requests_waiting, one.idle) for one in (*unknown, *still)]
    assert [(None, None, None), (0, 0, True)] == counts


def test_the_server_s_gauges_are_read() -> None:
    """Blocks in use of those there are, requests, and prompt tokens that were cached."""
    engine = Engine(
        engine="0",
        kv_usage_ratio=686 / 4096,
        requests_running=10,
        requests_waiting=2,
        requests_waiting_for_capacity=1,
        prompt_tokens_total=24_576,
        generation_tokens_total=1200,
        requests_finished_total=12,
        prefix_queries_total=24_576,
        prefix_hits_total=6144,
    )
    assert ((engine,), ()) == parse_engines({**scrape("trtllm-1.3-written"), **MOVING})


def test_the_pool_is_read_from_gauges() -> None:
    """All blocks can be used, and the usage gauge counts all of them."""
    pool = KvPool(engine="0", block_tokens=32, total_blocks=4096, usable_blocks=4096, usage_blocks=4096)
    assert ((pool,), ()) == parse_pools(scrape("trtllm-1.3-written"), None, ())
    assert 686 == pool.used_blocks(686 / 4096)


def test_before_the_first_request_ended_there_is_no_pool() -> None:
    """The server counts, but has no gauge: the gap says that a request is needed."""
    page = scrape("trtllm-1.3-before-first-request-written")
    assert ((Engine(engine="0", prefix_hits_total=None),), ()) == parse_engines(page)
    assert ((), (Gap(SOURCE, "absent", containing("send one request")),)) == parse_pools(page, None, ())


def test_triton_s_figures_are_the_same_engine_s() -> None:
    """The sample of the backend's README, in which used and free blocks are more than there are."""
    page = scrape("trtllm-triton-0b9d7d5-readme")
    assert (
        (Engine(engine="0", kv_usage_ratio=1 / 6239, requests_running=0, requests_waiting=1),),
        (),
    ) == parse_engines({**page, **MOVING})
    pool = KvPool(engine="0", block_tokens=64, total_blocks=6239, usable_blocks=6239, usage_blocks=6239)
    assert ((pool,), ()) == parse_pools(page, None, ())


@pytest.mark.parametrize(
    ("lines", "usage", "reason"),
    [
        ((f"{USED} 3", f"{MOST} 2"), None, (USED, "is 3")),
        ((f"{USED} NaN", f"{MOST} 2"), None, (USED, "is nan")),
        ((f"{USED} 0", f"{MOST} 0"), None, ()),
        (("trtllm_kv_cache_utilization 1.5",), None, ("KV usage", "is 1.5")),
        (("trtllm_kv_cache_utilization 0.25",), 0.25, ()),
        ((f'{USED}{{model_name="a"}} 1', f'{USED}{{model_name="b"}} 1', f"{MOST} 4"), None, (USED, "2 times")),
    ],
)
def test_impossible_usage_is_a_gap(lines: tuple[str, ...], usage: float | None, reason: tuple[str, ...]) -> None:
    """More blocks in use than there are, no number, or two servers at one address are no usage."""
    engines, gaps = parse_engines(parse_page("".join(f"{line}\n" for line in lines)))
    assert engines is not None
    assert usage == engines[0].kv_usage_ratio
    assert ((Gap(SOURCE, "failed", containing(*reason)),) if reason else ()) == gaps


@pytest.mark.parametrize("lines", [(f"{MOST} 0", f"{SIZE} 32"), (f"{MOST} 100",), (f"{MOST} 100", f"{SIZE} 0")])
def test_a_pool_that_cannot_be_is_a_gap(lines: tuple[str, ...]) -> None:
    """A pool without blocks, or whose blocks have no size, is left out."""
    pools, gaps = parse_pools(parse_page("".join(f"{line}\n" for line in lines)), None, ())
    assert ((), ["failed"]) == (pools, [gap.kind for gap in gaps])


def test_without_iteration_statistics_there_is_no_usage() -> None:
    """Request metrics alone show no pool; gauges of the pool come late."""
    requests = {"trtllm_prompt_tokens_total": ()}
    assert (False, False) == (ENGINE.capabilities(requests).usage, ENGINE.capabilities(requests).blocks)
    for engine, page in ((ENGINE, "trtllm-1.3-written"), (TRITON, "trtllm-triton-0b9d7d5-readme")):
        shown = engine.capabilities(scrape(page))
        assert (True, True, True) == (shown.usage, shown.blocks, shown.on_completion)


def test_a_page_of_another_engine_names_both_settings() -> None:
    """What turns the metrics on is in the gap of a page without them."""
    engines, gaps = parse_engines(parse_page("up 1\n"))
    assert engines is None
    assert (Gap(SOURCE, "absent", containing("return_perf_metrics", "enable_iter_perf_stats")),) == gaps


@pytest.mark.parametrize(("label", "longest"), [("8192", 8192), ("None", None), ("0", None), ("9" * 40, None)])
def test_the_longest_request_is_a_label(label: str, longest: int | None) -> None:
    """trtllm-serve's /v1/models has no length; its settings are the labels of a gauge."""
    page = parse_page(f'trtllm_model_config_info{{model="m",max_model_len="{label}"}} 1\n')
    assert longest == longest_tokens(page)


def test_windows_keep_every_token() -> None:
    """Where vLLM would return the blocks below a window, they stay, unless max_attention_window is set."""
    page = scrape("trtllm-1.3-written")
    windowed = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    pools, _ = parse_pools(page, None, ())
    facts = Facts(
        engine_name="trtllm",
        model_config=json.dumps(windowed),
        max_model_len_tokens=8192,
        pools=pools,
        capabilities=ENGINE.capabilities(page),
    )
    blocks = -(-4096 // pools[0].block_tokens)
    assert ExpectedBlocks(least_blocks=blocks, most_blocks=blocks) == blocks_needed([4096], facts)
