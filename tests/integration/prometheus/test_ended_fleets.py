"""A replica that has ended disappears after an hour; one that cannot be read stays unknown while it is listed."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdiag.commands.daemons.fleet_daemon import status_of
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from kvdiag.feeds.fleet.fleet_round import FleetRound
from tests.fixtures.hostile import Answer, refused_port, reply_json
from tests.integration.prometheus.histories import END_SECONDS
from tests.integration.prometheus.test_bad_fleets import (
    COUNTER,
    RUNNING,
    SAMPLES,
    Series,
    counted,
    feed,
    holding,
    rising,
)
from tests.integration.prometheus.test_fleet_rounds import diagnosed
from tests.unit.outputs.test_fleet import SOURCE

HOUR = 3600.0
CORRUPTED = reply_json({"status": "error", "error": "block is corrupted"}, 500)


def shown(state: FleetRound) -> dict[str, tuple[str, str | None]]:
    """The verdict of each replica on the page, and why it could not be read."""
    status = status_of(state, SOURCE, 24.0 * HOUR, DEFAULT_LIMITS)
    return {one.judged.key.rpartition("/")[2]: (one.status, one.unread) for one in status.replicas}


def after(kept: FleetFeed, hours: float) -> dict[str, tuple[str, str | None]]:
    """What is on the page after a round that many hours before the end of all samples."""
    return shown(asyncio.run(kept.round(END_SECONDS - hours * HOUR)))


OK = ("ok", None)
UNREAD = ("unknown", "block is corrupted")


def test_what_cannot_be_read_for_hours_stays_unknown_while_it_is_listed(tmp_path: Path) -> None:
    """In each round and after a restart of the daemon; it has ended once its series have."""
    ended = [END_SECONDS]

    def fails(query: str) -> Answer | None:
        return CORRUPTED if broken and "vllm-01" in query else None

    def ends(one: Series) -> float:
        return ended[0] if "vllm-01" in one.values() else END_SECONDS

    broken: list[bool] = []
    with holding(counted(2), fails=fails, ends=ends) as server:
        with feed(server, tmp_path) as kept:
            assert {"vllm-00": OK, "vllm-01": OK} == after(kept, 2.5)
            broken.append(True)
            assert {"vllm-00": OK, "vllm-01": UNREAD} == after(kept, 2.0)
            assert {"vllm-00": OK, "vllm-01": UNREAD} == after(kept, 0.5)
        with feed(server, tmp_path) as kept:
            assert {"vllm-00": OK, "vllm-01": UNREAD} == shown(kept.state)
            assert {"vllm-00": OK, "vllm-01": UNREAD} == after(kept, 0.1)
            ended[0] = END_SECONDS - 2.0 * HOUR
            assert {"vllm-00": OK} == after(kept, 0.0)


@pytest.mark.parametrize("samples", [0, 20])
def test_what_has_only_nan_is_unknown_while_it_is_listed(tmp_path: Path, samples: int) -> None:
    """From the start or after some samples: with the document of `kvdiag diagnose`, in each round and after a restart.

    It has ended an hour after its last NaN.
    """
    until = [END_SECONDS]

    def value(one: Series, age: int) -> str:
        return "NaN" if "vllm-01" in one.values() and age < SAMPLES - samples else rising(one, age)

    def ends(one: Series) -> float:
        return until[0] if "vllm-01" in one.values() else END_SECONDS

    both = {"vllm-00": OK, "vllm-01": ("unknown", None)}
    with holding(counted(2), value, ends=ends) as server:
        with feed(server, tmp_path) as kept:
            assert both == after(kept, 2.5)
            assert both == after(kept, 1.3)
            assert {one.key: one.present for one in kept.state.verdicts} == diagnosed(
                server.url, END_SECONDS - 1.3 * HOUR
            )
        until[0] = END_SECONDS - 1.3 * HOUR
        with feed(server, tmp_path) as kept:
            assert both == shown(kept.state)
            assert both == after(kept, 0.5)
            assert {"vllm-00": OK} == after(kept, 0.0)


def test_what_has_no_sample_is_unknown_while_it_is_listed(tmp_path: Path) -> None:
    """Of one whose pool alone is described nothing shows whether it has ended, until it is not listed any more."""
    until = [END_SECONDS]
    series = [one for one in counted(2) if "vllm-00" in one.values() or one["__name__"] == "vllm:cache_config_info"]

    def ends(one: Series) -> float:
        return until[0] if "vllm-01" in one.values() else END_SECONDS

    with holding(series, ends=ends) as server, feed(server, tmp_path) as kept:
        assert {"vllm-00": OK, "vllm-01": ("unknown", None)} == after(kept, 0.5)
        until[0] = END_SECONDS - 2.0 * HOUR
        assert {"vllm-00": OK} == after(kept, 0.0)


def test_what_can_be_read_again_is_no_longer_unknown(tmp_path: Path) -> None:
    """After hours in which it could not, and a restart."""
    broken = [True]

    def fails(query: str) -> Answer | None:
        return CORRUPTED if broken and "vllm-01" in query else None

    with holding(counted(2), fails=fails) as server:
        with feed(server, tmp_path) as kept:
            assert UNREAD == after(kept, 2.5)["vllm-01"]
            assert UNREAD == after(kept, 1.0)["vllm-01"]
        broken.clear()
        with feed(server, tmp_path) as kept:
            assert {"vllm-00": OK, "vllm-01": OK} == after(kept, 0.0)


def test_hours_without_a_prometheus_end_no_replica(tmp_path: Path) -> None:
    """Each stays, and none is ok; one that had ended before does not return."""

    def ends(one: Series) -> float:
        return END_SECONDS - 2.8 * HOUR if "vllm-01" in one.values() else END_SECONDS

    with holding(counted(2), ends=ends) as server, feed(server, tmp_path) as kept:
        assert {"vllm-00": OK} == after(kept, 1.5)
    with refused_port() as port:
        server.url = f"http://127.0.0.1:{port}"
        with feed(server, tmp_path) as kept:
            [(name, (worst, reason))] = after(kept, 0.0).items()
    assert ("vllm-00", "unknown") == (name, worst)
    assert "cannot connect" in str(reason)


@pytest.mark.parametrize(
    ("hours", "side"), [pytest.param(2.0, "2 h ahead of", id="ahead"), pytest.param(-2.0, "2 h behind", id="behind")]
)
def test_a_wrong_clock_ends_no_replica(tmp_path: Path, hours: float, side: str) -> None:
    """The round fails with the reason, and nothing is ok; once the clock is right all is as before."""
    clock = reply_json({"status": "success", "data": {"resultType": "scalar", "result": [0, str(END_SECONDS)]}})
    prometheus = holding(counted(2), fails=lambda query: clock if query == "time()" else None)
    with prometheus as server, feed(server, tmp_path) as kept:
        assert {"vllm-00": OK, "vllm-01": OK} == shown(asyncio.run(kept.round(END_SECONDS - 60.0, is_now=True)))
        wrong = asyncio.run(kept.round(END_SECONDS + hours * HOUR, is_now=True))
        assert {"vllm-00", "vllm-01"} == {name for name, (worst, _) in shown(wrong).items() if worst == "unknown"}
        assert f"this machine's clock is {side} Prometheus'" in str(wrong.problem)
        assert {"vllm-00": OK, "vllm-01": OK} == shown(asyncio.run(kept.round(END_SECONDS, is_now=True)))


def test_the_gpu_of_a_host_does_not_keep_a_server_that_has_ended(tmp_path: Path) -> None:
    """Its exporter names no pod, so the GPU is the only server's of its host, and its samples continue."""
    server = [one for one in counted(2) if "pod" in one]
    gpu = {"UUID": "GPU-0", "instance": "10.0.0.0:9400"}
    series = server + [{"__name__": f"DCGM_FI_DEV_FB_{name}", **gpu} for name in ("USED", "FREE")]

    def ends(one: Series) -> float:
        return END_SECONDS - 2.0 * HOUR if "vllm-00" in one.values() else END_SECONDS

    with holding(series, ends=ends) as prometheus, feed(prometheus, tmp_path) as kept:
        assert {"vllm-00", "vllm-01"} == after(kept, 1.5).keys()
        assert {"vllm-01"} == after(kept, 0.5).keys()


@pytest.mark.parametrize(
    ("ended", "worst"),
    [
        pytest.param(lambda one: "vllm" in one["__name__"], "unknown", id="engine"),
        pytest.param(lambda one: one["__name__"] == RUNNING, "unknown", id="running requests"),
        pytest.param(lambda one: "DCGM" in one["__name__"], "unknown", id="GPU"),
        pytest.param(lambda one: one["__name__"] == COUNTER, "ok", id="counter"),
        pytest.param(lambda _: True, "ok", id="everything"),
    ],
)
def test_a_server_of_which_a_part_has_ended_is_not_ok(
    tmp_path: Path, ended: Callable[[Series], bool], worst: str
) -> None:
    """What is judged by the part that ended is no longer known; a server that was replaced has ended as a whole."""

    def ends(one: Series) -> float:
        return END_SECONDS - 0.5 * HOUR if "vllm-01" in one.values() and ended(one) else END_SECONDS

    gpus = [{**one, "pod": one["exported_pod"]} if "exported_pod" in one else one for one in counted(2)]
    series = [{name: value for name, value in one.items() if name != "exported_pod"} for one in gpus]
    with holding(series, ends=ends) as server, feed(server, tmp_path) as kept:
        assert {"vllm-00": OK, "vllm-01": (worst, None)} == after(kept, 0.0)
        assert {one.key: one.present for one in kept.state.verdicts} == diagnosed(server.url, END_SECONDS)
