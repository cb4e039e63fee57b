"""What does not change over a replica's history: its pools, model, version, limits. Pure.

Each fact comes from the source that reports it most directly. The pools come from the engine's own configuration (the
newest, and with it those of other sizes before a restart, since usage is a ratio of the pool of its time), else from
kvdiag's metrics, which count tokens. Engine and version are those of the image, if all containers agree. Facts on which
the series disagree, and figures out of range, are `None`: nothing is taken from another replica.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvdiag.engines import ENGINES, engine_of_image
from kvdiag.engines.engine import EngineAdapter
from kvdiag.feeds.history.replica_columns import Columns
from kvdiag.feeds.history.series_labels import (
    METRICS,
    TARGET_LABELS,
    LabelMap,
    container_name,
    containers,
    only,
    size_of,
)
from kvdiag.model import MAX_BYTES, MAX_COUNT, Capabilities, Gap, HostCache, KvPool
from kvdiag.model.capabilities import ALL
from kvdiag.sources.prometheus_answers import Points
from kvdiag.sources.prometheus_text import Page, Series, engine_label

MAX_EARLIER = 64
"""Sizes that a pool had before restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The newest pools, the engine's host caches and capabilities, and what could not be read of them.

    `earlier` are the pools of other sizes before restarts, each with the time until which they were there: the usage
    of that time is read by them.
    """

    pools: tuple[KvPool, ...]
    caches: tuple[HostCache, ...] = ()
    capabilities: Capabilities = ALL
    earlier: tuple[tuple[float, tuple[KvPool, ...]], ...] = ()
    gaps: tuple[Gap, ...] = ()


def pools_of(columns: Columns, present: Iterable[str], version: str | None, engine: EngineAdapter | None) -> Pools:
    """The KV pools as the engines' newest configuration reports them, and those before them."""
    if engine is None:
        return Pools(pools=_by_tokens(columns))
    config = _config(columns, engine)
    metrics: Page = {name: () for name in present if name in engine.metrics}
    lines, since = _newest_config(config)
    page: Page = {**metrics, **lines}
    pools, gaps = engine.parse_pools(page, version, ())
    earlier: list[tuple[float, tuple[KvPool, ...]]] = []
    while since is not None and len(earlier) < MAX_EARLIER:
        until = since
        lines, since = _newest_config([one for one in config if one.first_seconds < until])
        earlier.append((until, engine.parse_pools({**metrics, **lines}, version, ())[0]))
    return Pools(
        pools=_with_bytes(pools, columns) if pools else _by_tokens(columns),
        caches=engine.parse_caches(page),
        capabilities=engine.capabilities({**dict.fromkeys(present, ()), **page}),
        earlier=tuple(reversed(earlier)),
        gaps=gaps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """A time during which one series that describes a pool had one value; `key` is what it describes."""

    name: str
    key: Hashable
    labels: LabelMap
    value: float
    first_seconds: float
    last_seconds: float

    @property
    def size(self) -> tuple[object, ...]:
        """What differs where the pool has another size."""
        return self.value, *size_of(self.labels)


def _config(columns: Columns, engine: EngineAdapter) -> list[_Config]:
    """The values that describe pools, each with its time: of a gauge they change, of an info metric its labels do."""
    found: list[_Config] = []
    for labels, points in columns.reported:
        name = labels.get("__name__", "")
        if name not in engine.config_metrics:
            continue
        # A server that got another address, or that two jobs or two Prometheus scrape, has one pool.
        own = tuple(sorted(one for one in labels.items() if one[0] not in TARGET_LABELS))
        key = (name, engine_label(labels) if name.endswith("_info") else own)
        at = 0
        for value, run in groupby(points.values):
            first, at = at, at + sum(1 for _ in run)
            times = points.times[first], points.times[at - 1]
            found.append(
                _Config(name=name, key=key, labels=labels, value=value, first_seconds=times[0], last_seconds=times[1])
            )
    return found


def _newest_config(config: Sequence[_Config]) -> tuple[Page, float | None]:
    """The newest values that describe pools, and since when these have this size, if they had another."""
    newest: dict[Hashable, _Config] = {}
    for one in sorted(config, key=lambda one: (one.last_seconds, one.first_seconds, sorted(one.labels.items()))):
        newest[one.key] = one
    since = None
    for one in config:
        current = newest[one.key]
        if one.size != current.size and one.last_seconds < current.first_seconds:
            since = max(since or 0.0, current.first_seconds)
    lines: dict[str, tuple[Series, ...]] = {}
    for one in newest.values():
        lines[one.name] = (*lines.get(one.name, ()), Series(one.labels, one.value))
    return lines, since


def _of_field(columns: Columns, field: str) -> list[tuple[LabelMap, Points]]:
    return [(labels, points) for labels, points in columns.reported if METRICS[labels["__name__"]].field == field]


def _newest(columns: Columns, field: str) -> dict[str, float]:
    """The newest value of a figure in kvdiag's own metrics, by engine."""
    found: dict[str, tuple[float, float]] = {}
    for labels, points in _of_field(columns, field):
        engine = engine_label(labels)
        found[engine] = max(found.get(engine, (0.0, 0.0)), (points.times[-1], points.values[-1]))
    return {engine: value for engine, (_, value) in found.items()}


def _with_bytes(pools: tuple[KvPool, ...], columns: Columns) -> tuple[KvPool, ...]:
    sizes = _newest(columns, "pool_bytes")
    return tuple(
        replace(pool, pool_bytes=round(sizes[pool.engine]))
        if pool.pool_bytes is None and 0 < sizes.get(pool.engine, 0.0) <= MAX_BYTES
        else pool
        for pool in pools
    )


def _by_tokens(columns: Columns) -> tuple[KvPool, ...]:
    """Pools that only kvdiag's own metrics report: counted in tokens, as if each were a block."""
    sizes, most = _newest(columns, "pool_bytes"), _newest(columns, "max_concurrency")
    found = []
    for engine, tokens in sorted(_newest(columns, "capacity_tokens").items()):
        if not 1 < tokens <= MAX_COUNT:
            continue
        size, concurrency = sizes.get(engine, 0.0), most.get(engine, 0.0)
        found.append(
            KvPool(
                engine=engine,
                block_tokens=1,
                total_blocks=round(tokens),
                usable_blocks=round(tokens),
                usage_blocks=round(tokens),
                capacity_tokens=round(tokens),
                max_concurrency=concurrency if 1 / MAX_COUNT < concurrency <= MAX_COUNT else None,
                pool_bytes=round(size) if 0 < size <= MAX_BYTES else None,
            )
        )
    return tuple(found)


def longest_request_tokens(pools: Sequence[KvPool]) -> int | None:
    """max_model_len: since 0.24 the pool reports its tokens as int(concurrency x max_model_len)."""
    for pool in pools:
        if pool.capacity_tokens and pool.max_concurrency and pool.max_concurrency >= 1.0 and pool.block_tokens > 1:
            # Cut off to a whole number of tokens, of which concurrency >= 1 leaves less than one.
            return round(pool.capacity_tokens / pool.max_concurrency + 0.499)
    return None


def version_of(series: Iterable[LabelMap], container: str | None) -> str | None:
    """The engine's version by the tag of its image, where all images have the same one."""
    found: set[str] = set()
    for labels in containers(series, container):
        images = (labels.get("image", ""), labels.get("image_spec", ""))
        tags = (engine.image.search(image) for image in images for engine in ENGINES)
        found.add(next((tag[1] for tag in tags if tag is not None), ""))
    return only(found - {""})


def engine_of(series: Iterable[LabelMap], container: str | None) -> str | None:
    """The engine by the name of its image, where all that are named are of the same one."""
    return only({engine_of_image(labels.get("image", "")) for labels in containers(series, container)} - {None})


def host_limit_bytes(columns: Columns, container: str | None) -> int | None:
    """The memory that the server's container may take; a limit of 0 is none."""
    known = sorted(
        (METRICS[labels["__name__"]].priority, points.values[-1])
        for labels, points in _of_field(columns, "host_limit_bytes")
        if (not container or container_name(labels) == container) and 0 < points.values[-1] <= MAX_BYTES
    )
    # Without the container's name there may be several limits: the server's is the largest of its pod's.
    return round(max(value for priority, value in known if priority == known[0][0])) if known else None


def weights_bytes(columns: Columns) -> int | None:
    """The size of the weights on all devices together, from kvdiag's own ledger."""
    total = sum(points.values[-1] for _, points in _of_field(columns, "weights_bytes"))
    return round(total) if 0 < total <= MAX_BYTES else None
