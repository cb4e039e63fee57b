"""llama.cpp's HTTP routes over one simulated engine: cells in slots that share one pool, as with its default flags.

A request takes a slot, or waits for one; cells it takes as it grows. When none is free, all that run fail. A slot keeps
the tokens of its last request, until another request starts (tools/server/server-context.cpp, b11549).
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

from kvdiag.sim.api import Routes
from kvdiag.sim.http_server import HttpRequest, Response
from kvdiag.sim.model_folder import BFLOAT16_BYTES
from kvdiag.sim.openai_api import OpenAIApi
from kvdiag.sim.scenarios import Scenario
from kvdiag.sim.scheduler import Request, Scheduler
from kvdiag.sim.step_counts import StepCounts, text_page

BUILD = "b11549-0000000"
PAGE_TYPE = "text/plain; version=0.0.4"


class _Slots(StepCounts):
    """The request that each slot has or had last, and how many have begun."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.requests: list[Request | None] = [None] * slots
        self.tasks: list[int | None] = [None] * slots
        self.begun = 0

    def see(self, scheduler: Scheduler) -> None:
        super().see(scheduler)
        for request in self.running:
            if request not in self.requests:
                self._begin(request)

    def _begin(self, request: Request) -> None:
        # The tokens of idle slots go to the host's prompt cache.
        kept = [one if one in self.running else None for one in self.requests]
        at = kept.index(None)
        kept[at] = request
        self.requests, self.tasks[at] = kept, self.begun
        self.begun += 1


class LlamacppApi(OpenAIApi):
    """A server of llama.cpp."""

    owned_by = "llamacpp"

    def __init__(self, scenario: Scenario, root: Path) -> None:
        """As `Api`."""
        super().__init__(scenario, root)
        self._slots = self.engine.report_to(_Slots(scenario.max_running))

    def routes(self) -> Routes:
        """Slots, properties and metrics, with OpenAI's."""
        return {
            **super().routes(),
            "/props": ("GET", lambda _: Response.json(self._props())),
            "/slots": ("GET", lambda _: Response.json([self._slot(at) for at in range(len(self._slots.requests))])),
            "/metrics": ("GET", lambda _: Response(self._page(), content_type=PAGE_TYPE)),
            # As with --slot-save-path; the only action that is asked for is to erase.
            **{f"/slots/{at}": ("POST", partial(self._erase, at)) for at in range(self.engine.scenario.max_running)},
        }

    def model(self) -> dict[str, Any]:
        """The entry, with the figures of the model."""
        scenario = self.engine.scenario
        size_bytes = sum(math.prod(shape) * BFLOAT16_BYTES for _, shape in scenario.model.tensors())
        longest = scenario.max_model_len_tokens
        return {**super().model(), "meta": {"n_ctx": longest, "n_ctx_train": longest, "size": size_bytes}}

    def _props(self) -> dict[str, Any]:
        return {
            "default_generation_settings": {"n_ctx": self.engine.scenario.max_model_len_tokens},
            "total_slots": len(self._slots.requests),
            "build_info": BUILD,
            "endpoint_slots": True,
            "endpoint_metrics": True,
            "is_sleeping": False,
        }

    def _slot(self, at: int) -> dict[str, Any]:
        request, task = self._slots.requests[at], self._slots.tasks[at]
        entry = {"id": at, "n_ctx": self.engine.scenario.max_model_len_tokens, "is_processing": False}
        if task is None:
            return entry
        runs = request is not None and request in self._slots.running
        decoded = len(request.output) if request is not None and runs else 0
        tokens = 0 if request is None else request.computed_tokens + (decoded > 0)
        return {
            **entry,
            "is_processing": runs,
            "id_task": task,
            "n_prompt_tokens": tokens,
            "next_token": [{"n_decoded": decoded}],
        }

    def _erase(self, at: int, _: HttpRequest) -> Response:
        request = self._slots.requests[at]
        if request not in self._slots.running:
            self._slots.requests[at] = None
        return Response.json({"id_slot": at, "n_erased": 0 if request is None else request.computed_tokens})

    def _page(self) -> bytes:
        counts = self._slots
        return text_page(
            [
                ("llamacpp:prompt_tokens_total", "counter", counts.prompt_tokens),
                ("llamacpp:tokens_predicted_total", "counter", counts.generated_tokens),
                ("llamacpp:requests_processing", "gauge", len(counts.running)),
                ("llamacpp:requests_deferred", "gauge", counts.waiting),
            ]
        )
