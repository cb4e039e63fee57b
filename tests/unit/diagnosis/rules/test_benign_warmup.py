from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.benign_warmup import STILL_GROWING, judge
from kvdiag.model import Evidence, Finding, Timeline
from tests.builders.answers import evidence
from tests.builders.runs import run
from tests.builders.values import MIB, NO_NVML
from tests.builders.worlds import TRAINING, World, facts


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_growth_that_stopped_is_explained() -> None:
    """Memory that came with the first three requests, two of them unjudged, is summed up and called warm-up."""
    # Kernels loaded with the first requests
    world = World(first_touch_bytes=(180 * MIB, 120 * MIB, 60 * MIB))
    actual = verdict(world)
    expected = Finding(
        id="benign.warmup",
        status="ok",
        summary="GPU 0: 360 MiB came with the first requests, and then growth stopped: warm-up, not a leak",
        evidence=(
            Evidence(name="first_touch_growth", value=360 * MIB, unit="bytes", source="nvml"),
            Evidence(name="growth_over_judged_cycles", value=0, unit="bytes", source="nvml"),
            Evidence(name="judged_cycles", value=6, unit="cycles", source="kvdiag"),
        ),
    )

    assert expected == actual


def test_a_server_that_never_grew_is_ok() -> None:
    """Without growth there is nothing to explain."""
    # A healthy server
    actual = verdict(World())

    assert ("ok", "device memory did not grow at all") == (actual.status, actual.summary)


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(nvml=NO_NVML), f"{NO_NVML.reason}"),
        (World(lost_in="single_request"), "too few equal cycles with device readings after each"),
        (World(device_growth_bytes=6 * MIB), STILL_GROWING),
    ],
    ids=["no NVML", "too few cycles", "still growing"],
)
def test_growth_that_was_not_seen_to_stop_is_unknown(world: World, reason: str) -> None:
    """Neither an unseen device nor one that still grows is explained away."""
    actual = verdict(world)

    assert ("unknown", reason) == (actual.status, actual.summary)


def test_warmup_of_one_of_two_gpus_is_found() -> None:
    """Tensor parallel: first-touch growth is told for a GPU on which it happened."""
    # Two GPUs that both load kernels
    actual = verdict(World(gpus=2, first_touch_bytes=(64 * MIB,)))

    assert ("ok", 64 * MIB) == (actual.status, evidence(actual)["first_touch_growth"])


def test_a_job_on_another_gpu_is_not_the_servers_warmup() -> None:
    """Growth of somebody else's GPU neither counts as warm-up nor keeps the server's from being seen to stop."""
    # A growing job on GPU 1, where the server has no process
    world = World(foreign={1: (TRAINING,)}, foreign_growth_bytes={1: 64 * MIB})
    actual = verdict(world)

    assert ("ok", "device memory did not grow at all") == (actual.status, actual.summary)


@pytest.mark.parametrize("step", ["baseline", "single_request"])
def test_without_a_floor_before_the_requests_their_cycles_alone_are_summed(step: str) -> None:
    """Where the baseline did not run or the first cycle did not settle, the unjudged requests' share stays unknown."""
    # Kernels loaded with the first four requests, two of them unjudged, and no idle readings around those
    world = World(first_touch_bytes=(64 * MIB, 32 * MIB, 16 * MIB, 8 * MIB))
    whole = run(world)
    start, end = (
        next(mark.at_seconds for mark in whole.marks if (mark.step, mark.phase) == (step, phase))
        for phase in ("begin", "end" if step == "baseline" else "offer")
    )
    samples = tuple(one for one in whole.samples if one.engines is None or not start <= one.at_seconds <= end)
    (actual,) = judge(Timeline(samples=samples, marks=whole.marks), facts(world), DEFAULT_LIMITS)

    assert actual.status in {"ok", "unknown"}
    assert 0 < float(evidence(actual).get("first_touch_growth") or 1) <= 24 * MIB


def test_cycles_without_a_baseline_are_judged_alone() -> None:
    """A trace that begins with the requests still shows that growth stopped."""
    # A run of which the baseline's marks are lost
    world = World(first_touch_bytes=(0, 0, 16 * MIB))
    whole = run(world)
    marks = tuple(mark for mark in whole.marks if mark.step != "baseline")
    (actual,) = judge(Timeline(samples=whole.samples, marks=marks), facts(world), DEFAULT_LIMITS)

    assert ("ok", 16 * MIB) == (actual.status, evidence(actual)["first_touch_growth"])
