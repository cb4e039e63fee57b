"""The soak's result, figure by figure: what was expected and measured, in its units, and what its notes hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps.soak_step import STEP, judge
from kvdiag.model import Quantity, StepResult, Timeline
from tests.builders.soak_timeline import NONE, Seen, after_requests, facts_of, soak
from tests.builders.values import MIB


def result(seen: Seen, notes: tuple[str, ...] = ()) -> StepResult:
    """The step's result, where the first mark has notes."""
    whole = soak(seen)
    marks = (replace(whole.marks[0], notes=notes), *whole.marks[1:])
    return judge(Timeline(samples=whole.samples, marks=marks), facts_of(), DEFAULT_LIMITS)


def test_blocks_that_did_not_come_back_weigh_most() -> None:
    """Half a block with each of 312 requests, and device memory that grows beside it: the blocks are told."""
    actual = result(Seen(blocks=after_requests(0.5), server=after_requests(MIB)), notes=("shorter",))

    # 156 less what was kept in the first cycle, which is idle
    assert ("fault", "156 KV blocks are still in use after 30 load and 30 idle cycles, 312 requests") == (
        actual.status,
        actual.summary,
    )
    assert (Quantity(name="blocks_kept", value=0, unit="blocks"),) == actual.expected
    assert (
        Quantity(name="requests", value=312, unit="requests"),
        Quantity(name="blocks_kept", value=156, unit="blocks"),
        Quantity(name="cycles_judged", value=19, unit="cycles"),
        Quantity(name="idle_cycles_judged", value=19, unit="cycles"),
    ) == actual.measured
    assert "shorter" == actual.notes[0]
    assert not any("KV blocks" in note for note in actual.notes)
    assert any("the server's device memory grows" in note for note in actual.notes)


def test_the_component_that_is_worst_is_the_summary_and_each_kind_has_a_note() -> None:
    """A leak of the server's, beside what is flat: the smallest leak that each of those would have shown."""
    actual = result(Seen(server=after_requests(MIB), host=NONE))

    assert "fault" == actual.status
    assert "the server's device memory grows" in actual.summary
    kinds = (
        "KV blocks: all released",
        "GPU 0: the server's device memory grows",
        "device memory of other processes: flat",
        "anonymous",
    )
    assert [True] * 4 == [note.startswith(kind) for note, kind in zip(actual.notes, kinds, strict=True)]


def test_cycles_that_were_spoilt_are_counted() -> None:
    """Two of sixty, one of them idle: what is left is told, with the reason of the first."""
    actual = result(Seen(other_prompts=(10, 11)))

    assert actual.summary.startswith("no leak found over 29 load and 29 idle cycles, ")
    assert "2 of 60 cycles left out: other traffic" in actual.notes


def test_a_soak_that_cannot_be_judged_keeps_its_notes() -> None:
    """Too few cycles, or none at all."""
    short = result(Seen(last_cycle=4), notes=("cut",))
    assert ("soak", "unknown", ("cut",)) == (short.id, short.status, short.notes)
    assert "load cycles of new content can be judged, 12 are needed" in short.summary
    none = judge(Timeline(samples=()), facts_of(), DEFAULT_LIMITS)
    assert ("it did not run", ()) == (none.summary, none.notes)


def test_what_the_step_offers() -> None:
    """Four requests of 2,048 tokens, sixteen out, thirty times."""
    offered = STEP.workload
    assert ("soak", 30, 4, 2_048, 16) == (
        STEP.id,
        STEP.cycles,
        offered.requests,
        offered.prompt_tokens,
        offered.max_tokens,
    )


@pytest.mark.parametrize(("each", "status"), [(1 / 312, "fault"), (0.0, "ok")])
def test_one_block_of_all_requests_is_a_fault(each: float, status: str) -> None:
    """Blocks are counted exactly: one that stays is one too many."""
    assert status == result(Seen(blocks=after_requests(each + 1e-9))).status
