"""POST /v1/completions and GET /v1/models as vLLM 0.32 answers them; the other engines differ little.

An engine's failure is status 500, and in a stream an event, because the response has begun by then.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from kvdiag.sim.api import EVENT_STREAM_TYPE, Api, Routes, event
from kvdiag.sim.completions import Completion, decode, parse_completion
from kvdiag.sim.http_server import HttpRequest, Response
from kvdiag.sim.scenarios import MODEL_NAME

DONE = "data: [DONE]\n\n"


class OpenAIApi(Api):
    """A server with OpenAI's completions."""

    completions = ("/v1/completions",)
    owned_by: str

    def routes(self) -> Routes:
        """Health and models."""
        return {
            "/health": ("GET", lambda _: Response()),
            "/v1/models": ("GET", lambda _: Response.json({"object": "list", "data": [self.model()]})),
        }

    def model(self) -> dict[str, Any]:
        """The one entry of the list of models."""
        return {
            "id": MODEL_NAME,
            "object": "model",
            "created": int(self.started_seconds),
            "owned_by": self.owned_by,
        }

    def streamed(self, prompt_tokens: int, generated_tokens: int) -> None:
        """Take the tokens of a response whose client has read it to its end."""

    async def complete(self, asked: HttpRequest) -> Response:
        """Answer POST /v1/completions."""
        completion = parse_completion(asked.body, self.engine.scenario)
        identity = f"cmpl-{secrets.token_hex(8)}"
        if completion.stream:
            return Response(
                stream=self._stream(identity, completion, asked.disconnected), content_type=EVENT_STREAM_TYPE
            )
        texts = [""] * len(completion.prompts)
        reasons: list[str | None] = [None] * len(completion.prompts)
        generated = 0
        async with contextlib.aclosing(self.generate(identity, completion, asked.disconnected)) as outputs:
            async for index, output in outputs:
                if output.error is not None:
                    return Response.json(_failure(output.error), status=500)
                texts[index] += "" if output.token is None else decode(output.token)
                generated += output.token is not None
                reasons[index] = output.finish_reason
        choices = [_choice(index, text, reasons[index]) for index, text in enumerate(texts)]
        self.streamed(sum(map(len, completion.prompts)), generated)
        return Response.json({**self._envelope(identity, choices), "usage": _usage(completion, generated)})

    async def _stream(self, identity: str, completion: Completion, disconnected: asyncio.Event) -> AsyncGenerator[str]:
        generated = 0
        async with contextlib.aclosing(self.generate(identity, completion, disconnected)) as outputs:
            async for index, output in outputs:
                if output.error is not None:
                    yield event(_failure(output.error))
                    yield DONE
                    return
                if output.token is not None:
                    generated += 1
                    choice = _choice(index, decode(output.token), output.finish_reason)
                    yield event(self._envelope(identity, [choice]))
        if completion.include_usage:
            yield event({**self._envelope(identity, []), "usage": _usage(completion, generated)})
        yield DONE
        self.streamed(sum(map(len, completion.prompts)), generated)

    def _envelope(self, identity: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": identity,
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "choices": choices,
        }


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}


def _usage(completion: Completion, generated: int) -> dict[str, int]:
    prompt = sum(len(tokens) for tokens in completion.prompts)
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def _failure(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
