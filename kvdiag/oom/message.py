"""Parses one out-of-memory message: of torch, the driver, a library, or an engine's refusal.

Pure, and bounded: a message is at most `MAX_MESSAGE_CHARACTERS`, every pattern has a fixed longest match, and figures
that a message lacks are `None`. Wordings: c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp of torch
1.0 to 2.13, vLLM 0.6 to 0.32 (worker/worker.py, v1/worker/utils.py, gpu_worker.py, v1/core/kv_cache_utils.py). The
advice at the end of torch's message is printed whether or not it fits (pytorch#173049) and is never read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from kvdiag.model import MAX_BYTES

Kind = Literal[
    "torch",  # torch's allocator could not serve an allocation
    "limit",  # the process's own limit, set below the device, stood against it
    "async",  # the same from the cudaMallocAsync allocator, which has no blocks
    "absurd",  # a size that no device has: a bug of the caller
    "driver",  # the driver itself, past torch's allocator
    "library",  # cuBLAS, cuDNN, NCCL or another library's own allocation
    "workspace",  # a library's fixed workspace, which is too small for what was asked of it
    "masked",  # an out-of-memory whose figures NVML refused: MIG, Jetson
    "capture",  # a CUDA graph could not be captured; whether for want of memory is not told
    "warmup",  # vLLM: the dummy requests of the sampler did not fit
    "budget",  # vLLM: less free at start than the memory fraction claims
    "blocks",  # vLLM: nothing is left for the KV pool
    "context",  # vLLM: the pool is smaller than one request of the longest context
    "profiling",  # vLLM: free memory grew while it was measured
    "host",  # the host's memory, not a device's
]

MAX_MESSAGE_CHARACTERS = 3000
SEGMENT_BYTES = 2 * 2**20
"""torch asks the driver for multiples of this (c10/core/AllocatorConfig.h)."""

SIZE = r"(\d{1,3}(?:,\d{3}){1,6}(?:\.\d{1,6})?|\d{1,20}(?:\.\d{1,6})?)\s{0,2}(bytes|[KMGTPE]i?B|B)(?!\w)"
# vLLM's V0 and Apple's allocator write GB for what they have divided by 2**30.
_UNITS = {"b": 1, "bytes": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40, "pb": 2**50, "eb": 2**60}
_WHOLE = r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,15})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What one message says. `allocated_bytes` and `unallocated_bytes` are torch's two parts of its reserved bytes.

    `private_bytes` is free in pools of their own (CUDA graphs), which torch's message counts as allocated. `others`
    are processes that torch's message lists, without its own. The last group is told by refusals of an engine alone:
    what the pool would have needed and got, the context that was asked for and the one that fits.
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

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that torch had reserved; `None` if the message lacks one of their parts."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def short_bytes(self) -> int | None:
        """Bytes that the driver was short of; at least one segment, since the driver lacked the rest of it.

        `None` where it is not told, or where more was free: then something else stood against it.
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
            return max(self.total_bytes - self.free_bytes - self.process_bytes, 0)
        return sum(size for _, size in self.others) if self.others and self.process_bytes is not None else None


_WORDINGS: tuple[tuple[Kind, str], ...] = (
    ("absurd", r"Tried\s+to\s+allocate\s+more\s+than\s+1\s?EB"),
    ("torch", r"out\s+of\s+memory(?:[.:,!]|\s+\([^()]{0,200}\)\.)?\s+[Tt]ried\s+to\s+allocate(?!\s+more)"),
    (
        "torch",
        r"\b(?:CUDA|cuda|Cuda|HIP|XPU|NPU|MUSA|MPS\s+backend)\s+out\s+of\s+memory(?!\s+occurred|[.:,!]?\s+[TtA]\w)",
    ),
    ("torch", r"(?<!ray\.exceptions\.)OutOfMemoryError\s{0,2}[:(]"),
    ("torch", r"Out\s+of\s+memory\s+(?:while\s+trying\s+to\s+allocate|allocating)\s+\d"),
    ("limit", r"Allocation\s+was\s+preemptively\s+rejected|Preemptively\s+rejecting\s+allocation"),
    ("async", r"Allocation\s+on\s+device\s+\d{1,4}\s+would\s+exceed\s+allowed\s+memory"),
    ("driver", r"(?:CUDA|HIP)\s+(?:driver\s+|runtime\s+)?error(?:\s+in\s[^\n]{0,120})?:?\s+out\s+of\s+memory"),
    ("driver", r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"),
    ("driver", r"cuda\s+runtime\s+error\s+\(2\)\s{0,2}:\s+out\s+of\s+memory"),
    ("driver", r"(?:cudaMalloc|hipMalloc)\w{0,12}\s+failed:\s+out\s+of\s+memory"),
    ("library", r"(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED"),
    ("library", r"C(?:uda|UDA)\s+failure(?:\s+\d{1,5})?\s+'out\s+of\s+memory'"),
    ("library", r"Failed\s+to\s+(?:CUDA|Cuda|cuda)\s+(?:calloc|malloc|host\s+alloc)"),
    ("workspace", r"Failed\s+to\s+allocate\s+memory\s+for\s+\w{1,80}\s+with\s+size\s+\d"),
    (
        "masked",
        r"NVML_SUCCESS\s{0,2}==\s{0,2}(?:\w{1,12}|DriverAPI::get\(\)->\w{1,60}\([^()\n]{0,80}\))\s+INTERNAL\s+ASSERT",
    ),
    ("capture", r"Capture\s+cuda\s+graph\s+failed"),
    ("capture", r"cudaErrorStreamCapture\w{1,40}|operation\s+not\s+permitted\s+when\s+stream\s+is\s+capturing"),
    ("capture", r"operation\s+failed\s+due\s+to\s+a\s+previous\s+error\s+during\s+capture"),
    ("warmup", r"out\s+of\s+memory\s+occurred\s+when\s+warming\s+up\s[^\n]{0,60}?with\s+\d{1,9}\s+dummy"),
    ("budget", r"Free\s+memory\s+on\s+device\s[^()\n]{0,40}\([^()\n]{1,60}\)\s+on\s+startup\s+is\s+less\s+than"),
    ("blocks", r"No\s+available\s+memory\s+for\s+the\s+cache\s+blocks"),
    ("context", r"[Tt]o\s+serve\s+at\s+least\s+one\s+request\s+with"),
    ("context", r"max\s+seq\s+len\s+\(\d{1,12}\)\s+is\s+larger\s+than\s+the\s+maximum\s+number\s+of\s+tokens"),
    ("context", r"Input\s+prompt\s+\(\d{1,12}\s+tokens\)\s+is\s+too\s+long\s+and\s+exceeds\s+the\s+capacity"),
    ("profiling", r"Error\s+in\s+memory\s+profiling\."),
    ("host", r"Out\s+of\s+memory:\s+Kill(?:ed)?\s+process|Memory\s+cgroup\s+out\s+of\s+memory|oom-kill:constraint"),
    ("host", r"OOMKilled|OOM[ -]?killed|(?m:^\s{0,8}(?:\[\d{1,4}\]\W{1,4}\d{1,8}\s{1,4})?Killed\s{0,4}$)"),
    ("host", r"(?:exit(?:ed|\s+with)?(?:\s+with)?\s+(?:code|status)|exit\s?code|exitCode\"?)\s{0,2}[:=]?\s{0,2}137\b"),
    ("host", r"DefaultCPUAllocator:[^\n]{0,60}allocate\s+memory|Cannot\s+allocate\s+memory|\bMemoryError\b"),
    ("host", r"Unable\s+to\s+allocate\s+\d[^\n]{0,20}\s+for\s+an\s+array"),
    # Ray's own watch over the node's memory.
    ("host", r"killed\s+due\s+to\s+(?:the\s+node\s+running\s+low\s+on\s+memory|memory\s+pressure\s+\(OOM\))"),
)

ANCHORS = tuple((kind, re.compile(pattern)) for kind, pattern in _WORDINGS)
"""Where a message of each kind begins. Hints that engines print beforehand ("If out-of-memory error occurs …") and
what they print of their memory when all is well match none of them."""


def parse_shortage(kind: Kind, text: str) -> Shortage:
    """The figures of one message that begins as an anchor of `kind` does; a little before it may stand in `text`."""
    text = text[:MAX_MESSAGE_CHARACTERS]
    # A message may be wrapped between words, or in the middle of one, which only shows without any blanks.
    spaced, squeezed = " ".join(text.split()), "".join(text.split())
    told: dict[str, Any] = {}
    for name, form, pattern, without_blanks in _FIGURES.get(kind, _ALLOCATION):
        found = pattern.search(spaced) or without_blanks.search(squeezed)
        value = None if found is None else _value(form, found)
        if value is not None:
            told.setdefault(name, value)
    reserved = told.pop("reserved_bytes", None)
    if reserved is not None and reserved >= told.get("allocated_bytes", reserved):
        told.setdefault("unallocated_bytes", reserved - told.get("allocated_bytes", reserved))
    if kind not in _FIGURES:
        told.update(_processes(spaced, squeezed, told))
    told = _possible(told)
    if kind == "torch" and "allowed_bytes" in told and told.get("free_bytes", 0) >= told.get("asked_bytes", 2**63):
        kind = "limit"
    return Shortage(kind=kind, message=spaced[:400], **told)


def _squeezed(pattern: str) -> re.Pattern[str]:
    """A pattern as it has to be where every blank has gone, and with it where one word ends."""
    return re.compile(re.sub(r" (?:\?|\{\d+,\d+\})?", "", pattern).replace(r"(?!\w)", "").replace(r"\b", ""))


def _figures(*table: tuple[str, str, str]) -> tuple[tuple[str, str, re.Pattern[str], re.Pattern[str]], ...]:
    return tuple((name, form, re.compile(pattern), _squeezed(pattern)) for name, form, pattern in table)


_ALLOCATION = _figures(
    ("asked_bytes", "size", rf"[Tt]ried to allocate {SIZE}"),
    ("asked_bytes", "size", rf"[Rr]equested(?: size)? {{0,8}}:? {{0,2}}{SIZE}"),
    ("asked_bytes", "size", rf"(?:trying to allocate|allocating) {SIZE}"),
    ("asked_bytes", "size", rf"(?:calloc|malloc|alloc)(?: async)? {SIZE}"),
    ("asked_bytes", "count", rf"with size {_WHOLE} and alignment"),
    ("device", "count", r"\b(?:GPU|NPU|XPU|[Dd]evice|cuda:) ?(\d{1,4})\b"),
    ("total_bytes", "size", rf"total capaci?ty of {SIZE}"),
    ("total_bytes", "size", rf"{SIZE} total capacity"),
    ("total_bytes", "size", rf"Device limit {{0,8}}: {{0,2}}{SIZE}"),
    ("free_bytes", "size", rf"of which {SIZE} is free"),
    ("free_bytes", "size", rf"{SIZE} free(?:;|\)|,| )"),
    ("free_bytes", "size", rf"Free \(according to CUDA\) {{0,8}}: {{0,2}}{SIZE}"),
    ("allowed_bytes", "size", rf"{SIZE} allowed\b"),
    ("allowed_bytes", "size", rf"PyTorch limit \([^()]{{1,60}}\) {{0,8}}: {{0,2}}{SIZE}"),
    ("allowed_bytes", "size", rf"max allowed: {SIZE}"),
    ("allocated_bytes", "size", rf"{SIZE} is allocated by PyTorch"),
    ("allocated_bytes", "size", rf"{SIZE} already allocated"),
    ("allocated_bytes", "size", rf"Currently allocated {{0,8}}: {{0,2}}{SIZE}"),
    ("allocated_bytes", "size", rf"MPS allocated: {SIZE}"),
    ("private_bytes", "size", rf"{SIZE} allocated in private pools"),
    ("unallocated_bytes", "size", rf"{SIZE} is reserved by PyTorch but unallocated"),
    ("reserved_bytes", "size", rf"{SIZE} reserved in total by PyTorch"),
    # Up to torch 1.3, where what is cached comes beside what is allocated.
    ("unallocated_bytes", "size", rf"{SIZE} cached\b"),
    ("process_bytes", "size", rf"this process has {SIZE} memory in use"),
)

_FIGURES = {
    "warmup": _figures(("requests", "count", rf"with {_WHOLE} dummy")),
    "budget": _figures(
        ("device", "count", r"on device (?:\w{1,12}:)?(\d{1,4})\b"),
        ("free_bytes", "gib", r"\((\d{1,7}(?:\.\d{1,6})?)/\d"),
        ("total_bytes", "gib", r"/(\d{1,7}(?:\.\d{1,6})?) ?Gi?B\) on startup"),
        ("fraction_ratio", "ratio", r"\((0?\.\d{1,20}|[01](?:\.\d{1,20})?), \d"),
        ("needed_bytes", "gib", r"\([01]?(?:\.\d{1,20})?, (\d{1,7}(?:\.\d{1,6})?) ?Gi?B"),
    ),
    "blocks": (),
    "context": _figures(
        ("asked_tokens", "count", rf"max(?:imum)? (?:seq|sequence|model) len(?:gth)? \({_WHOLE}\)"),
        ("asked_tokens", "count", rf"Input prompt \({_WHOLE} tokens\)"),
        ("needed_bytes", "size", rf"{SIZE} KV cache is needed"),
        ("available_bytes", "size", rf"available KV cache memory \({SIZE}"),
        ("fitting_tokens", "count", rf"estimated maximum model length is {_WHOLE}"),
        ("fitting_tokens", "count", rf"stored in KV cache \({_WHOLE}\)"),
    ),
    "profiling": _figures(
        ("before_bytes", "size", rf"Initial free memory {SIZE}"),
        ("free_bytes", "size", rf"current free memory {SIZE}"),
        # V0 prints plain bytes.
        ("before_bytes", "count", rf"Initial free memory {_WHOLE}(?![.,]?\d)"),
        ("free_bytes", "count", rf"current free memory {_WHOLE}(?![.,]?\d)"),
    ),
    "host": _figures(
        ("process_bytes", "kib", rf"anon-rss:{_WHOLE}kB"),
        ("asked_bytes", "size", rf"tried to allocate {SIZE}"),
        ("asked_bytes", "size", rf"Unable to allocate {SIZE}"),
    ),
}
"""Field of `Shortage` to the forms and wordings of it, by kind; the other kinds are allocations."""

_PROCESS = rf"\bProcess (\d{{1,10}}) has {SIZE} memory in use"
_PROCESSES, _PROCESSES_SQUEEZED = re.compile(_PROCESS), _squeezed(_PROCESS)
MAX_PROCESSES = 64


def _processes(spaced: str, squeezed: str, told: dict[str, Any]) -> dict[str, Any]:
    """Which of the listed processes is torch's own: in a container it is listed by the host's id, as if another."""
    listed = [
        (int(found[1]), size)
        for found in max(list(_PROCESSES.finditer(spaced)), list(_PROCESSES_SQUEEZED.finditer(squeezed)), key=len)[
            :MAX_PROCESSES
        ]
        if (size := as_bytes(found[2], found[3])) is not None
    ]
    if "process_bytes" in told or not listed:
        return {"others": tuple(listed)}
    held = told.get("allocated_bytes", 0) + told.get("unallocated_bytes", 0)
    # Its own is the one that can hold what torch says it does; two such leave it open.
    own = [each for each in listed if each[1] >= held]
    if len(own) != 1:
        return {"others": tuple(listed)}
    return {"process_bytes": own[0][1], "others": tuple(each for each in listed if each != own[0])}


def as_bytes(number: str, unit: str) -> int | None:
    """A printed size; `None` for one that no machine has."""
    size = float(number.replace(",", "")) * _UNITS[unit.lower().replace("ib", "b")]
    return int(size) if size <= MAX_BYTES else None


def _value(form: str, found: re.Match[str]) -> int | float | None:
    if form == "size":
        return as_bytes(found[1], found[2])
    if form == "gib":
        return as_bytes(found[1], "GiB")
    if form == "ratio":
        ratio = float(found[1])
        return ratio if 0 < ratio <= 1 else None
    count = int(found[1].replace(",", ""))
    return as_bytes(str(count), "KiB" if form == "kib" else "B")


def _possible(told: dict[str, Any]) -> dict[str, Any]:
    """The figures without those that contradict one another: more free, or held, than there is."""
    total = told.get("total_bytes")
    if total is None:
        return told
    within = {"free_bytes", "allocated_bytes", "process_bytes"}
    return {name: value for name, value in told.items() if name not in within or value <= total}
