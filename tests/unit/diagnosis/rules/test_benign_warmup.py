"""benign.warmup: growth of the first cycles that stopped, to the byte."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.rules.benign_warmup import judge
from kvdiag.model import Facts, Finding, Sample, Timeline
from tests.builders.answers import containing, evidence, only, rows
from tests.builders.soak_timeline import LOADS, Seen, after_cycles, after_requests, facts_of, soak
from tests.builders.values import GIB, MIB, NO_NVML, device, engine, pool
from tests.unit.diagnosis.rules.leaks.cycles import cycles

KNOWN = Facts(pools=(pool(),))

PAGE = 2 * MIB

FLAT = (0,) * 8

BUSY = Sample(at_seconds=0.0, engines=(engine(running=1),))


def gpus(*used: int | None) -> Sample:
    """One reading of so many GPUs."""
    return Sample(
        at_seconds=0.0,
        devices=tuple(
            device(index, used_bytes=None if size is None else 10 * GIB + size) for index, size in enumerate(used)
        ),
    )


def growing(*steps: Sequence[int], baseline: Sequence[Sample] = ()) -> Timeline:
    """GPUs that take so much more with each cycle."""
    return cycles([gpus(*(sum(each[:cycle]) for each in steps)) for cycle in range(9)], baseline=baseline)


def of_cycles(timeline: Timeline, of: Facts = KNOWN) -> Finding:
    """The rule's one finding."""
    return only(judge, timeline, of)


@pytest.mark.parametrize(
    ("before", "first", "told"),
    [
        (0, (PAGE - 1, 0), containing("did not grow")),
        (0, (PAGE, 0), containing("GPU 0", "2.00 MiB", "warm-up")),
        (PAGE, (0, 0), containing("GPU 0", "2.00 MiB", "warm-up")),
        (PAGE, (3 * PAGE, PAGE), containing("GPU 0", "10.0 MiB", "warm-up")),
        (-PAGE, (PAGE, 0), containing("did not grow")),
    ],
    ids=["less than a page", "a page", "with the unjudged requests", "with all of them", "given back before"],
)
def test_what_came_first_is_summed_from_the_baseline_on(before: int, first: tuple[int, int], told: str) -> None:
    """What the unjudged requests between baseline and first cycle brought belongs to it."""
    actual = of_cycles(growing((*first, *FLAT[2:]), baseline=[gpus(-before)]))

    assert ("ok", told) == (actual.status, actual.summary)
    # Nothing grew, so there is nothing to explain.
    assert (before + sum(first) < PAGE) == (not actual.evidence)
    assert not actual.evidence or [
        ("warmup_growth", before + sum(first), "bytes", "nvml"),
        ("growth_over_judged_requests", 0, "bytes", "nvml"),
        ("judged_requests", 6, "requests", "kvdiag"),
    ] == rows(actual)


def test_memory_that_was_released_after_the_cycles_is_not_lasting_growth() -> None:
    """Torch's cache of large steps is released at a failed allocation: three pages came, and one of them stayed."""
    grown = growing((3 * PAGE, *FLAT[1:]))
    released = [
        replace(one, at_seconds=one.at_seconds + 100.0, devices=one.devices and gpus(PAGE).devices)
        for one in grown.samples[-2:]
    ]
    actual = of_cycles(replace(grown, samples=(*grown.samples, replace(BUSY, at_seconds=220.0), *released)))

    assert ("ok", containing("2.00 MiB", "warm-up")) == (actual.status, actual.summary)
    assert evidence(actual)["warmup_growth"] == PAGE


def test_the_gpu_to_which_most_came_is_reported() -> None:
    """By cycles and baseline together: 6 MiB of GPU 1, of which 4 came before the first cycle, are more than 4."""
    baseline = [gpus(0, -2 * PAGE, None)]
    steps = (2 * PAGE, *FLAT[1:]), (PAGE, *FLAT[1:]), FLAT
    assert of_cycles(growing(*steps, baseline=baseline)).summary.startswith("GPU 1: grew 6.00 MiB with")
    assert of_cycles(growing(*steps)).summary.startswith("GPU 0: grew 4.00 MiB with")


def test_growth_that_goes_on_is_unknown_with_its_figures() -> None:
    """One GPU that rose in the judged cycles is enough; the figures are those of the one with most at first."""
    rising = (0, 0, 0, 0, 0, 0, 0, PAGE)
    actual = of_cycles(growing((5 * PAGE, *FLAT[1:]), rising))

    assert ("unknown", containing("still growing")) == (actual.status, actual.summary)
    assert [
        ("warmup_growth", 5 * PAGE, "bytes", "nvml"),
        ("growth_over_judged_requests", 0, "bytes", "nvml"),
        ("judged_requests", 6, "requests", "kvdiag"),
    ] == rows(actual)


def then(first: Timeline, later: Seen) -> Finding:
    """The finding on cycles and a soak after them."""
    second = soak(later)
    return of_cycles(Timeline(samples=first.samples + second.samples, marks=first.marks + second.marks), facts_of())


LATE = (PAGE, 0, 0, 0, 0, 4 * PAGE, 0, 0)
"""A page at first, and four more at the sixth request."""

ENDS = [min(level, 60 * MIB) for level in after_requests(MIB)]
"""Growth that stops in the first of the soak's cycles."""


@pytest.mark.parametrize(
    ("later", "status"),
    [
        (Seen(server_reported=False), "ok"),
        (Seen(), "ok"),
        (Seen(server=ENDS), "ok"),
        (Seen(server=after_requests(MIB)), "unknown"),
        (Seen(server=after_cycles(4 * MIB), server_reported=False), "unknown"),
        (Seen(server=None, host=[0] * len(LOADS)), "unknown"),
    ],
    ids=["flat", "the server's flat", "came to its end", "leaks", "grows by itself", "not read"],
)
def test_a_soak_that_saw_it_stop_decides(later: Seen, status: str) -> None:
    """What rose in the minute's cycles belongs to the warm-up where nineteen load cycles stand still after it."""
    actual = then(growing(LATE), later)
    # A page at first and four later
    summary = {"ok": containing("GPU 0", "10.0 MiB", "warm-up"), "unknown": containing("still growing")}
    assert (status, summary[status]) == (actual.status, actual.summary)


def test_what_rose_on_another_gpu_is_not_added() -> None:
    """The summary counts only the reported GPU; a rise below a page is no growth of the judged cycles."""
    # GPU 0 with ten pages at first, and a page less a byte later; GPU 1 with four pages later
    little = (10 * PAGE, 0, 0, 0, 0, PAGE - 1, 0, 0)
    assert then(growing(little, LATE), Seen(server_reported=False)).summary.startswith("GPU 0: grew 20.0 MiB with")


@pytest.mark.parametrize(
    ("timeline", "told"),
    [
        (
            Timeline(samples=(Sample(at_seconds=1.0, engines=(engine(),)),)),
            containing("no device memory", "NVML"),
        ),
        (Timeline(samples=(Sample(at_seconds=1.0, gaps=(NO_NVML,)),)), NO_NVML.reason),
        (cycles([gpus(0)] * 5), containing("too few equal requests")),
    ],
    ids=["no device", "no NVML", "four cycles"],
)
def test_what_is_missing_is_reported(timeline: Timeline, told: str) -> None:
    """Without device memory, or with too few equal requests, warm-up is unknown and the reason is reported."""
    expected = Finding(id="benign.warmup", status="unknown", summary=told)
    assert expected == of_cycles(timeline)


@pytest.mark.parametrize("lost", ["baseline end", "nothing", "baseline readings"])
def test_without_the_moments_around_them_the_unjudged_requests_are_left_out(lost: str) -> None:
    """A baseline that did not end, or of which no idle reading is there, has no floor to begin from."""
    whole = growing((PAGE, *FLAT[1:]), baseline=[gpus(-10 * PAGE)])
    marks = tuple(
        mark for mark in whole.marks if not (lost == "baseline end" and (mark.step, mark.phase) == ("baseline", "end"))
    )
    samples = whole.samples[1:] if lost == "baseline readings" else whole.samples

    actual = of_cycles(Timeline(samples=samples, marks=marks))
    expected = 11 * PAGE if lost == "nothing" else PAGE
    assert expected == evidence(actual)["warmup_growth"]


def test_a_gpu_that_does_not_report_leaves_nothing_to_compare() -> None:
    """One whose memory is missing after a cycle makes the cycles too few, and is no growth from nothing."""
    dark = growing((PAGE, *FLAT[1:]), baseline=[gpus(None)])
    assert of_cycles(dark).summary.startswith("GPU 0: grew 2.00 MiB with")
