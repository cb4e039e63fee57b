"""baseline.duplicate_model: memory beyond the pool and one copy of the weights, with a pool and without one."""

from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.baseline_duplicate_model import judge
from kvdiag.model import Engine, Facts, Finding, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence, rows
from tests.builders.runs import run
from tests.builders.values import GIB, KIB, MIB, NO_NVML, device, engine, pool, process
from tests.builders.worlds import World, facts


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_weights_held_twice_are_a_fault() -> None:
    """Six GiB beyond pool and weights of six GiB, on top of the usual overhead, are a second copy."""
    # A server that holds 6 GiB of weights twice
    world = World(overhead_bytes=7 * GIB, device_bytes=32 * GIB)
    actual = verdict(world)
    pool_bytes = 6145 * 2 * MIB
    assert ("baseline.duplicate_model", "fault") == (actual.id, actual.status)
    assert [
        ("server_bytes", pool_bytes + 13 * GIB, "bytes", "nvml"),
        ("pool_bytes", pool_bytes, "bytes", "engine"),
        ("weights_bytes", 6 * GIB, "bytes", "host: checkpoint files"),
        ("unexplained", 7 * GIB, "bytes", "computed"),
        ("allowance", 1100 * MIB + int(0.08 * 32 * GIB), "bytes", "computed"),
    ] == rows(actual)


def test_one_copy_is_ok() -> None:
    """Pool, one copy and a GiB of overhead explain a healthy server."""
    actual = verdict(World())
    assert ("ok", 1 * GIB) == (actual.status, evidence(actual)["unexplained"])


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(nvml=NO_NVML), NO_NVML.reason),
        (World(weights_bytes=None), ANY_TEXT),
        (
            World(pools=(pool(pool_bytes=None),)),
            ANY_TEXT,
        ),
        (World(server_seen=False), ANY_TEXT),
        (World(server_bytes_told=False), ANY_TEXT),
        (World(processes_told=False), ANY_TEXT),
    ],
    ids=["no NVML", "weights", "pool's bytes", "server", "server's bytes", "processes"],
)
def test_without_one_of_its_figures_it_is_unknown(world: World, reason: str) -> None:
    """Weights, pool and the server's own bytes are all needed; the finding names the one that is missing."""
    actual = verdict(world)
    assert Finding(id="baseline.duplicate_model", status="unknown", summary=ANY_TEXT) == actual


@pytest.mark.parametrize("weights", [KIB, 100 * MIB, 512 * MIB, 1 * GIB, 2 * GIB])
def test_overhead_of_a_small_model_is_not_a_second_copy(weights: int) -> None:
    """Context, workspaces and graphs of a healthy small model weigh more than its weights: that accuses nobody."""
    # A small model with 2.5 GiB of ordinary overhead on an 80-GiB device
    world = World(weights_bytes=weights, overhead_bytes=5 * GIB // 2, device_bytes=80 * GIB)
    assert verdict(world).status in {"ok", "unknown"}


def test_a_second_copy_beyond_all_overhead_is_found_for_small_models_too() -> None:
    """More than the largest ordinary overhead is suspect even where the weights are smaller than it."""
    # Weights of 2 GiB on a device where 3 GiB of overhead are usual, and 6 GiB too much
    world = World(weights_bytes=2 * GIB, overhead_bytes=6 * GIB)
    assert "suspect" == verdict(world).status


def test_ranks_that_share_the_weights_are_no_copies() -> None:
    """Tensor parallel: each of two ranks has a pool of its own and half of the weights."""
    actual = verdict(World(gpus=2))
    assert ("ok", 2 * GIB) == (actual.status, evidence(actual)["unexplained"])


@pytest.mark.parametrize("gpus", [1, 2])
def test_engines_with_a_copy_each_are_no_duplicates(gpus: int) -> None:
    """Data parallel: two engines hold the weights once each, be it on one GPU or on two."""
    actual = verdict(World(pools=(pool("0"), pool("1")), gpus=gpus, device_bytes=80 * GIB))
    assert ("ok", 12 * GIB) == (actual.status, evidence(actual)["weights_bytes"])


def test_no_weights_at_all_divide_nothing() -> None:
    """A folder of empty files gives weights of zero bytes, which is no ground for a verdict against the server."""
    # Weights of 0 bytes
    actual = verdict(World(weights_bytes=0))
    assert actual.status in {"ok", "unknown"}


def test_an_engine_that_does_not_report_its_pool_is_unknown() -> None:
    """Nineteen GiB beside six of weights are a pool, most likely, or copies."""
    actual = verdict(World(pools=()))
    assert "unknown" == actual.status


SMALL = 2 * MIB * 1001
"""A pool of a thousand blocks and the null block."""

ALLOWANCE = 1100 * MIB + int(0.08 * 24 * GIB)
"""What one process on a GPU of 24 GiB may take beside pool and weights."""


def idle_server(beyond: int, weights: int, *, engines: int = 1, ranks: int = 1, pids: int = 1) -> Finding:
    """The rule's one finding on engines of some ranks, a GPU each, that hold so much beyond pool and weights."""
    gpus = engines * ranks
    bytes_each = SMALL + (beyond + engines * weights) // gpus
    devices = tuple(
        device(
            gpu,
            processes=(
                process(100 + gpu, bytes_each),
                *(process(200 + 8 * gpu + more, 0) for more in range(pids - 1)),
                process(9, 3 * GIB),
            ),
        )
        for gpu in range(gpus)
    )
    known = Facts(
        pools=tuple(pool(str(number), usable_blocks=1000, pool_bytes=SMALL) for number in range(engines)),
        server_pids=tuple(range(100, 300)),
        weights_bytes=weights,
    )
    samples = (
        Sample(at_seconds=1.0, engines=(engine(),)),
        Sample(at_seconds=2.0, devices=(device(), device(1), device(2), device(3))),
        Sample(at_seconds=3.0, devices=(*devices, device(7, processes=(process(8, 20 * GIB),)))),
        Sample(at_seconds=4.0, devices=(device(0, processes=(process(100, 1),)),)),
    )
    (found,) = judge(Timeline(samples=samples), known, DEFAULT_LIMITS)
    return found


@pytest.mark.parametrize(
    ("weights", "beyond", "status"),
    [
        (6 * GIB, 6 * GIB + 250 * MIB - 1, "ok"),
        (6 * GIB, 6 * GIB + 250 * MIB, "fault"),
        (1 * GIB, ALLOWANCE, "unknown"),
        (1 * GIB, ALLOWANCE + 1, "suspect"),
        (1 * GIB, 1 * GIB + 250 * MIB - 1, "ok"),
        (1 * GIB, 1 * GIB + 250 * MIB, "unknown"),
        (4_822_526_853, 5 * GIB, "fault"),
        (4_822_526_852, 5 * GIB, "suspect"),
    ],
    ids=[
        "less than a copy and a context",
        "a copy and the smallest context",
        "as much as overhead may be",
        "a byte more than overhead may be",
        "a small model's overhead",
        "a small model's overhead or a copy",
        "weights of one and a half times the overhead",
        "a byte less",
    ],
)
def test_a_copy_is_weighed_against_what_a_healthy_server_takes(weights: int, beyond: int, status: str) -> None:
    """Beyond pool and weights: 250 MiB are any context's, 3,215,017,902 bytes the most that overhead is usual for."""
    # A hand calculation: 1100 MiB of context and 8 % of 24 GiB, of which 1.5 times are 4,822,526,853
    assert 3_215_017_902 == ALLOWANCE
    assert status == idle_server(beyond, weights).status


def test_every_further_copy_is_counted() -> None:
    """Two copies too many beside 250 MiB: the weights are there three times."""
    idle_server(12 * GIB + 250 * MIB, 6 * GIB)


def test_overhead_that_may_be_a_copy_is_told_with_both() -> None:
    """A small model's context and graphs, or its weights once more: nobody can tell, and both figures are there."""
    actual = idle_server(2 * GIB, 1 * GIB)
    assert 2 * GIB == evidence(actual)["unexplained"]


@pytest.mark.parametrize(
    ("engines", "ranks", "pids", "pools", "weights", "allowance"),
    [
        (1, 1, 1, 1, 1, 1100 * MIB + int(0.08 * 24 * GIB)),
        (1, 1, 3, 1, 1, 3 * 1100 * MIB + int(0.08 * 24 * GIB)),
        (1, 2, 1, 2, 1, 2 * (1100 * MIB + int(0.08 * 24 * GIB))),
        (2, 2, 1, 4, 2, 4 * (1100 * MIB + int(0.08 * 24 * GIB))),
    ],
    ids=["one process", "three processes", "two ranks", "two engines of two ranks"],
)
def test_pools_weights_and_contexts_are_counted_by_engine_rank_and_process(
    engines: int, ranks: int, pids: int, pools: int, weights: int, allowance: int
) -> None:
    """Each engine has the weights once, each rank a pool, each process a context, each GPU its activations."""
    actual = idle_server(4 * GIB, 6 * GIB, engines=engines, ranks=ranks, pids=pids)

    # What is left is the same, and no process or GPU of somebody else's is counted
    assert {
        "server_bytes": pools * SMALL + weights * 6 * GIB + 4 * GIB,
        "pool_bytes": pools * SMALL,
        "weights_bytes": weights * 6 * GIB,
        "unexplained": 4 * GIB,
        "allowance": allowance,
    } == evidence(actual)
    assert "ok" == actual.status


def test_a_timeline_without_devices_says_so() -> None:
    """No GPU was read, and nobody said why."""
    (actual,) = judge(Timeline(samples=(Sample(at_seconds=1.0, engines=(engine(),)),)), Facts(), DEFAULT_LIMITS)
    assert "unknown" == actual.status


def without_pool(*held_gib: float, engines: tuple[Engine, ...] | None = None) -> Finding:
    """The rule's one finding on a server of 12 GiB of weights without a pool, by what it holds in each reading."""
    samples = tuple(
        Sample(
            at_seconds=15.0 * number,
            engines=engines,
            devices=(device(total_bytes=80 * GIB, processes=(process(100, int(held * GIB)),)),),
        )
        for number, held in enumerate(held_gib)
    )
    known = Facts(server_pids=(100,), weights_bytes=12 * GIB)
    (found,) = judge(Timeline(samples=samples), known, DEFAULT_LIMITS)
    return found


def test_a_step_of_the_weights_size_over_the_weights_is_a_copy() -> None:
    """A server without a pool that rises from one copy of its weights to two, at one blow, holds them twice."""
    actual = without_pool(0.5, 0.5, 12.5, 12.5, 24.6, 24.6, 24.6)
    assert "suspect" == actual.status
    assert 1.008 == evidence(actual)["step_to_weights"]


@pytest.mark.parametrize(
    ("held", "page", "status"),
    [
        ((12.5, 12.5, 18.0, 18.0), None, "ok"),
        ((12.5, 12.5, 30.0, 30.0), None, "unknown"),
        ((12.5, 14.5, 16.5, 18.5, 20.5, 22.5, 24.5, 24.5), None, "unknown"),
        ((12.5, 24.6, 24.6, 24.6), None, "unknown"),
        ((12.5, 12.5, 24.6, 12.5), None, "unknown"),
        ((12.5, 12.5, 24.6, 24.6, 24.6), (engine(),), "unknown"),
    ],
    ids=["less than twice", "another size", "a slope", "no level before", "for a moment", "an engine with a pool"],
)
def test_what_is_no_clear_copy_without_a_pool(
    held: tuple[float, ...], page: tuple[Engine, ...] | None, status: str
) -> None:
    """Less than two copies is one; more may be a cache of any size, and is left open with what would decide."""
    assert status == without_pool(*held, engines=page).status


def test_the_figures_of_a_copy_without_a_pool() -> None:
    """Before, after and the step between them stand beside the most and the newest that the server held."""
    # 12 GiB of weights, a copy of 12.3 GiB at one blow, and a GiB given back at the end
    actual = without_pool(12.5, 12.5, 24.8, 24.8, 23.8)

    # 24.8 / 12 = 2.07, 12.3 / 12 = 1.025
    figures = {
        ("server_bytes", int(23.8 * GIB), "bytes", "nvml"),
        ("max_server_bytes", int(24.8 * GIB), "bytes", "nvml"),
        ("weights_bytes", 12 * GIB, "bytes", "host: checkpoint files"),
        ("ratio_to_weights", 2.07, "times", "computed"),
        ("before_step", int(12.5 * GIB), "bytes", "nvml"),
        ("step", int(24.8 * GIB) - int(12.5 * GIB), "bytes", "nvml"),
        ("step_to_weights", 1.025, "ratio", "computed"),
    }
    assert figures == {(one.name, one.value, one.unit, one.source) for one in actual.evidence}


@pytest.mark.parametrize(
    ("held", "status"),
    [
        ((23.9, 23.9), "ok"),
        ((24.0, 24.0), "unknown"),
        ((12.15, 12.5, 24.5, 24.5), "suspect"),
        ((12.13, 12.5, 24.5, 24.5), "unknown"),
        ((12.5, 12.5, 24.5, 24.86), "suspect"),
        ((12.5, 12.5, 24.5, 24.87), "unknown"),
        ((12.0, 12.0, 24.0, 24.0), "suspect"),
        ((11.99, 11.99, 24.0, 24.0), "unknown"),
        ((13.07, 13.07, 25.0, 25.0), "suspect"),
        ((13.08, 13.08, 25.0, 25.0), "unknown"),
        ((12.5, 12.5, 24.15, 24.15), "suspect"),
        ((12.5, 12.5, 24.13, 24.13), "unknown"),
        ((12.5, 12.5, 24.86, 24.86), "suspect"),
        ((12.5, 12.5, 24.87, 24.87), "unknown"),
        ((12.5, 12.5, 24.5), "unknown"),
    ],
)
def test_what_counts_as_a_step_by_one_copy(held: tuple[float, ...], status: str) -> None:
    """Weights of 12 GiB: levels and step to 0.36 GiB (3 %), from one copy and at most 1.07 GiB of context."""
    assert status == without_pool(*held).status


def test_a_cache_or_a_copy_is_told_with_its_size() -> None:
    """Without a step it may be either; how many times the weights would fit in tells how likely a copy is."""


def test_less_than_two_copies_is_no_duplicate() -> None:
    """Eighteen GiB beside weights of twelve hold no second copy, whatever they are."""
    assert "fault" != without_pool(12.5, 18.0, 17.0).status


def test_a_server_without_a_pool_on_two_gpus_is_taken_together() -> None:
    """Half of the weights on each of two GPUs are one copy; a reading that lists no processes is passed over."""
    # 6.25 GiB on each of two GPUs, then 12.3 on each, with unlisted readings in between
    samples = tuple(
        Sample(
            at_seconds=float(number),
            devices=tuple(
                device(gpu, processes=None if held is None else (process(100 + gpu, int(held * GIB)),))
                for gpu in range(2)
            ),
        )
        for number, held in enumerate((6.25, 6.25, None, 12.3, None, 12.3))
    )
    known = Facts(server_pids=(100, 101), weights_bytes=12 * GIB)
    (actual,) = judge(Timeline(samples=samples), known, DEFAULT_LIMITS)

    assert ("suspect", int(12.5 * GIB)) == (actual.status, evidence(actual)["before_step"])


@pytest.mark.parametrize("known", [Facts(weights_bytes=12 * GIB), Facts(server_pids=(100,), weights_bytes=0)])
def test_without_a_pool_processes_and_weights_are_needed(known: Facts) -> None:
    """Neither whose bytes they are nor of what they could be a copy can be told."""
    timeline = Timeline(samples=(Sample(at_seconds=1.0, devices=(device(processes=(process(100, 20 * GIB),)),)),))
    (actual,) = judge(timeline, known, DEFAULT_LIMITS)
    assert "unknown" == actual.status
