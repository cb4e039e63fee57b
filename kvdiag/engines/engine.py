"""What kvdiag needs to know of one engine (vLLM, …), as data and functions behind one record.

An `EngineAdapter` is all that differs between engines: the names of its metrics, its processes, the wording of its
startup log, its request dialect and its command-line flags. `EngineClient` reads one server of that engine over HTTP.
Feeds and commands take both as arguments and name no engine themselves.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvdiag.engine_data import engine_data
from kvdiag.engine_memory import engine_title
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings
from kvdiag.model import Capabilities, Engine, Gap, HostCache, KvPool, Lengths
from kvdiag.sources.http import HttpReader
from kvdiag.sources.prometheus_names import Meaning
from kvdiag.sources.prometheus_text import Page

SOURCE = "engine"
"""The source name of every engine's figures in gaps and evidence."""


def later(module: str, name: str) -> Callable[..., Any]:
    """The function or class of this name, whose module is imported when it is first called.

    Of eight engines a daemon watches one, and never reads a startup log: the readers of all are 1 MiB of its memory.
    """

    def call(*arguments: Any) -> Any:
        found = importlib.import_module(f"kvdiag.engines.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        return found(*arguments)  # type: ignore[operator]  # a function by its caller's word

    return call


EngineReading = tuple[tuple[Engine, ...] | None, tuple[Gap, ...]]


@dataclass(frozen=True, slots=True)
class Identity:
    """A server's version, model id, model folder or hub name, longest request in tokens, and role in a deployment."""

    version: str | None
    model: str | None
    root: str | None
    max_model_len_tokens: int | None
    server_header: str | None
    role: str | None = None
    weights_bytes: int | None = None
    """Of the model as it is loaded, where the server reports it."""
    requests_refused: str | None = None
    """Why the test steps cannot be run against this server; `None` if they can."""


class RequestBody(Protocol):
    """Makes the JSON body of one streamed completion of exactly `max_tokens` tokens that reports its usage."""

    def __call__(
        self, *, model: str, token_ids: Sequence[int], max_tokens: int, cache_salt: str | None, user: str | None
    ) -> dict[str, Any]:
        """Return the body; without a salt the engine may share the prompt's prefix with other requests.

        An engine that accepts text alone gets a text of at least as many tokens, to be cut to their number.
        """


MAX_TOKENS = 2**31


def openai_generated(event: Mapping[str, Any], before: int) -> int:
    """Tokens generated so far: by the event's usage, else one more for an event with a choice."""
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if type(count) is int and 0 <= count < MAX_TOKENS:
        return max(count, before)
    return before + 1 if event.get("choices") else before


def openai_error(event: Mapping[str, Any]) -> str | None:
    """The message of an event, or of a refusal's body, that reports an error."""
    error = event.get("error")
    if error is None and event.get("object") != "error":
        return None
    return str(error.get("message") if isinstance(error, dict) else event.get("message", error))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDialect:
    """How completions are requested, and how their streamed JSON events are read: by default, OpenAI's.

    `generated` takes an event and the tokens before it, and returns those so far; `error` is its message, if it is one.
    `headers` go with each request.
    """

    body: RequestBody
    path: str = "/v1/completions"
    generated: Callable[[Mapping[str, Any], int], int] = openai_generated
    error: Callable[[Mapping[str, Any]], str | None] = openai_error
    headers: Mapping[str, str] = field(default_factory=dict)


class EngineClient(Protocol):
    """One server of an engine over HTTP."""

    @property
    def engine(self) -> EngineAdapter:
        """Which engine it is."""

    async def identify(self) -> Identity:
        """Return the server's version and model.

        Raises:
            Unreadable: it cannot be reached, requires a key, or is no server of this engine.
        """

    async def page(self, names: tuple[str, ...] = ()) -> Page:
        """Return the metrics endpoint's series, only `names` where the server can filter.

        Raises:
            Unreadable: it cannot be read, or is not in Prometheus's text format.
        """

    async def read(self) -> EngineReading:
        """Return the engines now, or `None` with a gap that says why not; no behaviour of the server makes it raise."""

    async def lengths(self) -> Lengths | None:
        """Return how long finished requests were; `None` where the server does not report it.

        Raises:
            Unreadable: as `page`.
        """

    async def clean_up(self) -> str | None:
        """Remove what kvdiag's own requests left in the engine's caches, unless others' would go with it.

        Returns:
            What of it stays, and for how long; `None` if nothing does that another request would notice.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdapter:
    """One engine: its names, formats and flags, and the functions that read them.

    A second engine is a folder `kvdiag/engines/NAME/` with an `ENGINE`, and `ENGINE` in `ENGINES`. The functions are
    pure and take what a server or a user sent: a figure that is missing or impossible is `None` with a `Gap`, and none
    raises unless it says so. What the engine has no notion of is left out: `()`, `None`, a function that returns it.
    """

    name: str
    """The name in `Facts.engine_name` and in traces."""

    owned_by: str
    """`owned_by` of its models in GET /v1/models: by this `recognise` knows the engine first."""

    capabilities: Callable[[Page], Capabilities]
    """What it can show, by a server's metrics; of a Prometheus's only those that describe the pool have series."""

    client: Callable[[HttpReader, EngineAdapter], EngineClient]
    """Makes the client of one server; `OpenAIClient` for servers with OpenAI's API."""

    metrics_path: str = "/metrics"
    """Where its metrics are, without a redirect."""

    metrics_flag: str
    """How its metrics are turned on, after "start the server"."""

    metrics: Mapping[str, Meaning]
    """Name in Prometheus to the field that it reports, for `diagnose --prometheus`."""

    metric_prefix: str
    """How its metrics' names begin: by this `recognise` knows the engine."""

    polled_metrics: tuple[str, ...] = ()
    """Requested at each tick, by `name[]`; empty where the server cannot filter, and all of it is read."""

    needed_metrics: Mapping[str, Sequence[str]]
    """Figures that verdicts about the KV pool need, to the names of their metrics."""

    metrics_at_start: bool = False
    """Whether all of its metrics are there before the first request; else some appear with it."""

    usage_at: str = ""
    """How to read the KV usage that this server does not report, where another address has it; an imperative."""

    front_metrics: tuple[str, ...] = ()
    """What a server in front of it, at another address, reports of this one; all else there is of other servers."""

    tested_versions: tuple[tuple[int, int], tuple[int, int]]
    """The oldest and the newest version whose metrics are tested."""

    reports_version: bool = True
    """Whether its servers report their version."""

    parse_version: Callable[[str | None], tuple[int, int, int] | None]
    """Major, minor and patch of a version; `None` where it has none."""

    config_metrics: tuple[str, ...] = ()
    """The metrics whose labels or values describe the KV pool."""

    parse_engines: Callable[[Page], EngineReading]
    """The engines of a page now, one for each data-parallel rank; `None` with a gap `absent` if it shows none."""

    parse_pools: Callable[[Page, str | None, Sequence[str]], tuple[tuple[KvPool, ...], tuple[Gap, ...]]]
    """The KV pool of each of them, from the page, the version and the command lines of the server's processes, which
    are empty where they are not visible; one that cannot be used is left out, with a gap.
    """

    parse_caches: Callable[[Page], tuple[HostCache, ...]] = lambda _: ()
    """The host caches whose size limit the page reports."""

    length_metrics: tuple[str, ...] = ()
    """Those of the lengths of finished requests; empty where there are none."""

    parse_lengths: Callable[[Page], Lengths | None] = lambda _: None
    """How long finished requests were, all engines together; `None` where the page does not say."""

    program: str
    """Part of the command line of the server's own processes; empty where the listener and its children are all."""

    environment: tuple[str, ...] = ()
    """Environment variables of those processes that set an option as the command line does; none holds a key."""

    process_title: re.Pattern[str]
    """Found in the names of the server's processes."""

    image: re.Pattern[str]
    """Found in a reference to the engine's container image; its first group is the version."""

    parallel_ranks: Callable[[Iterable[str]], tuple[int, int] | None]
    """Tensor-parallel and pipeline-parallel ranks of one engine, from the command lines of the server's processes."""

    kv_connector: Callable[[Iterable[str], Iterable[str]], str | None] = lambda *_: None
    """The KV connector that the names of the server's metrics, or its command lines, show."""

    parse_startup_log: Callable[[str], EngineReport]
    """The memory figures that a server printed at start; raises `KvdiagError` if the text has none of this engine."""

    parse_settings: Callable[[Iterable[str]], EngineSettings]
    """The settings that a log's lines show; all `None` if they are not of this engine."""

    failed_pool_bytes: Callable[[str], int | None] = lambda _: None
    """The shortfall of memory for the KV pool, as logged; `None` if the log has none."""

    request: RequestDialect

    first_engine_headers: Mapping[str, str] = field(default_factory=dict)
    """Request headers that send a request to the first of several data-parallel engines."""

    @property
    def title(self) -> str:
        """The name in texts."""
        return engine_title(self.name)

    @property
    def flags(self) -> Mapping[str, str]:
        """Setting to the command-line flag (or environment variable) that changes it, as remedies name it."""
        found: Mapping[str, str] = engine_data("flags.json").get(self.name, {})
        return found

    def open(self, http: HttpReader) -> EngineClient:
        """A client for the server at the base address of `http`."""
        return self.client(http, self)
