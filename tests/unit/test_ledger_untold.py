"""The ledger where something is not told: nothing is guessed, made up or counted twice."""

from dataclasses import replace

import pytest

from kvdiag.ledger import ledger
from kvdiag.model import Facts, LedgerLine, Sample
from tests.builders.ledger_lines import POOL_BYTES, SERVER, lines, sizes
from tests.builders.values import GIB, MIB, device, engine, pool, process


@pytest.mark.parametrize(
    ("facts", "detail"),
    [
        (replace(SERVER, pools=()), "KV pool, context, activations, graphs, allocator cache of pid 100"),
        (replace(SERVER, weights_bytes=None), "weights, context, activations, graphs, allocator cache of pid 100"),
        (replace(SERVER, pools=(), weights_bytes=None), "all memory of pid 100"),
    ],
    ids=["no pool", "no weights", "neither"],
)
def test_what_is_not_told_apart_is_named_in_the_rest(facts: Facts, detail: str) -> None:
    """A pool or weights of unknown size are among the server's other bytes, and the line says so."""
    found = lines(device(used_bytes=20 * GIB, processes=(process(100, 19 * GIB),)), of=facts)
    assert [detail] == [line.detail for line in found if line.component == "server_other"]


def test_a_server_of_unknown_size_is_not_mistaken_for_its_neighbour() -> None:
    """Where the driver tells another process's bytes and not the server's, the other one stays another."""
    found = lines(device(used_bytes=23 * GIB, processes=(process(100, None), process(7, 3 * GIB, "train.py"))))
    assert {"driver_reserved", "kv_pool", "weights", "other_process", "unaccounted"} == set(sizes(found))
    assert 3 * GIB == sizes(found)["other_process"]
    assert "does not report" in found[-1].detail


@pytest.mark.parametrize("pids", [None, (1, 2)], ids=["not known", "of another namespace"])
def test_a_lone_process_is_taken_for_the_server(pids: tuple[int, ...] | None) -> None:
    """A container sees host pids: the one process on the one device is the server's, as in baseline.foreign_memory."""
    found = lines(
        device(used_bytes=20 * GIB, processes=(process(4711, 19 * GIB),)), of=replace(SERVER, server_pids=pids)
    )
    assert 19 * GIB - POOL_BYTES - 6 * GIB == sizes(found)["server_other"]
    assert "other_process" not in sizes(found)


@pytest.mark.parametrize("pids", [None, (1, 2)], ids=["not known", "of another namespace"])
def test_which_of_several_processes_is_the_server_is_not_guessed(pids: tuple[int, ...] | None) -> None:
    """Two processes of which one must be the server: neither is called another's, and nothing is counted twice."""
    both = (process(4711, 18 * GIB), process(4712, 2 * GIB))
    found = lines(device(used_bytes=20 * GIB + 464 * MIB, processes=both), of=replace(SERVER, server_pids=pids))
    assert ["driver_reserved", "process", "process", "unaccounted"] == [line.component for line in found]
    assert 0 == sizes(found)["unaccounted"]


def test_without_process_lists_the_servers_parts_are_still_told() -> None:
    """A container without process lists shows pool and weights on its one device, the rest in the residual."""
    found = lines(device(used_bytes=20 * GIB), of=replace(SERVER, server_pids=None))
    assert 20 * GIB - 464 * MIB - POOL_BYTES - 6 * GIB == sizes(found)["unaccounted"]


def test_which_of_several_gpus_is_the_servers_is_not_guessed() -> None:
    """Two GPUs without process lists, and a server of unknown processes: neither is said to hold its pool."""
    found = lines(device(0, used_bytes=20 * GIB), device(1, used_bytes=GIB), of=replace(SERVER, server_pids=None))
    assert ["driver_reserved", "unaccounted"] * 2 == [line.component for line in found]


def test_an_engine_that_tells_no_usage_hides_no_other() -> None:
    """Two engines, data parallel, no GPU in sight: the one that tells is shown, whatever the one before it does."""
    of = replace(SERVER, pools=(pool("0"), pool("1")))
    sample = Sample(at_seconds=1.0, engines=(engine(usage=None), engine(label="1", usage=0.5)))
    assert [("kv_held", 3072 * 2 * MIB, "engine 1"), ("kv_free", POOL_BYTES - 3072 * 2 * MIB)] == [
        (line.component, line.bytes, line.detail) if line.component == "kv_held" else (line.component, line.bytes)
        for line in ledger(sample, of)
    ]


def test_without_a_device_the_engine_alone_is_told() -> None:
    """No GPU in sight: what requests hold of each pool and what is free of it, as the engine reports."""
    found = ledger(Sample(at_seconds=1.0, engines=(engine(usage=0.25),)), SERVER)
    held = 1536 * 2 * MIB
    kept = "engine 0: empty, or caching prefixes; the engine does not report which"
    expected = (
        LedgerLine(gpu=None, component="kv_held", bytes=held, provenance="reported", detail="engine 0"),
        LedgerLine(gpu=None, component="kv_free", bytes=POOL_BYTES - held, provenance="reported", detail=kept),
    )

    assert expected == found


@pytest.mark.parametrize(
    ("sample", "of"),
    [
        (None, SERVER),
        (Sample(at_seconds=1.0), SERVER),
        (Sample(at_seconds=1.0, engines=(engine(usage=None),)), SERVER),
        (Sample(at_seconds=1.0, engines=(engine(label="7"),)), SERVER),
        (Sample(at_seconds=1.0, engines=(engine(),)), replace(SERVER, pools=(pool(pool_bytes=None),))),
        (Sample(at_seconds=1.0, devices=()), Facts()),
    ],
    ids=["nothing", "empty", "no usage", "another engine", "no bytes", "no device"],
)
def test_what_was_not_told_has_no_line(sample: Sample | None, of: Facts) -> None:
    """Without usage or bytes no line is made up."""
    assert () == ledger(sample, of)


def test_a_device_that_does_not_tell_its_memory_gives_way_to_the_engine() -> None:
    """Unified memory has no lines of its own: what the engine tells stands instead."""
    sample = Sample(at_seconds=1.0, devices=(device(used_bytes=None),), engines=(engine(),))
    assert {"kv_held": 0, "kv_free": POOL_BYTES} == sizes(ledger(sample, SERVER))
