"""What a profile of a process's allocations measured: its memory at two moments, and the growth of each stack."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvdiag.model.validation import MAX_COUNT, Checked

MIN_PROFILE_SECONDS, MAX_PROFILE_SECONDS = 2.0, 600.0
"""How long a profile may be asked to trace."""

ProfileKind = Literal["host", "device"]
ProfileAnswer = Literal["named", "partly", "native", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame(Checked):
    """One line of code; `function` where it was recorded."""

    file: str
    line: int
    function: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGrowth(Checked):
    """By how much the live memory of one stack, innermost frame first, changed; negative where it shrank."""

    frames: tuple[Frame, ...]
    bytes: int
    blocks: int

    SIGNED: ClassVar[frozenset[str]] = frozenset(("bytes", "blocks"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSnapshot(Checked):
    """The process at one moment.

    `traced_bytes` are live and allocated since tracing began, without the agent's `own_bytes`; `tracing_bytes` are
    what the traces take, and `held_seconds` how long no other Python code of the process could run. `anonymous_bytes`
    are of the whole process, on the host; `allocated_bytes` what torch holds on its GPUs.
    """

    at_monotonic_seconds: float
    held_seconds: float
    tracing_bytes: int
    traced_bytes: int
    traced_blocks: int
    own_bytes: int
    anonymous_bytes: int | None = None
    allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledLoad(Checked):
    """Requests that the server finished between the two snapshots, and per second before, during and after tracing."""

    requests: float | None = None
    before_per_second: float | None = None
    during_per_second: float | None = None
    after_per_second: float | None = None

    MOST: ClassVar[Mapping[str, int]] = {
        "requests": MAX_COUNT,
        "before_per_second": MAX_COUNT,
        "during_per_second": MAX_COUNT,
        "after_per_second": MAX_COUNT,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile(Checked):
    """The growth between two snapshots of a process that served requests meanwhile.

    `first` is `None` where the traces reached their limit (`tracing_full`) before it: growth is then since the start,
    and what was only warming up is part of it. The stacks that grew most come first; `other_bytes` is the growth of
    `other_stacks` more.
    """

    kind: ProfileKind
    pid: int
    title: str
    began_monotonic_seconds: float
    ended_monotonic_seconds: float
    tracing_full: bool
    first: ProfileSnapshot | None = None
    last: ProfileSnapshot
    stacks: tuple[StackGrowth, ...]
    other_stacks: int = 0
    other_bytes: int = 0
    load: ProfiledLoad = ProfiledLoad()

    SIGNED: ClassVar[frozenset[str]] = frozenset(("other_bytes",))

    def _problem(self) -> str | None:
        moments = (
            self.began_monotonic_seconds,
            *(one.at_monotonic_seconds for one in (self.first, self.last) if one is not None),
            self.ended_monotonic_seconds,
        )
        if list(moments) != sorted(moments):
            return "its times are not in order"
        if self.first is None and not self.tracing_full:
            return "the first snapshot is missing, although the traces did not reach their limit"
        if self.other_bytes and not self.other_stacks:
            return f"other_bytes is {self.other_bytes} without other stacks"
        listed = sum(one.bytes for one in self.stacks) + self.other_bytes
        if listed != self.traced_growth_bytes:
            return f"its stacks grew by {listed} bytes, what was traced by {self.traced_growth_bytes}"
        return None

    @property
    def seconds(self) -> float:
        """The time over which growth was measured."""
        begin = self.began_monotonic_seconds if self.first is None else self.first.at_monotonic_seconds
        return max(self.last.at_monotonic_seconds - begin, 0.0)

    @property
    def traced_growth_bytes(self) -> int:
        """By how much the traced live memory grew."""
        return self.last.traced_bytes - (0 if self.first is None else self.first.traced_bytes)

    @property
    def process_growth_bytes(self) -> int | None:
        """By how much the memory of the process grew, without the traces' own; `None` where it was not read twice."""
        first, last = self.first, self.last
        if first is None:
            return None
        if self.kind == "device":
            return _difference(last.allocated_bytes, first.allocated_bytes)
        grown = _difference(last.anonymous_bytes, first.anonymous_bytes)
        return None if grown is None else grown - (last.tracing_bytes - first.tracing_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcludedProfile:
    """A profile and its answer: the growth of the process, that of its traced memory, and the share that explains.

    named: stacks explain it. partly: the rest is native. native: none does. flat: too little grew.
    """

    profile: MemoryProfile
    answer: ProfileAnswer
    process_growth_bytes: int | None
    traced_growth_bytes: int
    explained_ratio: float | None

    def per_request(self, size: int) -> float | None:
        """Bytes for each request that ended meanwhile; `None` where none did, or none were counted."""
        requests = self.profile.load.requests
        return size / requests if requests else None


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
