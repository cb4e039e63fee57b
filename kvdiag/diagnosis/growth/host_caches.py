"""Host caches with a size limit: growth within the limit is a filling cache, growth beyond it is a leak.

By its shape a filling cache is a leak for hours; only the limit separates them (llama.cpp's prompt cache takes 6 to
25 hours in reports of 2026). Within a limit that is set, or a default that no command line changes, growth is ok;
within a program's default that is only assumed, a leak is a step less certain; a cache that nothing reports makes it a
suspect while it may still fill.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.memory_series import MemoryOwner, MemorySeries, memory_series
from kvdiag.diagnosis.limits import Limits
from kvdiag.engine_memory import host_caches
from kvdiag.formatting import format_bytes, format_holder, format_ratio
from kvdiag.model import MAX_BYTES, Evidence, Facts, Finding, Status, Timeline

CONTAINER = "container"
"""How the host memory of a whole container is called where its processes are not reported."""

READABLE = "run kvdiag on the server's host, as its user, where the limit is readable"

MEDIA = ("vision_config", "audio_config", "visual", "thinker_config", "mm_vision_tower")
"""Parts of a config.json by which a model takes more than text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """What the caches of a process may take together, their names, and whether that is reported or only assumed."""

    limit_bytes: int
    names: str
    reported: bool
    host_bytes: int | None = None
    """What the server may have of the host; `None` where it is not limited, or that is not known."""

    @property
    def exceeds_host(self) -> bool:
        """Whether a reported limit, or an unlimited cache, may take more than the server may have."""
        return self.reported and self.limit_bytes > (self.host_bytes or MAX_BYTES - 2)


def size_limit(who: str, facts: Facts, media: bool | None = None) -> SizeLimit | None:
    """The limit of the caches of a process, by its name; `None` where it is known to have none.

    A container is called what its pod calls it: the engine says whose caches are in it, in each of its processes.
    `media` is whether the engine's cache of media has been asked. One that is in use has its default limit for certain,
    unless the command line says otherwise; so has one that is always in use, if the command line is known.
    """
    whose = f"{who} {facts.engine_name or ''}" if who.startswith(CONTAINER) else who
    options = [option for option in host_caches() if option.may_be_in(whose)]
    reported = {cache.name: cache for cache in facts.host_caches or ()}
    known = [reported[option.name] for option in options if option.name in reported]
    if any(cache.limit_bytes for cache in known):
        names = ", ".join(f"{cache.name} ({cache.flag})" for cache in known if cache.limit_bytes)
        most = sum(cache.limit_bytes for cache in known)
        return SizeLimit(limit_bytes=most, names=names, reported=True, host_bytes=facts.host_limit_bytes)
    assumed = [
        option
        for option in options
        if option.default_bytes is not None
        and option.name not in reported
        and (not option.media or (takes_media(facts) if media is None else media))
    ]
    if not assumed:
        return None
    names = ", ".join(f"{option.name} ({option.flags[0]}, by default)" for option in assumed)
    container = is_container(who)
    most = sum((option.default_bytes or 0) * (option.processes if container else 1) for option in assumed)
    # A command line that was read and sets no limit leaves the default; of media, whether there are any decides.
    if all(option.media for option in assumed):
        in_use = bool(media)
    else:
        in_use = facts.host_caches is not None and not any(option.media for option in assumed)
    host = facts.host_limit_bytes
    return SizeLimit(limit_bytes=most, names=names, reported=in_use, host_bytes=host if in_use else None)


def unreported_bytes(who: str, facts: Facts, largest_bytes: int, media: bool | None = None) -> int:
    """What caches of a process may take that neither a command line nor the model reports; 0 for none.

    `largest_bytes` is taken for a container of an engine that is not known. A program whose name is known and not among
    these has no such cache by default.
    """
    container = is_container(who)
    options = [option for option in host_caches() if option.may_be_in(who)]
    if not options and facts.engine_name is None:
        return largest_bytes if container else 0
    options = options or [option for option in host_caches() if facts.engine_name in option.programs]
    reported = {cache.name for cache in facts.host_caches or ()}
    # Of a model whose config is known, or an engine that counts its media, these say whether there is any: then its
    # limit is assumed. A worker has none of the caches that are on by default.
    if media is not None or facts.model_config is not None or "worker" in who.lower():
        return 0
    return sum(
        (option.default_bytes or 0) * (option.processes if container else 1)
        for option in options
        if option.name not in reported and option.media
    )


def is_container(who: str) -> bool:
    """Whether this is a container, whose processes are not reported."""
    return who.lower().startswith(CONTAINER)


def takes_media(facts: Facts) -> bool:
    """Whether the model takes images, audio or video, by its config; no where that is not known."""
    try:
        config = json.loads(facts.model_config or "{}")
    except (ValueError, RecursionError):
        return False
    return isinstance(config, Mapping) and any(part in config for part in MEDIA)


def within_its_limit(
    judged: Finding, owner: MemoryOwner, seen: MemorySeries, part: MemoryComponent, facts: Facts, limits: Limits
) -> Finding:
    """A leak's finding as it is where growth exceeds the limits of the process's caches, or none is known."""
    limit = size_limit(owner.who, facts, seen.engines.media)
    if limit is None:
        return judged
    grown = seen.grown_bytes(part, owner)
    subject = f"{format_holder(owner.who)}: {part.label}"
    status, summary = by_limit(judged.status, judged.summary, subject, grown, limit, limits)
    return replace(judged, status=status, evidence=(*judged.evidence, *_evidence(grown, limit)), summary=summary)


def by_limit(
    status: Status, summary: str, subject: str, grown: int, limit: SizeLimit, limits: Limits, *, cached: bool = True
) -> tuple[Status, str]:
    """Status and summary of growth in view of the caches' limit; `cached` unless it is observed to be no cache's."""
    full = f"{format_bytes(grown)} of {format_bytes(limit.limit_bytes)}"
    if grown > limits.growth.cache_passed_ratio * limit.limit_bytes:
        return status, f"{summary}; beyond the size limit of {limit.names} ({full})"
    less: Status = "suspect" if status == "fault" else "unknown"
    if limit.exceeds_host:
        host = None if limit.host_bytes is None else f" or exceeds the host's {format_bytes(limit.host_bytes)}"
        how = "; set a limit" if host is None else f"{host}; set a limit below that"
        return less, f"{summary}; it may be {limit.names} filling, whose limit is not known{how}"
    if limit.reported and cached:
        return "ok", f"{subject} grows within the size limit of {limit.names} ({full}): still filling"
    fills = f"{summary}; it may be {limit.names} filling ({full})"
    return less, fills if limit.reported else f"{fills}; {READABLE}"


def filling(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """The fullest cache of a known size limit that is filling while it is watched; `None` where none does."""
    seen = memory_series(timeline, facts, limits)
    part, found = MemoryComponent.HOST_ANONYMOUS, []
    for owner, assessed in seen.assessed(part).items():
        limit, growth = size_limit(owner.who, facts, seen.engines.media), assessed.decides
        if limit is None or not limit.reported or growth is None or limit.exceeds_host:
            continue
        grown = seen.grown_bytes(part, owner)
        fills = growth.grows or growth.reason in ("ended", "slowing")
        if fills and grown <= limits.growth.cache_passed_ratio * limit.limit_bytes:
            found.append((grown / limit.limit_bytes, format_holder(owner.who), grown, limit))
    if not found:
        return None
    ratio, who, grown, limit = max(found, key=lambda one: one[:2])
    full = f"{format_bytes(grown)} of {format_bytes(limit.limit_bytes)}, {format_ratio(ratio)}"
    return Finding(verdict, "ok", f"{who}: {limit.names} is still filling ({full})", _evidence(grown, limit))


def _evidence(grown_bytes: int, limit: SizeLimit) -> tuple[Evidence, ...]:
    return (
        Evidence("grown_since_first_sample", grown_bytes, "bytes", "host"),
        Evidence("cache_size_limit", limit.limit_bytes, "bytes", limit.names),
        Evidence("full", grown_bytes / limit.limit_bytes, "ratio", "computed"),
    )
