"""A real Prometheus that scrapes: series that vanish get stale markers, and a target that dies has `up` at 0."""

import asyncio
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import httpx2

from kvdiag.commands import main
from kvdiag.feeds.history.prometheus_feed import Window, read, survey
from kvdiag.sources.prometheus_api import PrometheusSource
from tests.builders.answers import containing
from tests.fixtures.hostile import LONG_SECONDS, eventually, refused_port
from tests.integration.prometheus.conftest import require_prometheus
from tests.integration.prometheus.server import serving

PAGE = (Path(__file__).parents[2] / "fixtures" / "scrapes" / "vllm-0.32.0-cpu-tp2-idle.prom").read_text()
WAITING = "vllm:num_requests_waiting{"

CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Page(BaseHTTPRequestHandler):
    """The page of a real vLLM, which may lose a series, or fail."""

    without = ""
    more: tuple[str, ...] = ()
    fails = False

    def do_GET(self) -> None:
        """Answer as it stands now."""
        lines = [line for line in PAGE.splitlines() if not (self.without and line.startswith(self.without))]
        self.send_response(500 if self.fails else 200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("\n".join((*lines, *self.more, "")).encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


def value(url: str, query: str) -> float | None:
    """What an instant query gives."""
    with urlopen(f"{url}/api/v1/query?{urlencode({'query': query})}", timeout=LONG_SECONDS) as answer:
        result = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else None


async def waiting(url: str) -> list[int | None]:
    """The waiting requests in every sample of the one engine."""
    window = Window(start_seconds=time.time() - 300.0, end_seconds=time.time())
    async with httpx2.AsyncClient(base_url=f"{url}/", trust_env=False) as client:
        source = PrometheusSource(client, LONG_SECONDS)
        found = await survey(source, "", window)
        (timeline,) = [timeline async for _, timeline, _ in read(source, found.replicas, window)]
    return [engine.requests_waiting for sample in timeline.samples for engine in sample.engines or ()]


def held(url: str, capsys: Any) -> dict[str, str]:
    """How the checks of a Prometheus go, by what they look for."""
    with refused_port() as port:
        main(["doctor", "--url", f"http://127.0.0.1:{port}", "--prometheus", url, "--output", "json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    return {one["id"].split(".")[1]: one["outcome"] for one in checks if one["id"].startswith("prometheus.")}


def test_a_page_is_read_as_it_was_scraped(tmp_path: Path, capsys: Any) -> None:
    """A series that vanishes is missing from then on, not repeated; a target that fails makes it unknown."""
    require_prometheus()

    class Now(Page):
        """What this test's server answers."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Now) as page:
        Thread(target=page.serve_forever, daemon=True).start()
        with serving(tmp_path / "data", config=CONFIG.format(port=page.server_port)) as url:
            # Some scrapes, then some without a series, then some that fail.
            assert eventually(lambda: (value(url, "count_over_time(vllm:num_requests_waiting[1m])") or 0) >= 3)
            scraped = held(url, capsys)
            Now.without = WAITING
            assert eventually(lambda: value(url, "vllm:num_requests_waiting") is None)
            assert eventually(lambda: (value(url, "sum(count_over_time(vllm:num_requests_running[1m]))") or 0) >= 8)
            Now.fails = True
            assert eventually(lambda: value(url, "max_over_time(up[3s])") == 0)

            code = main(["diagnose", "--prometheus", url, "--window", "5m", "--output", "json"])
            told = asyncio.run(waiting(url))
            replica = json.loads(capsys.readouterr().out)["replicas"][0]
            failing = held(url, capsys)
        page.shutdown()

    assert (3, "unknown") == (code, replica["worst"])
    assert containing("up is 0") in [gap["reason"] for gap in replica["gaps"]]
    assert replica["server"]["pools"][0]["total_blocks"] > 1
    assert {"answers": "pass", "clock": "pass", "vllm": "pass", "gpu": "warn", "kvdiag": "warn"} == scraped
    assert {**scraped, "vllm": "warn"} == failing
    assert [False, True] == [one for one, _ in groupby(count is None for count in told)]


def test_what_kvdiag_tells_of_devices_is_enough(tmp_path: Path, capsys: Any) -> None:
    """A history in which no exporter of the node has a part lacks no device memory where kvdiag is scraped."""
    require_prometheus()

    class Watched(Page):
        """A server and its daemon, as one target."""

        more = ('kvdiag_gpu_memory_total_bytes{gpu="0",uuid="GPU-1"} 8.5e+10',)

    with ThreadingHTTPServer(("127.0.0.1", 0), Watched) as page:
        Thread(target=page.serve_forever, daemon=True).start()
        with serving(tmp_path / "data", config=CONFIG.format(port=page.server_port)) as url:
            assert eventually(lambda: value(url, "kvdiag_gpu_memory_total_bytes") is not None)
            actual = held(url, capsys)
        page.shutdown()
    assert {"answers": "pass", "clock": "pass", "vllm": "pass", "gpu": "pass", "kvdiag": "pass"} == actual
