"""SGLang 0.5.23 paused, flushed and aborted, scraped by a real Prometheus, and after tokens were released twice."""

import asyncio
import contextlib
import http.client
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from kvdiag.engines import ENGINE_METRICS, recognise
from kvdiag.feeds.history.prometheus_feed import Window, read, survey
from kvdiag.model import Engine, Facts
from kvdiag.sources.http import HttpReader
from kvdiag.sources.prometheus_api import PrometheusSource
from tests.fixtures.hostile import eventually
from tests.integration.prometheus.conftest import require_prometheus
from tests.integration.prometheus.server import serving
from tests.integration.sglang.conftest import POOL_TOKENS
from tests.integration.sglang.servers import Nursery, Server
from tests.integration.sglang.test_run_on_sglang import idle, leak, looked_at
from tests.integration.vllm.cli import kvdiag

pytestmark = pytest.mark.long

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: sglang
    static_configs: [{{targets: ["{target}"]}}]
"""


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_paused_requests_are_no_leak(server: Server, mode: str) -> None:
    """A paused scheduler keeps its requests' tokens, or none; neither is a fault, and all are released after it."""
    with ThreadPoolExecutor(3) as pool:
        sent = [pool.submit(server.complete, 300, 400, first=number) for number in range(3)]
        assert eventually(lambda: server.used_tokens() > 0)
        server.post("/pause_generation", mode=mode)
        paused = looked_at(server)
        server.post("/continue_generation")
        for one in sent:
            one.result()
    assert leak(paused).status in ("ok", "unknown")
    assert eventually(idle(server))
    assert leak(looked_at(server)).status == "ok"


def test_aborted_requests_and_a_flush_are_no_leak(server: Server) -> None:
    """Every token of aborted requests is released, and an emptied cache changes nothing."""
    with ThreadPoolExecutor(3) as pool:
        sent = [pool.submit(server.complete, 300, 600, first=number) for number in range(3)]
        assert eventually(lambda: server.used_tokens() > 0)
        server.post("/abort_request", abort_all=True)
        for one in sent:
            one.result()
    assert eventually(idle(server))
    assert leak(looked_at(server)).status == "ok"
    server.post("/flush_cache")
    assert leak(looked_at(server)).status == "ok"


async def in_prometheus(url: str) -> tuple[Engine, Facts] | None:
    """The newest engine of the one server in a Prometheus, and its facts; `None` as long as there is none."""
    now_seconds = time.time()
    window = Window(start_seconds=now_seconds - 600.0, end_seconds=now_seconds)
    async with httpx2.AsyncClient(base_url=url) as client:
        source = PrometheusSource(client, 60.0, names=ENGINE_METRICS)
        found = await survey(source, "", window)
        async for _, timeline, facts in read(source, found.replicas, window):
            engines = [one for sample in timeline.samples for one in sample.engines or ()]
            return (engines[-1], facts) if engines else None
    return None


async def now(server: Server) -> Engine:
    """The engine as the server's own endpoints show it."""
    async with httpx2.AsyncClient(base_url=server.url) as http:
        engines, _ = await (await recognise(HttpReader(http))).read()
        assert engines
        return engines[0]


def test_prometheus_holds_what_the_server_shows(server: Server, tmp_path: Path) -> None:
    """Prometheus 2 stores sglang:* as sglang_*; both kinds of requests are counted, and the pool is known."""
    require_prometheus()
    with serving(tmp_path / "data", config=CONFIG.format(target=server.url.removeprefix("http://"))) as url:
        server.complete(120, 4)
        server.complete(80, 4, stream=True)
        assert eventually(idle(server))
        expected = asyncio.run(now(server))

        def same() -> bool:
            found = asyncio.run(in_prometheus(url))
            return found is not None and found[0].prompt_tokens_total == expected.prompt_tokens_total

        assert eventually(same)
        found = asyncio.run(in_prometheus(url))
    assert found is not None
    engine, facts = found
    assert (facts.engine_name, [pool.usable_blocks for pool in facts.pools]) == ("sglang", [POOL_TOKENS])
    assert facts.capabilities.blocks
    assert engine.preemptions_total == 0
    assert engine.kv_usage_ratio is not None


def test_tokens_released_twice_end_the_server_and_its_log_says_so(nursery: Nursery) -> None:
    """More free tokens than the pool has: SGLang ends itself, and its log gives the surplus."""
    env = {"KVDIAG_TEST_PLUGIN": "free_twice"}
    with nursery.start("twice", "--max-total-tokens", "8192", "--disable-radix-cache", env=env) as twice:
        with contextlib.suppress(urllib.error.URLError, http.client.HTTPException, ConnectionError):
            twice.complete(100, 8)
        assert eventually(lambda: "memory leak detected" in twice.log.read_text(errors="replace"))
        result = kvdiag("diagnose", "--postmortem", "--log", str(twice.log), "--output", "json")
    finding = result.finding("leak.kv_blocks")
    assert (result.code, finding["status"]) == (2, "fault")
    assert "released twice" in finding["summary"]
