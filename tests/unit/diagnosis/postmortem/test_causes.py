"""Two causes by their figures: free blocks that are too small, and other processes' memory, to the byte."""

from typing import Any

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.postmortem import Case
from kvdiag.diagnosis.postmortem.startup import Foreign, foreign, judge_context, judge_foreign
from kvdiag.diagnosis.postmortem.transients import holes, judge_fragmentation
from kvdiag.model import Facts
from tests.builders.values import pool
from tests.unit.diagnosis.postmortem.cases import FLAGS, GIB, MIB, account, split

CONTEXT = DEFAULT_LIMITS.context_bytes
"""What a process uses of a device besides torch's memory."""


def others_of(kind: str = "torch", /, **figures: Any) -> Foreign | None:
    """What others are concluded to use."""
    return foreign(Case(accounts=(account(kind, **figures),)), DEFAULT_LIMITS)


@pytest.mark.parametrize(("beyond_bytes", "found"), [(0, False), (1, True)])
def test_at_start_only_what_exceeds_a_context_is_foreign(beyond_bytes: int, found: bool) -> None:
    """A refusal of the budget is printed after the process has made its own context."""
    taken = CONTEXT + beyond_bytes

    expected = Foreign(size_bytes=taken, sure=True) if found else None
    assert expected == others_of("budget", total_bytes=80 * GIB, free_bytes=80 * GIB - taken)


@pytest.mark.parametrize(
    ("total_gib", "asked_bytes", "least_bytes"),
    [
        (10, 258 * MIB, 256 * MIB),  # a fiftieth of 10 GiB is less, and 2 MiB were short
        (80, GIB, 1_717_986_919),  # a fiftieth of 80 GiB: 1,717,986,918.4
        (80, 4 * GIB, 4 * GIB - 256 * MIB),  # what was short
    ],
    ids=["noticeable", "of the device", "short"],
)
def test_listed_others_count_from_what_would_have_been_enough(
    total_gib: int, asked_bytes: int, least_bytes: int
) -> None:
    """From 256 MiB, a fiftieth of the device, and what was short, whichever is most."""
    full = total_gib * GIB - 256 * MIB
    enough, less = (
        others_of(
            total_bytes=total_gib * GIB,
            asked_bytes=asked_bytes,
            process_bytes=full - used,
            allocated_bytes=None,
            unallocated_bytes=None,
        )
        for used in (least_bytes, least_bytes - 1)
    )

    assert (Foreign(size_bytes=least_bytes, sure=True), None) == (enough, less)


def test_listed_others_count_without_the_devices_size() -> None:
    """A list of processes alone is enough: theirs are added up."""
    listed = others_of(total_bytes=None, free_bytes=None, others=((7, 200 * MIB), (8, 100 * MIB)))
    assert Foreign(size_bytes=300 * MIB, sure=True) == listed


@pytest.mark.parametrize(("total_gib", "least_gib"), [(10, 2), (80, 8)])
@pytest.mark.parametrize(("beyond_bytes", "found"), [(0, False), (1, True)])
def test_without_a_list_others_are_guessed_from_the_rest(
    total_gib: int, least_gib: int, beyond_bytes: int, found: bool
) -> None:
    """What neither torch nor a context explains, above 2 GiB and a tenth of the device, which libraries may use."""
    rest = least_gib * GIB + beyond_bytes
    actual = others_of(
        total_bytes=total_gib * GIB,
        free_bytes=total_gib * GIB - GIB - 512 * MIB - CONTEXT - rest,
        allocated_bytes=GIB,
        unallocated_bytes=512 * MIB,
        process_bytes=None,
    )

    assert (Foreign(size_bytes=rest, sure=False) if found else None) == actual


@pytest.mark.parametrize("missing", ["total_bytes", "free_bytes", "allocated_bytes", "unallocated_bytes"])
def test_without_all_figures_nothing_is_said_of_others(missing: str) -> None:
    """50 GiB that nothing explains, but for one figure: half of a sum is no guess."""
    figures: dict[str, Any] = {"process_bytes": None, "allocated_bytes": 28 * GIB, missing: None}
    assert others_of(**figures) is None


@pytest.mark.parametrize(
    ("asked", "free", "unallocated", "state"),
    [
        (GIB, GIB, GIB, "unknown"),
        (GIB, GIB - 1, GIB, "confirmed"),
        (GIB, 0, GIB - 1, "none"),
        (GIB, 1, GIB - 1, "unknown"),
        (2 * MIB, MIB, 2 * MIB, "unknown"),
        (2 * MIB + 1, MIB, GIB, "confirmed"),
        (300 * MIB, 0, 858_993_459, "slight"),  # a hundredth of 80 GiB: 858,993,459.2
        (300 * MIB, 0, 858_993_460, "confirmed"),
        (None, 0, GIB, "unknown"),
        (GIB, None, GIB, "unknown"),
        (GIB, 0, None, "unknown"),
    ],
)
def test_message_shows_holes_where_unallocated_bytes_alone_were_enough(
    asked: int | None, free: int | None, unallocated: int | None, state: str
) -> None:
    """Free and unallocated bytes do not join to one block; what is missing leaves it open."""
    actual = holes(account(asked_bytes=asked, free_bytes=free, unallocated_bytes=unallocated), DEFAULT_LIMITS)
    assert state == actual.state


def test_holes_of_a_device_of_unknown_size_are_not_belittled() -> None:
    """Holes of 8 MiB are confirmed as the cause where the device's size is unknown."""
    small = account(asked_bytes=4 * MIB, free_bytes=0, unallocated_bytes=8 * MIB, total_bytes=None)
    assert "confirmed" == holes(small, DEFAULT_LIMITS).state


@pytest.mark.parametrize("kind", ["async", "driver", "masked"])
def test_only_torch_has_blocks_with_holes(kind: str) -> None:
    """No other figures say how memory is cut up."""
    assert "unknown" == holes(account(kind, unallocated_bytes=20 * GIB), DEFAULT_LIMITS).state


@pytest.mark.parametrize(
    ("blocks", "free", "state"),
    [
        ({"stranded_bytes": 768 * MIB, "largest_free_block_bytes": GIB - 1}, 256 * MIB, "confirmed"),
        ({"stranded_bytes": 768 * MIB - 1}, 256 * MIB, "none"),
        ({"stranded_bytes": GIB, "largest_free_block_bytes": 64 * MIB}, None, "confirmed"),
        ({"stranded_bytes": GIB - 1}, None, "none"),
        ({"stranded_bytes": GIB, "largest_free_block_bytes": GIB}, 0, "unknown"),
        ({"pending_bytes": GIB}, 0, "unknown"),
        ({"pending_bytes": GIB - 1}, 0, "none"),
        ({"releasable_bytes": 768 * MIB, "largest_free_block_bytes": 8 * MIB}, 256 * MIB, "confirmed"),
    ],
)
def test_blocks_of_a_black_box_decide_by_the_byte(blocks: dict[str, int], free: int | None, state: str) -> None:
    """What is free and what lies between live blocks has to be enough, and no block of it; 1 GiB was requested."""
    actual = holes(account(split=split(**blocks), free_bytes=free, unallocated_bytes=3 * GIB), DEFAULT_LIMITS)
    assert state == actual.state


@pytest.mark.parametrize("kind", ["context", "blocks", "host"])
def test_processes_that_no_message_lists_are_not_said_to_use_little(kind: str) -> None:
    """What acquits them is that the device was not full."""
    listed, not_listed = (
        judge_foreign(Case(accounts=(account(kind, process_bytes=of),)), DEFAULT_LIMITS) for of in (79 * GIB, None)
    )
    assert ("ok", "ok") == (listed.status, not_listed.status)
    assert ("other processes" in listed.summary, "other processes" in not_listed.summary) == (True, False)


def test_expandable_segments_are_no_remedy_for_a_server_that_sleeps() -> None:
    """With sleep mode vLLM does not start with them."""
    figures: dict[str, Any] = {"unallocated_bytes": 20 * GIB, "allocated_bytes": 58 * GIB}
    awake, waking = (
        judge_fragmentation(Case(accounts=(account(phase=phase, **figures),)), DEFAULT_LIMITS)
        for phase in ("request", "wake")
    )
    assert ("fault", "fault") == (awake.status, waking.status)
    assert (awake.remedy or "").startswith("Set PYTORCH_CUDA_ALLOC_CONF=")
    assert (waking.remedy or "").startswith("Restart the server (")


def test_a_request_too_long_is_told_what_the_pool_of_the_trace_holds() -> None:
    """The log has the request's tokens alone, the trace those of the pool and the longest request that is allowed."""
    facts = Facts(pools=(pool(capacity_tokens=6_720),), max_model_len_tokens=16_384)
    told = Case(accounts=(account("context", asked_tokens=40_000),), facts=facts, flags=FLAGS)
    found = judge_context(told, DEFAULT_LIMITS)
    assert "6,720 tokens" in found.summary
    assert (found.remedy or "").startswith("Lower --max-model-len: 16384 -> 6720")


def test_a_failure_without_figures_is_led_by_what_it_is() -> None:
    """That no process is listed says nothing to who has to find out what happened."""
    masked = Case(accounts=(account("masked", asked_bytes=None, process_bytes=None, free_bytes=None),))
    assert judge_foreign(masked, DEFAULT_LIMITS).summary.startswith("out of memory (")
