"""fragmentation.allocator: statuses by the figures reported, its thresholds, and the figures of its findings."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Allocator, Facts, Finding, Gap, Mark, Memory, Outcome, Sample, Timeline
from tests.builders.answers import containing, evidence, rows
from tests.builders.runs import run
from tests.builders.values import GIB, MIB, OOM, OOM_WITH_ROOM, engine, pool, split
from tests.builders.worlds import World, facts
from tests.unit.diagnosis.rules.gaps import FAILED, HELD, HOLES, SERVER, held, of_timeline, parts, verdict
from tests.unit.diagnosis.rules.leaks.cycles import cycles


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(), "unknown", id="nothing failed"),
        pytest.param(World(failing={"concurrent": "HTTP 500: internal error"}), "unknown", id="failed otherwise"),
        pytest.param(World(lost_in="single_request"), "unknown", id="server lost"),
        pytest.param(World(failing={"long_context": OOM}), "ok", id="exhausted"),
    ],
)
def test_runs_get_their_status(world: World, status: str) -> None:
    """What lies unused inside the allocator is not visible from outside; 3 GiB of 0.75 would have failed anyway."""
    assert status == of_timeline(run(world), facts(world)).status


def test_an_agent_that_sees_no_allocator_is_not_said_to_be_missing() -> None:
    """On a CPU the agent runs in each process, and none has an allocator: its own reason is given."""
    gap = Gap(source="torch_allocator", kind="absent", reason="none here")
    found = of_timeline(run(World()), replace(facts(World()), gaps=(gap,)))
    assert ("unknown", containing("none here")) == (found.status, found.summary)


NO_GAP = replace(HELD, allocated_bytes=8 * GIB)
SERVES = replace(HELD, split=replace(HOLES, fits=True))
COUNTED = replace(HELD, inactive_split_bytes=2 * GIB, alloc_retries_total=1)


@pytest.mark.parametrize(
    ("readings", "status"),
    [
        pytest.param((HELD, replace(HELD, split=HOLES, alloc_retries_total=4)), "suspect", id="flushes"),
        pytest.param((replace(SERVES, alloc_retries_total=9),) * 2, "ok", id="flushes before the first sample"),
        pytest.param((replace(HELD, split=split(live_bytes=5 * GIB, releasable_bytes=3 * GIB)),), "ok", id="cache"),
        pytest.param(
            (replace(HELD, split=split(live_bytes=5 * GIB, releasable_bytes=0, private_bytes=3 * GIB)),),
            "ok",
            id="graph pools",
        ),
        pytest.param((replace(HELD, backend="cudaMallocAsync"),), "unknown", id="no blocks"),
        pytest.param((HELD, COUNTED), "suspect", id="torch's own count"),
        pytest.param((HELD, replace(COUNTED, expandable_segments=True)), "unknown", id="expandable segments"),
        *(
            pytest.param((replace(NO_GAP, failure=replace(FAILED, **changes)),), "ok", id=f"failure {name}")
            for name, changes in (
                ("of more than all", {"asked_bytes": 4 * GIB}),
                ("beside a block that fits", {"asked_bytes": 96 * MIB}),
                ("of unknown blocks", {"split": None}),
            )
        ),
    ],
)
def test_processes_get_their_status(readings: tuple[Allocator, ...], status: str) -> None:
    """Holes count where torch flushes its cache, where a large block would not fit, or where an allocation failed.
    `inactive_split` stays 0 in expandable segments (pytorch#159564): there it says nothing.
    """
    assert status == verdict(*readings).status


def test_threshold_of_the_plain_rule_can_be_set() -> None:
    """A lower limit breaks down smaller gaps."""
    small = replace(HELD, allocated_bytes=8 * GIB - MIB)
    strict = verdict(small, limits=replace(DEFAULT_LIMITS, reserved_gap_bytes=0))
    assert ("ok", "unknown") == (verdict(small).status, strict.status)


@pytest.mark.parametrize(
    ("flushed", "tokens", "status"),
    [(1, 100, "suspect"), (1, 0, "ok"), (7, 100, "ok")],
    ids=["the server works", "the server is idle", "more than five minutes ago"],
)
def test_flushes_count_while_the_server_works(flushed: int, tokens: int, status: str) -> None:
    """Flushes in minutes in which nothing is generated are those of a start or an end; old ones are over."""
    readings = (SERVES, *[replace(SERVES, alloc_retries_total=7)] * flushed)
    pages = [replace(engine(), generation_tokens_total=number * tokens) for number in range(len(readings))]
    samples = tuple(
        Sample(at_seconds=60.0 * number, allocators=(one,), engines=(page,))
        for number, (one, page) in enumerate(zip(readings, pages, strict=True))
    )
    assert status == of_timeline(Timeline(samples=samples)).status


GROWN = 6 * MIB


def climbing(*processes: tuple[int, int]) -> Timeline:
    """Eight equal cycles in which processes reserve so many bytes more each, of which so many are live."""
    return cycles(
        [
            Sample(
                at_seconds=0.0,
                allocators=tuple(
                    held(5 * GIB + live * cycle, 6 * GIB + reserved * cycle, pid=100 + place)
                    for place, (reserved, live) in enumerate(processes)
                ),
            )
            for cycle in range(9)
        ]
    )


def test_cache_that_grows_with_each_request_has_its_figures() -> None:
    """Eight cycles, of which two are first touch: six times as much over the judged ones, of the worst process."""
    actual = of_timeline(climbing((GROWN, 0), (2 * GROWN, 0), (9 * GROWN, 9 * GROWN)))

    assert "suspect" == actual.status
    assert [
        ("process", "Worker 101", "holder", "torch"),
        ("reserved_growth_per_request", 12 * MIB, "bytes", "torch"),
        ("reserved_growth_over_judged_requests", 72 * MIB, "bytes", "torch"),
        ("live_growth_over_judged_requests", 0, "bytes", "torch"),
        ("judged_requests", 6, "requests", "kvdiag"),
        ("rising_requests", 6, "requests", "torch"),
    ] == rows(actual)


@pytest.mark.parametrize("growth", [(GROWN, GROWN), (0, 0)], ids=["live bytes grow as well", "nothing grows"])
def test_cache_that_does_not_grow_alone_is_judged_by_its_gap(growth: tuple[int, int]) -> None:
    """It is no cache's growth."""
    assert "ok" == of_timeline(climbing(growth)).status


GAP = 2 * 10**9
"""The rule of thumb: up to here it is normal."""


def judged(*inside: Allocator) -> Finding:
    """The finding on one reading of some processes."""
    return of_timeline(Timeline(samples=(Sample(at_seconds=1.0, allocators=inside),)))


def failing(*errors: tuple[str, int, str]) -> Finding:
    """The finding on requests that failed: the step, how many of them, and with which message."""
    marks: list[Mark] = []
    for number, (step, failed, error) in enumerate(errors):
        outcome = Outcome(completed=0, failed=failed, prompt_tokens=0, generated_tokens=0, errors=(error,))
        at_seconds = 10.0 * number
        marks.append(Mark(at_seconds=at_seconds, step=step, cycle=number, phase="begin"))
        marks.append(Mark(at_seconds=at_seconds + 1, step=step, cycle=number, phase="release", outcome=outcome))
    return of_timeline(Timeline(samples=(), marks=tuple(marks)))


def test_of_several_messages_the_one_with_the_most_unused_is_reported() -> None:
    """2.95 GiB lay unused in the first, 3.50 in the second; the last is plain exhaustion, which excuses neither."""
    more = OOM_WITH_ROOM.replace("2.95 GiB is reserved", "3.50 GiB is reserved")
    found = [
        failing(("soak", 1, OOM_WITH_ROOM), ("concurrent", 7, more), ("long_context", 1, OOM)),
        failing(("concurrent", 7, more), ("soak", 1, OOM_WITH_ROOM)),
    ]

    for one, steps in zip(found, ("soak, concurrent", "concurrent, soak"), strict=True):
        assert "fault" == one.status
        assert [
            ("requested", 5 * GIB // 2, "bytes", "torch's message"),
            ("free_on_device", 512 * MIB, "bytes", "torch's message"),
            ("reserved_but_unallocated", 7 * GIB // 2, "bytes", "torch's message"),
            ("failed_requests", 8, "requests", f"step {steps}"),
        ] == rows(one)


def test_of_exhaustion_the_newest_message_is_reported() -> None:
    """Three GiB of less than one, twice: the newer one's figures; one without figures leaves it open."""
    later = OOM.replace("512.00 MiB is free", "256.00 MiB is free")
    cut = "CUDA out of memory. Tried to allocate 3.00 GiB."

    actual = failing(("concurrent", 9, OOM), ("long_context", 2, later))
    assert ("ok", 256 * MIB, 11) == (
        actual.status,
        evidence(actual)["free_on_device"],
        evidence(actual)["failed_requests"],
    )
    assert "unknown" == failing(("concurrent", 9, OOM), ("long_context", 2, cut)).status
    assert "ok" == failing(("concurrent", 9, cut), ("long_context", 2, OOM)).status


def test_a_process_has_all_of_its_parts() -> None:
    """What is reserved, what of it is unused, of what kind, and what failed before."""
    inside = held(5 * GIB, 8 * GIB, split=HOLES, failure=FAILED, process_bytes=9 * GIB)
    actual = judged(inside)
    assert ("fragmentation.allocator", "fault", "Worker 100") == (actual.id, actual.status, actual.holder)
    assert [
        ("process", "Worker 100", "holder", "torch"),
        ("reserved", 8 * GIB, "bytes", "torch"),
        ("reserved_but_unallocated", 3 * GIB, "bytes", "torch"),
        ("alloc_retries", 0, "times", "torch"),
        ("requested", 512 * MIB, "bytes", "black box"),
        ("free_on_device", 200 * MIB, "bytes", "black box"),
        ("failed_seconds_ago", 300.0, "seconds", "black box"),
        ("releasable", 320 * MIB, "bytes", "torch"),
        ("stranded", 2 * GIB, "bytes", "torch"),
        ("private_pools", 640 * MIB, "bytes", "torch"),
        ("pending", 64 * MIB, "bytes", "torch"),
        ("largest_free_block", 96 * MIB, "bytes", "torch"),
        ("unusable_ratio", 0.75, "ratio", "computed"),
    ] == rows(actual)


@pytest.mark.parametrize(
    ("age_seconds", "status"),
    [(0.0, "fault"), (59.9, "fault"), (60.0, "fault"), (3600.0, "fault"), (3600.1, "ok")],
)
def test_when_an_allocation_failed_is_reported_for_an_hour(age_seconds: float, status: str) -> None:
    """A failed allocation is a fault for an hour; after that, the requests that met the holes have ended."""
    inside = held(8 * GIB, 8 * GIB, title=None, failure=replace(FAILED, age_seconds=age_seconds))
    actual = judged(inside)
    assert status == actual.status
    assert (status == "fault") == ("failed_seconds_ago" in evidence(actual))


@pytest.mark.parametrize(
    ("inside", "status"),
    [
        (held(5 * GIB, 5 * GIB + GAP), "ok"),
        (held(5 * GIB, 5 * GIB + GAP + 1), "unknown"),
        (held(5 * GIB, 8 * GIB, split=replace(HOLES, fits=None)), "unknown"),
        (held(5 * GIB, 8 * GIB, backend=None), "unknown"),
        (held(8 * GIB, 8 * GIB, backend=None), "ok"),
        (held(8 * GIB, 8 * GIB, process_bytes=8 * GIB), "ok"),
        (held(8 * GIB, 8 * GIB, process_bytes=8 * GIB - 1), "unknown"),
    ],
    ids=["2 GB", "a byte more", "fit not told", "backend not told", "no gap", "all of the process", "more than it"],
)
def test_a_gap_is_normal_up_to_two_gigabytes_and_then_needs_its_parts(inside: Allocator, status: str) -> None:
    """Reserved less allocated, by the decimal rule of thumb."""
    assert status == judged(inside).status


def test_what_is_unknown_of_a_gap_has_its_size() -> None:
    """A gap of three GiB whose parts are not reported has its size as evidence."""
    assert [
        ("process", "Worker 100", "holder", "torch"),
        ("reserved", 8 * GIB, "bytes", "torch"),
        ("reserved_but_unallocated", 3 * GIB, "bytes", "torch"),
        ("alloc_retries", None, "times", "torch"),
    ] == rows(judged(held(5 * GIB, 8 * GIB, alloc_retries_total=None)))


@pytest.mark.parametrize(
    ("stranded", "fits", "status"),
    [(512 * MIB, False, "suspect"), (512 * MIB - 1, False, "ok"), (512 * MIB, True, "ok")],
    ids=["as much as is asked for", "a byte less", "it fits"],
)
def test_holes_count_where_a_block_of_their_size_would_not_fit(stranded: int, fits: bool, status: str) -> None:
    """Together they would take the 512 MiB that are looked for, and in one piece they do not."""
    inside = parts(5 * GIB, stranded_bytes=stranded, private_bytes=GAP, releasable_bytes=MIB, fits=fits)
    assert status == judged(held(5 * GIB, inside.reserved_bytes, split=inside)).status


MEMORY = Memory(total_bytes=80 * GIB, free_bytes=60 * GIB)


def idle(inside: Allocator) -> Finding:
    """The finding after eleven idle minutes, with a sample each half minute."""
    samples = [Sample(at_seconds=30.0 * at, allocators=(inside,), engines=(engine(),)) for at in range(23)]
    return of_timeline(Timeline(samples=tuple(samples)))


@pytest.mark.parametrize(("stranded", "status"), [(5 * GIB, "ok"), (5 * GIB + 1, "suspect")])
def test_what_stays_unused_through_idle_minutes_is_holes_or_cache(stranded: int, status: str) -> None:
    """Ten GiB of 80 for ten minutes, half of them between live blocks, and a byte more."""
    sizes = {"stranded_bytes": stranded, "releasable_bytes": 10 * GIB - stranded}
    by_blocks = idle(held(5 * GIB, 15 * GIB, split=parts(5 * GIB, **sizes), memory=MEMORY))
    by_metrics = idle(held(5 * GIB, 15 * GIB, memory=MEMORY, **sizes))
    # Prometheus does not keep whether a large block would fit.
    assert (status, status if status == "suspect" else "unknown") == (by_blocks.status, by_metrics.status)
    assert [
        ("releasable", 10 * GIB - stranded, "bytes", "torch"),
        ("stranded", stranded, "bytes", "torch"),
    ] == rows(by_metrics)[4:]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"stranded_bytes": 512 * MIB}, "unknown"),
        ({"stranded_bytes": 512 * MIB - 1}, "ok"),
        ({"stranded_bytes": None, "expandable_segments": True}, "unknown"),
        ({"stranded_bytes": MIB, "releasable_bytes": None, "expandable_segments": True}, "unknown"),
    ],
    ids=["a large block", "a byte less", "one part", "the other part"],
)
def test_parts_without_blocks_get_their_status(changes: dict[str, object], status: str) -> None:
    """Whether 512 MiB would fit is not kept: below that it does not matter. Both parts have to be known."""
    actual = judged(held(5 * GIB, 9 * GIB, **{"releasable_bytes": 3 * GIB, **changes}))
    assert status == actual.status
    assert ({"stranded", "releasable"} <= evidence(actual).keys()) == (None not in changes.values())


def test_the_worst_process_speaks_and_of_equals_the_first_by_name() -> None:
    """Fault before suspect before unknown before ok."""
    fine, dark = held(8 * GIB, 8 * GIB), held(5 * GIB, 8 * GIB, pid=101)
    ill = held(5 * GIB, 8 * GIB, pid=102, split=HOLES)
    dead = held(5 * GIB, 8 * GIB, pid=100, split=HOLES, failure=FAILED)

    assert ["ok", "unknown", "suspect", "fault"] == [
        judged(*inside).status for inside in ((fine,), (dark, fine), (fine, ill, dark), (ill, dead, dark))
    ]
    assert "Worker 101" == evidence(judged(ill, replace(ill, pid=101)))["process"]
    assert "A 102" == evidence(judged(replace(ill, pid=101), replace(ill, title="A")))["process"]
    assert "process 102" == evidence(judged(replace(ill, pid=101), replace(ill, title=None)))["process"]
    small = replace(ill, device_uuid="a", split=replace(HOLES, unusable_ratio=0.5))
    assert 0.5 == evidence(judged(replace(ill, device_uuid="b"), small))["unusable_ratio"]


def left(
    *gaps_gib: float, seconds: float = 3600.0, of: Facts = SERVER, titles: Sequence[str | None] = ("Worker",) * 9
) -> Finding:
    """The finding on processes that have so much unused from their start on, while a server takes prompts."""
    samples = []
    for number in range(2):
        inside = tuple(
            held(
                20 * GIB,
                20 * GIB + int(gap * GIB),
                pid=100 + place,
                title=titles[place],
                memory=MEMORY,
                split=parts(20 * GIB, releasable_bytes=int(gap * GIB)),
            )
            for place, gap in enumerate(gaps_gib)
        )
        page = engine(usage=0.1, running=3, prompt_tokens=10_000 * number)
        samples.append(Sample(at_seconds=seconds * number, allocators=inside, engines=(page,)))
    return of_timeline(Timeline(samples=tuple(samples)), of)


@pytest.mark.parametrize(("seconds", "status"), [(3600.0, "fault"), (3599.9, "suspect"), (599.9, "ok")])
def test_what_the_load_left_is_a_fault_after_an_hour(seconds: float, status: str) -> None:
    """Ten GiB of 80 are a fault after an hour, a suspect before, and ok in the first ten minutes."""
    assert status == left(10, seconds=seconds).status


def test_what_the_load_left_has_its_price() -> None:
    """Ten GiB in three processes: at blocks of 2 MiB with 16 tokens each, 5,120 blocks are 81,920 tokens."""
    actual = left(9, 10, 9.5)
    assert "fault" == actual.status
    assert [
        ("process", "Worker 101", "holder", "torch"),
        ("min_unused_since_start", 10 * GIB, "bytes", "torch"),
        ("processes", 3, "processes", "torch"),
        ("kv_tokens_lost", 81_920, "tokens", "computed"),
        ("reserved", 30 * GIB, "bytes", "torch"),
        ("reserved_but_unallocated", 10 * GIB, "bytes", "torch"),
    ] == rows(actual)[:6]
    assert containing("cache was not emptied") == actual.likely_cause


def test_what_the_load_left_where_a_block_has_no_size() -> None:
    """No bytes of the pool, no price; without a pool there is nothing to be made larger."""
    assert "ok" == left(10, of=replace(SERVER, pools=())).status
    actual = left(10, of=replace(SERVER, pools=(pool(pool_bytes=None),)))
    assert "fault" == actual.status
    assert evidence(actual)["kv_tokens_lost"] is None


def test_of_equal_leftovers_one_is_named_always_the_same() -> None:
    """By title, then by process."""
    assert "Worker 100" == evidence(left(10, 10))["process"]
    assert "A 101" == evidence(left(10, 10, titles=("B", "A")))["process"]
    assert "process 101" == evidence(left(10, 10, titles=("B", None)))["process"]


def test_an_engine_without_torch_has_no_blocks_of_it() -> None:
    """llama.cpp's process has no agent to ask."""
    assert "ok" == of_timeline(Timeline(samples=()), Facts(engine_name="llamacpp")).status
    assert "unknown" == of_timeline(Timeline(samples=()), Facts(engine_name="sglang")).status
