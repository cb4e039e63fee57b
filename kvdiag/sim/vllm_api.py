"""vLLM 0.32's HTTP routes over one simulated engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvdiag.sim.api import Routes
from kvdiag.sim.completions import tokenize
from kvdiag.sim.http_server import Response
from kvdiag.sim.openai_api import OpenAIApi
from kvdiag.sim.scenarios import Scenario
from kvdiag.sim.vllm_statistics import VllmStatistics

VLLM_VERSION = "0.32.0"

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"
FILTERED_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class VllmApi(OpenAIApi):
    """A vLLM server."""

    owned_by = "vllm"

    def __init__(self, scenario: Scenario, root: Path) -> None:
        """As `Api`."""
        super().__init__(scenario, root)
        self._statistics = self.engine.report_to(VllmStatistics(scenario, self.engine.total_blocks))

    def routes(self) -> Routes:
        """The metrics and tokens of vLLM, with OpenAI's."""
        return {
            **super().routes(),
            "/version": ("GET", lambda _: Response.json({"version": VLLM_VERSION})),
            # Only the mounted path filters, as in 0.32, where /metrics ignores the query.
            "/metrics": ("GET", lambda _: self._metrics(())),
            "/metrics/": ("GET", lambda asked: self._metrics([v for name, v in asked.query if name == "name[]"])),
            "/tokenize": ("POST", lambda asked: Response.json(tokenize(asked.body, self.engine.scenario))),
        }

    def model(self) -> dict[str, Any]:
        """With the model's folder and its longest request."""
        longest = self.engine.scenario.max_model_len_tokens
        return {**super().model(), "root": str(self.root), "parent": None, "max_model_len": longest}

    def _metrics(self, names: Sequence[str]) -> Response:
        content_type = FILTERED_METRICS_TYPE if names else METRICS_TYPE
        return Response(self._statistics.page(names), content_type=content_type)
