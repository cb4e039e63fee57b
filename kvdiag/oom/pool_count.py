"""Reads what an engine's own check of its KV pool counted: of each pool its size and what is accounted for. Pure.

A line is one pool: `[swa] total=911616, available=235264, evictable=676096, protected=0, session_held=0, uncached=0`
(SGLang 0.5.12 and later), `mamba_available_size=315, mamba_evictable_size=138, self….mamba_pool.size=454` (0.5.2 to
0.5.10), `available_size=961586, protected_size=0, self.max_total_num_tokens=961593` (0.4.6 to 0.4.9, where the first is
free and cached together). Fewer than the size are lost; more were released twice. A line with two pools, as a
logger may join them, is cut where a pool's name stands in brackets; one that cannot be cut gives no count.
"""

import re
from dataclasses import dataclass

MAX_LINES = 16
_LINE_END = re.compile(r"\n|(?=\[\w{1,30}\] total=)")
_NUMBER = re.compile(r"([\w.()]{1,80})=(\d{1,15})\b")
_TOTAL = re.compile(r"(?:^|[._])(?:total|total_size|max_total_num_tokens|size|tokens_per_layer)$")
_PART = re.compile(r"available|evictable|protected|session_held|uncached")
_NAMES = (
    re.compile(r"\[(\w{1,30})\] "),
    re.compile(r"\b(full|swa|mamba)_(?:available|evictable)"),
    re.compile(r"(req_to_token_pool) memory leak"),
)
_TITLES = {
    "full": "token pool",
    "swa": "sliding-window pool",
    "mamba": "state slots",
    "req_to_token_pool": "request slots",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCount:
    """One pool of an engine by its own count, in its units: tokens, or slots."""

    pool: str
    total: int
    accounted: int

    @property
    def lost(self) -> int:
        """Units that neither a request nor the cache nor the free list has; negative where some are counted twice."""
        return self.total - self.accounted


def pool_counts(text: str) -> tuple[PoolCount, ...]:
    """The pools of a check's message; empty where it prints no sizes."""
    found: dict[str, PoolCount] = {}
    for line in _LINE_END.split(text, MAX_LINES)[:MAX_LINES]:
        numbers = [(name.rstrip("()"), int(value)) for name, value in _NUMBER.findall(line)]
        totals = [value for name, value in numbers if _TOTAL.search(name) and not _PART.search(name)]
        parts = [value for name, value in numbers if _PART.search(name)]
        if len(totals) != 1 or not parts or len(set(_NAMES[1].findall(line))) > 1:
            continue
        name = next((match[1] for pattern in _NAMES if (match := pattern.search(line))), "full")
        title = _TITLES.get(name, name)
        found.setdefault(title, PoolCount(pool=title, total=totals[0], accounted=sum(parts)))
    return tuple(found.values())
