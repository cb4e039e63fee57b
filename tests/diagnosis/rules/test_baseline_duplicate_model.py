from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.baseline_duplicate_model import judge
from kvdiag.model import Engine, Evidence, Facts, Finding, Sample, Timeline
from tests.builders import GIB, KIB, MIB, NO_NVML, World, device, engine, evidence, facts, pool, process, run


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_weights_held_twice_are_a_fault() -> None:
    """Six GiB beyond pool and weights of six GiB, on top of the usual overhead, are a second copy."""
    # GIVEN a server that holds 6 GiB of weights twice
    world = World(overhead_bytes=7 * GIB, device_bytes=32 * GIB)
    # WHEN the run is judged
    actual = verdict(world)
    # THEN
    pool_bytes = 6145 * 2 * MIB
    expected = Finding(
        id="baseline.duplicate_model",
        status="fault",
        summary="the idle server holds 7.00 GiB beyond its pool and one copy of its weights (6.00 GiB): "
        "the weights are there 2 times",
        evidence=(
            Evidence(name="server_bytes", value=pool_bytes + 13 * GIB, unit="bytes", source="nvml"),
            Evidence(name="pool_bytes", value=pool_bytes, unit="bytes", source="vllm"),
            Evidence(name="weights_bytes", value=6 * GIB, unit="bytes", source="host: checkpoint files"),
            Evidence(name="beyond_pool_and_weights", value=7 * GIB, unit="bytes", source="computed"),
            Evidence(name="allowance", value=1100 * MIB + int(0.08 * 32 * GIB), unit="bytes", source="computed"),
        ),
    )

    assert expected == actual


def test_one_copy_is_ok() -> None:
    """Pool, one copy and a GiB of overhead explain a healthy server."""
    # GIVEN a healthy server
    actual = verdict(World())

    # THEN
    assert ("ok", 1 * GIB) == (actual.status, evidence(actual)["beyond_pool_and_weights"])


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(nvml=NO_NVML), NO_NVML.reason),
        (World(weights_bytes=None), "the size of the weights is not known (the model's files are not visible here)"),
        (
            World(pools=(pool(pool_bytes=None),)),
            "the engine does not report its pool's bytes, and the model's config.json is not visible from here",
        ),
        (World(server_seen=False), "the server's own bytes on the device are not visible"),
        (World(server_bytes_told=False), "the server's own bytes on the device are not visible"),
        (World(processes_told=False), "the server's own bytes on the device are not visible"),
    ],
    ids=["no NVML", "weights", "pool's bytes", "server", "server's bytes", "processes"],
)
def test_without_one_of_its_figures_it_is_unknown(world: World, reason: str) -> None:
    """Weights, pool and the server's own bytes are all needed; the finding names the one that is missing."""
    # WHEN such a run is judged
    actual = verdict(world)

    # THEN
    assert Finding(id="baseline.duplicate_model", status="unknown", summary=f"cannot tell: {reason}") == actual


@pytest.mark.parametrize("weights", [KIB, 100 * MIB, 512 * MIB, 1 * GIB, 2 * GIB])
def test_overhead_of_a_small_model_is_not_a_second_copy(weights: int) -> None:
    """Context, workspaces and graphs of a healthy small model weigh more than its weights: that accuses nobody."""
    # GIVEN a small model with 2.5 GiB of ordinary overhead on an 80-GiB device
    world = World(weights_bytes=weights, overhead_bytes=5 * GIB // 2, device_bytes=80 * GIB)

    # THEN
    assert verdict(world).status in {"ok", "unknown"}


def test_a_second_copy_beyond_all_overhead_is_found_for_small_models_too() -> None:
    """More than the largest ordinary overhead is suspect even where the weights are smaller than it."""
    # GIVEN weights of 2 GiB on a device where 3 GiB of overhead are usual, and 6 GiB too much
    world = World(weights_bytes=2 * GIB, overhead_bytes=6 * GIB)

    # THEN
    assert "suspect" == verdict(world).status


def test_ranks_that_share_the_weights_are_no_copies() -> None:
    """Tensor parallel: each of two ranks has a pool of its own and half of the weights."""
    # GIVEN a healthy server on two GPUs
    actual = verdict(World(gpus=2))

    # THEN
    assert ("ok", 2 * GIB) == (actual.status, evidence(actual)["beyond_pool_and_weights"])


@pytest.mark.parametrize("gpus", [1, 2])
def test_engines_with_a_copy_each_are_no_duplicates(gpus: int) -> None:
    """Data parallel: two engines hold the weights once each, be it on one GPU or on two."""
    # GIVEN a healthy server of two engines
    actual = verdict(World(pools=(pool("0"), pool("1")), gpus=gpus, device_bytes=80 * GIB))

    # THEN
    assert ("ok", 12 * GIB) == (actual.status, evidence(actual)["weights_bytes"])


def test_no_weights_at_all_divide_nothing() -> None:
    """A folder of empty files gives weights of zero bytes, which is no ground for a verdict against the server."""
    # GIVEN weights of 0 bytes
    actual = verdict(World(weights_bytes=0))

    # THEN
    assert actual.status in {"ok", "unknown"}


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
    # WHEN
    actual = without_pool(0.5, 0.5, 12.5, 12.5, 24.6, 24.6, 24.6)

    # THEN
    sentence = (
        "the server held 12.50 GiB, its weights once (12.00 GiB), and then 12.10 GiB more at one blow: "
        "they are there twice, or a cache has their size"
    )
    assert ("suspect", sentence) == (actual.status, actual.summary)
    assert 1.008 == evidence(actual)["taken_over_weights"]


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
    # THEN
    assert status == without_pool(*held, engines=page).status


def test_an_engine_that_does_not_report_its_pool_is_unknown() -> None:
    """Nineteen GiB beside six of weights are a pool, most likely, or copies."""
    # GIVEN a server whose page has no pool
    actual = verdict(World(pools=()))

    # THEN
    told = "the engine does not report its KV pool, and the 19.0"
    assert ("unknown", True) == (actual.status, actual.summary.startswith(f"cannot tell: {told}")), actual.summary
