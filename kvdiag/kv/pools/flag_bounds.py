"""The flags of each engine that decide its pools, with their bounds: engine_flags.json, the one table of both.

A flag has the setting that it is, its type, and what the engine takes: an interval such as [1,4096] or (0,1), whose
omitted end is the most tokens that kvdiag calculates with; a list of names; and a remark where a value is another's.
plain_flags.json has those that decide no pool, without and with a value, so that a start command can be pasted whole.
Settings are checked by the same table, since the options of `kvdiag fit` for all engines set them, too.
"""

import json
import pkgutil
import re
from collections.abc import Mapping
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_TOKENS

ENGINE_FLAGS: Mapping[str, Mapping[str, Any]] = json.loads(pkgutil.get_data(__package__, "engine_flags.json") or b"")
PLAIN_FLAGS: Mapping[str, Mapping[str, str]] = {
    engine: {flag: kind for kind, names in kinds.items() for flag in names.split()}
    for engine, kinds in json.loads(pkgutil.get_data(__package__, "plain_flags.json") or b"").items()
}
"""Flags that decide no pool, to "flag" or, where a value follows, "text"."""

POWER_OF_TWO = "power of two"
_INTERVAL = re.compile(r"([\[(])([-\d.]+),([\d.]*)([\])])")


def allowed(engine: str, flag: str) -> str:
    """What the engine takes, in words; empty where nothing bounds it."""
    _, kind, *rest = ENGINE_FLAGS[engine][flag]
    if not rest:
        return ""
    if isinstance(rest[0], list):
        return f"one of {', '.join(rest[0])}"
    low, high, open_low, open_high = _bounds(rest[0])
    if not open_low and not open_high:
        words = f"between {low:,.0f} and {high:,.0f}"
    else:
        words = f"{'above' if open_low else 'at least'} {low:,g} and {'below' if open_high else 'at most'} {high:,g}"
    return f"a {POWER_OF_TWO}, {words}" if kind == POWER_OF_TWO else words


def _bounds(interval: str) -> tuple[float, float, bool, bool]:
    found = _INTERVAL.fullmatch(interval)
    if found is None:
        raise ValueError(interval)
    return float(found[2]), float(found[3] or MAX_TOKENS), found[1] == "(", found[4] == ")"


def check_flag(engine: str, flag: str, value: Any) -> None:
    """Refuse a value that the engine does not take.

    Raises:
        KvModelError: it is none of the names, or outside the interval.
    """
    field, kind, *rest = ENGINE_FLAGS[engine][flag]
    if not rest or value is None:
        return
    if isinstance(value, tuple):
        for part in value:
            check_flag(engine, flag, part)
        return
    if isinstance(rest[0], list):
        accepted = value in rest[0]
        shown = f"{value[:40]!a}"
    else:
        low, high, open_low, open_high = _bounds(rest[0])
        accepted = low <= value <= high and not (open_low and value == low) and not (open_high and value == high)
        accepted = accepted and (kind != POWER_OF_TWO or value & (value - 1) == 0)
        shown = f"{value:,g}" if isinstance(value, float) else f"{value:,}"
    if not accepted:
        remark = f"; {rest[1]}" if len(rest) > 1 else ""
        raise KvModelError(f"{flag} is {shown}: it must be {allowed(engine, flag)}{remark}", field)


def check_settings(engine: str, settings: object) -> None:
    """Refuse settings outside the intervals of the engine's flags; KvModelError."""
    for flag, (field, _, *rest) in ENGINE_FLAGS[engine].items():
        if rest and isinstance(rest[0], str):
            check_flag(engine, flag, getattr(settings, field, None))
