"""The ledger's lines: whose each byte is, on one GPU and on several; what is not reported is not guessed."""

import json
from dataclasses import replace

import pytest

from kvdiag.ledger import ledger
from kvdiag.model import Device, Facts, Sample
from tests.builders.ledger_lines import POOL_BYTES, SERVER, lines, sizes
from tests.builders.values import GIB, MIB, device, engine, pool, process


def test_every_line_of_a_server_alone() -> None:
    """Driver, pool, weights, the rest of the server's process, and nothing unaccounted for."""
    own = POOL_BYTES + 7 * GIB
    found = lines(device(used_bytes=own + 464 * MIB, processes=(process(100, own),)))
    assert [
        ("driver_reserved", 464 * MIB, "measured"),
        ("kv_pool", POOL_BYTES, "reported"),
        ("weights", 6 * GIB, "computed"),
        ("server_other", 1 * GIB, "computed"),
        ("unaccounted", 0, "computed"),
    ] == [(line.component, line.bytes, line.provenance) for line in found]
    assert {(0, "GPU-0")} == {(line.gpu, line.uuid) for line in found}
    assert found[3].detail.endswith("of pid 100")


def test_another_process_has_its_own_line() -> None:
    """What is not the server's stands under its own name and pid."""
    found = lines(device(used_bytes=23 * GIB, processes=(process(100, 18 * GIB), process(7, 3 * GIB, "train.py"))))
    (other,) = [line for line in found if line.component == "other_process"]
    assert (3 * GIB, "measured", "train.py (pid 7)") == (other.bytes, other.provenance, other.detail)


def test_bytes_of_no_process_are_unaccounted() -> None:
    """A zombie's bytes are in no line but the residual."""
    found = lines(device(used_bytes=20 * GIB + 464 * MIB, processes=(process(100, 18 * GIB),)))
    assert 2 * GIB == sizes(found)["unaccounted"]


def test_a_claim_that_exceeds_the_measured_bytes_is_shown_as_negative() -> None:
    """Weights of a larger checkpoint than what was loaded are not hidden: the residual is negative."""
    found = lines(device(used_bytes=11 * GIB, processes=(process(100, 10 * GIB),)))
    assert 10 * GIB - POOL_BYTES - 6 * GIB == sizes(found)["server_other"] < 0


def test_processes_that_exceed_the_device_are_shown_as_negative() -> None:
    """Managed memory can make processes larger than the device: the residual says so."""
    found = lines(device(used_bytes=20 * GIB, processes=(process(100, 20 * GIB), process(7, 6 * GIB))))
    assert -6 * GIB - 464 * MIB == sizes(found)["unaccounted"]


def pair(own: int) -> list[Device]:
    """Two GPUs, each with a process of the server that holds so much."""
    return [device(index, used_bytes=own + 464 * MIB, processes=(process(100 + index, own),)) for index in range(2)]


def test_ranks_of_tensor_parallel_share_the_weights() -> None:
    """Two GPUs: each has a pool of its own and half of the weights."""
    found = lines(*pair(POOL_BYTES + 4 * GIB))
    for index in (0, 1):
        own_lines = tuple(line for line in found if line.gpu == index)
        assert (POOL_BYTES, 3 * GIB, GIB, 0) == tuple(
            sizes(own_lines)[name] for name in ("kv_pool", "weights", "server_other", "unaccounted")
        )


def test_engines_of_data_parallel_have_the_weights_each() -> None:
    """Two engines on two GPUs: each holds a whole copy."""
    found = lines(*pair(POOL_BYTES + 7 * GIB), of=replace(SERVER, pools=(pool("0"), pool("1"))))
    assert [6 * GIB, 6 * GIB] == [line.bytes for line in found if line.component == "weights"]


def test_a_process_of_no_bytes_takes_none() -> None:
    """A server that has only begun, and an idle helper without a name: 0 bytes are 0 bytes."""
    found = lines(
        device(used_bytes=464 * MIB, processes=(process(100, 0), process(7, 0, None))),
        of=replace(SERVER, pools=(), weights_bytes=None),
    )
    assert [
        ("driver_reserved", 464 * MIB),
        ("server_other", 0),
        ("other_process", 0),
        ("unaccounted", 0),
    ] == [(line.component, line.bytes) for line in found]
    assert ["", "all memory of pid 100", "process (pid 7)"] == [line.detail for line in found[:-1]]


def test_a_pool_computed_from_the_config_says_so() -> None:
    """Llama-3.1-8B: 131,072 bytes a token, 16 tokens a block; the engine reports 1,000 blocks and no bytes."""
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    of = replace(
        SERVER,
        pools=(pool(usable_blocks=999, pool_bytes=None, capacity_tokens=None, max_concurrency=None),),
        model_config=json.dumps({"model_type": "llama", **shape}),
        max_model_len_tokens=8192,
        tensor_parallel=1,
    )
    (whole,) = [
        line for line in lines(device(processes=(process(100, 18 * GIB),)), of=of) if line.component == "kv_pool"
    ]
    assert (1000 * 16 * 131_072, "computed") == (whole.bytes, whole.provenance)
    assert "config" in whole.detail


def test_a_gpu_without_the_server_has_none_of_its_parts() -> None:
    """Pool and weights are on the server's device, not on every device of the host."""
    found = lines(
        device(0, used_bytes=20 * GIB, processes=(process(100, 19 * GIB),)),
        device(1, used_bytes=8 * GIB, processes=(process(7, 7 * GIB),)),
    )
    assert ["driver_reserved", "other_process", "unaccounted"] == [line.component for line in found if line.gpu == 1]


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (replace(SERVER, pools=()), "KV pool, "),
        (replace(SERVER, weights_bytes=None), "weights, "),
        (replace(SERVER, pools=(), weights_bytes=None), "all memory of pid 100"),
    ],
    ids=["no pool", "no weights", "neither"],
)
def test_what_is_not_reported_is_named_in_the_rest(facts: Facts, named: str) -> None:
    """A pool or weights of unknown size are among the server's other bytes, and the line says so."""
    found = lines(device(used_bytes=20 * GIB, processes=(process(100, 19 * GIB),)), of=facts)
    (rest,) = [line for line in found if line.component == "server_other"]
    assert rest.detail.startswith(named)


def test_a_server_of_unknown_size_is_not_mistaken_for_another_process() -> None:
    """The driver reports the other process's bytes and not the server's: its line stays its own."""
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


def test_without_process_lists_the_servers_parts_are_still_reported() -> None:
    """A container without process lists shows pool and weights on its one device, the rest in the residual."""
    found = lines(device(used_bytes=20 * GIB), of=replace(SERVER, server_pids=None))
    assert 20 * GIB - 464 * MIB - POOL_BYTES - 6 * GIB == sizes(found)["unaccounted"]


def test_which_of_several_gpus_is_the_servers_is_not_guessed() -> None:
    """Two GPUs without process lists, and a server of unknown processes: the pool is assigned to neither."""
    found = lines(device(0, used_bytes=20 * GIB), device(1, used_bytes=GIB), of=replace(SERVER, server_pids=None))
    assert ["driver_reserved", "unaccounted"] * 2 == [line.component for line in found]


def test_an_engine_that_reports_no_usage_hides_no_other() -> None:
    """Two data-parallel engines without a GPU: the one that reports usage is shown, also after one that does not."""
    of = replace(SERVER, pools=(pool("0"), pool("1")))
    sample = Sample(at_seconds=1.0, engines=(engine(usage=None), engine(label="1", usage=0.5)))
    assert [("kv_held", 3072 * 2 * MIB, "engine 1"), ("kv_free", POOL_BYTES - 3072 * 2 * MIB)] == [
        (line.component, line.bytes, line.detail) if line.component == "kv_held" else (line.component, line.bytes)
        for line in ledger(sample, of)
    ]


def test_a_pool_whose_blocks_differ_is_shown_whole() -> None:
    """Windows and states are among its bytes: what the blocks in use take of them is not known."""
    of = replace(SERVER, pools=(replace(pool("0"), mixed=True),))
    found = ledger(Sample(at_seconds=1.0, engines=(engine(usage=0.5),)), of)
    assert [("kv_pool", POOL_BYTES)] == [(line.component, line.bytes) for line in found]


def test_without_a_device_the_engine_alone_is_reported() -> None:
    """No GPU in sight: what requests hold of each pool and what is free of it, as the engine reports."""
    found = ledger(Sample(at_seconds=1.0, engines=(engine(usage=0.25),)), SERVER)
    held = 1536 * 2 * MIB
    assert [("kv_held", held, "reported"), ("kv_free", POOL_BYTES - held, "reported")] == [
        (line.component, line.bytes, line.provenance) for line in found
    ]
    assert {None} == {line.gpu for line in found}


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
def test_what_was_not_reported_has_no_line(sample: Sample | None, of: Facts) -> None:
    """Without usage or bytes no line is made up."""
    assert () == ledger(sample, of)


def test_a_device_that_does_not_report_its_memory_gives_way_to_the_engine() -> None:
    """Unified memory has no lines of its own: what the engine reports stands instead."""
    sample = Sample(at_seconds=1.0, devices=(device(used_bytes=None),), engines=(engine(),))
    assert {"kv_held": 0, "kv_free": POOL_BYTES} == sizes(ledger(sample, SERVER))
