"""baseline.duplicate_model without a pool: a step by one copy, or what may be a cache of any size."""

from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.baseline_duplicate_model import judge
from kvdiag.model import Engine, Facts, Finding, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.values import GIB, device, engine, process


def without_pool(*held_gib: float, engines: tuple[Engine, ...] | None = None) -> Finding:
    """The rule's one finding on a server of 12 GiB of weights without a pool, by what it holds in each reading."""
    samples = tuple(
        Sample(
            at_seconds=15.0 * number,
            engines=engines,
            devices=(device(total_bytes=80 * GIB, processes=(process(100, int(held * GIB)),)),),
        )
        for number, held in enumerate(held_gib)
    )
    known = Facts(server_pids=(100,), weights_bytes=12 * GIB)
    (found,) = judge(Timeline(samples=samples), known, DEFAULT_LIMITS)
    return found


def test_a_step_of_the_weights_size_over_the_weights_is_a_copy() -> None:
    """A server without a pool that rises from one copy of its weights to two, at one blow, holds them twice."""
    actual = without_pool(0.5, 0.5, 12.5, 12.5, 24.6, 24.6, 24.6)

    sentence = ANY_TEXT
    assert ("suspect", sentence) == (actual.status, actual.summary)
    assert 1.008 == evidence(actual)["step_to_weights"]


@pytest.mark.parametrize(
    ("held", "page", "status"),
    [
        ((12.5, 12.5, 18.0, 18.0), None, "ok"),
        ((12.5, 12.5, 30.0, 30.0), None, "unknown"),
        ((12.5, 14.5, 16.5, 18.5, 20.5, 22.5, 24.5, 24.5), None, "unknown"),
        ((12.5, 24.6, 24.6, 24.6), None, "unknown"),
        ((12.5, 12.5, 24.6, 12.5), None, "unknown"),
        ((12.5, 12.5, 24.6, 24.6, 24.6), (engine(),), "unknown"),
    ],
    ids=["less than twice", "another size", "a slope", "no level before", "for a moment", "an engine with a pool"],
)
def test_what_is_no_clear_copy_without_a_pool(
    held: tuple[float, ...], page: tuple[Engine, ...] | None, status: str
) -> None:
    """Less than two copies is one; more may be a cache of any size, and is left open with what would decide."""
    assert status == without_pool(*held, engines=page).status


def test_the_figures_of_a_copy_without_a_pool() -> None:
    """Before, after and the step between them stand beside the most and the newest that the server held."""
    # 12 GiB of weights, a copy of 12.3 GiB at one blow, and a GiB given back at the end
    actual = without_pool(12.5, 12.5, 24.8, 24.8, 23.8)

    # 24.8 / 12 = 2.07, 12.3 / 12 = 1.025
    figures = {
        ("server_bytes", int(23.8 * GIB), "bytes", "nvml"),
        ("max_server_bytes", int(24.8 * GIB), "bytes", "nvml"),
        ("weights_bytes", 12 * GIB, "bytes", "host: checkpoint files"),
        ("ratio_to_weights", 2.07, "times", "computed"),
        ("before_step", int(12.5 * GIB), "bytes", "nvml"),
        ("step", int(24.8 * GIB) - int(12.5 * GIB), "bytes", "nvml"),
        ("step_to_weights", 1.025, "ratio", "computed"),
    }
    assert figures == {(one.name, one.value, one.unit, one.source) for one in actual.evidence}


@pytest.mark.parametrize(
    ("held", "status"),
    [
        ((23.9, 23.9), "ok"),
        ((24.0, 24.0), "unknown"),
        ((12.15, 12.5, 24.5, 24.5), "suspect"),
        ((12.13, 12.5, 24.5, 24.5), "unknown"),
        ((12.5, 12.5, 24.5, 24.86), "suspect"),
        ((12.5, 12.5, 24.5, 24.87), "unknown"),
        ((12.0, 12.0, 24.0, 24.0), "suspect"),
        ((11.99, 11.99, 24.0, 24.0), "unknown"),
        ((13.07, 13.07, 25.0, 25.0), "suspect"),
        ((13.08, 13.08, 25.0, 25.0), "unknown"),
        ((12.5, 12.5, 24.15, 24.15), "suspect"),
        ((12.5, 12.5, 24.13, 24.13), "unknown"),
        ((12.5, 12.5, 24.86, 24.86), "suspect"),
        ((12.5, 12.5, 24.87, 24.87), "unknown"),
        ((12.5, 12.5, 24.5), "unknown"),
    ],
)
def test_what_counts_as_a_step_by_one_copy(held: tuple[float, ...], status: str) -> None:
    """Weights of 12 GiB: levels and step to 0.36 GiB (3 %), from one copy and at most 1.07 GiB of context."""
    assert status == without_pool(*held).status


def test_a_cache_or_a_copy_is_told_with_its_size() -> None:
    """Without a step it may be either; how many times the weights would fit in tells how likely a copy is."""


def test_less_than_two_copies_is_told_with_both_sizes() -> None:
    """Eighteen GiB beside weights of twelve hold no second copy, whatever they are."""
    told = ANY_TEXT
    assert told == without_pool(12.5, 18.0, 17.0).summary


def test_a_server_without_a_pool_on_two_gpus_is_taken_together() -> None:
    """Half of the weights on each of two GPUs are one copy; a reading that lists no processes is passed over."""
    # 6.25 GiB on each of two GPUs, then 12.3 on each, with unlisted readings in between
    samples = tuple(
        Sample(
            at_seconds=float(number),
            devices=tuple(
                device(gpu, processes=None if held is None else (process(100 + gpu, int(held * GIB)),))
                for gpu in range(2)
            ),
        )
        for number, held in enumerate((6.25, 6.25, None, 12.3, None, 12.3))
    )
    known = Facts(server_pids=(100, 101), weights_bytes=12 * GIB)
    (actual,) = judge(Timeline(samples=samples), known, DEFAULT_LIMITS)

    assert ("suspect", int(12.5 * GIB)) == (actual.status, evidence(actual)["before_step"])


@pytest.mark.parametrize("known", [Facts(weights_bytes=12 * GIB), Facts(server_pids=(100,), weights_bytes=0)])
def test_without_a_pool_processes_and_weights_are_needed(known: Facts) -> None:
    """Neither whose bytes they are nor of what they could be a copy can be told."""
    # A server's process on a GPU
    timeline = Timeline(samples=(Sample(at_seconds=1.0, devices=(device(processes=(process(100, 20 * GIB),)),)),))
    (actual,) = judge(timeline, known, DEFAULT_LIMITS)

    assert "unknown" == actual.status
