from dataclasses import replace
from functools import partial

import pytest

from kvdiag.diagnosis.rules.capacity_long_context import judge
from kvdiag.model import Engine, Facts, Finding, Load, Mark, Outcome, Sample, Timeline, Workload
from tests.builders.answers import ANY_TEXT, evidence, only, rows
from tests.builders.runs import of_run
from tests.builders.values import GIB, MIB, OOM, OOM_WITH_ROOM, engine, holding, pool
from tests.builders.worlds import World

verdict = partial(of_run, judge)


def test_one_request_that_ran_out_of_memory_is_a_fault() -> None:
    """The failed request's own figures are the evidence."""
    # A server whose 16K prompt does not fit
    actual = verdict(World(failing={"long_context": OOM}))
    assert ("capacity.long_context", "fault") == (actual.id, actual.status)
    assert [
        ("prompt", 16_384, "tokens", "kvdiag"),
        ("requested", 3 * GIB, "bytes", "torch's message"),
        ("free_on_device", 512 * MIB, "bytes", "torch's message"),
        ("reserved_but_unallocated", 256 * MIB, "bytes", "torch's message"),
    ] == rows(actual)


def test_a_long_request_that_ran_is_ok() -> None:
    """A healthy server served 16,384 tokens."""
    assert "ok" == verdict(World()).status


@pytest.mark.parametrize(
    "world",
    [
        World(unseen=("long_context",)),
        World(cut_short_in="long_context"),
        World(lost_in="concurrent"),
        World(failing={"long_context": "HTTP 500: internal error"}),
    ],
    ids=["not seen", "cut short", "server lost", "failed otherwise"],
)
def test_a_long_request_that_was_not_observed_to_end_is_unknown(world: World) -> None:
    """A request that never ran, failed for another reason, or was not watched proves nothing."""
    assert Finding(id="capacity.long_context", status="unknown", summary=ANY_TEXT) == verdict(world)


def test_an_allocation_that_found_no_hole_is_not_the_contexts_size() -> None:
    """Where all that was left would have been enough it is fragmentation's case."""
    assert "fault" != verdict(World(failing={"long_context": OOM_WITH_ROOM})).status


def test_ten_requests_that_ran_out_are_not_one_long_context() -> None:
    """Running out with ten requests says nothing about one, which then worked."""
    assert "ok" == verdict(World(failing={"concurrent": OOM})).status


def test_figures_that_the_message_lacks_are_not_made_up() -> None:
    """A message without free bytes gives no free bytes: not zero."""
    actual = verdict(World(failing={"long_context": "CUDA out of memory. Tried to allocate 3.00 GiB."}))
    assert evidence(actual)["free_on_device"] is None


def test_a_pool_below_the_admitted_length_is_a_fault() -> None:
    """By the engine's own figures the longest admitted request cannot be held."""
    # A pool of 20,000 tokens and a length of 32,768
    actual = verdict(World(pools=(pool(capacity_tokens=20_000),)))
    assert "fault" == actual.status
    assert {"capacity": 20_000, "max_model_len": 32_768} == evidence(actual)
    assert (actual.remedy or "").startswith("Lower --max-model-len to 20000 ")


def test_the_smaller_pool_of_two_engines_decides() -> None:
    """A long request may land on the engine with the smaller pool."""
    actual = verdict(World(pools=(pool("0"), pool("1", capacity_tokens=20_000)), gpus=2))
    assert ("fault", 20_000) == (actual.status, evidence(actual)["capacity"])


def test_an_engine_that_does_not_report_its_capacity_is_judged_by_what_ran() -> None:
    """Versions before 0.24 report no capacity: the request that ran is the evidence."""
    actual = verdict(World(pools=(pool(capacity_tokens=None, max_concurrency=None),)))
    assert ("ok", None) == (actual.status, evidence(actual)["capacity"])


def at(*readings: tuple[float, Engine], of: Facts | None = None) -> Finding:
    """The rule's one finding on samples of engines at some times."""
    samples = tuple(Sample(at_seconds=seconds, engines=(one,)) for seconds, one in readings)
    return only(judge, Timeline(samples=samples), of or Facts(pools=(pool(),)))


def each_minute(*engines: Engine) -> Finding:
    """The rule's one finding on one reading of the engine each minute, without any steps."""
    return at(*((60.0 * minute, one) for minute, one in enumerate(engines)))


STUCK = holding(6144, running=1, waiting=5)


def test_a_request_that_has_the_whole_pool_and_gets_no_token_is_a_fault() -> None:
    """It needs a block more than there is, and everything behind it waits."""
    actual = each_minute(*[holding(300, running=3)] * 2, *[STUCK] * 6)
    assert "fault" == actual.status
    assert {"stalled": 300.0, "max_waiting": 5}.items() <= evidence(actual).items()


@pytest.mark.parametrize(
    "readings",
    [
        [replace(STUCK, generation_tokens_total=number) for number in range(8)],
        [replace(STUCK, requests_waiting=0)] * 8,
        [replace(STUCK, requests_running=2)] * 8,
        [holding(6000, running=1, waiting=5)] * 8,
        [STUCK] * 3,
        [replace(STUCK, generation_tokens_total=None)] * 8,
        [*[STUCK] * 3, engine(), *[STUCK] * 3],
    ],
    ids=["tokens come", "nobody waits", "two run", "blocks are left", "for a moment", "not counted", "it goes on"],
)
def test_a_full_pool_alone_is_not_stuck(readings: list[Engine]) -> None:
    """A full pool alone is unknown: a long request that uses it and gets its tokens is normal."""
    assert "unknown" == each_minute(*readings).status


@pytest.mark.parametrize(
    ("seconds", "status"),
    [
        ((0.0, 40.0, 80.0, 120.0), "fault"),
        ((0.0, 40.0, 80.0, 119.9), "unknown"),
        ((0.0, 60.0, 120.0), "unknown"),
        ((0.0, 60.0, 120.0, 120.1), "fault"),
    ],
    ids=["two minutes", "less", "three readings", "a fourth"],
)
def test_two_minutes_and_four_readings_are_needed_to_call_a_request_stuck(
    seconds: tuple[float, ...], status: str
) -> None:
    """A step of the longest prefill takes seconds; three samples are what admission takes."""
    assert status == at(*((one, STUCK) for one in seconds)).status


@pytest.mark.parametrize(
    ("stuck", "status"),
    [
        (holding(6144, running=1, waiting=1), "fault"),
        (holding(6143, running=1, waiting=1), "fault"),
        (holding(6142, running=1, waiting=1), "unknown"),
        (holding(6144, running=0, waiting=1), "unknown"),
        (replace(STUCK, kv_usage_ratio=None), "unknown"),
        (replace(STUCK, requests_waiting=None), "unknown"),
        (replace(STUCK, prompt_tokens_total=None), "unknown"),
    ],
    ids=["all", "a block less", "two blocks less", "none runs", "usage not told", "queue not told", "not counted"],
)
def test_one_request_has_all_of_the_pool_but_a_block(stuck: Engine, status: str) -> None:
    """A request with all but one block is stuck; with two blocks left, or figures missing, it is unknown."""
    assert status == each_minute(*[stuck] * 5).status


def test_time_begins_anew_with_every_token_and_every_prompt() -> None:
    """Two minutes without either count, of whichever of the two counters moves."""
    token = replace(STUCK, generation_tokens_total=1)
    prompt = replace(token, prompt_tokens_total=1)
    steps = [(0.0, STUCK), (30.0, STUCK), (60.0, token), (90.0, token), (120.0, prompt), (150.0, prompt)]
    # It is stuck two minutes after the last of them
    assert "unknown" == at(*steps, (180.0, prompt), (239.0, prompt)).status
    actual = at(*steps, (180.0, prompt), (240.0, prompt))
    assert ("fault", 120.0) == (actual.status, evidence(actual)["stalled"])


def test_a_stuck_request_has_its_figures() -> None:
    """How long until something moved, the most that waited, and of which engine's pool."""
    pools = (pool(), pool("1", usable_blocks=1000, capacity_tokens=None))
    stuck = [replace(holding(1000, of=pools[1], running=1, waiting=waiting), engine="1") for waiting in (2, 9, 4, 3)]
    moved = replace(stuck[0], generation_tokens_total=7, requests_waiting=50)
    before = replace(stuck[0], generation_tokens_total=3, requests_waiting=80)
    pages = [before, *stuck, moved, *stuck]
    samples = tuple(
        Sample(at_seconds=60.0 * minute, engines=(holding(300, running=3), one)) for minute, one in enumerate(pages)
    )
    actual = only(judge, Timeline(samples=samples), Facts(pools=pools))

    # A thousand blocks of 16 tokens
    assert "fault" == actual.status
    assert [
        ("capacity", 16_000, "tokens", "engine"),
        ("running", 1, "requests", "engine"),
        ("max_waiting", 9, "requests", "engine"),
        ("stalled", 180.0, "seconds", "engine"),
        ("tokens_while_stalled", 0, "tokens", "engine"),
        ("threshold", 120.0, "seconds", "kvdiag"),
    ] == rows(actual)


def test_a_stuck_request_that_goes_on_is_reported_with_the_time_until_then() -> None:
    """Once a block is free, or the request over, the time ends."""
    assert 180.0 == evidence(each_minute(*[STUCK] * 4, holding(300, running=1, waiting=9), STUCK))["stalled"]


@pytest.mark.parametrize(
    ("capacity", "longest", "status"),
    [(32_768, 32_768, "unknown"), (32_767, 32_768, "fault"), (16, None, "unknown"), (None, 32_768, "unknown")],
    ids=["just fits", "a token less", "length not told", "capacity not told"],
)
def test_the_longest_request_has_to_fit_the_pool(capacity: int | None, longest: int | None, status: str) -> None:
    """To the token, and only where both are ANY_TEXT."""
    pools = (pool(capacity_tokens=capacity), pool("1", capacity_tokens=None), pool("2", capacity_tokens=98_320))
    assert status == at((0.0, engine()), of=Facts(pools=pools, max_model_len_tokens=longest)).status


def ran(*prompts: int, requests: int | None = 1, seen: int = 2, error: str | None = None) -> Finding:
    """The finding on requests of so many prompt tokens, one after the other, each under the eyes of some samples."""
    marks: list[Mark] = []
    samples: list[Sample] = []
    for cycle, prompt in enumerate(prompts):
        start = 10.0 * cycle
        workload = None if requests is None else Workload(requests=requests, prompt_tokens=prompt, max_tokens=16)
        outcome = Outcome(
            completed=int(error is None), failed=int(error is not None), prompt_tokens=prompt, generated_tokens=16,
            errors=() if error is None else (error.replace("3.00", f"{3 + cycle}.00"),),
        )  # fmt: skip
        for second, phase in enumerate(("begin", "offer", "release", "end")):
            marks.append(
                Mark(
                    at_seconds=start + 2 * second,
                    step="long_context",
                    cycle=cycle,
                    phase=phase,  # type: ignore[arg-type]
                    workload=workload,
                    outcome=outcome if phase == "release" else None,
                )
            )
        load = Load(requests=1, resident_tokens=(prompt,))
        samples += [
            Sample(at_seconds=start + 3 + number / 10, engines=(holding(300, running=1),), load=load)
            for number in range(seen)
        ]
    known = Facts(pools=(pool(),), max_model_len_tokens=32_768)
    return only(judge, Timeline(samples=tuple(samples), marks=tuple(marks)), known)


@pytest.mark.parametrize(("samples", "status"), [(1, "unknown"), (2, "ok")])
def test_two_samples_have_to_see_a_long_request(samples: int, status: str) -> None:
    """One alone may have caught it on its way."""
    assert status == ran(16_384, seen=samples).status


def test_a_long_request_that_ran_has_its_figures() -> None:
    """The evidence has the first request's prompt, max_model_len and the pool's capacity."""
    assert [
        ("prompt", 16_384, "tokens", "kvdiag"),
        ("max_model_len", 32_768, "tokens", "engine"),
        ("capacity", 98_320, "tokens", "engine"),
    ] == [(one.name, one.value, one.unit, one.source) for one in ran(16_384, 1_024).evidence]


def test_the_first_request_alone_that_ran_out_is_reported() -> None:
    """Of two failures the first; one of several requests, or of a load that is not known, is no single context's."""
    first = ran(16_384, 1_024, error=OOM)
    assert ("fault", 16_384, 3 * GIB) == (first.status, evidence(first)["prompt"], evidence(first)["requested"])
    assert ["unknown", "unknown"] == [ran(16_384, requests=requests, error=OOM).status for requests in (2, None)]
