"""Worlds in which nothing is wrong: a third of all, with each noise, at every length, with restarts and upgrades."""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from kvdiag.model import Facts, Timeline
from tests.quality.corpus.tape import GIB, MIB, Tape, Track
from tests.quality.worlds.drawn_server import drawn
from tests.quality.worlds.growing_worlds import torch_of
from tests.quality.worlds.memory_noise import ON_DEVICE, ON_HOST
from tests.quality.worlds.planted import World

Made = tuple[Timeline, Facts]


def noisy(tape: Tape, *, host: str, device: str, gpus: int) -> Made:
    """One kind of noise on the host, one on the devices, on top of what every server has."""
    server = drawn(tape, gpus=gpus)
    server.host = ON_HOST[host](tape, server.requests, 0.8)
    server.device = {index: ON_DEVICE[device](tape, server.requests, 0.5) for index in range(gpus)}
    return server.play()


def restarted(tape: Tape) -> Made:
    """A rollout in the middle: counters at 0 again, and a new warm-up."""
    at = tape.hours[-1] * tape.random.uniform(0.4, 0.7)
    server = drawn(tape, lives=[(0.0, at), (at + 0.08, tape.hours[-1] + 1.0)])
    server.host = tape.of(lambda hour: 1.1 * GIB * min((hour if hour < at else hour - at) / 0.7, 1.0))
    return server.play()


def with_agents(tape: Tape) -> Made:
    """Kvdiag's own series of a healthy server."""
    server = drawn(tape, view="kvdiag")
    server.torch = (torch_of(tape, server, tape.flat()),)
    return server.play()


def page_cache(tape: Tape) -> Made:
    """Files that are read fill the page cache, which the container's working set counts."""
    files: Track = tape.of(lambda hour: min(hour * 2.5, 30.0) * GIB)
    return drawn(tape, file_bytes=files).play()


def media_cache(tape: Tape) -> Made:
    """A multimodal model whose processor cache is filling towards its 4 GiB with each new image, ever more slowly."""
    most, tau = tape.random.uniform(2.4, 3.8) * GIB, tape.hours[-1] * tape.random.uniform(0.25, 0.6)
    grown = tape.of(lambda hour: most * (1.0 - 2.718281828 ** (-hour / tau)))
    server = drawn(tape, host=grown, facts={"model_config": '{"vision_config": {}}'})
    server.requests.media = [0.3 * ended for ended in server.requests.ended]
    return server.play()


def one_event(tape: Tape) -> Made:
    """One adapter or table is loaded late, and stays: an event, no leak."""
    at = tape.hours[-1] * tape.random.uniform(0.3, 0.7)
    size = tape.random.uniform(200.0, 700.0) * MIB
    return drawn(tape, host=tape.levels((at, size)), device={0: tape.levels((at, size / 4.0))}).play()


def benign_worlds(random: Random) -> Iterator[World]:
    """Healthy servers of all kinds."""
    found: list[tuple[str, float, int, Callable[[Tape], Made]]] = []
    for host in sorted(ON_HOST):
        for hours in (random.uniform(5.0, 9.0), random.uniform(18.0, 26.0), random.uniform(48.0, 72.0)):
            device, gpus = random.choice(sorted(ON_DEVICE)), random.choice((1, 1, 1, 2, 4)) if hours < 30.0 else 1
            make = partial(noisy, host=host, device=device, gpus=gpus)
            found.append((f"{host} on the host, {device} on {gpus} GPUs, {hours:.0f} h", hours, gpus, make))
    for hours in (random.uniform(6.0, 12.0), random.uniform(24.0, 40.0)):
        found.append((f"restarted, {hours:.0f} h", hours, 1, restarted))
        found.append((f"with agents, {hours:.0f} h", hours, 1, with_agents))
        found.append((f"one event, {hours:.0f} h", hours, 1, one_event))
        found.append((f"page cache, {hours:.0f} h", hours, 1, page_cache))
        found.append((f"media cache, {hours:.0f} h", hours, 1, media_cache))
    for name, lasting, count, made in found:
        yield World(name=name, row="benign", right="benign", hours=lasting, make=made, gpus=count)
