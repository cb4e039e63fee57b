"""Two causes by their figures: free blocks that are too small, and other processes' memory, to the byte."""

from typing import Any

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.postmortem import Case
from kvdiag.diagnosis.postmortem.startup import Foreign, foreign
from kvdiag.diagnosis.postmortem.transients import holes
from tests.unit.diagnosis.postmortem.cases import GIB, MIB, account, split

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
    """Without a total nobody knows what share of it they are."""
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
