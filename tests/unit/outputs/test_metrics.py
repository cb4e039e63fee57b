"""The exporter's page: a golden one, what vanishes, and what texts from outside can do to it."""

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
)
from kvdiag.outputs.metrics.exporter import registry
from kvdiag.outputs.metrics.families import MAX_PROCESSES
from kvdiag.sources.prometheus_names import KVDIAG
from tests.builders.answers import finding
from tests.builders.runs import judged
from tests.builders.values import GIB, MIB, SERVER_PID, allocator, device, engine, pool, process, split
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
    """A rule that finds several things, one for each rank, is told by the worst of them."""
    before = snapshot()
    assert before.diagnosis is not None
    found = [Finding(id="imbalance.rank", status=status, summary="") for status in ("unknown", "suspect", "ok")]
    shown = replace(before, diagnosis=replace(before.diagnosis, findings=tuple(found)))
    assert named(shown, "kvdiag_finding")["imbalance.rank", "suspect"] == 1.0


def test_what_is_gone_has_no_series() -> None:
    """A device, a process, an engine that was not seen this time is on no line: nothing is remembered."""
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
    """Of ten thousand processes the largest are told."""
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


def test_a_pool_without_bytes_has_no_bytes() -> None:
    """What cannot be computed is left out; the engine's own share is told all the same."""
    shown = snapshot(known=facts(World(pools=(pool(pool_bytes=None),))))
    assert {} == named(shown, "kvdiag_kv_pool_bytes")
    assert {("0",): 0.25} == named(shown, "kvdiag_kv_usage_ratio")
