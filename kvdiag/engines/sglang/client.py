"""Reads an SGLang server: /v1/loads at each tick, its metrics once a second, /server_info and /model_info once.

The metrics are late: a decoding scheduler renews them every 40 steps, an idle one every 30 s. /v1/loads (since 0.5.8)
asks the schedulers, since 0.5.15 a snapshot that each prefill and an idle scheduler renew at once and a decoding one
every 15 steps. What it says becomes series of the page (`with_loads`), under names that only kvdiag has. A server that
does not have it is read by its metrics alone.

A request whose prompt is processed in chunks is counted nowhere, and one that was just prefilled may not be: then
nothing runs or waits while tokens are in use, as in a leak. So such a snapshot counts as idle only once a later one
shows that the scheduler did no work in between (`Rank.idle_since`). Else the running requests are unknown.

GET /health is never sent: it generates a token.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from kvdiag.engines.engine import SOURCE, EngineAdapter, EngineReading, Identity
from kvdiag.engines.metrics_reader import MAX_SERIES
from kvdiag.engines.openai_client import OpenAIClient, shown_text
from kvdiag.engines.sglang.metrics import (
    CONTEXT,
    IDLE_LATE_SECONDS,
    LOADS_RUNNING,
    LOADS_SLOTS,
    LOADS_STEPS,
    LOADS_USED,
    LOADS_WAITING,
    PAGE_SIZE,
    PAGE_STEPS,
    PAGE_USED,
    PREFIX,
    SESSIONS,
    STATES,
    STEP_TOKENS,
    TOKENS,
    engine_label,
    evictable_tokens,
)
from kvdiag.formatting import plural
from kvdiag.model import MAX_COUNT, Gap
from kvdiag.sources.http import HttpReader, Unreadable
from kvdiag.sources.prometheus_text import Page, Series

LOADS = "/v1/loads"
LOADS_PARAMS = (("include", "core"),)

SERVER_INFO = ("/server_info", "/get_server_info")
"""Since 0.5.10, and before. Every scheduler answers it: it is read once."""

MODEL_INFO = ("/model_info", "/get_model_info")
"""Since 0.5.8, and before."""

NO_GENERATION = (
    "the server's model generates no tokens (an embedding or reward model): SGLang would exit at a completion, so the "
    "test steps are not run; watch it with `kvdiag serve` or `kvdiag top`, which send no requests"
)
"""0.5.23 does not refuse it: the scheduler fails on the result that has no logits, and with it the server."""

SERVER_FIGURES = {
    TOKENS: "max_total_num_tokens",
    PAGE_SIZE: "page_size",
    CONTEXT: "context_length",
    LOADS_STEPS: "load_snapshot_publish_interval",
    PAGE_STEPS: "decode_log_interval",
    STEP_TOKENS: "speculative_num_draft_tokens",
}
"""Series to the field of /server_info that has its value."""

PAGE_SECONDS = 1.0
"""Between reads of the metrics, which cost the server more than all else here (0.5.23: 25 ms, /v1/loads 8 ms)."""

SETTLING_SECONDS = 0.5
"""After work the metrics are read at each tick for so long: requests are counted when they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One scheduler's snapshot. `work` counts what it has done so far; `None` where the version does not report it."""

    rank: int
    at_seconds: float
    running: int
    waiting: int
    used_tokens: int
    uncached_tokens: int
    total_tokens: int | None
    slots: int | None = None
    """Requests that it runs at once at most."""
    work: tuple[float, ...]

    @property
    def has_work(self) -> bool:
        """Whether it shows requests; a prompt that is processed in chunks shows by its tokens alone."""
        return bool(self.running or self.waiting or self.uncached_tokens)

    def same_as(self, earlier: "Rank | None") -> bool:
        """Whether a scheduler neither has work nor has done any since an earlier snapshot, and its tokens stayed."""
        if earlier is None or self.has_work or earlier.has_work:
            return False
        return (self.used_tokens, self.work) == (earlier.used_tokens, earlier.work)

    @property
    def is_empty(self) -> bool:
        """Whether a scheduler has no work, and no token is in use."""
        return not self.has_work and not self.used_tokens

    def idle_since(self, earlier: "Rank | None", least_seconds: float = 0.0) -> bool:
        """Whether nothing runs: no tokens are in use, or the same since an earlier snapshot, for longer than that."""
        if self.has_work or not self.used_tokens:
            return not self.has_work
        return self.is_still(earlier, least_seconds)

    def is_still(self, earlier: "Rank | None", seconds: float) -> bool:
        """Whether the scheduler has done nothing since an earlier snapshot, which is older than that."""
        same = earlier is not None and self.same_as(earlier)
        return earlier is not None and same and self.at_seconds > earlier.at_seconds + seconds


def parse_loads(answer: object) -> tuple[Rank, ...] | None:
    """The snapshots of an answer of /v1/loads; `None` if it is none, or one of them is impossible."""
    loads = answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(loads, list) or not 0 < len(loads) <= MAX_SERIES:
        return None
    ranks = [_rank(load) for load in loads]
    known = {rank.rank: rank for rank in ranks if rank is not None}
    return tuple(known[rank] for rank in sorted(known)) if len(known) == len(loads) else None


def _rank(load: object) -> Rank | None:
    if not isinstance(load, dict):
        return None
    names = ("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    counts = [_count(load.get(name)) for name in names]
    at_seconds = load.get("timestamp")
    if None in counts or not _is_possible(at_seconds):
        return None
    rank, running, waiting, used = (count or 0 for count in counts)
    moments = load.get("decode_moments")
    steps = moments[0] if isinstance(moments, list) and moments else 0
    work = (load.get("total_prefill_uncached_tokens", 0), steps)
    return Rank(
        rank=rank,
        at_seconds=float(at_seconds),
        running=running,
        waiting=waiting,
        used_tokens=used,
        uncached_tokens=_count(load.get("num_waiting_uncached_tokens")) or 0,
        total_tokens=_count(load.get("max_total_num_tokens")),
        slots=_count(load.get("max_running_requests")),
        work=tuple(float(one) for one in work if _is_possible(one)),
    )


def _is_possible(value: object) -> TypeGuard[float]:
    """Whether a value is a number that a float holds."""
    return isinstance(value, int | float) and abs(value) <= MAX_COUNT


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def with_loads(page: Page, ranks: tuple[Rank, ...], earlier: Mapping[int, Rank]) -> Page:
    """The page with the snapshots' figures, and the pool's size from them where the page lacks it.

    State slots in use are on the page alone, which is late: they are left out until it must have been renewed, or was,
    as it shows no token in use: each prefill writes those of its request there.
    """
    found: dict[str, list[Series]] = {LOADS_RUNNING: [], LOADS_WAITING: [], LOADS_USED: []}
    still = {str(one.rank) for one in ranks if one.is_still(earlier.get(one.rank), IDLE_LATE_SECONDS)}
    used = {engine_label(line) for line in page.get(PAGE_USED, ()) if line.value}
    still |= {label for one in ranks if one.is_empty and PAGE_USED in page and (label := str(one.rank)) not in used}
    found[STATES] = [line for line in page.get(STATES, ()) if engine_label(line) in still]
    # The metrics count open sessions as late as everything else: until then no series shows whose tokens these are.
    opened = {engine_label(line) for line in page.get(SESSIONS, ()) if line.value}
    for rank in ranks:
        labels = {"dp_rank": str(rank.rank)}
        running = rank.running or (1 if rank.uncached_tokens and not rank.waiting else 0)
        least_seconds = IDLE_LATE_SECONDS if SESSIONS in page and str(rank.rank) not in opened else 0.0
        if running or rank.waiting or rank.idle_since(earlier.get(rank.rank), least_seconds):
            found[LOADS_RUNNING].append(Series(labels, float(running)))
        found[LOADS_WAITING].append(Series(labels, float(rank.waiting)))
        found[LOADS_USED].append(Series(labels, float(rank.used_tokens)))
        if rank.slots:
            found.setdefault(LOADS_SLOTS, []).append(Series(labels, float(rank.slots)))
        if rank.total_tokens and not any(engine_label(line) == str(rank.rank) for line in page.get(TOKENS, ())):
            found.setdefault(TOKENS, list(page.get(TOKENS, ()))).append(Series(labels, float(rank.total_tokens)))
    return {**page, **{name: tuple(lines) for name, lines in found.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What /server_info reports once: the version, where the model is, and figures that the metrics lack, by name."""

    version: str | None
    model_path: str | None
    figures: Mapping[str, float]


def parse_server_info(answer: object) -> ServerInfo | None:
    """The figures of an answer of /server_info; `None` if it is none. Each data-parallel rank has the same."""
    if not isinstance(answer, dict):
        return None
    version = answer.get("version")
    found = {name: float(count) for name, field in SERVER_FIGURES.items() if (count := _count(answer.get(field)))}
    is_version = isinstance(version, str) and 0 < len(version) <= MAX_VERSION_CHARACTERS and version.isascii()
    return ServerInfo(
        version=version if is_version else None, model_path=shown_text(answer.get("model_path")), figures=found
    )


def generates_none(answer: object) -> bool:
    """Whether an answer of /model_info says that the model generates no tokens."""
    return isinstance(answer, dict) and answer.get("is_generation") is False


MAX_VERSION_CHARACTERS = 64


class SglangClient(OpenAIClient):
    """Reads one SGLang server (`kvdiag.engines.engine.EngineClient`)."""

    def __init__(self, http: HttpReader, engine: EngineAdapter) -> None:
        """Read through `http`, whose base address is the server's."""
        super().__init__(http, engine)
        self._has_loads: bool | None = None
        self._info: ServerInfo | None = None
        self._last: dict[int, Rank] = {}
        self._page: Page | None = None
        self._evictable_before: int | None = None
        self._page_seconds = self._worked_seconds = float("-inf")

    async def identify(self) -> Identity:
        """As `EngineClient.identify`; the version is that of /server_info."""
        identity = await super().identify()
        if generates_none(await self._first_of(MODEL_INFO)):
            identity = replace(identity, requests_refused=NO_GENERATION)
        self._info = parse_server_info(await self._first_of(SERVER_INFO))
        if (info := self._info) is None:
            return identity
        # The root in /v1/models is the name under which the model is served.
        return replace(identity, version=identity.version or info.version, root=info.model_path or identity.root)

    async def _first_of(self, paths: tuple[str, ...]) -> Any:
        """The JSON answer of the first of these paths that has one; `None` where none has."""
        for path in paths:
            with contextlib.suppress(Unreadable):
                return await self._http.json(path)
        return None

    async def page(self, names: tuple[str, ...] = ()) -> Page:  # noqa: ARG002 - the server cannot filter
        """As `EngineClient.page`, with what /v1/loads and /server_info report."""
        return await self._with_loads(await self._whole())

    async def read(self) -> EngineReading:
        """As `EngineClient.read`: the snapshots of now, and counters that are at most a second old."""
        try:
            ranks = await self._loads()
            page = self._page
            if page is None or ranks is None or self._is_due(ranks):
                page = await self._whole()
        except Unreadable as error:
            return None, (Gap(source=SOURCE, kind=error.kind, reason=str(error)),)
        return self.engine.parse_engines(page if ranks is None else self._joined(page, ranks))

    def _is_due(self, ranks: tuple[Rank, ...]) -> bool:
        now_seconds = time.monotonic()
        if any(rank.has_work or rank.used_tokens for rank in ranks):
            self._worked_seconds = now_seconds
            return now_seconds - self._page_seconds >= PAGE_SECONDS
        settled_seconds = self._worked_seconds + SETTLING_SECONDS
        return self._page_seconds < settled_seconds or now_seconds - self._page_seconds >= PAGE_SECONDS

    async def _whole(self) -> Page:
        """The metrics, and what /server_info reported that they lack."""
        begun_seconds = time.monotonic()
        try:
            page = dict(await super().page())
        except Unreadable as error:
            if error.kind != "absent":
                raise
            raise Unreadable("absent", f"no metrics: start the server {self.engine.metrics_flag}") from error
        if self._page is None:
            self._evictable_before = evictable_tokens(page)
        if self._info is not None and any(name.startswith(PREFIX) for name in page):
            ranks = {engine_label(line) for name in page if name.startswith(PREFIX) for line in page[name]} or {"0"}
            for name, value in self._info.figures.items():
                page.setdefault(name, tuple(Series({"dp_rank": rank}, value) for rank in sorted(ranks)))
        self._page, self._page_seconds = page, begun_seconds
        return page

    async def clean_up(self) -> str | None:
        """As `EngineClient.clean_up`: the radix cache is flushed if it was empty before; what stays is evictable.

        No request of the run shares a prefix with another one, so that none of it is ever a hit.
        """
        removes = "POST /flush_cache removes them, and those of others"
        try:
            # A flush also takes back what has leaked, and with it the evidence.
            if self._evictable_before == 0 and not any(rank.used_tokens for rank in await self._loads() or ()):
                await self._http.get("/flush_cache", body={})
                return None
            now = evictable_tokens(await super().page())
        except Unreadable:
            now = None
        if now is None or self._evictable_before is None:
            return f"the run's prompts stay in the radix cache until other requests need the room; {removes}"
        left = now - self._evictable_before
        stay = f"{plural(left, 'token')} more are in the radix cache than before, until other requests need the room"
        return f"{stay}; {removes}" if left > 0 else None

    async def _with_loads(self, page: Page) -> Page:
        ranks = await self._loads()
        return page if ranks is None else self._joined(page, ranks)

    def _joined(self, page: Page, ranks: tuple[Rank, ...]) -> Page:
        joined = with_loads(page, ranks, self._last)
        # Of snapshots that are the same the first is kept: how long nothing has been done counts from there.
        before = self._last
        self._last = {rank.rank: before[rank.rank] if rank.same_as(before.get(rank.rank)) else rank for rank in ranks}
        return joined

    async def _loads(self) -> tuple[Rank, ...] | None:
        """The schedulers' snapshots; `None` where the server has none (before 0.5.8)."""
        if self._has_loads is False:
            return None
        try:
            answer: Any = self._http.decode(await self._http.get(LOADS, LOADS_PARAMS))
        except Unreadable as error:
            if error.kind == "absent":
                self._has_loads = False
                return None
            raise
        ranks = parse_loads(answer)
        if ranks is None:
            raise Unreadable("refused", f"the answer of {LOADS} is not a list of schedulers' loads")
        self._has_loads = True
        return ranks
