"""leak.host: growth of host memory, the room that is left, and which bytes of a process count."""

import math
from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.lives import lifetimes
from kvdiag.diagnosis.rules.leak_host import ID, judge
from kvdiag.model import Facts, Finding, Gap, HostProcess, Sample, Timeline
from tests.builders.answers import containing, evidence, finding, only
from tests.builders.runs import run
from tests.builders.series import MODELS, host_part, timeline
from tests.builders.values import GIB, SERVER_PID, engine
from tests.builders.worlds import World, facts

FACTS = replace(facts(World()), host_limit_bytes=64 * GIB)


def verdict(seen: Timeline) -> Finding:
    """The rule's finding on the last life of a timeline."""
    life = lifetimes(seen, FACTS, DEFAULT_LIMITS)[-1]
    return only(judge, life.timeline, life.facts)


def test_growth_over_hours_is_a_fault_with_the_time_that_is_left() -> None:
    """The engine core grows by 200 MB/h for seven hours: it is named, with its rate and when the limit is reached."""
    actual = verdict(timeline("filled cache", hours=7.0, leak_mb_per_hour=200.0, part=host_part))

    shown = evidence(actual)
    rate, left = shown["growth_per_hour"], shown["time_to_exhaustion"]
    assert (ID, "fault", f"VLLM::EngineCore {SERVER_PID}") == (actual.id, actual.status, actual.holder)
    assert isinstance(rate, float)
    assert isinstance(left, float)
    assert pytest.approx(200e6, rel=0.05) == rate
    # 64 GiB less 28 GiB of the core, less what it grew, less 2 GiB of the server, at that rate
    assert pytest.approx((34 * GIB - 7 * 200e6) / rate * 3600.0, rel=0.01) == left
    assert shown["time_to_exhaustion_earliest"] <= left <= shown["time_to_exhaustion_latest"]  # type: ignore[operator]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "random walk"])
@pytest.mark.parametrize("hours", [2.0, 8.0])
def test_healthy_processes_are_silent(name: str, hours: float) -> None:
    """Load, garbage, warm-up, an allocator's high-water mark, level steps and full caches are not called."""
    actual = [verdict(timeline(name, seed, hours=hours, part=host_part)).status for seed in range(3)]
    # Noise as slow as an hour may stay open
    assert set(actual) <= ({"ok", "unknown"} if name == "slow noise" else {"ok"})


def test_silence_says_what_would_have_shown() -> None:
    """A flat process's verdict names the growth that would have been called, and no time to exhaustion."""
    actual = verdict(timeline("pool", hours=8.0, part=host_part))
    assert ("ok", None) == (actual.status, evidence(actual)["time_to_exhaustion"])
    assert pytest.approx(150e6 / 8.0, rel=0.02) == evidence(actual)["detection_limit"]


def test_window_too_short_is_unknown_and_names_the_one_that_decides() -> None:
    """Half an hour of samples is too short: the verdict is unknown and has no evidence."""
    actual = verdict(timeline("pool", hours=0.5, leak_mb_per_hour=5000.0, part=host_part))
    assert ("unknown", ()) == (actual.status, actual.evidence)


def test_noise_as_large_as_the_growth_is_unknown() -> None:
    """Growth that slow noise nearly hides is neither called nor denied."""
    actual = verdict(timeline("slow noise", 0, hours=7.5, leak_mb_per_hour=50.0, part=host_part))
    assert "unknown" == actual.status
    assert evidence(actual)["decided_by"] in {"weak", "uneven", "drift", "recent"}


def test_run_of_a_minute_says_nothing_and_leaves_the_verdict_alone() -> None:
    """The four steps are too short for a leak on the host: unknown, and a healthy run stays ok."""
    diagnosis = diagnose(run(World()), FACTS)
    assert ("unknown", ()) == (finding(diagnosis, ID).status, finding(diagnosis, ID).evidence)
    assert "ok" == diagnosis.worst


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ((), containing("memory was not read", "PID namespace")),
        (
            (Sample(at_seconds=0.0, gaps=(Gap(source="host", kind="absent", reason="not this host"),)),),
            "not this host",
        ),
        (
            (Sample(at_seconds=0.0, host=(HostProcess(pid=1, name="vllm", resident_bytes=GIB),)),),
            containing("less than a minute", "sample 1 h", "143 MiB/h"),
        ),
    ],
    ids=["not read", "not here", "resident alone"],
)
def test_what_is_not_observed_is_unknown(samples: tuple[Sample, ...], reason: str) -> None:
    """Without anonymous bytes the rule says what is missing."""
    assert Finding(id=ID, status="unknown", summary=reason) == verdict(Timeline(samples=samples))


def page_part(size: int) -> Sample:
    """The API server's resident memory, as its own metrics report it."""
    return Sample(at_seconds=0.0, host=(HostProcess(pid=1, name="API server", resident_bytes=size),))


@pytest.mark.parametrize(
    ("hours", "leak", "expected"),
    [
        (1.0, 0.0, "unknown"),
        (8.0, 0.0, "unknown"),
        (4.5, 200.0, "suspect"),
        (9.0, 200.0, "fault"),
    ],
    ids=["too short", "flat", "for hours", "for longer"],
)
def test_resident_bytes_alone_count_after_hours(hours: float, leak: float, expected: str) -> None:
    """Mapped files may be what grows at first; and that the API server stands still says nothing of the others."""
    actual = verdict(timeline("filled cache", hours=hours, leak_mb_per_hour=leak, part=page_part))
    assert expected == actual.status


def test_a_still_api_server_leaves_nothing_undecided() -> None:
    """Flat memory of the API server alone is unknown (not judged), without evidence."""
    actual = verdict(timeline("filled cache", hours=8.0, part=page_part))
    assert ("unknown", (), "API server 1") == (actual.status, actual.evidence, actual.holder)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "random walk"])
def test_healthy_api_servers_are_silent(name: str) -> None:
    """Resident bytes of a healthy process are never called."""
    assert {"unknown"} == {verdict(timeline(name, seed, hours=9.0, part=page_part)).status for seed in range(2)}


def test_working_set_of_a_container_is_suspect_at_most() -> None:
    """A container's working set includes page cache, so its growth is at most a suspect."""

    def part(size: int) -> Sample:
        return Sample(at_seconds=0.0, host=(HostProcess(pid=1, name="container", resident_bytes=size),))

    assert "suspect" == verdict(timeline("pool", hours=9.0, leak_mb_per_hour=200.0, part=part)).status


def test_page_that_grows_is_called_beside_a_container_that_hides_it() -> None:
    """What garbage of all processes hides in the container's sum shows in the API server's own figure."""
    whole = timeline("pool", hours=9.0, leak_mb_per_hour=200.0, part=page_part)
    still = HostProcess(pid=1, name="container", resident_bytes=40 * GIB, anonymous_bytes=30 * GIB)
    samples = tuple(replace(sample, host=(still, *(sample.host or ()))) for sample in whole.samples)
    actual = verdict(Timeline(samples=samples))
    assert ("fault", "API server 1") == (actual.status, actual.holder)


@pytest.mark.parametrize(("limit_gib", "expected"), [(256, "unknown"), (39, "fault")], ids=["room", "no room"])
def test_growth_that_would_end_after_the_room_does_is_a_fault(limit_gib: int, expected: str) -> None:
    """What slows down may come to an end: it does not matter where the memory ends before that."""
    # 40 GiB with a time constant of six hours, observed for three
    whole = timeline("pool", hours=3.0, part=host_part)
    begin = whole.samples[0].at_seconds
    samples = []
    for sample in whole.samples:
        size = 20 * GIB + int(40 * GIB * (1.0 - math.exp(-(sample.at_seconds - begin) / 21_600.0)))
        core = HostProcess(pid=7, name="python3", resident_bytes=size, anonymous_bytes=size)
        samples.append(replace(sample, host=(core,)))
    known = replace(FACTS, host_limit_bytes=limit_gib * GIB, engine_name=None)

    actual = only(judge, Timeline(samples=tuple(samples)), known)

    assert expected == actual.status


def test_process_that_ended_is_not_judged() -> None:
    """Memory of an exited process is free again; the running ones are judged."""
    whole = timeline("pool", hours=7.0, leak_mb_per_hour=500.0, part=host_part)
    end = whole.samples[0].at_seconds + 6.0 * 3600.0
    samples = tuple(
        sample if sample.at_seconds < end else replace(sample, host=(sample.host or ())[1:]) for sample in whole.samples
    )
    actual = verdict(Timeline(samples=samples))
    assert ("ok", f"vllm {SERVER_PID + 1}") == (actual.status, evidence(actual)["holder"])


def test_restart_begins_anew() -> None:
    """Memory before the engines' restart, and what comes with a beginning, is no growth."""
    whole = timeline("pool", hours=7.0, part=host_part)
    begin = whole.samples[0].at_seconds
    samples = []
    for sample in whole.samples:
        minutes = (sample.at_seconds - begin) / 60.0
        taken = int(min(max(minutes - 120.0, 0.0) / 15.0, 1.0) * 4 * GIB)
        size = (sample.host or ())[0].anonymous_bytes or 0
        (page,) = sample.engines or ()
        tokens = int(minutes) * 1000 if minutes < 120.0 else int(minutes - 120.0) * 1000
        engines = (replace(page, prompt_tokens_total=tokens),)
        samples.append(replace(host_part(size + taken), at_seconds=sample.at_seconds, engines=engines))

    actual = verdict(Timeline(samples=tuple(samples)))

    # The four hours and a half after the beginning are judged, as one window
    assert ("ok", 4.4, 0.0) == (actual.status, evidence(actual)["window"], evidence(actual)["growth_of_the_floor"])


def test_what_no_process_shows_alone_all_of_them_may() -> None:
    """Two workers that take turns: each moves up and down for hours, and together they grow by 200 MB/h."""
    samples = []
    for minute in range(8 * 60):
        leaked, swing = int(200e6 * minute / 60), int(math.sin(minute / 25.0) * GIB)
        sizes = (6 * GIB + leaked // 2 + swing, 8 * GIB + leaked // 2 - swing)
        host = tuple(
            HostProcess(pid=10 + number, name="worker", resident_bytes=size, anonymous_bytes=size)
            for number, size in enumerate(sizes)
        )
        samples.append(Sample(at_seconds=60.0 * minute, host=host))

    actual = verdict(Timeline(samples=tuple(samples)))

    assert ("fault", "the server's 2 processes together") == (actual.status, evidence(actual)["holder"])


def test_server_that_has_just_begun_is_not_judged_by_its_beginning() -> None:
    """Counters at 0 in the first sample show a fresh start: the first half hour is left out."""
    # 5 GiB in the first 25 minutes, and nothing in the hour and a half after
    whole = timeline("pool", hours=2.0, part=host_part)
    begin = whole.samples[0].at_seconds
    samples = []
    for sample in whole.samples:
        minutes = (sample.at_seconds - begin) / 60.0
        size = 20 * GIB + int(min(minutes / 25.0, 1.0) * 5 * GIB)
        (page,) = sample.engines or ()
        engines = (replace(page, requests_running=int(minutes > 0), generation_tokens_total=int(minutes) * 500),)
        samples.append(replace(host_part(size), at_seconds=sample.at_seconds, engines=engines))

    actual = verdict(Timeline(samples=tuple(samples)))

    assert ("ok", 1.5, 0.0) == (actual.status, evidence(actual)["window"], evidence(actual)["growth_of_the_floor"])


@pytest.mark.parametrize("name", ["pool", "fast noise", "sawtooth", "load cycles"])
def test_leak_carries_the_figure_of_every_gate(name: str) -> None:
    """A leak that is called has the figure of every gate as evidence."""
    actual = verdict(timeline(name, 3, hours=9.0, leak_mb_per_hour=200.0, part=host_part))
    shown = evidence(actual)
    assert ("grows", True) == (shown["decided_by"], actual.status in {"suspect", "fault"})
    gates = {"growth_of_the_floor", "slope_over_error", "later_half_ratio", "p_drift", "beyond_past", "load_removed"}
    assert gates <= set(shown)


def test_growth_of_the_last_minutes_alone_is_never_called_healthy() -> None:
    """Ten GB/h since forty minutes, with hours of room: too short for a leak, and too much to be called flat."""
    actual = verdict(timeline("pool", hours=8.0, leak_mb_per_hour=10_000.0, onset=7.3, part=host_part))
    assert "unknown" == actual.status
    assert "recent" == evidence(actual)["decided_by"]


HOURS, RATE = 3.0, 500e6
"""Of growth, and bytes in each of them."""


def grown(limit_bytes: int | None, *after: Sample) -> Finding:
    """The finding on an engine core that grows from 20 GiB, next to 2 of an API server, then further samples."""
    seen = timeline("pool", hours=HOURS, leak_mb_per_hour=RATE / 1e6, part=host_part)
    end = seen.samples[-1].at_seconds
    samples = (*seen.samples, *(replace(one, at_seconds=end + number) for number, one in enumerate(after, start=1)))
    known: Facts = replace(facts(World()), host_limit_bytes=limit_bytes)
    return only(judge, Timeline(samples=samples), known)


TAKEN = 22 * GIB + int(HOURS * RATE)
"""The anonymous bytes of both at the end."""


@pytest.mark.parametrize(
    ("limit_bytes", "hours"),
    [(TAKEN + int(10 * RATE), 10.0), (TAKEN + int(RATE), 1.0), (TAKEN - 5 * GIB, 0.0), (None, None)],
    ids=["ten hours", "one hour", "no room", "limit not told"],
)
def test_the_room_is_the_limit_less_what_all_processes_hold(limit_bytes: int | None, hours: float | None) -> None:
    """At 500 MB/h the time left is the room divided by the rate: 0 above the limit, `None` without a limit."""
    actual = grown(limit_bytes, Sample(at_seconds=0.0, engines=(engine(),)), Sample(at_seconds=0.0, host=()))
    left = evidence(actual)["time_to_exhaustion"]
    assert actual.status in {"suspect", "fault"}
    assert left is None if hours is None else pytest.approx(hours * 3600.0, rel=0.02, abs=60.0) == left


def test_resident_bytes_count_no_more_than_anonymous_ones() -> None:
    """Flat anonymous bytes are ok although resident bytes grow: mapped files can be dropped."""
    seen = timeline("pool", hours=HOURS, leak_mb_per_hour=RATE / 1e6, part=host_part)
    samples = tuple(
        replace(
            one,
            host=tuple(
                HostProcess(pid=each.pid, name=each.name, resident_bytes=each.resident_bytes, anonymous_bytes=2 * GIB)
                for each in one.host or ()
            ),
        )
        for one in seen.samples
    )
    actual = only(judge, Timeline(samples=samples), facts(World()))

    assert ("ok", "flat") == (actual.status, evidence(actual)["decided_by"])
