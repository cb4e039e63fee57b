"""An audit as text: each GPU with its own lines, the pool where there is none, and readable sizes."""

import json
from dataclasses import replace

import pytest

from kvdiag.ledger import ledger
from kvdiag.model import Capabilities, Facts, Sample
from kvdiag.outputs.documents.diagnosis_document import audit_document
from kvdiag.outputs.terminal.text import render_audit
from tests.builders.runs import judged
from tests.builders.values import GIB, NO_ANSWER, NO_NVML, device, pool, process
from tests.builders.worlds import World, facts
from tests.unit.outputs.texts import parts, piped


def test_an_audit_heads_each_gpu_with_its_lines() -> None:
    """Every device has its total and its own lines, the pool without a device its own heading."""
    known = facts(World())
    devices = (device(used_bytes=20 * GIB, processes=(process(100, 19 * GIB),)), device(1, used_bytes=None))
    text = piped(render_audit(known, devices, ledger(Sample(at_seconds=1.0, devices=devices), known), (NO_ANSWER,)))
    found = parts(text)
    assert "20.0 GiB of 24.0 GiB used" in found["GPU 0  NVIDIA Test"]
    assert "KV pool" in found["GPU 0  NVIDIA Test"]
    assert "memory cannot be read" == found["GPU 1  NVIDIA Test"].strip()
    assert "connection refused" in found["Missing data"]


def test_an_audit_of_slices_gives_each_its_own_lines() -> None:
    """MIG slices share their GPU's index; lines are matched by UUID."""
    devices = tuple(
        device(uuid=f"MIG-{part}", mig_parent_uuid="GPU-0", used_bytes=size, driver_reserved_bytes=None)
        for part, size in (("a", 3 * GIB), ("b", 5 * GIB))
    )
    known = Facts(pools=(pool(),))
    text = piped(render_audit(known, devices, ledger(Sample(at_seconds=1.0, devices=devices), known), ()))
    assert (1, 1) == (text.count("3.00 GiB  computed"), text.count("5.00 GiB  computed"))


def test_equal_ranks_are_one_with_their_gpus() -> None:
    """Eight GPUs of which seven read alike: two blocks of lines, and no process id that is one rank's alone."""
    sizes = [20 * GIB] * 7 + [22 * GIB]
    devices = tuple(
        device(index, used_bytes=size, processes=(process(100 + index, size - GIB),))
        for index, size in enumerate(sizes)
    )
    known = replace(facts(World()), server_pids=tuple(range(100, 108)))
    lines = ledger(Sample(at_seconds=1.0, devices=devices), known)
    found = parts(piped(render_audit(known, devices, lines, ())))
    seven, last = (text for title, text in found.items() if title.startswith("GPU"))
    assert ("7 GPUs, each: weights" in seven, "pid" in seven) == (True, False)
    assert "pid 107" in " ".join(last.split())


def test_an_audit_without_a_device_shows_the_pool() -> None:
    """Without a GPU the engine's own figures stand under a heading that says so."""
    sample = judged(World(nvml=NO_NVML)).ledger
    found = parts(piped(render_audit(facts(World()), (), sample, (NO_NVML,))))
    assert "KV free" in next(part for title, part in found.items() if title.startswith("KV pool"))


@pytest.mark.parametrize(
    ("engine", "can", "assumed"), [("vllm", Capabilities(), True), ("sglang", Capabilities(unit="page"), False)]
)
def test_a_pool_is_compared_in_its_own_units(engine: str, can: Capabilities, assumed: bool) -> None:
    """SGLang counts pages, and vLLM's settings change nothing of its pool."""
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    known = Facts(
        url="http://server",
        engine_name=engine,
        capabilities=can,
        model_config=json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", **shape}),
        max_model_len_tokens=8192,
        tensor_parallel=1,
        pools=(pool(pool_bytes=6145 * 16 * 512, capacity_tokens=None, max_concurrency=None),),
    )
    text = piped(render_audit(known, (), (), ()))
    assert assumed == bool(audit_document(known, None, (), ())["subject"]["pools"][0]["cost_model"]["assumed"])
    assert (f"per {can.unit}" in text, f"{can.unit}s, with" in text, "max_num_batched" in text) == (True, True, assumed)
