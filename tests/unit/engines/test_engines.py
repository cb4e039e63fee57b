"""Which engine a server is taken for, by the metrics that it exports, and what belongs to an engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from kvdiag.engines import ENGINES, recognise
from kvdiag.engines.engine import EngineAdapter
from kvdiag.engines.vllm import ENGINE
from kvdiag.sources.http import HttpReader

ROOT = Path(__file__).parents[3]

OTHER = replace(ENGINE, name="other", owned_by="others", metric_prefix="other:", metrics_path="/prometheus/metrics")
SAME_PATH = replace(ENGINE, name="beside", owned_by="besides", metric_prefix="beside_")


def recognised(pages: dict[str, str]) -> str:
    """The name of the engine that a server with these pages is taken for."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        async def wire() -> AsyncIterator[bytes]:
            yield pages.get(request.url.path, "").encode()

        return httpx2.Response(200 if request.url.path in pages else 404, content=wire())

    async def ask() -> str:
        async with httpx2.AsyncClient(base_url="http://place", transport=httpx2.MockTransport(answer)) as client:
            return (await recognise(HttpReader(client), (ENGINE, OTHER, SAME_PATH))).engine.name

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        pytest.param({"/metrics/": "vllm:num_requests_running 1\n"}, "vllm", id="the first"),
        pytest.param({"/prometheus/metrics": "# HELP x y\nother:running 1\n"}, "other", id="another path"),
        pytest.param({"/metrics/": "# TYPE beside_running gauge\nbeside_running 1\n"}, "beside", id="the same path"),
        pytest.param({"/metrics/": 'up{job="other:beside_"} 1\n'}, "vllm", id="no known metrics"),
        pytest.param({}, "vllm", id="no metrics"),
        pytest.param(
            {"/v1/models": '{"data": [{"owned_by": "others"}]}', "/metrics/": "vllm:x 1\n"}, "other", id="owner"
        ),
        pytest.param(
            {"/v1/models": '{"data": [{"owned_by": 7}]}', "/metrics/": "beside_ 1\n"}, "beside", id="no owner"
        ),
        pytest.param({"/v1/models": '{"data": [7]}', "/metrics/": "beside_ 1\n"}, "beside", id="no model"),
    ],
)
def test_an_engine_is_recognised_by_its_metrics(pages: dict[str, str], expected: str) -> None:
    """The owner of its models decides, else the prefix of its metrics; an unknown server is taken for the default."""
    assert expected == recognised(pages)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_an_engine_comes_with_its_data_and_scrapes(engine: EngineAdapter) -> None:
    """Its folder has its name and its memory's data; there are scrapes of it, and README names it."""
    assert (ROOT / "kvdiag" / "engines" / engine.name / "memory.json").is_file()
    assert [*(ROOT / "tests" / "fixtures" / "scrapes").glob(f"{engine.name}-*.prom")] or not engine.metrics
    assert engine.title in (ROOT / "README.md").read_text(encoding="utf-8")
