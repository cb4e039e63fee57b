"""imbalance.rank: what a rank uses beyond the others, in bytes and in tokens of the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.imbalance_rank import judge
from kvdiag.model import Device, Evidence, Facts, Finding, ImbalanceFigures, KvPool, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.runs import run
from tests.builders.values import GIB, GPU_LOST, MIB, NO_NVML, device, engine, pool, process
from tests.builders.worlds import World, facts

CONTEXT = 256 * MIB

PIDS = tuple(range(100, 140))

SERVER = Facts(pools=(pool(),), server_pids=PIDS)


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_rank_that_holds_more_costs_every_rank_its_tokens() -> None:
    """One of two ranks with 2 GiB more keeps them from the pool of both: 1,024 blocks of 16 tokens."""
    actual = verdict(World(gpus=2, rank_extra_bytes={1: 2 * GIB}))
    assert "suspect" == actual.status
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


def at_idle(*devices: Device, of: Facts = SERVER) -> Finding:
    """The rule's one finding on an idle engine and one reading of its GPUs."""
    samples = tuple(Sample(at_seconds=float(second), engines=(engine(),), devices=devices) for second in range(3))
    (found,) = judge(Timeline(samples=samples), of, DEFAULT_LIMITS)
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
    assert "fault" == actual.status


def test_further_processes_that_are_no_ranks_are_suspect() -> None:
    """What has no GPU of its own may be the engine core or the API server, which some versions put on GPU 0."""
    # Four ranks, and three processes on GPU 0 that are on no other
    listed = (process(100, 70 * GIB), *(process(200 + number, 530 * MIB) for number in range(3)))
    crowded = device(0, total_bytes=80 * GIB, used_bytes=72 * GIB, processes=listed)
    pids = (100, 101, 102, 103, 200, 201, 202)
    actual = at_idle(crowded, *(rank(index, 70 * GIB) for index in (1, 2, 3)), of=replace(SERVER, server_pids=pids))
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
    assert "suspect" == actual.status
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
    assert "suspect" == actual.status


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


def rank_beside_job(index: int, *sizes: int, total_gib: int = 80, pids: tuple[int, ...] = ()) -> Device:
    """A GPU with its rank's process and further ones of the server, which have no GPU of their own unless told."""
    others = pids or tuple(110 + 5 * index + number for number in range(len(sizes)))
    listed = tuple(
        process(100 + index if number == 0 else others[number - 1], size) for number, size in enumerate(sizes)
    )
    used = sum(sizes) + 464 * MIB
    neighbour = process(9, GIB)
    return device(index, total_bytes=total_gib * GIB, used_bytes=used + GIB, processes=(neighbour, *listed))


def beyond(lost: int, *others: int, total_gib: int = 80) -> Finding:
    """The finding where GPU 0 holds so much more than 6 GiB, and others 6 GiB less what is named."""
    least = [
        rank_beside_job(number, 6 * GIB - less, total_gib=total_gib) for number, less in enumerate(others, start=1)
    ]
    return at_idle(rank_beside_job(0, 6 * GIB + lost, total_gib=total_gib), *least)


@pytest.mark.parametrize(
    ("lost", "total_gib", "status"),
    [
        (1_717_986_918, 80, "ok"),
        (1_717_986_919, 80, "suspect"),
        (CONTEXT, 8, "ok"),
        (CONTEXT + 1, 8, "suspect"),
        (12 * GIB, 80, "suspect"),
    ],
    ids=["2 % of the GPU", "a byte more", "a context on a small GPU", "a byte more than that", "as much as can be"],
)
def test_one_of_two_ranks_may_hold_a_fiftieth_of_its_gpu_more(lost: int, total_gib: int, status: str) -> None:
    """2 % of 80 GiB are 1,717,986,918.4 bytes, those of 8 GiB less than a context; of two nobody knows which is odd."""
    assert status == beyond(lost, 0, total_gib=total_gib).status


@pytest.mark.parametrize(
    ("lost", "others", "status"),
    [
        (GIB, (0, 0, 0), "ok"),
        (GIB + 1, (0, 0, 0), "suspect"),
        (GIB + 1, (0, 0), "ok"),
        (GIB + 1, (0, 0, CONTEXT - 1), "suspect"),
        (GIB + 1, (0, 0, CONTEXT), "ok"),
        (4 * GIB, (0, 0, 0), "suspect"),
        (4 * GIB + 1, (0, 0, 0), "fault"),
        (4 * GIB + 1, (0, 0), "suspect"),
        (4 * GIB + 1, (0, 0, CONTEXT), "suspect"),
    ],
    ids=[
        "a context and its libraries",
        "a byte more",
        "beside two",
        "three that agree to less than a context",
        "to a context",
        "5 % of the GPU",
        "a byte more than that",
        "beside two all the same",
        "beside three that differ",
    ],
)
def test_a_rank_stands_out_beside_three_that_agree(lost: int, others: tuple[int, ...], status: str) -> None:
    """There a GiB is enough, and 5 % of 80 GiB, which are 4, are certain."""
    assert status == beyond(lost, *others).status


def test_what_a_rank_holds_beyond_the_others_has_its_figures() -> None:
    """Compared with the middle of the others, of two the higher; 2 GiB are 1,024 blocks of 16 tokens."""
    actual = at_idle(
        rank_beside_job(0, 6 * GIB),
        rank_beside_job(1, 9 * GIB),
        rank_beside_job(2, 5 * GIB),
        rank_beside_job(3, 7 * GIB),
        rank_beside_job(4, 7 * GIB),
    )

    # Of 5, 6, 7 and 7 the higher middle is 7
    assert (
        Finding(
            id="imbalance.rank",
            status="suspect",
            summary=ANY_TEXT,
            evidence=(
                Evidence(name="gpu_0_held", value=6 * GIB, unit="bytes", source="nvml"),
                Evidence(name="gpu_1_held", value=9 * GIB, unit="bytes", source="nvml"),
                Evidence(name="gpu_2_held", value=5 * GIB, unit="bytes", source="nvml"),
                Evidence(name="gpu_3_held", value=7 * GIB, unit="bytes", source="nvml"),
                Evidence(name="gpu_4_held", value=7 * GIB, unit="bytes", source="nvml"),
                Evidence(name="excess", value=2 * GIB, unit="bytes", source="computed"),
                Evidence(name="extra_process_bytes", value=0, unit="bytes", source="nvml"),
                Evidence(name="kv_tokens_lost", value=16_384, unit="tokens", source="computed"),
            ),
            imbalance=ImbalanceFigures(excess_bytes=2 * GIB, lost_tokens=16_384),
        )
        == actual
    )


@pytest.mark.parametrize("pools", [(), (pool(pool_bytes=None),)], ids=["no pool", "no size of a block"])
def test_without_the_size_of_a_block_there_is_no_price(pools: tuple[KvPool, ...]) -> None:
    """What a rank holds is told, and not what it costs."""
    actual = at_idle(rank_beside_job(0, 9 * GIB), rank_beside_job(1, 6 * GIB), of=replace(SERVER, pools=pools))
    assert "suspect" == actual.status
    assert evidence(actual)["kv_tokens_lost"] is None


def test_a_rank_whose_gpu_does_not_tell_its_size() -> None:
    """Two per cent of nothing known: a context is what it may hold."""
    dark = [
        replace(rank_beside_job(index, size), memory=None) for index, size in ((0, 6 * GIB + CONTEXT), (1, 6 * GIB))
    ]
    more = [
        replace(rank_beside_job(index, size), memory=None) for index, size in ((0, 6 * GIB + CONTEXT + 1), (1, 6 * GIB))
    ]
    assert ["ok", "suspect"] == [at_idle(*devices).status for devices in (dark, more)]


@pytest.mark.parametrize(
    ("contexts", "pids", "status"),
    [
        ((GIB // 2, GIB // 2 + 1), (101, 102), "fault"),
        ((GIB // 2, GIB // 2), (101, 102), "suspect"),
        ((GIB // 2, GIB), (101, 139), "suspect"),
        ((CONTEXT,), (101,), "suspect"),
        ((CONTEXT - 1,), (101,), "ok"),
    ],
    ids=["more than a GiB", "a GiB", "one is no rank", "a context", "less"],
)
def test_further_processes_on_one_gpu(contexts: tuple[int, ...], pids: tuple[int, ...], status: str) -> None:
    """Ranks with GPUs of their own have no business there, from a GiB together certainly; a context is the least."""
    actual = at_idle(
        rank_beside_job(0, 6 * GIB, *contexts, pids=pids), rank_beside_job(1, 6 * GIB), rank_beside_job(2, 6 * GIB)
    )
    assert status == actual.status
    assert sum(contexts) == evidence(actual)["extra_process_bytes"]


def test_contexts_cost_the_pool_what_the_rank_lacks() -> None:
    """512 MiB are 256 blocks of 16 tokens."""
    actual = at_idle(rank_beside_job(0, 6 * GIB, 512 * MIB), rank_beside_job(1, 6 * GIB))
    assert 256 * 16 == evidence(actual)["kv_tokens_lost"]


def test_further_processes_that_make_no_difference_are_no_crowd() -> None:
    """Where the others hold nearly as much in one process, or have as many, nobody loses anything."""
    # GPU 0 with a second process of 512 MiB, beside ranks of 100 MiB less in all
    split_up = rank_beside_job(0, 6 * GIB - 512 * MIB, 512 * MIB)
    assert "ok" == at_idle(split_up, rank_beside_job(1, 6 * GIB - 100 * MIB)).status
    assert "suspect" == at_idle(split_up, rank_beside_job(1, 6 * GIB - CONTEXT)).status
    assert "ok" == at_idle(split_up, rank_beside_job(1, 6 * GIB - CONTEXT + 1)).status


def test_the_newest_idle_reading_with_devices_counts() -> None:
    """An older one, and one under load, do not."""
    even, odd = (
        (rank_beside_job(0, 6 * GIB), rank_beside_job(1, 6 * GIB)),
        (rank_beside_job(0, 9 * GIB), rank_beside_job(1, 6 * GIB)),
    )
    idle, busy = (engine(),), (engine(running=1),)
    told = [
        (idle, even),
        (idle, even),
        (busy, even),
        (idle, odd),
        (idle, None),
        (busy, even),
        (idle, None),
        (idle, None),
    ]
    samples = [Sample(at_seconds=float(at), engines=page, devices=devices) for at, (page, devices) in enumerate(told)]
    (actual,) = judge(Timeline(samples=tuple(samples)), SERVER, DEFAULT_LIMITS)

    assert "suspect" == actual.status


@pytest.mark.parametrize(
    ("devices", "of", "status"),
    [
        ((rank_beside_job(0, GIB), device(1, processes=(process(101, None),))), SERVER, "unknown"),
        ((device(0), device(1)), Facts(device_uuids=("GPU-0", "GPU-1")), "ok"),
        ((device(0), device(1, used_bytes=None)), Facts(device_uuids=("GPU-0", "GPU-1")), "unknown"),
        ((device(0),), Facts(device_uuids=("GPU-0", "GPU-1")), "unknown"),
        ((device(0), device(1)), SERVER, "unknown"),
        ((), Facts(device_uuids=("GPU-0",)), "unknown"),
        ((rank_beside_job(0, GIB), rank_beside_job(1, GIB)), replace(SERVER, pools=(pool(), pool("1"))), "unknown"),
    ],
    ids=["one unreported", "assigned", "one dark", "one missing", "not known", "none read", "two engines"],
)
def test_what_is_needed_of_every_rank(devices: tuple[Device, ...], of: Facts, status: str) -> None:
    """Each rank's bytes, on a GPU that is known to be the server's."""
    assert status == at_idle(*devices, of=of).status


def test_a_reading_that_failed_gives_its_reason() -> None:
    """Where NVML is absent, that is why."""
    samples = (Sample(at_seconds=1.0, engines=(engine(),)), Sample(at_seconds=2.0, gaps=(NO_NVML,)))
    (actual,) = judge(Timeline(samples=samples), SERVER, DEFAULT_LIMITS)
    assert ("unknown", NO_NVML.reason) == (actual.status, actual.summary)


def test_an_assigned_gpu_holds_what_the_driver_does_not() -> None:
    """The driver's share is nobody's, and where it is not told nothing is taken off."""
    known = Facts(device_uuids=("GPU-0", "GPU-1"))
    whole = device(0, used_bytes=20 * GIB, driver_reserved_bytes=None)
    actual = at_idle(whole, device(1, used_bytes=20 * GIB, driver_reserved_bytes=512 * MIB), of=known)
    assert {"gpu_0_held": 20 * GIB, "gpu_1_held": 20 * GIB - 512 * MIB}.items() <= evidence(actual).items()


def test_one_gpu_of_the_server_has_nothing_to_balance() -> None:
    """Whatever the GPUs of others hold."""
    expected = Finding(id="imbalance.rank", status="ok", summary=ANY_TEXT)
    assert expected == at_idle(rank_beside_job(0, 6 * GIB), device(7, processes=(process(3, GIB),)))


def sized(*capacities: int | None) -> tuple[KvPool, ...]:
    """Engines of pools with so many tokens, or with a thousand blocks of 16 where that is not told."""
    return tuple(
        pool(str(number), capacity_tokens=tokens, usable_blocks=1_000) for number, tokens in enumerate(capacities)
    )


ALIKE = (device(0, used_bytes=9 * GIB), device(1, used_bytes=9 * GIB))

ASSIGNED = Facts(device_uuids=("GPU-0", "GPU-1"))


@pytest.mark.parametrize(
    ("least", "status"),
    [(90_000, "unknown"), (89_999, "suspect"), (75_000, "suspect"), (74_999, "fault")],
    ids=["a tenth less", "a token more than that", "a quarter less", "a token more than that"],
)
def test_pools_of_engines_may_differ_by_a_tenth(least: int, status: str) -> None:
    """Profiles of equal ranks differ; beyond that one holds more, and on equal GPUs a quarter is certain."""
    assert status == at_idle(*ALIKE, of=replace(ASSIGNED, pools=sized(100_000, least))).status


def test_unequal_pools_have_their_figures() -> None:
    """The smallest of all against the largest, in tokens; a thousand blocks of 16 where no capacity is told."""
    actual = at_idle(*ALIKE, of=replace(ASSIGNED, pools=sized(30_000, None, 40_000)))

    assert (
        Finding(
            id="imbalance.rank",
            status="fault",
            summary=ANY_TEXT,
            evidence=(
                Evidence(name="engine_0_pool", value=30_000, unit="tokens", source="engine"),
                Evidence(name="engine_1_pool", value=16_000, unit="tokens", source="engine"),
                Evidence(name="engine_2_pool", value=40_000, unit="tokens", source="engine"),
                Evidence(name="kv_tokens_lost", value=24_000, unit="tokens", source="computed"),
                Evidence(name="pool_ratio", value=0.4, unit="ratio", source="computed"),
            ),
            imbalance=ImbalanceFigures(lost_tokens=24_000),
        )
        == actual
    )


@pytest.mark.parametrize(
    ("devices", "uuids"),
    [
        (ALIKE, None),
        (ALIKE[:1], ("GPU-0", "GPU-1")),
        (ALIKE[:1], ("GPU-0",)),
        ((ALIKE[0], device(1, used_bytes=None)), ("GPU-0", "GPU-1")),
        (tuple(device(index, used_bytes=None) for index in range(2)), ("GPU-0", "GPU-1")),
        ((ALIKE[0], device(1, used_bytes=9 * GIB, total_bytes=40 * GIB)), ("GPU-0", "GPU-1")),
        ((), ("GPU-0", "GPU-1")),
    ],
    ids=["not assigned", "one not read", "one alone", "one dark", "both dark", "one larger", "none read"],
)
def test_unequal_pools_on_gpus_that_may_differ_are_suspect(
    devices: tuple[Device, ...], uuids: tuple[str, ...] | None
) -> None:
    """A smaller GPU explains a smaller pool: only GPUs that are all known, and alike, leave no other reason."""
    actual = at_idle(*devices, of=Facts(pools=sized(100_000, 10_000), device_uuids=uuids))
    assert "suspect" == actual.status
