"""The simulated TensorRT-LLM server: gauges that come late, and a list that a read empties."""

import http.client
import json

from tests.unit.sim.client import Client, eventually
from tests.unit.sim.conftest import Serve

USED, RUNNING = "trtllm_kv_cache_used_blocks", "trtllm_num_requests_running"
BODY = {"prompt": [7] * 100, "max_tokens": 21, "ignore_eos": True, "stream": True}


def gauges(client: Client) -> dict[str, float]:
    """The series of /prometheus/metrics, without their labels, which all have alike."""
    _, page = client.get("/prometheus/metrics")
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_there_is_no_gauge_before_the_first_request_ended(serve: Serve) -> None:
    """A server that has just started reports counters alone, and the owner of its model."""
    client, _ = serve("trtllm-healthy")
    assert USED not in gauges(client)
    assert "tensorrt_llm" == json.loads(client.get("/v1/models")[1])["data"][0]["owned_by"]


def test_gauges_hold_the_last_iteration_before_the_end(serve: Serve) -> None:
    """After a request the gauges hold its blocks and its being active, until another request ends."""
    client, _ = serve("trtllm-healthy")
    assert 200 == client.complete(100, 61).status
    assert eventually(lambda: gauges(client).get(USED) == 5)
    assert (1, 4096, 32) == (gauges(client)[RUNNING], *(gauges(client)[f"trtllm_kv_cache_{name}"] for name in NAMES))
    client.complete(10, 5)
    assert eventually(lambda: gauges(client)[USED] == 1)


NAMES = ("max_blocks", "tokens_per_block")


def test_gauges_do_not_move_for_a_client_that_leaves_early(serve: Serve) -> None:
    """The collector wakes only when a response was read to its end."""
    client, _ = serve("trtllm-healthy")
    connection = http.client.HTTPConnection(client.host)
    connection.request("POST", "/v1/completions", json.dumps({**BODY, "max_tokens": 20_000}))
    response = connection.getresponse()
    assert response.read(10)
    response.close()
    connection.close()
    # The abort is over when the server answers the next request from a pool that is empty again
    assert 200 == client.complete(10, 5).status
    assert eventually(lambda: gauges(client).get(USED) == 1)


def test_reading_the_list_empties_it(serve: Serve) -> None:
    """`GET /metrics` answers with each iteration once: the second reader gets nothing."""
    client, _ = serve("trtllm-healthy")
    connection = http.client.HTTPConnection(client.host)
    connection.request("POST", "/v1/completions", json.dumps(BODY))
    connection.getresponse().read(10)
    first = json.loads(client.get("/metrics")[1])
    connection.close()
    assert {"kvCacheStats", "numActiveRequests"} <= first[0].keys()
    assert first[0]["iter"] not in [one["iter"] for one in json.loads(client.get("/metrics")[1])]


def test_a_leak_stays_in_the_gauges(serve: Serve) -> None:
    """Four blocks of each finished request are in use after it."""
    client, _ = serve("trtllm-kv-leak")
    for _ in range(3):
        client.complete(100, 61)
    client.complete(10, 5)
    # Of the last request the gauge shows its own block
    assert eventually(lambda: gauges(client).get(USED) == 3 * 4 + 1)
