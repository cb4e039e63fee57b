"""A subject with its agent, and kvdiag's own sampling of both: the setup of every scenario.

No engine serves here: its metrics are made from the stage's own commands to the subject. All else is real: NVML,
the agent's files, the sampler, the trace.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from kvdiag.commands.agent import SITE, files
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.engines.vllm import ENGINE
from kvdiag.feeds.live.sampling import Clock, Pace, Sampler, TimelineBuilder
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Facts, KvPool, Load, Mark, Outcome, Phase, Sample
from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from kvdiag.sources.http import HttpReader
from kvdiag.sources.nvml import NvmlSource
from kvdiag.sources.worker_thread import ThreadedReader

MIB = 2**20
WEIGHTS_BYTES = 1024 * MIB
POOL_BYTES = 2048 * MIB
BLOCK_BYTES = 2 * MIB
ANSWER_SECONDS = 180.0
SETTLE_SECONDS = 60.0
SPLIT_SECONDS = 90.0
"""The agent makes a split when it is asked, ten seconds after the last; more on a machine with much else to do."""

REQUEST_SECONDS = 0.2
PUBLISHING_SECONDS = 0.1
"""A file is a little younger than what stands in it."""

CYCLE = "single_request"
SUBJECT = Path(__file__).with_name("serving_process.py")


class StageError(Exception):
    """A scenario that could not be played; the message is one line."""


@dataclass
class Process:
    """A subject under command."""

    process: asyncio.subprocess.Process
    log: Path

    async def tell(self, command: str, **arguments: object) -> dict[str, Any]:
        """Give one command and wait for its answer.

        Raises:
            StageError: it failed, or the process has exited.

        """
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise StageError(f"{command}: the subject has no pipes")
        try:
            stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
            async with asyncio.timeout(ANSWER_SECONDS):
                line = await stdout.readline()
        except (OSError, TimeoutError) as error:
            raise StageError(f"{command}: {type(error).__name__}; {self._last_words()}") from error
        if not line:
            raise StageError(f"{command}: the subject has ended; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise StageError(f"{command}: {answer['failed']}")
        done: dict[str, Any] = answer["done"]
        return done

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return lines[-1][:300] if lines else "it said nothing"


@asynccontextmanager
async def subject(
    python: str, work: Path, name: str, *, published: Path | None, env: Mapping[str, str]
) -> AsyncIterator[Process]:
    """A subject's process, with the agent on its path; it publishes where there is a folder for it."""
    agent = work / "agent"
    for part, content in files().items():
        (agent / part).parent.mkdir(parents=True, exist_ok=True)
        (agent / part).write_bytes(content)
    # What was on the path stays: torch itself may have been put there.
    path = [str(agent / SITE), str(agent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    told = {} if published is None else {"KVDIAG_AGENT_DIR": str(published)}
    log = work / f"{name}.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            python,
            str(SUBJECT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **told, **env},
            limit=64 * MIB,
        )
    try:
        yield Process(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@dataclass
class Stage:
    """A subject that serves on one device, sampled."""

    server: Process
    device_uuid: str
    published: Path
    recorder: TimelineBuilder
    sampler: Sampler
    clock: Clock
    open_requests: int = 0
    _cycle: int = field(default=0, init=False)

    def mark(self, phase: Phase, outcome: Outcome | None = None) -> None:
        """Mark a moment of the cycle under way."""
        at_seconds = self.clock.now_seconds()
        self.recorder.add(Mark(at_seconds=at_seconds, step=CYCLE, cycle=self._cycle, phase=phase, outcome=outcome))

    async def cycle(self, *faults: tuple[str, dict[str, object]]) -> None:
        """One request from floor to floor; each fault is a command that goes wrong with it."""
        self.mark("begin")
        if self._cycle == 0:
            await self.settle()
        self.mark("offer")
        self.open_requests = 1
        await self.server.tell("request", seconds=REQUEST_SECONDS)
        errors = [(await self.server.tell(name, **told)).get("error") for name, told in faults]
        self.open_requests = 0
        failed = int(any(errors))
        outcome = Outcome(
            completed=1 - failed,
            failed=failed,
            prompt_tokens=16,
            generated_tokens=16,
            errors=tuple(error[:2000] for error in errors if error),
        )
        self.mark("release", outcome)
        await self.settle()
        self.mark("end")
        self._cycle += 1

    async def settle(self) -> None:
        """Wait until every source has been read since now: the floor that the next load is measured against.

        Raises:
            StageError: one of them reports nothing.

        """
        since_seconds = self.clock.now_seconds()

        def seen(samples: list[Sample]) -> bool:
            idle = sum(one.engines_idle is True for one in samples if one.at_seconds > since_seconds)
            return idle > DEFAULT_LIMITS.idle_samples and published_after(samples, since_seconds)

        if not await self.recorder.wait_for(seen, SETTLE_SECONDS):
            raise StageError("the agent's figures, or the page, did not come")
        await self.sampler.read_devices(processes=True)
        # The floor's window ends with an idle reading of the engine, after the devices'.
        await self.sampler.read_engine()

    async def split(self) -> None:
        """Wait for a split of the reserved bytes that is of the bytes reserved now.

        Raises:
            StageError: none comes.

        """

        def seen(samples: list[Sample]) -> bool:
            newest = next((one.allocators for one in reversed(samples) if one.allocators), ())
            return bool(newest) and all(
                each.split is not None
                and each.split.reserved_bytes == each.reserved_bytes
                and each.split.live_bytes == each.allocated_bytes
                for each in newest
            )

        if not await self.recorder.wait_for(seen, SPLIT_SECONDS):
            raise StageError("no split of the reserved bytes came")
        await self.sampler.read_devices(processes=True)


def published_after(samples: list[Sample], seconds: float) -> bool:
    """Whether one of the samples has what agents published after a moment, and not only read."""
    return any(
        one.allocators
        and all(one.at_seconds - each.age_seconds > seconds + PUBLISHING_SECONDS for each in one.allocators)
        for one in samples
    )


@asynccontextmanager
async def stage(
    python: str, work: Path, trace: Path, env: Mapping[str, str], *, neighbour_ratio: float = 0.0
) -> AsyncIterator[Stage]:
    """A subject that has taken its weights and its pool, sampled into a trace until the end.

    `neighbour_ratio` is the share of the device that another process has taken before the sampling begins.
    """
    published = work / "published"
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(subject(python, work, "server", published=published, env=env))
        told = await server.tell("start", weights_bytes=WEIGHTS_BYTES, pool_bytes=POOL_BYTES)
        if neighbour_ratio:
            neighbour = await stack.enter_async_context(subject(python, work, "neighbour", published=None, env={}))
            await neighbour.tell("keep_share", ratio=neighbour_ratio)
        facts = Facts(server_pids=(told["pid"],), weights_bytes=WEIGHTS_BYTES, pools=(_pool(),))
        recorder, clock = TimelineBuilder(stack.enter_context(TraceWriter(trace, facts))), Clock()
        played: list[Stage] = []
        sampler = await stack.enter_async_context(
            sampling(recorder, clock, facts, published, lambda: played[0].open_requests if played else 0)
        )
        played.append(Stage(server, f"GPU-{told['uuid']}", published, recorder, sampler, clock))
        yield played[0]


def _pool() -> KvPool:
    blocks = POOL_BYTES // BLOCK_BYTES
    return KvPool(
        engine="0",
        block_tokens=16,
        total_blocks=blocks,
        usable_blocks=blocks - 1,
        usage_blocks=blocks - 1,
        pool_bytes=POOL_BYTES,
    )


@asynccontextmanager
async def sampling(
    recorder: TimelineBuilder, clock: Clock, facts: Facts, published: Path | None, open_requests: Callable[[], int]
) -> AsyncIterator[Sampler]:
    """The sampler of `kvdiag run` at work."""

    async def text() -> AsyncIterator[bytes]:
        running = open_requests()
        yield (
            f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} 0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} 0\n'
        ).encode()

    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=text()))
    nvml = NvmlSource()
    async with httpx2.AsyncClient(base_url="http://stage", transport=transport) as client:
        sampler = Sampler(
            engine=ENGINE.open(HttpReader(client)),
            nvml=ThreadedReader(nvml.read, "nvml"),
            agents=None if published is None else ThreadedReader(TorchAllocatorSource(published).read, "agents"),
            facts=facts,
            record=recorder.add,
            pace=Pace(),
            clock=clock,
            load=lambda: Load(requests=open_requests()),
        )
        task = asyncio.create_task(sampler.run())
        try:
            yield sampler
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            nvml.close()
