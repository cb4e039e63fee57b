"""Print the cost of diagnosing a day of samples, next to the cost of reading it once from a trace's lines.

python -m tests.quality.bench.day_speed

A day of one sample a second: eight GPUs, the engine and two host processes, process lists every five seconds, as a
daemon retains it. CPU time of one core; the second figure is a pass over the same samples without any diagnosis.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from time import process_time

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import summarise
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Device, Facts, Sample, Timeline
from tests.builders.series import device_part, host_part, memory, timeline
from tests.builders.values import GIB, SERVER_PID, device, engine, process
from tests.builders.worlds import World, facts
from tests.quality.bench.table import note

GPUS = 8
AIM_SECONDS = 1.0
LISTS_EVERY = 5


def day(*, tick_seconds: float = 1.0) -> Timeline:
    """A day in which every GPU's memory follows the load, each a little behind the one before."""
    times, sizes, load = memory("slow noise", 1, hours=24.0, tick_seconds=tick_seconds)
    samples = []
    for place, (at_seconds, busy) in enumerate(zip(times, load, strict=True)):
        gpus = tuple(_device(number, sizes[place - 3 * number], place) for number in range(GPUS))
        page = engine(usage=round(min(busy, 1.0), 4), running=1)
        host = host_part(sizes[place]).host if place % LISTS_EVERY == 0 else None
        samples.append(Sample(at_seconds=at_seconds, engines=(page,), devices=gpus, host=host))
    return Timeline(samples=tuple(samples))


def _device(number: int, size: int, place: int) -> Device:
    listed = (process(SERVER_PID + number, size), process(SERVER_PID + 900, GIB)) if place % LISTS_EVERY == 0 else None
    one = device(used_bytes=size + 2 * GIB, total_bytes=80 * GIB, processes=listed)
    return replace(one, uuid=f"{one.uuid}-{number}", index=number)


def took_seconds(work: Callable[[Timeline], object], seen: Timeline) -> float:
    """CPU time of one call, the minimum of three, each on a new timeline without cached results."""
    least = float("inf")
    for _ in range(3):
        fresh = Timeline(samples=seen.samples)
        gc.collect()
        begin = process_time()
        work(fresh)
        least = min(least, process_time() - begin)
    return least


def walk(seen: Timeline) -> int:
    """Every device of every sample looked at once."""
    return sum(one.memory.free_bytes for sample in seen.samples for one in sample.devices or () if one.memory)


def main() -> int:
    """Print the lines."""
    known = replace(facts(World()), server_pids=tuple(range(SERVER_PID, SERVER_PID + GPUS)))
    whole = day()
    judged, walked = took_seconds(lambda seen: diagnose(seen, known), whole), took_seconds(walk, whole)
    scraped = timeline("slow noise", hours=24.0, tick_seconds=30.0, part=device_part)
    replica = took_seconds(lambda seen: diagnose(seen, Facts(engine_name="vllm")), scraped)
    summed = took_seconds(lambda seen: summarise(seen, Facts(engine_name="vllm"), DEFAULT_LIMITS, replica="r"), scraped)
    note("diagnose: a day of 8 GPUs at 1 Hz", judged, walked, than="iterating over its samples", unit="s")
    met = "met" if judged <= AIM_SECONDS else "not met"
    sys.stdout.write(
        f"24 h at 1 Hz, {GPUS} GPUs: diagnose {judged:.2f} s, {judged / walked:.1f} times a walk through it "
        f"({walked:.2f} s); aim {AIM_SECONDS:.0f} s: {met}\n"
        f"24 h at 30 s, 1 GPU: diagnose {1000 * replica:.0f} ms, summarised for a fleet {1000 * summed:.0f} ms\n"
    )
    return 0 if judged <= AIM_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
