"""A fleet's growths, changes and findings by hand: six replicas, a MB/h in each, and where each answer begins."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.fleet import Fleet, Version, VersionChange, VersionGrowth, VersionReplicas, compare
from kvdiag.diagnosis.fleet.replica import ReplicaSummary
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Finding
from kvdiag.outputs.presentation import unknown_by_reason
from kvdiag.stats import Interval
from tests.unit.diagnosis.fleet.replicas import MB, made, of

NEW, OLD = (Version(engine="vllm", version=number, model="m") for number in ("0.32.0", "0.31.0"))
SIX = (10.0, 12.0, 14.0, 16.0, 18.0, 20.0)
TORCH, KV = "leak.device_torch", "leak.kv_blocks"


def six(
    slopes: Sequence[float] = SIX, component: str = "torch_live", prefix: str = "", **others: Any
) -> list[ReplicaSummary]:
    """A replica for each slope."""
    return [made({component: slope}, f"{prefix}{place}", **others) for place, slope in enumerate(slopes)]


def alone(summaries: list[ReplicaSummary]) -> VersionGrowth:
    """The growth of the only component of the only version."""
    (growth,) = compare(summaries).growths
    return growth


def two(older: Sequence[float], newer: Sequence[float], **others: Any) -> Fleet:
    """Two versions of one model."""
    return compare([*six(older, prefix="a", version="0.31.0", **others), *six(newer, prefix="b", **others)])


def finding(summaries: list[ReplicaSummary], verdict: str = TORCH) -> Finding:
    """The finding on one verdict of one version."""
    (found,) = of(compare(summaries).findings, verdict)
    return found


def test_growth_of_a_version_is_its_middle_replicas() -> None:
    """Six that grow by 10 to 20 MB/h: 15, by chance once in 64 times, between the least and the most of them."""
    assert alone(six()) == VersionGrowth(
        version=NEW,
        component=MemoryComponent.TORCH_LIVE,
        replicas=6,
        course="grows",
        hours=23.0,
        age_hours=24.0,
        per_hour=Interval(low=10 * MB, estimate=15 * MB, high=20 * MB),
        later_per_hour=15 * MB,
        p_value=1 / 64,
        false_discovery_ratio=1 / 64,
        load_reported=True,
    )


def test_versions_are_counted_with_all_their_replicas() -> None:
    """Those that are too young count, and their restarts do; hours are the middle replica's."""
    young = made({}, "young", hours=2.0, restarts=3)
    empty = made({}, "empty", hours=3.0)

    fleet = compare([*six(restarts=1), young, empty])

    expected = VersionReplicas(version=NEW, replicas=8, compared=6, hours=23.0, restarts=9, findings=fleet.findings)
    assert (expected,) == fleet.versions
    assert "ok" == compare(six([0.0] * 6)).versions[0].worst


@pytest.mark.parametrize(
    ("summaries", "course"),
    [
        (six([2.0] * 6), "small"),  # 2 MB/h do not count
        (six([2.1] * 6), "grows"),
        (six([*SIX[:5], -1.0]), "flat"),  # one of six that falls by the least: p = 1/32
        (six(SIX, later=0.5), "ended"),  # half as fast later
        (six(SIX, ended=True), "ended"),
        (six(SIX, later=0.51), "grows"),
        (six([3.0] * 6, later=2.0 / 3.0), "ended"),  # 2 MB/h of 3 do not count
        (six([3.0] * 6, later=2.1 / 3.0), "grows"),
        (six(SIX[:5]), "untested"),
        (six([0.25 / MB] * 6, "kv_held_idle"), "small"),  # a quarter of a block in an hour
        (six([0.26 / MB] * 6, "kv_held_idle"), "grows"),
        (six(SIX, floor=0.0, downs=3), "flat"),  # 18 falls and no rise: memory that is released is no growth
        ([*six(SIX[:5], floor=0.0, downs=0), made({"torch_live": 20.0}, "z")], "grows"),
        ([*six(SIX[:5]), made({"torch_live": 20.0}, "z", floor=0.0, downs=3)], "grows"),  # three falls: 1 in 8
        ([*six([*SIX[:3], 12.0, 12.0]), made({"torch_live": 0.0}, "z", floor=0.5, downs=4)], "flat"),
    ],
)
def test_course_is_decided_at_its_bounds(summaries: list[ReplicaSummary], course: str) -> None:
    """By significance, by what counts, by what is left of it later, and by falls."""
    assert course == alone(summaries).course
    assert (course == "ended") == ("and stopped" in compare(summaries).findings[0].summary)


@pytest.mark.parametrize(("downs", "estimate"), [(3, 15.0), (4, 7.5)])
def test_floors_count_where_falls_are_the_rule(downs: int, estimate: float) -> None:
    """Three falls without a rise have p = 1/8, four p = 1/16: floors count from four on."""
    # One replica that falls, and floors that rise half as fast
    summaries = [made({"torch_live": slope}, str(slope), floor=0.5, downs=downs * (slope == 10.0)) for slope in SIX]
    assert estimate * MB == alone(summaries).per_hour.estimate
    assert estimate * MB == alone(summaries).later_per_hour


@pytest.mark.parametrize(("told", "beside"), [(3, False), (4, True)])
def test_load_is_told_where_most_tell_it(told: int, beside: bool) -> None:
    """More than half of the replicas."""
    summaries = [made({"torch_live": slope}, str(slope), load=place < told) for place, slope in enumerate(SIX)]
    assert beside == alone(summaries).load_reported


@pytest.mark.parametrize(("zeros", "ratio"), [(0, 2 / 64), (1, 1 / 64)])
def test_what_could_never_be_called_is_no_comparison(zeros: int, ratio: float) -> None:
    """Five nonzero figures reach p = 1/32, never 1/50: such a component is not counted as a comparison."""
    # Another component, which falls but for so many replicas
    falls = [0.0] * zeros + [-1.0] * (6 - zeros)
    each = [
        made({"torch_live": slope, "host_anonymous": fall}, str(slope)) for slope, fall in zip(SIX, falls, strict=True)
    ]

    found = {growth.component: growth.false_discovery_ratio for growth in compare(each).growths}

    assert {"torch_live": ratio, "host_anonymous": 1.0} == found


def test_change_between_versions_is_the_median_difference() -> None:
    """Six replicas that grow by 10 MB/h more than six others: p = 1/924."""
    (change,) = two([5.0] * 6, [15.0] * 6, later=0.8).changes
    p_value: Any = pytest.approx(1 / 924)

    assert change == VersionChange(
        older=OLD,
        newer=NEW,
        component=MemoryComponent.TORCH_LIVE,
        older_replicas=6,
        newer_replicas=6,
        per_hour=Interval(low=10 * MB, estimate=10 * MB, high=10 * MB),
        later_per_hour=8 * MB,
        p_value=p_value,
        false_discovery_ratio=p_value,
        faster=True,
    )


@pytest.mark.parametrize(
    ("older", "newer", "later", "faster"),
    [
        ([0.0] * 6, [2.0] * 6, 1.1, False),
        ([0.0] * 6, [2.1] * 6, 1.0, True),
        ([0.0] * 6, [10.0] * 6, 0.5, False),
        ([0.0] * 6, [10.0] * 6, 0.51, True),
        ([0.0] * 6, [3.0] * 6, 2.0 / 3.0, False),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 20.0], [10.0] * 6, 1.0, True),
        ([0.0, 0.0, 0.0, 0.0, 20.0, 20.0], [10.0] * 6, 1.0, False),
        ([10.0] * 6, [0.0] * 6, 1.0, False),
    ],
)
def test_version_is_faster_past_every_gate(older: list[float], newer: list[float], later: float, faster: bool) -> None:
    """By more than 2 MB/h, later as well, and not by chance."""
    (change,) = two(older, newer, later=later).changes
    assert faster == change.faster


@pytest.mark.parametrize(("older", "newer", "pairs"), [(6, 6, 1), (5, 6, 0), (6, 5, 0)])
def test_six_replicas_of_each_version_are_compared(older: int, newer: int, pairs: int) -> None:
    """With five replicas of either version there is no comparison."""
    assert pairs == len(two([1.0] * older, [2.0] * newer).changes)


@pytest.mark.parametrize(
    ("limit", "value", "course", "faster"),
    [
        ("significance", 1 / 64, "flat", True),
        ("significance", 1 / 924, "flat", False),
        ("discovery_ratio", 1 / 64, "grows", True),
        ("discovery_ratio", 1 / 924, "inconclusive", True),
        ("discovery_ratio", 1 / 925, "inconclusive", False),
    ],
)
def test_chance_is_compared_with_its_limit(limit: str, value: float, course: str, faster: bool) -> None:
    """1 in 64 for six that grow, 1 in 924 for six that grow faster: below the significance, at most the share."""
    limits = replace(DEFAULT_LIMITS, fleet=replace(DEFAULT_LIMITS.fleet, **{limit: value}))  # type: ignore[arg-type]
    fleet = compare([*six([0.0] * 6, prefix="a", version="0.31.0"), *six([10.0] * 6, prefix="b")], limits)
    assert (course, faster) == (fleet.growths[-1].course, fleet.changes[0].faster)


def test_versions_are_compared_within_one_model_and_engine() -> None:
    """Two versions of each of three: one comparison each."""
    of_whom = (("vllm", "m"), ("vllm", "n"), ("sglang", "n"))
    versions = [Version(engine=one, version=text, model=model) for text in ("1.0", "2.0") for one, model in of_whom]
    summaries = [replace(one, version=version) for version in versions for one in six()]
    assert 3 == len(compare(summaries).changes)


def test_equal_figures_of_both_versions_are_no_comparison() -> None:
    """Of what is the same in all replicas nothing could ever be called."""
    host = [*six([0.0] * 6, "host_anonymous", version="0.31.0"), *six([10.0] * 6, "host_anonymous")]
    same, other = compare([*host, *six([1.0] * 6, version="0.31.0"), *six([1.0] * 6)]).changes
    assert (1.0, False, 1 / 924) == (same.false_discovery_ratio, same.faster, other.false_discovery_ratio)


@pytest.mark.parametrize(
    ("age", "load", "component", "status"),
    [
        (20.0, True, "torch_live", "fault"),
        (19.9, True, "torch_live", "suspect"),
        (20.0, False, "torch_live", "suspect"),
        (20.0, True, "torch_unused", "suspect"),
        (20.0, True, "device_outside_torch", "suspect"),
        (20.0, True, "unlisted", "suspect"),
        (20.0, True, "host_resident", "suspect"),
        (20.0, True, "outside_torch", "fault"),
    ],
)
def test_doubt_is_the_components_or_the_lifes(age: float, load: bool, component: str, status: str) -> None:
    """Less than 20 hours of age, though observed for less, no load, or a look-alike leave a suspect."""
    fleet = compare(six(SIX, component, hours=19.0, age=age, load=load))
    assert [status] == [one.status for one in fleet.findings if one.evidence]


@pytest.mark.parametrize(
    ("component", "verdict", "source", "unit"),
    [
        ("torch_live", "leak.device_torch", "torch", "bytes"),
        ("torch_unused", "fragmentation.allocator", "torch", "bytes"),
        ("outside_torch", "leak.device_non_torch", "torch", "bytes"),
        ("device_outside_torch", "leak.device_non_torch", "nvml", "bytes"),
        ("server", "leak.device_torch", "nvml", "bytes"),  # of vLLM, whose memory is torch's
        ("device", "leak.device_torch", "nvml", "bytes"),
        ("unlisted", "baseline.foreign_memory", "nvml", "bytes"),
        ("kv_held_idle", "leak.kv_blocks", "engine", "blocks"),
        ("host_anonymous", "leak.host", "host", "bytes"),
        ("host_resident", "leak.host", "host", "bytes"),
    ],
)
def test_component_names_the_verdict_and_who_tells_it(component: str, verdict: str, source: str, unit: str) -> None:
    """What grows names the leak."""
    (found,) = [one for one in compare(six(SIX, component)).findings if one.evidence]

    (shown,) = [one for one in found.evidence if one.name == "growth_per_hour"]
    assert (verdict, source, f"{unit} per hour") == (found.id, shown.source, shown.unit)


@pytest.mark.parametrize(
    ("component", "status"),
    [("device_outside_torch", "fault"), ("device", "fault"), ("unlisted", "suspect")],
)
def test_older_version_acquits_what_is_around_both(component: str, status: str) -> None:
    """A flat older version rules out other processes, so growth is a fault; an unlisted container stays a suspect."""
    fleet = compare([*six([0.0] * 6, component, "a", version="0.31.0"), *six(SIX, component, "b")])

    assert status == next(one.status for one in fleet.findings if "0.32.0" in one.summary and one.evidence)


def test_held_blocks_fill_no_cache() -> None:
    """Blocks of a young replica are a fault: nothing but requests takes them."""
    found = finding(six([slope / MB for slope in SIX], "kv_held_idle", hours=7.0), KV)
    assert "fault" == found.status
    assert "15 blocks/h (10 to 20 blocks/h)" in found.summary


def test_evidence_has_every_figure_with_its_unit() -> None:
    """The growth, its bounds and chances; and the same of the difference to the older version."""
    (_, found) = of(two([0.0] * 6, [10.0] * 6).findings, TORCH)

    actual = [(one.name, one.value, one.unit, one.source) for one in found.evidence]
    assert actual == [
        ("version", "vllm 0.32.0", "", "engine"),
        ("model", "m", "", "engine"),
        ("component", "torch's allocated memory", "", "torch"),
        ("replicas", 6, "replicas", "kvdiag"),
        ("watched", 23.0, "hours", "kvdiag"),
        ("replica_age", 24.0, "hours", "kvdiag"),
        ("growth_per_hour", 10 * MB, "bytes per hour", "torch"),
        ("growth_per_hour_low", 10 * MB, "bytes per hour", "computed"),
        ("growth_per_hour_high", 10 * MB, "bytes per hour", "computed"),
        ("growth_per_hour_of_later_half", 10 * MB, "bytes per hour", "torch"),
        ("p_value", 1 / 64, "p-value", "computed"),
        ("false_discovery_rate", 1 / 64, "ratio", "computed"),
        ("load_reported", "yes", "", "engine"),
        ("compared_with", "vllm 0.31.0", "", "engine"),
        ("compared_with_replicas", 6, "replicas", "kvdiag"),
        ("growth_beyond_older", 10 * MB, "bytes per hour", "torch"),
        ("growth_beyond_older_low", 10 * MB, "bytes per hour", "computed"),
        ("growth_beyond_older_high", 10 * MB, "bytes per hour", "computed"),
        ("p_value_of_difference", pytest.approx(1 / 924), "p-value", "computed"),
        ("false_discovery_rate_of_difference", pytest.approx(1 / 924), "ratio", "computed"),
    ]


def test_bounds_that_are_none_are_not_told() -> None:
    """Four replicas bound nothing: neither the sentence nor the evidence has an infinity."""
    found = finding(six(SIX[:4], load=False))

    shown = {one.name: one.value for one in found.evidence}
    assert (None, None, "no") == (shown["growth_per_hour_low"], shown["growth_per_hour_high"], shown["load_reported"])
    assert math.isinf(alone(six(SIX[:4])).per_hour.low)


def test_versions_with_too_few_replicas_lack_the_same() -> None:
    """One replica of one version and two of another: each verdict without figures has one reason for both."""
    few = compare([*six(SIX[:1]), *six(SIX[:2], prefix="b", version="0.31.0")]).findings
    assert (2, [[KV]]) == (len(of(few, KV)), list(unknown_by_reason(of(few, KV)).values()))


def test_total_that_is_flat_leaves_no_room_for_a_part() -> None:
    """A flat total acquits both leaks of a device; one that is not tested leaves both open, by the same words."""
    flat, few = (compare(six(slopes, "server")).findings for slopes in ([0.0] * 6, SIX[:5]))

    for found in (flat, few):
        parts = [of(found, one)[0] for one in (TORCH, "leak.device_non_torch")]
        assert ({"ok"} if found is flat else {"unknown"}) == {one.status for one in parts}
        assert 1 == len({one.summary for one in parts})
    assert of(flat, TORCH)[0].evidence == of(flat, "leak.device_non_torch")[0].evidence != ()
    assert "leak.device_non_torch" == finding(six(SIX, "server", hours=7.0)).or_id


def test_a_fleet_has_no_confidence() -> None:
    """How often findings were right was counted on single servers."""
    (leak,) = of(compare(six(SIX)).findings, TORCH)
    assert ("fault", None) == (leak.status, leak.confidence)


@pytest.mark.parametrize(
    ("summaries", "worst"),
    [
        (six([0.0] * 6), "ok"),  # host, blocks and the device's rest are not reported, and not required
        (six(SIX), "fault"),
        (six(SIX, load=False), "suspect"),
        (six(SIX[:5]), "unknown"),
        (six([0.0] * 6) + six(SIX[:5], prefix="x", model="n"), "unknown"),
        ([*six([0.0] * 6), made({}, "young", model="n", hours=2.0)], "ok"),
        ([made({}, "young", hours=2.0)], "unknown"),
    ],
)
def test_fleet_is_as_bad_as_the_worst_that_is_told(summaries: list[ReplicaSummary], worst: str) -> None:
    """An undecided comparison makes the fleet unknown; an unreported component does not if others are reported."""
    assert worst == compare(summaries).worst


def test_replicas_that_are_many_need_twice_as_many() -> None:
    """An undecided comparison asks for twice the replicas, and at least twelve: here 16 instead of 8."""
    # Eight that grow among twenty components and versions that do not
    noisy = [
        summary for number in range(20) for summary in six([-1.0] * 6, prefix=str(number), model=f"quiet {number}")
    ]
    slopes = [20.0] * 6 + [-1.0, -2.0]

    found = [one for one in compare([*noisy, *six(slopes)]).findings if one.id == TORCH and one.status == "unknown"]

    assert ["unknown"] == [one.status for one in found]
    assert found[0].summary.endswith("; compare 16 replicas")
