"""The soak: growth with requests is found, other growth is not, and each figure of the result."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.blocks.step_accounting import NOT_RUN
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps import SOAK
from kvdiag.model import MeasuredFigures, StepFigures, StepResult, Timeline
from kvdiag.outputs.documents.diagnosis_document import document
from tests.builders.answers import containing, evidence, finding, known, statuses
from tests.builders.runs import run
from tests.builders.soak_timeline import LOADS, NONE, Seen, after_cycles, after_requests, facts_of, soak
from tests.builders.values import KIB, MIB
from tests.builders.worlds import World

PAGE = 2 * MIB

LEAK = [size // PAGE * PAGE for size in after_requests(0.25 * MIB)]
"""A quarter of a MiB with each request, as the driver's pages show it: 2.3 MiB in the mean load cycle."""


def result(seen: Seen, notes: tuple[str, ...] = ()) -> StepResult:
    """The step's result, where the first mark has notes."""
    whole = soak(seen)
    marks = (replace(whole.marks[0], notes=notes), *whole.marks[1:])
    return SOAK.judge(Timeline(samples=whole.samples, marks=marks), facts_of(), DEFAULT_LIMITS)


def leaks(seen: Seen) -> dict[str, str]:
    """The status of each finding on what grows."""
    found = statuses(diagnose(soak(seen), facts_of()).findings)
    return {name: status for name, status in found.items() if name.startswith(("leak.", "fragmentation.allocator"))}


ALL = Seen(live=NONE, beside=NONE, host=NONE)


def test_nothing_grows(golden: Callable[[str, str], None]) -> None:
    """Flat components are ok, and each kind has a detection limit."""
    actual = result(ALL)

    assert "ok" == actual.status
    golden("diagnosis/soak_flat.txt", "\n".join((actual.summary, *actual.notes, "")))
    assert {"requests": 312, "blocks_kept": 0, "cycles_judged": 19, "idle_cycles_judged": 19} == known(actual.measured)
    assert {"ok"} == set(leaks(ALL).values())


@pytest.mark.parametrize(
    ("seen", "step", "found"),
    [
        pytest.param(
            Seen(server=LEAK), "fault", {"leak.device_torch": "fault", "leak.device_non_torch": "unknown"}, id="NVML"
        ),
        pytest.param(Seen(server=LEAK, server_reported=False), "fault", {"leak.device_torch": "fault"}, id="not whose"),
        pytest.param(
            replace(ALL, live=after_requests(64 * KIB)), "fault", {"leak.device_torch": "fault"}, id="live in torch"
        ),
        pytest.param(
            replace(ALL, cache=after_requests(MIB)),
            "suspect",
            {"fragmentation.allocator": "suspect"},
            id="torch's cache",
        ),
        pytest.param(replace(ALL, beside=LEAK), "fault", {"leak.device_non_torch": "fault"}, id="beside torch"),
        pytest.param(replace(ALL, host=after_requests(MIB)), "suspect", {"leak.host": "suspect"}, id="host"),
        pytest.param(replace(ALL, blocks=after_requests(1)), "fault", {"leak.kv_blocks": "fault"}, id="blocks"),
        pytest.param(
            replace(ALL, beside=after_cycles(4 * MIB)),
            "suspect",
            {"leak.device_non_torch": "suspect"},
            id="in idle, too",
        ),
        pytest.param(
            replace(ALL, host=after_cycles(4 * MIB)), "unknown", {"leak.host": "unknown"}, id="host in idle, too"
        ),
        pytest.param(replace(ALL, others=after_cycles(4 * MIB)), "ok", {}, id="a neighbour"),
        pytest.param(
            Seen(server=after_cycles(4 * MIB), server_reported=False),
            "unknown",
            {"leak.device_torch": "unknown"},
            id="whoever",
        ),
    ],
)
def test_growth_is_reported_by_its_component(seen: Seen, step: str, found: dict[str, str]) -> None:
    """What grows names the verdict, and the idle cycles whether it is the requests that do."""
    status, findings = result(seen).status, leaks(seen)
    blamed = {name: findings[name] for name in found}
    others = {name: one for name, one in findings.items() if name not in found and one in ("suspect", "fault")}
    assert (step, found, {}) == (status, blamed, others)


def test_leak_says_what_decided() -> None:
    """The evidence has growth per idle cycle and per request, the cycles judged, and p < 0.01 for each test."""
    actual = finding(diagnose(soak(replace(ALL, live=after_requests(64 * KIB))), facts_of()), "leak.device_torch")

    figures = evidence(actual)
    assert containing("64.0 KiB", "in cycles with more requests") == actual.summary
    assert (0.0, 64.0 * KIB, 19, 19) == (
        figures["growth_per_idle_cycle"],
        figures["growth_per_request"],
        figures["judged_load_cycles"],
        figures["judged_idle_cycles"],
    )
    for key in ("p_trend", "p_load", "p_dose"):
        value = figures[key]
        assert isinstance(value, float)
        assert value < 0.01


def test_growth_that_stops_is_warm_up() -> None:
    """First touch that ends is no leak, and is reported with its size."""
    # 300 MiB with the first load cycle, half of that with the next, and so on
    levels, level, step = [], 0.0, 300.0
    for load in LOADS:
        level, step = (level + step, step / 2) if load.requests else (level, step)
        levels.append(int(level * MIB) // PAGE * PAGE)
    seen = Seen(server=levels)

    actual = result(seen)

    assert ("ok", "ok") == (actual.status, leaks(seen)["leak.device_non_torch"])
    assert containing("grew 598 MiB", "warm-up") in actual.notes


def test_what_only_new_content_grows_is_a_cache() -> None:
    """Repeated contents leave nothing behind where contents are kept: a suspect, until its bound is known."""
    first = next(place for place, load in enumerate(LOADS) if load.repeated)
    levels = after_requests(MIB)
    seen = replace(ALL, host=[levels[min(place, first)] for place in range(len(LOADS))])
    found = finding(diagnose(soak(seen), facts_of()), "leak.host")
    assert ("suspect", containing("new content", "not with repeated")) == (found.status, found.summary)


def test_some_left_out_cycles_are_left_out() -> None:
    """Cycles with another client's prompts are not counted, and the others decide."""
    # Another client whose three prompts leave 50 MiB each
    spoilt = (9, 22, 35)
    levels = [50 * MIB * sum(each <= place for each in spoilt) for place in range(len(LOADS))]
    actual = result(replace(ALL, beside=levels, other_prompts=spoilt))
    assert ("ok", containing("no leak found", "28 load and 29 idle")) == (actual.status, actual.summary)
    assert ["3 of 60 cycles left out", "other traffic"] == actual.notes[1].split(": ")


def after(minute: Timeline, later: Timeline) -> Timeline:
    """Both in one timeline, the second an hour later, of one process, whose counters continue."""
    counted = max(each.prompt_tokens_total or 0 for one in minute.samples for each in one.engines or ())
    samples = tuple(
        replace(
            one,
            at_seconds=one.at_seconds + 3600.0,
            engines=one.engines
            and tuple(
                replace(each, prompt_tokens_total=(each.prompt_tokens_total or 0) + counted) for each in one.engines
            ),
        )
        for one in later.samples
    )
    marks = tuple(replace(one, at_seconds=one.at_seconds + 3600.0) for one in later.marks)
    return Timeline(samples=minute.samples + samples, marks=minute.marks + marks)


UNSTEADY = World(first_touch_bytes=(*[0] * 7, 4 * MIB, 0, 4 * MIB))
"""Device memory rises twice in the minute's later cycles: a leak, or not."""


def test_soak_answers_what_the_minute_left_open() -> None:
    """A rise in two of six cycles is unknown for the minute's run; nineteen flat cycles of the soak make it ok."""
    minute, both = run(UNSTEADY), after(run(UNSTEADY), soak(Seen()))
    before, actual = diagnose(minute, facts_of()), diagnose(both, facts_of())
    names = ("leak.device_torch", "leak.device_non_torch", "benign.warmup")
    assert ["unknown"] * 3 == [finding(before, name).status for name in names]
    assert ["ok"] * 3 == [finding(actual, name).status for name in names]


def test_soak_that_cannot_report_hides_nothing() -> None:
    """What the minute's cycles called stays called where the soak was spoilt or open."""
    minute = run(World(device_growth_bytes=6 * MIB))
    open_ = Seen(server=after_cycles(4 * MIB), server_reported=False)
    actual = [
        finding(diagnose(after(minute, soak(seen)), facts_of()), "leak.device_torch").status
        for seen in (open_, replace(ALL, other_prompts=range(60)))
    ]
    assert ["fault", "fault"] == actual


sizes = st.lists(st.integers(-(2**30), 2**30), min_size=len(LOADS), max_size=len(LOADS))

places = st.sets(st.integers(0, len(LOADS) - 1), max_size=20)


@settings(deadline=None, max_examples=20)
@given(sizes, st.none() | sizes, st.none() | sizes, places, places, places)
def test_any_soak_is_judged(
    server: list[int],
    live: list[int] | None,
    host: list[int] | None,
    other: set[int],
    failing: set[int],
    lost: set[int],
) -> None:
    """Arbitrary samples with missing marks yield a summary, finite figures and a valid document."""
    whole = soak(
        Seen(
            server=server,
            live=live,
            beside=live,
            host=host and [abs(size) for size in host],
            other_prompts=other,
            failing=failing,
        )
    )
    marks = tuple(mark for place, mark in enumerate(whole.marks) if place // 5 not in lost)

    actual = diagnose(Timeline(samples=whole.samples, marks=marks), facts_of())

    assert actual.steps[-1].summary
    json.dumps(document(actual), allow_nan=False)
    written = [one.value for each in actual.findings for one in each.evidence if isinstance(one.value, float)]
    assert all(map(math.isfinite, written))


def test_blocks_that_did_not_come_back_weigh_most() -> None:
    """With half a block leaked per request and growing device memory, the 156 blocks are the summary."""
    actual = result(Seen(blocks=after_requests(0.5), server=after_requests(MIB)), notes=("shorter",))

    # 156 less what was kept in the first cycle, which is idle
    assert ("fault", containing("156 KV blocks", "30 load and 30 idle", "312 requests")) == (
        actual.status,
        actual.summary,
    )
    assert StepFigures(blocks_kept=0) == actual.expected
    counts = MeasuredFigures(requests=312, blocks_kept=156, cycles_judged=19, idle_cycles_judged=19)
    assert counts == actual.measured
    assert "shorter" == actual.notes[0]
    assert not any("KV blocks" in note for note in actual.notes)
    assert containing("server's device memory grows") in actual.notes


def test_the_component_that_is_worst_is_the_summary_and_each_kind_has_a_note() -> None:
    """The server's leak becomes the summary, and each kind of component has a note."""
    actual = result(Seen(server=after_requests(MIB), host=NONE))

    assert ("fault", containing("server's device memory grows")) == (actual.status, actual.summary)
    kinds = (
        "KV blocks: all released",
        "GPU 0: the server's",
        "device memory of other processes",
        "anonymous",
    )
    assert [True] * 4 == [note.startswith(kind) for note, kind in zip(actual.notes, kinds, strict=True)]


def test_a_soak_that_cannot_be_judged_keeps_its_notes() -> None:
    """Too few cycles, or none at all."""
    short = result(Seen(last_cycle=4), notes=("cut",))
    assert ("soak", "unknown", ("cut",)) == (short.id, short.status, short.notes)
    assert containing("load cycles", "12 are needed") == short.summary
    none = SOAK.judge(Timeline(samples=()), facts_of(), DEFAULT_LIMITS)
    assert (NOT_RUN, ()) == (none.summary, none.notes)


def test_what_the_step_offers() -> None:
    """Four requests of 2,048 tokens, sixteen out, thirty times."""
    offered = SOAK.workload
    assert ("soak", 30, 4, 2_048, 16) == (
        SOAK.id,
        SOAK.cycles,
        offered.requests,
        offered.prompt_tokens,
        offered.max_tokens,
    )


@pytest.mark.parametrize(("each", "status"), [(1 / 312, "fault"), (0.0, "ok")])
def test_one_block_of_all_requests_is_a_fault(each: float, status: str) -> None:
    """Blocks are counted exactly: one that stays is one too many."""
    assert status == result(Seen(blocks=after_requests(each + 1e-9))).status
