"""What the page works out: growth and its bounds, the room in a pool, and where it cuts off."""

from dataclasses import replace

import pytest

from kvdiag.model import (
    Engine,
    Finding,
    GrowthFigures,
    HostProcess,
    Sample,
    Status,
)
from kvdiag.outputs.metrics.families import MAX_SERIES
from tests.builders.values import MIB, allocator, device, engine, pool
from tests.builders.worlds import World, facts
from tests.unit.outputs.test_metrics import GROWTH, NEWEST, named, series, snapshot


def test_growth_has_the_bounds_of_the_time_that_is_left() -> None:
    """In bytes per second, with the holder beside it."""
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
    """Where the engine does not tell its capacity and layers differ, blocks times tokens would be wrong: left out."""
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
