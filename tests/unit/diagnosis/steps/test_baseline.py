"""The baseline step: whole runs, and single samples to the byte and the block."""

from dataclasses import replace
from functools import partial

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps import BASELINE
from kvdiag.model import Device, Engine, Gap, Mark, MeasuredFigures, Sample, StepFigures, StepResult, Timeline
from tests.builders.answers import ANY_TEXT, containing
from tests.builders.runs import run, step_result
from tests.builders.values import GIB, GPU_LOST, MIB, NO_ANSWER, NO_NVML, device, engine, holding, pool, process
from tests.builders.worlds import TRAINING, World, facts

POOL_BYTES = 6145 * 2 * MIB


result = partial(step_result, BASELINE)


FOREIGN = {0: (TRAINING,)}
RANK_BYTES = 464 * MIB + POOL_BYTES


@pytest.mark.parametrize(
    ("world", "status", "blocks", "used_bytes"),
    [
        (World(), "ok", 0, RANK_BYTES + 7 * GIB),
        (World(held_at_start_blocks=50), "fault", 50, RANK_BYTES + 7 * GIB),
        (World(foreign=FOREIGN, device_bytes=48 * GIB), "suspect", 0, RANK_BYTES + 13 * GIB),
        (World(held_at_start_blocks=50, foreign=FOREIGN, device_bytes=48 * GIB), "fault", 50, RANK_BYTES + 13 * GIB),
        (World(weights_bytes=None, foreign=FOREIGN, device_bytes=48 * GIB), "ok", 0, RANK_BYTES + 13 * GIB),
        (World(gpus=2), "ok", 0, 2 * (RANK_BYTES + 4 * GIB)),
        (World(pools=(pool("0"), pool("1")), gpus=2), "ok", 0, 2 * (RANK_BYTES + 7 * GIB)),
        (World(pools=()), "unknown", None, RANK_BYTES + 7 * GIB - 2 * MIB),
        (World(usage_reported=False), "unknown", None, RANK_BYTES + 7 * GIB),
        (World(busy=True), "unknown", None, None),
        (World(busy=True, pools=()), "unknown", None, None),
    ],
    ids=[
        "empty and explained",
        "blocks in use",
        "unexplained",
        "both",
        "weights not known",
        "two ranks",
        "two engines",
        "no pool",
        "no usage",
        "other traffic",
        "other traffic and no pool",
    ],
)
def test_runs_get_their_status(world: World, status: str, blocks: int | None, used_bytes: int | None) -> None:
    """Blocks in use while idle are a fault, bytes that pool, weights and an allowance do not explain are suspect. Each
    rank has a pool and a share of the weights, each engine the whole of them.
    """
    actual = result(world)
    assert (status, blocks, used_bytes) == (actual.status, actual.measured.blocks, actual.measured.device_used_bytes)


EXPLAINED = 6145 * 2 * MIB + 6 * GIB + 464 * MIB + 1100 * MIB + int(0.08 * 24 * GIB)
"""Pool, weights, the driver's share, a context, and 8 % of 24 GiB."""


@pytest.mark.parametrize(("used", "status"), [(EXPLAINED, "ok"), (EXPLAINED + 1, "suspect")])
def test_what_is_explained_is_exact_to_the_byte(used: int, status: str) -> None:
    """12.00 GiB of pool, 6 of weights, and 3.45 of driver, context and activations."""
    actual = idle(device(used_bytes=used))
    assert ("baseline", status, ("as planned",)) == (actual.id, actual.status, actual.notes)
    assert StepFigures(blocks=0, device_used_bytes=EXPLAINED) == actual.expected
    assert MeasuredFigures(blocks=0, device_used_bytes=used) == actual.measured


def test_a_step_that_did_not_run_or_end_is_unknown() -> None:
    """A step without a span, or with one that was cut off, is reported with a summary."""
    whole = run()
    none = Timeline(samples=whole.samples)
    begun = Timeline(samples=whole.samples, marks=whole.marks[:1])
    assert [ANY_TEXT, ANY_TEXT] == [result(World(), timeline).summary for timeline in (none, begun)]


def test_a_mig_parent_that_is_hidden_is_read_through_its_slice() -> None:
    """In a container with a MIG slice the parent may not be read: the slice is the server's device."""
    hidden = Gap(source="nvml", kind="absent", reason="GPU 0 is not read as a whole but in its 1 MIG slices")
    part = device(uuid="MIG-a", mig_parent_uuid="GPU-0", used_bytes=19 * GIB)
    actual = idle(device(used_bytes=None), part, gaps=(hidden,))
    assert ("ok", 19 * GIB) == (actual.status, actual.measured.device_used_bytes)


def test_only_the_servers_gpus_count() -> None:
    """On a host of two GPUs the other tenant's is not added to the server's, on any reading."""
    # A full GPU 1 without a process of the server, and samples that mostly come without process lists
    world = World(foreign={1: (process(7, 23 * GIB),)})
    whole = run(world)
    first = next(index for index, sample in enumerate(whole.samples) if sample.devices is not None)
    samples = tuple(
        sample
        if sample.devices is None or number == first
        else replace(sample, devices=tuple(replace(one, processes=None) for one in sample.devices))
        for number, sample in enumerate(whole.samples)
    )
    actual = result(world, Timeline(samples=samples, marks=whole.marks))

    assert ("ok", 464 * MIB + POOL_BYTES + 7 * GIB) == (actual.status, actual.measured.device_used_bytes)


def test_no_more_is_expected_than_there_is() -> None:
    """Pool, weights and allowance may add up to more than the device; what is expected on it does not."""
    actual = idle(device(used_bytes=19 * GIB, total_bytes=19 * GIB))
    assert ("ok", 19 * GIB) == (actual.status, actual.expected.device_used_bytes)


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
    return BASELINE.judge(timeline, known, DEFAULT_LIMITS)


HELD = (holding(7),) * 2

DARK = device(1, used_bytes=None)

LOST = (GPU_LOST,)


@pytest.mark.parametrize(
    ("actual", "status", "measurable"),
    [
        (idle, "ok", False),
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
        "no GPU",
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
def test_blocks_weigh_more_than_bytes_and_what_is_lost_more_than_what_is_never_reported(
    actual: object, status: str, measurable: bool
) -> None:
    """A GPU lost in the step makes it unknown, one that never reports memory does not; held blocks are a fault."""
    result = actual()  # type: ignore[operator]
    assert status == result.status
    assert measurable == (result.measured.device_used_bytes is not None)


def test_two_gpus_of_nobody_known_are_reported_and_not_judged() -> None:
    """Another tenant's bytes are not to be explained by this server's."""
    actual = idle(device(used_bytes=20 * GIB), device(1, used_bytes=4 * GIB))
    assert "ok" == actual.status
    assert StepFigures(blocks=0) == actual.expected


@pytest.mark.parametrize(
    ("pages", "gaps", "words"),
    [
        ((engine(running=1), engine()), (), "other traffic"),
        ((engine(running=None), engine(running=1)), (), "other traffic"),
        ((engine(running=None), engine()), (), "does not report"),
        ((replace(engine(running=None), open_sessions=2),) * 2, (), "sessions are open"),
        ((engine(),), (), "1 idle sample"),
        ((), (NO_ANSWER,), NO_ANSWER.reason),
    ],
    ids=["busy", "busy, and untold", "untold", "sessions", "one reading", "none"],
)
def test_why_the_pool_was_not_observed_idle_is_reported(
    pages: tuple[Engine, ...], gaps: tuple[Gap, ...], words: str
) -> None:
    """The reason is other traffic, an engine without usage, or too few samples."""
    actual = idle(device(), pages=pages, gaps=gaps)
    assert ("unknown", ("as planned",)) == (actual.status, actual.notes)
    assert containing(words) == actual.summary


def test_what_the_step_offers() -> None:
    """Nothing, for four seconds, once."""
    offered = BASELINE.workload
    assert ("baseline", 1, 0, 0, 0, 4.0) == (
        BASELINE.id,
        BASELINE.cycles,
        offered.requests,
        offered.prompt_tokens,
        offered.max_tokens,
        offered.hold_seconds,
    )
