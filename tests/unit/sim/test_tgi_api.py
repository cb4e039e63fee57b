"""The simulated TGI server: tokens reserved at admission, and text requests whose length is only capped."""

import json
from typing import Any

from tests.unit.sim.client import Client, eventually
from tests.unit.sim.conftest import Serve

RESERVED, RUNNING, QUEUE = "tgi_batch_current_max_tokens", "tgi_batch_current_size", "tgi_queue_size"


def series(client: Client) -> dict[str, float]:
    """The metrics, none of which has labels."""
    lines = [line for line in client.get("/metrics")[1].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def events(client: Client, **parameters: int) -> list[dict[str, Any]]:
    """The events of one streamed answer."""
    body = {"inputs": "a word " * 100, "parameters": parameters}
    status, text = client.ask("POST", "/generate_stream", json.dumps(body))
    assert 200 == status
    return [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line]


def test_only_the_capacity_is_there_before_the_first_batch(serve: Serve) -> None:
    """Gauges of the batch are absent until one has run, and 0 after it."""
    client, _ = serve("tgi-healthy")
    assert {"tgi_batch_max_total_tokens": 131_072} == series(client)
    events(client, truncate=50, max_new_tokens=5)
    assert eventually(lambda: {0} == {series(client)[name] for name in (RESERVED, RUNNING, QUEUE)})


def test_a_request_reserves_what_it_may_come_to(serve: Serve) -> None:
    """From admission to end the gauge is prompt and max_new_tokens, less the token that is never stored."""
    client, _ = serve("tgi-healthy")
    with client.watching(lambda: series(client)) as seen:
        events(client, truncate=500, max_new_tokens=100)
    assert {0.0, 599.0} == {one[RESERVED] for one in seen if RESERVED in one} | {0.0}


def test_events_count_the_tokens(serve: Serve) -> None:
    """Each event has its token's index; the last has the reason and the number of tokens."""
    client, _ = serve("tgi-healthy")
    answer = events(client, truncate=50, max_new_tokens=5)
    assert [1, 2, 3, 4, 5] == [event["index"] for event in answer]
    assert ("length", 5) == tuple(answer[-1]["details"][name] for name in ("finish_reason", "generated_tokens"))


def test_a_request_beyond_the_longest_is_refused(serve: Serve) -> None:
    """Prompt and max_new_tokens above max_total_tokens are answered with 422."""
    client, _ = serve("tgi-healthy")
    body = {"inputs": "a", "parameters": {"max_new_tokens": 40_000}}
    status, answer = client.post("/generate_stream", body)
    assert (422, "validation") == (status, answer["error_type"])
    assert 32_768 == json.loads(client.get("/info")[1])["max_total_tokens"]


def test_a_leak_is_invisible_until_requests_wait(serve: Serve) -> None:
    """Lost tokens are in no gauge: the pool merely has room for fewer requests."""
    client, _ = serve("tgi-kv-leak")
    events(client, truncate=50, max_new_tokens=5)
    assert eventually(lambda: 0 == series(client)[RESERVED])
