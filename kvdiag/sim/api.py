"""vLLM 0.32's HTTP routes over one simulated engine, and `GET /drill/nvml`, the state of the simulated driver.

A request passes the route (404), the method (405), the checks of `completions`, which rejects it in vLLM's words, and
then the engine, as one request for each prompt. The behaviour is `engine_core`'s; here are the formats that kvdiag
reads. A client that disconnects aborts its requests, which releases their blocks. An engine's failure is status 500,
and in a stream an event, because the response has begun by then.
"""

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdiag.sim.completions import ApiError, Completion, decode, parse_completion, tokenize
from kvdiag.sim.engine_core import Engine, Output, Outputs
from kvdiag.sim.gpu import Gpu
from kvdiag.sim.http_server import HttpRequest, Response
from kvdiag.sim.nvml_state import STATE_PATH, nvml_state
from kvdiag.sim.scenarios import MODEL_NAME, Scenario
from kvdiag.sim.scheduler import Request

VLLM_VERSION = "0.32.0"
GPU_UUID = "GPU-5ca1ab1e-d211-4d1a-8000-000000000001"
GPU_NAME = "Simulated GPU 24GiB"

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"
FILTERED_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EVENT_STREAM_TYPE = "text/event-stream; charset=utf-8"
DONE = "data: [DONE]\n\n"


class Api:
    """One server: its engine, its GPU and its answers."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
        """Start the scenario's processes on a new GPU, the server last; `root` is the model's folder."""
        self._root = root
        self._started_seconds = time.time()
        gpu = Gpu(
            uuid=GPU_UUID,
            name=GPU_NAME,
            total_bytes=scenario.device_bytes,
            driver_reserved_bytes=scenario.driver_reserved_bytes,
        )
        for foreign in scenario.foreign:
            gpu.take(gpu.join(foreign.pid, foreign.name), foreign.used_bytes)
        self.engine = Engine(scenario, gpu, pid=os.getpid())
        self._routes: Mapping[str, tuple[str, Callable[[HttpRequest], Response]]] = {
            "/health": ("GET", lambda _: Response()),
            "/version": ("GET", lambda _: Response.json({"version": VLLM_VERSION})),
            "/v1/models": ("GET", lambda _: Response.json(self._models())),
            # Only the mounted path filters, as in 0.32, where /metrics ignores the query.
            "/metrics": ("GET", lambda _: self._metrics(())),
            "/metrics/": ("GET", lambda asked: self._metrics([v for name, v in asked.query if name == "name[]"])),
            STATE_PATH: ("GET", lambda _: Response.json(nvml_state(self.engine.gpu))),
            "/tokenize": ("POST", lambda asked: Response.json(tokenize(asked.body, scenario))),
        }

    async def handle(self, asked: HttpRequest) -> Response:
        """Answer one request."""
        method, answer = self._routes.get(asked.path, ("POST", None))
        if answer is None and asked.path != "/v1/completions":
            return Response.json({"detail": "Not Found"}, status=404)
        if asked.method != method:
            return Response.json({"detail": "Method Not Allowed"}, status=405, headers={"Allow": method})
        try:
            return answer(asked) if answer is not None else await self._complete(asked)
        except ApiError as error:
            return Response.json(error.body, status=error.code)

    def _models(self) -> dict[str, Any]:
        model = {
            "id": MODEL_NAME,
            "object": "model",
            "created": int(self._started_seconds),
            "owned_by": "vllm",
            "root": str(self._root),
            "parent": None,
            "max_model_len": self.engine.scenario.max_model_len_tokens,
        }
        return {"object": "list", "data": [model]}

    def _metrics(self, names: Sequence[str]) -> Response:
        content_type = FILTERED_METRICS_TYPE if names else METRICS_TYPE
        return Response(self.engine.statistics.page(names), content_type=content_type)

    async def _complete(self, asked: HttpRequest) -> Response:
        completion = parse_completion(asked.body, self.engine.scenario)
        identity = f"cmpl-{secrets.token_hex(8)}"
        if completion.stream:
            return Response(
                stream=self._stream(identity, completion, asked.disconnected), content_type=EVENT_STREAM_TYPE
            )
        texts = [""] * len(completion.prompts)
        reasons: list[str | None] = [None] * len(completion.prompts)
        generated = 0
        async with contextlib.aclosing(self._run(identity, completion, asked.disconnected)) as outputs:
            async for index, output in outputs:
                if output.error is not None:
                    return Response.json(_failure(output.error), status=500)
                texts[index] += "" if output.token is None else decode(output.token)
                generated += output.token is not None
                reasons[index] = output.finish_reason
        choices = [_choice(index, text, reasons[index]) for index, text in enumerate(texts)]
        return Response.json({**self._envelope(identity, choices), "usage": _usage(completion, generated)})

    async def _stream(self, identity: str, completion: Completion, disconnected: asyncio.Event) -> AsyncGenerator[str]:
        generated = 0
        async with contextlib.aclosing(self._run(identity, completion, disconnected)) as outputs:
            async for index, output in outputs:
                if output.error is not None:
                    yield _event(_failure(output.error))
                    yield DONE
                    return
                if output.token is not None:
                    generated += 1
                    choice = _choice(index, decode(output.token), output.finish_reason)
                    yield _event(self._envelope(identity, [choice]))
        if completion.include_usage:
            yield _event({**self._envelope(identity, []), "usage": _usage(completion, generated)})
        yield DONE

    async def _run(
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

    def _envelope(self, identity: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": identity,
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "choices": choices,
        }


async def _pass_on(disconnected: asyncio.Event, outputs: Outputs) -> None:
    await disconnected.wait()
    outputs.put_nowait(None)


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}


def _usage(completion: Completion, generated: int) -> dict[str, int]:
    prompt = sum(len(tokens) for tokens in completion.prompts)
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def _failure(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
