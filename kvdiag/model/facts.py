"""Properties that are constant over a timeline: the server, its KV pools, its processes."""

from dataclasses import dataclass

from kvdiag.model.capabilities import ALL, Capabilities
from kvdiag.model.readings import Device, Gap, Process
from kvdiag.model.validation import MAX_COUNT, Checked

MAX_RANKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool(Checked):
    """One engine's KV-cache pool as the engine itself reports it.

    `block_tokens` is the capacity of one block, context parallelism included. `usable_blocks` can be held by requests:
    vLLM V1 never hands out its null block (id 0). `usage_blocks` is the denominator of the engine's own usage gauge;
    if it is larger than `usable_blocks` (V1 before 0.10.2), an idle pool shows the null block as used. `pool_bytes`
    and every count of blocks are per rank. `max_requests` is how many requests can run at once however short they are,
    where the engine reports it. `bytes_computed`: the bytes follow from the model's file and the engine's settings.
    `overridden`: the number of blocks was set by hand. `mixed`: caches of windows or states are among the bytes, so
    that blocks have no size of their own.
    `state_cache_mode` and `state_dtype` describe the recurrent states kept (labels mamba_cache_mode and
    mamba_ssm_cache_dtype).
    """

    engine: str
    block_tokens: int
    total_blocks: int
    usable_blocks: int
    usage_blocks: int
    capacity_tokens: int | None = None
    max_concurrency: float | None = None
    max_requests: int | None = None
    pool_bytes: int | None = None
    bytes_computed: bool | None = None
    overridden: bool | None = None
    mixed: bool | None = None
    cache_dtype: str | None = None
    sliding_window_tokens: int | None = None
    state_cache_mode: str | None = None
    state_dtype: str | None = None
    memory_fraction_ratio: float | None = None
    prefix_caching: bool | None = None

    def _problem(self) -> str | None:
        for name in ("block_tokens", "sliding_window_tokens", "memory_fraction_ratio"):
            if getattr(self, name) == 0:
                return f"{name} is 0"
        if not 0 < self.usable_blocks <= self.usage_blocks <= self.total_blocks or self.total_blocks == 1:
            return f"{self.usable_blocks} usable, {self.usage_blocks} in the gauge, {self.total_blocks} in all"
        if self.max_concurrency and not 1 / MAX_COUNT <= self.max_concurrency <= MAX_COUNT:
            return f"max_concurrency is {self.max_concurrency}"
        return None

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one block on one rank, where the pool's size is known and its blocks are alike."""
        return None if self.pool_bytes is None or self.mixed else self.pool_bytes // self.total_blocks

    def used_blocks(self, usage_ratio: float) -> int:
        """Blocks held by requests, from the usage gauge (vllm/v1/core/block_pool.py::BlockPool.get_usage)."""
        return max(round(usage_ratio * self.usage_blocks) - (self.usage_blocks - self.usable_blocks), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCache(Checked):
    """A host-memory cache whose size limit the server's command line sets, in bytes per process; 0 if it is off."""

    name: str
    flag: str
    limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Checked):
    """Properties of the server that are constant over a timeline: its pools, its processes and its limits.

    `server_pids` is `None` if the server's processes were not found. `weights_bytes` is the checkpoint's size on disk,
    all ranks together. `host_limit_bytes` is the host memory available to the server: the machine's, or its cgroup's if
    lower. `model_config` is the text of its config.json if readable. `host_caches` are those with a size limit on its
    command lines, `None` if these are not readable. `tensor_parallel` and `pipeline_parallel` are ranks of one
    engine, `None` if unknown. `forced`: the run was started despite other traffic. `started_seconds` is the start of
    the server's process, if reported. `device_uuids` are the devices assigned to the server (its pod's), `None` if
    only its processes show them. `kv_connector` moves KV blocks to other servers or tiers; `None` if none is visible.
    `features` are those of the engine (`engine_features`) that its command lines turn on, `None` if they are not
    readable.
    `capabilities` is what the engine's metrics can show.
    """

    url: str | None = None
    engine_name: str | None = None
    engine_version: str | None = None
    model: str | None = None
    max_model_len_tokens: int | None = None
    pools: tuple[KvPool, ...] = ()
    server_pids: tuple[int, ...] | None = None
    weights_bytes: int | None = None
    host_limit_bytes: int | None = None
    model_config: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    host_caches: tuple[HostCache, ...] | None = None
    kv_connector: str | None = None
    features: tuple[str, ...] | None = None
    forced: bool = False
    started_seconds: float | None = None
    device_uuids: tuple[str, ...] | None = None
    capabilities: Capabilities = ALL
    gaps: tuple[Gap, ...] = ()

    def _problem(self) -> str | None:
        ranks = self.tensor_parallel, self.pipeline_parallel
        if any(count is not None and not 0 < count <= MAX_RANKS for count in ranks):
            return f"ranks are {ranks}, not within 1..{MAX_RANKS}"
        return None

    def pool(self, engine: str) -> KvPool | None:
        """The pool of one engine, `None` where it did not report one."""
        # Plain, since every sample passes through here.
        for pool in self.pools:
            if pool.engine == engine:
                return pool
        return None

    def own_processes(self, device: Device) -> tuple[Process, ...]:
        """The server's own among the processes on a device; none where either is not known."""
        return tuple(process for process in device.processes or () if process.pid in (self.server_pids or ()))
