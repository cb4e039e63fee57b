"""The ledger's lines where all is told: whose each byte is, on one GPU and on several."""

import json
from dataclasses import replace

from kvdiag.model import Device, LedgerLine
from tests.builders.ledger_lines import POOL_BYTES, SERVER, lines, sizes
from tests.builders.values import GIB, MIB, device, pool, process


def test_every_line_of_a_server_alone() -> None:
    """Driver, pool, weights, the rest of the server's process, and nothing unaccounted for."""
    own = POOL_BYTES + 7 * GIB
    expected = tuple(
        LedgerLine(gpu=0, uuid="GPU-0", component=component, bytes=size, provenance=provenance, detail=detail)  # type: ignore[arg-type]
        for component, size, provenance, detail in (
            ("driver_reserved", 464 * MIB, "measured", ""),
            ("kv_pool", POOL_BYTES, "reported", "the engine's kv_cache_memory_bytes"),
            ("weights", 6 * GIB, "computed", "size of the checkpoint"),
            ("server_other", 1 * GIB, "computed", "context, activations, graphs, allocator cache of pid 100"),
            ("unaccounted", 0, "computed", "in no process that NVML lists"),
        )
    )
    assert expected == lines(device(used_bytes=own + 464 * MIB, processes=(process(100, own),)))


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
    """Llama-3.1-8B: 131,072 bytes a token, 16 tokens a block; the engine tells 1,000 blocks and no bytes."""
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
