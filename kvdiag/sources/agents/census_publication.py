"""The owners of KV blocks in an agent's file, as values. Pure. Nothing in it is trusted.

`block_census.py` and `sglang_census.py` of the agent write them. Request ids may name users: they are hashed here
unless they are asked for.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvdiag.formatting import one_line
from kvdiag.model import OWNERS, BlockOwners, RequestBlocks
from kvdiag.model.codec import from_plain
from kvdiag.model.validation import MAX_COUNT

MAX_LISTED = 64
"""Orphans and requests that are listed; their counts are of all."""

MAX_GROUPS = 64
MAX_TEXT_CHARACTERS = 128
MAX_AHEAD_SECONDS = 5.0
"""By which a count may be later than its publication: they are made one after the other."""

HASH_CHARACTERS = 12


def read_census(reported: Any, *, process: tuple[int, int], now_seconds: float, show_request_ids: bool) -> BlockOwners:
    """The owners of one pool, of a process by id and start; `now_seconds` is the time of its publication.

    Raises:
        ValueError: they are impossible, or more than a pool can have.
    """
    census = _object(reported, "kv_blocks")
    owners = _object(census.get("owners"), "owners")
    holders = [_holder(one, show_request_ids) for one in _list(census, "culprits", MAX_LISTED)]
    figures: dict[str, Any] = {
        "engine": census.get("engine"),
        "pid": process[0],
        "start_ticks": process[1],
        "age_seconds": _age(census, now_seconds),
        # Agents of older versions do not know all of them.
        **{f"{owner}_blocks": owners[owner] for owner in OWNERS if owner in owners},
        **{name: census.get(name) for name in ("usable_blocks", "counts", "closed_counts", "connector")},
        **{f"{name}_oldest_seconds": census.get(f"{name}_oldest_seconds") for name in ("connector", "pinned")},
        "group_blocks": _list(census, "groups", MAX_GROUPS),
        "orphans": _list(census, "orphans", MAX_LISTED),
        "last_holders": holders,
    }
    for name in ("engine", "connector"):
        if isinstance(figures[name], str):
            if len(figures[name]) > MAX_TEXT_CHARACTERS:
                raise ValueError(f"{name} has more than {MAX_TEXT_CHARACTERS} characters")
            figures[name] = one_line(figures[name])
    return from_plain(BlockOwners, figures, lenient=True)


def read_requests(reported: Any, *, now_seconds: float) -> RequestBlocks:
    """How requests use their blocks, as of the same publication; `kvdiag/agent/request_blocks.py` writes it.

    Raises:
        ValueError: it is impossible.
    """
    requests = _object(reported, "kv_requests")
    return from_plain(RequestBlocks, {**requests, "age_seconds": _age(requests, now_seconds)}, lenient=True)


def aged(owners: BlockOwners, by_seconds: float) -> BlockOwners:
    """The owners some seconds later."""
    held = owners.held
    if held is not None:
        held = replace(held, age_seconds=round(held.age_seconds + by_seconds, 3))
    return replace(owners, age_seconds=round(owners.age_seconds + by_seconds, 3), held=held)


def _age(part: Mapping[str, Any], now_seconds: float) -> float:
    at_seconds: Any = part.get("at_monotonic_seconds")
    if type(at_seconds) not in (int, float) or not 0 <= at_seconds <= MAX_COUNT:
        raise ValueError("at_monotonic_seconds is not a time")
    if at_seconds > now_seconds + MAX_AHEAD_SECONDS:
        # Its age would stay 0 until then.
        raise ValueError("at_monotonic_seconds is later than the publication")
    return max(now_seconds - float(at_seconds), 0.0)


def _holder(reported: Any, show_request_ids: bool) -> dict[str, Any]:
    holder = _object(reported, "a culprit")
    name = holder.get("id")
    if not isinstance(name, str):
        raise ValueError("a request's id is not a text")  # noqa: TRY004 - one kind of error for one kind of mistake
    known = {key: holder.get(key) for key in ("blocks", "prompt_tokens", "output_tokens", "end", "loading", "among")}
    return {"request": shown_request(name, show_request_ids=show_request_ids), **known}


def shown_request(name: str, *, show_request_ids: bool) -> str:
    """A request's id as outputs have it: one short line, a hash unless ids are asked for."""
    if not show_request_ids:
        name = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:HASH_CHARACTERS]
    return one_line(name[:MAX_TEXT_CHARACTERS])


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")  # noqa: TRY004 - as above
    return value


def _list(census: Mapping[str, Any], name: str, most: int) -> list[Any]:
    values = census.get(name) or []
    if not isinstance(values, list):
        raise ValueError(f"{name} is not a list")  # noqa: TRY004 - as above
    if len(values) > most:
        raise ValueError(f"{name} has {len(values)} entries, at most {most} are read")
    return values
