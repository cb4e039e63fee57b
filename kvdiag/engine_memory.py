"""What is known of each engine's memory beyond its KV pool, for the judge, which may import no engine.

The data is engines/NAME/memory.json, also of engines whose metrics are not read: whether torch allocates the engine's
device memory, whether `kvdiag fit` models its block manager, its host caches, with the flags that limit them and their
defaults. A limit on the command line is known; a default is assumed.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvdiag.engine_data import engine_data
from kvdiag.model import MAX_BYTES, HostCache
from kvdiag.model.codec import from_plain

_BEFORE, _BETWEEN, _AFTER = r"""(?:^|[\s"'{,])""", r"""["']?\s*[=:\s]\s*["']?""", r"""(?=[\s"',}]|$)"""
"""Around a flag and its number, or a key of an option's JSON and its."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOption:
    """A host cache: whose it is (parts of process names), how its limit is set, and its limit by default.

    `unit_bytes` is 0 where the flag counts no bytes and the engine reports the limit. `default_bytes` is `None` where
    the cache is off by default, or where only the engine reports its limit; `media` caches hold images, audio and
    video, and nothing of a model that takes text alone; `processes` of one server have each one of their own.
    """

    name: str
    programs: tuple[str, ...]
    flags: tuple[str, ...]
    unit_bytes: int
    source: str
    default_bytes: int | None = None
    media: bool = False
    processes: int = 1

    def may_be_in(self, who: str) -> bool:
        """Whether a process of this name, or command line, may have the cache."""
        return any(program in who.lower() for program in self.programs)


@cache
def host_caches() -> tuple[CacheOption, ...]:
    """Every known host cache."""
    return tuple(from_plain(CacheOption, row) for engine in _engines().values() for row in engine["host_caches"])


def host_cache_set_by(flag: str) -> CacheOption:
    """The host cache whose limit a flag sets."""
    return next(one for one in host_caches() if flag in one.flags)


def allocates_by_torch(engine_name: str | None) -> bool:
    """Whether torch allocates an engine's device memory, but for context, graphs and NCCL.

    Of six reported leaks of such engines that NVML alone saw, four were torch's.
    """
    return bool(_engines().get(engine_name or "", {}).get("allocates_by_torch"))


def runs_torch(engine_name: str | None) -> bool:
    """Whether torch may be in an engine's processes, and so the agent; assumed where the engine is not known."""
    return bool(_engines().get(engine_name or "", {}).get("runs_torch", True))


def sized_by_trial_run(engine_name: str | None) -> bool:
    """Whether an engine sizes its KV pool by a trial run of its largest step; assumed where it is not known."""
    return bool(_engines().get(engine_name or "", {}).get("sized_by_trial_run", True))


def fraction_is_of_device(engine_name: str | None) -> bool:
    """Whether the share that sizes an engine's pool is one of the device, or of what was free before the weights; else
    of what they leave. Assumed where the engine is not known.
    """
    return bool(_engines().get(engine_name or "", {}).get("fraction_is_of_device", True))


def modelled_engines() -> tuple[str, ...]:
    """The engines whose block manager `kvdiag.kv` computes, and whose overheads it estimates."""
    return tuple(name for name, engine in _engines().items() if engine["modelled_by_fit"])


def advice_engine() -> str:
    """The engine whose flags the advice of `kvdiag.diagnosis` names."""
    return next(name for name, engine in _engines().items() if engine.get("advice_has_its_words"))


def engine_title(engine_name: str) -> str:
    """An engine's name in texts; the name itself where the engine is not known."""
    return str(_engines().get(engine_name, {}).get("title", engine_name))


def limits_on_command_line(command: str) -> tuple[HostCache, ...]:
    """The caches that a server's command line limits; 0 bytes where it turns one off."""
    found: dict[str, HostCache] = {}
    for option in host_caches():
        # The first flag has the last word: variables of the environment are listed last.
        for flag in reversed(option.flags) if option.unit_bytes and option.may_be_in(command) else ():
            match = re.search(rf"{_BEFORE}{re.escape(flag)}{_BETWEEN}(-1|\d{{1,15}}(?:\.\d{{1,6}})?){_AFTER}", command)
            # -1 is no limit: more than any host has.
            unlimited = match is not None and match[1] == "-1"
            limit = None if match is None else round(float(match[1]) * option.unit_bytes)
            limit = MAX_BYTES - 1 if unlimited else limit
            if limit is not None and limit < MAX_BYTES:
                found[option.name] = HostCache(name=option.name, flag=flag, limit_bytes=limit)
    return tuple(found.values())


def _engines() -> dict[str, Any]:
    return engine_data("memory.json")
