"""TensorRT-LLM: trtllm-serve from 1.1, and Triton's tensorrtllm_backend."""

import asyncio
import contextlib
import re
from dataclasses import replace
from types import MappingProxyType

from kvdiag.engines.engine import EngineAdapter, Identity, RequestDialect
from kvdiag.engines.metrics_reader import parse_version
from kvdiag.engines.openai_client import OpenAIClient, completion_body
from kvdiag.engines.trtllm import metrics, startup_log
from kvdiag.model import Capabilities
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_text import Page, Series

STILL_SECONDS = 1.0
"""Without an iteration: twice as long as the server's collector waits for the next one."""


def capabilities(page: Page) -> Capabilities:
    """What its metrics show: nothing of the pool without iteration statistics, and all of it late.

    A request takes a block for each `tokens_per_block` of its tokens: windows keep all of them by default
    (max_attention_window), and KVCacheManagerV2 counts states as blocks, too, one or two a request
    (pyexecutor/kv_cache/kv_cache_manager_v2.py::get_kv_cache_stats adds up the pools of all kinds of layers).
    """
    usage = any(name in page for name in (*metrics.NEEDED_NAMES["KV usage"], metrics.TRITON_BLOCKS))
    blocks = metrics.MAX_BLOCKS in page or metrics.TRITON_BLOCKS in page
    return Capabilities(usage=usage, blocks=blocks, on_completion=True, linear=True)


class TrtllmClient(OpenAIClient):
    """Reads one TensorRT-LLM server, and adds to its metrics whether they moved.

    The count of running requests is of the beginning of the last iteration (py_executor.py::_get_init_iter_stats), so
    that it stays above 0 when they have ended. Where a request ended, the collector reads on until no iteration came
    for half a second: figures that do not move for longer are an idle server's, or those of a lone request.
    """

    reads_metrics_alone = True

    _values: tuple[float, ...] | None = None
    _moved_seconds: float | None = None
    _since_seconds = 0.0

    async def identify(self) -> Identity:
        """As `EngineClient.identify`; only the metrics endpoint has the longest request."""
        identity = await super().identify()
        with contextlib.suppress(Unreadable):
            if identity.max_model_len_tokens is None:
                return replace(identity, max_model_len_tokens=metrics.longest_tokens(await super().page()))
        return identity

    async def page(self, names: tuple[str, ...] = ()) -> Page:
        """As `OpenAIClient.page`, with a series of whether the figures stand still, once that is known."""
        page = await super().page(names)
        # A Dynamo worker's metrics include its own clocks.
        own = [lines for name, lines in page.items() if name.startswith((metrics.PREFIX, metrics.TRITON_PREFIX))]
        values = tuple(line.value for lines in own for line in lines)
        now_seconds = asyncio.get_running_loop().time()
        if self._values is None:
            self._since_seconds = now_seconds
        elif values != self._values:
            self._moved_seconds = now_seconds
        self._values = values
        still = now_seconds - (self._moved_seconds or self._since_seconds) >= STILL_SECONDS
        if not own or (not still and self._moved_seconds is None):
            return page
        return {**page, metrics.STILL: (Series({}, float(still)),)}


class TritonClient(TrtllmClient):
    """Reads Triton's metrics port, which has neither models nor completions."""

    async def identify(self) -> Identity:
        """Nothing, once the port has answered; Unreadable if it does not."""
        await self.page()
        return Identity(version=None, model=None, root=None, max_model_len_tokens=None, server_header=None)


ENGINE = EngineAdapter(
    name="trtllm",
    owned_by="tensorrt_llm",
    capabilities=capabilities,
    client=TrtllmClient,
    metrics_path="/prometheus/metrics",
    metrics_flag="with return_perf_metrics and enable_iter_perf_stats in --extra_llm_api_options",
    metrics=MappingProxyType(metrics.meanings()),
    metric_prefix=metrics.PREFIX,
    polled_metrics=(),  # in its multiprocess mode the endpoint finds no series by name
    needed_metrics=MappingProxyType(metrics.NEEDED_NAMES),
    tested_versions=((1, 1), (1, 4)),
    parse_version=parse_version,
    config_metrics=metrics.POOL,
    parse_engines=metrics.parse_engines,
    parse_pools=metrics.parse_pools,
    program="trtllm",
    process_title=re.compile(r"trtllm|tensorrt_llm|tritonserver|mgmn_(leader|worker)"),
    image=re.compile(r"(?:tensorrt-?llm|trtllm)(?!-runtime)[^/]*:v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+-]{0,32})$"),
    parallel_ranks=startup_log.parallel_ranks,
    parse_startup_log=startup_log.WORDINGS.report,
    parse_settings=startup_log.WORDINGS.settings,
    request=RequestDialect(body=completion_body),
    first_engine_headers=MappingProxyType({}),
)

TRITON = replace(
    ENGINE,
    owned_by="",
    client=TritonClient,
    metrics_path="/metrics",
    metrics_flag="with --allow-metrics=true",
    metrics=MappingProxyType({}),
    metric_prefix=metrics.TRITON_PREFIX,
    needed_metrics=MappingProxyType(dict.fromkeys(metrics.NEEDED_NAMES, (metrics.TRITON_BLOCKS,))),
    config_metrics=(),
    program="tritonserver",
    image=re.compile(r"tritonserver[^/]*:v?(\d{1,4}\.\d{1,4})[\w.+-]{0,32}trtllm"),
)
"""The same engine behind Triton: on a port of its own, under other names, and live alone, since Prometheus has several
figures under one name.
"""
