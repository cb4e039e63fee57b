from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.baseline_misconfigured import judge
from kvdiag.model import Evidence, Facts, Finding, KvPool, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.runs import run
from tests.builders.values import GIB, MIB, NO_NVML, device, engine, pool, process, seen
from tests.builders.worlds import TRAINING, World, facts

FRACTION = pool(pool_bytes=None)
"""A pool sized by --gpu-memory-utilization 0.92: on a GPU the engine then reports no bytes."""


FITS = "the pool fits the longest request, but whether the memory fraction fits the device is not visible"


def verdict(world: World) -> Finding:
    """The rule's one finding on a run."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def at_idle(
    *devices: object, pools: tuple[KvPool, ...] = (FRACTION,), pids: tuple[int, ...] | None = (100,)
) -> Finding:
    """The rule's one finding on one reading of some devices."""
    known = Facts(pools=pools, server_pids=pids, max_model_len_tokens=32768)
    (found,) = judge(seen(devices=devices), known, DEFAULT_LIMITS)  # type: ignore[arg-type]
    return found


def test_a_context_that_the_pool_cannot_hold_is_a_fault() -> None:
    """A server that admits 32,768 tokens with a pool of 16,000 promises what it cannot serve."""
    small = pool(capacity_tokens=16_000, max_concurrency=16_000 / 32_768)
    actual = verdict(World(pools=(small,)))
    expected = Finding(
        id="baseline.misconfigured",
        status="fault",
        summary=ANY_TEXT,
        evidence=(
            Evidence(name="capacity", value=16_000, unit="tokens", source="engine"),
            Evidence(name="max_model_len", value=32_768, unit="tokens", source="engine"),
            Evidence(name="max_concurrency_at_max_model_len", value=16_000 / 32_768, unit="requests", source="engine"),
            Evidence(name="memory_fraction", value=0.92, unit="ratio", source="engine"),
            Evidence(name="gpu_0_free", value=5010 * MIB - 464 * MIB + 0, unit="bytes", source="nvml"),
        ),
    )

    assert (expected.status, expected.summary) == (actual.status, actual.summary)
    assert expected.evidence[:4] == actual.evidence[:4]


def test_pool_context_and_device_that_fit_are_ok() -> None:
    """A healthy server fits its device."""
    actual = verdict(World())
    assert "ok" == actual.status


@pytest.mark.parametrize(
    "world",
    [
        World(pools=()),
        World(nvml=NO_NVML),
    ],
    ids=["no pool", "no device"],
)
def test_without_pool_or_device_it_is_unknown(world: World) -> None:
    """A pool that is not told, or a device that is not seen, is not called well configured."""
    actual = verdict(world)
    assert "unknown" == actual.status


def test_a_pool_too_small_is_a_fault_without_a_device() -> None:
    """The pool's own figures are enough to see that a request can never be served."""
    actual = verdict(World(pools=(pool(capacity_tokens=16_000),), nvml=NO_NVML))
    assert "fault" == actual.status


def test_the_smaller_pool_of_two_engines_decides() -> None:
    """A request may land on either engine: one pool that cannot hold it is enough."""
    pools = (pool("0"), pool("1", capacity_tokens=16_000))
    actual = verdict(World(pools=pools, gpus=2))
    assert "fault" == actual.status


def test_a_device_packed_to_the_brim_is_suspect() -> None:
    """With 100 MiB left at idle the next transient allocation fails."""
    # A device with 100 MiB free
    full = 24 * GIB - 100 * MIB
    actual = at_idle(device(used_bytes=full, processes=(process(100, full - 464 * MIB),)))
    assert "suspect" == actual.status


@pytest.mark.parametrize(
    ("used", "status"),
    [(77 * GIB, "suspect"), (75 * GIB, "ok"), (40 * GIB, "ok"), (36 * GIB, "suspect")],
    ids=["over", "at its budget", "half", "under half"],
)
def test_the_idle_device_is_compared_with_the_fraction(used: int, status: str) -> None:
    """A server that holds far more, or less than half, of what its fraction gives was sized by something else."""
    # 0.92 of 80 GiB, which is 73.2 GiB without what the driver keeps
    actual = at_idle(device(total_bytes=80 * GIB, used_bytes=used, processes=(process(100, used - 464 * MIB),)))
    assert status == actual.status


@pytest.mark.parametrize("reserved", [464 * MIB, None], ids=["told", "not told"])
@pytest.mark.parametrize("gib", [16, 24])
def test_driver_and_context_beside_the_budget_are_not_held_against_a_small_gpu(gib: int, reserved: int | None) -> None:
    """The fraction is one of what CUDA sees, and is filled after the context is there: neither is an excess."""
    # A server that fills its nine tenths to the byte, beside 464 MiB of the driver and 800 of context and graphs
    server = int(0.9 * (gib * GIB - 464 * MIB)) + 800 * MIB
    nine_tenths = pool(pool_bytes=None, memory_fraction_ratio=0.9)
    used = server + 464 * MIB
    whole = device(total_bytes=gib * GIB, used_bytes=used, driver_reserved_bytes=reserved)
    listed = replace(whole, processes=(process(100, server),))

    # With its processes and without
    assert ["ok", "ok"] == [at_idle(one, pools=(nine_tenths,)).status for one in (whole, listed)]


def test_more_than_the_fraction_on_a_gpu_whose_processes_are_not_seen_is_unknown() -> None:
    """Two servers that share a GPU fill it as one that exceeds its fraction would: the process list decides."""
    tenth = pool(pool_bytes=None, memory_fraction_ratio=0.1)
    half = device(total_bytes=80 * GIB, used_bytes=40 * GIB)
    actual = at_idle(half, pools=(tenth,), pids=None)
    assert "unknown" == actual.status


def test_a_gpu_is_judged_as_it_was_when_the_engine_answered() -> None:
    """Before that the weights are on their way, and little of what was given is used."""
    empty, full = (device(used_bytes=used) for used in (2 * GIB, 21 * GIB))
    samples = (
        Sample(at_seconds=1.0, devices=(empty,)),
        Sample(at_seconds=2.0, engines=(engine(),)),
        Sample(at_seconds=3.0, devices=(full,)),
    )
    (actual,) = judge(Timeline(samples=samples), Facts(pools=(FRACTION,)), DEFAULT_LIMITS)

    assert "ok" == actual.status


def test_a_server_that_sleeps_is_judged_when_it_wakes() -> None:
    """Asleep it has given pool and weights away, which is no sign of a fraction that does not fit."""
    empty, full = (device(used_bytes=used) for used in (2 * GIB, 21 * GIB))
    samples = (
        Sample(at_seconds=1.0, engines=(replace(engine(), asleep=True),), devices=(empty,)),
        Sample(at_seconds=2.0, engines=(replace(engine(), asleep=False),), devices=(full,)),
    )
    found = [judge(Timeline(samples=seen), Facts(pools=(FRACTION,)), DEFAULT_LIMITS) for seen in (samples, samples[:1])]

    # And not at all where it never does
    assert ["ok", "unknown"] == [one.status for (one,) in found]


def test_others_on_the_device_are_not_the_servers_excess() -> None:
    """A co-tenant's bytes do not make the server exceed its own budget."""
    quarter = pool(pool_bytes=None, memory_fraction_ratio=0.25)
    both = (process(100, 6 * GIB), process(7, 12 * GIB))
    assert "ok" == at_idle(device(used_bytes=18 * GIB + 464 * MIB, processes=both), pools=(quarter,)).status


def test_a_pool_sized_by_hand_is_not_held_against_the_fraction() -> None:
    """With --kv-cache-memory-bytes the fraction says nothing about the device."""
    actual = at_idle(device(used_bytes=9 * GIB, processes=(process(100, 8 * GIB),)), pools=(pool(),))
    assert "ok" == actual.status


def test_somebody_elses_gpu_is_not_the_servers_configuration() -> None:
    """An idle or crowded GPU without a process of the server is not judged."""
    # A server on GPU 0, an empty GPU 1 and a full GPU 2
    own = device(used_bytes=22 * GIB, processes=(process(100, 21 * GIB),))
    empty = device(1, used_bytes=464 * MIB, processes=())
    full = device(2, used_bytes=24 * GIB - MIB, processes=(process(7, 23 * GIB),))
    assert "ok" == at_idle(own, empty, full).status


def test_which_of_several_gpus_is_the_servers_is_not_guessed() -> None:
    """A container with two GPUs and no process lists: the idle one is not called badly configured."""
    full, empty = device(0, used_bytes=22 * GIB, processes=()), device(1, used_bytes=464 * MIB, processes=())
    assert "unknown" == at_idle(full, empty).status


def test_gpus_that_were_assigned_to_the_server_are_its_own() -> None:
    """Two GPUs of the server's pod are judged without a process list: one is packed to the brim."""
    devices = tuple(device(index, used_bytes=used) for index, used in enumerate((22 * GIB, 24 * GIB - 100 * MIB)))
    known = Facts(pools=(FRACTION,), device_uuids=("GPU-0", "GPU-1"))
    (actual,) = judge(seen(devices=devices), known, DEFAULT_LIMITS)
    assert "suspect" == actual.status


def test_a_lone_gpu_is_the_servers() -> None:
    """Where there is one GPU it is judged although its processes cannot be told."""
    assert "suspect" == at_idle(device(used_bytes=24 * GIB - MIB), pids=None).status


def test_memory_that_is_not_told_is_not_called_fitting() -> None:
    """A device that does not tell its memory cannot be compared with the fraction."""
    actual = at_idle(device(used_bytes=None, processes=(process(100, 5 * GIB),)))
    assert "unknown" == actual.status


def test_free_bytes_of_the_server_are_its_evidence() -> None:
    """The evidence holds what the verdict looked at."""
    actual = verdict(World(foreign={1: (TRAINING,)}))
    assert "gpu_0_free" in evidence(actual)


def test_one_of_two_gpus_that_does_not_tell_leaves_it_unknown() -> None:
    """The server's other GPU fits, which says nothing about this one; one that does not fit is told all the same."""
    dark = device(1, used_bytes=None, processes=(process(101, None),))
    fits, full = (
        device(used_bytes=used, processes=(process(100, 20 * GIB),)) for used in (22 * GIB, 24 * GIB - 100 * MIB)
    )
    assert ["unknown", "suspect"] == [at_idle(first, dark, pids=(100, 101)).status for first in (fits, full)]


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
    (found,) = judge(timeline, llama(reported), DEFAULT_LIMITS)
    return found


def test_a_pool_that_is_not_what_its_config_gives_is_told_with_the_likely_reason() -> None:
    """An engine that makes a tenth fewer blocks of its bytes shares them with somebody: that is room lost."""
    # 12 GiB, in blocks of 2 MiB 6,145, of which the engine reports 5,530
    actual = judged(pool(usable_blocks=5_529, pool_bytes=6_145 * 2 * MIB))
    assert "suspect" == actual.status


@pytest.mark.parametrize("blocks", [6_144, 6_050], ids=["exact", "within the limit"])
def test_a_pool_that_its_config_explains_is_ok(blocks: int) -> None:
    """Up to two in a hundred are rounding and reserve."""
    actual = judged(pool(usable_blocks=blocks, pool_bytes=6_145 * 2 * MIB))
    assert "ok" == actual.status, actual.summary


def test_blocks_of_one_request_that_no_setting_gives_are_told() -> None:
    """A model whose requests take half as much again has layers that the config does not show."""
    actual = judged(pool(max_concurrency=6_145 / 3_072, pool_bytes=None))
    assert "suspect" == actual.status
