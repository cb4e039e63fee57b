"""Every flag of `vllm serve` 0.32, by what it does to the KV cache: vllm_flags.json.

Options of `kvdiag fit` are the flags that it calculates with. Of the others, "plain" flags change nothing on the
device that decides the cache, "estimated" ones change memory that `fit` estimates without them, and "refused" ones
change the cache in a way that is not modelled, except with a harmless value. The environment variables that vLLM's own
cache and memory code reads are sorted in the same way. A test compares both lists with vLLM's.
"""

import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TABLE: Mapping[str, Any] = json.loads(pkgutil.get_data(__package__, "vllm_flags.json") or b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlag:
    """A flag that `fit` has no option for. `values` is 0, 1, or None for a list; `because` is why it is refused, empty
    where it is not; `estimated` where it changes memory that is only estimated.
    """

    values: int | None
    because: str = ""
    harmless: tuple[str, ...] = ()
    estimated: bool = False


_VALUES: Mapping[str, int | None] = {"flag": 0, "only": 0, "value": 1, "list": None}


def _flags() -> Iterator[tuple[str, VllmFlag]]:
    for kinds in ("plain", "estimated"):
        for kind, names in _TABLE[kinds].items():
            for name in names.split():
                yield name, VllmFlag(values=_VALUES[kind], estimated=kinds == "estimated")
                if kind == "flag":
                    yield negated(name), VllmFlag(values=0, estimated=kinds == "estimated")
    for entry in _TABLE["refused"]:
        for name in entry["flags"].split():
            values = _VALUES[entry["kind"]]
            harmless = tuple(entry.get("harmless", ()))
            yield name, VllmFlag(values=values, because=f"{name} {entry['because']}", harmless=harmless)
            if entry["kind"] == "flag":
                yield negated(name), VllmFlag(values=0)


def negated(flag: str) -> str:
    """The flag that turns one off: --no-enable-lora."""
    return f"--no-{flag.removeprefix('--')}"


VLLM_FLAGS: Mapping[str, VllmFlag] = dict(_flags())
"""Flags that are no options of `fit`."""

VLLM_OPTIONS: tuple[str, ...] = tuple(_TABLE["options"].split())
"""Options of `fit` about vLLM's block manager, its profiles and its metrics, which no other engine has."""

PLAIN_VARIABLES: frozenset[str] = frozenset(_TABLE["environment"]["plain"].split())
MODELLED_VARIABLES: frozenset[str] = frozenset(_TABLE["environment"]["modelled"].split())
REFUSED_VARIABLES: Mapping[str, VllmFlag] = {
    entry["name"]: VllmFlag(
        values=1, because=f"{entry['name']} {entry['because']}", harmless=tuple(entry.get("harmless", ()))
    )
    for entry in _TABLE["environment"]["refused"]
}
"""Environment variables that vLLM reads where it sizes the cache."""
