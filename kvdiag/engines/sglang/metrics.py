"""SGLang's metrics endpoint, 0.3.6 to 0.5.23, and the figures of its /v1/loads under names of the same kind. Pure.

A name stands on the page once for each rank, stream kind, cache source and priority, so each engine's series are first
reduced to one a name (`reduced`): a gauge is the largest, since tensor-parallel ranks hold the same tokens; a counter
is the sum over everything but ranks. Data-parallel ranks are engines of their own: their pools add up. Requests and
tokens are counted by the front end for all engines together, and stand with the first.

A pool is counted in pages of `page_size` tokens, 1 by default. Its usage is exact: used over all tokens. Tokens that
the radix cache keeps for later requests are evictable, and not among the used ones.
"""

import json
import pkgutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvdiag.engine_memory import host_cache_set_by
from kvdiag.engines import metrics_reader
from kvdiag.engines.engine import SOURCE, EngineReading
from kvdiag.engines.metrics_reader import CHECK, MAX_GAPS, Figures, repeated
from kvdiag.model import MAX_BYTES, MAX_COUNT, Capabilities, Engine, Gap, HostCache, KvPool, Lengths
from kvdiag.sources.prometheus_names import Meaning
from kvdiag.sources.prometheus_text import Page, Series

PREFIX = "sglang:"

NAMES: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(pkgutil.get_data(__package__, "names.json") or b"")
GAUGES, COUNTERS = NAMES["gauges"], NAMES["counters"]
"""Field to its names, the freshest and newest first."""

WAITING: Sequence[str] = json.loads(pkgutil.get_data(__package__, "names.json") or b"")["waiting"]
"""The queues of the page: of requests that wait, and of those that two servers hand over to each other."""

LOADS_RUNNING, LOADS_WAITING, LOADS_USED, LOADS_SLOTS = (
    f"{PREFIX}loads_{name}" for name in ("running_reqs", "waiting_reqs", "used_tokens", "max_running_reqs")
)
"""What /v1/loads reports of each scheduler, as the client writes it into the page."""

PAGE_USED = f"{PREFIX}kv_used_tokens"
TOKENS, PAGE_SIZE = f"{PREFIX}max_total_num_tokens", f"{PREFIX}page_size"
USAGE = (f"{PREFIX}full_token_usage", f"{PREFIX}token_usage")
"""Shares of the pool; the second, since 0.3.6, has two digits."""

CONTEXT = f"{PREFIX}context_len"
POOL_GIB = f"{PREFIX}kv_cache_memory_usage_gb"
SESSIONS, SESSION_TOKENS = f"{PREFIX}num_streaming_sessions", f"{PREFIX}streaming_session_held_tokens"
STATES = f"{PREFIX}mamba_used_tokens"
"""Slots of recurrent states in use: neither the pool's tokens nor the snapshots count them. Cached ones are free."""

AVAILABLE, EVICTABLE = f"{PREFIX}kv_available_tokens", f"{PREFIX}kv_evictable_tokens"
HOST_TOKENS = f"{PREFIX}hicache_host_total_tokens"

LENGTHS = f"{PREFIX}generation_tokens_histogram_bucket"
PROMPTS = (f"{PREFIX}prompt_tokens_histogram_sum", f"{PREFIX}prompt_tokens_histogram_count")

CONFIG_NAMES = (TOKENS, PAGE_SIZE, CONTEXT, POOL_GIB, HOST_TOKENS)

NEEDED_NAMES: Mapping[str, Sequence[str]] = {
    "KV usage": (*GAUGES["kv_used_tokens"], *USAGE),
    "running requests": GAUGES["requests_running"],
    "waiting requests": (LOADS_WAITING, WAITING[0]),
    "the pool's size": (TOKENS,),
}
"""Counters, too, appear with the first request; nothing that appears later is needed."""

IDLE_LATE_SECONDS = 31.0
"""An idle scheduler renews its gauges every 30 s, and /metrics is a moment later
(observability of 0.5.23, metrics_reporter.py::_maybe_log_idle_metrics).
"""

LOADS_STEPS, PAGE_STEPS, STEP_TOKENS = (
    f"{PREFIX}{name}" for name in ("loads_publish_interval", "decode_log_interval", "step_tokens")
)
"""Steps after which a decoding scheduler renews its snapshot and its gauges, and tokens that one step may add, as the
client writes them into the page where /server_info has them.
"""

DEFAULT_LOADS_STEPS, DEFAULT_PAGE_STEPS = 15, 40
"""Of --load-snapshot-publish-interval and --decode-log-interval."""

_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank", "pid")
ONCE_A_RANK = (TOKENS, *GAUGES["kv_used_tokens"], USAGE[1])
"""Gauges that each rank of a server has once: two servers behind one address have them twice."""

_STREAMS = ("is_streaming", "cache_source", "priority")
"""Labels of a counter whose series add up."""

_READ = (
    *(name for table in (GAUGES, COUNTERS) for names in table.values() for name in names),
    *(*WAITING, LOADS_WAITING, LOADS_SLOTS, *USAGE, *CONFIG_NAMES, SESSIONS, SESSION_TOKENS, STATES),
)


def meanings() -> dict[str, Meaning]:
    """The metrics of this module, as named in Prometheus, to the field that each reports."""
    gauges = {field: names[1:] for field, names in GAUGES.items()}
    sessions = {"open_sessions": (SESSIONS,), "session_held_tokens": (SESSION_TOKENS,)}
    found = metrics_reader.meanings({**gauges, "kv_usage_ratio": USAGE, **sessions})
    found |= {name: Meaning(part="engine", field="requests_waiting", adds=("__name__",)) for name in WAITING}
    # The gauge without a priority is the sum over all of them.
    found = {name: replace(meaning, ranks=(*_RANKS, "priority")) for name, meaning in found.items()}
    counters = metrics_reader.meanings(COUNTERS)
    found |= {name: replace(meaning, ranks=_RANKS, adds=_STREAMS) for name, meaning in counters.items()}
    # Where a version has the gauge, its counter of retractions begins with the first of them.
    field = "preemptions_total"
    found[AVAILABLE] = Meaning(part="engine", field=field, priority=len(COUNTERS[field]), scale=0, ranks=_RANKS)
    return found | {name: Meaning(part="config", field="pool") for name in CONFIG_NAMES}


def capabilities(page: Page) -> Capabilities:
    """What a server with these metrics shows: /v1/loads is renewed at once when it becomes idle, the page is not."""
    # A share of two digits alone counts no pages.
    is_exact = any(name in page for name in (*GAUGES["kv_used_tokens"], USAGE[0])) or USAGE[1] not in page
    steps, default = (LOADS_STEPS, DEFAULT_LOADS_STEPS) if LOADS_USED in page else (PAGE_STEPS, DEFAULT_PAGE_STEPS)
    figures = Figures(page, "", [])
    # A further step is under way then.
    late_tokens = ((figures.count((steps,)) or default) + 1) * (figures.count((STEP_TOKENS,)) or 1)
    return Capabilities(
        unit="page",
        blocks=TOKENS in page and is_exact,
        late_seconds=0.0 if LOADS_USED in page else IDLE_LATE_SECONDS,
        late_tokens=min(late_tokens, MAX_COUNT),
        linear=True,
        # A page for each request (managers/schedule_policy.py::PrefillAdder, per_req_token_overhead). Measured, 0.5.23:
        # a prompt of 16,320 tokens in 256 pages of 64 is never taken from the queue, one of 16,256 runs.
        spare_blocks=1,
    )


def engine_label(line: Series) -> str:
    """The data-parallel rank of a series; the only engine where there is one."""
    return line.labels.get("dp_rank") or "0"


def reduced(page: Page) -> Page:
    """One series a name: the largest of a gauge, and the largest rank's sum of a counter."""
    return {name: (Series({}, _reduce(name, lines)),) for name, lines in page.items() if lines}


def _reduce(name: str, lines: Sequence[Series]) -> float:
    if not name.endswith(("_total", "_sum")):
        return max(line.value for line in lines)
    ranks: dict[tuple[str | None, ...], float] = defaultdict(float)
    for line in lines:
        ranks[tuple(line.labels.get(rank) for rank in _RANKS)] += line.value
    return max(ranks.values())


def _split(page: Page, names: Sequence[str] = _READ) -> Mapping[str, Page] | Gap:
    hint = "start it with --enable-metrics" if page else "is this an SGLang server?"
    pages = metrics_reader.split_by_engine(
        page, names, absent=f"the metrics have no {PREFIX}* series: {hint}", label=engine_label
    )
    if isinstance(pages, Gap):
        return pages
    for label, own in pages.items():
        for name in ONCE_A_RANK:
            ranks = [tuple(line.labels.get(rank) for rank in _RANKS) for line in own.get(name, ())]
            if len(set(ranks)) < len(ranks):
                return repeated(name, len(ranks), label)
    return {label: reduced(own) for label, own in pages.items()}


def parse_engines(page: Page) -> EngineReading:
    """The engines in the order of their data-parallel ranks; `None` with a gap if there are none."""
    pages = _split(page)
    if isinstance(pages, Gap):
        return None, (pages,)
    gaps: list[Gap] = []
    engines = tuple(
        _engine(Figures(own, label, gaps), own, label, first=at == 0) for at, (label, own) in enumerate(pages.items())
    )
    return engines, tuple(gaps[:MAX_GAPS])


def _engine(figures: Figures, page: Page, label: str, *, first: bool) -> Engine:
    counts = figures.counts(COUNTERS)
    for field, shown_by in NAMES["first_with_event"].items():
        # A counter of rare events is not there before the first of them.
        if counts[field] is None and any(name in page for name in shown_by):
            counts[field] = 0
    if not first:
        front_end = ("prompt_tokens_total", "generation_tokens_total", "requests_finished_total", "prefix_hits_total")
        counts |= {field: counts[field] or 0 for field in front_end}
    return Engine(
        engine=label,
        kv_usage_ratio=_usage(figures),
        asleep=None,
        # A snapshot of /v1/loads stands for itself: the page is of another moment.
        requests_running=figures.count(GAUGES["requests_running"][: 1 if LOADS_USED in page else None]),
        requests_waiting=_waiting(figures),
        prefix_queries_total=counts["prompt_tokens_total"],
        open_sessions=figures.count((SESSIONS,)),
        session_held_tokens=figures.count((SESSION_TOKENS,)),
        # A page without snapshots is as late while idle as its other gauges.
        state_slots_used=figures.count((STATES,)) if LOADS_USED in page else None,
        **counts,
    )


def _usage(figures: Figures) -> float | None:
    """Used over all tokens of the pool, exactly where both are reported."""
    used, total = figures.count(GAUGES["kv_used_tokens"]), figures.count((TOKENS,))
    if used is None or not total:
        return figures.ratio("KV usage", USAGE)
    if used > total:
        figures.refuse("used tokens", used)
        return None
    return used / total


def _waiting(figures: Figures) -> int | None:
    """Requests that wait or are handed over; `None` where the first queue of all is not reported."""
    snapshot = figures.count((LOADS_WAITING,))
    if snapshot is not None:
        return snapshot
    queues = [figures.count((name,)) for name in WAITING]
    return None if queues[0] is None else min(sum(queue or 0 for queue in queues), MAX_COUNT)


def parse_pools(
    page: Page,
    version: str | None,  # noqa: ARG001 - the names show all that differs
    commands: Sequence[str] = (),  # noqa: ARG001 - the metrics have it all
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """The KV pool of each engine: its tokens in pages, and one page more, which takes dummy writes.

    (mem_cache/memory_pool.py::KVCache: `size + page_size` rows; measured: 8,193 and 513 pages for 8,192 tokens.)
    """
    pages = _split(page)
    if isinstance(pages, Gap):
        return (), (pages,)
    pools: list[KvPool] = []
    gaps: list[Gap] = []
    for label, own in pages.items():
        if TOKENS not in own:
            reason = f"the metrics lack {TOKENS} (since 0.5.6), and /server_info was not read; name the server by --url"
            gaps.append(Gap(SOURCE, "absent", reason))
            continue
        try:
            pools.append(_pool(Figures(own, label, gaps), label))
        except ValueError as error:
            gaps.append(Gap(SOURCE, "failed", f"the pool of engine {label} cannot be used: {error}; {CHECK}"))
    return tuple(pools), tuple(dict.fromkeys(gaps))[:MAX_GAPS]


def _pool(figures: Figures, label: str) -> KvPool:
    tokens, page_tokens = figures.count((TOKENS,)), figures.count((PAGE_SIZE,))
    # The page's size is reported since 0.5.12; without it tokens are counted.
    page_tokens = 1 if page_tokens is None else page_tokens
    if not tokens or not page_tokens or tokens < page_tokens:
        raise ValueError(f"{tokens} tokens in pages of {page_tokens}")
    pages = tokens // page_tokens
    gib = figures.value((POOL_GIB,))
    return KvPool(
        engine=label,
        block_tokens=page_tokens,
        total_blocks=pages + 1,
        usable_blocks=pages,
        usage_blocks=pages,
        max_requests=figures.count((LOADS_SLOTS,)) or None,
        pool_bytes=round(gib * 2**30) if gib is not None and 0 < gib < MAX_BYTES / 2**30 else None,
    )


def parse_caches(page: Page) -> tuple[HostCache, ...]:
    """The hierarchical cache in host memory of each rank: its tokens at the bytes of a token on the device."""
    pages = _split(page)
    sizes = [] if isinstance(pages, Gap) else [_host_bytes(own) for own in pages.values()]
    largest = max(sizes, default=0)
    if not 0 < largest < MAX_BYTES:
        return ()
    flag = "--hicache-size"
    return (HostCache(name=host_cache_set_by(flag).name, flag=flag, limit_bytes=largest),)


def _host_bytes(page: Page) -> int:
    figures = Figures(page, "", [])
    tokens, host_tokens = figures.count((TOKENS,)), figures.count((HOST_TOKENS,))
    gib, page_tokens = figures.value((POOL_GIB,)), figures.count((PAGE_SIZE,)) or 1
    if not tokens or not host_tokens or gib is None or not 0 < gib < MAX_BYTES / 2**30:
        return 0
    return round(gib * 2**30 * host_tokens / (tokens + page_tokens))


def evictable_tokens(page: Page) -> int | None:
    """Tokens that all radix caches keep for later requests; `None` where the version does not report them."""
    pages = _split(page, (EVICTABLE, *COUNTERS["prompt_tokens_total"]))
    if isinstance(pages, Gap):
        return 0  # nothing was served yet
    known = [
        count for label, own in pages.items() if (count := Figures(own, label, []).count((EVICTABLE,))) is not None
    ]
    return sum(known) if known else None


def parse_lengths(page: Page) -> Lengths | None:
    """The lengths of finished requests; `None` where none are reported (up to 0.5.10 by --collect-tokens-histogram)."""
    return metrics_reader.lengths_of(page, LENGTHS, PROMPTS)
