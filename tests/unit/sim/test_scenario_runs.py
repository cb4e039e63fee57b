"""Each scenario's effect as its user sees it: through the metrics endpoint, the answers and NVML alone."""

import math
import os
import re
from itertools import pairwise

import pytest

from kvdiag.sim import SCENARIOS, RemoteNvml
from kvdiag.sim.gpu import GIB, MIB
from tests.unit.sim.client import Client
from tests.unit.sim.conftest import OF_VLLM, Serve


def free_bytes(nvml: RemoteNvml) -> int:
    """Free memory of the device now."""
    return int(nvml.nvmlDeviceGetMemoryInfo(0).free)


def taken_bytes(client: Client, nvml: RemoteNvml, requests: int) -> list[int]:
    """What each of some requests, one after the other, took of the device for good."""
    free = [free_bytes(nvml)]
    for _ in range(requests):
        assert "length" == client.complete(64, 4).finish_reason
        free.append(free_bytes(nvml))
    return [before - after for before, after in pairwise(free)]


def oom(message: str | None) -> dict[str, float]:
    """The figures of torch's out-of-memory message, in GiB."""
    assert message is not None
    patterns = {
        "asked": r"Tried to allocate ([\d.]+) (\w+)\.",
        "free": r"of which ([\d.]+) (\w+) is free",
        "cached": r"and ([\d.]+) (\w+) is reserved by PyTorch but unallocated",
    }
    found = {name: re.search(pattern, message) for name, pattern in patterns.items()}
    return {name: float(m[1]) * {"MiB": 2**-10, "GiB": 1}[m[2]] for name, m in found.items() if m}


def test_scenarios_are_named_and_summed_up() -> None:
    """Every scenario has its name as key and one sentence that describes it."""
    assert list(SCENARIOS) == [scenario.name for scenario in SCENARIOS.values()]
    assert all(scenario.summary.endswith(".") and ". " not in scenario.summary for scenario in SCENARIOS.values())


@pytest.mark.parametrize("name", OF_VLLM)
def test_a_started_server_fills_its_device(serve: Serve, name: str) -> None:
    """After its start more than 80 % of the device is taken, and no block of the pool is held."""
    client, nvml = serve(name)
    memory = nvml.nvmlDeviceGetMemoryInfo(0)
    assert memory.used / memory.total > 0.8
    assert 0 == client.used_blocks


def test_healthy_takes_memory_once(serve: Serve) -> None:
    """The first request takes its workspace; after that device memory and pool are as before each load."""
    client, nvml = serve("healthy")
    first, *later = taken_bytes(client, nvml, 3)
    client.load(10, 1000, 20)
    client.complete(16_000, 4)
    assert (640 * MIB, [0, 0]) == (first, later)
    assert (0, 0) == (client.used_blocks, client.gauge("num_preemptions_total"))
    assert 0 == sum(taken_bytes(client, nvml, 1))


def test_kv_leak_holds_blocks_of_finished_requests(serve: Serve) -> None:
    """Each finished request leaves four blocks held, while nothing runs and device memory stands still."""
    client, nvml = serve("kv-leak")
    client.complete(64, 4)
    before = (client.used_blocks, free_bytes(nvml))
    client.load(5, 200, 4)
    assert 20 == round(client.used_blocks - before[0])
    assert before[1] == free_bytes(nvml)
    assert [0, 0] == [client.gauge(name) for name in ("num_requests_running", "num_requests_waiting")]


def test_device_leak_takes_memory_with_each_request(serve: Serve) -> None:
    """Each request takes 6 MiB of the device for good, and no block of the pool."""
    client, nvml = serve("device-leak")
    assert [646 * MIB, 6 * MIB, 6 * MIB, 6 * MIB] == taken_bytes(client, nvml, 4)
    assert 0 == client.used_blocks


def test_device_leak_ends_in_failed_requests(serve: Serve) -> None:
    """Once the leak has eaten the device, requests fail with CUDA's error, and the server still answers."""
    client, nvml = serve("device-leak")
    answers = [client.post("/v1/completions", {"prompt": [[5]] * 250, "max_tokens": 1}) for _ in range(3)]
    assert (200, 500) == (answers[0][0], answers[-1][0])
    assert "CUDA error: out of memory" == answers[-1][1]["error"]["message"]
    assert free_bytes(nvml) < 6 * MIB
    assert (200, 0) == (client.get("/health")[0], client.used_blocks)


def test_fragmentation_fails_with_memory_left(serve: Serve) -> None:
    """Ten requests run out of memory although free and cached bytes would do; one alone is fine, also after."""
    client, nvml = serve("fragmentation")
    assert "length" == client.complete(2048, 4).finish_reason

    status, answer = client.batch(10, 2048, 20)

    failure = oom(answer["error"]["message"])
    assert 500 == status
    assert failure["free"] < failure["asked"] < failure["free"] + failure["cached"]
    assert "length" == client.complete(2048, 4).finish_reason
    assert free_bytes(nvml) > 0
    assert 0 == client.used_blocks


def test_foreign_memory_is_another_process(serve: Serve) -> None:
    """NVML lists a second process, which is not the server's, with 6 GiB."""
    _, nvml = serve("foreign-memory")
    processes = {process.pid: process.usedGpuMemory for process in nvml.nvmlDeviceGetComputeRunningProcesses(0)}
    (foreign,) = processes.keys() - {os.getpid()}
    assert (6 * GIB, "/usr/bin/python3 train.py") == (processes[foreign], nvml.nvmlSystemGetProcessName(foreign))


def test_duplicate_model_holds_the_weights_twice(serve: Serve) -> None:
    """The server's own memory beyond its pool has room for two copies of the weights."""
    client, nvml = serve("duplicate-model")
    (process,) = nvml.nvmlDeviceGetComputeRunningProcesses(0)
    assert process.usedGpuMemory is not None
    beyond_pool = process.usedGpuMemory - int(client.config()["kv_cache_memory_bytes"])
    parameters = sum(math.prod(shape) for _, shape in SCENARIOS["duplicate-model"].model.tensors())
    assert 2 < beyond_pool / (2 * parameters) < 2.2


def test_concurrency_thrash_preempts_and_waits(serve: Serve) -> None:
    """Ten 2K requests fill the pool: some wait, some are preempted over and over, all come to their end."""
    client, _ = serve("concurrency-thrash")
    waiting = 'vllm:num_requests_waiting_by_reason{reason="capacity"}'

    with client.peaks("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting_by_reason") as peaks:
        status, answer = client.batch(10, 2048, 100)

    assert 895 < client.blocks < 920
    assert peaks.highest["vllm:kv_cache_usage_perc"] > 0.95
    assert peaks.highest[waiting] >= 3
    assert client.gauge("num_preemptions_total") > 3
    assert (200, 1000) == (status, answer["usage"]["completion_tokens"])
    assert 0 == client.used_blocks


def test_long_context_oom_fails_for_want_of_memory(serve: Serve) -> None:
    """A 16K prompt needs more than free and cached memory together; ten 2K prompts run, before and after."""
    client, _ = serve("long-context-oom")
    before = client.load(10, 2048, 4)
    failure = oom(client.complete(16_384, 4).error)
    after = client.load(10, 2048, 4)
    assert failure["free"] + failure["cached"] < failure["asked"]
    assert {None} == {answer.error for answer in [*before, *after]}


def test_warmup_grows_three_times_and_stops(serve: Serve) -> None:
    """The first three requests take device memory, each less than the one before; no later one does."""
    client, nvml = serve("warmup")
    assert [820 * MIB, 120 * MIB, 60 * MIB, 0, 0] == taken_bytes(client, nvml, 5)
