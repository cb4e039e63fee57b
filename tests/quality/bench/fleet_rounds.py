"""What a fleet's daemon costs on a real Prometheus: the first read of a day, a round, and memory.

By hand: `python -m tests.quality.bench.fleet_rounds [REPLICAS]`; by default 1,000 replicas, a day, every 30 seconds:
the history of `fleet_speed`. Exit 1: over budget, 3: no Prometheus.
"""

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import psutil

from kvdiag.commands.options.prometheus_options import PrometheusOptions
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from kvdiag.feeds.fleet.state_folder import StateFolder
from tests.fixtures.once import cache, made_once
from tests.integration.prometheus.server import PrometheusEnvError, programs, serving
from tests.quality.bench.fleet_speed import END_SECONDS, POLL_SECONDS, write_fleet
from tests.quality.bench.table import note

FULL = 1000
HOURS = 23.0
ROUNDS = 6
EVERY_SECONDS = 300.0
BUDGET_FIRST_SECONDS, BUDGET_ROUND_SECONDS, BUDGET_BYTES = 60.0, 5.0, 256 * 2**20


def main() -> int:
    """Measure, and print next to the budget."""
    replicas = int(sys.argv[1]) if len(sys.argv) > 1 else FULL
    try:
        programs()
    except PrometheusEnvError as error:
        sys.stderr.write(f"fleet_rounds: not run: no Prometheus here ({error})\n")
        return 3
    folder = made_once(cache() / f"fleet-{replicas}-24h-30s", lambda target: write_fleet(target, replicas, 24.0, 30))
    with serving(folder / "data") as url, tempfile.TemporaryDirectory() as state, Peak() as peak:
        kept = StateFolder(Path(state), {})
        feed = FleetFeed(PrometheusOptions(prometheus=url).access().source, "", HOURS * 3600.0, kept, workers=None)
        began, spent = time.monotonic(), processor_seconds()
        asyncio.run(feed.round(END_SECONDS - ROUNDS * EVERY_SECONDS))
        first_seconds, first_cpu = time.monotonic() - began, processor_seconds() - spent
        first_bytes, peak.bytes = peak.bytes, 0
        costs, judged = [], []
        for number in range(ROUNDS - 1, -1, -1):
            spent = time.process_time()
            found = asyncio.run(feed.round(END_SECONDS - number * EVERY_SECONDS))
            costs.append(time.process_time() - spent)
            judged.append(found.judged)
        size = sum(file.stat().st_size for file in Path(state).iterdir())
        kept.close()
    sys.stdout.write(
        f"{replicas} replicas, {HOURS:g} h, every 30 s\n"
        f"  first read: {first_seconds:.1f} s (budget {BUDGET_FIRST_SECONDS:g}), {first_cpu:.1f} s of processors, "
        f"{first_bytes / 2**20:.0f} MiB of all processes together\n"
        f"  round: {statistics.median(costs):.2f} s of a processor (budget {BUDGET_ROUND_SECONDS:g}), "
        f"at most {max(costs):.2f}; {statistics.median(judged):.0f} of them judged again\n"
        f"  resident: {peak.bytes / 2**20:.0f} MiB at most (budget {BUDGET_BYTES >> 20}); "
        f"on disk {size / 2**20:.0f} MiB\n"
    )
    if replicas != FULL:
        return 0
    note("fleet of 1,000: first read of 23 h", first_seconds, BUDGET_FIRST_SECONDS, than="budget", unit="s")
    note("fleet of 1,000: CPU of a round", statistics.median(costs), BUDGET_ROUND_SECONDS, than="budget", unit="s")
    note("fleet of 1,000: resident memory", peak.bytes / 2**20, BUDGET_BYTES / 2**20, than="budget", unit="MiB")
    over = first_seconds > BUDGET_FIRST_SECONDS or statistics.median(costs) > BUDGET_ROUND_SECONDS
    return int(over or peak.bytes > BUDGET_BYTES)


def processor_seconds() -> float:
    """What this process and those that have ended have used."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class Peak:
    """The most memory that this process and its workers have had at once, without the Prometheus."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        """Watch from now on."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._over.wait(POLL_SECONDS):
            with contextlib.suppress(psutil.Error):
                workers = [one for one in own.children() if one.name() != "prometheus"]
                self.bytes = max(self.bytes, sum(one.memory_info().rss for one in (own, *workers)))


if __name__ == "__main__":
    sys.exit(main())
