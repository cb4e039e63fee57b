"""Reports to look at: a run of each kind of trouble, one whose names are hostile, one with holes, and a fleet."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import compare, summarise
from kvdiag.diagnosis.fleet.replica import Version
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Device, Facts, Gap, GrowthFigures, HostProcess, Sample, Timeline
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged, Source
from kvdiag.outputs.fleet_status import FleetReplica, FleetStatus
from kvdiag.outputs.html.fleet_page import View
from kvdiag.outputs.html.fleet_page import page as page_of_fleet
from kvdiag.outputs.html.report_page import Making, render, render_fleet
from tests.builders.runs import run
from tests.builders.soak_timeline import SOAKS, facts_of, soak
from tests.builders.values import GIB, NO_NVML, OOM, device, engine, process
from tests.builders.worlds import World, facts, named_so

MAKING = Making(version="0.1.0", command="kvdiag run --url http://127.0.0.1:8000", made_seconds=1_800_000_000.0)

HOSTILE = (
    '"><script>window.hurt=1</script><img src=x onerror="window.hurt=1">'
    "</title></style></svg>&amp;\x00\x1b[31m\u202etxt\u2028\ud800" + "x" * 300
)
"""What a name may bring: elements, ends of elements, entities, controls, overrides, no place to break a line."""


def page(world: World) -> str:
    """The report of a run."""
    timeline, known = run(world), facts(world)
    return render(diagnose(timeline, known), timeline, MAKING)


def hostile() -> tuple[Timeline, Facts]:
    """A run in which everything that comes from outside is hostile."""
    world, known = named_so(HOSTILE)
    timeline = run(world)
    samples = tuple(
        replace(
            sample,
            devices=None if sample.devices is None else tuple(map(_renamed, sample.devices)),
            host=(HostProcess(pid=100, name=HOSTILE, resident_bytes=GIB),),
        )
        for sample in timeline.samples
    )
    return replace(timeline, samples=samples), known


def _renamed(one: Device) -> Device:
    return replace(one, name=HOSTILE, uuid=f"{one.uuid}{HOSTILE}")


def _hostile() -> str:
    timeline, known = hostile()
    making = replace(MAKING, version=HOSTILE, command=HOSTILE)
    return render(diagnose(timeline, known), timeline, making)


def _soak() -> str:
    timeline, known = soak(SOAKS["torch leaks"]), facts_of()
    return render(diagnose(timeline, known), timeline, MAKING)


def holes() -> Timeline:
    """Ten minutes at 1 Hz of one GPU and one engine: two minutes without NVML, then two in which nothing was read."""
    lost = Gap(source="nvml", kind="failed", reason="GPU is lost")
    samples = []
    for second in range(600):
        if 400 <= second < 520:
            continue
        seen = not 100 <= second < 220
        samples.append(
            Sample(
                at_seconds=1_800_000_000.0 + second,
                engines=(engine(usage=0.25),),
                devices=(device(used_bytes=20 * GIB, processes=(process(100, 19 * GIB),)),) if seen else None,
                gaps=() if seen else (lost,),
            )
        )
    return Timeline(samples=tuple(samples))


def _holes() -> str:
    return render(diagnose(holes(), facts(World())), holes(), MAKING)


def _nothing() -> str:
    empty = Timeline(samples=())
    return render(diagnose(empty, Facts()), empty, MAKING)


def fleet() -> tuple[FleetDiagnosis, Mapping[str, Timeline]]:
    """Three replicas, one of which leaks."""
    worlds = {"a.jsonl": World(), "b.jsonl": World(leaked_blocks_per_request=4), "c.jsonl": World(nvml=NO_NVML)}
    timelines = {name: run(world) for name, world in worlds.items()}
    judged = [
        Judged(key=name, subject=(("trace", name),), diagnosis=diagnose(timelines[name], facts(world)))
        for name, world in worlds.items()
    ]
    summaries = [
        summarise(timelines[name], facts(world), DEFAULT_LIMITS, replica=name) for name, world in worlds.items()
    ]
    result = FleetDiagnosis(
        source=None, judged=tuple(sorted(judged, key=Judged.order)), fleet=compare(summaries), gaps=()
    )
    return result, timelines


def _fleet() -> str:
    result, timelines = fleet()
    return render_fleet(result, lambda worst: timelines[worst.key], MAKING)


PAGES: Mapping[str, Callable[[], str]] = {
    "healthy": lambda: page(World()),
    "leak": lambda: page(World(leaked_blocks_per_request=4)),
    "agents": lambda: page(
        World(agents=True, torch_growth_bytes=6 * 2**20, foreign={0: (process(7, 2 * GIB, "train.py"),)})
    ),
    "gpus": lambda: page(World(gpus=4, rank_extra_bytes={0: 2 * GIB})),
    "failing": lambda: page(World(failing={"long_context": OOM})),
    "blind": lambda: page(World(nvml=NO_NVML)),
    "soak": _soak,
    "holes": _holes,
    "nothing": _nothing,
    "hostile": _hostile,
    "fleet": _fleet,
}


LONG_NAMES = (("namespace", "production-inference"), ("pod", "llama-4-maverick-prefill-7d9c5b8f6d-x2x4q"))


def fleet_status() -> FleetStatus:
    """What a fleet's daemon shows: names as clusters give them, a replica that leaks and is soon out of memory."""
    result, _ = fleet()
    first, *others = result.judged
    leak = replace(
        first.diagnosis.findings[0],
        status="fault",
        growth=GrowthFigures(bytes_per_second=5e5, exhaustion_seconds=5400.0),
    )
    leaking = replace(first.diagnosis, worst="fault", findings=(leak, *first.diagnosis.findings[1:]))
    known = Version(engine="vllm", version="0.32.0+cu130", model="meta-llama/Llama-4-Maverick-17B-128E-Instruct")
    replicas = (replace(first, subject=LONG_NAMES, diagnosis=leaking), *others)
    return FleetStatus(
        source=Source(url="http://prometheus:9090", match="", start_seconds=0.0, end_seconds=1.0, join_seconds=90.0),
        replicas=tuple(
            FleetReplica(judged=one, as_of_seconds=MAKING.made_seconds, version=known, node=node)
            for one, node in zip(replicas, ("gke-prod-a3-highgpu-8g-5c1f9e2b-7xkq.internal", None, "n1"), strict=True)
        ),
        fleet=result.fleet,
        listed=3,
        round_seconds=MAKING.made_seconds,
    )


def fleet_page_of(view: View) -> str:
    """The page of a fleet's daemon."""
    return page_of_fleet(fleet_status(), view, MAKING.made_seconds)


def _replica() -> str:
    one = fleet_status().replicas[0].judged
    return render(one.diagnosis, Timeline(samples=()), replace(MAKING, subject=one.name, index="/"))


SERVED: Mapping[str, Callable[[], str]] = {"fleet's daemon": lambda: fleet_page_of(View()), "replica": _replica}
"""Pages that a fleet's daemon serves, with links to one another."""
