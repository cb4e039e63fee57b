"""Worlds in which one component of memory grows: every rate, constant, with the load, or in steps; early or late."""

from collections.abc import Iterator
from functools import partial
from random import Random

from kvdiag.model import Facts, Timeline
from tests.quality.corpus.incident import kv_pool
from tests.quality.corpus.recording import Torch
from tests.quality.corpus.tape import GIB, MIB, Tape, Track, scaled, total
from tests.quality.worlds.drawn_server import CORE_PID, DrawnServer, drawn
from tests.quality.worlds.memory_noise import correlated, still, with_load
from tests.quality.worlds.planted import DEVICE_LEAKS, World
from tests.quality.worlds.request_load import Requests

RATES: dict[float, tuple[float, float]] = {
    20.0: (60.0, 72.0),
    50.0: (26.0, 44.0),
    150.0: (14.0, 30.0),
    500.0: (4.0, 9.0),
    1500.0: (2.5, 6.0),
    7168.0: (2.0, 4.0),
}
"""MiB an hour, and for how many hours the server is watched."""

COMPONENTS = ("device", "host", "host process", "torch", "outside torch", "blocks")
ACCEPT = {
    "device": DEVICE_LEAKS,
    "torch": ("leak.device_torch",),
    "outside torch": ("leak.device_non_torch",),
    "host": ("leak.host",),
    "host process": ("leak.host",),
    "blocks": ("leak.kv_blocks",),
}


def growth(tape: Tape, requests: Requests, *, mib_per_hour: float, onset: float, shape: str) -> Track:
    """Bytes that are never released: `constant`, `by load`, or in `steps` that come with work."""
    begun = [hour >= onset for hour in tape.hours]
    if shape == "constant":
        return tape.line(mib_per_hour * MIB, begin=onset)
    work = [0.0, *(later - earlier for earlier, later in zip(requests.ended, requests.ended[1:], strict=False))]
    mean = sum(one for one, on in zip(work, begun, strict=True) if on) / (sum(begun) or 1)
    value, track = 0.0, []
    for done, on in zip(work, begun, strict=True):
        value += mib_per_hour * MIB * tape.tick_seconds / 3600.0 * done / mean if on and mean else 0.0
        track.append(value)
    if shape == "by load":
        return track
    step = max(mib_per_hour / tape.random.uniform(3.0, 6.0), 64.0) * MIB
    return [each // step * step for each in track]


def leaking(tape: Tape, *, component: str, mib_per_hour: float, onset: float, shape: str) -> tuple[Timeline, Facts]:
    """A server of which one component grows."""
    random = tape.random
    quiet = mib_per_hour <= 50.0 and random.random() < 0.5
    server = drawn(tape, quiet=quiet, night=random.choice((0.05, 0.15, 0.3)))
    grown = growth(tape, server.requests, mib_per_hour=mib_per_hour, onset=onset, shape=shape)
    server.fraction = min(server.fraction, 0.94 - grown[-1] / (server.total_gib * GIB))
    if component == "device":
        server.device = {0: grown}
    elif component in ("host", "host process"):
        server.host, server.view = grown, "standard" if component == "host" else "kvdiag"
    elif component == "blocks":
        blocks = scaled(grown, 1.0 / (2.0 * MIB))
        most = max(server.requests.held_tokens) * 128.0 * 1024.0 / GIB
        server.pool, server.kept_blocks = kv_pool(1.4 * most + 1.3 * grown[-1] / GIB + 13.0), blocks
    else:
        server.view, server.device = "kvdiag", {0: grown}
        server.torch = (torch_of(tape, server, grown if component == "torch" else tape.flat()),)
    return server.play()


def torch_of(tape: Tape, server: DrawnServer, live: Track, *, retries: Track | None = None) -> Torch:
    """What the agent of the engine core publishes: live bytes with noise, and a cache on top of them."""
    base = server.fraction * server.total_gib * GIB
    noise = tape.random.choice((still, with_load, correlated))
    moving = scaled(noise(tape, server.requests, 0.3), 1.0, 0.75 * base)
    live = total(moving, live)
    # Torch reserves the most that was live, in segments of 20 MiB.
    reserved, most = [], 0.0
    for value in live:
        most = max(most, value)
        reserved.append((most // (20.0 * MIB) + 12.0) * 20.0 * MIB)
    return Torch(pid=CORE_PID, gpu=0, allocated=live, reserved=reserved, retries=retries, title="VLLM::EngineCore")


def growing_worlds(random: Random) -> Iterator[World]:
    """One world of every component and rate, with a drawn shape and onset."""
    for component in COMPONENTS:
        for rate, (least, most) in RATES.items():
            hours = random.uniform(least, most)
            onset = random.choice((0.0, 0.0, random.uniform(0.15, 0.35) * hours))
            shape = "steps" if rate > 5000.0 else random.choice(("constant", "by load", "steps"))
            yield World(
                name=f"{component} +{rate:g} MiB/h {shape} from {onset:.0f} h",
                row="3 steps" if shape == "steps" else "2 slow" if rate <= 150.0 else "0 growth",
                right="fault",
                hours=hours,
                make=partial(leaking, component=component, mib_per_hour=rate, onset=onset, shape=shape),
                accept=ACCEPT[component],
                # The device shows what its torch takes.
                also=DEVICE_LEAKS if component in ("torch", "outside torch") else (),
                onset_hours=onset,
                mib_per_hour=rate,
            )
