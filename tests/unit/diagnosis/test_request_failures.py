"""Requests that failed for lack of memory, and the figures of torch's message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.request_failures import holes_in_message, memory_failures, parse_oom
from kvdiag.model import Mark, Outcome, Timeline
from kvdiag.oom.message import Shortage
from tests.builders.values import GIB, MIB, OOM


def timeline(*outcomes: Outcome | None) -> Timeline:
    """A step of one cycle for each outcome."""
    return Timeline(
        samples=(),
        marks=tuple(
            Mark(at_seconds=float(place), step="concurrent", cycle=place, phase="release", outcome=outcome)
            for place, outcome in enumerate(outcomes)
        ),
    )


def outcome(failed: int, *errors: str) -> Outcome:
    """What became of a cycle's requests."""
    return Outcome(completed=0, failed=failed, prompt_tokens=0, generated_tokens=0, errors=errors)


def figures(found: Shortage | None) -> tuple[int | None, ...]:
    """Bytes requested, free and unallocated."""
    return () if found is None else (found.asked_bytes, found.free_bytes, found.unallocated_bytes)


def test_cycles_that_ran_out_are_reported_with_their_largest_request() -> None:
    """In order, each with how many failed; other errors, and cycles without an outcome, are none."""
    larger = OOM.replace("3.00 GiB", "4.00 GiB")
    found = memory_failures(
        timeline(None, outcome(2, "HTTP 500"), outcome(5, OOM, larger, "HTTP 500"), outcome(0), outcome(1, OOM))
    )
    assert [(2, 5, 4 * GIB), (4, 1, 3 * GIB)] == [
        (span.cycle, span.outcome and span.outcome.failed, shortage.asked_bytes) for span, shortage in found
    ]


def test_every_figure_of_torchs_message_is_read() -> None:
    """Asked, free and unallocated bytes stand in one message."""
    assert (3 * GIB, 512 * MIB, 256 * MIB) == figures(parse_oom(OOM))


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 * MIB),
        ("HTTP 500: CUDA out of memory. Tried to allocate 512 bytes", 512),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. Preemptively rejecting allocation", 2 * GIB),
        ("Allocation was preemptively rejected. Tried to allocate 2.00 GiB.", 2 * GIB),
        ("Allocation on device 0 would exceed allowed memory. (out of memory)\nRequested : 20.00 MiB", 20 * MIB),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB", GIB * 3 // 2),
    ],
)
def test_a_short_message_gives_what_it_has(text: str, asked: int) -> None:
    """Figures that are not there stay unknown."""
    assert (asked, None, None) == figures(parse_oom(text))


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
    ("free", "unallocated", "state"),
    [
        (1, 3, "confirmed"),
        (2, 2, "unknown"),
        (1, 1, "none"),
        (None, 9, "unknown"),
        (9, None, "unknown"),
        (3, 9, "unknown"),
    ],
)
def test_holes_are_unallocated_bytes_that_alone_were_enough(
    free: int | None, unallocated: int | None, state: str
) -> None:
    """Free bytes do not join them to one block: with those alone it is unknown, and with too few of both none."""
    oom = Shortage(kind="torch", message="", asked_bytes=3, free_bytes=free, unallocated_bytes=unallocated)
    assert state == holes_in_message(oom, DEFAULT_LIMITS).state


@given(st.text(max_size=300))
def test_no_text_makes_it_fail(text: str) -> None:
    """Any text after torch's message is parsed without an exception."""
    actual = parse_oom(f"CUDA out of memory. Tried to allocate 1.00 GiB. {text}")
    assert actual is not None
    assert GIB == actual.asked_bytes
