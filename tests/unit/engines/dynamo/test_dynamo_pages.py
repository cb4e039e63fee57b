"""Dynamo's metrics: its front end's, and a worker's with the series of the engine inside."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.checks import engine_check
from kvdiag.engines import ENGINES, dynamo
from kvdiag.engines.dynamo import component_metrics as metrics
from kvdiag.engines.engine import EngineAdapter
from kvdiag.model import Engine, KvPool
from kvdiag.sources.prometheus_text import Page
from tests.builders.metrics_pages import parse_page

SCRAPES = Path(__file__).parents[3] / "fixtures" / "scrapes"
VLLM = ENGINES[0]


def text(name: str) -> str:
    """A recorded page."""
    return (SCRAPES / f"dynamo-1.6.1-{name}.prom").read_text(encoding="utf-8")


def page(name: str) -> Page:
    """A recorded page, parsed."""
    return parse_page(text(name))


def worker(name: str) -> EngineAdapter:
    """The adapter of vLLM's worker with this page."""
    return dynamo.worker(VLLM, text(name))


def test_a_simulated_worker_is_read_as_its_engine() -> None:
    """Eight requests of 320 + 54 tokens hold 192 of 512 blocks of 16."""
    engines, gaps = worker("mocker-vllm-worker-load").parse_engines(page("mocker-vllm-worker-load"))
    assert engines is not None
    assert (0.375, 8, 0, 0) == (
        engines[0].kv_usage_ratio,
        engines[0].requests_running,
        engines[0].requests_waiting,
        engines[0].preemptions_total,
    )
    assert () == gaps


def test_a_worker_of_vllm_reports_its_pool_itself() -> None:
    """The configuration passes through with Dynamo's labels added: 4,095 of its blocks are usable."""
    name = "vllm-worker-rendered"
    (pool,), gaps = worker(name).parse_pools(page(name), None, ())
    assert ("0", 128, 4096, 4095) == (pool.engine, pool.block_tokens, pool.total_blocks, pool.usable_blocks)
    assert () == gaps
    engines, _ = worker(name).parse_engines(page(name))
    assert engines is not None
    assert 272 == pool.used_blocks(engines[0].kv_usage_ratio or 0.0)


FROM_THE_CARD = KvPool(
    engine="0", block_tokens=16, total_blocks=512, usable_blocks=512, usage_blocks=512, capacity_tokens=8192
)


def test_the_front_end_completes_a_worker_without_a_pool() -> None:
    """The model's card has the blocks and their size; 192 of them are in use."""
    own = page("mocker-vllm-worker-load")
    both = {**page("mocker-vllm-frontend-load"), **own}
    assert ((FROM_THE_CARD,), ()) == worker("mocker-vllm-worker-load").parse_pools(both, None, ())
    assert 192 == FROM_THE_CARD.used_blocks(0.375)


def test_a_worker_alone_has_no_pool_and_says_where_it_is() -> None:
    """A simulated one reports neither number nor size of its blocks."""
    pools, gaps = worker("mocker-vllm-worker-load").parse_pools(page("mocker-vllm-worker-load"), None, ())
    assert () == pools
    assert "--metrics-url" in gaps[0].reason


@pytest.mark.parametrize("flag", ["--block-size 128", "--page-size=128", "x --sglang-page-size 128"])
def test_blocks_are_as_long_as_the_command_line_says(flag: str) -> None:
    """A worker whose engine has its metrics off reports the blocks' number and usage alone."""
    own = {name: lines for name, lines in page("vllm-worker-rendered").items() if name.startswith("dynamo_")}
    (pool,), _ = dynamo.ENGINE.parse_pools(own, None, (f"python -m dynamo.vllm {flag} --model x",))
    assert (128, 4096) == (pool.block_tokens, pool.total_blocks)
    engines, gaps = dynamo.ENGINE.parse_engines(own)
    assert (Engine(engine="0", kv_usage_ratio=0.06642, requests_running=8, requests_waiting=0),) == engines
    assert () == gaps
    assert dynamo.ENGINE.capabilities(own).usage


def test_a_front_end_has_requests_and_no_usage() -> None:
    """Its pool is that of a worker; what is in use is on a worker's port."""
    own = page("mocker-vllm-frontend-load")
    engines, gaps = dynamo.ENGINE.parse_engines(own)
    assert (Engine(engine="0", requests_running=8),) == engines
    assert [("absent", True)] == [(gap.kind, "--metrics-url" in gap.reason) for gap in gaps]
    assert not dynamo.ENGINE.capabilities(own).usage
    assert ((FROM_THE_CARD,), ()) == dynamo.ENGINE.parse_pools(own, "1.6.1", ())


def test_nothing_runs_before_the_first_request() -> None:
    """A front end's gauge appears with its first request."""
    engines, _ = dynamo.ENGINE.parse_engines(page("mocker-vllm-frontend-idle"))
    assert (Engine(engine="0"),) == engines


def test_a_worker_before_its_first_request_has_no_engine_yet() -> None:
    """The reason says what makes the figures appear."""
    engines, gaps = dynamo.ENGINE.parse_engines(page("mocker-vllm-worker-idle"))
    assert engines is None
    assert "request" in gaps[0].reason


def test_pools_of_several_ranks_are_not_taken_from_one_card() -> None:
    """A card has one number for a worker of any number of ranks."""
    card = {name: lines for name, lines in page("mocker-vllm-frontend-load").items() if "model" in name}
    assert () == metrics.parse_pools(card, None, (), labels=("0", "1"))[0]


def test_a_rank_reported_twice_is_refused() -> None:
    """Two workers behind one address: neither pool is the other's."""
    lines = page("vllm-worker-rendered")[metrics.TOTAL_BLOCKS]
    twice = {metrics.TOTAL_BLOCKS: (*lines, replace(lines[0], value=7.0))}
    pools, gaps = dynamo.ENGINE.parse_pools(twice, None, ("--block-size 16",))
    assert () == pools
    assert "failed" == gaps[0].kind


def test_requests_go_to_the_worker_that_is_read() -> None:
    """The header has the worker's number in decimal, the metrics in hexadecimal."""
    adapter = worker("mocker-vllm-worker-load")
    assert {"x-dynamo-worker-instance-id": str(0x92AA15BC1D892DB4)} == dict(adapter.request.headers)
    assert "--metrics-url" in adapter.metrics_flag


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mocker-vllm-worker-idle", True), ("vllm-worker-rendered", True), ("mocker-vllm-frontend-load", False)],
)
def test_a_front_end_is_no_worker(name: str, expected: bool) -> None:
    """A front end has metrics of a component, too."""
    assert expected == dynamo.is_worker(text(name))


def test_a_worker_without_figures_of_its_engine_names_the_engines_flag() -> None:
    """Its system port answers, so that is open; what is off is the engine's own metrics."""
    adapter = dynamo.worker(dynamo.ENGINE, text("mocker-vllm-worker-idle"))
    check = engine_check.series(adapter, page("mocker-vllm-worker-idle"), "")
    assert "warn" == check.outcome
    assert all(flag in (check.fix or "") for flag in ("--enable-metrics", "--publish-events-and-metrics"))
    assert "DYN_SYSTEM_PORT" not in (check.fix or "")


def test_a_front_end_says_where_kv_usage_is() -> None:
    """It has none itself; a worker's system port does."""
    check = engine_check.series(dynamo.ENGINE, page("mocker-vllm-frontend-load"), "")
    assert ("pass", True) == (check.outcome, "--metrics-url http://WORKER:DYN_SYSTEM_PORT" in check.found)
