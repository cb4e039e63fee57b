"""The baseline step on single readings: to the byte and the block, and what is told of what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps.idle_baseline import STEP, judge
from kvdiag.model import Device, Engine, Gap, Mark, Quantity, Sample, StepResult, Timeline
from tests.builders.answers import ANY_TEXT, measured
from tests.builders.values import GIB, GPU_LOST, MIB, NO_ANSWER, NO_NVML, device, engine, holding
from tests.builders.worlds import World, facts

EXPLAINED = 6145 * 2 * MIB + 6 * GIB + 464 * MIB + 1100 * MIB + int(0.08 * 24 * GIB)
"""Pool, weights, the driver's share, a context, and 8 % of 24 GiB."""

BEGIN, END = 10.0, 20.0


def idle(
    *devices: Device, pages: tuple[Engine, ...] = (engine(),) * 2, gaps: tuple[Gap, ...] = (), gap_at: float = 11.0
) -> StepResult:
    """The step on one reading of the devices and some pages, a second each."""
    samples = [Sample(at_seconds=12.0 + number, engines=(page,)) for number, page in enumerate(pages)]
    if devices:
        samples.append(Sample(at_seconds=12.5, devices=devices))
    samples.append(Sample(at_seconds=gap_at, gaps=gaps))
    marks = (
        Mark(at_seconds=BEGIN, step="baseline", cycle=0, phase="begin", notes=("as planned",)),
        Mark(at_seconds=END, step="baseline", cycle=0, phase="end"),
    )
    timeline = Timeline(samples=tuple(sorted(samples, key=lambda one: one.at_seconds)), marks=marks)
    known = replace(facts(World()), server_pids=None)
    return judge(timeline, known, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("used", "status"),
    [
        (EXPLAINED, "ok"),
        (EXPLAINED + 1, "suspect"),
    ],
)
def test_what_is_explained_is_told_to_the_byte(used: int, status: str) -> None:
    """12.00 GiB of pool, 6 of weights, and 3.45 of driver, context and activations."""
    assert StepResult(
        id="baseline",
        status=status,  # type: ignore[arg-type]
        summary=ANY_TEXT,
        expected=(
            Quantity(name="blocks", value=0, unit="blocks"),
            Quantity(name="device_used_bytes", value=EXPLAINED, unit="bytes"),
        ),
        measured=(
            Quantity(name="blocks", value=0, unit="blocks"),
            Quantity(name="device_used_bytes", value=used, unit="bytes"),
        ),
        notes=("as planned",),
    ) == idle(device(used_bytes=used))


HELD = (holding(7),) * 2
DARK = device(1, used_bytes=None)
LOST = (GPU_LOST,)


@pytest.mark.parametrize(
    ("actual", "status", "measurable"),
    [
        (lambda: idle(pages=HELD), "fault", False),
        (lambda: idle(device(used_bytes=EXPLAINED + 1), pages=HELD), "fault", True),
        (lambda: idle(device(), DARK, gaps=LOST), "unknown", False),
        (lambda: idle(device(), DARK, gaps=LOST, pages=HELD), "fault", False),
        (lambda: idle(device(), DARK), "ok", False),
        (lambda: idle(device(), DARK, gaps=(NO_NVML,)), "ok", False),
        (lambda: idle(device(), DARK, gaps=(NO_ANSWER,)), "ok", False),
        (lambda: idle(device(), DARK, gaps=LOST, gap_at=BEGIN), "unknown", False),
        (lambda: idle(device(), DARK, gaps=LOST, gap_at=BEGIN - 1), "ok", False),
        (lambda: idle(device(), DARK, gaps=LOST, gap_at=END + 1), "ok", False),
        (
            lambda: idle(device(), pages=(engine(usage=None),) * 2),
            "unknown",
            True,
        ),
    ],
    ids=[
        "blocks",
        "blocks and bytes",
        "GPU lost",
        "blocks, GPU lost",
        "GPU does not tell",
        "NVML absent",
        "page failed",
        "lost at its begin",
        "lost before",
        "lost after",
        "usage not told",
    ],
)
def test_blocks_weigh_more_than_bytes_and_what_is_lost_more_than_what_is_never_told(
    actual: object, status: str, measurable: bool
) -> None:
    """A GPU that fails in the step leaves it open; one that tells no memory is like none."""
    result = actual()  # type: ignore[operator]

    assert status == result.status
    assert measurable == (measured(result)["device_used_bytes"] is not None)


def test_two_gpus_of_nobody_known_are_told_and_not_judged() -> None:
    """Another tenant's bytes are not to be explained by this server's."""
    actual = idle(device(used_bytes=20 * GIB), device(1, used_bytes=4 * GIB))

    assert "ok" == actual.status
    assert Quantity(name="device_used_bytes", value=None, unit="bytes") == actual.expected[1]


@pytest.mark.parametrize(
    ("pages", "gaps"),
    [
        ((engine(running=1), engine()), ()),
        ((engine(running=None), engine(running=1)), ()),
        ((engine(running=None), engine()), ()),
        ((engine(),), ()),
        ((), (NO_ANSWER,)),
    ],
    ids=["busy", "busy, and untold", "untold", "one reading", "none"],
)
def test_why_the_pool_was_not_seen_idle_is_told(pages: tuple[Engine, ...], gaps: tuple[Gap, ...]) -> None:
    """Traffic, an engine that does not tell, or pages that came too slowly."""
    actual = idle(device(), pages=pages, gaps=gaps)
    assert ("unknown", ("as planned",)) == (actual.status, actual.notes)


def test_readings_outside_of_the_step_are_not_its_own() -> None:
    """What ran before it began, or after its end, is no traffic of its own."""
    # A busy page before and after one idle page within
    pages = [(BEGIN - 1, engine(running=1)), (BEGIN, engine()), (END + 1, engine(running=1))]
    samples = tuple(Sample(at_seconds=at_seconds, engines=(page,)) for at_seconds, page in pages)
    marks = tuple(
        Mark(at_seconds=at_seconds, step="baseline", cycle=0, phase=phase)  # type: ignore[arg-type]
        for at_seconds, phase in ((BEGIN, "begin"), (END, "end"))
    )
    judge(Timeline(samples=samples, marks=marks), facts(World()), DEFAULT_LIMITS)


def test_what_the_step_offers() -> None:
    """Nothing, for four seconds, once."""
    offered = STEP.workload
    assert ("baseline", 1, 0, 0, 0, 4.0) == (
        STEP.id,
        STEP.cycles,
        offered.requests,
        offered.prompt_tokens,
        offered.max_tokens,
        offered.hold_seconds,
    )
