"""The largest figures the KV-cost model accepts, and the one range check of its values."""

import math

from kvdiag.errors import KvModelError

MAX_BYTES = 1 << 50
MAX_TOKENS = 1 << 30
MAX_RANKS = 1 << 12
MAX_DRAFT_TOKENS = 1 << 10


def check_range(field: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise KvModelError unless `low` <= `value` <= `high`."""
    if not low <= value <= high:
        allowed = f"at least {low:,}" if high == math.inf else f"between {low:,} and {high:,}"
        raise KvModelError(f"{field} is {value:,}: it must be {allowed}", field)
