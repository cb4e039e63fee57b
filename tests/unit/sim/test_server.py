import http.client
import json
import math
import socket
import struct
from pathlib import Path

import pytest

from kvdiag.sim import SCENARIOS, Drill
from kvdiag.sim.blocks import blocks_for
from tests.unit.sim.client import Client, eventually
from tests.unit.sim.conftest import OF_VLLM, Serve


def test_it_says_who_it_is(visitor: Client) -> None:
    """Health, version and models answer as vLLM 0.32 does; the Server header alone says what it is."""
    _, models = visitor.get("/v1/models")
    connection = http.client.HTTPConnection(visitor.host)
    connection.request("GET", "/health")
    response = connection.getresponse()
    body = response.read()
    connection.close()

    assert (200, b"", "kvdiag-drill") == (response.status, body, response.getheader("Server"))
    assert (200, '{"version":"0.32.0"}') == visitor.get("/version")
    (model,) = json.loads(models)["data"]
    assert ("drill", "model", 32768) == (model["id"], model["object"], model["max_model_len"])


def test_the_model_s_folder_weighs_what_its_tensors_weigh() -> None:
    """`root` is a folder with a config and a safetensors file of the weights' true size; it is removed afterwards."""
    with Drill(SCENARIOS["healthy"]) as drill:
        _, models = Client(drill.url).get("/v1/models")
        root = Path(json.loads(models)["data"][0]["root"])
        weights = root / "model.safetensors"
        with weights.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            start = file.tell()
        size, config = weights.stat().st_size, json.loads((root / "config.json").read_text())

    del header["__metadata__"]
    held = [math.prod(of) for _, of in SCENARIOS["healthy"].model.tensors()]
    assert 2 * sum(held) == sum([math.prod(tensor["shape"]) * 2 for tensor in header.values()]) == size - start
    assert (32, 8, 128) == (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"])
    assert not root.exists()


def test_the_config_agrees_with_itself(serve: Serve) -> None:
    """In every scenario the labels of cache_config_info fit together by vLLM's own formulas."""
    for name, scenario in OF_VLLM.items():
        client, _ = serve(name)
        config = client.config()
        blocks = int(config["num_gpu_blocks"])
        concurrency = float(config["kv_cache_max_concurrency"])

        assert blocks / blocks_for(scenario.max_model_len_tokens, 16) == concurrency
        assert int(concurrency * scenario.max_model_len_tokens) == int(config["kv_cache_size_tokens"])
        if scenario.kv_cache_memory_bytes is not None:
            assert blocks * 16 * scenario.model.layers * scenario.kv_bytes_per_token_per_layer == int(
                config["kv_cache_memory_bytes"]
            )
        else:
            assert "None" == config["kv_cache_memory_bytes"]


def test_a_stream_has_each_token_then_usage(visitor: Client) -> None:
    """A streamed completion has one event for each token, the last with its reason, then usage."""
    actual = visitor.complete(100, 5)
    assert (200, 5, None, "length") == (actual.status, actual.chunks, actual.error, actual.finish_reason)
    assert {"prompt_tokens": 100, "total_tokens": 105, "completion_tokens": 5} == actual.usage


def test_a_whole_answer_has_all_prompts(visitor: Client) -> None:
    """Without streaming, every prompt of a batch gets its choice, and usage counts them together."""
    status, actual = visitor.post("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 3, "ignore_eos": True})
    assert (200, [0, 1], ["length", "length"]) == (
        status,
        [choice["index"] for choice in actual["choices"]],
        [choice["finish_reason"] for choice in actual["choices"]],
    )
    assert {"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6} == actual["usage"]


def test_blocks_held_are_what_the_tokens_need(client: Client) -> None:
    """The gauge shows ceil((prompt + output - 1) / block) blocks at the peak, within one, and none afterwards."""
    with client.peaks("vllm:kv_cache_usage_perc", "vllm:num_requests_running") as peaks:
        client.complete(1000, 60)
    held = peaks.highest["vllm:kv_cache_usage_perc"] * (client.blocks - 1)
    assert 1 == peaks.highest["vllm:num_requests_running"]
    assert blocks_for(1059, 16) - 1 <= round(held) <= blocks_for(1059, 16)
    assert 0 == client.gauge("kv_cache_usage_perc")


def test_counters_count_what_ran(client: Client) -> None:
    """Tokens, hits and finished requests add up over two equal prompts."""
    for _ in range(2):
        client.complete(100, 4, cache_salt="same")
    names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
    assert [200, 8, 200, 96] == [client.gauge(name) for name in names]
    finished = client.series("vllm:request_success_total")
    assert {'vllm:request_success_total{finished_reason="length"}': 2} == {k: v for k, v in finished.items() if v}
    assert [2, 6] == [client.gauge(f"{name}_seconds_count") for name in ("time_to_first_token", "inter_token_latency")]


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_aborts(client: Client, stream: bool) -> None:
    """A client that hangs up in mid-answer has its request dropped and its blocks freed."""
    # A request that would run for minutes
    connection = http.client.HTTPConnection(client.host)
    body = {"prompt": [5] * 2000, "max_tokens": 20_000, "ignore_eos": True, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert eventually(lambda: client.used_blocks > 100)

    connection.close()

    assert eventually(lambda: client.gauge("num_requests_running") == 0)
    assert 0 == client.used_blocks
    assert {0} == set(client.series("vllm:request_success_total").values())


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nope", (404, '{"detail":"Not Found"}')),
        ("POST", "/health", (405, '{"detail":"Method Not Allowed"}')),
        ("GET", "/v1/completions", (405, '{"detail":"Method Not Allowed"}')),
    ],
)
def test_wrong_routes(visitor: Client, method: str, path: str, expected: tuple[int, str]) -> None:
    """Unknown paths and methods answer as Starlette does."""
    assert expected == visitor.ask(method, path)


def test_bad_requests_get_an_error_object(client: Client) -> None:
    """A prompt that is too long is refused with vLLM's error object, and the engine never hears of it."""
    status, actual = client.post("/v1/completions", {"prompt": [5] * 32769, "stream": True})
    assert (400, "BadRequestError", 400) == (status, actual["error"]["type"], actual["error"]["code"])
    assert 0 == client.gauge("prompt_tokens_total")


def test_tokenize(visitor: Client) -> None:
    """/tokenize answers with token ids that completions take."""
    status, actual = visitor.post("/tokenize", {"model": "drill", "prompt": "hello"})
    assert (200, 5, 32768) == (status, actual["count"], actual["max_model_len"])
    assert 1 == visitor.complete(0, 1, prompt=actual["tokens"]).chunks


def test_connections_are_kept(visitor: Client) -> None:
    """One connection serves several requests, streams among them."""
    connection = http.client.HTTPConnection(visitor.host)
    answers = []
    for _ in range(2):
        connection.request("POST", "/v1/completions", json.dumps({"prompt": [5], "max_tokens": 2, "stream": True}))
        answers.append(connection.getresponse().read().count(b"data: "))
        used = connection.sock
        connection.request("GET", "/version")
        answers.append(connection.getresponse().read().count(b"0.32.0"))
        assert used is connection.sock
    connection.close()

    assert [3, 1, 3, 1] == answers


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / SPDY/3\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(visitor: Client, raw: bytes) -> None:
    """A request that cannot be read gets a 400 and the connection ends."""
    host, _, port = visitor.host.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(raw)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"HTTP/1.1 400 Bad Request\r\n" == answer[:26]


def test_a_taken_port_is_an_error() -> None:
    """Two drills on one port: the second says so where it is started."""
    with Drill(SCENARIOS["healthy"]) as first, pytest.raises(OSError, match="address already in use"):
        Drill(SCENARIOS["healthy"], port=int(first.url.rpartition(":")[2])).__enter__()


def test_stopping_hangs_up() -> None:
    """A drill that ends with a request under way ends at once, and its client sees the answer break off."""
    with Drill(SCENARIOS["healthy"]) as drill:
        client = Client(drill.url)
        connection = http.client.HTTPConnection(client.host, timeout=10)
        body = {"prompt": [5], "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.readline()

    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        response.read()
    connection.close()
