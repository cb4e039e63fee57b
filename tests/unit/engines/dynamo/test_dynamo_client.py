"""What a Dynamo front end and its workers say of themselves, over HTTP."""

import asyncio
from typing import Any

import pytest

from kvdiag.commands.connect import Finder
from kvdiag.commands.options.common import ServerAccess
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.server_tracker import FoundServer
from tests.fixtures.hostile import Answer, Hostile, reply, reply_json
from tests.unit.engines.dynamo.test_dynamo_pages import FROM_THE_CARD, text

HEALTH = {
    "status": "healthy",
    "instances": [
        {"endpoint": "generate", "instance_id": 1, "transport": {"tcp": "10.0.0.3:35749/2f/dynamo/backend/generate"}},
        {"endpoint": "generate", "instance_id": 2, "transport": {"tcp": "10.0.0.4:35749/2f/dynamo/backend/generate"}},
        {"endpoint": "worker_kv_query", "instance_id": 2, "transport": {"tcp": "10.0.0.5:1/x"}},
    ],
}
MODELS = {"data": [{"id": "tiny", "owned_by": "nvidia", "context_window": 0}]}
DOCUMENT = {"info": {"title": "NVIDIA Dynamo OpenAI Frontend", "version": "1.6.1"}}


def front_end(health: Any = HEALTH, document: Any = DOCUMENT) -> dict[str, Answer]:
    """A front end's answers; those to the metrics were recorded."""
    return {
        "/v1/models": reply_json(MODELS),
        "/metrics": reply(text("mocker-vllm-frontend-load")),
        "/health": reply_json(health),
        "/openapi.json": reply_json(document),
    }


def worker(name: str) -> dict[str, Answer]:
    """A worker's answers."""
    return {"/metrics": reply(text(name)), "/health": reply_json({"status": "notready"}, status=503)}


def found(url: str, metrics_url: str | None = None) -> FoundServer:
    """The server at an address."""

    async def find() -> FoundServer:
        finder = Finder(url, ServerAccess(metrics_url=metrics_url), own_port=0)
        try:
            return await finder.find()
        finally:
            await finder.close()

    return asyncio.run(find())


def test_a_front_end_names_its_workers() -> None:
    """Version by the description of its API, workers' hosts by its health."""
    with Hostile(front_end()) as server:
        here = found(server.url)
    assert ("dynamo", "1.6.1", "tiny") == (here.facts.engine_name, here.facts.engine_version, here.facts.model)
    assert here.identity is not None
    assert "front end of 2 workers on 10.0.0.3, 10.0.0.4" == here.identity.role
    assert (FROM_THE_CARD,) == here.facts.pools


@pytest.mark.parametrize(
    "health",
    [
        pytest.param([], id="a list"),
        pytest.param({"instances": {"a": 1}}, id="an object"),
        pytest.param({"instances": [None, 7, [], {"endpoint": "generate"}]}, id="no instances"),
        pytest.param({"instances": [{"endpoint": "generate", "instance_id": 1, "transport": 4}]}, id="no transport"),
        pytest.param(
            {"instances": [{"endpoint": "generate", "instance_id": 1, "transport": {"tcp": "[::"}}]}, id="no address"
        ),
        pytest.param({"instances": [{"endpoint": "generate", "instance_id": True, "transport": {}}]}, id="no number"),
    ],
)
def test_a_front_end_with_another_health_is_one_all_the_same(health: Any) -> None:
    """What it says of its workers is shown where it can be."""
    with Hostile(front_end(health, {"info": {"version": 4}})) as server:
        here = found(server.url)
    assert (None, "tiny") == (here.facts.engine_version, here.facts.model)
    assert here.identity is not None
    assert (here.identity.role or "").startswith("front end of")


def test_a_worker_is_the_engine_inside() -> None:
    """It has no API: model and role stand in its metrics."""
    with Hostile(worker("vllm-worker-rendered")) as server:
        here = found(server.url)
    assert ("vllm", "tiny") == (here.facts.engine_name, here.facts.model)
    assert here.identity is not None
    assert all(part in (here.identity.role or "") for part in ("Dynamo worker", "backend", "namespace dynamo"))
    assert 4095 == here.facts.pools[0].usable_blocks


def test_requests_and_metrics_have_their_own_addresses() -> None:
    """The model is the front end's, the figures the worker's; the pool is completed from the front end's card."""
    with Hostile(front_end()) as front, Hostile(worker("mocker-vllm-worker-load")) as behind:
        here = found(front.url, behind.url)
    assert (front.url, "vllm", "tiny") == (here.facts.url, here.facts.engine_name, here.facts.model)
    assert (FROM_THE_CARD,) == here.facts.pools


def test_a_front_end_that_is_no_server_is_named() -> None:
    """The metrics are there, and nothing that takes requests."""
    with (
        Hostile({}) as front,
        Hostile(worker("mocker-vllm-worker-load")) as behind,
        pytest.raises(KvdiagError) as refusal,
    ):
        found(front.url, behind.url)
    assert str(refusal.value).startswith("--url: ")


def test_a_worker_without_figures_is_not_served_yet() -> None:
    """Its engine's series appear with the first request."""
    with Hostile(worker("mocker-vllm-worker-idle")) as server, pytest.raises(KvdiagError) as refusal:
        found(server.url)
    assert "request" in str(refusal.value)
