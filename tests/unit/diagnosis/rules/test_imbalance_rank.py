"""imbalance.rank: what a rank uses beyond the others, in bytes and in tokens of the pool."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from kvdiag.diagnosis.rules.imbalance_rank import judge
from kvdiag.model import Device, Engine, Facts, Finding, ImbalanceFigures, KvPool, Sample, Timeline
from tests.builders.answers import evidence, only, rows
from tests.builders.runs import of_run
from tests.builders.values import GIB, GPU_LOST, MIB, NO_NVML, device, engine, pool, process
from tests.builders.worlds import World

CONTEXT = 256 * MIB

PIDS = tuple(range(100, 140))

SERVER = Facts(pools=(pool(),), server_pids=PIDS)

IDLE, BUSY = engine(), engine(running=1)


verdict = partial(of_run, judge)


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(), "ok", id="one rank"),
        pytest.param(World(gpus=2), "ok", id="even"),
        pytest.param(World(gpus=2, rank_extra_bytes={0: 200 * MIB}), "ok", id="nearly even"),
        pytest.param(World(nvml=NO_NVML), "unknown", id="no NVML"),
        pytest.param(World(nvml=GPU_LOST), "unknown", id="GPU lost"),
        pytest.param(World(gpus=2, server_seen=False), "unknown", id="server not visible"),
        pytest.param(World(gpus=2, server_bytes_reported=False), "unknown", id="bytes not reported"),
        pytest.param(World(gpus=2, pools=(pool("0"), pool("1"))), "unknown", id="two engines"),
    ],
)
def test_ranks_of_a_run_are_compared_where_every_one_is_known(world: World, status: str) -> None:
    """A single rank, and ranks within 2 % of a device, are balanced; without every rank's bytes none is compared."""
    assert status == verdict(world).status


def over(*readings: tuple[Engine, Sequence[Device] | None], of: Facts = SERVER) -> Finding:
    """The rule's one finding on samples of an engine and its GPUs, one a second."""
    samples = tuple(
        Sample(at_seconds=float(second), engines=(page,), devices=None if gpus is None else tuple(gpus))
        for second, (page, gpus) in enumerate(readings)
    )
    return only(judge, Timeline(samples=samples), of)


def at_idle(*devices: Device, of: Facts = SERVER) -> Finding:
    """The rule's one finding on an idle engine and one reading of its GPUs."""
    return over(*[(IDLE, devices)] * 3, of=of)


@pytest.mark.parametrize(
    ("extra", "samples", "status"),
    [(6 * GIB, 24, "suspect"), (100 * MIB, 24, "ok"), (6 * GIB, 22, "unknown")],
    ids=["one rank above the other", "even", "too few samples"],
)
def test_ranks_of_a_server_that_is_never_idle_are_compared_by_their_medians(
    extra: int, samples: int, status: str
) -> None:
    """Each rank runs the same steps: the newer half of the samples decides, and a start that was uneven does not."""
    usual = [device(processes=(process(100, 10 * GIB + extra),)), device(1, processes=(process(101, 10 * GIB),))]
    start = [device(processes=(process(100, GIB),)), device(1, processes=(process(101, 8 * GIB),))]
    read = [(BUSY, start)] * 6 + [(BUSY, usual)] * (samples - 6)
    assert status == over(*read).status


def test_engines_with_pools_of_unequal_size_report_it_themselves() -> None:
    """Two engines of one model and one fraction have pools of one size, unless a rank of one lacks the room."""
    pools = (pool("0", capacity_tokens=38_144), pool("1", capacity_tokens=95_232))
    actual = verdict(World(gpus=2, pools=pools, nvml=NO_NVML))
    assert ("suspect", 57_079) == (actual.status, evidence(actual)["kv_tokens_lost"])


FOUR = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


def assigned(*used_gib: float, uuids: tuple[str, ...] | None = FOUR) -> Finding:
    """The rule's one finding on GPUs of 80 GiB without process lists, of which the server was assigned some."""
    sizes = [int(used * GIB) for used in used_gib]
    devices = [device(index, total_bytes=80 * GIB, used_bytes=size) for index, size in enumerate(sizes)]
    return at_idle(*devices, of=Facts(pools=(pool(),), device_uuids=uuids))


@pytest.mark.parametrize(
    ("used", "uuids", "status"),
    [
        pytest.param((71.5, 70.0, 70.0, 70.0), FOUR, "suspect", id="stands out"),
        pytest.param((76.0, 70.0, 70.0, 70.0), FOUR, "fault", id="a thirteenth"),
        pytest.param((76.0, 70.0, 69.0, 70.0), FOUR, "suspect", id="stages that differ"),
        pytest.param((71.5, 70.0, 70.9, 70.0), FOUR, "ok", id="all differ a little"),
        pytest.param((70.9, 70.0, 70.0, 70.0), FOUR, "ok", id="less than a GiB"),
        pytest.param((71.5, 70.0, 70.0, 0.4), ("GPU-0",), "ok", id="one GPU alone"),
        pytest.param((78.0, 70.0, 70.0, 70.0), None, "unknown", id="not assigned"),
    ],
)
def test_assigned_gpus_are_compared_without_processes(
    used: tuple[float, ...], uuids: tuple[str, ...] | None, status: str
) -> None:
    """What ranks of one engine usually differ by is no imbalance, and other servers' GPUs are not compared at all."""
    assert status == assigned(*used, uuids=uuids).status


def rank(index: int, *sizes: int, total_gib: int = 80, pids: tuple[int, ...] = ()) -> Device:
    """A GPU with its rank's process, further ones of the server without a GPU of their own, and a job of 1 GiB."""
    others = pids or tuple(110 + 5 * index + number for number in range(len(sizes)))
    listed = [process(pid, size) for pid, size in zip((100 + index, *others), sizes, strict=False)]
    used = sum(sizes) + 464 * MIB + GIB
    return device(index, total_bytes=total_gib * GIB, used_bytes=used, processes=(process(9, GIB), *listed))


@pytest.mark.parametrize(
    ("lost", "others", "total_gib", "status"),
    [
        pytest.param(1_717_986_918, (0,), 80, "ok", id="2 % of the GPU"),
        pytest.param(1_717_986_919, (0,), 80, "suspect", id="a byte more"),
        pytest.param(CONTEXT, (0,), 8, "ok", id="a context on a small GPU"),
        pytest.param(CONTEXT + 1, (0,), 8, "suspect", id="a byte more than a context"),
        pytest.param(12 * GIB, (0,), 80, "suspect", id="of two, however much"),
        pytest.param(GIB, (0, 0, 0), 80, "ok", id="a context and its libraries"),
        pytest.param(GIB + 1, (0, 0, 0), 80, "suspect", id="a byte more beside three"),
        pytest.param(GIB + 1, (0, 0), 80, "ok", id="beside two"),
        pytest.param(GIB + 1, (0, 0, CONTEXT - 1), 80, "suspect", id="three that agree to less than a context"),
        pytest.param(GIB + 1, (0, 0, CONTEXT), 80, "ok", id="to a context"),
        pytest.param(4 * GIB, (0, 0, 0), 80, "suspect", id="5 % of the GPU"),
        pytest.param(4 * GIB + 1, (0, 0, 0), 80, "fault", id="a byte more than 5 %"),
        pytest.param(4 * GIB + 1, (0, 0), 80, "suspect", id="more than 5 % beside two"),
        pytest.param(4 * GIB + 1, (0, 0, CONTEXT), 80, "fault", id="beside three within a tenth of it"),
        pytest.param(4 * GIB + 1, (0, 0, 410 * MIB), 80, "suspect", id="beside three that differ"),
    ],
)
def test_a_rank_may_use_somewhat_more_than_the_others(
    lost: int, others: tuple[int, ...], total_gib: int, status: str
) -> None:
    """2 % of 80 GiB (1,717,986,918.4 bytes) are ok; next to three equal ranks 1 GiB is, and over 5 % is a fault."""
    least = [rank(place, 6 * GIB - less, total_gib=total_gib) for place, less in enumerate(others, start=1)]
    assert status == at_idle(rank(0, 6 * GIB + lost, total_gib=total_gib), *least).status


def dark(*sizes: int) -> tuple[Device, ...]:
    """Ranks whose GPUs do not report their size."""
    return tuple(replace(rank(index, size), memory=None) for index, size in enumerate(sizes))


SPLIT_UP = rank(0, 6 * GIB - 512 * MIB, 512 * MIB)
"""A rank with a second process of 512 MiB and no more in all."""

LARGE = tuple(rank(index, 70 * GIB) for index in range(4))
CONTEXTS = (530 * MIB,) * 3
TWO = Facts(device_uuids=("GPU-0", "GPU-1"))


@pytest.mark.parametrize(
    ("devices", "of", "status"),
    [
        pytest.param((rank(0, 70 * GIB, *CONTEXTS, pids=(101, 102, 103)), *LARGE[1:]), SERVER, "fault", id="contexts"),
        pytest.param((rank(0, 70 * GIB, *CONTEXTS), *LARGE[1:]), SERVER, "suspect", id="processes that are no ranks"),
        pytest.param([rank(gpu, 70 * GIB, 600 * MIB) for gpu in range(4)], SERVER, "ok", id="two on every GPU"),
        pytest.param((rank(0, GIB, CONTEXT), rank(1, GIB, 0)), SERVER, "ok", id="two on both, of one a context more"),
        pytest.param((rank(0, 70 * GIB, 100 * MIB), LARGE[1]), SERVER, "ok", id="less than a context"),
        pytest.param((*LARGE[:2], rank(2, 66 * GIB)), SERVER, "ok", id="one below the others"),
        pytest.param(dark(6 * GIB + CONTEXT, 6 * GIB), SERVER, "ok", id="size not reported"),
        pytest.param(dark(6 * GIB + CONTEXT + 1, 6 * GIB), SERVER, "suspect", id="a context more, size not reported"),
        pytest.param((SPLIT_UP, rank(1, 6 * GIB - 100 * MIB)), SERVER, "ok", id="in two processes"),
        pytest.param((SPLIT_UP, rank(1, 6 * GIB - CONTEXT)), SERVER, "suspect", id="in two, and a context more"),
        pytest.param((SPLIT_UP, rank(1, 6 * GIB - CONTEXT + 1)), SERVER, "ok", id="in two, and a byte less"),
        pytest.param(
            (rank(0, GIB), device(1, processes=(process(101, None),))), SERVER, "unknown", id="one unreported"
        ),
        pytest.param((device(0), device(1)), TWO, "ok", id="assigned"),
        pytest.param((device(0), device(1, used_bytes=None)), TWO, "unknown", id="one dark"),
        pytest.param((device(0),), TWO, "unknown", id="one missing"),
        pytest.param((device(0), device(1)), SERVER, "unknown", id="not known"),
        pytest.param((), Facts(device_uuids=("GPU-0",)), "unknown", id="none read"),
        pytest.param(
            (rank(0, GIB), rank(1, GIB)), replace(SERVER, pools=(pool(), pool("1"))), "unknown", id="two engines"
        ),
        pytest.param((rank(0, 6 * GIB), device(7, processes=(process(3, GIB),))), SERVER, "ok", id="one GPU"),
    ],
)
def test_idle_gpus_get_their_status(devices: Sequence[Device], of: Facts, status: str) -> None:
    """Ranks with GPUs of their own have no business on another's; each rank's bytes are needed, on known GPUs."""
    assert status == at_idle(*devices, of=of).status


def test_one_gpu_has_nothing_to_balance_at_any_time() -> None:
    """Not even where its server was never idle, or its usage is not reported."""
    busy = Sample(at_seconds=1.0, devices=(rank(0, GIB),), engines=(BUSY,))
    assert "ok" == only(judge, Timeline(samples=(busy,)), SERVER).status


def test_what_a_rank_holds_beyond_the_others_has_its_figures() -> None:
    """Compared with the middle of the others, of two the higher; 2 GiB are 1,024 blocks of 16 tokens."""
    actual = at_idle(
        rank(0, 6 * GIB),
        rank(1, 9 * GIB),
        rank(2, 5 * GIB),
        rank(3, 7 * GIB),
        rank(4, 7 * GIB),
    )

    # Of 5, 6, 7 and 7 the higher middle is 7
    assert ("imbalance.rank", "suspect", ImbalanceFigures(excess_bytes=2 * GIB, lost_tokens=16_384)) == (
        actual.id,
        actual.status,
        actual.imbalance,
    )
    assert [
        ("gpu_0_held", 6 * GIB, "bytes", "nvml"),
        ("gpu_1_held", 9 * GIB, "bytes", "nvml"),
        ("gpu_2_held", 5 * GIB, "bytes", "nvml"),
        ("gpu_3_held", 7 * GIB, "bytes", "nvml"),
        ("gpu_4_held", 7 * GIB, "bytes", "nvml"),
        ("excess", 2 * GIB, "bytes", "computed"),
        ("extra_process_bytes", 0, "bytes", "nvml"),
        ("kv_tokens_lost", 16_384, "tokens", "computed"),
    ] == rows(actual)


def test_a_short_idle_interval_without_process_lists_does_not_hide_an_earlier_one() -> None:
    """Process lists are read less often than memory: the newest idle interval that has them decides."""
    known, dark = (rank(0, 9 * GIB), rank(1, 6 * GIB)), (device(0), device(1))
    assert "suspect" == over(*[(IDLE, known)] * 2, (BUSY, known), *[(IDLE, dark)] * 2).status


@pytest.mark.parametrize("pools", [(), (pool(pool_bytes=None),)], ids=["no pool", "no size of a block"])
def test_without_the_size_of_a_block_there_is_no_price(pools: tuple[KvPool, ...]) -> None:
    """The rank is a suspect, but the tokens lost are unknown."""
    actual = at_idle(rank(0, 9 * GIB), rank(1, 6 * GIB), of=replace(SERVER, pools=pools))
    assert "suspect" == actual.status
    assert evidence(actual)["kv_tokens_lost"] is None


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
    crowded = rank(0, 6 * GIB, *contexts, pids=pids)
    actual = at_idle(replace(crowded, processes=(crowded.processes or ())[::-1]), rank(1, 6 * GIB), rank(2, 6 * GIB))
    assert status == actual.status
    assert sum(contexts) == evidence(actual)["extra_process_bytes"]


def test_the_newest_idle_reading_with_devices_counts() -> None:
    """An older one, and one under load, do not."""
    even, odd = ((rank(0, size * GIB), rank(1, 6 * GIB)) for size in (6, 9))
    idle = (IDLE, None)
    assert "suspect" == over(*[(IDLE, even)] * 2, (BUSY, even), (IDLE, odd), idle, (BUSY, even), idle, idle).status


@pytest.mark.parametrize(
    ("uuids", "status"), [(None, "unknown"), (("GPU-0", "GPU-1"), "suspect")], ids=["not assigned", "assigned"]
)
def test_a_gpu_without_a_process_list_counts_whole_only_where_it_is_assigned(
    uuids: tuple[str, ...] | None, status: str
) -> None:
    """Its processes were listed under load, and no longer when the server was idle."""
    listed, dark = (rank(0, 6 * GIB), rank(1, 6 * GIB)), (rank(0, 6 * GIB), device(1, used_bytes=20 * GIB))
    actual = over((BUSY, listed), (IDLE, dark), (IDLE, dark), of=replace(SERVER, device_uuids=uuids))
    assert status == actual.status


def test_a_reading_that_failed_gives_its_reason() -> None:
    """Where NVML is absent, that is why."""
    samples = (Sample(at_seconds=1.0, engines=(engine(),)), Sample(at_seconds=2.0, gaps=(NO_NVML,)))
    actual = only(judge, Timeline(samples=samples), SERVER)
    assert ("unknown", NO_NVML.reason) == (actual.status, actual.summary)


def test_an_assigned_gpu_holds_what_the_driver_does_not() -> None:
    """The driver's share is subtracted from the used bytes if it is reported."""
    known = Facts(device_uuids=("GPU-0", "GPU-1"))
    whole = device(0, used_bytes=20 * GIB, driver_reserved_bytes=None)
    actual = at_idle(whole, device(1, used_bytes=20 * GIB, driver_reserved_bytes=512 * MIB), of=known)
    assert {"gpu_0_held": 20 * GIB, "gpu_1_held": 20 * GIB - 512 * MIB}.items() <= evidence(actual).items()


def sized(*capacities: int | None) -> tuple[KvPool, ...]:
    """Engines whose pools have these capacities in tokens; `None`: not reported, a thousand blocks of 16."""
    return tuple(
        pool(str(number), capacity_tokens=tokens, usable_blocks=1_000) for number, tokens in enumerate(capacities)
    )


ALIKE = (device(0, used_bytes=9 * GIB), device(1, used_bytes=9 * GIB))
NO_MEMORY = tuple(device(index, used_bytes=None) for index in range(2))
LARGER = device(1, used_bytes=9 * GIB, total_bytes=40 * GIB)


@pytest.mark.parametrize(
    ("least", "devices", "uuids", "status"),
    [
        pytest.param(90_000, ALIKE, TWO.device_uuids, "unknown", id="a tenth less"),
        pytest.param(89_999, ALIKE, TWO.device_uuids, "suspect", id="a token more than a tenth"),
        pytest.param(75_000, ALIKE, TWO.device_uuids, "suspect", id="a quarter less"),
        pytest.param(74_999, ALIKE, TWO.device_uuids, "fault", id="a token more than a quarter"),
        pytest.param(10_000, ALIKE, None, "suspect", id="not assigned"),
        pytest.param(10_000, ALIKE[:1], TWO.device_uuids, "suspect", id="one not read"),
        pytest.param(10_000, ALIKE[:1], ("GPU-0",), "suspect", id="one alone"),
        pytest.param(10_000, (ALIKE[0], NO_MEMORY[1]), TWO.device_uuids, "suspect", id="one dark"),
        pytest.param(10_000, NO_MEMORY, TWO.device_uuids, "suspect", id="both dark"),
        pytest.param(10_000, (ALIKE[0], LARGER), TWO.device_uuids, "suspect", id="one larger"),
        pytest.param(10_000, (), TWO.device_uuids, "suspect", id="none read"),
    ],
)
def test_pools_of_engines_may_differ_by_a_tenth(
    least: int, devices: tuple[Device, ...], uuids: tuple[str, ...] | None, status: str
) -> None:
    """Beyond that a rank uses more; on GPUs that are all known, and alike, a quarter is certain."""
    assert status == at_idle(*devices, of=Facts(pools=sized(100_000, least), device_uuids=uuids)).status


def test_unequal_pools_have_their_figures() -> None:
    """The tokens lost are the largest less the smallest pool; an unreported capacity is a thousand blocks of 16."""
    actual = at_idle(*ALIKE, of=replace(TWO, pools=sized(30_000, None, 40_000)))

    assert ("imbalance.rank", "fault", ImbalanceFigures(lost_tokens=23_960)) == (
        actual.id,
        actual.status,
        actual.imbalance,
    )
    assert [
        ("engine_0_pool", 29_970, "tokens", "engine"),
        ("engine_1_pool", 16_000, "tokens", "engine"),
        ("engine_2_pool", 39_960, "tokens", "engine"),
        ("kv_tokens_lost", 23_960, "tokens", "computed"),
        ("pool_ratio", 16_000 / 39_960, "ratio", "computed"),
    ] == rows(actual)
