"""leak.device_torch and leak.device_non_torch over eight equal cycles, of which two are first touch: to the byte."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.attribution import CULPRIT, NON_TORCH, TORCH, UNDECIDED
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_device import judge
from kvdiag.model import Allocator, Device, Facts, Finding, Sample, Timeline
from tests.builders.answers import containing, evidence, rows
from tests.builders.values import GIB, KIB, MIB, NO_NVML, allocator, device, engine, pool, process
from tests.unit.diagnosis.rules.leaks.cycles import cycles

SERVER = Facts(engine_name="vllm", pools=(pool(),), server_pids=(100, 101, 102))
PAGE = 2 * MIB
STEADY = (1,) * 8
"""So much after each of eight cycles; the first two are not judged."""


def levels(steps: Sequence[int], unit: int, base: int = 10 * GIB) -> list[int]:
    """What is held before the first cycle and after each."""
    return [base + unit * sum(steps[:cycle]) for cycle in range(9)]


def gpu(own: int | None, *, index: int = 0, others: int = 0) -> Device:
    """A GPU with these bytes of the server (`None`: not reported) and these of another process."""
    listed = None if own is None else (process(100 + index, own), process(7, others))
    return device(index, total_bytes=160 * GIB, used_bytes=(own or 0) + others + GIB, processes=listed)


def hidden(used: int, *, index: int = 0) -> Device:
    """A GPU with these bytes used by unknown processes."""
    return device(index, total_bytes=160 * GIB, used_bytes=used)


def findings(timeline: Timeline, of: Facts = SERVER) -> tuple[Finding, Finding]:
    """Both findings, torch's first."""
    found = {one.id: one for one in judge(timeline, of, DEFAULT_LIMITS)}
    return found[TORCH], found[NON_TORCH]


def by_device(*readings: tuple[Device, ...], baseline: Sequence[tuple[Device, ...]] = ()) -> tuple[Finding, Finding]:
    """Both findings on samples of the devices around the cycles."""
    before = [Sample(at_seconds=0.0, devices=devices) for devices in baseline]
    return findings(cycles([Sample(at_seconds=0.0, devices=devices) for devices in readings], baseline=before))


def test_a_server_that_grows_has_its_figures() -> None:
    """Three pages after each of six judged cycles, and two first ones; nothing more is known without an agent."""
    torch, beside = by_device(*((gpu(size),) for size in levels(STEADY, 3 * PAGE)))

    assert ("fault", containing("GPU 0", "6.00 MiB", CULPRIT)) == (torch.status, torch.summary)
    assert (NON_TORCH, f"{TORCH} or {NON_TORCH}") == (torch.or_id, torch.title)
    assert [
        ("gpu", 0, "index", "nvml"),
        ("growth_per_request", 6 * MIB, "bytes", "nvml"),
        ("growth_over_judged_requests", 36 * MIB, "bytes", "nvml"),
        ("judged_requests", 6, "requests", "kvdiag"),
        ("rising_requests", 6, "requests", "nvml"),
        ("warmup_growth", 12 * MIB, "bytes", "nvml"),
        ("smallest_detectable_leak", 2 * MIB, "bytes per request", "computed"),
        ("holder", "server", "holder", "nvml"),
    ] == rows(torch)
    assert ("unknown", f"{UNDECIDED}", ()) == (beside.status, beside.summary, beside.evidence)


@pytest.mark.parametrize(
    ("steps", "unit", "status", "words"),
    [
        ((0, 0, 0, 0, 0, 0, 0, 1), PAGE - 1, "ok", "flat over the last 6"),
        ((9, 9, 0, 0, 0, 0, 0, 0), PAGE, "ok", "flat over the last 6"),
        ((0, 0, 0, 0, 0, 0, 0, 1), PAGE, "unknown", " rose 2.00 MiB in 6 equal requests"),
        ((0, 0, 9, 0, 9, 0, 0, 0), PAGE, "unknown", " rose 36.0 MiB in 6 equal requests"),
    ],
    ids=["less than a page", "first touch", "a page once", "twice"],
)
def test_growth_that_is_none_or_not_steady(steps: Sequence[int], unit: int, status: str, words: str) -> None:
    """Both verdicts say the same of it, with the same figures."""
    found = by_device(*((gpu(size),) for size in levels(steps, unit)))
    assert [status, status] == [one.status for one in found]
    assert all(words in one.summary for one in found)
    assert rows(found[0]) == rows(found[1])
    assert sum(steps[2:]) * unit == evidence(found[0])["growth_over_judged_requests"]
    assert all(("2.00 MiB per request" in one.summary) == (status == "ok") for one in found)


def test_the_servers_leak_stands_before_faster_growth_of_others() -> None:
    """The server's leak on its first GPU is reported although another process grows faster on the second."""

    def of(own: int, other: int) -> tuple[Finding, Finding]:
        readings = zip(levels(STEADY, own * PAGE), levels(STEADY, other * PAGE, base=GIB), strict=True)
        return by_device(*((gpu(size), gpu(4 * GIB, index=1, others=taken)) for size, taken in readings))

    own, neighbour = of(1, 30)[0], of(0, 30)
    assert ("fault", 0, "server") == (own.status, evidence(own)["gpu"], evidence(own)["holder"])
    assert [("unknown", containing("another process", "GPU 1", "360 MiB in 6 equal requests"))] * 2 == [
        (one.status, one.summary) for one in neighbour
    ]
    assert ("holder", "another process", "holder", "nvml") in rows(neighbour[0])


def test_the_gpu_that_grows_most_is_reported() -> None:
    """Two ranks that leak, the second more."""
    readings = zip(levels(STEADY, PAGE), levels(STEADY, 2 * PAGE), strict=True)
    torch, _ = by_device(*((gpu(one), gpu(other, index=1)) for one, other in readings))
    assert (1, 4 * MIB) == (evidence(torch)["gpu"], evidence(torch)["growth_per_request"])


@pytest.mark.parametrize(
    ("idle", "status"), [(PAGE, "unknown"), (PAGE - 1, "fault"), (None, "fault")], ids=["a page", "less", "not seen"]
)
def test_growth_of_nobody_known_counts_where_idle_time_shows_none(idle: int | None, status: str) -> None:
    """What grows by a page while nothing is offered, too, is not the requests'."""
    grown = [(hidden(size),) for size in levels(STEADY, PAGE)]
    baseline = () if idle is None else ((hidden(9 * GIB),), (hidden(9 * GIB + idle),))
    torch, beside = by_device(*grown, baseline=baseline)

    assert (status, "unknown", "unknown") == (torch.status, beside.status, evidence(torch)["holder"])
    words = {
        "unknown": containing("GPU 0", "grows while idle (2.00 MiB"),
        "fault": containing("GPU 0", "process is not visible", "grows 2.00 MiB with each"),
    }
    assert words[status] == torch.summary
    # growth of the server's own bytes counts even if it grows while idle
    own = by_device(*((gpu(size),) for size in levels(STEADY, PAGE)), baseline=((gpu(GIB),), (gpu(2 * GIB),)))
    assert "fault" == own[0].status


@pytest.mark.parametrize(
    ("timeline", "told_"),
    [
        (Timeline(samples=(Sample(at_seconds=1.0, engines=(engine(),)),)), containing("no device memory", "NVML")),
        (Timeline(samples=(Sample(at_seconds=1.0, gaps=(NO_NVML,)),)), NO_NVML.reason),
        (
            Timeline(samples=(Sample(at_seconds=1.0, engines=(engine(),), devices=(gpu(GIB),)),)),
            containing("no test run", "sample for 1 h"),
        ),
        (
            cycles([Sample(at_seconds=0.0, devices=(gpu(GIB),))] * 5),
            containing("fewer than 5 equal requests"),
        ),
    ],
    ids=["nothing", "no NVML", "no steps", "four cycles"],
)
def test_what_is_missing_is_reported(timeline: Timeline, told_: str) -> None:
    """For both verdicts, without figures."""
    assert [("unknown", told_, ())] * 2 == [(one.status, one.summary, one.evidence) for one in findings(timeline)]


def test_five_cycles_are_enough() -> None:
    """Two of first touch, and three to judge."""
    assert "ok" == findings(cycles([Sample(at_seconds=0.0, devices=(gpu(GIB),))] * 6))[0].status


def inside(live: int, reserved: int, process_bytes: int | None = None, *, pid: int = 100, uuid: str = "0") -> Allocator:
    """What an agent publishes."""
    return allocator(
        title="Worker",
        pid=pid,
        device_uuid=uuid,
        allocated_bytes=live,
        reserved_bytes=reserved,
        process_bytes=process_bytes,
    )


def by_agents(
    *readings: tuple[Allocator, ...], devices: Sequence[tuple[Device, ...]] | None = None, of: Facts = SERVER
) -> tuple[Finding, Finding]:
    """Both findings on the agents' publications around the cycles, with samples of the devices."""
    beside: Sequence[tuple[Device, ...] | None] = devices or [None] * len(readings)
    samples = [Sample(at_seconds=0.0, allocators=one, devices=two) for one, two in zip(readings, beside, strict=True)]
    return findings(cycles(samples), of)


def of_live(*processes: Sequence[int], unit: int = KIB) -> Finding:
    """Torch's finding on processes whose live bytes rise so after each cycle, all that is reserved standing still."""
    series = [levels(steps, unit) for steps in processes]
    return by_agents(
        *(
            tuple(inside(sizes[cycle], 12 * GIB, 14 * GIB, pid=100 + place) for place, sizes in enumerate(series))
            for cycle in range(9)
        )
    )[0]


@pytest.mark.parametrize(
    ("steps", "status", "words"),
    [
        ((0, 0, 0, 0, 0, 0, 0, 63), "ok", "flat over the last 6"),
        ((0, 0, 0, 0, 0, 0, 0, 64), "ok", "rose once, 64.0 KiB"),
        ((0, 0, 0, 0, 64, 0, 0, 64), "unknown", " rose 128 KiB in 6 equal requests"),
        ((64,) * 8, "fault", " grows 64.0 KiB with each request"),
        ((63,) * 8, "unknown", " rose 378 KiB in 6 equal requests"),
    ],
    ids=["less than counts", "once", "twice", "each time", "a little less each time"],
)
def test_what_lives_in_torch_counts_from_64_kib(steps: Sequence[int], status: str, words: str) -> None:
    """Once is an event, twice is open, each time is a leak."""
    actual = of_live(steps)

    assert (status, containing("torch's allocated memory", words)) == (actual.status, actual.summary)
    assert [
        ("process", "Worker 100", "holder", "torch"),
        ("live_growth_per_request", sum(steps[2:]) * KIB / 6, "bytes", "torch"),
        ("live_growth_over_judged_requests", sum(steps[2:]) * KIB, "bytes", "torch"),
        ("judged_requests", 6, "requests", "kvdiag"),
        ("rising_requests", sum(step >= 64 for step in steps[2:]), "requests", "torch"),
        ("warmup_growth", sum(steps[:2]) * KIB, "bytes", "torch"),
        ("reserved_growth_over_judged_requests", 0, "bytes", "torch"),
    ] == rows(actual)


def test_the_process_that_leaks_is_reported_before_one_that_rose_more() -> None:
    """A leak of 100 KiB a request stands before a table of 90 MiB that came once; of two leaks the larger."""
    once = (0, 0, 0, 0, 90_000, 0, 0, 0)
    for grown, other in ((100, once), (200, (100,) * 8)):
        leak = evidence(of_live(other, (grown,) * 8))
        assert ("Worker 101", grown * KIB) == (leak["process"], leak["live_growth_per_request"])


def of_outside(*processes: Sequence[int]) -> Finding:
    """The finding on processes that hold so many pages more outside torch after each cycle."""
    series = [levels(steps, PAGE) for steps in processes]
    return by_agents(
        *(
            tuple(inside(5 * GIB, 6 * GIB, sizes[cycle], pid=100 + place) for place, sizes in enumerate(series))
            for cycle in range(9)
        )
    )[1]


@pytest.mark.parametrize(
    ("steps", "status", "words"),
    [
        ((5, 5, 0, 0, 0, 0, 0, 0), "ok", "flat over the last 6"),
        ((0, 0, 0, 0, 1, 0, 0, 1), "unknown", " rose 4.00 MiB in 6 equal requests"),
        (STEADY, "fault", " grows 2.00 MiB"),
    ],
    ids=["flat", "now and then", "each time"],
)
def test_what_is_beside_torch_counts_by_pages(steps: Sequence[int], status: str, words: str) -> None:
    """The process's own bytes less what torch reserves."""
    actual = of_outside(steps)

    assert (status, containing("outside torch", words)) == (actual.status, actual.summary)
    assert [
        ("process", "Worker 100", "holder", "torch"),
        ("outside_torch_growth_per_request", sum(steps[2:]) * PAGE / 6, "bytes", "torch"),
        ("outside_torch_growth_over_judged_requests", sum(steps[2:]) * PAGE, "bytes", "torch"),
        ("judged_requests", 6, "requests", "kvdiag"),
        ("rising_requests", sum(steps[2:]), "requests", "torch"),
        ("warmup_growth", sum(steps[:2]) * PAGE, "bytes", "torch"),
        ("reserved_growth_over_judged_requests", 0, "bytes", "torch"),
    ] == rows(actual)


def test_the_process_that_leaks_beside_torch_is_reported_first() -> None:
    """Before one that rose more, once; of two leaks the larger."""
    assert containing("Worker (pid 101)", "grows 2.00 MiB") == of_outside((0, 0, 0, 0, 90, 0, 0, 0), STEADY).summary
    assert containing("Worker (pid 101)", "grows 4.00 MiB") == of_outside(STEADY, (2,) * 8).summary


def rest(grown: Sequence[int], *reserved: Sequence[int], uuid: str = "0", own: bool = True, index: int = 0) -> Finding:
    """The finding outside torch without process sizes: a device grew by `grown`, torch by each of `reserved`."""
    sizes, series = levels(grown, PAGE), [levels(steps, PAGE, base=4 * GIB) for steps in reserved]
    return by_agents(
        *(
            tuple(inside(3 * GIB, kept[cycle], pid=100 + place, uuid=uuid) for place, kept in enumerate(series))
            for cycle in range(9)
        ),
        devices=[(gpu(size, index=index) if own else gpu(4 * GIB, index=index, others=size),) for size in sizes],
    )[1]


@pytest.mark.parametrize(
    ("growth", "status", "words"),
    [
        (lambda: rest(STEADY, STEADY), "ok", "flat outside torch"),
        (lambda: rest((2,) * 8, STEADY), "fault", " 12.0 MiB in 6 equal requests"),
        (lambda: rest((2,) * 8, STEADY, STEADY), "ok", "flat outside torch"),
        (lambda: rest((3,) * 8, STEADY, STEADY), "fault", " 12.0 MiB in 6 equal requests"),
        (lambda: rest((0, 0, 1, 0, 0, 0, 0, 0), (0,) * 8), "unknown", " rose 2.00 MiB in"),
        (lambda: rest((0,) * 8, (0,) * 8), "ok", "flat outside torch"),
        (lambda: rest((2,) * 8, (2,) * 8, uuid="1"), "fault", " 24.0 MiB in 6 equal requests"),
        (lambda: rest(STEADY, (0,) * 8, own=False), "unknown", "are not reported"),
    ],
    ids=["torch's", "half of it", "two processes'", "a third", "a page", "flat", "another GPU's torch", "a neighbour"],
)
def test_the_devices_growth_less_what_torch_reserved_is_beside_it(
    growth: Callable[[], Finding], status: str, words: str
) -> None:
    """Of all the processes on that device; a page is the least that counts."""
    found = growth()
    undecided = words == "are not reported"
    assert (status, containing(words, "" if undecided else "outside torch")) == (found.status, found.summary)
    assert undecided == (found.evidence == ())


def test_devices_are_the_same_however_they_are_written() -> None:
    """CUDA writes capitals where NVML does not."""
    sizes = levels(STEADY, PAGE)
    found = by_agents(
        *((inside(3 * GIB, size, uuid="ABC"),) for size in sizes),
        devices=[(replace(gpu(size), uuid="GPU-abc"),) for size in sizes],
    )
    assert "ok" == found[1].status


def test_of_several_devices_the_one_with_most_beside_torch_is_reported() -> None:
    """GPU 1 grows less than GPU 0, of which all is torch's."""
    much, some = levels((9,) * 8, PAGE), levels((2,) * 8, PAGE)
    found = by_agents(
        *((inside(3 * GIB, size), inside(3 * GIB, 4 * GIB, pid=101, uuid="1")) for size in much),
        devices=[(gpu(one), gpu(other, index=1)) for one, other in zip(much, some, strict=True)],
    )[1]
    figures_of = evidence(found)
    assert ("fault", 1, 24 * MIB) == (found.status, figures_of["gpu"], figures_of["growth_over_judged_requests"])


def test_one_process_that_does_not_report_its_bytes_leaves_it_to_the_device() -> None:
    """If one of two processes reports no size, their sum is unknown, and so is the finding."""
    dark = by_agents(*((inside(3 * GIB, 4 * GIB, 9 * GIB), inside(3 * GIB, 4 * GIB, pid=101)) for _ in range(9)))
    assert ("unknown", containing("not reported")) == (dark[1].status, dark[1].summary)
