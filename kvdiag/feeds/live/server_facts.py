"""Who is diagnosed: version, model, pools and processes of one server, read once before anything else."""

from __future__ import annotations

from kvdiag.engines.vllm.metrics import EngineClient, Identity, parse_caches, parse_engines, parse_pools
from kvdiag.errors import KvdiagError
from kvdiag.model import MAX_BYTES, Facts, Gap, HostCache
from kvdiag.sources import host
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_text import Page
from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

HOST_SECONDS = 30.0
"""On a machine of thousands of processes, or beside a slow volume, reading takes a while."""


def host_reader() -> ThreadedReader[Facts]:
    """Makes the facts on a thread of its own, which is left behind where the host hangs."""
    return ThreadedReader(read_facts, "host")


async def gather_facts(
    source: EngineClient,
    url: str,
    reader: ThreadedReader[Facts],
    *,
    forced: bool = False,
    host_seconds: float = HOST_SECONDS,
) -> tuple[Facts, Identity]:
    """The facts of the server at `url`; those that this host tells of it come through `reader`.

    Raises:
        KvdiagError: it cannot be reached, wants a key, is no vLLM server, or this host does not answer in time.

    """
    try:
        identity = await source.identify()
        page = await source.page()
    except Unreadable as error:
        raise KvdiagError(f"{url}: {error}") from error
    engines, gaps = parse_engines(page)
    if engines is None:
        raise KvdiagError(f"{url}: {gaps[0].reason}")
    try:
        facts = await reader.ask(host_seconds, url=url, identity=identity, page=page, gaps=gaps, forced=forced)
    except ReadTimeout as busy:
        raise KvdiagError(
            f"{url}: this host has not told the server's processes and files for {busy.since_seconds:.0f} s: "
            "does a process hang in a driver, or a volume not answer?"
        ) from busy
    return facts, identity


def read_facts(url: str, identity: Identity, page: Page, gaps: tuple[Gap, ...], *, forced: bool) -> Facts:
    """What the server tells of itself, and what this host tells of it."""
    pools, pool_gaps = parse_pools(page, identity.version)
    pids, pid_gaps = host.find_server(url)
    ranks = host.parallel_ranks(pids or ())
    root = host.model_folder(identity.root, pids or ())
    weights, weight_gaps = host.weights_bytes(root)
    return Facts(
        url=url,
        engine_name="vllm",
        engine_version=identity.version,
        model=identity.model,
        max_model_len_tokens=identity.max_model_len_tokens,
        pools=pools,
        server_pids=pids,
        weights_bytes=weights if weights is None or weights < MAX_BYTES else None,
        host_caches=_caches(page, pids),
        host_limit_bytes=host.limit_bytes(pids or ()),
        model_config=host.model_config(root),
        tensor_parallel=None if ranks is None else ranks[0],
        pipeline_parallel=None if ranks is None else ranks[1],
        forced=forced,
        gaps=(*gaps, *pool_gaps, *pid_gaps, *weight_gaps),
    )


def _caches(page: Page, pids: tuple[int, ...] | None) -> tuple[HostCache, ...] | None:
    """What the page bounds, and what the command lines do, which count where both do."""
    shown = {cache.name: cache for cache in (*parse_caches(page), *host.caches(pids or ()))}
    return None if pids is None and not shown else tuple(shown.values())
