"""One drawn server: its requests, memory on devices and host with what was planted, and what a Prometheus holds of it.

`standard`: vLLM's metrics, DCGM and cAdvisor, each scraped at a time of its own, without processes. `kvdiag`: what
kvdiag's own metrics add: processes on each GPU and on the host, and torch's figures where an agent publishes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvdiag.model import Facts, HostCache, KvPool, Timeline
from tests.quality.corpus.incident import kv_pool
from tests.quality.corpus.recording import (
    NOT_UP,
    START_SECONDS,
    Gpu,
    Holder,
    HostMemory,
    Recording,
    Torch,
    standard_series,
)
from tests.quality.corpus.tape import GIB, MIB, Tape, Track, total
from tests.quality.worlds.exporter_faults import scraped_by
from tests.quality.worlds.memory_noise import ON_DEVICE, ON_HOST, drawn_noise
from tests.quality.worlds.request_load import Requests, offered, pages_of

View = Literal["standard", "kvdiag"]

API_PID, CORE_PID, WORKER_PID = 700, 701, 710
DRIVER_BYTES = 540 * MIB
TOKEN_BYTES = 128 * 1024
LONGEST = 32_768


@dataclass(kw_only=True)
class DrawnServer:
    """A server over the hours of a tape. Planted tracks are bytes on top of what it holds without them.

    `lives` are the hours between which it was up, `asleep` those of sleep mode. `fraction` is the share of each GPU
    that it holds, `stated` what its configuration says, if another. `torch` adds to what the agents publish.
    """

    tape: Tape
    requests: Requests
    view: View = "standard"
    gpus: int = 1
    total_gib: int = 80
    fraction: float = 0.85
    stated: float | None = None
    pool: KvPool = field(default_factory=lambda: kv_pool(40.0))
    device: Mapping[int, Track] = field(default_factory=dict)
    host: Track | None = None
    host_gib: float = 9.0
    file_bytes: Track | None = None
    kept_blocks: Track | None = None
    lives: Sequence[tuple[float, float]] = ()
    asleep: Sequence[tuple[float, float]] = ()
    asleep_bytes: Track | None = None
    extra_holders: Sequence[Holder] = ()
    torch: tuple[Torch, ...] = ()
    quiet: bool = False
    caches: tuple[HostCache, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def play(self) -> tuple[Timeline, Facts]:
        """The timeline as a Prometheus would return it, and the facts that go with it."""
        tape, up = self.tape, [self._up(hour) for hour in self.tape.hours]
        starts, begin = [], 0
        for place, is_up in enumerate(up):
            begin = place if place and is_up and not up[place - 1] else begin
            starts.append(begin)
        engines = pages_of(self.requests, self.pool, self.kept_blocks, starts)
        sleeping = [self._sleeps(hour) for hour in tape.hours]
        pages = [
            (replace(one, asleep=sleep if self.asleep else None),) if is_up else NOT_UP
            for one, is_up, sleep in zip(engines, up, sleeping, strict=True)
        ]
        recording = Recording(
            tape=tape,
            pages=list(pages),
            gpus=tuple(self._gpu(index, up, sleeping) for index in range(self.gpus)),
            torch=self.torch,
            host=self._host(),
            facts=self._facts(),
        )
        timeline, facts = recording.play()
        if self.view == "standard":
            timeline, facts = standard_series(timeline, facts)
            facts = replace(facts, max_model_len_tokens=self.facts.get("max_model_len_tokens", LONGEST))
        return scraped_by(self._without_the_dead(timeline), tape.random), facts

    def _up(self, hour: float) -> bool:
        return not self.lives or any(begin <= hour < end for begin, end in self.lives)

    def _sleeps(self, hour: float) -> bool:
        return any(begin <= hour < end for begin, end in self.asleep)

    def _gpu(self, index: int, up: list[bool], sleeping: list[bool]) -> Gpu:
        tape, size = self.tape, self.total_gib * GIB
        own = round(self.fraction * (size - DRIVER_BYTES))
        noise = tape.flat() if self.quiet else drawn_noise(tape, self.requests, ON_DEVICE, size=0.35)
        held = total(tape.flat(float(own)), noise, self.device.get(index) or tape.flat())
        floor = self.asleep_bytes or tape.flat(0.4 * GIB)
        held = [
            0.0 if not is_up else floor[place] if sleep else held[place]
            for place, (is_up, sleep) in enumerate(zip(up, sleeping, strict=True))
        ]
        pid = CORE_PID if self.gpus == 1 else WORKER_PID + index
        name = "VLLM::EngineCore" if self.gpus == 1 else f"VLLM::Worker_TP{index}"
        holders = (Holder(pid=pid, name=name, held=held), *(self.extra_holders if index == 0 else ()))
        return Gpu(total_bytes=size, holders=holders, driver_reserved_bytes=DRIVER_BYTES)

    def _host(self) -> tuple[HostMemory, ...]:
        tape = self.tape
        noise = tape.noise(6.0 * MIB, 5.0) if self.quiet else drawn_noise(tape, self.requests, ON_HOST, size=0.6)
        # Collected levels may lie below 0; a process does not.
        core = total(tape.flat(self.host_gib * GIB), noise, self.host or tape.flat())
        api = total(tape.flat(1.8 * GIB), tape.noise(4.0 * MIB, 4.0))
        return (
            HostMemory(pid=API_PID, name="vllm", anonymous=api),
            HostMemory(pid=CORE_PID, name="VLLM::EngineCore", anonymous=core, files=self.file_bytes),
        )

    def _facts(self) -> dict[str, Any]:
        pool = replace(self.pool, memory_fraction_ratio=round(self.stated or self.fraction, 2))
        usual: dict[str, Any] = {
            "engine_name": "vllm",
            "engine_version": "0.24.0",
            "pools": (pool,),
            "max_model_len_tokens": LONGEST,
            "host_limit_bytes": 400 * GIB,
            "tensor_parallel": self.gpus,
            "host_caches": self.caches,
        }
        if len(self.lives) > 1:
            usual["started_seconds"] = START_SECONDS + 3600.0 * self.lives[-1][0]
        return {**usual, **self.facts}

    def _without_the_dead(self, timeline: Timeline) -> Timeline:
        """No host memory and no torch figures of a process that does not live."""
        if not self.lives:
            return timeline
        made = []
        for one in timeline.samples:
            hour = (one.at_seconds - START_SECONDS) / 3600.0
            is_up = self._up(hour)
            if not is_up and (one.host or one.allocators):
                one = replace(one, host=None, allocators=None)  # noqa: PLW2901
            if one.host or one.devices or one.engines or one.allocators or one.gaps:
                made.append(one)
        return Timeline(samples=tuple(made))


def drawn(tape: Tape, **changes: Any) -> DrawnServer:
    """A server with a random size and load; `peak` and `night` choose its load."""
    random = tape.random
    peak = changes.pop("peak", random.uniform(400.0, 4_000.0))
    night = changes.pop("night", random.choice((0.0, 0.05, 0.15, 0.3)))
    requests = changes.pop("requests", None) or offered(
        tape, peak_per_hour=peak, night_ratio=night, weekend=tape.hours[-1] > 40.0
    )
    most = max(requests.held_tokens) or 1.0
    usual: dict[str, Any] = {
        "total_gib": random.choice((80, 80, 141, 192)),
        "fraction": round(random.uniform(0.62, 0.86), 2),
        # Any server has room for some requests of the longest length.
        "pool": kv_pool(max(most / random.uniform(0.45, 0.8), 3.0 * LONGEST) * TOKEN_BYTES / GIB),
        "host_gib": random.uniform(4.0, 22.0),
    }
    return DrawnServer(tape=tape, requests=requests, **{**usual, **changes})
