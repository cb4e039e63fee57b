"""imbalance.rank: what a rank holds beyond the others, priced in tokens of the pool."""

from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.imbalance_rank import judge
from kvdiag.model import Device, Facts, Finding, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.runs import run
from tests.builders.values import GIB, GPU_LOST, MIB, NO_NVML, device, engine, pool, process
from tests.builders.worlds import World, facts


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_rank_that_holds_more_costs_every_rank_its_tokens() -> None:
    """One of two ranks with 2 GiB more keeps them from the pool of both: 1,024 blocks of 16 tokens."""
    actual = verdict(World(gpus=2, rank_extra_bytes={1: 2 * GIB}))

    sentence = ANY_TEXT
    assert ("suspect", sentence) == (actual.status, actual.summary)
    assert {"excess": 2 * GIB, "kv_tokens_lost": 16_384}.items() <= evidence(actual).items()


@pytest.mark.parametrize(
    "world",
    [
        World(),
        World(gpus=2),
        World(gpus=2, rank_extra_bytes={0: 200 * MIB}),
    ],
    ids=["one rank", "even", "nearly even"],
)
def test_even_ranks_are_ok(world: World) -> None:
    """A single rank, and ranks within 2 % of a device, are balanced."""
    actual = verdict(world)

    assert "ok" == actual.status


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(nvml=NO_NVML), NO_NVML.reason),
        (World(nvml=GPU_LOST), GPU_LOST.reason),
        (World(gpus=2, server_seen=False), ANY_TEXT),
        (World(gpus=2, server_bytes_told=False), ANY_TEXT),
        (
            World(gpus=2, pools=(pool("0"), pool("1"))),
            ANY_TEXT,
        ),
    ],
    ids=["no NVML", "GPU lost", "server not seen", "bytes not told", "two engines"],
)
def test_ranks_that_cannot_be_compared_are_unknown(world: World, reason: str) -> None:
    """Without every rank's bytes, or with several engines, nothing is compared."""
    actual = verdict(world)

    assert "unknown" == actual.status


def at_idle(*devices: Device, pids: tuple[int, ...] = (100, 101, 102, 103)) -> Finding:
    """The rule's one finding on an idle engine and one reading of its GPUs."""
    samples = tuple(Sample(at_seconds=float(second), engines=(engine(),), devices=devices) for second in range(3))
    (found,) = judge(Timeline(samples=samples), Facts(pools=(pool(),), server_pids=pids), DEFAULT_LIMITS)
    return found


def rank(index: int, *sizes: int) -> Device:
    """A GPU of 80 GiB with its rank's process, and what the ranks after it hold there."""
    listed = tuple(process(100 + (index + number) % 4, size) for number, size in enumerate(sizes))
    return device(index, total_bytes=80 * GIB, used_bytes=sum(sizes) + 464 * MIB, processes=listed)


def test_contexts_of_other_ranks_are_told_below_the_share_that_counts() -> None:
    """Three ranks that have GPUs of their own have no business on GPU 0: certain, though they hold 1.55 of 80 GiB."""
    # Four ranks of 70 GiB, and a context of each of the others on GPU 0
    contexts = (530 * MIB,) * 3
    actual = at_idle(rank(0, 70 * GIB, *contexts), *(rank(index, 70 * GIB) for index in (1, 2, 3)))

    sentence = ANY_TEXT
    assert ("fault", sentence) == (actual.status, actual.summary)


def test_further_processes_that_are_no_ranks_are_suspect() -> None:
    """What has no GPU of its own may be the engine core or the API server, which some versions put on GPU 0."""
    # Four ranks, and three processes on GPU 0 that are on no other
    listed = (process(100, 70 * GIB), *(process(200 + number, 530 * MIB) for number in range(3)))
    crowded = device(0, total_bytes=80 * GIB, used_bytes=72 * GIB, processes=listed)
    pids = (100, 101, 102, 103, 200, 201, 202)
    actual = at_idle(crowded, *(rank(index, 70 * GIB) for index in (1, 2, 3)), pids=pids)

    assert "suspect" == actual.status


def test_two_processes_on_every_gpu_are_even() -> None:
    """Ranks with a helper each share the GPUs out evenly."""
    actual = at_idle(*(rank(index, 70 * GIB, 600 * MIB) for index in range(4)))

    assert "ok" == actual.status


def test_a_process_smaller_than_a_context_is_of_no_note() -> None:
    """What a monitor of the server's own holds costs nobody his pool."""
    assert "ok" == at_idle(rank(0, 70 * GIB, 100 * MIB), rank(1, 70 * GIB)).status


def test_a_rank_below_the_others_is_not_held_against_them() -> None:
    """One rank with less than the others, as a last stage may have, costs nobody anything."""
    assert "ok" == at_idle(rank(0, 70 * GIB), rank(1, 70 * GIB), rank(2, 66 * GIB)).status


def test_engines_with_pools_of_unequal_size_tell_it_themselves() -> None:
    """Two engines of one model and one fraction have pools of one size, unless a rank of one lacks the room."""
    pools = (pool("0", capacity_tokens=38_144), pool("1", capacity_tokens=95_232))
    actual = verdict(World(gpus=2, pools=pools, nvml=NO_NVML))

    sentence = ANY_TEXT
    assert ("suspect", sentence) == (actual.status, actual.summary)
    assert 57_088 == evidence(actual)["kv_tokens_lost"]


@pytest.mark.parametrize(
    ("totals_gib", "tokens", "status"),
    [((80, 80), 38_144, "fault"), ((80, 40), 38_144, "suspect"), ((80, 80), 80_000, "suspect")],
    ids=["alike", "a smaller GPU", "a sixth"],
)
def test_pools_of_unequal_size_on_gpus_of_one_size_are_a_fault(
    totals_gib: tuple[int, ...], tokens: int, status: str
) -> None:
    """Where no GPU is smaller than another, a rank holds what its engine's pool lacks: certain from a quarter on."""
    # Two engines on the two GPUs that were assigned to them
    pools = (pool("0", capacity_tokens=tokens), pool("1", capacity_tokens=95_232))
    devices = tuple(device(index, total_bytes=size * GIB, used_bytes=30 * GIB) for index, size in enumerate(totals_gib))
    samples = tuple(Sample(at_seconds=float(second), engines=(engine(),), devices=devices) for second in range(3))

    known = Facts(pools=pools, device_uuids=("GPU-0", "GPU-1"))
    (actual,) = judge(Timeline(samples=samples), known, DEFAULT_LIMITS)

    assert status == actual.status


def assigned(*used_gib: float, uuids: tuple[str, ...] | None = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")) -> Finding:
    """The rule's one finding on GPUs of 80 GiB without process lists, of which the server was assigned some."""
    devices = tuple(
        device(index, total_bytes=80 * GIB, used_bytes=int(used * GIB)) for index, used in enumerate(used_gib)
    )
    samples = tuple(Sample(at_seconds=float(second), engines=(engine(),), devices=devices) for second in range(3))
    (found,) = judge(Timeline(samples=samples), Facts(pools=(pool(),), device_uuids=uuids), DEFAULT_LIMITS)
    return found


def test_one_of_the_assigned_gpus_that_stands_out_is_told_without_processes() -> None:
    """Three GPUs of a pod hold the same, and the fourth 1.5 GiB more: its own ranks have it, whichever they are."""
    actual = assigned(71.5, 70.0, 70.0, 70.0)

    sentence = ANY_TEXT
    assert ("suspect", sentence) == (actual.status, actual.summary)


@pytest.mark.parametrize(
    ("used", "uuids", "status"),
    [
        ((76.0, 70.0, 70.0, 70.0), ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), "fault"),
        ((76.0, 70.0, 69.0, 70.0), ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), "suspect"),
        ((71.5, 70.0, 70.9, 70.0), ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), "ok"),
        ((70.9, 70.0, 70.0, 70.0), ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), "ok"),
        ((71.5, 70.0, 70.0, 0.4), ("GPU-0",), "ok"),
        ((78.0, 70.0, 70.0, 70.0), None, "unknown"),
    ],
    ids=[
        "a thirteenth",
        "stages that differ",
        "all differ a little",
        "less than a GiB",
        "one GPU alone",
        "not assigned",
    ],
)
def test_gpus_that_differ_a_little_or_are_not_known_to_be_the_servers(
    used: tuple[float, ...], uuids: tuple[str, ...] | None, status: str
) -> None:
    """What ranks of one engine usually differ by is no imbalance, and other servers' GPUs are not compared at all."""
    assert status == assigned(*used, uuids=uuids).status
