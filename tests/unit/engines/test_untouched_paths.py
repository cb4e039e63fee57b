"""Paths that no command ever reads, because a read costs the server something.

trtllm-serve's `GET /metrics` is a list that a read empties for its owner; SGLang generates a token for `GET /health`.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.builders.scrapes import SCRAPES
from tests.integration.vllm.cli import kvdiag, started
from tests.unit.sim.client import Client, eventually

Pages = dict[str, tuple[int, str]]


def models(owner: str) -> tuple[int, str]:
    """The answer to GET /v1/models."""
    return 200, json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": owner}]})


def scrape(name: str) -> tuple[int, str]:
    """A page of metrics."""
    return 200, (SCRAPES / f"{name}.prom").read_text(encoding="utf-8")


TRTLLM: Pages = {"/v1/models": models("tensorrt_llm"), "/version": (200, '{"version": "1.3.0"}')}
SERVERS: dict[str, tuple[Pages, str]] = {
    "TensorRT-LLM": ({**TRTLLM, "/prometheus/metrics": scrape("trtllm-1.3-written")}, "/metrics"),
    "TensorRT-LLM without return_perf_metrics": (TRTLLM, "/metrics"),
    "TensorRT-LLM whose models cannot be read": ({"/v1/models": (500, "")}, "/metrics"),
    "SGLang": (
        {"/v1/models": models("sglang"), "/metrics": scrape("sglang-0.5.23-cpu-page1-10x1600-after")},
        "/health",
    ),
}
servers = pytest.mark.parametrize(("pages", "untouched"), SERVERS.values(), ids=SERVERS)


@contextmanager
def serving(pages: Pages) -> Iterator[tuple[str, list[str]]]:
    """The address of a server with these pages, and the paths that were asked for; others are not found."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            status, text = pages.get(path, (200, "[]") if path == "/metrics" else (404, ""))
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


def touched(asked: list[str], untouched: str) -> list[str]:
    """What was asked for of a path, and of what is below it or begins alike."""
    return [path for path in asked if path.startswith(untouched)]


@servers
@pytest.mark.parametrize("command", [("doctor",), ("run",), ("top", "--once"), ("audit",)], ids=lambda one: one[0])
def test_no_command_reads_it(pages: Pages, untouched: str, command: tuple[str, ...]) -> None:
    """Whether the server has its gauges or not, and whether it says whose models it has or not."""
    with serving(pages) as (url, asked):
        kvdiag(*command, "--url", url)
    assert "/v1/models" in asked
    assert [] == touched(asked, untouched)


@servers
def test_the_daemon_does_not_read_it(pages: Pages, untouched: str) -> None:
    """Neither while it looks for the server nor while it samples it."""
    with (
        serving(pages) as (url, asked),
        started("serve", "--url", url, "--listen", "127.0.0.1:0", "--tick-seconds", "0.1") as process,
    ):
        assert process.stderr is not None
        address = json.loads(process.stderr.readline())["address"]
        assert eventually(lambda: 200 == Client(address).get("/-/healthy")[0])
        polled = {"/metrics": "/prometheus/metrics", "/health": "/metrics"}[untouched]
        wanted = polled if len(pages) > 1 else "/v1/models"
        assert eventually(lambda: asked.count(wanted) > 2)
    assert [] == touched(asked, untouched)
