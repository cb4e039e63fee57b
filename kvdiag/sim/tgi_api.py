"""Text Generation Inference's HTTP routes over one simulated engine: a pool that is reserved at admission.

A request takes all the tokens that it may come to when it leaves the queue: prompt and max_new_tokens, less the last
token (backends/v3 of TGI 3.3). The gauges count those, are absent before the first batch, and 0 when no batch runs.
The API takes text alone: `truncate` cuts it to a number of tokens, of which the simulated tokenizer makes one for each
byte. There is no way to force the output's length: an answer may end early.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from kvdiag.sim.api import EVENT_STREAM_TYPE, Api, Routes
from kvdiag.sim.completions import ApiError, Completion, decode, encode, fields_of
from kvdiag.sim.engine_core import EOS_TOKEN
from kvdiag.sim.http_server import HttpRequest, Response
from kvdiag.sim.scenarios import MODEL_NAME, Scenario
from kvdiag.sim.scheduler import Batch
from kvdiag.sim.step_counts import StepCounts, text_page

TGI_VERSION = "3.3.6"
DEFAULT_NEW_TOKENS = 100
MAX_CONCURRENT_REQUESTS = 128
PAGE_TYPE = "text/plain; version=0.0.4"


class _Reserved(StepCounts):
    """Whether any batch ran, and what the running requests reserve; blocks that leaked are not among those."""

    ran = False

    @property
    def tokens(self) -> int:
        return sum(request.most_tokens for request in self.running)

    def scheduled(self, batch: Batch, now_seconds: float) -> None:
        super().scheduled(batch, now_seconds)
        self.ran = True


class TgiApi(Api):
    """A TGI server."""

    completions = ("/generate_stream",)

    def __init__(self, scenario: Scenario, root: Path) -> None:
        """As `Api`."""
        super().__init__(scenario, root)
        self._counts = self.engine.report_to(_Reserved())

    def routes(self) -> Routes:
        """The server's description, its models and its metrics."""
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": MODEL_NAME}
        return {
            "/health": ("GET", lambda _: Response()),
            "/info": ("GET", lambda _: Response.json(self._info())),
            "/v1/models": ("GET", lambda _: Response.json({"object": "list", "data": [model]})),
            "/metrics": ("GET", lambda _: Response(self._page(), content_type=PAGE_TYPE)),
        }

    async def complete(self, asked: HttpRequest) -> Response:
        """Answer POST /generate_stream."""
        completion = self._parsed(asked.body)
        return Response(stream=self._stream(completion, asked.disconnected), content_type=EVENT_STREAM_TYPE)

    def _info(self) -> dict[str, Any]:
        longest = self.engine.scenario.max_model_len_tokens
        return {
            "model_id": MODEL_NAME,
            "model_sha": None,
            "max_concurrent_requests": MAX_CONCURRENT_REQUESTS,
            "max_input_tokens": longest - 1,
            "max_total_tokens": longest,
            "version": TGI_VERSION,
            "sha": None,
            "router": "text-generation-router",
        }

    def _page(self) -> bytes:
        counts = self._counts
        ran = counts.ran or bool(counts.waiting)
        answered = counts.finished_requests
        return text_page(
            [
                ("tgi_batch_max_total_tokens", "gauge", self.engine.total_blocks),
                ("tgi_batch_current_max_tokens", "gauge", counts.tokens if ran else None),
                ("tgi_batch_current_size", "gauge", len(counts.running) if ran else None),
                ("tgi_queue_size", "gauge", counts.waiting if ran else None),
                ("tgi_request_success", "counter", answered or None),
                ("tgi_request_input_length_sum", "untyped", counts.prompt_tokens if ran else None),
                ("tgi_request_generated_tokens_sum", "untyped", counts.generated_tokens if ran else None),
                ("tgi_request_skipped_tokens_sum", "untyped", counts.cached_tokens if ran else None),
            ]
        )

    def _parsed(self, body: bytes) -> Completion:
        fields = fields_of(body)
        asked = fields.get("parameters") or {}
        text, truncate = fields.get("inputs"), asked.get("truncate")
        new_tokens = asked.get("max_new_tokens", DEFAULT_NEW_TOKENS)
        if not isinstance(text, str) or not text:
            raise _refusal("`inputs` cannot be empty")
        tokens = encode(text)[-truncate:] if truncate else encode(text)
        longest = self.engine.scenario.max_model_len_tokens
        if len(tokens) + new_tokens > longest:
            message = (
                f"`inputs` tokens + `max_new_tokens` must be <= {longest}. "
                f"Given: {len(tokens)} `inputs` tokens and {new_tokens} `max_new_tokens`"
            )
            raise _refusal(message)
        return Completion(
            prompts=(tuple(tokens),),
            max_tokens=new_tokens,
            min_tokens=0,
            ignore_eos=False,
            cache_salt=None,
            stream=True,
            include_usage=False,
        )

    async def _stream(self, completion: Completion, disconnected: asyncio.Event) -> AsyncGenerator[str]:
        generated, text = 0, ""
        async with contextlib.aclosing(self.generate(secrets.token_hex(8), completion, disconnected)) as outputs:
            async for _, output in outputs:
                if output.error is not None:
                    yield _event({"error": f"Request failed during generation: {output.error}", **_GENERATION})
                    return
                if output.token is None:
                    continue
                generated += 1
                text += decode(output.token)
                details = {"finish_reason": _REASONS.get(output.finish_reason or ""), "generated_tokens": generated}
                over = output.finish_reason is not None
                yield _event(
                    {
                        "index": generated,
                        "token": {
                            "id": output.token,
                            "text": decode(output.token),
                            "logprob": -1.0,
                            "special": output.token == EOS_TOKEN,
                        },
                        "generated_text": text if over else None,
                        "details": {**details, "seed": None} if over else None,
                    }
                )


_REASONS = {"length": "length", "stop": "eos_token"}
_GENERATION = {"error_type": "generation"}


def _refusal(message: str) -> ApiError:
    error = ApiError(f"Input validation error: {message}", code=422)
    error.body = {"error": str(error), "error_type": "validation"}
    return error


def _event(value: dict[str, Any]) -> str:
    return f"data:{json.dumps(value)}\n\n"
