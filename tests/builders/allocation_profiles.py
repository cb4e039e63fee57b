"""Profiles of a process as the agent's answers hold them, and as values."""

from typing import Any

from kvdiag.model import Frame, MemoryProfile, ProfileKind, ProfileSnapshot, StackGrowth
from tests.builders.values import MIB


def snapshot(at_seconds: float, *, traced: int = 0, anonymous: int | None = 0, tracing: int = 0) -> ProfileSnapshot:
    """The process at one moment."""
    return ProfileSnapshot(
        at_monotonic_seconds=at_seconds,
        held_seconds=0.02,
        tracing_bytes=tracing,
        traced_bytes=traced,
        traced_blocks=1,
        own_bytes=0,
        anonymous_bytes=anonymous,
        allocated_bytes=anonymous,
    )


def profile(
    *,
    process: int | None,
    traced: int,
    tracing: int = 0,
    kind: ProfileKind = "host",
    stacks: tuple[StackGrowth, ...] = (),
    other_stacks: int = 0,
) -> MemoryProfile:
    """A profile of a minute, read at 115 s and 160 s, in which the process and its traced memory grew by so much."""
    before = None if process is None else 4096 * MIB
    after = None if process is None else 4096 * MIB + process
    rest = traced - sum(one.bytes for one in stacks)
    return MemoryProfile(
        kind=kind,
        pid=100,
        title="VLLM::EngineCore",
        began_monotonic_seconds=100.0,
        ended_monotonic_seconds=160.0,
        tracing_full=False,
        first=snapshot(115.0, traced=8 * MIB, anonymous=before, tracing=MIB),
        last=snapshot(160.0, traced=8 * MIB + traced, anonymous=after, tracing=MIB + tracing),
        stacks=stacks,
        other_stacks=other_stacks or int(rest != 0),
        other_bytes=rest,
    )


def stack(size: int, blocks: int, *lines: int) -> StackGrowth:
    """The growth of a stack of these lines, innermost first."""
    frames = (Frame(file=f"/opt/engine/file_{line}.py", line=line) for line in lines)
    return StackGrowth(frames=tuple(frames), bytes=size, blocks=blocks)


def answer(pid: int = 100, start_ticks: int = 7, **changes: Any) -> dict[str, Any]:
    """An agent's answer to the request `a1`, with other values for some of its fields."""
    moment = {
        "at_monotonic_seconds": 115.0,
        "held_seconds": 0.02,
        "tracing_bytes": 1000,
        "traced_bytes": 2000,
        "traced_blocks": 3,
        "own_bytes": 10,
        "resident_bytes": 5000,
        "anonymous_bytes": 4000,
    }
    return {
        "kvdiag_profile": 1,
        "id": "a1",
        "kind": "host",
        "seconds": 60.0,
        "max_tracing_bytes": 2**24,
        "process": {"pid": pid, "start_ticks": start_ticks, "title": "VLLM::EngineCore"},
        "state": "done",
        "began_monotonic_seconds": 100.0,
        "ended_monotonic_seconds": 160.0,
        "tracing_full": False,
        "first": moment,
        "last": {**moment, "at_monotonic_seconds": 160.0, "traced_bytes": 9000},
        "stacks": [{"frames": [{"file": "a.py", "line": 3, "function": None}], "bytes": 7000, "blocks": 2}],
        "other_stacks": 0,
        "other_bytes": 0,
        **changes,
    }
