"""Host caches with a size limit: growth within the limit is a cache that fills, growth beyond it is a leak.

By its shape a filling cache is a leak for hours; only the limit tells them apart (llama.cpp's prompt cache takes 6 to
25 hours in reports of 2026). A limit on the command line is known; the default of a program is assumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvdiag.model import MAX_BYTES, Facts, HostCache

MIB = 2**20
GIB = 2**30

OFFLOADING = "vLLM's KV offloading buffer"

CONTAINER = "container"
"""How the host memory of a whole container is called where its processes are not told apart."""

_BEFORE, _BETWEEN, _AFTER = r"""(?:^|[\s"'{,])""", r"""["']?\s*[=:\s]\s*["']?""", r"""(?=[\s"',}]|$)"""
"""Around a flag and its number, or a key of an option's JSON and its."""

MEDIA = ("vision_config", "audio_config", "visual", "thinker_config", "mm_vision_tower")
"""Parts of a config.json by which a model takes more than text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """One cache: whose it is (parts of names of processes), how it is set, and what bounds it where it is not set.

    `default_bytes` is `None` where the cache is off unless it is asked for; `media` caches hold images, audio and
    video, and nothing of a model that takes text alone; `processes` of one server have each one of their own.
    """

    name: str
    programs: tuple[str, ...]
    flags: tuple[str, ...]
    unit_bytes: int
    default_bytes: int | None
    source: str
    media: bool = False
    processes: int = 1


CAPS = (
    Cap(
        name="llama.cpp's prompt cache",
        programs=("llama-server", "llama_server", "ollama"),
        flags=("--cache-ram", "-cram"),
        unit_bytes=MIB,
        default_bytes=8192 * MIB,
        source="ggml-org/llama.cpp PR 16391 (common/arg.cpp); ollama issue 18264 has it in every runner",
    ),
    Cap(
        name="vLLM's multimodal processor cache",
        programs=("vllm",),
        flags=("--mm-processor-cache-gb", "--mm_processor_cache_gb"),
        unit_bytes=GIB,
        default_bytes=4 * GIB,
        source="vllm/config/multimodal.py::mm_processor_cache_gb: in each API server and each engine core",
        media=True,
        processes=2,
    ),
    Cap(
        name=OFFLOADING,
        programs=("vllm",),
        flags=("--kv-offloading-size", "--kv_offloading_size"),
        unit_bytes=GIB,
        default_bytes=None,
        source="vllm/config/cache.py::kv_offloading_size: all ranks together",
    ),
    Cap(
        name="vLLM's CPU offloading connector",
        programs=("vllm",),
        flags=("cpu_bytes_to_use",),
        unit_bytes=1,
        default_bytes=None,
        source="kv_connector_extra_config of OffloadingConnector and SimpleCPUOffloadConnector in --kv-transfer-config",
    ),
    Cap(
        name="LMCache's local cache",
        programs=("vllm", "sglang"),
        flags=("lmcache.max_local_cpu_size",),
        unit_bytes=GIB,
        default_bytes=None,
        source="kv_connector_extra_config of LMCacheConnectorV1: GiB of each worker, as LMCACHE_MAX_LOCAL_CPU_SIZE",
    ),
    Cap(
        name="vLLM's swap space",
        programs=("vllm",),
        flags=("--swap-space", "--swap_space"),
        unit_bytes=GIB,
        default_bytes=None,
        source="vllm/config/cache.py::swap_space of vLLM up to 0.17: for each GPU",
    ),
    Cap(
        name="SGLang's hierarchical cache",
        programs=("sglang",),
        flags=("--hicache-size",),
        unit_bytes=10**9,
        default_bytes=None,
        source="docs.sglang.io, HiCache best practices: host memory in GB for each rank",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What the caches of a process may take together, their names, and whether that is told or only assumed."""

    limit_bytes: int
    names: str
    told: bool


def told(command: str) -> tuple[HostCache, ...]:
    """The caches that a server's command line sets, with their bounds; none for what it sets to nothing."""
    found: dict[str, HostCache] = {}
    for cap in CAPS:
        for flag in cap.flags if any(program in command.lower() for program in cap.programs) else ():
            match = re.search(rf"{_BEFORE}{re.escape(flag)}{_BETWEEN}(\d{{1,15}}(?:\.\d{{1,6}})?){_AFTER}", command)
            limit = None if match is None else round(float(match[1]) * cap.unit_bytes)
            if limit is not None and limit < MAX_BYTES:
                found[cap.name] = HostCache(name=cap.name, flag=flag, limit_bytes=limit)
    return tuple(found.values())


def bound_of(who: str, facts: Facts) -> Bound | None:
    """What bounds the caches of a process, by its name; `None` where none of them is known to be there.

    A container is called what its pod calls it: whose caches are in it the engine tells.
    """
    whose = f"{who} {facts.engine_name or ''}" if who.startswith(CONTAINER) else who
    caps = [cap for cap in CAPS if any(program in whose.lower() for program in cap.programs)]
    set_by = {cache.name: cache for cache in facts.host_caches or ()}
    known = [set_by[cap.name] for cap in caps if cap.name in set_by]
    if any(cache.limit_bytes for cache in known):
        names = ", ".join(f"{cache.name} ({cache.flag})" for cache in known if cache.limit_bytes)
        return Bound(limit_bytes=sum(cache.limit_bytes for cache in known), names=names, told=True)
    assumed = [
        cap
        for cap in caps
        if cap.default_bytes is not None and cap.name not in set_by and (not cap.media or _takes_media(facts))
    ]
    if not assumed:
        return None
    names = ", ".join(f"{cap.name} ({cap.flags[0]}, by default)" for cap in assumed)
    return Bound(limit_bytes=sum(cap.default_bytes or 0 for cap in assumed), names=names, told=False)


def untold_bytes(who: str, facts: Facts, largest_bytes: int) -> int:
    """What caches of a host process may take that nothing tells: neither a command line nor the model; 0 for none.

    `largest_bytes` is taken for a container of an engine that is not known. A program whose name is known and not among
    these has no such cache by default.
    """
    container = is_container(who)
    caps = [cap for cap in CAPS if any(program in who.lower() for program in cap.programs)]
    if not caps and facts.engine_name is None:
        return largest_bytes if container else 0
    caps = caps or [cap for cap in CAPS if facts.engine_name in cap.programs]
    set_by = {cache.name for cache in facts.host_caches or ()}
    return sum(
        (cap.default_bytes or 0) * (cap.processes if container else 1)
        for cap in caps
        # Of a model whose config is known, media say whether there is any: then its bound is assumed, not untold.
        if cap.name not in set_by and cap.media and facts.model_config is None and not _is_worker(who)
    )


def is_container(who: str) -> bool:
    """Whether this is a container, of whose processes nothing is told."""
    return who.lower().startswith(CONTAINER)


def _is_worker(who: str) -> bool:
    """Whether a process is one of vLLM's workers: none of their caches is on by default."""
    return "worker" in who.lower()


def _takes_media(facts: Facts) -> bool:
    """Whether the model's config says that it takes images, audio or video."""
    try:
        config = json.loads(facts.model_config or "{}")
    except (ValueError, RecursionError):
        return False
    return isinstance(config, Mapping) and any(part in config for part in MEDIA)
