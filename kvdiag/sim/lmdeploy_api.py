"""LMDeploy's HTTP routes over one simulated engine: a share of a pool, renewed by a timer.

A task of the server asks the engine every ten seconds for its running requests and for the share of blocks that are not
free (lmdeploy/serve/openai/api_server.py::create_lifespan_handler, 0.10 and later); the counters move with each token.
Cached blocks are not free (lmdeploy/pytorch/paging/scheduler.py::schedule_metrics). Neither the pool's size nor the
version is anywhere.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from kvdiag.sim.api import EVENT_STREAM_TYPE, Routes, event
from kvdiag.sim.completions import ApiError, Completion, decode, fields_of
from kvdiag.sim.http_server import HttpRequest, Response
from kvdiag.sim.openai_api import DONE, OpenAIApi
from kvdiag.sim.scenarios import MODEL_NAME, Scenario
from kvdiag.sim.scheduler import Scheduler
from kvdiag.sim.step_counts import StepCounts, text_page

DEFAULT_NEW_TOKENS = 128
LABELS = {"engine": "0", "model_name": MODEL_NAME}
PAGE_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class _Share(StepCounts):
    """The share of blocks that are in use or cached."""

    used_ratio = 0.0
    steps = 0

    def see(self, scheduler: Scheduler) -> None:
        super().see(scheduler)
        pool = scheduler.pool
        self.used_ratio = (pool.held_blocks + pool.cached_blocks) / (pool.total_blocks - 1)
        self.steps += 1


class LmdeployApi(OpenAIApi):
    """An LMDeploy server."""

    completions = ("/generate",)
    owned_by = "lmdeploy"

    def __init__(self, scenario: Scenario, root: Path) -> None:
        """As `Api`."""
        super().__init__(scenario, root)
        self._counts = self.engine.report_to(_Share())
        self._renew()
        self._timer: asyncio.Task[None] | None = None

    def routes(self) -> Routes:
        """Whether it sleeps, and its metrics, with OpenAI's."""
        return {
            **super().routes(),
            "/is_sleeping": ("GET", lambda _: Response.json({"is_sleeping": False})),
            "/metrics": ("GET", lambda _: Response(self._page(), content_type=PAGE_TYPE)),
        }

    async def handle(self, asked: HttpRequest) -> Response:
        """As `Api`, after the timer has begun with the server."""
        self._timer = self._timer or asyncio.create_task(self._renew_for_ever())
        return await super().handle(asked)

    async def complete(self, asked: HttpRequest) -> Response:
        """Answer POST /generate."""
        fields = fields_of(asked.body)
        prompt = fields.get("input_ids")
        longest = self.engine.scenario.max_model_len_tokens
        if not isinstance(prompt, list) or not 0 < len(prompt) < longest:
            raise ApiError(f"The input must be 1 to {longest - 1} tokens")
        completion = Completion(
            prompts=(tuple(prompt),),
            max_tokens=min(fields.get("max_tokens", DEFAULT_NEW_TOKENS), longest - len(prompt)),
            min_tokens=0,
            ignore_eos=fields.get("ignore_eos") is True,
            cache_salt=None,
            stream=True,
            include_usage=False,
        )
        return Response(stream=self._events(completion, asked.disconnected), content_type=EVENT_STREAM_TYPE)

    async def _events(self, completion: Completion, disconnected: asyncio.Event) -> AsyncGenerator[str]:
        generated = 0
        async with contextlib.aclosing(self.generate("lmdeploy", completion, disconnected)) as outputs:
            async for _, output in outputs:
                if output.error is not None:
                    yield event({"error": {"message": output.error, "type": "engine_error", "code": 500}})
                    break
                if output.token is None:
                    continue
                generated += 1
                reason = output.finish_reason
                about = {
                    "prompt_tokens": len(completion.prompts[0]),
                    "completion_tokens": generated,
                    "finish_reason": None if reason is None else {"type": reason},
                }
                yield event({"text": decode(output.token), "output_ids": [output.token], "meta_info": about})
        yield DONE

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.engine.scenario.gauges_renewed_seconds)
            self._renew()

    def _renew(self) -> None:
        counts = self._counts
        self._gauges = {
            "num_requests_running": len(counts.running),
            "num_requests_waiting": counts.waiting,
            "gpu_cache_usage_perc": counts.used_ratio,
        }

    def _page(self) -> bytes:
        counts, scenario = self._counts, self.engine.scenario
        totals = {
            "prompt_tokens_total": counts.prompt_tokens,
            "generation_tokens_total": counts.generated_tokens,
            "cached_tokens_total": counts.cached_tokens,
        }
        config = {
            "block_size": str(scenario.block_tokens),
            "cache_max_entry_count": "0.8",
            "enable_prefix_caching": str(scenario.prefix_caching),
            "num_gpu_blocks": "0",
        }
        rows = [
            *((f"lmdeploy:{name}", "gauge", value) for name, value in self._gauges.items()),
            *((f"lmdeploy:{name}", "counter", value) for name, value in totals.items()),
            ("lmdeploy:request_prompt_tokens_count", "untyped", counts.finished_requests),
            ("lmdeploy:iter_token_latency_count", "untyped", counts.steps),
        ]
        return text_page(rows, LABELS) + text_page([("lmdeploy:backend_config_info", "gauge", 1)], config)
