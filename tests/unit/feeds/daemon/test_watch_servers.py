"""A watch over servers that sleep, restart, load another model or send garbage, and GPUs that come, go and hang.

Hours pass at once (`virtual_time`); the engine's metrics are parsed by the production code.
"""

import asyncio
import gc
from collections.abc import Callable

import pytest

from kvdiag.feeds.daemon.retention import Retention
from kvdiag.feeds.daemon.watch import Watch
from kvdiag.feeds.live.sampling import DRIVER_SECONDS, ticks
from kvdiag.model import Diagnosis, Life, Snapshot, Status
from kvdiag.outputs.current_verdict import current_verdict
from tests.builders.values import SERVER_PID
from tests.unit.feeds.daemon.virtual_time import now_seconds
from tests.unit.feeds.daemon.watched_place import BEGUN_SECONDS, HOUR_SECONDS, Inline, Place, watching


def source(shown: Snapshot, name: str) -> tuple[bool, int]:
    """Whether a source is read, and how often it was not."""
    return next((one.up, one.errors_total) for one in shown.sources if one.source == name)


async def until(condition: Callable[[], bool]) -> None:
    """Until it is so, an hour at most."""
    async for number in ticks(1.0):
        if condition():
            return
        assert number < HOUR_SECONDS


def test_a_server_that_sleeps_is_there_and_well() -> None:
    """Asleep its memory falls by 18 GiB, awake it is back: neither is a leak, and no history is lost for it."""
    place = Place()
    asleep: list[bool | None] = []

    async def script(watch: Watch) -> None:
        await asyncio.sleep(300)
        for _ in range(2):
            place.asleep = True
            await asyncio.sleep(300)
            asleep.extend(one.asleep for one in watch.snapshot().newest.engines or ())
            assert "serving" == watch.snapshot().state
            place.asleep = False
            await asyncio.sleep(300)

    watch = watching(place, script)

    assert [True, True] == asleep
    assert set() == {*Inline.said} & {"suspect", "fault"}
    assert 1400.0 < watch.history()[-1].at_seconds - watch.history()[0].at_seconds
    assert ("serving", (True, 0)) == (watch.snapshot().state, source(watch.snapshot(), "engine"))


def lives(watch: Watch) -> tuple[Life, ...]:
    """Those of the newest diagnosis."""
    diagnosis = watch.snapshot().diagnosis
    return () if diagnosis is None else diagnosis.lives


def test_another_model_is_another_server() -> None:
    """A server that restarts with another model: lost, then served with its own facts, as another life."""
    place, states, came_seconds = Place(), [], 0.0

    async def script(watch: Watch) -> None:
        nonlocal came_seconds
        await asyncio.sleep(600)

        place.up = False
        await asyncio.sleep(300)
        states.append((watch.snapshot().state, watch.snapshot().newest.engines))
        place.model, place.usable_blocks, place.prompt_tokens, place.up = "another", 2048, 0, True
        came_seconds = BEGUN_SECONDS + now_seconds()
        await until(lambda: watch.snapshot().facts.model == "another")
        await asyncio.sleep(120)

    watch = watching(place, script)

    known = watch.snapshot().facts
    assert [("lost", None)] == states
    assert ("serving", [2048]) == (watch.snapshot().state, [one.usable_blocks for one in known.pools or ()])
    assert came_seconds <= lives(watch)[1].start_seconds


def test_another_version_without_an_outage_is_another_server() -> None:
    """A gateway hides a restart: the facts of the old version judge none of the new one's samples for long."""
    place = Place(version="0.31.0", pids=True)

    async def script(watch: Watch) -> None:
        await asyncio.sleep(600)
        place.version, place.usable_blocks = "0.32.0", 2048
        await until(lambda: watch.snapshot().facts.engine_version == "0.32.0")
        await asyncio.sleep(120)

    watch = watching(place, script)

    assert [2048] == [one.usable_blocks for one in watch.snapshot().facts.pools]
    assert 2 == len(lives(watch))
    assert "serving" == watch.snapshot().state


def test_pool_that_is_reported_later_is_found() -> None:
    """TensorRT-LLM reports its pool once a request has ended: the same server, and the same life."""
    place = Place(version="1.3.0", pids=True, usable_blocks=None)

    async def script(watch: Watch) -> None:
        await asyncio.sleep(600)
        place.usable_blocks = 2048
        await until(lambda: bool(watch.snapshot().facts.pools))

    watch = watching(place, script)

    assert [2048] == [one.usable_blocks for one in watch.snapshot().facts.pools]
    assert 1 == len(lives(watch))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_that_answer_in_turn_are_unknown(engine: str) -> None:
    """Two servers behind one address are not one server that restarts with each sample, and never at fault."""
    place = Place(prompt_tokens=100_000, beside_engine=engine)

    async def script(watch: Watch) -> None:
        await asyncio.sleep(300)
        place.beside_tokens = 500
        await asyncio.sleep(600)
        snapshot = watch.snapshot()
        shown.append((snapshot.state, current_verdict(snapshot, snapshot.newest.at_seconds).status))
        assert snapshot.newest.engine_refused
        place.beside_tokens = None
        await asyncio.sleep(180)

    shown: list[tuple[str, Status]] = []
    watch = watching(place, script)

    assert [("serving", "unknown")] == shown
    assert "fault" not in Inline.said
    assert watch.snapshot().newest.engines


def test_processes_that_were_not_found_again_are_searched_for() -> None:
    """A server that restarted while a search could not see its processes gets them back, without being lost again."""
    place = Place(pids=True, prompt_tokens=1_000)

    async def script(watch: Watch) -> None:
        await until(lambda: watch.snapshot().facts.server_pids is not None)
        place.up = False
        await until(lambda: watch.snapshot().state == "lost")
        place.up, place.pids, place.prompt_tokens = True, False, 0
        await until(lambda: watch.snapshot().state == "serving" and watch.snapshot().facts.server_pids is None)
        place.pids = True
        await until(lambda: watch.snapshot().facts.server_pids is not None)

    assert "serving" == watching(place, script).snapshot().state


def test_a_server_that_restarts_between_two_reads_is_found_by_its_processes() -> None:
    """It answers all the time and no counter falls, but none of its processes is left: the new ones are found."""
    place = Place(pids=True)

    async def script(watch: Watch) -> None:
        await until(lambda: watch.snapshot().facts.server_pids == (SERVER_PID,))
        place.pid = SERVER_PID + 7
        await until(lambda: watch.snapshot().facts.server_pids == (SERVER_PID + 7,))

    assert "serving" == watching(place, script).snapshot().state


def test_a_life_that_leaked_is_remembered_after_a_restart() -> None:
    """Blocks leaked, then the server restarted clean: down since its last answer, then the previous life's leak next to
    the current verdict ok; the finding keeps the time at which it was found.
    """
    place = Place(usage=0.05)
    found: list[Diagnosis | None] = []
    down: list[tuple[float, float | None]] = []

    async def script(watch: Watch) -> None:
        await asyncio.sleep(300)
        found.append(watch.snapshot().diagnosis)
        place.up = False
        await asyncio.sleep(30)
        down.append((BEGUN_SECONDS + now_seconds() - 30.0, watch.snapshot().down_since_seconds))
        place.up, place.usage, place.prompt_tokens = True, 0.0, 0
        await until(lambda: watch.snapshot().state == "serving")
        await asyncio.sleep(300)

    after = watching(place, script).snapshot()
    ((went_seconds, since_seconds),) = down
    assert since_seconds == pytest.approx(went_seconds, abs=2.0)
    (before,) = found
    assert before is not None
    assert after.diagnosis is not None
    past, present = after.diagnosis.lives
    assert ("fault", "fault", "ok") == (after.diagnosis.worst, past.worst, present.worst)
    assert (since_seconds, None) == (past.end_seconds, after.down_since_seconds)
    assert [one.since_seconds for one in before.findings if one.status == "fault"] == [
        one.since_seconds for one in past.findings
    ]


def test_gpus_come_and_go() -> None:
    """An added GPU is shown with its processes from the next sample; a removed one is no longer shown."""
    place, seen = Place(), []

    async def script(watch: Watch) -> None:
        for gpus in (1, 3, 2):
            place.gpus = gpus
            await asyncio.sleep(60)
            seen.append([one.index for one in watch.snapshot().newest.devices or ()])

    watching(place, script)

    assert [[0], [0, 1, 2], [0, 1]] == seen
    assert set() == {*Inline.said} & {"suspect", "fault"}


def test_a_slow_driver_is_asked_seldom() -> None:
    """It takes a tenth of the time at most, process lists among it; the engine is read at every tick meanwhile.

    What a call takes beyond its time limit is the delay of a busy machine, for which the driver is not left alone.
    """
    slow_seconds = 0.7 * DRIVER_SECONDS
    place = Place(driver_seconds=slow_seconds)

    async def script(watch: Watch) -> None:
        await asyncio.sleep(1100)
        slow = list(place.asked)
        assert 90 <= len(slow) * slow_seconds <= 1100 / 10 + slow_seconds
        assert all(slow)
        assert watch.snapshot().newest.engines is not None
        place.driver_seconds = 0.0
        await asyncio.sleep(160)
        quick = len(place.asked)
        assert quick - len(slow) > 100
        place.driver_seconds = 60.0
        await asyncio.sleep(2)
        place.driver_seconds = 0.0
        await asyncio.sleep(70)
        assert len(place.asked) - quick > 5

    watch = watching(place, script)
    ticks = {one.source: (one.ticks_total, one.ticks_missed_total) for one in watch.snapshot().sources}
    assert 0 == ticks["engine"][1]
    assert (ticks["engine"][0] or 0) > 1200


def test_an_hour_of_nonsense_is_counted_and_leaves_nothing() -> None:
    """Each page is an error, none is kept; when the server talks sense again it is served, and nothing has grown."""
    # Twenty minutes, which are all that is kept here
    place = Place()
    told: list[tuple[str, tuple[bool, int]]] = []
    objects: list[int] = []

    async def script(watch: Watch) -> None:
        await asyncio.sleep(60)

        place.nonsense = True
        for seconds in (1800, HOUR_SECONDS - 1800):
            await asyncio.sleep(seconds)
            gc.collect()
            objects.append(len(gc.get_objects()))
        told.append((watch.snapshot().state, source(watch.snapshot(), "engine")))
        place.nonsense = False
        await until(lambda: source(watch.snapshot(), "engine")[0])

    watch = watching(place, script, retention=Retention(whole_seconds=60.0, all_seconds=1200.0), pace=600.0)

    ((state, (up, errors)),) = told
    assert ("serving", False) == (state, up)  # it answers, so it is not down
    assert HOUR_SECONDS * 0.99 <= errors <= HOUR_SECONDS + 2
    assert ("serving", (True, errors)) == (watch.snapshot().state, source(watch.snapshot(), "engine"))
    assert objects[1] - objects[0] < 0.1 * HOUR_SECONDS
    ticks = next(one for one in watch.snapshot().sources if one.source == "engine")
    assert 0 == ticks.ticks_missed_total
