"""LMDeploy, 0.10 to 0.18: its PyTorch engine and TurboMind."""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvdiag.engines.engine import MAX_TOKENS, EngineAdapter, RequestDialect
from kvdiag.engines.lmdeploy import metrics
from kvdiag.engines.metrics_reader import lengths_of, parse_version
from kvdiag.engines.openai_client import OpenAIClient
from kvdiag.engines.printed_figures import Wordings
from kvdiag.model import Capabilities
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_text import Page, Series

_WORDINGS = Wordings("lmdeploy")
_RANKS = re.compile(r"--tp[ =](\d{1,4})\b")


RENEWED_SECONDS = 10.0
LATE_SECONDS = 11.0
"""The same, and an engine step."""


def completion_body(
    *,
    model: str,  # noqa: ARG001 - /generate has none
    token_ids: Sequence[int],
    max_tokens: int,
    cache_salt: str | None,  # noqa: ARG001 - LMDeploy has none
    user: str | None,  # noqa: ARG001 - /generate has none
) -> dict[str, Any]:
    """The JSON body of one request (lmdeploy/serve/openai/protocol.py::GenerateReqInput): its /v1/completions takes no
    token ids.
    """
    return {
        "input_ids": token_ids,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "top_k": 1,
        "stream": True,
    }


def generated(event: Mapping[str, Any], before: int) -> int:
    """Tokens so far, which each event has."""
    about = event.get("meta_info")
    count = about.get("completion_tokens") if isinstance(about, dict) else None
    return max(count, before) if type(count) is int and 0 <= count < MAX_TOKENS else before


def capabilities(page: Page) -> Capabilities:
    """What its metrics show: a share, which at idle is that of leaked blocks only where nothing is cached.

    A task renews it every ten seconds, idle or not (lmdeploy/serve/openai/api_server.py::create_lifespan_handler).
    """
    configured = [line.labels.get("enable_prefix_caching") for line in page.get(metrics.CONFIG, ())]
    return Capabilities(
        usage=metrics.USAGE in page and metrics.ON_A_TIMER in page,
        blocks=False,
        late_seconds=LATE_SECONDS,
        renewed_seconds=RENEWED_SECONDS,
        returns=bool(configured) and {"False"} == set(configured),
        salt=False,
    )


class LmdeployClient(OpenAIClient):
    """Reads one LMDeploy server, and asks it whether it sleeps, which its metrics do not say."""

    _says_sleep = True

    async def page(self, names: tuple[str, ...] = ()) -> Page:
        """As `OpenAIClient.page`, with a series of whether the server sleeps, where it says so."""
        page = await super().page(names)
        sleeping = await self._sleeping() if self._says_sleep else None
        return page if sleeping is None else {**page, metrics.SLEEPING: (Series({}, float(sleeping)),)}

    async def _sleeping(self) -> bool | None:
        try:
            answer = await self._http.json("/is_sleeping")
        except Unreadable as error:
            # Older versions have no such endpoint.
            self._says_sleep = error.status is None
            return None
        found = answer.get("is_sleeping") if isinstance(answer, dict) else None
        return found if isinstance(found, bool) else None


def parallel_ranks(commands: Iterable[str]) -> tuple[int, int] | None:
    """Tensor-parallel ranks by the command line; `None` where it is not visible. It has no pipeline parallelism."""
    serving = next((command for command in commands if "api_server" in command), None)
    if serving is None:
        return None
    found = _RANKS.search(serving)
    return (int(found[1]) if found else 1, 1)


ENGINE = EngineAdapter(
    name="lmdeploy",
    owned_by="lmdeploy",
    capabilities=capabilities,
    client=LmdeployClient,
    metrics_flag="without --disable-metrics",
    metrics=MappingProxyType(metrics.meanings()),
    metric_prefix="lmdeploy:",
    needed_metrics=MappingProxyType(metrics.NEEDED_NAMES),
    tested_versions=((0, 10), (0, 18)),
    reports_version=False,
    parse_version=parse_version,
    config_metrics=(metrics.CONFIG,),
    parse_engines=metrics.parse_engines,
    parse_pools=metrics.parse_pools,
    length_metrics=metrics.LENGTH_NAMES,
    parse_lengths=lambda page: lengths_of(page, metrics.LENGTH_NAMES[0], metrics.LENGTH_NAMES[1:]),
    program="lmdeploy",
    process_title=re.compile(r"lmdeploy"),
    image=re.compile(r"lmdeploy[^/]*:v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+-]{0,32})$"),
    parallel_ranks=parallel_ranks,
    parse_startup_log=_WORDINGS.report,
    parse_settings=_WORDINGS.settings,
    request=RequestDialect(body=completion_body, path="/generate", generated=generated),
    first_engine_headers=MappingProxyType({}),
)
