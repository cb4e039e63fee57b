"""The blocks that a KV connector's own records name: those that it reads or writes after their request let go of them.

Connectors take references without a request (SimpleCPUOffloadScheduler.touch, the Mooncake store's `_pinned_saves`),
each with a record of another kind. Its objects are therefore walked: blocks of the pool count, and numbers in what is
called blocks or pinned, and not of the host. A record that outlives its transfer still hides its blocks here; their age
shows it.
"""

from __future__ import annotations

import collections
from typing import Any

from .block_tables import Steps

STEP_OBJECTS = 100
MAX_OBJECTS = 20_000
MAX_DEPTH = 8

_NOT_DEVICE = ("cpu", "host", "remote", "hash", "num_", "size", "per_", "offset", "max_")
_NOT_RECORDS = ("config", "token", "prompt", "metrics", "logger", "kv_cache")
_FOREIGN = ("torch", "numpy", "threading", "concurrent", "asyncio", "multiprocessing", "zmq", "logging", "builtins")
_LISTS = (list, tuple, set, frozenset, collections.deque)
_PLAIN = (str, bytes, float, bool, type(None), type)


def pinned_ids(connector: Any, scheduler: Any, pool: Any) -> Steps:
    """The ids of the pool's blocks that a connector's records name; yields after each short step.

    `None` where the records are too many to be walked: any block may be among the others.
    """
    kind = type(pool.blocks[0])
    blocks_of_pool = pool.blocks
    seen = {id(scheduler), id(pool), id(getattr(scheduler, "kv_cache_manager", None)), id(pool.blocks)}
    del scheduler
    found: set[int] = set()
    left: list[tuple[Any, bool, int]] = [(connector, False, 0)]
    for number in range(MAX_OBJECTS):
        if not left:
            return found
        if number % STEP_OBJECTS == STEP_OBJECTS - 1:
            yield
        one, blocks, depth = left.pop()
        if type(one) is int:
            if blocks:
                found.add(one)
        elif isinstance(one, kind):
            # A pool in the host's memory has blocks of the same class, and of the same ids.
            if one.block_id < len(blocks_of_pool) and blocks_of_pool[one.block_id] is one:
                found.add(one.block_id)
        elif not isinstance(one, _PLAIN) and id(one) not in seen and depth < MAX_DEPTH:
            seen.add(id(one))
            left += [(inner, named, depth + 1) for inner, named in _inside(one, blocks)]
    return None


def _inside(one: Any, blocks: bool) -> list[tuple[Any, bool]]:
    if isinstance(one, dict):
        items = list(one.items())[:MAX_OBJECTS]
        # Of a table of lists the keys are jobs.
        keys = [(key, blocks) for key, inner in items if not isinstance(inner, _LISTS)]
        return keys + [(inner, blocks) for _, inner in items]
    if isinstance(one, _LISTS):
        inners = list(one)[:MAX_OBJECTS]
        # A number next to a list is not an id.
        counts = any(isinstance(inner, _LISTS) for inner in inners)
        return [(inner, blocks) for inner in inners if not (counts and type(inner) is int)]
    kind = type(one)
    if kind.__module__.partition(".")[0] in _FOREIGN or kind.__name__ == "Request":
        return []
    names = dict(getattr(one, "__dict__", None) or {})
    names.update((name, getattr(one, name, None)) for name in getattr(kind, "__slots__", ()))
    return [
        (inner, _names_blocks(name))
        for name, inner in names.items()
        if _names_blocks(name) or not any(word in name.lower() for word in _NOT_RECORDS)
    ]


def _names_blocks(name: str) -> bool:
    lower = name.lower()
    return ("block" in lower or "pinned" in lower) and not any(word in lower for word in _NOT_DEVICE)
