from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis.fleet import compare
from kvdiag.diagnosis.fleet.replica import ReplicaSummary
from kvdiag.diagnosis.growth.attribution import UNDECIDED, device_growth
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Sample, Timeline
from tests.builders.answers import evidence, statuses
from tests.builders.series import MODELS, device_part, hidden_device_part, host_part, torch_part
from tests.builders.values import GIB, device
from tests.quality.bench.fleet_power import life
from tests.unit.diagnosis.fleet.replicas import FACTS, MB, day, fleet_of, made, of, replica, replicas, unloaded

TORCH, BESIDE, HOST, KV = "leak.device_torch", "leak.device_non_torch", "leak.host", "leak.kv_blocks"


@pytest.mark.parametrize(
    ("part", "verdict", "status"),
    [
        (torch_part(live=True), TORCH, "fault"),
        (torch_part(reserved=True), "fragmentation.allocator", "suspect"),
        (torch_part(outside=True), BESIDE, "fault"),
        (torch_part(outside=True, told=False), BESIDE, "fault"),
        (device_part, TORCH, "fault"),
        (hidden_device_part, TORCH, "suspect"),
        (host_part, HOST, "fault"),
    ],
    ids=["torch", "cache", "beside torch", "beside torch, by NVML", "server", "device", "host"],
)
def test_what_grows_names_the_verdict(part: object, verdict: str, status: str) -> None:
    """Six replicas that each lose 20 MB/h in one component are called by it, and by nothing else."""
    fleet = compare(replicas(6, leak=20.0, part=part))  # type: ignore[arg-type]

    called = [one for one in fleet.findings if one.status in ("fault", "suspect")]
    assert [(verdict, status)] == [(one.id, one.status) for one in called]
    shown = evidence(called[0])
    assert (status, status) == (fleet.worst, fleet.versions[0].worst)
    assert ("vllm 0.32.0", 6, 1 / 64) == (shown["version"], shown["replicas"], shown["p_value"])
    assert pytest.approx(20.0 * MB, rel=0.25) == shown["growth_per_hour"]
    assert called[0].summary.startswith("vllm 0.32.0, 6 replicas: ")
    assert called[0].remedy
    assert called[0].runbook == f"alerts/runbooks/{verdict}.md"


@pytest.mark.parametrize("name", MODELS)
def test_healthy_replicas_are_silent(name: str) -> None:
    """What a healthy server's memory does is no leak, however many replicas do it at once."""
    fleet = compare(replicas(7, name=name, part=hidden_device_part))

    assert {TORCH: "ok", BESIDE: "ok", KV: "unknown", HOST: "unknown"} == statuses(fleet.findings)
    assert "ok" == fleet.worst


@pytest.mark.parametrize("name", ["filling cache", "faint load at one hour", "slow sawtooth"])
def test_what_many_replicas_do_at_once_is_no_leak(name: str) -> None:
    """Caches that fill and then stay, a load that is the same for all, garbage that is collected every few hours."""
    fleet = compare([life(name, seed, 0.0, 24.0, 600.0) for seed in range(12)])

    assert set() == {one.course for one in fleet.growths} & {"grows", "inconclusive"}


def test_staircases_of_all_replicas_are_a_leak() -> None:
    """A hundred MiB every two hours and nothing between them: jumps that only rise are what is looked for."""

    # Steps at hours of each replica's own
    def stairs(seed: int) -> ReplicaSummary:
        samples = []
        for place, sample in enumerate(day(seed, name="pool", part=hidden_device_part).samples):
            used = 20 * GIB + 100 * 2**20 * ((place + 2 * seed) // 12)
            samples.append(replace(sample, devices=(device(used_bytes=used, total_bytes=80 * GIB),)))
        return replica(Timeline(samples=tuple(samples)), str(seed))

    (found,) = of(compare([stairs(seed) for seed in range(6)]).findings, TORCH)

    assert "suspect" == found.status  # the owner of the device's bytes is not reported
    assert evidence(found)["growth_per_hour"] == pytest.approx(50 * 2**20, rel=0.15)


@pytest.mark.parametrize(
    ("engine", "called", "open_"), [("vllm", TORCH, BESIDE), ("sglang", TORCH, BESIDE), ("llama.cpp", BESIDE, TORCH)]
)
def test_total_that_grows_is_called_as_of_a_single_replica(engine: str, called: str, open_: str) -> None:
    """Without torch's figures the engine's name decides the verdict, in a fleet as in each of its replicas."""
    facts = replace(FACTS, engine_name=engine)
    days = [day(seed, name="pool", leak=40.0, part=device_part) for seed in range(6)]

    fleet = compare([replica(one, str(seed), facts) for seed, one in enumerate(days)])
    alone = statuses(device_growth(days[0], facts, DEFAULT_LIMITS))

    assert {called: "fault", open_: "unknown"} == {one: statuses(fleet.findings)[one] for one in (called, open_)}
    assert {called: "fault", open_: "unknown"} == alone
    (untold,) = of(fleet.findings, open_)
    assert untold.summary == UNDECIDED
    assert UNDECIDED in of(fleet.findings, called)[0].summary


def test_young_replicas_are_not_compared() -> None:
    """After six hours a warm-up may still run: all verdicts are unknown, and say how long is long enough."""
    fleet = compare(replicas(6, leak=500.0, hours=6.0))

    assert ("unknown", "unknown") == (fleet.worst, fleet.versions[0].worst)
    assert {"unknown"} == {one.status for one in fleet.findings}
    assert all("watched for 7 h" in one.summary for one in fleet.findings)
    assert (6, 0) == (fleet.versions[0].replicas, fleet.versions[0].compared)


def test_nothing_is_known_of_no_replicas() -> None:
    """An empty fleet is unknown, not healthy."""
    assert ("unknown", ()) == (compare([]).worst, compare([]).findings)


def test_what_no_replica_tells_is_unknown() -> None:
    """With host memory alone reported, the other verdicts are unknown and name the source that they need."""
    found = compare(fleet_of(6, "host_anonymous", 0.0)).findings

    assert {HOST: "ok", TORCH: "unknown", BESIDE: "unknown", KV: "unknown"} == statuses(found)
    assert "install the kvdiag agent" in of(found, TORCH)[0].summary


def test_six_that_grow_may_be_chance_among_many_comparisons() -> None:
    """A p-value of 1/64 is no discovery among eight components and versions; twelve replicas decide."""
    # One component that grows among others and versions that do not
    quiet = {"torch_unused": -1.0, "outside_torch": -1.0, "host_anonymous": -1.0}

    def fleet(count: int) -> list[ReplicaSummary]:
        older = [made({"torch_live": -1.0 - place, **quiet}, f"a{place}", version="0.31.0") for place in range(count)]
        newer = [made({"torch_live": 10.0 + place, **quiet}, f"b{place}", model="other") for place in range(count)]
        return [*older, *newer]

    six, twelve = compare(fleet(6)), compare(fleet(12))

    open_ = of(six.findings, TORCH)[-1]
    assert ("unknown", "unknown") == (six.worst, open_.status)
    assert open_.summary.endswith("; compare 12 replicas")
    assert ("fault", "fault") == (twelve.worst, of(twelve.findings, TORCH)[-1].status)


def test_newer_version_that_grows_is_told_from_the_older() -> None:
    """Device growth of the newer version is not due to another process if the older one is flat on the same devices."""
    older, newer = fleet_of(12, "device", 0.0, version="0.31.0"), fleet_of(12, "device", 20.0, version="0.32.0")

    alone, beside = compare(newer), compare([*newer, *older])

    assert ["suspect"] == [one.status for one in of(alone.findings, TORCH)]
    assert ["ok", "fault"] == [one.status for one in of(beside.findings, TORCH)]
    shown = evidence(of(beside.findings, TORCH)[1])
    assert ("vllm 0.31.0", 12) == (shown["compared_with"], shown["compared_with_replicas"])
    assert pytest.approx(20.0 * MB, rel=0.1) == shown["growth_beyond_older"]
    assert "more than in 0.31.0" in of(beside.findings, TORCH)[1].summary
    (change,) = [one for one in beside.changes if one.component == "device"]
    assert change.faster
    assert change.per_hour.low <= change.per_hour.estimate <= change.per_hour.high


def test_older_version_that_leaks_accuses_no_newer_one() -> None:
    """A leak that the newer version has lost is the older one's alone."""
    fleet = compare(
        [
            *fleet_of(8, "torch_live", 0.0, version="0.32.0"),
            *fleet_of(8, "torch_live", 30.0, version="0.31.0"),
        ]
    )

    assert ["fault", "ok"] == [one.status for one in of(fleet.findings, TORCH)]
    assert [False] == [one.faster for one in fleet.changes]
    assert fleet.changes[0].per_hour.estimate < -20.0 * MB


def test_difference_between_versions_is_a_suspect_of_its_own() -> None:
    """Where all replicas drift down with their load, a newer version that does not is suspect."""
    older = [made({"torch_live": -40.0 + place}, f"a{place}", version="0.31.0") for place in range(8)]
    newer = [made({"torch_live": -8.0 + 2 * place}, f"b{place}") for place in range(8)]

    (_, found) = of(compare([*older, *newer]).findings, TORCH)

    assert "suspect" == found.status
    assert "more than in 0.31.0" in found.summary


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("0.9.2", "0.10.0", ["0.9.2", "0.10.0"]),
        ("v0.10.2-cu128", "v0.10.10", ["v0.10.2-cu128", "v0.10.10"]),
        ("b9f3", "a0c1", ["b9f3", "a0c1"]),
    ],
    ids=["numbers", "tags", "hashes by when they began"],
)
def test_versions_stand_from_the_oldest_to_the_newest(first: str, second: str, expected: list[str]) -> None:
    """By their numbers; names without any by when their replicas began."""
    fleet = compare(
        [
            *fleet_of(6, "torch_live", 0.0, version=second, began=3600.0),
            *fleet_of(6, "torch_live", 0.0, version=first),
        ]
    )

    assert expected == [one.version.version for one in fleet.versions]
    assert tuple(expected) == (fleet.changes[0].older.version, fleet.changes[0].newer.version)


def test_only_versions_of_one_model_are_compared() -> None:
    """Another model and an unreported version are not compared."""
    fleet = compare(
        [
            *fleet_of(6, "torch_live", 0.0, model="a"),
            *fleet_of(6, "torch_live", 20.0, model="b"),
            *fleet_of(6, "torch_live", 20.0, model="b", version=None),
            *fleet_of(6, "torch_live", 20.0, model="b", version="0.33.0"),
        ]
    )

    assert ["0.33.0"] == [one.newer.version for one in fleet.changes]
    assert 4 == len(fleet.versions)


def test_held_blocks_are_exact() -> None:
    """One leaked block per hour is a fault across six replicas that are idle at night; no leak is ok."""

    # Blocks still in use, observed while no request is running
    def idle(seed: int, held_per_hour: float) -> ReplicaSummary:
        samples = []
        for sample in day(seed, busy=False).samples:
            (page,) = sample.engines or ()
            held = int((sample.at_seconds - 1000.0) / 3600.0 * held_per_hour)
            samples.append(replace(sample, engines=(replace(page, kv_usage_ratio=held / 6144),)))
        return replica(replace(day(seed), samples=tuple(samples)), str(seed))

    losing, sound = (compare([idle(seed, rate) for seed in range(6)]) for rate in (1.0, 0.0))

    assert ("fault", "ok") == (of(losing.findings, KV)[0].status, of(sound.findings, KV)[0].status)
    assert evidence(of(losing.findings, KV)[0])["growth_per_hour"] == pytest.approx(1.0, rel=0.1)
    assert "blocks/h" in of(losing.findings, KV)[0].summary


def test_load_that_all_replicas_share_is_no_leak() -> None:
    """Replicas of one service meet one day: without their load what they grow by is only suspect, with it nothing."""

    # Memory that follows a load which rises for all of them
    def following(seed: int) -> list[Sample]:
        seen = day(seed, name="pool", part=hidden_device_part).samples
        samples = []
        for place, sample in enumerate(seen):
            (page,) = sample.engines or ()
            load = round(0.2 + 0.5 * place / len(seen) + 0.01 * ((seed + place) % 7), 4)
            used = device(used_bytes=int((20 + 3 * load) * GIB), total_bytes=80 * GIB)
            samples.append(replace(sample, engines=(replace(page, kv_usage_ratio=load),), devices=(used,)))
        return samples

    timelines = [replace(day(seed), samples=tuple(following(seed))) for seed in range(8)]

    with_load = compare([replica(seen, str(place)) for place, seen in enumerate(timelines)])
    without = compare([replica(unloaded(seen), str(place)) for place, seen in enumerate(timelines)])

    assert ("ok", "suspect") == (of(with_load.findings, TORCH)[0].status, of(without.findings, TORCH)[0].status)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(15)), st.lists(st.floats(-30.0, 30.0), min_size=15, max_size=15))
def test_order_of_replicas_changes_nothing(order: list[int], slopes: list[float]) -> None:
    """The result does not depend on the order of the replicas."""
    each = [
        made({"torch_live": slope, "host_anonymous": -slope}, str(place), version=f"0.{31 + place % 2}.0")
        for place, slope in enumerate(slopes)
    ]

    assert compare(each) == compare([each[place] for place in order])
