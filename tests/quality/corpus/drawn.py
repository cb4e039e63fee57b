"""Random servers, healthy and leaking, of every component: for facts in no report, and to count false alarms.

Null models as in tests/builders/series.py, on every component of one server at once, each with a draw of its own;
leaks of given rates on one component of such a server. As the standard series show it (DCGM each 30 s, a container's
memory) or as kvdiag's recorder does (processes, agents, each process's memory).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Literal

from kvdiag.model import Engine, Facts, KvPool, Timeline
from tests.builders.series import MODELS
from tests.quality.corpus.incident import CORE, SERVER, kv_pool
from tests.quality.corpus.recording import Gpu, Holder, HostMemory, Pages, Recording, Torch, scraped, standard_series
from tests.quality.corpus.tape import GIB, MIB, Tape, Track, scaled, seeded, total

Model = Callable[[Random, float], Iterator[tuple[float, float]]]
Component = Literal["device", "torch", "reserved", "host", "kv"]
Shape = Literal["constant", "by load", "staircase"]

COMPONENTS: tuple[Component, ...] = ("device", "torch", "reserved", "host", "kv")
SHAPES: tuple[Shape, ...] = ("constant", "by load", "staircase")
VERDICTS: dict[Component, tuple[str, ...]] = {
    "device": ("leak.device_non_torch", "leak.device_torch"),
    "torch": ("leak.device_torch",),
    "reserved": ("leak.device_torch", "fragmentation.allocator"),
    "host": ("leak.host",),
    "kv": ("leak.kv_blocks",),
}
"""Verdicts that are right for a leak of a component: where only the device is observed, both are."""

STAIR_BYTES = 100 * MIB
MB = 10**6


def filling_cache(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """A cache that grows to 8 GiB at a steady rate, in 6 to 12 hours, and then turns over."""
    rate = 8.0 * GIB / (random.uniform(6.0, 12.0) * 3600.0)
    second = 0.0
    for _, load in MODELS["pool"](random, tick):
        yield min(rate * second, 8.0 * GIB), load
        second += tick


NULLS: dict[str, Model] = {**MODELS, "filling cache": filling_cache}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """So many MB an hour on one component, from an hour on."""

    component: Component
    mb_per_hour: float
    shape: Shape
    onset_hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One drawn server: whose memory does what, and how it is looked at."""

    model: str
    seed: int
    view: Literal["recorded", "series"]
    hours: float
    leak: Leak | None = None
    tick_seconds: float = 30.0

    @property
    def name(self) -> str:
        """What it is, for a table."""
        leak = self.leak
        told = "" if leak is None else f" + {leak.mb_per_hour:g} MB/h {leak.component} {leak.shape}"
        return f"{self.model}{told} ({self.view}, {self.seed})"

    def play(self) -> tuple[Timeline, Facts]:
        """The timeline, each sample a little early or late as scrapes are, and the facts."""
        tape = Tape(
            f"{self.model} {self.seed} {self.view} {self.leak}", hours=self.hours, tick_seconds=self.tick_seconds
        )
        timeline, facts = self._recording(tape).play()
        if self.view == "series":
            timeline, facts = standard_series(timeline, facts)
        return scraped(timeline, seeded(f"scrapes {self.seed}"), tick_seconds=self.tick_seconds), facts

    def _recording(self, tape: Tape) -> Recording:
        demand = self._demand(tape)
        grown = {component: self._grown(tape, component, demand) for component in COMPONENTS}
        pool = kv_pool(40.0)
        live = total(scaled(self._null(tape, "torch", demand), 1.0, 30.0 * GIB), grown["torch"])
        cache = total(scaled(self._null(tape, "reserved", demand), 1.0, 2.0 * GIB), grown["reserved"])
        reserved = total(live, [max(value, 0.0) for value in cache])
        beside = total(scaled(self._null(tape, "device", demand), 1.0, 8.0 * GIB), grown["device"])
        # The standard series show one component of the device: its memory in use, by any process.
        held = scaled(beside, 1.0, 52.0 * GIB) if self.view == "series" else total(reserved, beside)
        anonymous = total(scaled(self._null(tape, "host", demand), 1.0, 12.0 * GIB), grown["host"])
        torch = Torch(pid=CORE, gpu=0, allocated=live, reserved=reserved, title="VLLM::EngineCore")
        return Recording(
            tape=tape,
            pages=_pages(tape, demand, pool, scaled(grown["kv"], 1.0 / (128.0 * 1024.0 * 16.0))),
            gpus=(Gpu(total_bytes=192 * GIB, holders=(Holder(pid=CORE, name="VLLM::EngineCore", held=held),)),),
            torch=() if self.view == "series" else (torch,),
            host=(
                HostMemory(pid=CORE, name="VLLM::EngineCore", anonymous=anonymous),
                HostMemory(pid=SERVER, name="vllm", anonymous=tape.flat(2.2 * GIB)),
            ),
            facts={
                "engine_name": "vllm",
                "engine_version": "0.11.0",
                "pools": (replace(pool, memory_fraction_ratio=None),),
                "host_limit_bytes": 256 * GIB,
            },
        )

    def _demand(self, tape: Tape) -> Track:
        """The load that the models follow, with three idle minutes each hour, as any server has at some time."""
        random = seeded(f"load {self.model} {self.seed} {self.view}")
        loads = [load for _, load in islice(MODELS["pool"](random, self.tick_seconds), len(tape.hours))]
        return tape.pauses([max(load, 0.02) for load in loads], every=1.0, lasting=0.05)

    def _null(self, tape: Tape, component: str, demand: Sequence[float]) -> Track:
        """The model's bytes on a component; those that follow the load follow that of the server."""
        random = seeded(f"{self.model} {self.seed} {self.view} {component}")
        made = [above for above, _ in islice(NULLS[self.model](random, self.tick_seconds), len(tape.hours))]
        if self.model == "load cycles":
            return [3.0 * GIB * load + random.gauss(0.0, 10.0 * MIB) for load in demand]
        if self.model == "ratchet":
            most, track = 0.0, []
            for load in demand:
                most = max(most, load)
                track.append(3.0 * GIB * most)
            return track
        return made

    def _grown(self, tape: Tape, component: Component, demand: Sequence[float]) -> Track:
        leak = self.leak
        if leak is None or leak.component != component:
            return tape.flat()
        later = [load for hour, load in zip(tape.hours, demand, strict=True) if hour >= leak.onset_hours]
        mean = sum(later) / len(later)
        value, track = 0.0, []
        for hour, load in zip(tape.hours, demand, strict=True):
            if hour >= leak.onset_hours:
                weight = load / mean if leak.shape == "by load" else 1.0
                value += weight * leak.mb_per_hour * MB * tape.tick_seconds / 3600.0
            track.append(value // STAIR_BYTES * STAIR_BYTES if leak.shape == "staircase" else value)
        return track


def _pages(tape: Tape, demand: Sequence[float], pool: KvPool, kept: Sequence[float]) -> Pages:
    """The engine's metrics: a running request holds 1,500 tokens, and frees them within one sample of its end."""
    made: Pages = []
    tokens = 0.0
    for load, held in zip(demand, kept, strict=True):
        running = round(60 * load)
        tokens += 900.0 * load * tape.tick_seconds
        blocks = running * 94 + int(held)
        page = Engine(
            engine="0",
            kv_usage_ratio=min(blocks / pool.usage_blocks, 1.0),
            requests_running=running,
            requests_waiting=0,
            preemptions_total=0,
            prompt_tokens_total=round(4.0 * tokens),
            generation_tokens_total=round(tokens),
        )
        made.append((page,))
    return made


FAST = ("ratchet", "warm-up", "sawtooth", "slow noise")
FAST_SECONDS = 2.0


def healthy(seed: int, *, hours: float = 36.0) -> list[Drawn]:
    """Every null model, looked at both ways; some of them by a recorder that reads all the time."""
    views: tuple[Literal["recorded", "series"], ...] = ("recorded", "series")
    slow = [Drawn(model=model, seed=seed, view=view, hours=hours) for model in NULLS for view in views]
    fast = [
        Drawn(model=model, seed=seed, view="recorded", hours=hours / 12.0, tick_seconds=FAST_SECONDS) for model in FAST
    ]
    return [*slow, *fast]


RATES = (10.0, 50.0, 200.0, 500.0, 1_000.0, 5_000.0)
WATCHED_HOURS = {10.0: 40.0, 50.0: 16.0, 200.0: 9.0, 500.0: 7.0, 1_000.0: 7.0, 5_000.0: 6.0}
"""How long a leak is watched, its onset included: the longest delay that is allowed and something beyond."""

ONSET_HOURS = 4.0


def leaking(seed: int) -> list[Drawn]:
    """Every component, rate and shape, each on the next of the null models, but for the cache that is filling."""
    models = [model for model in NULLS if model != "filling cache"]
    made: list[Drawn] = []
    for component in COMPONENTS:
        for rate in RATES:
            for shape in SHAPES:
                model = models[(len(made) + seed) % len(models)]
                view: Literal["recorded", "series"] = "series" if component in {"device", "kv"} else "recorded"
                leak = Leak(component=component, mb_per_hour=rate, shape=shape, onset_hours=ONSET_HOURS)
                made.append(Drawn(model=model, seed=seed, view=view, hours=WATCHED_HOURS[rate], leak=leak))
    fast: tuple[Component, ...] = ("torch", "host")
    for component in fast:
        leak = Leak(component=component, mb_per_hour=1_000.0, shape="constant", onset_hours=1.0)
        model = FAST[seed % len(FAST)]
        made.append(Drawn(model=model, seed=seed, view="recorded", hours=3.5, leak=leak, tick_seconds=FAST_SECONDS))
    return made
