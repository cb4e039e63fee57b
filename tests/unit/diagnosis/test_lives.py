"""Each life of a server is judged by itself: a restart explains nothing away, and an end is dated and has a cause."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.lives import restarts
from kvdiag.model import Diagnosis, Facts, Gap, GapKind, HostProcess, Sample, Timeline
from kvdiag.outputs.presentation import life_rows, sentence, time_span
from tests.builders.answers import finding
from tests.builders.lives import KNOWN, LEAKED_BLOCKS, REFUSED, judged, life, outage
from tests.builders.values import GIB, device, engine, pool, process

DAMAGE = Gap("recorder", "failed", "kvdiag-00000001.jsonl.gz is left out: it is damaged")


@pytest.mark.parametrize("after", [(), outage(120.0)], ids=["up", "down"])
def test_no_life_is_ok_while_its_history_has_damage(after: Sequence[Sample]) -> None:
    """What was lost may have held anything: neither the verdict nor that of a server that is down is ok, for as long
    as the history has the gap.
    """
    damaged = Sample(at_seconds=99.0, gaps=(DAMAGE,))
    lived = life(100.0, 0)
    found, later = judged((damaged,), lived, after), judged(lived, after)
    assert ("unknown", "unknown", {"unknown"}) == (found.worst, found.present_worst, {one.worst for one in found.lives})
    assert DAMAGE.reason in sentence(found)
    assert "ok" == later.present_worst
    assert "fault" == judged((damaged,), life(100.0, LEAKED_BLOCKS), after).present_worst


@pytest.mark.parametrize("between", [(), outage(120.0)], ids=["within a second", "after an outage"])
def test_a_restart_explains_no_leak_away(between: Sequence[Sample]) -> None:
    """301 blocks leaked, killed, started clean: the leak is a fault of the life before, the present one is ok."""
    found = judged(life(100.0, LEAKED_BLOCKS, tokens=900), between, life(140.0, 0))
    before, present = found.lives
    (leak,) = before.findings
    assert ("fault", "ok", "ok") == (found.worst, found.present_worst, finding(found, "leak.kv_blocks").status)
    assert ("leak.kv_blocks", 119.0) == (leak.id, leak.last_seen_seconds)
    assert (100.0, 119.0, 140.0, None) == (
        before.start_seconds,
        before.end_seconds,
        present.start_seconds,
        present.end_seconds,
    )
    assert ("unreachable" if between else "restarted") == before.end
    assert found.worst_past_life == before


def test_the_newest_of_the_worst_lives_leads() -> None:
    """Of two lives with a fault the later one; a present fault is not led by a past one."""
    leaking = [life(100.0 * number, LEAKED_BLOCKS, tokens=900 - 300 * number) for number in (0, 1)]
    found = judged(*leaking, life(200.0, 0))
    assert found.worst_past_life == found.lives[1]
    assert judged(*leaking).worst_past_life is None


def test_a_life_without_a_fault_excuses_none_after_it() -> None:
    """A clean life, then one that leaks."""
    found = judged(life(100.0, 0, tokens=900), life(140.0, LEAKED_BLOCKS))
    assert (["ok", "fault"], "fault") == ([one.worst for one in found.lives], found.present_worst)


def test_a_suspect_of_an_earlier_life_is_the_verdict() -> None:
    """A connector may have held the blocks until the restart."""
    found = judged(life(100.0, LEAKED_BLOCKS, tokens=900), life(140.0, 0), known=replace(KNOWN, kv_connector="Nixl"))
    assert ("suspect", "ok") == (found.worst, found.present_worst)


def test_each_life_is_read_by_its_own_pool() -> None:
    """A pool of half as many blocks before the restart, half as many leaked; a change of facts alone is a restart."""
    halved = replace(KNOWN, pools=(pool(usable_blocks=3072),))
    found = judged(life(100.0, LEAKED_BLOCKS), life(140.0, 0, tokens=20), earlier=((140.0, halved),))
    (leak,) = found.lives[0].findings
    assert round(LEAKED_BLOCKS / 2) == {one.name: one.value for one in leak.evidence}["blocks_at_last_idle"]


@pytest.mark.parametrize("counted", [False, True], ids=["by its process", "by its counters and its facts"])
def test_a_start_after_an_outage_begins_with_its_first_answer(counted: bool) -> None:
    """Though the host, and the facts, are read seconds later: the outage is of no life, the start is one."""
    before, after = life(100.0, 0, tokens=9 if counted else 0), life(140.0, 0)
    hosts = {0: 7, len(before) + 20 + 8: 8}
    samples = tuple(
        replace(one, host=(HostProcess(pid=hosts[place], name="core", resident_bytes=1),)) if place in hosts else one
        for place, one in enumerate((*before, *outage(120.0), *after))
    )
    found = judged(samples, earlier=((145.0, replace(KNOWN, model="other")),) if counted else ())
    assert [(100.0, 119.0, "unreachable"), (140.0, None, None)] == [
        (one.start_seconds, one.end_seconds, one.end) for one in found.lives
    ]


def test_a_server_that_is_down_is_judged_as_of_its_last_answer() -> None:
    """Memory that another process takes on its devices after the exit is no finding."""
    taken = (device(used_bytes=20 * GIB, processes=(process(9, 19 * GIB),)),)
    own = tuple(
        replace(one, devices=(device(used_bytes=8 * GIB, processes=(process(7, 7 * GIB),)),))
        for one in life(100.0, LEAKED_BLOCKS)
    )
    later = outage(120.0 + DEFAULT_LIMITS.lives.freed_seconds, devices=taken)
    found = judged(own, outage(120.0), later)
    (last,) = found.lives
    assert (119.0, 119.0) == (found.down_since_seconds, finding(found, "leak.kv_blocks").last_seen_seconds)
    assert ("unreachable", REFUSED.reason) == (last.end, last.end_detail)
    assert "fault" != finding(found, "baseline.foreign_memory").status


@pytest.mark.parametrize(
    "seconds", [120.0, 121.0 + DEFAULT_LIMITS.lives.freed_seconds], ids=["at once", "rarely sampled"]
)
def test_memory_that_an_exit_freed_shows_it(seconds: float) -> None:
    """An exit, and not just no answer: the first sample of the outage has a tenth of the device more free."""
    before = tuple(replace(one, devices=(device(used_bytes=22 * GIB),)) for one in life(100.0, 0))
    found = judged(before, [replace(one, devices=(device(used_bytes=GIB),)) for one in outage(seconds)])
    assert "exited" == found.lives[-1].end
    # An exit that nothing explains leaves no life healthy.
    assert ("unknown", "unknown") == (found.present_worst, found.worst)


def exits(count: int, idle_seconds: int = 0, paused_seconds: int = 0) -> Diagnosis:
    """A healthy server after so many exits in which its device memory was freed, each idle for so long before it.

    It paused for so long before.
    """
    parts: list[Sequence[Sample]] = []
    for number in range(count + 1):
        begin = 100.0 + 1000.0 * number
        held = (device(used_bytes=22 * GIB),)
        lived = [replace(one, devices=held) for one in life(begin, 0, samples=400)]
        work = [tuple(replace(each, requests_running=1) for each in one.engines or ()) for one in lived]
        busy = [replace(one, engines=engines) for one, engines in zip(lived, work, strict=True)]
        if number < count:
            paused = [*busy[:100], *lived[100 : 100 + paused_seconds], *busy[100 + paused_seconds :]]
            lived = [*paused[: 399 - idle_seconds], *lived[399 - idle_seconds :]] if idle_seconds else paused
        parts.append(lived)
        if number < count:
            freed = (device(used_bytes=GIB),)
            parts.append([replace(one, devices=freed) for one in outage(begin + 400.0)])
    return judged(*parts)


def test_one_exit_before_a_healthy_start_may_be_an_operators() -> None:
    """A single restart leaves the server that followed healthy."""
    found = exits(1)
    assert ["exited", None] == [one.end for one in found.lives]
    assert "ok" == found.worst


def test_a_server_that_keeps_exiting_is_never_ok() -> None:
    """Exits of earlier lives without a cause are counted, and leave the whole unknown."""
    found = exits(3)
    counted = {one.name: one.value for one in finding(found, "spike.activation").evidence}
    assert ("unknown", 3) == (found.worst, counted["earlier_exits"])


def test_restarts_of_an_idle_server_are_an_operators() -> None:
    """Who restarts a busy server on purpose takes its traffic away first: however often, the whole stays ok."""
    found = exits(3, 60)
    assert ("ok", ["exited"] * 3) == (found.worst, [one.end for one in found.lives[:3]])
    assert "unknown" == exits(3, 59).worst
    # Its traffic has pauses as long: any may be the moment of an accident.
    assert ["ok", "unknown"] == [exits(3, 60, paused).worst for paused in (60, 61)]


@pytest.mark.parametrize(
    ("samples", "kind", "down"), [(2, "failed", False), (3, "failed", True), (9, "refused", False)]
)
def test_an_outage_is_three_readings_without_an_answer(samples: int, kind: GapKind, down: bool) -> None:
    """One or two may be late on a busy machine; what is refused is an answer, though nothing is known by it."""
    gaps = (replace(REFUSED, kind=kind),)
    found = judged(life(100.0, 0), tuple(replace(one, gaps=gaps) for one in outage(120.0, samples)))
    healthy = "unknown" if samples > 2 else "ok"
    assert (down, healthy) == (found.down_since_seconds is not None, found.worst)


def test_a_start_is_known_by_any_of_its_traces() -> None:
    """Counters that fall, of any engine; processes that are all others; the start that the server reports."""
    first, second = life(100.0, 0, tokens=5), life(140.0, 0, tokens=90)
    hosts = [
        tuple(replace(one, host=(HostProcess(pid=pid, name="core", resident_bytes=1),)) for one in part)
        for pid, part in ((7, first), (8, second))
    ]

    def places(*parts: Sequence[Sample], known: Facts = KNOWN, changed: Sequence[float] = ()) -> tuple[int, ...]:
        earlier, samples = tuple((at, known) for at in changed), tuple(one for part in parts for one in part)
        return restarts(Timeline(samples=samples, earlier_facts=earlier), known, DEFAULT_LIMITS)

    assert () == places(first, second)
    assert (20,) == places(life(100.0, 0, tokens=90), life(140.0, 0, tokens=5))
    assert (20,) == places(*hosts)
    assert (20,) == places(first, second, known=replace(KNOWN, started_seconds=130.0))
    assert () == places(first, second, known=replace(KNOWN, started_seconds=90.0))
    uncounted = tuple(replace(one, engines=(replace(engine(), prompt_tokens_total=None),)) for one in life(140.0, 0))
    assert (20,) == places(life(100.0, 0, tokens=90), uncounted, life(160.0, 0, tokens=5), changed=[130.0])
    third, last = life(300.0, 0, tokens=900), replace(KNOWN, started_seconds=290.0)
    assert (20, 40) == places(first, second, third, known=last, changed=[130.0])


def test_a_life_of_another_engine_is_told_as_such() -> None:
    """A llama.cpp server that leaked, then SGLang at the same address: neither is taken for the other one."""
    before, now = replace(KNOWN, engine_name="llamacpp"), replace(KNOWN, engine_name="sglang")
    found = judged(
        life(100.0, LEAKED_BLOCKS, tokens=900), outage(120.0), life(140.0, 0), known=now, earlier=((130.0, before),)
    )
    assert ["llamacpp", "sglang"] == [one.engine for one in found.lives]
    (leak,) = found.lives[0].findings
    assert [True, False] == ["llama.cpp" in time for _, time, _ in life_rows(found)]
    told = (sentence(found), time_span(leak, found))
    assert [True, True] == ["llama.cpp server" in line and "again" not in line for line in told], told
