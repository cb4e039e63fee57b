"""Memory pressure: quiet on an idle server that has taken its pool, loud when pool or device really fill."""

from dataclasses import replace

import pytest

from kvdiag.ledger import ledger
from kvdiag.model import Engine, Facts, Gap, Sample
from kvdiag.pressure import pressures
from tests.builders.values import GIB, SERVER_PID, allocator, device, engine, pool, process, split
from tests.builders.worlds import World, facts

GPU = "GPU-0"


def seen(
    reading: Engine | None, *, used_bytes: int = 22 * GIB, own: bool = True, known: Facts | None = None
) -> dict[str | None, float | None]:
    """The pressure of a server with a pool of 12 GiB on a GPU of 24 GiB."""
    known = known or facts(World())
    running = (process(SERVER_PID if own else 7, used_bytes - GIB),)
    other = device(1, processes=(process(8, 20 * GIB),))
    sample = Sample(
        at_seconds=1.0,
        engines=None if reading is None else (reading,),
        devices=(device(used_bytes=used_bytes, processes=running), other),
    )
    return pressures(sample, known, ledger(sample, known))


def test_an_idle_server_is_under_little_pressure() -> None:
    """22 of 24 GiB are taken, 12 of them for an empty pool: 10 count. A foreign process's GPU is not listed."""
    assert {GPU: pytest.approx(10 / 24, abs=1e-3)} == seen(engine(usage=0.0))


def test_a_filling_pool_is_pressure() -> None:
    """The pool's usage counts where it is more than what the device shows."""
    assert {GPU: 0.95} == seen(engine(usage=0.95))


def test_a_filling_device_is_pressure() -> None:
    """Usage next to an empty pool counts against the whole device."""
    assert {GPU: pytest.approx(11.9 / 24, abs=1e-3)} == seen(engine(usage=0.0), used_bytes=int(23.9 * GIB))


def test_waiting_for_room_is_full() -> None:
    """A pool for which requests wait is full, at any reported usage."""
    assert {GPU: 1.0} == seen(replace(engine(usage=0.8, waiting=2), requests_waiting_for_capacity=2))


def test_an_engine_that_does_not_answer_is_not_known() -> None:
    """How much of the pool is free is not known, and the pool is most of the device: no figure, and no alarm."""
    assert {} == seen(None)


@pytest.mark.parametrize(
    ("usage", "used_bytes", "pressure"),
    [
        pytest.param(0.0, 22 * GIB, None, id="an idle pool"),
        pytest.param(0.5, 22 * GIB, None, id="half a pool"),
        pytest.param(0.5, 12 * GIB, 0.5, id="as much of the device"),
        pytest.param(0.8, 22 * GIB, 0.8, id="a filling pool"),
        pytest.param(0.95, 22 * GIB, 0.95, id="a full pool"),
        pytest.param(0.0, 24 * GIB, 1.0, id="a full device"),
        pytest.param(None, 24 * GIB, 1.0, id="a full device whose engine reports no usage"),
    ],
)
def test_with_a_pool_of_unknown_bytes_only_what_is_certain_is_reported(
    usage: float | None, used_bytes: int, pressure: float | None
) -> None:
    """Between the pool's usage and the device's used share pressure is unknown, never low; a full device is full."""
    unsized = facts(World(pools=(pool(pool_bytes=None),)))
    assert {GPU: pressure} == seen(engine(usage=usage), used_bytes=used_bytes, known=unsized)


def test_a_share_of_a_pool_without_a_size_is_a_pool() -> None:
    """LMDeploy reports its usage alone: the pool's free bytes are not in use, however many they are."""
    unsized = replace(facts(World()), pools=())
    assert {GPU: None} == seen(engine(usage=0.0), known=unsized)


def test_devices_that_may_be_anybodys_are_left_out() -> None:
    """Where the server's processes are on no device, only its pool is listed."""
    assert {None: 0.5} == seen(engine(usage=0.5), own=False)


@pytest.mark.parametrize(("usage", "pressure"), [(0.0, None), (0.79, None), (0.8, 0.8), (None, None)])
def test_a_driver_that_does_not_answer_hides_the_pressure(usage: float | None, pressure: float | None) -> None:
    """Devices that were full may still be: only a filling pool is certain. Without a driver, the pool alone counts."""
    sample = Sample(at_seconds=1.0, engines=(engine(usage=usage),), gaps=(Gap("nvml", "failed", "no answer"),))
    assert {None: pressure} == pressures(sample, facts(World()), ())
    absent = replace(sample, gaps=(Gap("nvml", "absent", "no driver"),))
    assert ({} if usage is None else {None: usage}) == pressures(absent, facts(World()), ())


def test_nothing_is_said_before_a_server_is_known() -> None:
    """Memory of a machine without a server is not counted as pressure."""
    assert {} == seen(None, known=Facts())


def test_an_engine_that_grows_has_its_cache_to_use_again() -> None:
    """Without a pool, what torch could give back is room."""
    known = facts(World(pools=(), weights_bytes=None))
    sample = Sample(
        at_seconds=1.0,
        engines=(engine(usage=None),),
        devices=(device(used_bytes=12 * GIB, processes=(process(SERVER_PID, 11 * GIB),)),),
        allocators=(allocator(split=split(), process_bytes=11 * GIB),),
    )
    assert {GPU: pytest.approx(10 / 24)} == pressures(sample, known, ledger(sample, known))
