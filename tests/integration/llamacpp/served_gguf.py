"""One llama.cpp server for the length of a `with` block: on a free loopback port, awaited, ended with the block."""

import asyncio
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from kvdiag.engines import recognise
from kvdiag.feeds.live.server_facts import gather_facts, read_facts
from kvdiag.model import Facts
from kvdiag.sources.http import HttpReader
from kvdiag.sources.worker_thread import ThreadedReader
from tests.fixtures.hostile import free_port

PROGRAM = Path(__file__).with_name("llama_server.py")
START_LIMIT_SECONDS = 60.0


def facts_at(url: str) -> Facts:
    """What kvdiag finds out about the server at an address."""

    async def ask() -> Facts:
        async with httpx2.AsyncClient(base_url=url) as client:
            reader = ThreadedReader(read_facts, "host")
            try:
                return (await gather_facts(await recognise(HttpReader(client)), url, reader))[0]
            finally:
                reader.close()

    return asyncio.run(ask())


class LlamaServer:
    """A server of one model; `url` answers once the `with` block is entered."""

    def __init__(self, env: Path, model: Path, log: Path, *args: str, environ: Mapping[str, str] | None = None) -> None:
        """Prepare the command; nothing is started."""
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [str(env / "bin" / "python"), str(PROGRAM), "-m", str(model), "--port", str(self.port), *args]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LLAMA_"))}
        self._environ = {**inherited, **(environ or {})}
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._server is not None
        return self._server.pid

    def __enter__(self) -> Self:
        with self.log.open("ab") as log:
            self._server = subprocess.Popen(
                self.command, env=self._environ, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while self._server.poll() is None and time.monotonic() < deadline:
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.02)
            else:
                return self
        self.kill()
        raise AssertionError(f"the server did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once; a second call does nothing."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None

    def get(self, path: str) -> Any:
        """The decoded answer of an endpoint."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def complete(self, prompt: list[int], max_tokens: int, **more: object) -> dict[str, Any]:
        """One completion, or what the server says against it, with its status."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "cache_prompt": False, **more}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.load(error)}
        return found

    def processing(self) -> list[int]:
        """The tokens of each slot that processes a request."""
        return [slot.get("n_prompt_tokens", 0) for slot in self.get("/slots") if slot["is_processing"]]
