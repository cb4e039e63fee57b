"""The exporter's page: a golden one, its figures, what vanishes, where it cuts off, and texts from outside in it."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvdiag.model import (
    Engine,
    Facts,
    FailedAllocation,
    Finding,
    GrowthFigures,
    HostProcess,
    ImbalanceFigures,
    PressureThresholds,
    Sample,
    Snapshot,
    SourceHealth,
    Status,
)
from kvdiag.outputs.metrics.exporter import registry
from kvdiag.outputs.metrics.families import MAX_PROCESSES, MAX_SERIES
from kvdiag.sources.prometheus_names import KVDIAG
from tests.builders import lives
from tests.builders.answers import finding
from tests.builders.runs import judged
from tests.builders.values import GIB, MIB, SERVER_PID, allocator, device, engine, owners, pool, process, split
from tests.builders.worlds import World, facts
from tests.fixtures.require import require
from tests.integration.prometheus.server import PrometheusEnvError, programs
from tests.unit.feeds.strategies import FACTS, SAMPLES

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics" / "page.prom"

NEWEST = Sample(
    at_seconds=1_000.5,
    engines=(engine(usage=0.25, running=3, waiting=1),),
    devices=(
        device(
            used_bytes=23 * GIB,
            processes=(process(SERVER_PID, 21 * GIB, "VLLM::EngineCore"), process(7, 1 * GIB, 'train "me"\n')),
        ),
    ),
    block_owners=(owners(orphaned_blocks=14, cached_free_blocks=300),),
    allocators=(
        allocator(
            title="VLLM::EngineCore",
            tensor_rank=0,
            requested_bytes=18 * GIB,
            inactive_split_bytes=64 * MIB,
            split=split(
                reserved_bytes=20 * GIB, live_bytes=19 * GIB, releasable_bytes=768 * MIB, stranded_bytes=256 * MIB
            ),
            reserved_bytes=20 * GIB,
            process_bytes=21 * GIB,
            alloc_retries_total=2,
            ooms_total=1,
            allocated_bytes=19 * GIB,
            failure=FailedAllocation(age_seconds=60.0, asked_bytes=2 * GIB, free_bytes=512 * MIB),
        ),
    ),
    host=(HostProcess(pid=SERVER_PID, name="vllm", resident_bytes=3 * GIB, anonymous_bytes=2 * GIB),),
)

SOURCES = (
    SourceHealth(source="nvml", up=True, errors_total=0, duration_seconds=0.002, ticks_total=60, ticks_missed_total=2),
    SourceHealth(source="engine", up=True, errors_total=3, duration_seconds=0.004),
)


GROWTH = GrowthFigures(
    bytes_per_second=0.1 * MIB,
    low_bytes_per_second=0.05 * MIB,
    high_bytes_per_second=0.2 * MIB,
    room_bytes=720 * MIB,
    exhaustion_seconds=7200.0,
    exhaustion_low_seconds=3600.0,
    exhaustion_high_seconds=14400.0,
)


def snapshot(newest: Sample = NEWEST, known: Facts | None = None, refused_total: int = 0) -> Snapshot:
    """A server that leaks blocks, whose host memory lasts two hours more, and one of whose ranks holds more."""
    diagnosis = judged(World(leaked_blocks_per_request=4))
    host = replace(finding(diagnosis, "leak.host"), status="suspect", holder="vllm 100", growth=GROWTH)
    uneven = Finding(
        id="imbalance.rank",
        status="suspect",
        summary="",
        imbalance=ImbalanceFigures(excess_bytes=GIB, lost_tokens=8192),
    )
    kept = tuple(one for one in diagnosis.findings if one.id in ("leak.kv_blocks", "benign.warmup"))
    return Snapshot(
        state="serving",
        facts=known or facts(World()),
        newest=newest,
        sources=SOURCES,
        diagnosis=replace(diagnosis, findings=(*kept, host, uneven)),
        diagnosed_seconds=1_000.25,
        pressure_thresholds=PressureThresholds(warning_ratio=0.8, critical_ratio=0.9),
        refused_total=refused_total,
    )


def page(shown: Snapshot) -> str:
    """What a scrape gets."""
    return generate_latest(registry(lambda: shown)).decode()


def series(shown: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The page as Prometheus reads it; a series that stands twice is an error."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(page(shown)):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def named(shown: Snapshot, name: str) -> dict[tuple[str, ...], float]:
    """The series of one name by the values of their labels, in the labels' order."""
    return {tuple(value for _, value in key[1]): value for key, value in series(shown).items() if key[0] == name}


def test_the_golden_page(golden: Callable[[str, str], None]) -> None:
    """Every name, label, help and value of a whole page; a change here is one for rules and dashboards."""
    golden("metrics/page.prom", page(snapshot()))


@pytest.mark.parametrize(("down", "status"), [(False, "ok"), (True, "unknown")])
def test_a_server_that_is_down_is_not_ok(down: bool, status: str) -> None:
    """What was healthy until then says nothing of now."""
    well = lives.life(100.0, 0)
    diagnosis = lives.judged(well, lives.outage(120.0)) if down else lives.judged(well)
    known = replace(snapshot(), diagnosis=diagnosis)
    shown = named(known, "kvdiag_diagnosis_status")
    assert {status} == {label for (label,), value in shown.items() if value}
    assert down != any(value for (_, status), value in named(known, "kvdiag_finding").items() if status == "ok")


def test_the_pool_of_an_engine_that_is_gone_has_no_series() -> None:
    """Ollama has unloaded its model: the facts still list the pool, the newest sample does not."""
    newest = replace(NEWEST, engines=(replace(engine(), engine="none", asleep=True),))
    assert {} == named(replace(snapshot(), newest=newest), "kvdiag_kv_pool_bytes")


def test_promtool_has_nothing_to_say() -> None:
    """The names keep Prometheus's conventions."""
    try:
        promtool = programs().promtool
    except PrometheusEnvError as error:
        require(ok=False, what=f"Prometheus ({error})")
        raise
    done = subprocess.run(
        [promtool, "check", "metrics"], input=page(snapshot()), capture_output=True, text=True, check=False
    )
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


def test_our_own_history_can_be_read_back() -> None:
    """Every name that `diagnose --prometheus` reads of kvdiag's is on the page."""
    names = {key[0] for key in series(snapshot())}
    assert set(KVDIAG) <= names


def test_the_ledger_on_the_page_adds_up() -> None:
    """The components of a device are its used bytes."""
    assert 23 * GIB == sum(named(snapshot(), "kvdiag_memory_component_bytes").values())


@pytest.mark.parametrize("status", ["ok", "suspect", "fault", "unknown"])
def test_a_verdict_has_one_status(status: str) -> None:
    """Of a verdict's four series the one of its status is 1."""
    expected = {"leak.kv_blocks": "fault", "benign.warmup": "ok", "leak.host": "suspect", "imbalance.rank": "suspect"}
    actual = named(snapshot(), "kvdiag_finding")
    assert {verdict: float(status == found) for verdict, found in expected.items()} == {
        key[0]: value for key, value in actual.items() if key[1] == status
    }


def test_the_worst_of_a_verdicts_findings_counts() -> None:
    """A rule with several findings, one for each rank, has the worst of their statuses."""
    before = snapshot()
    assert before.diagnosis is not None
    found = [Finding(id="imbalance.rank", status=status, summary="") for status in ("unknown", "suspect", "ok")]
    shown = replace(before, diagnosis=replace(before.diagnosis, findings=tuple(found)))
    assert named(shown, "kvdiag_finding")["imbalance.rank", "suspect"] == 1.0


def test_what_is_gone_has_no_series() -> None:
    """A device, a process or an engine without a sample this time has no series: nothing is retained."""
    whole, empty = snapshot(), replace(snapshot(), newest=Sample(at_seconds=1_001.0), diagnosis=None, sources=())
    left = {key[0] for key in series(empty)}
    of_the_daemon = {"kvdiag_build_info", "kvdiag_diagnosis_timestamp_seconds", "kvdiag_sample_timestamp_seconds"}
    of_the_daemon |= {"kvdiag_memory_pressure_threshold_ratio", "kvdiag_connections_refused_total"}
    assert of_the_daemon | {"kvdiag_server_info", "kvdiag_server_state"} == left
    assert len(series(whole)) > 50


def test_nothing_is_told_before_anything_was_seen() -> None:
    """The page of the first moment has no zeros in place of what is not known."""
    first = Snapshot(state="starting", facts=Facts(), newest=Sample(at_seconds=0.0), sources=())
    assert {"kvdiag_build_info", "kvdiag_server_state"} == {key[0] for key in series(first)}


def test_processes_are_bounded_in_number() -> None:
    """Of ten thousand processes only the largest have series."""
    many = tuple(process(pid, pid * MIB) for pid in range(1, 10_001))
    actual = named(snapshot(replace(NEWEST, devices=(device(processes=many),))), "kvdiag_gpu_process_memory_bytes")
    assert {pid * MIB for pid in range(10_001 - MAX_PROCESSES, 10_001)} == set(actual.values())


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(newest=SAMPLES, known=FACTS, text=st.text(max_size=300))
def test_whatever_is_seen_the_page_can_be_read(newest: Sample, known: Facts, text: str) -> None:
    """Texts from outside neither break the page nor repeat a series, however long or odd they are."""
    odd = device(processes=(process(1, 1, text), process(1, 2, text)), uuid=text or "x")
    assert series(snapshot(newest, known))
    assert series(snapshot(replace(newest, devices=(*(newest.devices or ()), odd)), known))


def test_owners_of_blocks_add_up_to_the_pool() -> None:
    """Each owner has a series, and orphans have one of their own."""
    by_owner = named(snapshot(), "kvdiag_kv_blocks")
    assert 1000 == sum(by_owner.values())
    assert {("0",): 14} == named(snapshot(), "kvdiag_kv_orphaned_blocks")
    assert 14 == by_owner["0", "orphaned"]


def test_a_pool_without_bytes_has_no_bytes() -> None:
    """A value that cannot be computed is left out; the engine's own usage ratio is still exported."""
    shown = snapshot(known=facts(World(pools=(pool(pool_bytes=None),))))
    assert {} == named(shown, "kvdiag_kv_pool_bytes")
    assert {("0",): 0.25} == named(shown, "kvdiag_kv_usage_ratio")


def test_growth_has_the_bounds_of_the_time_that_is_left() -> None:
    """In bytes per second, with the holder as a label."""
    shown = snapshot()
    assert {("leak.host",): 0.1 * MIB} == named(shown, "kvdiag_growth_bytes_per_second")
    assert {("leak.host",): 0.2 * MIB} == named(shown, "kvdiag_growth_high_bytes_per_second")
    assert {("leak.host",): 0.05 * MIB} == named(shown, "kvdiag_growth_low_bytes_per_second")
    assert {("vllm 100", "leak.host"): 1.0} == named(shown, "kvdiag_finding_holder_info")


def test_of_several_holders_the_one_that_fills_first_is_told() -> None:
    """A verdict has one growth: that of the holder whose room ends first, not the largest or the first found."""
    # three processes that grow, the second of which has an hour left
    before = snapshot()
    assert before.diagnosis is not None
    told: tuple[tuple[str, Status, float, float], ...] = (
        ("slow 1", "fault", 900.0, 9000.0),
        ("soon 2", "suspect", 3600.0, 3600.0),
        ("well 3", "ok", 7200.0, 60.0),
    )
    each = [
        Finding(
            id="leak.host",
            status=status,
            summary="",
            holder=holder,
            growth=GrowthFigures(bytes_per_second=growth / 3600.0, exhaustion_seconds=left),
        )
        for holder, status, growth, left in told
    ]
    shown = replace(before, diagnosis=replace(before.diagnosis, findings=tuple(each)))

    # what is no leak does not count
    assert {("soon 2", "leak.host"): 1.0} == named(shown, "kvdiag_finding_holder_info")
    assert {("leak.host",): 1.0} == named(shown, "kvdiag_growth_bytes_per_second")
    assert {("leak.host",): 3600.0} == named(shown, "kvdiag_time_to_exhaustion_seconds")


def test_a_growth_without_an_end_has_no_latest_time() -> None:
    """Where growth may be none at all its least is 0, and the latest time is left out rather than infinite."""
    before = snapshot()
    assert before.diagnosis is not None
    endless = replace(GROWTH, low_bytes_per_second=0.0, exhaustion_high_seconds=None)
    found = Finding(id="leak.host", status="suspect", summary="", growth=endless)
    shown = replace(before, diagnosis=replace(before.diagnosis, findings=(found,)))
    assert {("leak.host",): 0.0} == named(shown, "kvdiag_growth_low_bytes_per_second")
    assert {} == named(shown, "kvdiag_time_to_exhaustion_high_seconds")


HALF_FULL = {
    "kv_headroom_tokens": 49_160.0,
    "kv_headroom_requests": 4.0,
    "kv_waste_ratio": 4 * 7.5 / 49_152,
    "context_mean_tokens": 12_290.0,
    "requests_concurrency_limit": 8.0,
}


@pytest.mark.parametrize(
    ("usage", "running", "waiting", "expected"),
    [
        pytest.param(0.0, 0, 0, {"kv_headroom_tokens": 98_320.0, "requests_in_flight_ratio": 0.0}, id="idle"),
        pytest.param(0.5, 4, 0, {**HALF_FULL, "requests_in_flight_ratio": 0.5}, id="half full"),
        pytest.param(0.5, 4, 6, {**HALF_FULL, "requests_in_flight_ratio": 1.25}, id="more wait than the rest holds"),
        pytest.param(0.25, 0, 0, {"kv_headroom_tokens": 73_740.0, "requests_in_flight_ratio": 0.0}, id="a leak, idle"),
        pytest.param(0.0, 0, 2, {"kv_headroom_tokens": 98_320.0}, id="nothing admitted yet"),
        pytest.param(0.5, None, None, {"kv_headroom_tokens": 49_160.0}, id="requests not told"),
        pytest.param(None, 4, 0, {}, id="usage not told"),
    ],
)
def test_the_room_in_a_pool(
    usage: float | None, running: int | None, waiting: int | None, expected: dict[str, float]
) -> None:
    """Headroom in tokens and in requests like those that run, their length, their limit, and what their tails waste."""
    told = Engine(engine="0", kv_usage_ratio=usage, requests_running=running, requests_waiting=waiting)
    shown = snapshot(replace(NEWEST, engines=(told,)))
    assert expected == pytest.approx(
        {
            name: value
            for name in (*HALF_FULL, "requests_in_flight_ratio")
            for value in named(shown, f"kvdiag_{name}").values()
        }
    )


def test_a_pool_of_unknown_tokens_has_no_room() -> None:
    """Where the engine does not report its capacity and layers differ, blocks times tokens would be wrong: left out."""
    hybrid = pool(capacity_tokens=None, max_concurrency=None, sliding_window_tokens=4096)
    shown = snapshot(known=facts(World(pools=(hybrid,))))
    assert {} == named(shown, "kvdiag_kv_headroom_tokens")


def test_ten_thousand_of_everything_are_a_page_of_bounded_size() -> None:
    """However many models, engines, devices and allocators a page or a folder claims: each is cut off."""
    many, on_devices = 10_000, MAX_SERIES + 1
    claimed = Sample(
        at_seconds=1.0,
        engines=tuple(engine(label=f"model {number}") for number in range(many)),
        devices=tuple(device(uuid=f"GPU-{number}") for number in range(on_devices)),
        allocators=tuple(allocator(pid=number + 1) for number in range(on_devices)),
        host=tuple(HostProcess(pid=number + 1, name="x" * 1000, resident_bytes=number) for number in range(many)),
    )
    found = tuple(
        Finding(id=f"verdict.{number}", status="suspect", summary="", growth=GROWTH) for number in range(many)
    )
    before = snapshot(claimed)
    assert before.diagnosis is not None
    shown = replace(before, diagnosis=replace(before.diagnosis, findings=found))
    assert MAX_SERIES >= max(len(named(shown, name)) for name in ("kvdiag_gpu_info", "kvdiag_requests_running"))
    assert MAX_SERIES >= len(named(shown, "kvdiag_growth_bytes_per_second"))
    assert 40_000 > len(series(shown))
