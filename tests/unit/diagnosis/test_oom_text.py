from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis.request_failures import OutOfMemory, parse_oom
from tests.builders.values import GIB, MIB, OOM


def test_every_figure_of_torchs_message_is_read() -> None:
    """Asked, free and unallocated bytes stand in one message."""
    actual = parse_oom(OOM)

    assert OutOfMemory(asked_bytes=3 * GIB, free_bytes=512 * MIB, unallocated_bytes=256 * MIB) == actual


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 * MIB),
        ("HTTP 500: CUDA out of memory. Tried to allocate 512 bytes", 512),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. Preemptively rejecting allocation", 2 * GIB),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB", GIB * 3 // 2),
    ],
)
def test_a_short_message_gives_what_it_has(text: str, asked: int) -> None:
    """Figures that are not there stay unknown."""
    assert OutOfMemory(asked_bytes=asked, free_bytes=None, unallocated_bytes=None) == parse_oom(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "HTTP 500: internal error",
        "out of memory",
        "Tried to allocate 3.00 GiB",
        "CUDA out of memory. Tried to allocate many GiB",
    ],
)
def test_other_errors_are_none(text: str) -> None:
    """Only a message that says both, out of memory and how much was asked for, is one."""
    assert parse_oom(text) is None


@pytest.mark.parametrize(
    ("free", "unallocated", "room"), [(1, 2, True), (1, 1, False), (None, 9, None), (9, None, None), (3, 9, None)]
)
def test_room_is_left_only_where_both_figures_are_known(
    free: int | None, unallocated: int | None, room: bool | None
) -> None:
    """Free and unallocated bytes together are compared with what was asked for."""
    # Three bytes asked for
    oom = OutOfMemory(asked_bytes=3, free_bytes=free, unallocated_bytes=unallocated)

    assert room is oom.room_left


@given(st.text(max_size=300))
def test_no_text_makes_it_fail(text: str) -> None:
    """Whatever a server answers is read or refused, and never raises."""
    actual = parse_oom(f"CUDA out of memory. Tried to allocate 1.00 GiB. {text}")

    assert actual is not None
    assert GIB == actual.asked_bytes
