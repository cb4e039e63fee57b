"""What a scenario is: something done to a real process on a real GPU, and what kvdiag has to say of it."""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvdiag.diagnosis import diagnose
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import read_trace
from kvdiag.model import Allocator, Diagnosis, Sample, Timeline
from tests.integration.gpu.figures import Figure, Result, at_most, one_of
from tests.integration.gpu.stage import Stage, StageError, stage

MIB = 2**20
LEDGER_BYTES = 256 * MIB
LEDGER_RATIO = 0.01
"""The ledger may leave this much of a device unexplained, or 256 MiB where that is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where one scenario is played: the Python with torch, a folder for its work, the trace it leaves.

    `brief` plays the costs so shortly that they say nothing: for trying the program out.
    """

    python: str
    work: Path
    trace: Path
    brief: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded timeline and its diagnosis."""

    timeline: Timeline
    diagnosis: Diagnosis

    @property
    def allocator(self) -> Allocator:
        """Torch's memory in the last sample that has it.

        Raises:
            StageError: the agent reported nothing.

        """
        for sample in reversed(self.timeline.samples):
            if sample.allocators:
                return sample.allocators[0]
        raise StageError("the trace has nothing from the agent")

    @property
    def statuses(self) -> dict[str, str]:
        """Status by verdict."""
        return {finding.id: finding.status for finding in self.diagnosis.findings}

    @property
    def last(self) -> Sample:
        """The last sample with devices.

        Raises:
            StageError: there is none.

        """
        for sample in reversed(self.timeline.samples):
            if sample.devices:
                return sample
        raise StageError("the trace has no device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is done (`play`), and what has to come of it: verdicts, and figures of the trace or of `play` itself.

    `expected` has for each verdict the statuses that are right. `torch_settings` are torch's allocator's;
    `neighbour_ratio` is the share of the GPU that another process holds from before.
    """

    name: str
    about: str
    play: Callable[[Stage], Awaitable[tuple[Figure, ...]]]
    expected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    measure: Callable[[Recorded], tuple[Figure, ...]] = lambda _: ()
    torch_settings: str = ""
    neighbour_ratio: float = 0.0

    async def run(self, run: Run) -> tuple[Figure, ...]:
        """Play it, and judge the trace.

        Raises:
            StageError: it could not be played.

        """
        # The first name is older; torch reads both.
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        env = dict.fromkeys(names, self.torch_settings) if self.torch_settings else {}
        async with stage(run.python, run.work, run.trace, env, neighbour_ratio=self.neighbour_ratio) as set_up:
            played = await self.play(set_up)
        return (*played, *self.judge(run.trace))

    def judge(self, trace: Path) -> tuple[Figure, ...]:
        """The verdicts and figures of a recorded trace: now, or whenever it is replayed.

        Raises:
            StageError: the trace lacks what is judged.

        """
        recorded = judged(trace)
        return (*verdicts(recorded.diagnosis, self.expected), *self.measure(recorded))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A scenario without a verdict: figures that need no trace."""

    name: str
    about: str
    measure: Callable[[Run], Awaitable[tuple[Figure, ...]]]

    async def run(self, run: Run) -> tuple[Figure, ...]:
        """Take the figures."""
        return await self.measure(run)


async def result(scenario: Scenario | Measurement, run: Run) -> Result:
    """A scenario's figures, or the reason why it failed."""
    try:
        figures = await scenario.run(run)
    except* (StageError, KvdiagError, OSError) as group:
        reason = "; ".join(_reasons(group))
    else:
        return Result(scenario=scenario.name, about=scenario.about, figures=figures)
    with contextlib.suppress(OSError):
        # What was not played to its end proves nothing.
        run.trace.unlink()
    return Result(scenario=scenario.name, about=scenario.about, failed=reason)


def _reasons(group: BaseExceptionGroup) -> list[str]:
    return [
        reason
        for one in group.exceptions
        for reason in (_reasons(one) if isinstance(one, BaseExceptionGroup) else [str(one)])
    ]


def judged(trace: Path) -> Recorded:
    """A trace as `kvdiag diagnose` judges it."""
    timeline, facts = read_trace(trace)
    return Recorded(timeline=timeline, diagnosis=diagnose(timeline, facts))


def verdicts(diagnosis: Diagnosis, expected: Mapping[str, tuple[str, ...]]) -> tuple[Figure, ...]:
    """Each verdict that a scenario is about, against what is right."""
    found = {finding.id: finding for finding in diagnosis.findings}
    return tuple(
        one_of(name, found[name].status if name in found else "not judged", right) for name, right in expected.items()
    )


def ledger_figures(recorded: Recorded) -> tuple[Figure, ...]:
    """What the ledger of the server's GPU leaves unexplained, and its lines."""
    uuids = {line.uuid for line in recorded.diagnosis.ledger if line.component == "weights"}
    lines = [line for line in recorded.diagnosis.ledger if line.uuid in uuids]
    if not lines:
        raise StageError("the ledger does not show which GPU is the server's")
    used_bytes = sum(line.bytes for line in lines)
    sizes = {component: sum(line.bytes for line in lines if line.component == component) for component in _REST}
    limit = max(LEDGER_RATIO * used_bytes, LEDGER_BYTES)
    told = [Figure(name=line.component, value=line.bytes, unit="bytes") for line in lines]
    rest = sum(abs(size) for size in sizes.values())
    return (at_most("unexplained", rest, limit, "bytes"), Figure(name="used", value=used_bytes, unit="bytes"), *told)


_REST = ("unaccounted", "server_other")
