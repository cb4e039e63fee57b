"""baseline.duplicate_model: memory beyond the pool and one copy of the weights, with a pool and without one."""

from dataclasses import replace
from functools import partial

import pytest

from kvdiag.diagnosis.rules.baseline_duplicate_model import judge
from kvdiag.model import Engine, Facts, Finding, Sample, Timeline
from tests.builders.answers import evidence, only, rows
from tests.builders.runs import of_run, run
from tests.builders.values import GIB, KIB, MIB, NO_NVML, device, engine, pool, process
from tests.builders.worlds import World, facts

verdict = partial(of_run, judge)


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
    assert "2 times" in actual.summary


def test_a_copy_that_was_released_is_none_any_more() -> None:
    """The newest sample counts if the server uses less of the device than at first."""
    world = World(overhead_bytes=7 * GIB, device_bytes=32 * GIB)
    whole = run(world)
    released = tuple(
        replace(
            one,
            processes=tuple(replace(each, used_bytes=(each.used_bytes or 0) - 6 * GIB) for each in one.processes),
        )
        if one.processes
        else one
        for one in next(sample.devices for sample in reversed(whole.samples) if sample.devices)
    )
    later = Sample(at_seconds=whole.samples[-1].at_seconds + 1.0, devices=released)
    found = only(judge, Timeline(samples=(*whole.samples, later)), facts(world))
    assert ("fault", "ok") == (verdict(world).status, found.status)


@pytest.mark.parametrize(("copies", "status"), [(4, "suspect"), (5, "unknown"), (13_152, "unknown")])
def test_more_copies_than_anything_loads_are_something_else(copies: int, status: str) -> None:
    """Of weights of six GiB four more are suspect; five, or 13,152, are not weights."""
    weights = 6 * GIB if copies < 10 else 6 * MIB
    world = World(weights_bytes=weights, overhead_bytes=copies * weights + GIB, device_bytes=160 * GIB)
    assert status == verdict(world).status


def small(weights: int) -> World:
    """A small model with 2.5 GiB of ordinary overhead on a device of 80 GiB."""
    return World(weights_bytes=weights, overhead_bytes=5 * GIB // 2, device_bytes=80 * GIB)


BOTH = (pool("0"), pool("1"))


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(), "ok", id="one copy"),
        pytest.param(World(gpus=2), "ok", id="ranks that share the weights"),
        pytest.param(World(pools=BOTH, gpus=1, device_bytes=80 * GIB), "ok", id="two engines on one GPU"),
        pytest.param(World(pools=BOTH, gpus=2, device_bytes=80 * GIB), "ok", id="two engines on two GPUs"),
        pytest.param(
            World(weights_bytes=2 * GIB, overhead_bytes=6 * GIB), "suspect", id="beyond a small one's overhead"
        ),
        pytest.param(World(nvml=NO_NVML), "unknown", id="no NVML"),
        pytest.param(World(weights_bytes=None), "unknown", id="no weights"),
        pytest.param(World(pools=(pool(pool_bytes=None),)), "unknown", id="no pool bytes"),
        pytest.param(World(pools=()), "unknown", id="no pool"),
        pytest.param(World(server_seen=False), "unknown", id="no server"),
        pytest.param(World(server_bytes_reported=False), "unknown", id="no server bytes"),
        pytest.param(World(processes_reported=False), "unknown", id="no processes"),
        pytest.param(World(weights_bytes=0), "ok", id="weights of 0 bytes"),
        *(
            pytest.param(small(weights), status, id=f"{weights} bytes")
            for weights, status in (
                (KIB, "unknown"),
                (100 * MIB, "unknown"),
                (512 * MIB, "unknown"),
                (GIB, "unknown"),
                (2 * GIB, "unknown"),
            )
        ),
    ],
)
def test_runs_get_their_status(world: World, status: str) -> None:
    """Weights, pool and the server's own bytes are all needed; a small model's overhead is not called a copy."""
    assert status == verdict(world).status


SMALL = 2 * MIB * 1001
"""A pool of a thousand blocks and the null block."""

ALLOWANCE = 1100 * MIB + int(0.08 * 24 * GIB)
"""What one process on a GPU of 24 GiB may use on top of pool and weights."""


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
        Sample(at_seconds=4.0, devices=(device(0, processes=(process(100, 23 * GIB),)),)),
    )
    return only(judge, Timeline(samples=samples), known)


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

    # The unexplained bytes are always the same; processes and GPUs of other tenants are not counted
    assert {
        "server_bytes": pools * SMALL + weights * 6 * GIB + 4 * GIB,
        "pool_bytes": pools * SMALL,
        "weights_bytes": weights * 6 * GIB,
        "unexplained": 4 * GIB,
        "allowance": allowance,
    } == evidence(actual)
    assert "ok" == actual.status


def without_pool(*held_gib: float, engines: tuple[Engine, ...] | None = None, weights_bytes: int = 12 * GIB) -> Finding:
    """The rule's one finding on a server of 12 GiB of weights without a pool, by its device memory in each sample."""
    samples = tuple(
        Sample(
            at_seconds=15.0 * number,
            engines=None if number else engines,
            devices=(device(total_bytes=80 * GIB, processes=(process(100, int(held * GIB)),)),),
        )
        for number, held in enumerate(held_gib)
    )
    known = Facts(server_pids=(100,), weights_bytes=weights_bytes)
    return only(judge, Timeline(samples=samples), known)


def test_a_step_of_the_weights_size_over_the_weights_is_a_copy() -> None:
    """A server without a pool that rises from one copy of its weights to two, at one blow, holds them twice."""
    actual = without_pool(0.5, 0.5, 12.5, 12.5, 24.6, 24.6, 24.6)
    assert "suspect" == actual.status
    assert 1.008 == evidence(actual)["step_to_weights"]
    # Levels may differ by 3 % of the weights, to the byte
    assert "suspect" == without_pool(12.125, 12.5, 25.0, 25.375, weights_bytes=25 * GIB // 2).status


@pytest.mark.parametrize(
    ("held", "page", "status"),
    [
        ((12.5, 12.5, 18.0, 18.0), None, "ok"),
        ((12.5, 12.5, 30.0, 30.0), None, "unknown"),
        ((12.5, 14.5, 16.5, 18.5, 20.5, 22.5, 24.5, 24.5), None, "unknown"),
        ((12.5, 24.6, 24.6, 24.6), None, "unknown"),
        ((12.5, 12.5, 24.6, 12.5), None, "unknown"),
        ((12.5, 12.5, 18.0, 24.6, 24.6), None, "unknown"),
        ((12.5, 12.5, 24.6, 24.6, 24.6), (engine(),), "unknown"),
    ],
    ids=["less than twice", "another size", "a slope", "no level", "for a moment", "two steps", "with a pool"],
)
def test_what_is_no_clear_copy_without_a_pool(
    held: tuple[float, ...], page: tuple[Engine, ...] | None, status: str
) -> None:
    """Less than two copies is one; more may be a cache of any size, and is left open with what would decide."""
    assert status == without_pool(*held, engines=page).status


def test_the_figures_of_a_copy_without_a_pool() -> None:
    """The evidence has the size before the step, the step, the maximum and the newest size of the server."""
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
    assert "12.3 GiB more" in actual.summary


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
        ((12.0 + 1100 / 1024, 12.0 + 1100 / 1024, 25.0, 25.0), "suspect"),
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


def test_a_server_without_a_pool_on_two_gpus_is_taken_together() -> None:
    """Half of the weights on each of two GPUs are one copy; a sample without process lists is skipped."""
    # 6.25 GiB on each of two GPUs, then 12.3 on each, with unlisted samples in between
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
    actual = only(judge, Timeline(samples=samples), known)

    assert ("suspect", int(12.5 * GIB)) == (actual.status, evidence(actual)["before_step"])


def test_every_gpu_of_the_server_has_to_tell_its_bytes() -> None:
    """What one of two does not report could be a copy, or none."""
    devices = (device(processes=(process(100, 20 * GIB),)), device(1, processes=(process(101, None),)))
    known = Facts(pools=(pool(),), server_pids=(100, 101), weights_bytes=GIB)
    actual = only(judge, Timeline(samples=(Sample(at_seconds=1.0, devices=devices),)), known)
    assert ("unknown", ()) == (actual.status, actual.evidence)


@pytest.mark.parametrize("known", [Facts(weights_bytes=12 * GIB), Facts(server_pids=(100,), weights_bytes=0)])
def test_without_a_pool_processes_and_weights_are_needed(known: Facts) -> None:
    """Without the server's processes, or the size of its weights, the verdict is unknown."""
    timeline = Timeline(samples=(Sample(at_seconds=1.0, devices=(device(processes=(process(100, 20 * GIB),)),)),))
    assert "unknown" == only(judge, timeline, known).status
