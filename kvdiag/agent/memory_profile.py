"""Which lines of code hold the memory that this process gains: traced on request, for a bounded time and amount.

A request is a small file with this process's name in the agents' folder. Tracing begins, warms up for a quarter of its
time, and the live bytes of each stack are then read twice: what grew in between, while requests came and went, is what
they leave behind. Caches fill and buffers come and go before the first snapshot, and cancel out after it.

Host: `tracemalloc`, the innermost `DEPTH` frames. Device: torch's memory history, which keeps the Python stack of each
live block. A snapshot of the traces holds the interpreter; its length grows with their number, so tracing ends early at
`max_tracing_bytes`, and the result says how long each snapshot took. Traces are summed in slices, between which the
server's threads run. Nothing is traced before a request or after its end, also in a child that is forked meanwhile.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import allocator, process
from .document import short
from .fragmentation import LIVE
from .publication import Folder

FORMAT = 1
DEPTH = 8
MAX_STACKS = 48
"""Of one result: those that grew most; the others are added up."""

MAX_REQUEST_BYTES = 1024
MIN_SECONDS, MAX_SECONDS = 0.1, 600.0
MAX_TRACING_BYTES = 256 * 2**20
WARMUP_RATIO = 0.25
WATCH_SECONDS = 0.2
ENDING_SECONDS = 2.0
SLICE = 500
"""Traces summed at once: about half a millisecond of the interpreter."""

PAUSE_SECONDS = 0.0005
MAX_TEXT = 160
WRITE_ATTEMPTS = 5
KINDS = ("host", "device")
OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120 - pathlib costs every Python its import

Stack = Any
"""A tuple of (file, line) or (file, line, function), innermost first."""

Sums = Any
"""A dict of a stack to its bytes and blocks."""


class RefusedError(Exception):
    """A request that is not carried out; the message says why."""


class WithdrawnError(Exception):
    """The request that is being carried out was removed or replaced."""


class Profiler:
    """Carries out the requests for one process, one at a time, each in a thread of its own."""

    def __init__(self, folder: Folder, name: str) -> None:
        """Read nothing yet; `name` identifies this process's files."""
        self._folder = folder
        self._name = name
        self._asked_at = folder.asked_at(self._request)
        self._tracer: Host | Device | None = None

    @property
    def _request(self) -> str:
        return f"profile-request-{self._name}.json"

    def poll(self) -> None:
        """Begin what was asked since the last call. Never waits."""
        asked_at = self._folder.asked_at(self._request)
        if asked_at is None or asked_at == self._asked_at:
            return
        self._asked_at = asked_at
        threading.Thread(target=self._run, name="kvdiag-profile", daemon=True).start()

    def abandon(self) -> None:
        """Stop tracing in a child, which has this process's traces and none of its threads."""
        # Torch's history takes a lock of its allocator, which a thread of the parent may have held.
        if isinstance(self._tracer, Host):
            self._tracer.stop()

    def _run(self) -> None:
        asked_at = self._asked_at
        with contextlib.suppress(BaseException):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            asked = request(self._folder.content(self._request, MAX_REQUEST_BYTES))
            result = {"kvdiag_profile": FORMAT, **asked, "process": {**process.identity(), "title": process.title()}}
            # A folder that cannot be written is noticed before anything is traced.
            self._folder.put(f"profile-{self._name}.json", {**result, "state": "tracing"})
            try:
                result.update(self._profiled(asked, asked_at), state="done")
            except WithdrawnError:
                # The answer may be that of another request by now.
                return
            except Exception as error:  # noqa: BLE001 - the reader is informed, the server is not
                result.update(state="refused", reason=str(error) if isinstance(error, RefusedError) else short(error))
            for _ in range(WRITE_ATTEMPTS):
                with contextlib.suppress(OSError):
                    self._folder.put(f"profile-{self._name}.json", result)
                    return
                time.sleep(1.0)

    def _profiled(self, asked: Mapping[str, Any], asked_at: int | None) -> dict[str, Any]:
        def refuse_withdrawn() -> None:
            if self._folder.asked_at(self._request) != asked_at:
                raise WithdrawnError

        until_seconds = time.monotonic() + ENDING_SECONDS
        while self._tracer is not None and time.monotonic() < until_seconds:
            # One that was withdrawn notices it within `WATCH_SECONDS`.
            time.sleep(WATCH_SECONDS)
        if self._tracer is not None:
            raise RefusedError("this process is being profiled already")
        tracer = Host() if asked["kind"] == "host" else Device()
        tracer.start()
        self._tracer = tracer
        try:
            snapshots = traced(tracer, asked["seconds"], asked["max_tracing_bytes"], refuse_withdrawn)
        finally:
            tracer.stop()
            self._tracer = None
        # Summed when nothing is traced any more: sums are allocations too.
        return compared(*snapshots)


def request(text: bytes) -> dict[str, Any]:
    """A request as it may be carried out.

    Raises:
        ValueError: it is none, or asks for too much.
    """
    asked = json.loads(text)
    if not isinstance(asked, dict) or asked.get("kvdiag_profile_request") != FORMAT:
        raise ValueError("not a request that this agent understands")
    identifier, kind = asked.get("id"), asked.get("kind")
    seconds: Any = asked.get("seconds")
    most: Any = asked.get("max_tracing_bytes")
    if kind not in KINDS or not isinstance(identifier, str) or not identifier[:65].isalnum():
        raise ValueError("not a request that this agent understands")
    if type(seconds) not in (int, float) or not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError("seconds out of range")
    if type(most) is not int or not 0 < most <= MAX_TRACING_BYTES:
        raise ValueError("max_tracing_bytes out of range")
    return {"id": identifier[:64], "kind": kind, "seconds": float(seconds), "max_tracing_bytes": most}


def traced(
    tracer: Any, seconds: float, max_tracing_bytes: int, check: Callable[[], None]
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
    """Trace until the time is over, or the traces take too much: what it did, and the two snapshots.

    The first snapshot is `None` where the traces took too much before it.

    Raises:
        Exception: any of the tracer's, or of `check`, which is asked meanwhile; it still traces.
    """

    def wait(until_seconds: float) -> bool:
        """Wait; returns at once, and true, where the traces take too much."""
        while time.monotonic() < until_seconds:
            if tracer.tracing_bytes() > max_tracing_bytes:
                return True
            check()
            time.sleep(min(WATCH_SECONDS, max(until_seconds - time.monotonic(), 0.0)))
        return False

    began_seconds = time.monotonic()
    full = wait(began_seconds + seconds * WARMUP_RATIO)
    first = None if full else _snapshot(tracer, first=True)
    if first is not None:
        full = wait(began_seconds + seconds)
    last = _snapshot(tracer)
    done = {"began_monotonic_seconds": began_seconds, "ended_monotonic_seconds": time.monotonic(), "tracing_full": full}
    return done, first, last


def compared(done: dict[str, Any], first: dict[str, Any] | None, last: dict[str, Any]) -> dict[str, Any]:
    """What grew between two snapshots, by stack, largest first; since the start where there is no first one."""
    before = {} if first is None else _summed(first)
    named = sorted(growth(before, _summed(last)).items(), key=lambda item: -item[1][0])
    listed, rest = named[:MAX_STACKS], named[MAX_STACKS:]
    return {
        **done,
        "first": first,
        "last": last,
        "stacks": [
            {"frames": [_named(*frame) for frame in stack], "bytes": size, "blocks": count}
            for stack, (size, count) in listed
        ],
        "other_stacks": len(rest),
        "other_bytes": sum(size for _, (size, _) in rest),
    }


def growth(first: Mapping[Stack, Any], last: Mapping[Stack, Any]) -> dict[Stack, tuple[int, int]]:
    """Bytes and blocks by which each stack's live memory changed; stacks without a change are left out."""
    changes = {}
    for stack in {**first, **last}:
        before, after = first.get(stack, (0, 0)), last.get(stack, (0, 0))
        if before[0] != after[0]:
            changes[stack] = (after[0] - before[0], after[1] - before[1])
    return changes


def _snapshot(tracer: Any, *, first: bool = False) -> dict[str, Any]:
    """The process's memory and every live trace, as it is: a list of (domain, bytes, stack, …)."""
    at_seconds = time.monotonic()
    host = {} if first else process.host_bytes()
    began_seconds = time.perf_counter()
    traces = tracer.traces()
    held_seconds = time.perf_counter() - began_seconds
    if first:
        # The list of traces stays until the end: it is no growth.
        host = process.host_bytes()
    return {
        "at_monotonic_seconds": at_seconds,
        "held_seconds": held_seconds,
        "tracing_bytes": tracer.tracing_bytes(),
        **host,
        **tracer.figures(),
        "traces": traces,
    }


def _summed(snapshot: dict[str, Any]) -> Sums:
    """Bytes and blocks of each stack of a snapshot, whose traces become totals; in slices, since the server works."""
    traces = snapshot.pop("traces")
    # A stack is one object in all of its traces: its frames are looked at once.
    by_id: dict[int, list[Any]] = {}
    for index, trace in enumerate(traces):
        if index % SLICE == SLICE - 1:
            time.sleep(PAUSE_SECONDS)
        sums = by_id.get(id(trace[2]))
        if sums is None:
            by_id[id(trace[2])] = [trace[2], trace[1], 1]
        else:
            sums[1] += trace[1]
            sums[2] += 1
    stacks: Sums = {}
    own_bytes = 0
    for stack, size, count in by_id.values():
        if any(frame[0].startswith(OWN) for frame in stack):
            own_bytes += size
        else:
            total = stacks.setdefault(_plain(stack), [0, 0])
            total[0] += size
            total[1] += count
    snapshot.update(
        traced_bytes=sum(size for size, _ in stacks.values()),
        traced_blocks=sum(count for _, count in stacks.values()),
        own_bytes=own_bytes,
    )
    return stacks


def _named(file: str, line: int, function: str | None = None) -> dict[str, Any]:
    # Torch has -1 where the code has no lines.
    return {"file": file, "line": max(line, 0), "function": function}


def _plain(stack: Stack) -> Stack:
    return tuple(
        (str(frame[0])[-MAX_TEXT:], frame[1], *(str(name)[:MAX_TEXT] for name in frame[2:])) for frame in stack[:DEPTH]
    )


class Host:
    """Python's allocations of this process by `tracemalloc`; ctypes, C++ and CUDA allocate elsewhere."""

    def start(self) -> None:
        """Trace from now on.

        Raises:
            RefusedError: the server traces already.
        """
        import tracemalloc  # noqa: PLC0415 - most processes never need it

        if tracemalloc.is_tracing():
            raise RefusedError("tracemalloc is in use by the server (PYTHONTRACEMALLOC, or another profiler)")
        self._module = tracemalloc
        tracemalloc.start(DEPTH)

    def stop(self) -> None:
        """Trace no longer, and free the traces."""
        self._module.stop()

    def tracing_bytes(self) -> int:
        """What the traces themselves take."""
        return self._module.get_tracemalloc_memory()

    def figures(self) -> dict[str, int]:
        """Nothing that the process's own figures lack."""
        return {}

    def traces(self) -> Sequence[Any]:
        """Each live allocation that was traced: (domain, bytes, stack, …), a stack's innermost frame first."""
        # Statistics and Snapshot of the module sum up everything at once, which would hold the interpreter for seconds.
        return list(getattr(self._module, "_get_traces")())  # noqa: B009 - a function without types


class Device:
    """Memory on GPUs by torch's memory history."""

    def start(self) -> None:
        """Record the stack of each allocation from now on, and no history of past ones.

        Raises:
            RefusedError: torch has not been initialised on a GPU, or records a history already.
        """
        cuda = allocator.cuda()
        if cuda is None:
            raise RefusedError("this process has initialised no GPU with torch")
        self._cuda = cuda
        self._record = cuda.memory._record_memory_history  # noqa: SLF001 - torch has no public name for it
        if sys.modules["torch._C"]._cuda_isHistoryEnabled():  # noqa: SLF001 - as above
            raise RefusedError("torch records a memory history already, which this would replace")
        if "context" not in inspect.signature(self._record).parameters:
            raise RefusedError("this version of torch (before 2.1) records no stacks of live blocks alone")
        self._record("all", context="alloc", stacks="python", max_entries=1)

    def stop(self) -> None:
        """Record no longer."""
        self._record(None)

    def tracing_bytes(self) -> int:
        """Not known: torch keeps the stacks of live blocks, which `allocator.MAX_BLOCKS` bounds."""
        return 0

    def figures(self) -> dict[str, int]:
        """Bytes that torch has allocated on all of this process's GPUs."""
        found = (allocator.statistics(self._cuda.memory_stats_as_nested_dict(index)) for index in self._devices())
        return {"allocated_bytes": sum(each.get("allocated_bytes", {}).get("current", 0) for each in found)}

    def traces(self) -> Sequence[Any]:
        """Each live block that was allocated since the start, as `Host.traces`."""
        for index in self._devices():
            statistics = allocator.statistics(self._cuda.memory_stats_as_nested_dict(index))
            # One snapshot has all devices of the process.
            segments, _ = allocator.snapshot(self._cuda, statistics, history=True)
            return [
                (0, block["size"], tuple((each["filename"], each["line"], each["name"]) for each in block["frames"]))
                for segment in segments
                for block in segment["blocks"]
                if block["state"] == LIVE and block.get("frames")
            ]
        return []

    def _devices(self) -> list[int]:
        count = min(self._cuda.device_count(), 64)
        return [index for index in range(count) if allocator.holds(self._cuda.memory_stats_as_nested_dict(index))]
