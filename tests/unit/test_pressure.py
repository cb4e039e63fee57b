"""Memory pressure: quiet on an idle server that has taken its pool, loud when pool or device really fill."""

from dataclasses import replace

import pytest

from kvdiag.ledger import ledger
from kvdiag.model import Engine, Facts, Sample
from kvdiag.pressure import pressures
from tests.builders.values import GIB, SERVER_PID, allocator, device, engine, pool, process, split
from tests.builders.worlds import World, facts

GPU = "GPU-0"


def seen(
    reading: Engine | None, *, used_bytes: int = 22 * GIB, own: bool = True, known: Facts | None = None
) -> dict[str | None, float]:
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


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        pytest.param(engine(usage=0.0), pytest.approx(10 / 24, abs=1e-3), id="idle: 22 of 24 GiB less an empty pool"),
        pytest.param(engine(usage=0.95), 0.95, id="the pool's usage, where the device shows less"),
        pytest.param(
            replace(engine(usage=0.8, waiting=2), requests_waiting_for_capacity=2), 1.0, id="requests wait for room"
        ),
    ],
)
def test_the_fuller_of_pool_and_device_is_the_pressure(reading: Engine, expected: float) -> None:
    """An empty pool is room; one for which requests wait is full. A GPU of somebody else's is not told."""
    assert {GPU: expected} == seen(reading)


def test_a_filling_device_is_pressure() -> None:
    """What comes beside an empty pool counts against the whole device."""
    assert {GPU: pytest.approx(11.9 / 24, abs=1e-3)} == seen(engine(usage=0.0), used_bytes=int(23.9 * GIB))


def test_what_is_not_known_is_no_pressure() -> None:
    """Most of a device is a pool that only its engine tells of; before a server is known all is nobody's."""
    assert {} == seen(None) == seen(None, known=Facts())


def test_without_a_device_to_compare_the_pool_is_told_by_its_usage() -> None:
    """Where its bytes are unknown, and apart from any GPU where the server's processes are on none."""
    assert {GPU: 0.5} == seen(engine(usage=0.5), known=facts(World(pools=(pool(pool_bytes=None),))))
    assert {None: 0.5} == seen(engine(usage=0.5), own=False)


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
