"""Ollama's API in front of real llama.cpp servers, for what the program itself cannot be had for.

`ollama_stand_in.py PORT PYTHON LLAMA_SERVER MODEL NUM_CTX`: one child a loaded model, with the flags that Ollama gives
it (fb30760). POST /api/generate with `options.num_ctx` loads or reloads a `model`, with `keep_alive: 0` unloads it. All
names stand for one file.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT, PYTHON, LLAMA_SERVER, MODEL, NUM_CTX = sys.argv[1:6]
NAME = "tiny:latest"


class Runner:
    """The child of one model, while it is loaded."""

    child: subprocess.Popen[bytes] | None = None
    context = 0

    def load(self, context: int) -> None:
        """Start a child on a free port, in the place of one with another context."""
        self.unload()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = [PYTHON, LLAMA_SERVER, "--model", MODEL, "--port", port, "--no-webui", "--offline"]
        self.child = subprocess.Popen([*command, "-c", str(context), "-np", "1"], stdin=subprocess.PIPE)
        self.context = context
        while self.child.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            except OSError:
                time.sleep(0.02)
            else:
                return

    def unload(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None


RUNNERS: defaultdict[str, Runner] = defaultdict(Runner)


class Api(BaseHTTPRequestHandler):
    """The endpoints that kvdiag reads, and the one that loads."""

    def do_GET(self) -> None:
        """Answer as Ollama does."""
        loaded = [
            {
                "name": name,
                "model": name,
                "size": 1_500_000,
                "size_vram": 1_000_000,
                "digest": "0" * 64,
                "context_length": runner.context,
                "expires_at": "2026-11-28T03:00:00Z",
            }
            for name, runner in [*RUNNERS.items()]
            if runner.child
        ]
        answers: dict[str, Any] = {
            "/api/version": {"version": "0.14.0"},
            "/api/ps": {"models": loaded},
            "/v1/models": {"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "library"}]},
        }
        self._send(answers.get(self.path))

    def do_POST(self) -> None:
        """Load, reload or unload."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        runner = RUNNERS[body.get("model", NAME)]
        if body.get("keep_alive") == 0:
            runner.unload()
        else:
            runner.load(body["options"]["num_ctx"])
        self._send({"done": True})

    def _send(self, found: Any) -> None:
        text = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    RUNNERS[NAME].load(int(NUM_CTX))
    server = ThreadingHTTPServer(("127.0.0.1", int(PORT)), Api)
    print("ready", flush=True)  # noqa: T201
    server.serve_forever()
