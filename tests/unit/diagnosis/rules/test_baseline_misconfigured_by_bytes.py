"""baseline.misconfigured at its thresholds and with its figures: the pool, the fraction, the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.baseline_misconfigured import judge
from kvdiag.model import Device, Facts, Finding, Gap, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence, rows
from tests.builders.values import GIB, MIB, NO_NVML, device, engine, pool, process

FRACTION = pool(pool_bytes=None)
"""A pool sized by a fraction of 0.92."""

SERVER = Facts(pools=(FRACTION,), server_pids=(100, 101), max_model_len_tokens=32_768)

TOTAL = 80 * GIB
DRIVER = 464 * MIB
BUDGET = 78_579_782_123
"""0.92 of 85,899,345,920 less 486,539,264 bytes: of 85,412,806,656."""

WHOSE = ", and whose they are is not visible"

ALLOWANCE = 1_153_433_600 + 1_717_986_918
"""1100 MiB of a context, and 2 % of 80 GiB."""


def at_idle(*devices: Device, of: Facts = SERVER, gap: Gap | None = None) -> Finding:
    """The rule's one finding on one reading of some devices beside an engine that answers."""
    samples = [Sample(at_seconds=1.0, engines=(engine(),)), Sample(at_seconds=2.0, devices=devices or None)]
    if gap is not None:
        samples.append(Sample(at_seconds=3.0, gaps=(gap,)))
    (found,) = judge(Timeline(samples=tuple(samples)), of, DEFAULT_LIMITS)
    return found


def holding(*sizes: int, index: int = 0, reserved: int | None = DRIVER) -> Device:
    """A GPU of 80 GiB on which the server's processes hold so much, beside a GiB of somebody else."""
    listed = (*(process(100 + number, size) for number, size in enumerate(sizes)), process(7, 1))
    return device(
        index, total_bytes=TOTAL, used_bytes=sum(sizes) + DRIVER, driver_reserved_bytes=reserved, processes=listed
    )


def unlisted(used: int, *, reserved: int | None = DRIVER) -> Device:
    """The same without a process list."""
    return device(total_bytes=TOTAL, used_bytes=used, driver_reserved_bytes=reserved)


@pytest.mark.parametrize(
    ("gpu", "status"),
    [
        (holding(BUDGET + ALLOWANCE), "ok"),
        (holding(BUDGET + ALLOWANCE + 1), "suspect"),
        (holding(BUDGET, ALLOWANCE + 1100 * MIB), "ok"),
        (holding(BUDGET, ALLOWANCE + 1100 * MIB + 1), "suspect"),
        (holding(79_027_398_246 + ALLOWANCE, reserved=None), "ok"),
        (holding(79_027_398_246 + ALLOWANCE + 1, reserved=None), "suspect"),
        (unlisted(BUDGET + ALLOWANCE + DRIVER), "ok"),
        (unlisted(BUDGET + ALLOWANCE + DRIVER + 1), "unknown"),
        (unlisted(79_027_398_246 + ALLOWANCE + GIB, reserved=None), "ok"),
        (unlisted(79_027_398_246 + ALLOWANCE + GIB + 1, reserved=None), "unknown"),
        (holding(39_289_891_062), "ok"),
        (holding(39_289_891_061), "suspect"),
    ],
    ids=[
        "budget, context and graphs",
        "a byte more",
        "two contexts",
        "a byte more than two",
        "driver's share not told",
        "a byte more where it is not told",
        "processes not told",
        "a byte more where they are not",
        "neither told",
        "a byte more where neither is",
        "half of the budget",
        "less than half",
    ],
)
def test_what_a_server_may_take_of_its_fraction(gpu: Device, status: str) -> None:
    """0.92 of what CUDA sees, a context for each process, 2 % of the GPU, and a GiB of a driver that does not tell."""
    assert status == at_idle(gpu).status


@pytest.mark.parametrize(
    ("gpu", "status"),
    [
        (holding(BUDGET + 4 * GIB), "suspect"),
        (unlisted(BUDGET + DRIVER + 4 * GIB), "unknown"),
        (holding(30 * GIB), "suspect"),
    ],
    ids=["beyond", "beyond, of whom is not told", "under"],
)
def test_a_server_that_does_not_fit_its_fraction_is_told_by_how_much(gpu: Device, status: str) -> None:
    """What is used beyond the budget itself, or of it."""
    assert status == at_idle(gpu).status


@pytest.mark.parametrize(("free", "status"), [(300_000_000, "ok"), (299_999_999, "suspect")])
def test_a_transient_needs_its_headroom(free: int, status: str) -> None:
    """300 MB free at idle, whatever the fraction gave."""
    known = replace(SERVER, pools=(pool(),))
    assert status == at_idle(device(used_bytes=24 * GIB - free, processes=(process(100, GIB),)), of=known).status


def test_every_figure_that_was_looked_at_is_shown() -> None:
    """Of the pool and of each GPU of the server, and of no other."""
    first, second = holding(70 * GIB), holding(60 * GIB, GIB, index=1)
    actual = at_idle(first, device(5, processes=(process(8, GIB),)), second)

    assert ("baseline.misconfigured", "ok") == (actual.id, actual.status)
    assert [
        ("capacity", 98_320, "tokens", "engine"),
        ("max_model_len", 32_768, "tokens", "engine"),
        ("max_concurrency_at_max_model_len", 6145 / 2048, "requests", "engine"),
        ("memory_fraction", 0.92, "ratio", "engine"),
        ("gpu_0_free", 10 * GIB - DRIVER, "bytes", "nvml"),
        ("gpu_0_used_by_server", 70 * GIB, "bytes", "nvml"),
        ("gpu_0_used_by_processes", 70 * GIB, "bytes", "nvml"),
        ("gpu_0_budget", BUDGET, "bytes", "computed"),
        ("gpu_0_driver_reserved", DRIVER, "bytes", "nvml"),
        ("gpu_1_free", 19 * GIB - DRIVER, "bytes", "nvml"),
        ("gpu_1_used_by_server", 61 * GIB, "bytes", "nvml"),
        ("gpu_1_used_by_processes", 61 * GIB, "bytes", "nvml"),
        ("gpu_1_budget", BUDGET, "bytes", "computed"),
        ("gpu_1_driver_reserved", DRIVER, "bytes", "nvml"),
    ] == rows(actual)


def test_figures_that_are_not_told_are_shown_as_missing() -> None:
    """A pool sized by hand, or without a fraction, gives no budget; a driver that does not tell has no share."""
    bare = unlisted(70 * GIB, reserved=None)
    by_hand, unfractioned = pool(), pool(pool_bytes=None, memory_fraction_ratio=None)

    for one in (by_hand, unfractioned):
        actual = at_idle(bare, of=replace(SERVER, pools=(one,)))
        assert "ok" == actual.status
        assert {
            "gpu_0_used_by_server": None,
            "gpu_0_used_by_processes": 70 * GIB,
            "gpu_0_budget": None,
            "gpu_0_driver_reserved": None,
        }.items() <= evidence(actual).items()


@pytest.mark.parametrize(("capacity", "status"), [(32_768, "ok"), (32_767, "fault")])
def test_the_longest_request_has_to_fit_the_pool(capacity: int, status: str) -> None:
    """To the token."""
    known = replace(SERVER, pools=(pool(capacity_tokens=capacity),))
    assert status == at_idle(holding(70 * GIB), of=known).status
    assert "ok" == at_idle(holding(70 * GIB), of=replace(known, max_model_len_tokens=None)).status


def test_the_smallest_of_several_pools_decides() -> None:
    """By its capacity, or by its blocks where that is not told: 2,000 of 16 tokens are fewer than 32,768."""
    pools = (
        pool("0", capacity_tokens=40_000),
        pool("1", capacity_tokens=None, usable_blocks=2_000, memory_fraction_ratio=0.5),
        pool("2", capacity_tokens=50_000),
    )

    # A pool that tells no capacity is not held against the longest request
    actual = at_idle(holding(70 * GIB), of=replace(SERVER, pools=pools))
    assert ("ok", 0.5, None) == (
        actual.status,
        evidence(actual)["memory_fraction"],
        evidence(actual)["capacity"],
    )
    larger = replace(pools[1], usable_blocks=2_501, usage_blocks=2_501, total_blocks=2_502)
    other = at_idle(holding(70 * GIB), of=replace(SERVER, pools=(pools[2], larger, pools[0])))
    assert 40_000 == evidence(other)["capacity"]


def test_problems_of_one_weight_are_told_together_and_lesser_ones_are_not() -> None:
    """Two GPUs that do not fit are both ANY_TEXT; beside a pool that cannot serve neither is."""
    under, beyond = holding(30 * GIB), replace(holding(BUDGET + 4 * GIB), uuid="GPU-1", index=1)
    assert "suspect" == at_idle(under, beyond).status
    small = replace(SERVER, pools=(replace(FRACTION, capacity_tokens=100),))
    fault = at_idle(under, beyond, of=small)
    assert "fault" == fault.status
    # what is suspect stands before what is unknown
    both = replace(SERVER, device_uuids=("GPU-0", "GPU-1"), server_pids=None)
    unsure = unlisted(BUDGET + DRIVER + 4 * GIB)
    empty = replace(unlisted(DRIVER + GIB), uuid="GPU-1", index=1)
    assert "suspect" == at_idle(unsure, empty, of=both).status


@pytest.mark.parametrize(
    ("devices", "gap"),
    [
        ((), None),
        ((), NO_NVML),
        ((device(used_bytes=None),), None),
        ((device(), device(1)), None),
        ((device(), device(1), device(2)), NO_NVML),
    ],
    ids=["none read", "no NVML", "memory not told", "two GPUs", "three, and a gap"],
)
def test_why_a_device_is_not_compared_is_told(devices: tuple[Device, ...], gap: Gap | None) -> None:
    """The pool itself is well; GPUs of which nobody knows whose they are leave no figure."""
    actual = at_idle(*devices, gap=gap)
    assert Finding(id="baseline.misconfigured", status="unknown", summary=ANY_TEXT) == actual


@pytest.mark.parametrize("gap", [None, Gap(source="engine", kind="failed", reason="HTTP 500")])
def test_without_a_pool_the_engine_is_asked_why(gap: Gap | None) -> None:
    """Its gap, or that it does not report one."""
