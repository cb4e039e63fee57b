"""How long `kvdiag diagnose --prometheus` takes for a fleet, and how much memory, on a real Prometheus.

By hand: `python -m tests.quality.bench.fleet_speed [REPLICAS [HOURS [SECONDS]]]`: one worker, all cores, and a Ray
cluster of two nodes with the same cores. The default of each is 1,000 replicas, a day, every 30 seconds; without any,
1,000 and 4,000 replicas for six hours, which shows how the time grows. Histories are made once (minutes) and kept in
the cache. Exit 1: over budget, 3: no Prometheus.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvdiag.feeds.fleet.workers import cores
from tests.builders.series import seeded
from tests.fixtures.once import cache, made_once
from tests.integration.prometheus.server import PrometheusEnvError, programs, serving, write_history
from tests.integration.ray.ray_env import RayEnvError, ray_environment, ray_python, two_nodes
from tests.quality.bench.table import note

END_SECONDS = 1_795_132_800
GROUP = 50
"""Replicas whose history is written at once: promtool keeps a whole block in memory."""

LEAKING_EVERY = 100
LEAK_MIB_PER_HOUR = 200.0
TOTAL_MIB, RESERVED_MIB, USED_MIB = 81_559, 560, 74_000

BUDGET_SECONDS, BUDGET_BYTES = 120.0, 2**30
POLL_SECONDS = 0.2

SCALE, SCALE_HOURS = (1000, 4000), 6.0

CONFIG = (
    'vllm:cache_config_info{%s,engine="0",block_size="16",num_gpu_blocks="27001",cache_dtype="auto",'
    'gpu_memory_utilization="0.92",enable_prefix_caching="True",kv_cache_size_tokens="432000",'
    'kv_cache_max_concurrency="13.18359375"} 1 %d'
)


def _lines(replica: int, hours: float, step: int) -> Iterator[str]:
    """A replica's page and its GPU's, every `step` seconds: bursts of load on an idle server."""
    draw = seeded(f"replica {replica}")
    target = f'namespace="prod",pod="vllm-{replica:04d}",instance="10.{replica >> 8}.{replica & 255}.7:8000",job="vllm"'
    engine = f'{target},engine="0",model_name="llama"'
    node = replica // 8
    gpu = (
        f'namespace="gpu",pod="dcgm-{node}",instance="node-{node}:9400",job="dcgm",Hostname="node-{node}",'
        f'gpu="{replica % 8}",UUID="GPU-{replica:04d}",modelName="NVIDIA H100",exported_namespace="prod",'
        f'exported_pod="vllm-{replica:04d}"'
    )
    prompt = generated = 0
    running = 0
    for second in range(END_SECONDS - int(hours * 3600), END_SECONDS + 1, step):
        at = second + replica % step * 0.9
        if draw.random() < 0.2:
            running = draw.choice((0, 0, 4, 9, 16))
        usage = running * 0.0123
        prompt += running * 2000
        generated += running * 600
        grown = LEAK_MIB_PER_HOUR * (second - END_SECONDS + hours * 3600) / 3600 if replica % LEAKING_EVERY == 0 else 0
        used = min(USED_MIB + int(grown / 2) * 2, TOTAL_MIB - RESERVED_MIB)
        yield f"vllm:kv_cache_usage_perc{{{engine}}} {usage:.4f} {at}"
        yield f"vllm:num_requests_running{{{engine}}} {running} {at}"
        yield f"vllm:num_requests_waiting{{{engine}}} 0 {at}"
        yield f"vllm:num_preemptions_total{{{engine}}} 0 {at}"
        yield f"vllm:prompt_tokens_total{{{engine}}} {prompt} {at}"
        yield f"vllm:generation_tokens_total{{{engine}}} {generated} {at}"
        yield f"vllm:prefix_cache_queries_total{{{engine}}} {prompt} {at}"
        yield f"vllm:prefix_cache_hits_total{{{engine}}} {prompt // 3} {at}"
        yield CONFIG % (target, at)
        yield f"process_resident_memory_bytes{{{target}}} {3_000_000_000 + second % 977 * 4096} {at}"
        yield f"process_start_time_seconds{{{target}}} {END_SECONDS - 400_000} {at}"
        yield f"up{{{target}}} 1 {at}"
        yield f"DCGM_FI_DEV_FB_USED{{{gpu}}} {used} {at}"
        yield f"DCGM_FI_DEV_FB_FREE{{{gpu}}} {TOTAL_MIB - RESERVED_MIB - used} {at}"
        yield f"DCGM_FI_DEV_FB_RESERVED{{{gpu}}} {RESERVED_MIB} {at}"


def write_fleet(folder: Path, replicas: int, hours: float, step: int) -> None:
    """Write the history of a fleet for a Prometheus."""
    folder.mkdir()
    for first in range(0, replicas, GROUP):
        some = range(first, min(first + GROUP, replicas))
        write_history((line for replica in some for line in _lines(replica, hours, step)), folder / "data")
        sys.stderr.write(f"history of {some.stop} of {replicas} replicas written\n")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, peak resident bytes of all its processes on this side, their processor seconds, and what came out."""

    seconds: float
    peak_bytes: int
    processor_seconds: float
    by_worst: dict[str, int]


def _measured(url: str, hours: float, *how: str, python: str = sys.executable) -> Cost:
    """One diagnosis of the whole fleet."""
    command = [python, "-m", "kvdiag", "diagnose", "--prometheus", url, "--output", "json", *how]
    command += ["--end", str(END_SECONDS), "--window", f"{round(hours * 60)}m"]
    began = time.monotonic()
    peak = 0
    spent: dict[int, float] = {}
    with (
        tempfile.TemporaryFile() as printed,
        subprocess.Popen(command, stdout=printed, env=ray_environment()) as process,
    ):
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                family = [watched, *watched.children(recursive=True)]
                peak = max(peak, sum(one.memory_info().rss for one in family))
                spent |= {one.pid: sum(one.cpu_times()[:2]) for one in family}
            except psutil.Error:
                pass  # one of them has just ended
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - began
        printed.seek(0)
        by_worst: dict[str, int] = json.load(printed)["fleet"]["by_worst"]
    return Cost(seconds, peak, sum(spent.values()), by_worst)


def _ways(url: str, hours: float) -> dict[str, Cost]:
    """The fleet diagnosed in each way; Ray is left out where it cannot be had."""
    found = {"one worker": _measured(url, hours, "--workers", "1"), "all cores": _measured(url, hours)}
    try:
        python = str(ray_python())
    except RayEnvError as error:
        sys.stderr.write(f"fleet_speed: without Ray ({error})\n")
        return found
    with tempfile.TemporaryDirectory() as folder, two_nodes(Path(folder) / "log", max(cores() // 2, 1)) as cluster:
        found["Ray"] = _measured(url, hours, "--ray", cluster.address, python=python)
    return found


def main() -> int:
    """Measure, and print next to the budget."""
    given = [float(argument) for argument in sys.argv[1:]]
    try:
        programs()
    except PrometheusEnvError as error:
        sys.stderr.write(f"fleet_speed: not run: no Prometheus here ({error})\n")
        return 3
    if given:
        replicas, hours, step = int(given[0]), (given[1:2] or [24.0])[0], int((given[2:3] or [30.0])[0])
        cost = _fleet(replicas, hours, step)["all cores"]
        over = cost.seconds > BUDGET_SECONDS or cost.peak_bytes > BUDGET_BYTES
        return int((replicas, hours, step) == (1000, 24.0, 30) and over)
    small, large = (_fleet(replicas, SCALE_HOURS, 30) for replicas in SCALE)
    for replicas, costs in zip(SCALE, (small, large), strict=True):
        one = costs.pop("one worker")
        for way, cost in costs.items():
            name = f"fleet of {replicas:,}, {SCALE_HOURS:g} h: {way}"
            note(name, cost.seconds, one.seconds, than="one worker", unit="s")
    for way in small.keys() & large.keys():
        each = [costs[way].seconds / replicas * 1000.0 for replicas, costs in zip(SCALE, (small, large), strict=True)]
        note(f"fleet of {SCALE[1]:,}: each replica, {way}", each[1], each[0], than=f"of {SCALE[0]:,}", unit="ms")
    return 0


def _fleet(replicas: int, hours: float, step: int) -> dict[str, Cost]:
    """The costs of one fleet by each way, printed."""
    folder = made_once(
        cache() / f"fleet-{replicas}-{hours:g}h-{step}s", lambda target: write_fleet(target, replicas, hours, step)
    )
    with serving(folder / "data") as url:
        costs = _ways(url, hours)
    sys.stdout.write(f"{replicas} replicas, {hours:g} h, every {step} s: {costs['one worker'].by_worst}\n")
    for way, cost in costs.items():
        sys.stdout.write(
            f"  {way}: {cost.seconds:.1f} s, {costs['one worker'].seconds / cost.seconds:.2f} times as fast as one; "
            f"{cost.processor_seconds:.1f} s of processors and {cost.peak_bytes / 2**20:.0f} MiB at most in its own "
            "processes\n"
        )
        assert cost.by_worst == costs["one worker"].by_worst
    return costs


if __name__ == "__main__":
    sys.exit(main())
