import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag import model
from kvdiag.model import (
    MAX_BYTES,
    MAX_COUNT,
    Device,
    Engine,
    Facts,
    HostProcess,
    KvPool,
    Load,
    Mark,
    Memory,
    Outcome,
    Process,
    Sample,
    Span,
    Timeline,
    Workload,
    without_mig_parents,
)
from tests.builders.runs import run
from tests.builders.values import GIB, allocator, device, engine, pool, split

REFUSED: dict[str, Callable[[], object]] = {
    "no memory at all": lambda: Memory(total_bytes=0, free_bytes=0),
    "more free than there is": lambda: Memory(total_bytes=GIB, free_bytes=GIB + 1),
    "negative free bytes": lambda: Memory(total_bytes=GIB, free_bytes=-1),
    "memory above any host's": lambda: Memory(total_bytes=MAX_BYTES, free_bytes=0),
    "more reserved than there is": lambda: Memory(total_bytes=GIB, free_bytes=0, driver_reserved_bytes=GIB + 1),
    "a negative process id": lambda: Process(pid=-1, used_bytes=None),
    "a process of negative size": lambda: Process(pid=1, used_bytes=-1),
    "a process of 16 EiB": lambda: Process(pid=1, used_bytes=2**64 - 1),
    "a device without a uuid": lambda: Device(uuid="", index=0, name="GPU", memory=None),
    "a device number below 0": lambda: Device(uuid="GPU-a", index=-1, name="GPU", memory=None),
    "usage above 1": lambda: Engine(engine="0", kv_usage_ratio=1.01),
    "usage below 0": lambda: Engine(engine="0", kv_usage_ratio=-0.01),
    "usage that is no number": lambda: Engine(engine="0", kv_usage_ratio=math.nan),
    "fewer than no requests": lambda: Engine(engine="0", requests_running=-1),
    "requests beyond a float": lambda: Engine(engine="0", requests_waiting=MAX_COUNT + 1),
    "a negative counter": lambda: Engine(engine="0", preemptions_total=-1),
    "more allocated than active": lambda: allocator(allocated_bytes=GIB, active_bytes=GIB - 1),
    "more active than reserved": lambda: allocator(active_bytes=9 * GIB),
    "more allocated than reserved": lambda: allocator(allocated_bytes=9 * GIB),
    "an allocator of no device": lambda: allocator(device_uuid=""),
    "a reading from the future": lambda: allocator(age_seconds=-1.0),
    "parts without their sum": lambda: split(stranded_bytes=1),
    "an index above 1": lambda: split(unusable_ratio=1.01),
    "negative resident bytes": lambda: HostProcess(pid=1, name="x", resident_bytes=-1),
    "resident above open requests": lambda: Load(requests=1, resident_tokens=(5, 5)),
    "negative resident tokens": lambda: Load(requests=1, resident_tokens=(-1,)),
    "a time before all times": lambda: Sample(at_seconds=-1.0),
    "a time that is no number": lambda: Sample(at_seconds=math.nan),
    "a time without end": lambda: Sample(at_seconds=math.inf),
    "negative requests of a workload": lambda: Workload(requests=-1, prompt_tokens=1, max_tokens=1),
    "a negative hold time": lambda: Workload(requests=1, prompt_tokens=1, max_tokens=1, hold_seconds=-1.0),
    "negative completed requests": lambda: Outcome(completed=-1, failed=0, prompt_tokens=0, generated_tokens=0),
    "a mark without a time": lambda: Mark(at_seconds=math.nan, step="baseline", cycle=0, phase="begin"),
    "a negative cycle": lambda: Mark(at_seconds=1.0, step="baseline", cycle=-1, phase="begin"),
    "blocks of no tokens": lambda: pool_of(block_tokens=0),
    "a pool without blocks": lambda: pool_of(total_blocks=1, usable_blocks=1, usage_blocks=1),
    "a pool without a usable block": lambda: pool_of(usable_blocks=0),
    "usable above gauge blocks": lambda: pool_of(usable_blocks=99, usage_blocks=98),
    "gauge above total blocks": lambda: pool_of(usage_blocks=101),
    "a negative capacity": lambda: pool_of(capacity_tokens=-1),
    "a pool of negative size": lambda: pool_of(pool_bytes=-1),
    "a memory fraction above 1": lambda: pool_of(memory_fraction_ratio=1.2),
    "a memory fraction of 0": lambda: pool_of(memory_fraction_ratio=0.0),
    "a concurrency without end": lambda: pool_of(max_concurrency=math.inf),
    "a concurrency that is no number": lambda: pool_of(max_concurrency=math.nan),
    "a concurrency below 0": lambda: pool_of(max_concurrency=-1.0),
    "a concurrency that divides into infinity": lambda: pool_of(max_concurrency=5e-324),
    "a window of no tokens": lambda: pool_of(sliding_window_tokens=0),
    "weights of negative size": lambda: Facts(weights_bytes=-1),
    "a context of negative length": lambda: Facts(max_model_len_tokens=-1),
    "a server with a negative process id": lambda: Facts(server_pids=(1, -1)),
    "samples that run backwards": lambda: Timeline(samples=(Sample(at_seconds=2.0), Sample(at_seconds=1.0))),
    "marks that run backwards": lambda: Timeline(
        samples=(),
        marks=(
            Mark(at_seconds=2.0, step="baseline", cycle=0, phase="begin"),
            Mark(at_seconds=1.0, step="baseline", cycle=0, phase="end"),
        ),
    ),
}


def pool_of(**changes: Any) -> KvPool:
    """A pool of 100 blocks with one thing changed."""
    usual = {"engine": "0", "block_tokens": 16, "total_blocks": 100, "usable_blocks": 99, "usage_blocks": 99}
    return KvPool(**{**usual, **changes})


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cannot_be_built(what: str) -> None:
    """A value outside what is possible is refused by its constructor, which names the class and the figure."""
    with pytest.raises(ValueError, match=r"^[A-Z][A-Za-z]+: .+"):
        REFUSED[what]()


def test_rows_of_columns_are_values() -> None:
    """As if each were built by itself: defaults, missing figures and tuples of figures included."""
    made = Engine.of_columns(2, engine=["0", "0"], kv_usage_ratio=[0.5, None], requests_running=[1, 2])
    assert made == [Engine(engine="0", kv_usage_ratio=0.5, requests_running=1), Engine(engine="0", requests_running=2)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made[0].engine = "1"  # type: ignore[misc]  # what a reader of a value might try
    assert Memory.of_columns(1, total_bytes=[2], free_bytes=[1]) == [Memory(total_bytes=2, free_bytes=1)]
    assert Load.of_columns(1, requests=[2], resident_tokens=[(3, 4)]) == [Load(requests=2, resident_tokens=(3, 4))]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Engine.of_columns(2, engine=["0", "0"], kv_usage_ratio=[0.5, 1.5]), id="range"),
        pytest.param(lambda: Memory.of_columns(1, total_bytes=[1], free_bytes=[2]), id="contradiction"),
        pytest.param(lambda: Load.of_columns(1, requests=[1], resident_tokens=[(3, -4)]), id="tuple"),
    ],
)
def test_what_cannot_be_is_refused_in_columns(build: Callable[[], object]) -> None:
    """One impossible row refuses the column."""
    with pytest.raises(ValueError, match=r"is|resident"):
        build()


def test_a_column_without_a_default_is_required() -> None:
    """What a value cannot be without, a column has to give."""
    with pytest.raises(TypeError, match="engine"):
        Engine.of_columns(1, kv_usage_ratio=[0.5])


def test_missing_readings_are_none_everywhere() -> None:
    """A missing value is None, which every measured field accepts."""
    # Values of nothing but what they need
    engine_page, reading, facts = Engine(engine="0"), Sample(at_seconds=0.0), Facts()
    assert {None} == {getattr(engine_page, one.name) for one in dataclasses.fields(engine_page)[1:]}
    assert (None, None, None, None) == (reading.engines, reading.devices, reading.host, reading.load)
    assert (None, None) == (facts.server_pids, facts.pool("0"))


def test_every_value_is_frozen_and_says_its_fields() -> None:
    """Each class of the model is a frozen, slotted dataclass; fields go by name, verdicts apart."""
    classes = [one for one in vars(model).values() if dataclasses.is_dataclass(one)]
    assert classes
    for one in classes:
        assert vars(one)["__dataclass_params__"].frozen, one
        assert "__slots__" in vars(one), one
        if one not in (model.Evidence, model.Finding, model.Gap, model.StepResult):
            assert all(field.kw_only for field in dataclasses.fields(one)), one


def test_used_bytes_are_what_is_not_free() -> None:
    """One denominator: used is total less free, the driver's share among it."""
    memory = Memory(total_bytes=32 * GIB, free_bytes=8 * GIB, driver_reserved_bytes=GIB)
    assert (24 * GIB, 0.75) == (memory.used_bytes, memory.occupied_ratio)


def test_a_gpu_cut_into_slices_is_not_counted_beside_them() -> None:
    """The parent of MIG slices repeats what they hold; a GPU without slices stays."""
    parent, other = device(0), device(1)
    slices = tuple(device(0, uuid=f"MIG-{part}", mig_parent_uuid="GPU-0") for part in "ab")
    assert (*slices, other) == without_mig_parents((parent, *slices, other))


@pytest.mark.parametrize(
    ("running", "waiting", "idle"),
    [(0, 0, True), (1, 0, False), (0, 1, False), (None, 0, None), (0, None, None), (None, None, None)],
)
def test_an_engine_is_idle_where_it_says_so(running: int | None, waiting: int | None, idle: bool | None) -> None:
    """Idle means nothing running and nothing waiting; where a count is missing and the other is zero, it is unknown."""
    assert idle is engine(running=running, waiting=waiting).idle


@pytest.mark.parametrize(
    ("engines", "idle"),
    [
        (None, None),
        ((), None),
        ((engine(), engine(label="1")), True),
        ((engine(), engine(label="1", running=1)), False),
        ((engine(), engine(label="1", running=None)), None),
        ((engine(running=1), engine(label="1", running=None)), False),
    ],
)
def test_engines_are_idle_together(engines: tuple[Engine, ...] | None, idle: bool | None) -> None:
    """One busy engine is enough to be busy; one that does not say leaves it open."""
    assert idle is Sample(at_seconds=0.0, engines=engines).engines_idle


@pytest.mark.parametrize(
    ("usage", "denominator", "blocks"),
    [(0.0, 99, 0), (1.0, 99, 99), (24 / 99, 99, 24), (1 / 100, 100, 0), (0.25, 100, 24)],
)
def test_usage_gives_blocks_held_by_requests(usage: float, denominator: int, blocks: int) -> None:
    """The gauge times its own denominator, without the null block where the gauge counts it."""
    assert blocks == pool_of(usage_blocks=denominator).used_blocks(usage)


@given(st.integers(2, 2**20), st.data())
def test_usage_and_blocks_go_both_ways(total: int, data: st.DataObject) -> None:
    """Any count of held blocks survives the gauge's way through a float."""
    gauge = data.draw(st.sampled_from([total - 1, total]))
    held = data.draw(st.integers(0, total - 1))
    one = pool_of(total_blocks=total, usable_blocks=total - 1, usage_blocks=gauge)
    assert held == one.used_blocks((held + gauge - (total - 1)) / gauge)


def test_the_size_of_a_block_is_known_where_the_pools_is() -> None:
    """Bytes of a block are the pool's over all blocks, the null block among them."""
    assert (10, None) == (pool_of(pool_bytes=1000).block_bytes, pool_of().block_bytes)


def test_a_pool_is_found_by_its_engine() -> None:
    """Facts know each engine's pool."""
    facts = Facts(pools=(pool("0"), pool("1")))
    assert (facts.pools[1], None) == (facts.pool("1"), facts.pool("2"))


@pytest.mark.parametrize(("prompt", "output", "tokens"), [(512, 128, 639), (1, 1, 1), (0, 0, 0)])
def test_the_last_sampled_token_is_never_stored(prompt: int, output: int, tokens: int) -> None:
    """A finished request has prompt and output less one in the cache."""
    assert tokens == Workload(requests=1, prompt_tokens=prompt, max_tokens=output).tokens_per_request


def mark(at: float, phase: Any, *, step: str = "concurrent", cycle: int = 0, **more: Any) -> Mark:
    """A mark."""
    return Mark(at_seconds=at, step=step, cycle=cycle, phase=phase, **more)


WORKLOAD = Workload(requests=10, prompt_tokens=2048, max_tokens=256)
OUTCOME = Outcome(completed=10, failed=0, prompt_tokens=20_480, generated_tokens=2_560)


def test_marks_make_a_span() -> None:
    """Begin, offer, release and end with what they carry are one span."""
    marks = (
        mark(1.0, "begin", workload=WORKLOAD, notes=("scaled",)),
        mark(2.0, "offer"),
        mark(3.0, "release", outcome=OUTCOME),
        mark(4.0, "end"),
    )
    (actual,) = Timeline(samples=(), marks=marks).spans()
    expected = Span(
        step="concurrent",
        cycle=0,
        begin_seconds=1.0,
        offer_seconds=2.0,
        release_seconds=3.0,
        end_seconds=4.0,
        workload=WORKLOAD,
        outcome=OUTCOME,
        notes=("scaled",),
    )

    assert expected == actual
    assert actual.complete


def test_a_span_that_was_cut_off_lacks_what_did_not_happen() -> None:
    """A run that ended under load has spans without release and end."""
    (actual,) = Timeline(samples=(), marks=(mark(1.0, "begin"), mark(2.0, "offer"))).spans()
    assert Span(step="concurrent", cycle=0, begin_seconds=1.0, offer_seconds=2.0) == actual
    assert not actual.complete


def test_spans_come_in_order_and_by_step() -> None:
    """Each step's cycles are spans of their own, in the order of their beginnings."""
    whole = run()
    steps = ["baseline", "warmup", "warmup", *["single_request"] * 8, "concurrent", "long_context"]
    assert steps == [span.step for span in whole.spans()]
    assert list(range(8)) == [span.cycle for span in whole.spans("single_request")]
    assert () == whole.spans("no such step")


def test_between_takes_both_ends() -> None:
    """Samples of a window are those from its start to its end, both included."""
    timeline = Timeline(samples=tuple(Sample(at_seconds=float(at)) for at in (1, 2, 2, 3, 4)))
    assert [2.0, 2.0, 3.0] == [sample.at_seconds for sample in timeline.between(2.0, 3.0)]
    assert () == timeline.between(2.1, 2.9)
    assert () == timeline.between(3.0, 2.0)
    assert timeline.samples == timeline.between(0.0, math.inf)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 50), st.integers(0, 50))
def test_between_is_what_a_filter_would_take(times: list[int], start: int, end: int) -> None:
    """For any sample times, a window holds exactly the samples within it."""
    timeline = Timeline(samples=tuple(Sample(at_seconds=float(at)) for at in sorted(times)))
    inside = tuple(sample for sample in timeline.samples if start <= sample.at_seconds <= end)
    assert inside == timeline.between(start, end)
