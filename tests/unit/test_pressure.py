"""Memory pressure: quiet on an idle server that has taken its pool, loud when pool or device really fill."""

from __future__ import annotations

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


def test_an_idle_server_is_under_little_pressure() -> None:
    """22 of 24 GiB are taken, 12 of them for an empty pool: 10 count. A GPU of somebody else's is not told."""
    assert {GPU: pytest.approx(10 / 24, abs=1e-3)} == seen(engine(usage=0.0))


def test_a_filling_pool_is_pressure() -> None:
    """The pool's usage counts where it is more than what the device shows."""
    assert {GPU: 0.95} == seen(engine(usage=0.95))


def test_a_filling_device_is_pressure() -> None:
    """What comes beside an empty pool counts against the whole device."""
    assert {GPU: pytest.approx(11.9 / 24, abs=1e-3)} == seen(engine(usage=0.0), used_bytes=int(23.9 * GIB))


def test_waiting_for_room_is_full() -> None:
    """A pool for which requests wait is full, whatever its usage says."""
    assert {GPU: 1.0} == seen(replace(engine(usage=0.8, waiting=2), requests_waiting_for_capacity=2))


def test_an_engine_that_does_not_answer_is_not_known() -> None:
    """How much of the pool is free is not known, and the pool is most of the device: no figure, and no alarm."""
    assert {} == seen(None)


def test_a_pool_of_unknown_bytes_is_told_by_its_usage() -> None:
    """The device's used share would always be high."""
    assert {GPU: 0.5} == seen(engine(usage=0.5), known=facts(World(pools=(pool(pool_bytes=None),))))


def test_devices_that_may_be_anybodys_are_left_out() -> None:
    """Where the server's processes are on no device, its pool is told alone."""
    assert {None: 0.5} == seen(engine(usage=0.5), own=False)


def test_nothing_is_said_before_a_server_is_known() -> None:
    """Memory of a machine without a server is nobody's pressure."""
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
