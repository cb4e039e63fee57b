"""Which engine a server is taken for, by the metrics that it exports, and what belongs to an engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from kvdiag.engines import ENGINES, recognise
from kvdiag.engines.engine import EngineAdapter
from kvdiag.engines.vllm import ENGINE
from kvdiag.sources.http import HttpReader
from tests.fixtures.hostile import Answer, Hostile, reply, reply_json

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


def client_of(answers: Mapping[str, Answer] | Answer) -> tuple[str, list[str]]:
    """The engine that a server is taken for, and the paths that it was asked for."""

    async def ask(url: str) -> str:
        async with httpx2.AsyncClient(base_url=url) as client:
            return (await recognise(HttpReader(client))).engine.name

    with Hostile(answers) as server:
        return asyncio.run(ask(server.url)), server.requests


@pytest.mark.parametrize(
    "engine", [engine for engine in ENGINES if engine.owned_by], ids=lambda engine: engine.owned_by
)
def test_a_server_that_names_its_engine_is_asked_nothing_else(engine: EngineAdapter) -> None:
    """No GET of metrics that empties a list or resets a gauge comes before the engine is known."""
    models = reply_json({"data": [{"id": "m", "owned_by": engine.owned_by}]})
    assert (engine.name, ["/v1/models"]) == client_of({"/v1/models": models})


GATEWAY = {"data": [{"id": "m", "object": "model", "created": 1677610602, "owned_by": "openai"}]}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(reply("", status=401), id="a key is required"),
        pytest.param(reply("", status=404), id="nothing there"),
        pytest.param(reply_json({"error": {"code": 501}}, status=501), id="metrics are off"),
        pytest.param(reply("<html><body>llamacpp: vllm:</body></html>", content_type="text/html"), id="HTML"),
        pytest.param(reply("", status=302, Location="/login"), id="a login"),
        pytest.param(reply_json(GATEWAY), id="a gateway that answers alike everywhere"),
        pytest.param(reply("# nginx\nActive connections: 1\n"), id="a status page"),
    ],
)
def test_an_unknown_server_is_the_default_engine(answer: Answer) -> None:
    """Its client then says what is wrong with it."""
    assert ENGINES[0].name == client_of(answer)[0]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_gateway_that_passes_metrics_is_the_engine_behind_it(engine: EngineAdapter) -> None:
    """The gateway owns the models; the metrics' prefix is the engine's."""
    answers = {"/v1/models": reply_json(GATEWAY), engine.metrics_path: reply(f"{engine.metric_prefix}x 1\n")}
    assert engine.name == client_of(answers)[0]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.metric_prefix)
def test_a_worker_of_dynamo_is_the_engine_inside(engine: EngineAdapter) -> None:
    """A worker has its metrics at one path, whichever the engine's own is, and no API."""
    page = f'dynamo_component_total_blocks{{dp_rank="0"}} 8\n{engine.metric_prefix}x 1\n'
    name, paths = client_of({"/metrics": reply(page)})
    assert (engine.name, "/metrics") == (name, paths[-1])


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrtllm"])
def test_an_image_of_dynamo_has_no_version_of_its_engine(name: str) -> None:
    """The tag of `ai-dynamo/vllm-runtime` is Dynamo's version."""
    image = f"registry.example/ai-dynamo/{name}-runtime:1.6.1"
    assert [] == [engine.name for engine in ENGINES if engine.image.search(image)]
