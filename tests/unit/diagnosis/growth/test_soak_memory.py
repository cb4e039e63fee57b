from collections.abc import Callable
from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.soak_memory import ORDER, Soak, disturbance, soaked
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Capabilities, Facts, HostCache, HostProcess, Mark, Outcome, Sample, Timeline, Workload
from tests.builders.answers import ANY_TEXT, containing
from tests.builders.runs import run
from tests.builders.soak_timeline import LOADS, NONE, Seen, after_requests, facts_of, soak
from tests.builders.values import GIB, KIB, MIB, SERVER_PID, allocator, device, engine
from tests.builders.worlds import World, facts


def of(seen: Seen) -> Soak:
    """What a soak shows."""
    found = soaked(soak(seen), facts_of(), DEFAULT_LIMITS)
    assert found is not None
    return found


def changed(timeline: Timeline, change: Callable[[Sample], Sample]) -> Timeline:
    """A timeline whose samples are others."""
    return replace(timeline, samples=tuple(change(one) for one in timeline.samples))


def test_components_stand_in_their_order_with_their_names() -> None:
    """Components are ordered: blocks, torch's parts of each process, devices, other processes, host memory."""
    found = of(Seen(live=NONE, beside=NONE, host=NONE))

    assert [(one.kind, one.who) for one in found.components] == [
        ("kv_held_idle", "the pool"),
        ("torch_live", f"VLLM::EngineCore {SERVER_PID}"),
        ("torch_unused", f"VLLM::EngineCore {SERVER_PID}"),
        ("outside_torch", f"VLLM::EngineCore {SERVER_PID}"),
        ("server", "GPU 0"),
        ("others", "GPU 0"),
        ("host_anonymous", f"VLLM::EngineCore {SERVER_PID}"),
    ]
    assert [ORDER.index(one.kind) for one in found.components] == sorted(
        ORDER.index(one.kind) for one in found.components
    )
    assert (None, 0) == (found.problem, found.blocks_kept)
    assert ["kv_held_idle"] == [one.kind for one in found.of(MemoryComponent.KV_HELD_IDLE)]
    assert sum(cycle.requests for cycle in found.cycles) == found.requests


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("torch_live", Seen(live=after_requests(64 * KIB))),
        ("torch_unused", Seen(live=NONE, cache=after_requests(2 * MIB))),
        ("outside_torch", Seen(live=NONE, beside=after_requests(2 * MIB))),
        ("server", Seen(server=after_requests(2 * MIB))),
        ("device", Seen(server=after_requests(2 * MIB), server_reported=False)),
        ("others", Seen(others=after_requests(2 * MIB))),
        ("host_anonymous", Seen(host=after_requests(MIB))),
        ("kv_held_idle", Seen(blocks=after_requests(1))),
    ],
)
def test_growth_is_in_its_own_component(kind: str, seen: Seen) -> None:
    """What each request leaves behind is found where it was left."""
    found = of(seen)

    leaks = {one.kind for one in found.components if one.soaked.shape == "leak"}
    assert {kind} == leaks


@pytest.mark.parametrize(
    ("kind", "seen", "least_bytes"),
    [
        ("torch_live", Seen(live=NONE), 64 * KIB),
        ("torch_unused", Seen(live=NONE), MIB),
        ("server", Seen(), MIB),
        ("host_anonymous", Seen(host=NONE), 256 * KIB),
        ("kv_held_idle", Seen(), 0),
    ],
)
def test_what_counts_is_the_components_own_least(kind: str, seen: Seen, least_bytes: int) -> None:
    """The detection limit is twice the least that counts: 64 KiB of torch, 1 MiB of a device, 256 KiB of the host."""
    (found,) = [one for one in of(seen).components if one.kind == kind]
    assert 2 * least_bytes == found.soaked.visible_per_cycle


def test_blocks_that_are_kept_are_counted_from_the_first_cycle() -> None:
    """Blocks kept are the last cycle's less the first's; without a reported pool the count is `None`."""
    levels = [7 + level for level in after_requests(1)]

    kept = of(Seen(blocks=levels)).blocks_kept
    untold = soaked(soak(Seen(blocks=levels)), Facts(server_pids=(SERVER_PID,)), DEFAULT_LIMITS)

    assert levels[-1] - levels[0] == kept
    assert untold is not None
    assert untold.blocks_kept is None


def test_host_needs_a_longer_soak_than_torch() -> None:
    """Thirty judged cycles are two blocks and a half: garbage may come as steadily for so long, tensors do not."""
    loads = LOADS[:41]
    levels = after_requests(MIB, loads)

    found = of(Seen(loads=loads, live=levels, host=levels))

    assert {"torch_live": "leak", "host_anonymous": "unsteady"} == {
        one.kind: one.soaked.shape for one in found.components if one.kind in {"torch_live", "host_anonymous"}
    }


def test_cycle_that_was_cut_short_spoils_no_other() -> None:
    """The others are judged without it."""
    found = of(Seen(live=NONE, host=NONE, last_cycle=50))

    assert ["the cycle was cut short"] == [cycle.problem for cycle in found.cycles if not cycle.clean]
    assert ["kv_held_idle", "torch_live", "torch_unused", "server", "others", "host_anonymous"] == [
        one.kind for one in found.components
    ]


@pytest.mark.parametrize(("fresh", "judged"), [(11, False), (12, True)])
def test_twelve_cycles_of_new_content_are_enough(fresh: int, judged: bool) -> None:
    """Twelve load cycles suffice for a verdict if all others are left out; eleven do not."""
    # Another client's prompts in every load of new content after the first ones
    loads = [place for place, load in enumerate(LOADS) if load.requests and not load.repeated]

    found = of(Seen(other_prompts=loads[fresh:]))

    assert judged == bool(found.components)
    assert judged == (found.problem is None)


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (
            Seen(other_prompts=range(5, 60)),
            containing("2 load cycles", "12 are needed", ": other traffic (in 55 of 60"),
        ),
        (Seen(failing=range(5, 60)), containing("2 load cycles", ": requests failed: HTTP 500", "(in 28 of 60")),
        (Seen(last_cycle=20), containing("10 load cycles", "cut short (in 1 of 21")),
        (Seen(other_prompts=range(0, 60, 2)), containing("were followed by a sample", ": other traffic (in 30 of 60")),
    ],
    ids=["other traffic", "requests fail", "cut short", "other traffic in idle cycles"],
)
def test_soak_of_too_few_cycles_says_what_spoilt_most(seen: Seen, problem: str) -> None:
    """The problem names the most frequent reason and its number of cycles; no component is judged."""
    found = of(seen)

    assert problem == found.problem
    assert () == found.components
    assert sum(cycle.requests for cycle in found.cycles if cycle.clean) == found.requests


def test_a_soak_that_did_not_run_has_no_cycle_and_says_so() -> None:
    """Its warm-up alone is a soak that broke off."""
    begun = Mark(at_seconds=1.0, step="soak_warmup", cycle=0, phase="begin")

    assert Soak(cycles=(), problem=ANY_TEXT) == soaked(Timeline(samples=(), marks=(begun,)), Facts(), DEFAULT_LIMITS)


def test_nothing_that_was_read_is_said_to_be_so() -> None:
    """Without a pool and a readable GPU no component is judged, and the problem is a lack of samples."""
    found = soaked(soak(Seen(server=None)), Facts(), DEFAULT_LIMITS)

    assert found is not None
    assert (containing("were followed by a sample"), ()) == (found.problem, found.components)


def test_whose_bytes_are_untold_now_and_then_are_the_devices() -> None:
    """A device whose processes are listed in some cycles only is judged as a whole."""
    # Lists that are missing after the thirtieth cycle
    listed = soak(Seen())
    half = listed.samples[len(listed.samples) // 2].at_seconds

    def unlisted(sample: Sample) -> Sample:
        if sample.devices is None or sample.at_seconds < half:
            return sample
        return replace(sample, devices=tuple(replace(one, processes=None) for one in sample.devices))

    found = soaked(changed(listed, unlisted), facts_of(), DEFAULT_LIMITS)

    assert found is not None
    assert {"kv_held_idle", "device"} == {one.kind for one in found.components}


def test_unnamed_parts_are_called_by_what_they_are() -> None:
    """Processes without a title, a MIG slice by its own name; another server's allocator is none of the server's."""

    def bare(sample: Sample) -> Sample:
        inside = allocator(title=None, process_bytes=None)
        slice_ = device(used_bytes=3 * GIB, processes=None, uuid="MIG-1", mig_parent_uuid="GPU-0")
        hosts = (
            HostProcess(pid=9, name="", resident_bytes=GIB, anonymous_bytes=GIB),
            HostProcess(pid=10, name="x", resident_bytes=GIB, anonymous_bytes=None),
        )
        if sample.devices is None:
            return sample
        return replace(
            sample,
            devices=(slice_, device(1, used_bytes=None)),
            allocators=(inside, replace(inside, pid=3)),
            host=hosts,
        )

    found = soaked(changed(soak(Seen()), bare), facts_of(), DEFAULT_LIMITS)

    assert found is not None
    assert [(one.kind, one.who) for one in found.components] == [
        ("kv_held_idle", "the pool"),
        ("torch_live", f"process {SERVER_PID}"),
        ("torch_unused", f"process {SERVER_PID}"),
        ("device", "GPU 0 MIG-1"),
        ("host_anonymous", "process 9"),
    ]


def cycle(
    *, requests: int | None = 2, failed: int = 0, errors: tuple[str, ...] = (), open_: tuple[int, int] = (0, 0)
) -> Timeline:
    """One cycle from 10 s to 14 s, in which the engines show so many requests running and waiting."""
    load = None if requests is None else Workload(requests=requests, prompt_tokens=16, max_tokens=16)
    outcome = Outcome(
        completed=(requests or 0) - failed, failed=failed, prompt_tokens=0, generated_tokens=0, errors=errors
    )
    marks = tuple(
        Mark(
            at_seconds=10.0 + place,
            step="soak",
            cycle=0,
            phase=phase,  # type: ignore[arg-type]
            workload=load if phase == "begin" else None,
            outcome=outcome if phase == "release" else None,
        )
        for place, phase in enumerate(("begin", "offer", "release", "end"))
    )
    page = engine(running=open_[0], waiting=open_[1])
    return Timeline(
        samples=(
            Sample(at_seconds=11.0, engines=(engine(),)),
            Sample(at_seconds=11.5, engines=(page,)),
            Sample(at_seconds=14.5, engines=(engine(running=9),)),
        ),
        marks=marks,
    )


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (cycle(), None),
        (cycle(open_=(1, 1)), None),
        (cycle(open_=(2, 1)), "other traffic"),
        (cycle(requests=None, open_=(0, 1)), "other traffic"),
        (cycle(requests=None), None),
        (cycle(failed=1), "requests failed: no reason given"),
        (cycle(failed=1, errors=("a", "b")), "requests failed: a"),
        (replace(cycle(), marks=cycle().marks[:-1]), "the cycle was cut short"),
    ],
)
def test_cycle_is_disturbed_by_whatever_is_not_its_own(seen: Timeline, expected: str | None) -> None:
    """More requests than ours open at once, our own that failed, an end that never came; what comes later is not it."""
    (span,) = seen.spans()
    assert expected == disturbance(seen, span, Facts())


def test_the_small_request_that_moves_the_gauges_is_no_other_traffic() -> None:
    """It runs together with a load; in an idle cycle none is sent."""
    late = Facts(capabilities=Capabilities(on_completion=True))
    for seen, expected in (
        (cycle(open_=(2, 1)), None),
        (cycle(open_=(3, 1)), "other traffic"),
        (cycle(requests=None, open_=(1, 0)), "other traffic"),
    ):
        assert expected == disturbance(seen, seen.spans()[0], late)


def test_active_steps_alone_are_no_soak() -> None:
    """Their cycles are judged by their own rules."""
    world = World()
    assert Soak(cycles=(), problem=ANY_TEXT) == soaked(run(world), facts(world), DEFAULT_LIMITS)


def test_a_process_has_the_limit_of_its_own_caches() -> None:
    """llama.cpp's prompt cache; what the process holds beyond the first sample is compared with it."""
    seen = soak(Seen(host=after_requests(MIB)))
    samples = tuple(
        replace(sample, host=sample.host and tuple(replace(one, name="llama-server") for one in sample.host))
        for sample in seen.samples
    )
    cache = HostCache(name="llama.cpp's prompt cache", flag="-cram", limit_bytes=GIB)
    found = soaked(replace(seen, samples=samples), replace(facts_of(), host_caches=(cache,)), DEFAULT_LIMITS)
    (process,) = found.of(MemoryComponent.HOST_ANONYMOUS)
    assert process.caches is not None
    levels = after_requests(MIB)
    assert (GIB, levels[-1] - levels[0]) == (process.caches.limit_bytes, process.grown_bytes)
    (of_engine,) = soaked(seen, facts_of(), DEFAULT_LIMITS).of(MemoryComponent.HOST_ANONYMOUS)
    assert of_engine.caches is None
