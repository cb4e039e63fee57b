"""baseline.misconfigured at its thresholds and with its figures: the pool, the fraction, the device."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.diagnosis.rules.baseline_misconfigured import judge
from kvdiag.model import Capabilities, Device, Engine, Facts, Finding, Gap, KvPool, Sample, Timeline
from kvdiag.model.capabilities import Unit
from tests.builders.answers import ANY_TEXT, evidence, only, rows
from tests.builders.runs import of_run
from tests.builders.values import GIB, MIB, NO_ANSWER, NO_NVML, device, engine, pool, process, seen
from tests.builders.worlds import World

FRACTION = pool(pool_bytes=None)
"""A pool sized by a fraction of 0.92."""

SERVER = Facts(pools=(FRACTION,), server_pids=(100, 101), max_model_len_tokens=32_768)

TOTAL = 80 * GIB
DRIVER = 464 * MIB
BUDGET = 78_579_782_123
"""0.92 of 85,899,345,920 less 486,539,264 bytes: of 85,412,806,656."""
WHOLE = 79_027_398_246
"""0.92 of 85,899,345,920, where the driver's share is not reported."""

TOO_SMALL = pool(capacity_tokens=16_000, max_concurrency=16_000 / 32_768)
ASLEEP = replace(engine(), asleep=True)


def at_idle(*devices: Device, of: Facts = SERVER, gap: Gap | None = None) -> Finding:
    """The rule's one finding on one sample of some devices and an engine that answers."""
    samples = [Sample(at_seconds=1.0, engines=(engine(),)), Sample(at_seconds=2.0, devices=devices or None)]
    samples.append(Sample(at_seconds=3.0, gaps=() if gap is None else (gap,)))
    return only(judge, Timeline(samples=tuple(samples)), of)


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(pools=(TOO_SMALL,)), "fault", id="pool too small"),
        pytest.param(World(), "ok", id="healthy"),
        pytest.param(World(pools=()), "unknown", id="no pool"),
        pytest.param(World(nvml=NO_NVML), "unknown", id="no device"),
        pytest.param(World(pools=(TOO_SMALL,), nvml=NO_NVML), "fault", id="too small, no device"),
        pytest.param(
            World(pools=(pool("0"), replace(TOO_SMALL, engine="1")), gpus=2), "fault", id="one of two engines"
        ),
    ],
)
def test_runs_get_their_status(world: World, status: str) -> None:
    """The pool's own figures are enough to see that a request can never be served, on whichever engine it lands."""
    assert status == of_run(judge, world).status


def test_server_that_does_not_answer_has_no_pool_to_judge() -> None:
    """The engine's gap is the reason."""
    silent = Timeline(samples=(Sample(at_seconds=1.0, gaps=(NO_ANSWER,)),))
    assert NO_ANSWER.reason == only(judge, silent, Facts()).summary


ALLOWANCE = 1_153_433_600 + 1_717_986_918
"""1100 MiB of a context, and 2 % of 80 GiB."""


def holding(*sizes: int, index: int = 0, reserved: int | None = DRIVER) -> Device:
    """A GPU of 80 GiB on which the server's processes use these bytes, and another process one byte."""
    listed = (*(process(100 + number, size) for number, size in enumerate(sizes)), process(7, 1))
    return device(
        index, total_bytes=TOTAL, used_bytes=sum(sizes) + DRIVER, driver_reserved_bytes=reserved, processes=listed
    )


def small_gpu(gib: int, reserved: int | None, *, listed: bool) -> Device:
    """A GPU whose server uses its budget of 0.9 to the byte, plus 800 MiB of context and graphs."""
    server = int(0.9 * (gib * GIB - DRIVER)) + 800 * MIB
    processes = (process(100, server),) if listed else None
    used = server + DRIVER
    return device(total_bytes=gib * GIB, used_bytes=used, driver_reserved_bytes=reserved, processes=processes)


def unlisted(used: int, *, reserved: int | None = DRIVER) -> Device:
    """The same without a process list."""
    return device(total_bytes=TOTAL, used_bytes=used, driver_reserved_bytes=reserved)


@pytest.mark.parametrize(
    ("gpu", "status"),
    [
        pytest.param(holding(BUDGET + ALLOWANCE), "ok", id="budget, context and graphs"),
        pytest.param(holding(BUDGET + ALLOWANCE + 1), "suspect", id="a byte more"),
        pytest.param(holding(BUDGET, ALLOWANCE + 1100 * MIB), "ok", id="two contexts"),
        pytest.param(holding(BUDGET, ALLOWANCE + 1100 * MIB + 1), "suspect", id="a byte more than two"),
        pytest.param(holding(WHOLE + ALLOWANCE, reserved=None), "ok", id="driver's share not reported"),
        pytest.param(holding(WHOLE + ALLOWANCE + 1, reserved=None), "suspect", id="a byte more without that share"),
        pytest.param(unlisted(BUDGET + ALLOWANCE + DRIVER), "ok", id="processes not listed"),
        pytest.param(unlisted(BUDGET + ALLOWANCE + DRIVER + 1), "unknown", id="a byte more without processes"),
        pytest.param(unlisted(WHOLE + ALLOWANCE + GIB, reserved=None), "ok", id="neither reported"),
        pytest.param(unlisted(WHOLE + ALLOWANCE + GIB + 1, reserved=None), "unknown", id="a byte more without either"),
        pytest.param(holding(math.ceil(0.8 * BUDGET)), "ok", id="four fifths of the budget"),
        pytest.param(holding(math.ceil(0.8 * BUDGET) - 1), "suspect", id="a byte less than that"),
    ],
)
def test_what_a_server_may_take_of_its_fraction(gpu: Device, status: str) -> None:
    """0.92 of what CUDA sees, a context for each process, 2 % of the GPU, and a GiB of a silent driver."""
    assert status == at_idle(gpu).status


@pytest.mark.parametrize(
    ("later", "status"),
    [
        pytest.param((holding(BUDGET // 2),), "suspect", id="never more than half"),
        pytest.param((holding(BUDGET),), "ok", id="a pool that grows"),
        pytest.param((holding(BUDGET // 2), holding(BUDGET, index=1)), "ok", id="another rank is full"),
    ],
)
def test_a_budget_counts_where_and_when_it_is_used_most(later: tuple[Device, ...], status: str) -> None:
    """Half of the budget at the start is no evidence where the pool grows later, or another rank is fuller."""
    first = tuple(holding(BUDGET // 2, index=place) for place in range(len(later)))
    samples = (
        Sample(at_seconds=0.0, engines=(engine(),)),
        *(Sample(at_seconds=at, devices=devices) for at, devices in ((1.0, first), (1000.0, later))),
    )
    assert status == only(judge, Timeline(samples=samples), SERVER).status


QUARTER, NINE_TENTHS, BY_HAND = (
    replace(SERVER, pools=(pool(**changes),))  # type: ignore[arg-type]
    for changes in (
        {"pool_bytes": None, "memory_fraction_ratio": 0.25},
        {"pool_bytes": None, "memory_fraction_ratio": 0.9},
        {},
    )
)
UNIDENTIFIED = replace(SERVER, server_pids=None)
ASSIGNED = replace(SERVER, device_uuids=("GPU-0", "GPU-1"), server_pids=None)
RANK = device(used_bytes=22 * GIB, processes=(process(100, 21 * GIB),))
FULL, EMPTY, DARK = (
    replace(device(index, used_bytes=used), processes=())
    for index, used in ((0, 24 * GIB - 100 * MIB), (1, DRIVER), (2, None))
)
CROWDED = device(used_bytes=18 * GIB + DRIVER, processes=(process(100, 6 * GIB), process(7, 12 * GIB)))


@pytest.mark.parametrize(
    ("devices", "of", "status"),
    [
        pytest.param((device(used_bytes=24 * GIB - 300_000_000),), BY_HAND, "ok", id="300 MB free"),
        pytest.param((device(used_bytes=24 * GIB - 299_999_999),), BY_HAND, "suspect", id="a byte less"),
        pytest.param((CROWDED,), QUARTER, "ok", id="another tenant on the device"),
        pytest.param((device(used_bytes=9 * GIB, processes=(process(100, 8 * GIB),)),), BY_HAND, "ok", id="by hand"),
        pytest.param((RANK, EMPTY, replace(FULL, uuid="GPU-2")), SERVER, "ok", id="other tenants' GPUs"),
        pytest.param((device(used_bytes=22 * GIB, processes=()), EMPTY), SERVER, "unknown", id="two of unknown owner"),
        pytest.param((device(used_bytes=22 * GIB), replace(FULL, uuid="GPU-1")), ASSIGNED, "suspect", id="assigned"),
        pytest.param((FULL,), UNIDENTIFIED, "suspect", id="one GPU of unknown processes"),
        pytest.param((replace(DARK, processes=(process(100, GIB),)),), SERVER, "unknown", id="memory not reported"),
        pytest.param((RANK, replace(DARK, processes=(process(101, 0),))), SERVER, "unknown", id="one of two dark"),
        pytest.param(
            (replace(FULL, processes=(process(100, GIB),)), replace(DARK, processes=(process(101, 0),))),
            SERVER,
            "suspect",
            id="one full, one dark",
        ),
        *(
            pytest.param(
                (small_gpu(gib, reserved, listed=listed),), NINE_TENTHS, "ok", id=f"{gib} GiB {reserved} {listed}"
            )
            for gib in (16, 24)
            for reserved in (DRIVER, None)
            for listed in (True, False)
        ),
    ],
)
def test_devices_get_their_status(devices: tuple[Device, ...], of: Facts, status: str) -> None:
    """300 MB must be free at idle under any memory fraction; only GPUs known to be the server's count. The driver's
    share, a context and graphs on top of the budget are not excess on a small GPU either.
    """
    assert status == at_idle(*devices, of=of).status


@pytest.mark.parametrize(
    ("samples", "status"),
    [
        pytest.param(((None, 2), (engine(), None), (None, 21)), "ok", id="before the engine answers"),
        pytest.param(((ASLEEP, 2), (replace(ASLEEP, asleep=False), 21)), "ok", id="asleep, then awake"),
        pytest.param(((ASLEEP, 2),), "unknown", id="asleep"),
    ],
)
def test_a_gpu_is_judged_as_it_was_when_the_engine_answered_awake(
    samples: tuple[tuple[Engine | None, int | None], ...], status: str
) -> None:
    """Before that the weights are being loaded; asleep the server has given pool and weights away."""
    timeline = Timeline(
        samples=tuple(
            Sample(
                at_seconds=float(at),
                engines=None if page is None else (page,),
                devices=None if gib is None else (device(used_bytes=gib * GIB),),
            )
            for at, (page, gib) in enumerate(samples)
        )
    )
    assert status == only(judge, timeline, Facts(pools=(FRACTION,))).status


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


def test_only_what_was_compared_is_said_to_match() -> None:
    """The memory fraction of an engine that has none is not among it."""
    for fraction in (0.9, None):
        known = replace(SERVER, pools=(pool(memory_fraction_ratio=fraction),))
        found = at_idle(device(processes=(process(100, 20 * GIB),)), of=known)
        assert ("ok", fraction is not None) == (found.status, "memory fraction" in found.summary)


def test_figures_that_are_not_reported_are_shown_as_missing() -> None:
    """A pool sized by hand, or without a fraction, has no budget; a driver that reports no share has `None`."""
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
    """The smallest pool counts, by capacity or else by blocks: 2,000 of 16 tokens are fewer than 32,768."""
    pools = (
        pool("0", capacity_tokens=40_000),
        pool("1", capacity_tokens=None, usable_blocks=2_000, memory_fraction_ratio=0.5),
        pool("2", capacity_tokens=50_000),
    )

    # A pool that reports no capacity is not compared with the longest request
    actual = at_idle(holding(70 * GIB), of=replace(SERVER, pools=pools))
    assert ("ok", 0.5, None) == (
        actual.status,
        evidence(actual)["memory_fraction"],
        evidence(actual)["capacity"],
    )
    larger = replace(pools[1], usable_blocks=2_501, usage_blocks=2_501, total_blocks=2_502)
    other = at_idle(holding(70 * GIB), of=replace(SERVER, pools=(pools[2], larger, pools[0])))
    assert 40_000 == evidence(other)["capacity"]


def test_problems_of_one_weight_are_reported_together_and_lesser_ones_are_not() -> None:
    """The worst status wins: a pool that is too small, then GPUs that do not fit, then unknown ones."""
    under, beyond = holding(30 * GIB), replace(holding(BUDGET + 4 * GIB), uuid="GPU-1", index=1)
    assert "suspect" == at_idle(under, beyond).status
    small = replace(SERVER, pools=(replace(FRACTION, capacity_tokens=100),))
    assert "fault" == at_idle(under, beyond, of=small).status
    # what is suspect stands before what is unknown
    both = replace(SERVER, device_uuids=("GPU-0", "GPU-1"), server_pids=None)
    unsure = unlisted(BUDGET + DRIVER + 4 * GIB)
    full = replace(FULL, uuid="GPU-1", index=1, processes=None)
    assert "suspect" == at_idle(unsure, full, of=both).status


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
def test_why_a_device_is_not_compared_is_reported(devices: tuple[Device, ...], gap: Gap | None) -> None:
    """Without memory of GPUs known to be the server's, the finding is unknown and has no figure."""
    actual = at_idle(*devices, gap=gap)
    assert Finding(id="baseline.misconfigured", status="unknown", summary=ANY_TEXT) == actual


def llama(reported: KvPool) -> Facts:
    """A server of Llama 3.1 8B with this pool, on one rank."""
    config = Path(__file__).parents[2] / "kv" / "data" / "configs" / "Llama-3.1-8B.json"
    return Facts(
        pools=(reported,),
        server_pids=(100,),
        max_model_len_tokens=32768,
        model_config=config.read_text(encoding="utf-8"),
        tensor_parallel=1,
        pipeline_parallel=1,
    )


def judged(reported: KvPool) -> Finding:
    """The rule's one finding on an idle device of 80 GiB, 64 of them used."""
    timeline = seen(devices=(device(total_bytes=80 * GIB, used_bytes=64 * GIB, processes=(process(100, 64 * GIB),)),))
    return only(judge, timeline, llama(reported))


@pytest.mark.parametrize(
    ("reported", "status"),
    [
        pytest.param(pool(usable_blocks=6_144, pool_bytes=6_145 * 2 * MIB), "ok", id="exact"),
        pytest.param(pool(usable_blocks=6_050, pool_bytes=6_145 * 2 * MIB), "ok", id="2 % less"),
        pytest.param(pool(usable_blocks=5_529, pool_bytes=6_145 * 2 * MIB), "suspect", id="a tenth less"),
        pytest.param(pool(max_concurrency=6_145 / 3_072, pool_bytes=None), "suspect", id="larger requests"),
    ],
)
def test_a_pool_is_compared_with_what_its_config_gives(reported: KvPool, status: str) -> None:
    """A tenth fewer blocks, or requests of half as much again, are not what the config gives; 2 % are rounding."""
    assert status == judged(reported).status


@pytest.mark.parametrize("unit", ["block", "page"])
def test_a_pool_that_its_config_does_not_give_is_counted_in_the_engines_unit(unit: Unit) -> None:
    """SGLang has pages."""
    few = replace(llama(pool(usable_blocks=5_529, pool_bytes=6_145 * 2 * MIB)), capabilities=Capabilities(unit=unit))
    summary = only(judge, seen(), few).summary
    assert [unit] == [one for one in ("block", "page") if one in summary]


@pytest.mark.parametrize(
    ("longest", "fits", "held"), [(65_536, True, False), (131_072, False, True), (None, False, False)]
)
@pytest.mark.parametrize("devices", [(), (holding(BUDGET),)], ids=["no device", "on its device"])
def test_a_longer_request_than_the_pool_holds_is_not_said_to_fit(
    longest: int | None, fits: bool, held: bool, devices: tuple[Device, ...]
) -> None:
    """Where the engine refuses such a request itself (SGLang) it reports no capacity, and the pool is no fault."""
    refusing = replace(FRACTION, capacity_tokens=None)
    found = at_idle(*devices, of=replace(SERVER, pools=(refusing,), max_model_len_tokens=longest))
    assert ("ok" if devices else "unknown") == found.status
    assert (fits and not devices, held) == ("the longest request fits" in found.summary, "131,072" in found.summary)
