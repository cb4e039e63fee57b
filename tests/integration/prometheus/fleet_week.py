"""A week of a small fleet, and a program that judges it round by round as the daemon does, at given moments.

`python -m tests.integration.prometheus.fleet_week FOLDER` keeps its state in the folder. It prints a line with the
verdicts that the folder has, and one for each round; a line on its standard input is the moment of a round and the
address to read.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvdiag.commands.options.prometheus_options import PrometheusOptions
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from kvdiag.feeds.fleet.fleet_round import FleetRound
from kvdiag.feeds.fleet.state_folder import StateFolder
from kvdiag.model.codec import to_plain
from tests.builders.series import seeded
from tests.integration.prometheus.histories import END_SECONDS, exporter, server
from tests.integration.prometheus.openmetrics import NEW_NAMES, OLD_NAMES, line

HOURS = 7.0 * 24.0
START_SECONDS = END_SECONDS - HOURS * 3600.0
WINDOW_SECONDS = 24.0 * 3600.0
SCRAPE_SECONDS = 60.0
TOTAL_MIB, USED_MIB, RESERVED_MIB = 81_559, 60_000, 560


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One replica: when it is there, in hours of the week, and what happens to it."""

    pod: str
    begin: float = 0.0
    end: float = HOURS
    leak_mib_per_hour: float = 0.0
    keeps_from: float = HOURS
    """From this hour on it keeps a KV block."""
    restarts_every: float = HOURS
    upgraded_at: float = 0.0
    """Until this hour its metrics have the names of vLLM 0.9."""
    silent: tuple[tuple[float, float], ...] = ()


FLEET = (
    Life(pod="steady"),
    Life(pod="grows", begin=40.0, end=100.0, leak_mib_per_hour=250.0),
    Life(pod="comes", begin=50.0, end=90.0),
    Life(pod="goes", end=34.0),
    Life(pod="keeps", keeps_from=110.0),
    Life(pod="restarts", restarts_every=31.0),
    Life(pod="upgraded", upgraded_at=80.0),
    Life(pod="silent", silent=((30.0, 33.0), (70.5, 72.0), (120.0, 131.0))),
)


def week() -> Iterator[str]:
    """The samples of all replicas."""
    for number, life in enumerate(FLEET):
        yield from _of(life, number)


def _of(life: Life, number: int) -> Iterator[str]:
    draw = seeded(life.pod)
    gpu = {**exporter("week", life.pod, node=f"node-{number}"), "gpu": "0", "UUID": f"GPU-{life.pod}"}
    state = {"job": "kube-state-metrics", "instance": "10.9.9.9:8080", "namespace": "week", "pod": life.pod}
    tokens = running = 0
    for minute in range(int(life.begin * 60.0), int(life.end * 60.0)):
        hour, at_seconds = minute / 60.0, START_SECONDS + SCRAPE_SECONDS * minute + number
        if any(begin <= hour < end for begin, end in life.silent):
            continue
        began = life.begin + (hour - life.begin) // life.restarts_every * life.restarts_every
        own = {**server("week", life.pod), "instance": f"10.0.{number}.{int(began) % 250}:8000"}
        tokens = 0 if hour == began else tokens + running * 900
        running = draw.choice((0, 0, 3, 8)) if draw.random() < 0.2 else running
        usage = min(running * 0.05 + (0.0002 if hour >= life.keeps_from else 0.0), 1.0)
        used = USED_MIB + int(life.leak_mib_per_hour * (hour - life.begin))
        old = hour < life.upgraded_at
        names: Mapping[str, str] = OLD_NAMES if old else NEW_NAMES
        figures = {
            "kv_usage_ratio": round(usage, 4),
            "requests_running": running,
            "requests_waiting": 0,
            "preemptions_total": 0,
            "prompt_tokens_total": tokens,
            "generation_tokens_total": tokens // 3,
        }
        for field, value in figures.items():
            yield line(names[field], {**own, "engine": "0", "model_name": "llama"}, value, at_seconds)
        config = {"engine": "0", "block_size": "16", "num_gpu_blocks": "8001", "gpu_memory_utilization": "0.92"}
        yield line("vllm:cache_config_info", {**own, **config}, 1, at_seconds)
        yield line("process_start_time_seconds", own, START_SECONDS + began * 3600.0 - 30.0, at_seconds)
        yield line("up", own, 1, at_seconds)
        for name, size in (("USED", used), ("FREE", TOTAL_MIB - RESERVED_MIB - used), ("RESERVED", RESERVED_MIB)):
            yield line(f"DCGM_FI_DEV_FB_{name}", gpu, size, at_seconds)
        image = f"vllm/vllm-openai:v0.{9 if old else 11}.0"
        yield line("kube_pod_container_info", {**state, "container": "vllm", "image": image}, 1, at_seconds)


def said(state: FleetRound) -> dict[str, Any]:
    """A state as one line of the program."""
    return {
        "verdicts": {one.key: to_plain(one.present) for one in state.verdicts},
        "as_of": {one.key: one.as_of_seconds for one in state.verdicts},
        "problem": state.problem,
        "samples": state.samples,
        "resident_bytes": psutil.Process().memory_info().rss,
    }


def main() -> int:
    """Judge at each moment that comes."""
    folder = StateFolder(Path(sys.argv[1]), {})
    url = ""
    feed = FleetFeed(
        lambda: PrometheusOptions(prometheus=url).access().source(), "", WINDOW_SECONDS, folder, cpu_seconds=1e9
    )
    sys.stdout.write(f"{json.dumps(said(feed.state))}\n")
    sys.stdout.flush()
    for text in sys.stdin:
        moment, url = json.loads(text)
        sys.stdout.write(f"{json.dumps(said(asyncio.run(feed.round(moment))))}\n")
        sys.stdout.flush()
    folder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
