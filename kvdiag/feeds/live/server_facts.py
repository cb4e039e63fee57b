"""The facts of one server: version, model, pools and processes, read once before anything else."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvdiag.engine_features import features_on
from kvdiag.engine_memory import limits_on_command_line
from kvdiag.engines.engine import EngineAdapter, EngineClient, Identity
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.alternation import IN_TURN, contradict
from kvdiag.formatting import format_duration
from kvdiag.model import MAX_BYTES, Facts, Gap, HostCache
from kvdiag.sources import host, served_model
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_text import Page
from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

HOST_SECONDS = 30.0
"""On a machine with thousands of processes or a slow volume, reading takes a while."""


async def gather_facts(
    client: EngineClient,
    url: str,
    reader: ThreadedReader[Facts],
    *,
    front: EngineClient | None = None,
    host_seconds: float = HOST_SECONDS,
) -> tuple[Facts, Identity]:
    """The facts of the server at `url`; those of this host by `reader`, on a thread that is abandoned if it hangs.

    `front` answers the requests where that is another address, such as a router's: it says which model it serves.

    Raises:
        KvdiagError: it cannot be reached, requires a key, is no server of a supported engine, stops meanwhile, or a
            read times out.
    """
    try:
        identity = await client.identify()
        page = first_page = await client.page()
    except Unreadable as error:
        raise KvdiagError(f"{url}: {error}") from error
    engines, gaps = client.engine.parse_engines(page)
    if engines is None:
        raise KvdiagError(f"{url}: {gaps[0].reason}")
    served = identity if front is None else await _served(front, identity)
    if front is not None:
        page = {**await front_page(client.engine, front), **page}
    try:
        facts = await reader.ask(host_seconds, url=url, engine=client.engine, identity=served, page=page, gaps=gaps)
    except ReadTimeout as busy:
        raise KvdiagError(
            f"{url}: timed out after {format_duration(busy.since_seconds)} reading the server's processes and files: "
            "is a process stuck in a driver, or a volume hung?"
        ) from busy
    try:
        later_page = await client.page()
    except Unreadable as error:
        # What this host showed of it may be half: its processes exit while they are read.
        raise KvdiagError(f"{url}: stopped answering while its processes and files were read: {error}") from error
    if contradict(client.engine, (first_page, later_page)):
        raise KvdiagError(f"{url}: {IN_TURN}")
    return facts, identity


async def front_page(engine: EngineAdapter, front: EngineClient) -> Page:
    """What the metrics of a server in front report of one of this engine."""
    page: Page = {}
    with contextlib.suppress(Unreadable):
        page = await front.page() if engine.front_metrics else {}
    return {name: page[name] for name in engine.front_metrics if name in page}


async def _served(front: EngineClient, identity: Identity) -> Identity:
    """What the server with this identity is to those who send requests to `front`."""
    try:
        asked = await front.identify()
    except Unreadable as error:
        raise KvdiagError(f"--url: {error}") from error
    longest = asked.max_model_len_tokens or identity.max_model_len_tokens
    return replace(identity, model=asked.model or identity.model, max_model_len_tokens=longest)


def read_facts(url: str, engine: EngineAdapter, identity: Identity, page: Page, gaps: tuple[Gap, ...]) -> Facts:
    """What the server reports, and what this host shows of its processes and files."""
    pids, pid_gaps = host.find_server(url, engine.program)
    commands = host.commands(pids or (), engine.environment)
    pools, pool_gaps = engine.parse_pools(page, identity.version, commands)
    ranks = engine.parallel_ranks(commands)
    root = served_model.model_folder(identity.root, pids or ())
    on_disk, weight_gaps = served_model.weights_bytes(root) if identity.weights_bytes is None else (None, ())
    weights = identity.weights_bytes or on_disk
    return Facts(
        url=url,
        engine_name=engine.name,
        engine_version=identity.version,
        model=identity.model,
        max_model_len_tokens=identity.max_model_len_tokens,
        pools=pools,
        server_pids=pids,
        weights_bytes=weights if weights is None or weights < MAX_BYTES else None,
        host_caches=limited_caches(engine.parse_caches(page), None if pids is None else commands),
        host_limit_bytes=host.limit_bytes(pids or ()),
        model_config=served_model.model_config(root),
        kv_connector=engine.kv_connector(page, commands),
        features=features_on(engine.name, commands),
        tensor_parallel=None if ranks is None else ranks[0],
        pipeline_parallel=None if ranks is None else ranks[1],
        capabilities=engine.capabilities(page),
        gaps=(*gaps, *pool_gaps, *pid_gaps, *weight_gaps),
    )


def limited_caches(on_page: Iterable[HostCache], commands: Sequence[str] | None) -> tuple[HostCache, ...] | None:
    """The caches that the page or a command line limits; `None` where none does and not every command line is known.

    A command that is not readable, or whose environment is not, may set any limit.
    """
    # Where both limit a cache, the command line counts.
    reported = (cache for command in commands or () for cache in limits_on_command_line(command))
    caches = {cache.name: cache for cache in (*on_page, *reported)}
    known = commands is not None and all(command and host.NO_ENVIRONMENT not in command for command in commands)
    return tuple(caches.values()) if known or caches else None
