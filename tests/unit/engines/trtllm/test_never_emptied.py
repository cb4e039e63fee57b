"""trtllm-serve's `GET /metrics` is a list that a read empties for its owner: no command ever reads it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.builders.scrapes import SCRAPES
from tests.integration.vllm.cli import kvdiag, started
from tests.unit.sim.client import Client, eventually

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "tensorrt_llm"}]})
GAUGES = (SCRAPES / "trtllm-1.3-written.prom").read_text(encoding="utf-8")

SERVERS: dict[str, dict[str, tuple[int, str]]] = {
    "as it should be": {
        "/v1/models": (200, MODELS),
        "/version": (200, '{"version": "1.3.0"}'),
        "/prometheus/metrics": (200, GAUGES),
    },
    "without return_perf_metrics": {"/v1/models": (200, MODELS), "/version": (200, '{"version": "1.3.0"}')},
    "whose models cannot be read": {"/v1/models": (500, "")},
}


@contextmanager
def serving(pages: dict[str, tuple[int, str]]) -> Iterator[tuple[str, list[str]]]:
    """The address of a server with these pages, and the paths that were asked for; others are not found."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            status, text = (200, "[]") if path.rstrip("/") == "/metrics" else pages.get(path, (404, ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("pages", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("command", [("doctor",), ("run",), ("top", "--once"), ("audit",)], ids=lambda one: one[0])
def test_no_command_reads_the_list(pages: dict[str, tuple[int, str]], command: tuple[str, ...]) -> None:
    """Whether the server has its gauges or not, and whether it says whose models it has or not."""
    with serving(pages) as (url, asked):
        kvdiag(*command, "--url", url)
    assert "/v1/models" in asked
    assert [] == [path for path in asked if path.rstrip("/") == "/metrics"]


@pytest.mark.parametrize("pages", SERVERS.values(), ids=SERVERS)
def test_the_daemon_does_not_read_the_list(pages: dict[str, tuple[int, str]]) -> None:
    """Neither while it looks for the server nor while it samples it."""
    with (
        serving(pages) as (url, asked),
        started("serve", "--url", url, "--listen", "127.0.0.1:0", "--tick-seconds", "0.1") as process,
    ):
        assert process.stderr is not None
        address = json.loads(process.stderr.readline())["address"]
        assert eventually(lambda: 200 == Client(address).get("/-/healthy")[0])
        wanted = "/prometheus/metrics" if "/version" in pages else "/v1/models"
        assert eventually(lambda: asked.count(wanted) > 2)
    assert [] == [path for path in asked if path.rstrip("/") == "/metrics"]
