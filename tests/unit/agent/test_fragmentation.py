"""The split of the reserved bytes: on maps made by hand, and against a second count unit by unit on random ones."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.agent.fragmentation import FREE, LIVE, PENDING, SMALL_PAGE_BYTES, segment_bytes, summarise

MIB, GIB = 2**20, 2**30
PARTS = ("live_bytes", "pending_bytes", "private_bytes", "releasable_bytes", "stranded_bytes")


def segment(
    *blocks: tuple[int, str],
    stream: int = 0,
    pool: tuple[int, int] = (0, 0),
    expandable: bool = False,
    large: bool = True,
    device: int = 0,
) -> dict[str, Any]:
    """A segment as torch reports it, with blocks (bytes, state)."""
    return {
        "device": device,
        "address": 0x7F0000000000,
        "total_size": sum(size for size, _ in blocks),
        "stream": stream,
        "segment_type": "large" if large else "small",
        "segment_pool_id": pool,
        "is_expandable": expandable,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


def comb(*, expandable: bool) -> list[dict[str, Any]]:
    """48 holes of 64 MiB, each followed by a live block of 2 MiB."""
    teeth = [(64 * MIB, FREE), (2 * MIB, LIVE)]
    if expandable:
        return [segment(*teeth * 48, expandable=True)]
    return [segment(*teeth) for _ in range(48)]


@pytest.mark.parametrize(
    ("segments", "stranded_gib", "fits", "unusable"),
    [
        pytest.param([segment((GIB, FREE))] * 4, 0.0, True, 0.0, id="idle, whole segments free"),
        pytest.param([segment((3 * GIB, FREE), pool=(1, 0)), segment((GIB, FREE))], 0.0, True, 0.0, id="graph pool"),
        pytest.param(comb(expandable=False), 3.0, False, 1.0, id="comb"),
        pytest.param(comb(expandable=True), 0.83, True, 0.26, id="comb, expandable"),
        pytest.param([segment((2 * GIB - MIB, FREE), (MIB, LIVE))], 2.0, True, 0.09, id="one small tensor"),
    ],
)
def test_gap_is_a_problem_or_is_not(
    segments: list[dict[str, Any]], stranded_gib: float, fits: bool, unusable: float
) -> None:
    """Of five gaps beyond 2 GiB or near it, only the comb in fixed segments keeps 512 MiB from fitting."""
    actual = summarise(segments, device=0, device_free_bytes=200 * MIB)
    assert pytest.approx(stranded_gib, abs=0.01) == actual["stranded_bytes"] / GIB
    assert fits == actual["fits"]
    assert pytest.approx(unusable, abs=0.01) == actual["unusable_ratio"]


def test_pinned_segments_and_largest_blocks_are_told() -> None:
    """A large segment that a small tensor keeps is counted with its free bytes, and live blocks by their sizes."""
    segments = [
        segment((400 * MIB, FREE), (MIB, LIVE)),
        segment((512 * MIB, LIVE)),
        segment((512 * MIB, LIVE)),
        segment((20 * MIB, FREE)),
    ]

    actual = summarise(segments, device=0, device_free_bytes=0)

    assert (1, 400 * MIB) == (actual["pinned_segments"], actual["pinned_free_bytes"])
    assert [[512 * MIB, 2], [MIB, 1]] == actual["largest_live_blocks"]
    assert 400 * MIB == actual["largest_free_block_bytes"]


def test_both_names_of_pending_blocks_are_known() -> None:
    """The library's and the documentation's word for a block that another stream may still use are the same state."""
    actual = summarise([segment(*[(20 * MIB, state) for state in PENDING])], device=0, device_free_bytes=0)
    assert (40 * MIB, 0) == (actual["pending_bytes"], actual["stranded_bytes"])


def test_free_block_of_another_stream_is_of_no_use() -> None:
    """A hole that would fit serves the stream that it belongs to alone."""
    segments = [segment((4 * GIB, LIVE), stream=7), segment((600 * MIB, FREE), (2 * MIB, LIVE), stream=8)]
    actual = summarise(segments, device=0, device_free_bytes=0)
    assert (False, 1.0) == (actual["fits"], actual["unusable_ratio"])


def test_other_devices_are_left_out() -> None:
    """A snapshot is of every device, a summary of one."""
    actual = summarise([segment((GIB, LIVE), device=1)], device=0, device_free_bytes=GIB)
    assert (0, 0, 0.0) == (actual["reserved_bytes"], actual["segments"], actual["unusable_ratio"])


def test_without_the_drivers_free_bytes_only_what_they_cannot_change_is_told() -> None:
    """Without the driver's bytes a large enough free block proves that the request fits; without one it is unknown."""
    hole = segment((600 * MIB, FREE), (2 * MIB, LIVE))
    fitting = summarise([hole], device=0, device_free_bytes=None)
    unknown = summarise([hole], device=0, device_free_bytes=None, request_bytes=GIB)
    assert (True, None) == (fitting["fits"], fitting["unusable_ratio"])
    assert (None, None) == (unknown["fits"], unknown["unusable_ratio"])


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        pytest.param({"blocks": [{"size": 2 * MIB, "state": "active_sideways"}]}, ValueError, id="unknown state"),
        pytest.param({"total_size": 3 * MIB}, ValueError, id="blocks do not add up"),
        pytest.param({"segment_pool_id": None}, TypeError, id="no pool"),
        pytest.param({"stream": ...}, KeyError, id="no stream"),
    ],
)
def test_other_shapes_are_refused(broken: dict[str, Any], error: type[Exception]) -> None:
    """Segments in a form that torch does not report are refused, not summed."""
    segments = [{**segment((2 * MIB, LIVE)), **broken}]
    segments = [{name: value for name, value in each.items() if value is not ...} for each in segments]
    with pytest.raises(error):
        summarise(segments, device=0, device_free_bytes=0)


UNIT = 2**18
PAGE_UNITS = 24
"""Large pages of 6 MiB, so that a random segment has several."""

BLOCKS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([FREE, FREE, LIVE, PENDING[0]])), min_size=1, max_size=8
)
SEGMENTS = st.lists(
    st.builds(
        lambda blocks, stream, private, expandable, large: segment(
            *[(units * UNIT, state) for units, state in blocks],
            stream=stream,
            pool=(0, 1) if private else (0, 0),
            expandable=expandable,
            large=large,
        ),
        BLOCKS,
        st.integers(0, 1),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)


def counted(segments: Sequence[dict[str, Any]], free_units: int, request_units: int) -> dict[str, Any]:
    """The same by brute force: every unit of memory looked at for itself."""
    parts = dict.fromkeys(PARTS, 0)
    back, large_request = 0, request_units * UNIT > MIB
    by_stream: dict[int, int] = {}
    for each in segments:
        if each["segment_pool_id"] == (0, 0) and (each["segment_type"] == "large") == large_request:
            by_stream[each["stream"]] = by_stream.get(each["stream"], 0) + each["total_size"]
    stream = max(by_stream, key=lambda one: by_stream[one], default=None)
    expandable = False
    beside: list[bool] = []
    fitting = False
    for each in segments:
        units = [(number, block) for number, block in enumerate(each["blocks"]) for _ in range(block["size"] // UNIT)]
        page = PAGE_UNITS if each["segment_type"] == "large" else SMALL_PAGE_BYTES // UNIT
        same_pool = each["segment_pool_id"] == (0, 0) and (each["segment_type"] == "large") == large_request
        expandable |= same_pool and each["is_expandable"]
        for place, (number, block) in enumerate(units):
            if block["state"] == LIVE:
                parts["live_bytes"] += UNIT
            elif block["state"] in PENDING:
                parts["pending_bytes"] += UNIT
            elif each["segment_pool_id"] != (0, 0):
                parts["private_bytes"] += UNIT
            else:
                first = place // page * page
                neighbours = units[first : first + page] if each["is_expandable"] else units
                whole = {other for other, _ in neighbours} == {number}
                full_page = len(neighbours) == page or not each["is_expandable"]
                fits = same_pool and each["stream"] == stream and block["size"] >= request_units * UNIT
                fitting |= fits
                if whole and full_page:
                    parts["releasable_bytes"] += UNIT
                    back += fits
                else:
                    parts["stranded_bytes"] += UNIT
                    beside.append(fits)
    driver = free_units * UNIT + parts["releasable_bytes"]
    page_bytes = PAGE_UNITS * UNIT
    obtainable = driver >= segment_bytes(request_units * UNIT, page_bytes, expandable=expandable)
    reachable = (driver if obtainable else back * UNIT) + sum(beside) * UNIT
    free = driver + parts["stranded_bytes"]
    return {**parts, "fits": fitting or obtainable, "unusable_ratio": round(1 - reachable / free, 4) if free else 0.0}


@settings(deadline=None, max_examples=300)
@given(segments=SEGMENTS, free_units=st.integers(0, 60), request_units=st.integers(1, 120))
def test_agrees_with_a_count_unit_by_unit(segments: list[dict[str, Any]], free_units: int, request_units: int) -> None:
    """On any map the parts are those of a brute-force count, and add up to the reserved bytes exactly."""
    actual = summarise(
        segments,
        device=0,
        device_free_bytes=free_units * UNIT,
        request_bytes=request_units * UNIT,
        large_page_bytes=PAGE_UNITS * UNIT,
    )

    expected = counted(segments, free_units, request_units)
    assert expected == {name: actual[name] for name in expected}
    assert actual["reserved_bytes"] == sum(actual[part] for part in PARTS)
    pools = actual["pools"].values()
    assert [pool["reserved_bytes"] for pool in pools] == [sum(pool[part] for part in PARTS) for pool in pools]
    assert {part: actual[part] for part in PARTS} == {part: sum(pool[part] for pool in pools) for part in PARTS}
    assert 0.0 <= actual["unusable_ratio"] <= 1.0
