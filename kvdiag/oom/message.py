"""Parses one out-of-memory message: of torch, the driver, a library, or an engine's refusal.

Pure, and bounded: a message is at most `MAX_MESSAGE_CHARACTERS`, every pattern has a fixed longest match, and figures
that a message lacks are `None`. Wordings: c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp of torch
1.0 to 2.13, vLLM 0.6 to 0.32 (worker/worker.py, v1/worker/utils.py, gpu_worker.py, v1/core/kv_cache_utils.py). The
wordings of other engines stand in engines/NAME/failures.json. The advice at the end of torch's message is printed
whether or not it fits (pytorch#173049) and is never read.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from kvdiag.engine_data import engine_data
from kvdiag.model import MAX_BYTES
from kvdiag.oom.pool_count import PoolCount, pool_counts

Kind = Literal[
    "torch",  # torch's allocator could not serve an allocation
    "limit",  # the process's own limit, set below the device, stood against it
    "async",  # the same from the cudaMallocAsync allocator, which has no blocks
    "absurd",  # a size that no device has: a bug of the caller
    "driver",  # the driver itself, past torch's allocator
    "library",  # cuBLAS, cuDNN, NCCL or another library's own allocation
    "workspace",  # a library's fixed workspace, which is too small for what was asked of it
    "masked",  # an out-of-memory whose figures NVML refused: MIG, Jetson
    "capture",  # a CUDA graph could not be captured; the message does not say whether for lack of memory
    "warmup",  # vLLM: the dummy requests of the sampler did not fit
    "buffer",  # ggml: a buffer that is allocated whole, past any allocator
    "budget",  # vLLM: less free at start than the memory fraction claims
    "model",  # Ollama: the model needs more than is free
    "component",  # TensorRT-LLM: one part of the executor did not fit next to those before it
    "prefill",  # TGI: the trial prefill by which it sizes its batch did not fit
    "blocks",  # nothing is left for the KV pool
    "context",  # vLLM: the pool is smaller than one request of the longest context
    "profiling",  # vLLM: free memory grew while it was measured
    "host",  # the host's memory, not a device's
    "sanitizer",  # allocations of the host's memory that nothing pointed to when the process ended
    "kv_lost",  # the engine's own count of its KV pool does not add up
    "kv_overrun",  # blocks ran out although the engine admits only requests whose blocks are free
    "kv_full",  # the KV pool had no room for what was running: requests failed, or the engine did
    "retracted",  # the KV pool was full and running requests gave way: pressure, no failure
    "kv_held",  # a KV connector had the blocks of finished requests until its timeout: no failure of the engine
    "long_request",  # one request was refused as longer than the engine can serve: no failure of the engine
]

WARNINGS: frozenset[Kind] = frozenset({"retracted", "kv_held", "long_request"})
"""Kinds after which the engine serves on: they are judged only where nothing else failed."""

MAX_MESSAGE_CHARACTERS = 3000
ROUNDING_BYTES = 16 * 2**20
"""What three sizes of torch's message may be off by together: each has two decimals in GiB."""

SEGMENT_BYTES = 2 * 2**20
"""torch requests multiples of this from the driver (c10/core/AllocatorConfig.h)."""

SIZE = r"(\d{1,3}(?:,\d{3}){1,6}(?:\.\d{1,6})?|\d{1,20}(?:\.\d{1,6})?)\s{0,2}(bytes|[KMGTPE]i?B|B)(?!\w)"
# vLLM's V0 and Apple's allocator write GB for what they have divided by 2**30.
_UNITS = {"b": 1, "bytes": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40, "pb": 2**50, "eb": 2**60}
_WHOLE = r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,15})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What one message says. `allocated_bytes` and `unallocated_bytes` are torch's two parts of its reserved bytes.

    `private_bytes` is free in pools of their own (CUDA graphs), which torch's message counts as allocated. `others`
    are processes that torch's message lists, without its own. Only an engine's refusals report the last group:
    what the pool would have needed and got, the context that was asked for and the one that fits, the smallest memory
    fraction with which it starts. Of the host's memory, `killed` is the process, container or unit, `usage_bytes` what
    its cgroup used, of `limit_bytes`. `counts` are the pools that an engine's own check counted, `held_tokens` those of
    the requests that a full pool failed; `part` is what could not be created, or the unit that ran out; `created` are
    the parts before it and what was free before each.
    """

    kind: Kind
    message: str
    device: int | None = None
    asked_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    private_bytes: int | None = None
    process_bytes: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    needed_bytes: int | None = None
    available_bytes: int | None = None
    before_bytes: int | None = None
    fraction_ratio: float | None = None
    asked_tokens: int | None = None
    fitting_tokens: int | None = None
    requests: int | None = None
    killed: str | None = None
    limit_bytes: int | None = None
    usage_bytes: int | None = None
    weights_bytes: int | None = None
    minimum_ratio: float | None = None
    leaked_bytes: int | None = None
    created: tuple[tuple[str, int], ...] = ()
    held_tokens: int | None = None
    part: str | None = None
    counts: tuple[PoolCount, ...] = ()

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that torch had reserved; `None` if the message lacks one of their parts."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def short_bytes(self) -> int | None:
        """Bytes that the driver was short of; at least one segment, since the driver lacked the rest of it.

        `None` if it is not reported, or if more was free: then something else refused the allocation.
        """
        if self.asked_bytes is None or self.free_bytes is None or self.enough_free:
            return None
        return max(-(-self.asked_bytes // SEGMENT_BYTES) * SEGMENT_BYTES - self.free_bytes, SEGMENT_BYTES)

    @property
    def enough_free(self) -> bool:
        """Whether the device had enough free memory for the request."""
        if self.asked_bytes is None or self.free_bytes is None:
            return False
        return self.free_bytes >= self.asked_bytes + SEGMENT_BYTES

    @property
    def other_bytes(self) -> int | None:
        """Device memory that other processes use; `None` if unknown."""
        if self.process_bytes is not None and self.total_bytes is not None and self.free_bytes is not None:
            rest = self.total_bytes - self.free_bytes - self.process_bytes
            return rest if rest >= ROUNDING_BYTES else 0
        return sum(size for _, size in self.others) if self.others and self.process_bytes is not None else None


ANSI = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
"""A terminal's colours, which logs hold."""

WORDINGS: dict[str, Any] = json.loads(resources.files("kvdiag.oom").joinpath("wordings.json").read_bytes())
_ENGINES = tuple(engine_data("failures.json").values())


def wordings(table: str) -> list[Any]:
    """The rows of a table, those of single engines before the general ones."""
    return [*(row for engine in _ENGINES for row in engine.get(table, ())), *WORDINGS.get(table, ())]


ANCHORS, CUT = (
    tuple((kind, re.compile(pattern.replace(" ", r"\s+"))) for kind, pattern in wordings(table))
    for table in ("anchors", "cut")
)
"""Where a message of each kind begins. Hints that engines print beforehand ("If out-of-memory error occurs …") and
what they print of their memory when all is well match none of them. A blank stands for any whitespace. `CUT` is what
stands above a message whose own lines are missing, because the log ends before them.
"""


def parse_shortage(kind: Kind, text: str, lead: str = "") -> Shortage:
    """The figures of one message that begins as an anchor of `kind` does, and of the lines that led up to it."""
    text = text[:MAX_MESSAGE_CHARACTERS]
    message = " ".join(text.split())[:400]
    text = f"{lead}\n{text}" if lead else text
    # A message may be wrapped between words, or in the middle of one, which only shows without any blanks.
    spaced, squeezed = " ".join(text.split()), "".join(text.split())
    known: dict[str, Any] = {}
    for name, form, pattern, without_blanks in _figures(kind) or _figures("allocation"):
        found = pattern.search(spaced) or without_blanks.search(squeezed)
        value = None if found is None else _value(form, found)
        if value is not None:
            known.setdefault(name, value)
    reserved = known.pop("reserved_bytes", None)
    if reserved is not None and reserved >= known.get("allocated_bytes", reserved):
        known.setdefault("unallocated_bytes", reserved - known.get("allocated_bytes", reserved))
    if not _figures(kind):
        known.update(_processes(spaced, squeezed, known))
    if kind == "kv_lost":
        known["counts"] = pool_counts(text)
    if kind == "component":
        parts = _CREATED.findall(text)[:MAX_PROCESSES]
        sizes = ((name, as_bytes(free, "GiB")) for name, free in parts)
        known["created"] = tuple((name.strip(), size) for name, size in sizes if size is not None)
    for of, pattern, unit in wordings("units"):
        if of == kind and re.search(pattern, spaced):
            known["part"] = unit
    known = _possible(known)
    if kind == "torch" and "allowed_bytes" in known and known.get("free_bytes", 0) >= known.get("asked_bytes", 2**63):
        kind = "limit"
    return Shortage(kind=kind, message=message, **known)


def _squeezed(pattern: str) -> re.Pattern[str]:
    """A pattern as it has to be where every blank is removed, and with it where one word ends."""
    return re.compile(re.sub(r" (?:\?|\{\d+,\d+\})?", "", pattern).replace(r"(?!\w)", "").replace(r"\b", ""))


def _figure(field: str, form: str, wording: str) -> tuple[str, str, re.Pattern[str], re.Pattern[str]]:
    pattern = wording.replace("<size>", SIZE).replace("<whole>", _WHOLE)
    return field, form, re.compile(pattern), _squeezed(pattern)


@cache
def _figures(kind: str) -> tuple[tuple[str, str, re.Pattern[str], re.Pattern[str]], ...]:
    """Field of `Shortage`, form and wordings of it, compiled with the first message of the kind; none of allocations.

    torch up to 1.3 prints what is cached next to what is allocated, vLLM V0 prints plain bytes in its profiling error.
    """
    tables = (WORDINGS["figures"], *(engine.get("figures", {}) for engine in _ENGINES))
    return tuple(_figure(*row) for table in tables for row in table.get(kind, ()))


_PROCESS = rf"\bProcess (\d{{1,10}}) has {SIZE} memory in use"
_PROCESSES, _PROCESSES_SQUEEZED = re.compile(_PROCESS), _squeezed(_PROCESS)
MAX_PROCESSES = 64
OUTSIDE_TORCH_BYTES = 2 * 2**30
"""Of a process, next to what torch reserves: CUDA context, libraries' workspaces, communication buffers."""
_CREATED = re.compile(r"(?m)^[\s>]{0,20}([A-Z][\w ,().-]{0,80}): (\d{1,7}\.\d{1,4}) / \d{1,7}\.\d{1,4}")


def _processes(spaced: str, squeezed: str, known: dict[str, Any]) -> dict[str, Any]:
    """Which of the listed processes is torch's own: in a container it is listed by the host's id, as if another."""
    listed = [
        (int(found[1]), size)
        for found in max(list(_PROCESSES.finditer(spaced)), list(_PROCESSES_SQUEEZED.finditer(squeezed)), key=len)[
            :MAX_PROCESSES
        ]
        if (size := as_bytes(found[2], found[3])) is not None
    ]
    if "process_bytes" in known or not listed:
        return {"others": tuple(listed)}
    held = known.get("allocated_bytes", 0) + known.get("unallocated_bytes", 0)
    # Its own is the one that can hold what torch says it does; of several the one that holds little else.
    own = [each for each in listed if each[1] >= held]
    if len(own) > 1 and "allocated_bytes" in known:
        own = [each for each in own if each[1] <= held + OUTSIDE_TORCH_BYTES]
    if len(own) != 1:
        return {"others": tuple(listed)}
    return {"process_bytes": own[0][1], "others": tuple(each for each in listed if each != own[0])}


def as_bytes(number: str, unit: str) -> int | None:
    """A printed size; `None` for one that no machine has."""
    size = float(number.replace(",", "")) * _UNITS[unit.lower().replace("ib", "b")]
    return int(size) if size <= MAX_BYTES else None


def _value(form: str, found: re.Match[str]) -> int | float | str | None:
    if form == "word":
        return found[1] if found.lastindex == 1 else f"{found[2]} (pid {found[1]})"
    if form == "size":
        return as_bytes(found[1], found[2])
    if form == "gib":
        return as_bytes(found[1], "GiB")
    if form == "gb":
        return max(round(float(found[1]) * 1e9), 0)
    if form == "ratio":
        ratio = float(found[1])
        return ratio if 0 < ratio <= 1 else None
    count = int(found[1].replace(",", ""))
    if form == "quantity":  # of Kubernetes: 64Gi, 64G, 68719476736
        power = " kMGTP".index((found[2] or " ")[0].replace("K", "k"))
        size = count * (1024 if "i" in (found[2] or "") else 1000) ** power
        return size if size <= MAX_BYTES else None
    return as_bytes(str(count), "KiB" if form == "kib" else "B")


def _possible(known: dict[str, Any]) -> dict[str, Any]:
    """The figures without those that contradict one another: more free, or held, than there is."""
    total = known.get("total_bytes")
    if total is None:
        return known
    within = {"free_bytes", "allocated_bytes", "process_bytes"}
    return {name: value for name, value in known.items() if name not in within or value <= total}
