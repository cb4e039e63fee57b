"""One simulated server over HTTP: its engine, its GPU, and what every engine's API has in common.

A request passes the route (404), the method (405) and the API's own checks, and then the engine, as one request for
each prompt. The behaviour is `engine_core`'s; the formats that kvdiag reads are those of the subclass. A client that
disconnects aborts its requests, which releases their blocks. `GET /drill/nvml` is the state of the simulated driver.
"""

import asyncio
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

from kvdiag.sim.completions import ApiError, Completion
from kvdiag.sim.engine_core import Engine, Output, Outputs
from kvdiag.sim.gpu import Gpu
from kvdiag.sim.http_server import HttpRequest, Response
from kvdiag.sim.nvml_state import STATE_PATH, nvml_state
from kvdiag.sim.scenarios import Scenario
from kvdiag.sim.scheduler import Request

GPU_UUID = "GPU-5ca1ab1e-d211-4d1a-8000-000000000001"
GPU_NAME = "Simulated GPU 24GiB"

EVENT_STREAM_TYPE = "text/event-stream; charset=utf-8"

Routes = Mapping[str, tuple[str, Callable[[HttpRequest], Response]]]
"""Path to method and answer; completions are answered by `Api.complete`."""


class Api(ABC):
    """One server: its engine, its GPU and its answers; a subclass is one engine's API."""

    completions: tuple[str, ...]
    """The paths to which completions are posted."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
        """Start the scenario's processes on a new GPU, the server last; `root` is the model's folder."""
        self.root = root
        self.started_seconds = time.time()
        gpu = Gpu(
            uuid=GPU_UUID,
            name=GPU_NAME,
            total_bytes=scenario.device_bytes,
            driver_reserved_bytes=scenario.driver_reserved_bytes,
        )
        for foreign in scenario.foreign:
            gpu.take(gpu.join(foreign.pid, foreign.name), foreign.used_bytes)
        self.engine = Engine(scenario, gpu, pid=os.getpid())
        self._routes: Routes = {
            STATE_PATH: ("GET", lambda _: Response.json(nvml_state(gpu))),
            **self.routes(),
        }

    @abstractmethod
    def routes(self) -> Routes:
        """The API's routes except completions."""

    @abstractmethod
    async def complete(self, asked: HttpRequest) -> Response:
        """Answer a request for a completion; ApiError if it is refused."""

    async def handle(self, asked: HttpRequest) -> Response:
        """Answer one request."""
        method, answer = self._routes.get(asked.path, ("POST", None))
        if answer is None and asked.path not in self.completions:
            return Response.json({"detail": "Not Found"}, status=404)
        if asked.method != method:
            return Response.json({"detail": "Method Not Allowed"}, status=405, headers={"Allow": method})
        try:
            return answer(asked) if answer is not None else await self.complete(asked)
        except ApiError as error:
            return Response.json(error.body, status=error.code)

    async def generate(
        self, identity: str, completion: Completion, disconnected: asyncio.Event
    ) -> AsyncGenerator[tuple[int, Output]]:
        """The engine's outputs, each with its prompt's index; ConnectionResetError if the client disconnects."""
        outputs: Outputs = asyncio.Queue()
        now = time.monotonic()
        requests = {
            Request(
                id=f"{identity}-{index}",
                prompt=prompt,
                max_tokens=completion.max_tokens,
                min_tokens=completion.min_tokens,
                ignore_eos=completion.ignore_eos,
                cache_salt=None if self.engine.scenario.salts_ignored else completion.cache_salt,
                arrived_seconds=now,
            ): index
            for index, prompt in enumerate(completion.prompts)
        }
        watch = asyncio.create_task(_pass_on(disconnected, outputs))
        try:
            for request in requests:
                self.engine.submit(request, outputs)
            open_requests = len(requests)
            while open_requests:
                output = await outputs.get()
                if output is None:
                    raise ConnectionResetError
                open_requests -= output.finish_reason is not None
                yield requests[output.request], output
        finally:
            watch.cancel()
            for request in requests:
                self.engine.abort(request)


async def _pass_on(disconnected: asyncio.Event, outputs: Outputs) -> None:
    await disconnected.wait()
    outputs.put_nowait(None)


def event(value: Mapping[str, Any]) -> str:
    """A server-sent event of JSON."""
    return f"data: {json.dumps(value)}\n\n"
