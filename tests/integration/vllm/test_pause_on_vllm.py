"""A real vLLM that stops scheduling on purpose, watched by the daemon."""

import json
import threading
import urllib.request

import pytest

from tests.fixtures.hostile import LONG_SECONDS, eventually
from tests.integration.vllm import gauges
from tests.integration.vllm.engine import MODEL_NAME, Engine
from tests.unit.commands.serve.test_serve import Daemon, daemon

pytestmark = pytest.mark.real_vllm

REQUESTS = 4


def _post(server: Engine, path: str, body: object = None) -> None:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LONG_SECONDS) as answer:
        answer.read()


def _generate(server: Engine) -> None:
    prompt = {"model": MODEL_NAME, "prompt": [500] * 300, "max_tokens": 400, "ignore_eos": True}
    _post(server, "/v1/completions", prompt)


def _counted(watched: Daemon) -> dict[str, float]:
    """What the daemon says of concurrency: its evidence."""
    document = watched.get("/api/v1/diagnosis") or {"findings": ()}
    found = [one for one in document["findings"] if one["id"] == "capacity.concurrency"]
    return {one["name"]: one["value"] for each in found for one in each["evidence"]}


def test_a_pause_that_keeps_requests_is_no_fault(server: Engine) -> None:
    """VLLM preempts all that runs when it is paused and its cache reset: with room in the pool nothing is short."""
    with daemon(server.url) as watched:
        assert eventually(watched.says("ok"))
        clients = [threading.Thread(target=_generate, args=(server,)) for _ in range(REQUESTS)]
        for client in clients:
            client.start()
        gauges.wait_until(server.url, lambda reading: reading["vllm:num_requests_running"] == REQUESTS)
        _post(server, "/pause?mode=keep")
        _post(server, "/resume")
        for client in clients:
            client.join()
        gauges.wait_until(server.url, gauges.idle)
        assert eventually(lambda: _counted(watched).get("preemptions_with_room") == REQUESTS), _counted(watched)
        assert 0 == _counted(watched)["preemptions"]
        assert "ok" == watched.get("/api/v1/diagnosis")["worst"]
